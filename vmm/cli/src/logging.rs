//! Log lines: how many, and where to.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use env_logger::{Builder, Target};
use log::LevelFilter;

use crate::exit::UserError;

/// Starts logging at a verbosity of 0 (warnings) to 3 (everything), to `file`
/// or to standard error. `RUST_LOG` refines it as usual.
///
/// # Errors
/// The file cannot be made.
pub fn start(verbose: u8, file: Option<&Path>) -> Result<(), UserError> {
    let level = match verbose {
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
    if let Some(path) = file {
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
