//! What a path names.

use std::fs;
use std::io;
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
