//! What a path names.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// What is at `path` instead of a plain file.
///
/// # Errors
/// There is nothing.
pub fn no_file(path: &Path) -> io::Result<Option<&'static str>> {
    Ok(match fs::metadata(path)?.file_type() {
        k if k.is_dir() => Some("a folder"),
        k if k.is_fifo() => Some("a named pipe"),
        k if k.is_socket() => Some("a socket"),
        k if k.is_char_device() || k.is_block_device() => Some("a device"),
        _ => None,
    })
}

/// The folder that a path's last name is in.
#[must_use]
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// The text of a file of `most` bytes at most.
///
/// # Errors
/// It cannot be read, is no text, or is larger ([`io::ErrorKind::FileTooLarge`]).
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    let mut text = String::new();
    let read = File::open(path)?.take(most + 1).read_to_string(&mut text)?;
    if read as u64 > most {
        let why = format!("it is larger than {} KiB", most >> 10);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(text)
}
