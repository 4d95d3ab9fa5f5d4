//! Names for addresses of a guest's kernel.
//!
//! Three files have them: the ELF file of the kernel (`vmlinux`), the
//! `System.map` beside it, and the text of the guest's own `/proc/kallsyms`.
//! The first two say where the kernel was linked; a kernel that moved itself
//! (KASLR) runs elsewhere, by an offset that the caller gives. The third says
//! where the kernel really is, its modules included.

pub(super) mod elf;
mod table;
mod text;

pub use elf::ElfError;
pub use table::{Found, RawSymbol, SymbolIndex, SymbolTable};
pub use text::{TextError, parse};

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// The longest text of symbols; that of a kernel with all its modules has some
/// 20 MiB.
const LONGEST_TEXT: u64 = 256 << 20;

/// By how much a kernel has moved, as somebody types it: a hexadecimal number, which may be
/// negative: then it is below by so much.
///
/// # Errors
/// It is no such number; the text says what is wanted.
pub fn offset(text: &str) -> Result<u64, String> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let digits = digits.strip_prefix("0x").unwrap_or(digits);
    let plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = plain
        .then(|| u64::from_str_radix(digits, 16).ok())
        .flatten();
    match number {
        Some(number) if negative => Ok(number.wrapping_neg()),
        Some(number) => Ok(number),
        None => Err("give a hexadecimal number such as 0x1a000000".to_owned()),
    }
}

/// A file of symbols that cannot be used.
#[derive(Debug, Error)]
pub enum SymbolFileError {
    /// It cannot be read.
    #[error("{}: cannot be read: {cause}", path.display())]
    Read {
        path: PathBuf,
        /// Why; in the text already.
        cause: io::Error,
    },
    /// It is an ELF file without symbols.
    #[error("{}: {error}", path.display())]
    Elf {
        path: PathBuf,
        /// What is wrong with it.
        error: ElfError,
    },
    /// It is no ELF file, and no text of symbols.
    #[error("{}: {error}", path.display())]
    Text {
        path: PathBuf,
        /// What is wrong with it.
        error: TextError,
    },
    /// It is too long for a text of symbols.
    #[error("{}: it is longer than 256 MiB, which no System.map or kallsyms is", path.display())]
    TooLong { path: PathBuf },
}

/// The symbols of the file at `path`, of a kernel that runs `offset` bytes above
/// the addresses in the file (modulo 2^64; 0 where it did not move, and for the
/// guest's own kallsyms).
///
/// # Errors
/// [`SymbolFileError`] names the file, what is wrong, and what to do.
pub fn load(path: &Path, offset: u64) -> Result<SymbolTable, SymbolFileError> {
    Ok(SymbolTable::new(raw(path)?, offset))
}

/// The symbols of the file at `path` as they stand there, with all names of an address.
///
/// # Errors
/// [`SymbolFileError`] names the file, what is wrong, and what to do.
pub(super) fn raw(path: &Path) -> Result<Vec<RawSymbol>, SymbolFileError> {
    let read = |cause| SymbolFileError::Read {
        path: path.to_owned(),
        cause,
    };
    let mut file = File::open(path).map_err(read)?;
    let mut begin = Vec::new();
    file.by_ref()
        .take(4)
        .read_to_end(&mut begin)
        .map_err(read)?;
    file.rewind().map_err(read)?;
    if begin == *b"\x7fELF" {
        let elf = |error| SymbolFileError::Elf {
            path: path.to_owned(),
            error,
        };
        // Of a vmlinux with debug information only the symbol table is read.
        elf::read_file(file).map_err(elf)
    } else {
        let mut bytes = Vec::new();
        let mut limited = file.take(LONGEST_TEXT + 1);
        limited.read_to_end(&mut bytes).map_err(read)?;
        if bytes.len() as u64 > LONGEST_TEXT {
            return Err(SymbolFileError::TooLong {
                path: path.to_owned(),
            });
        }
        text::parse(&bytes).map_err(|error| SymbolFileError::Text {
            path: path.to_owned(),
            error,
        })
    }
}

#[cfg(test)]
mod tests;
