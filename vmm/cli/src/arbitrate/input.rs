//! Reading a script.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use arbiter_lab::script::{Script, ScriptError};
use thiserror::Error;

/// The longest script. A longer file is none.
pub(super) const LONGEST: u64 = 1 << 20;

/// A script that cannot be had.
#[derive(Debug, Error)]
pub(super) enum InputError {
    #[error("{name}: cannot be read: {cause}")]
    Read { name: String, cause: io::Error },
    #[error("{name}: it is longer than {mib} MiB, which no such file is")]
    TooLong { name: String, mib: u64 },
    #[error("{name}: it is not UTF-8 text")]
    NotText { name: String },
    #[error("{name}, {error}")]
    Script { name: String, error: ScriptError },
}

/// Reads the script in a file, or on standard input if that is `-`.
pub(super) fn read(path: &Path) -> Result<Script, InputError> {
    let (name, text) = text(path, LONGEST)?;
    text.parse()
        .map_err(|error| InputError::Script { name, error })
}

/// Reads the text of a file, or standard input if that is `-`, and its name for errors.
pub(super) fn text(path: &Path, longest: u64) -> Result<(String, String), InputError> {
    if path == Path::new("-") {
        return take("standard input", io::stdin().lock(), longest);
    }
    let name = path.display().to_string();
    match File::open(path) {
        Ok(file) => take(&name, file, longest),
        Err(cause) => Err(InputError::Read {
            name,
            cause: plain(cause, path),
        }),
    }
}

/// An error without the number that the standard library appends.
fn plain(cause: io::Error, path: &Path) -> io::Error {
    let what = match cause.kind() {
        io::ErrorKind::NotFound => match near(path) {
            Some(near) => format!("there is no such file (did you mean {}?)", near.display()),
            None => "there is no such file".to_owned(),
        },
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => return cause,
    };
    io::Error::new(cause.kind(), what)
}

/// The same name with the suffix that scripts have, if there is such a file.
fn near(path: &Path) -> Option<PathBuf> {
    let with_suffix = path.with_extension("script");
    (with_suffix != path && with_suffix.is_file()).then_some(with_suffix)
}

fn take(name: &str, input: impl Read, longest: u64) -> Result<(String, String), InputError> {
    let name = name.to_owned();
    let mut bytes = Vec::new();
    // One byte more than allowed shows a text that is too long from one that
    // just fits.
    if let Err(cause) = input.take(longest + 1).read_to_end(&mut bytes) {
        return Err(InputError::Read { name, cause });
    }
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > longest {
        let mib = longest >> 20;
        return Err(InputError::TooLong { name, mib });
    }
    match String::from_utf8(bytes) {
        Err(_) => Err(InputError::NotText { name }),
        Ok(text) => Ok((name, text)),
    }
}
