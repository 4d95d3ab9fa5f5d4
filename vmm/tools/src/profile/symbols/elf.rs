//! The symbol table of an ELF file.

use object::{Object, ObjectSection, ObjectSymbol, ReadRef, SectionKind, SymbolKind};
use thiserror::Error;

use super::table::RawSymbol;

/// The most symbols that are read; a vmlinux has some 200,000.
const MOST: usize = 1 << 23;

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
    /// It has more symbols than any kernel.
    #[error("it has more than {MOST} symbols, which no kernel has")]
    TooMany,
}

/// The symbols of the ELF file in `data`.
///
/// # Errors
/// [`ElfError`] says why there are none.
pub(super) fn read<'data, R: ReadRef<'data>>(data: R) -> Result<Vec<RawSymbol>, ElfError> {
    let file = object::File::parse(data).map_err(|error| ElfError::Damaged(error.to_string()))?;
    let mut symbols = Vec::new();
    for symbol in file.symbols() {
        if symbols.len() >= MOST {
            return Err(ElfError::TooMany);
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
