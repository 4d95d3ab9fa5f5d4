//! The symbol table of an ELF file.

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;

use object::{Object, ObjectSection, ObjectSymbol, ReadCache, ReadRef, SectionKind, SymbolKind};
use thiserror::Error;

use super::table::RawSymbol;

/// The most symbols that are read; a vmlinux has some 200,000.
const MOST: usize = 1 << 23;

/// The most that is read of a file at once, in bytes: what it says of itself is not trusted. A
/// table of as many symbols as are read has less.
const MOST_AT_ONCE: u64 = 256 << 20;

/// The most that is read of a file in all, in bytes: pieces that overlap are kept one by one.
/// As many symbols as are read have less, with names of 100 bytes.
const MOST_IN_ALL: u64 = 1 << 30;

/// The most that is looked through for the end of a name, in bytes.
const MOST_OF_NAME: u64 = 4096;

/// A file that is read piece by piece.
#[derive(Debug)]
pub(in crate::profile) struct ElfData {
    pieces: ReadCache<File>,
    /// How much more may be read.
    left: Cell<u64>,
}

impl ElfData {
    pub(in crate::profile) fn new(file: File) -> Self {
        Self {
            pieces: ReadCache::new(file),
            left: Cell::new(MOST_IN_ALL),
        }
    }

    pub(in crate::profile) fn into_inner(self) -> File {
        self.pieces.into_inner()
    }

    /// It asks for more than is read.
    pub(in crate::profile) fn is_used_up(&self) -> bool {
        self.left.get() == 0
    }

    fn charge(&self, bytes: u64) -> Result<(), ()> {
        let left = self.left.get().checked_sub(bytes);
        self.left.set(left.unwrap_or(0));
        left.map(|_| ()).ok_or(())
    }
}

impl<'data> ReadRef<'data> for &'data ElfData {
    fn len(self) -> Result<u64, ()> {
        (&self.pieces).len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'data [u8], ()> {
        if size > MOST_AT_ONCE {
            return Err(());
        }
        self.charge(size)?;
        (&self.pieces).read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'data [u8], ()> {
        let most = range.end.saturating_sub(range.start).min(MOST_OF_NAME);
        if self.is_used_up() {
            return Err(());
        }
        let found = (&self.pieces).read_bytes_at_until(range, delimiter);
        self.charge(found.map_or(most, |bytes| bytes.len() as u64 + 1))?;
        found
    }
}

/// Which of a file's symbol tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::profile) enum Table {
    /// The one that stripping takes away.
    Full,
    /// That of what other files use.
    Dynamic,
}

/// An ELF file without usable symbols. Prints as one line without the file's
/// name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ElfError {
    /// It cannot be read as ELF.
    #[error("damaged ELF file: {0}")]
    Damaged(String),
    /// It has no symbol table.
    #[error(
        "it has no symbol table: it was stripped, or is a compressed kernel; give the vmlinux of \
         the build, its System.map, or a copy of the guest's /proc/kallsyms"
    )]
    Stripped,
    /// It has more symbols than are read.
    #[error("it has more symbols than are read: {0}")]
    TooMany(usize),
    /// Its tables and names are longer than is read.
    #[error("its symbols are longer than is read: 1 GiB")]
    TooLong,
}

/// The symbols of an ELF file.
///
/// # Errors
/// [`ElfError`] says why there are none.
pub(super) fn read_file(file: File) -> Result<Vec<RawSymbol>, ElfError> {
    let data = ElfData::new(file);
    let symbols = read(&data)?;
    if data.is_used_up() {
        return Err(ElfError::TooLong);
    }
    Ok(symbols)
}

/// The symbols of the ELF file in `data`.
///
/// # Errors
/// [`ElfError`] says why there are none.
pub(super) fn read<'data, R: ReadRef<'data>>(data: R) -> Result<Vec<RawSymbol>, ElfError> {
    let file = object::File::parse(data).map_err(|error| ElfError::Damaged(error.to_string()))?;
    of_program(&file, Table::Full, MOST)
}

/// At most `most` symbols of a table.
///
/// # Errors
/// [`ElfError`] says why there are none.
pub(in crate::profile) fn of_program<'data, R: ReadRef<'data>>(
    file: &object::File<'data, R>,
    table: Table,
    most: usize,
) -> Result<Vec<RawSymbol>, ElfError> {
    let found = match table {
        Table::Full => file.symbols(),
        Table::Dynamic => file.dynamic_symbols(),
    };
    let mut symbols = Vec::new();
    for symbol in found {
        if symbols.len() >= most {
            return Err(ElfError::TooMany(most));
        }
        // Only what has a section has a place.
        let Some(section) = symbol.section_index() else {
            continue;
        };
        let Ok(name) = symbol.name() else {
            continue;
        };
        let in_code = || {
            let section = file.section_by_index(section);
            section.is_ok_and(|section| section.kind() == SectionKind::Text)
        };
        let code = match symbol.kind() {
            SymbolKind::Text => true,
            // Assembler code has labels without a type.
            SymbolKind::Unknown | SymbolKind::Label => in_code(),
            SymbolKind::Data => false,
            _ => continue,
        };
        if name.is_empty() || name.chars().any(char::is_control) {
            continue;
        }
        symbols.push(RawSymbol {
            address: symbol.address(),
            size: symbol.size(),
            name: name.to_owned(),
            module: None,
            rank: rank(&symbol),
            code,
        });
    }
    if symbols.iter().any(|symbol| symbol.code) {
        Ok(symbols)
    } else {
        Err(ElfError::Stripped)
    }
}

/// A function before a label, a global symbol before a weak and a local one.
fn rank<'data>(symbol: &impl ObjectSymbol<'data>) -> u8 {
    let typed = match symbol.kind() {
        SymbolKind::Text => 3,
        _ => 0,
    };
    let scope = match (symbol.is_weak(), symbol.is_global()) {
        (true, _) => 1,
        (false, true) => 2,
        (false, false) => 0,
    };
    typed + scope
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Pieces that overlap are kept one by one, so the file's length bounds nothing.
    #[test]
    fn no_more_is_read_than_there_is_room_for() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&crate::profile::test_elf::elf(0x1000, &[0xc3; 600], &[]))
            .unwrap();
        let data = ElfData {
            pieces: ReadCache::new(file),
            left: Cell::new(1000),
        };
        let read = |at: u64, size| (&data).read_bytes_at(at, size).is_ok();
        assert!(read(0, 500) && read(1, 400));
        assert!(!data.is_used_up());
        assert!(!read(2, 400), "only 100 are left");
        assert!(data.is_used_up() && !read(0, 1), "nor is anything else");
        assert_eq!((&data).read_bytes_at_until(0..100, 0), Err(()));
    }

    /// A name costs what it has, one without an end as far as it was looked for.
    #[test]
    fn names_are_counted() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[b"name\0".as_slice(), &[1; 300]].concat())
            .unwrap();
        let data = ElfData {
            pieces: ReadCache::new(file),
            left: Cell::new(1000),
        };
        assert_eq!(
            (&data).read_bytes_at_until(0..300, 0),
            Ok(b"name".as_slice())
        );
        assert_eq!(data.left.get(), 995);
        assert_eq!((&data).read_bytes_at_until(5..305, 0), Err(()));
        assert_eq!(data.left.get(), 695);
    }
}
