//! Small files of the kernel, and an error that names them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A file that could not be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot {action}: {why}", .path.display())]
pub struct FileError {
    /// The file or folder.
    pub path: PathBuf,
    /// What was to be done with it: `read`, `understand`, `write` or `remove`.
    pub action: &'static str,
    /// Why that failed. `InvalidData` says that the content is not what it should be.
    pub why: io::Error,
}

impl FileError {
    /// Makes an error of `action` on `path`, for `map_err`.
    pub(crate) fn of(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |why| FileError {
            path: path.to_owned(),
            action,
            why,
        }
    }

    pub(crate) fn damaged(path: &Path, content: &str) -> Self {
        let start: String = content.chars().take(40).collect();
        let why = io::Error::new(io::ErrorKind::InvalidData, format!("it holds {start:?}"));
        FileError::of(path, "understand")(why)
    }

    /// Whether the file does not exist.
    pub fn is_missing(&self) -> bool {
        self.why.kind() == io::ErrorKind::NotFound
    }
}

/// The file's text without the white space around it. What is not UTF-8 is replaced.
pub(crate) fn text(path: &Path) -> Result<String, FileError> {
    let bytes = fs::read(path).map_err(FileError::of(path, "read"))?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// The file's one value.
pub(crate) fn value<T: FromStr>(path: &Path) -> Result<T, FileError> {
    let text = text(path)?;
    text.parse().map_err(|_| FileError::damaged(path, &text))
}

/// `None` where the file does not exist.
pub(crate) fn optional<T>(result: Result<T, FileError>) -> Result<Option<T>, FileError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error),
    }
}
