//! Log lines: how many, and where to.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use env_logger::{Builder, Target};
use log::LevelFilter;

use crate::exit::UserError;

/// How many log lines there are, and where they go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// 0: warnings, 1: information, 2: debugging, 3: everything.
    pub verbose: u8,
    /// Where log lines go instead of standard error.
    pub file: Option<PathBuf>,
}

/// Starts logging. `RUST_LOG` refines it as usual.
///
/// # Errors
/// The file cannot be made.
pub fn start(options: &LogOptions) -> Result<(), UserError> {
    let level = match options.verbose {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    let mut builder = Builder::new();
    builder.filter_level(level).parse_default_env();
    builder.format(|out, record| {
        let level = record.level().as_str().to_ascii_lowercase();
        writeln!(out, "umpire: {level}: {}", record.args())
    });
    if let Some(path) = &options.file {
        let file = File::create(path).map_err(|error| {
            UserError::bad_input(format!(
                "--log-file: cannot create {}: {error}",
                path.display()
            ))
        })?;
        builder.target(Target::Pipe(Box::new(file)));
    }
    // A second start, as tests do it, keeps the first logger.
    let _ = builder.try_init();
    Ok(())
}
