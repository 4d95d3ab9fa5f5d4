//! The functions of an ELF file, by where they are in it.

use std::collections::BTreeMap;

use gimli::{BaseAddresses, CieOrFde, EhFrame, LittleEndian, UnwindSection};
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{
    Object, ObjectSection, ObjectSymbol, ObjectSymbolTable, RelocationTarget, SectionKind,
    SymbolKind,
};
use symbol_names::demangled_whole;

/// Functions of a file that are known; a browser has half a million.
const MOST: usize = 1 << 22;
/// Bytes of an entry of a table of links to other files, and what its name ends with.
const LINK: u64 = 16;
const LINKED: &str = "@plt";

/// A function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// As the file has it; of one without a symbol none.
    pub(crate) name: Option<String>,
}

/// A part of the file that is loaded: where it is in the file, and the address that it was linked
/// for.
#[derive(Debug, Clone, Copy)]
struct Segment {
    offset: u64,
    len: u64,
    address: u64,
}

/// The functions of a file.
#[derive(Debug, Clone, Default)]
pub(crate) struct Symbols {
    segments: Vec<Segment>,
    /// In ascending order, apart from each other.
    functions: Vec<Known>,
    /// Its build id; empty without one.
    build_id: Vec<u8>,
}

/// What covers a place in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Covers {
    /// Bytes from its beginning to the place.
    pub(crate) before: u64,
    /// Its bytes.
    pub(crate) len: u64,
    /// The place of its beginning in the file.
    pub(crate) offset: u64,
    /// As in the source.
    pub(crate) name: Option<String>,
}

impl Symbols {
    /// Of an ELF file for x86-64; of anything else there are none.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let Ok(file) = ElfFile64::<LittleEndianElf>::parse(bytes) else {
            return Self::default();
        };
        let endian = file.endian();
        let headers = file.elf_header().program_headers(endian, bytes);
        let segments = headers.unwrap_or_default().iter();
        let segments = segments
            .filter(|header| header.p_type(endian) == object::elf::PT_LOAD)
            .map(|header| Segment {
                offset: header.p_offset(endian),
                len: header.p_filesz(endian),
                address: header.p_vaddr(endian),
            });
        let mut found = symbols(&file);
        links(&file, &mut found);
        described(&file, &mut found);
        Self {
            segments: segments.collect(),
            functions: apart(found),
            build_id: file.build_id().ok().flatten().unwrap_or_default().to_vec(),
        }
    }

    pub(crate) fn build_id(&self) -> &[u8] {
        &self.build_id
    }

    /// Whether it is a file with this build id.
    pub(crate) fn is(&self, build_id: &[u8]) -> bool {
        self.build_id == build_id
    }

    /// What covers the byte at `offset` in the file: a function, or what is between two.
    pub(crate) fn at(&self, offset: u64) -> Option<Covers> {
        let inside = |segment: &&Segment| offset.wrapping_sub(segment.offset) < segment.len;
        let segment = self.segments.iter().find(inside)?;
        let address = segment.address.wrapping_add(offset - segment.offset);
        let place = self
            .functions
            .partition_point(|function| function.start <= address);
        let before = place.checked_sub(1).map(|place| &self.functions[place]);
        let last = segment.address.saturating_add(segment.len);
        let (start, end, name) = match before {
            Some(known) if address < known.end => {
                (known.start, known.end, known.name.as_deref().map(shown))
            }
            _ => {
                let start = before.map_or(0, |before| before.end);
                let next = self.functions.get(place);
                (start, next.map_or(u64::MAX, |next| next.start), None)
            }
        };
        // Neither reaches out of what is loaded together.
        let (start, end) = (start.max(segment.address), end.min(last));
        let before = address.checked_sub(start)?;
        Some(Covers {
            before,
            len: end.checked_sub(start)?,
            offset: offset.checked_sub(before)?,
            name,
        })
    }
}

/// The name of a function as its source has it.
fn shown(name: &str) -> String {
    let (name, linked) = match name.strip_suffix(LINKED) {
        Some(name) => (name, LINKED),
        None => (name, ""),
    };
    match demangled_whole(name) {
        Some(name) => format!("{name}{linked}"),
        None => format!("{name}{linked}"),
    }
}

type LittleEndianElf = object::LittleEndian;
type Elf<'a> = ElfFile64<'a, LittleEndianElf>;
/// By the beginning: how good the name is, the end, and the name.
type Found = BTreeMap<u64, (u8, u64, Option<String>)>;

fn add(found: &mut Found, start: u64, new: (u8, u64, Option<String>)) {
    if found.len() >= MOST {
        return;
    }
    let known = found.entry(start).or_insert_with(|| new.clone());
    // Of names that are as good the first in the alphabet: the order of tables is nobody's.
    let better = new.0 > known.0 || new.0 == known.0 && new.2 < known.2;
    if better {
        *known = new;
    }
}

/// Of both tables of symbols.
fn symbols(file: &Elf<'_>) -> Found {
    let mut found = Found::new();
    for symbol in file.symbols().chain(file.dynamic_symbols()) {
        let in_code = || {
            let section = symbol.section_index()?;
            let section = file.section_by_index(section).ok()?;
            Some(section.kind() == SectionKind::Text)
        };
        let rank = match symbol.kind() {
            SymbolKind::Text => 3,
            // Assembler code has labels without a type.
            SymbolKind::Label | SymbolKind::Unknown => 0,
            _ => continue,
        };
        let Some(Ok(name)) = in_code().unwrap_or(false).then(|| symbol.name()) else {
            continue;
        };
        if name.is_empty() || name.chars().any(char::is_control) {
            continue;
        }
        let scope = match (symbol.is_weak(), symbol.is_global()) {
            (true, _) => 1,
            (false, true) => 2,
            (false, false) => 0,
        };
        // A symbol without a size ends where the next begins.
        let end = symbol.address().saturating_add(symbol.size());
        let new = (10 + rank + scope, end, Some(name.to_owned()));
        add(&mut found, symbol.address(), new);
    }
    found
}

/// The entries by which other files' functions are called: `name@plt`.
fn links(file: &Elf<'_>, found: &mut Found) {
    let names = linked(file);
    for section in file.sections() {
        let bytes = match section.name() {
            Ok(".plt.got") => 8,
            Ok(name) if name.starts_with(".plt") => LINK,
            _ => continue,
        };
        let data = section.data().unwrap_or_default();
        for (at, entry) in (section.address()..)
            .step_by(usize::try_from(bytes).unwrap_or(16))
            .zip(data.chunks(usize::try_from(bytes).unwrap_or(16)))
        {
            let name = slot(at, entry).and_then(|slot| names.get(&slot));
            if let Some(name) = name {
                let end = at.saturating_add(bytes);
                add(found, at, (30, end, Some(format!("{name}{LINKED}"))));
            }
        }
    }
}

/// The word that an entry jumps by: `jmp [rip + displacement]`.
fn slot(at: u64, entry: &[u8]) -> Option<u64> {
    let place = entry
        .windows(6)
        .position(|bytes| bytes[..2] == [0xff, 0x25])?;
    let displacement = entry.get(place + 2..place + 6)?.try_into().ok()?;
    let displacement = i64::from(i32::from_le_bytes(displacement));
    let next = at.wrapping_add(place as u64 + 6);
    Some(next.wrapping_add_signed(displacement))
}

/// The functions of other files, by the word that their address is put into.
fn linked(file: &Elf<'_>) -> BTreeMap<u64, String> {
    let mut names = BTreeMap::new();
    let Some((relocations, table)) = file.dynamic_relocations().zip(file.dynamic_symbol_table())
    else {
        return names;
    };
    for (at, relocation) in relocations.take(MOST) {
        let RelocationTarget::Symbol(symbol) = relocation.target() else {
            continue;
        };
        let name = table.symbol_by_index(symbol);
        if let Ok(name) = name.and_then(|symbol| symbol.name().map(str::to_owned))
            && !name.is_empty()
            && !name.chars().any(char::is_control)
        {
            names.insert(at, name);
        }
    }
    names
}

/// What tables for exceptions describe: the functions of a file whose symbols were stripped.
fn described(file: &Elf<'_>, found: &mut Found) {
    let Some(section) = file.section_by_name(".eh_frame") else {
        return;
    };
    let data = section.data().unwrap_or_default();
    let frames = EhFrame::new(data, LittleEndian);
    let mut bases = BaseAddresses::default().set_eh_frame(section.address());
    if let Some(text) = file.section_by_name(".text") {
        bases = bases.set_text(text.address());
    }
    let mut entries = frames.entries(&bases);
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(partial) = entry else {
            continue;
        };
        let Ok(described) = partial.parse(EhFrame::cie_from_offset) else {
            continue;
        };
        let start = described.initial_address();
        let end = start.saturating_add(described.len());
        add(found, start, (1, end, None));
    }
}

/// Functions that do not overlap: one ends where the next begins at the latest.
fn apart(mut found: Found) -> Vec<Known> {
    let mut until = 0;
    // A label in a function is a part of it, and so is what is described there on its own.
    found.retain(|start, (_, end, name)| {
        let inside = *start < until && (name.is_none() || end == start);
        until = until.max(*end);
        !inside
    });
    let mut functions: Vec<Known> = Vec::new();
    let mut next = found.keys().copied().skip(1).collect::<Vec<u64>>();
    next.push(u64::MAX);
    for ((start, (_, end, name)), next) in found.into_iter().zip(next) {
        let end = if end == start { next } else { end.min(next) };
        if end > start {
            functions.push(Known { start, end, name });
        }
    }
    functions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(start: u64, end: u64, name: Option<&str>) -> Known {
        Known {
            start,
            end,
            name: name.map(str::to_owned),
        }
    }

    #[test]
    fn functions_are_apart() {
        let mut found = Found::new();
        for (start, rank, end, name) in [
            (0x10, 13, 0x20, Some("first")),
            (0x10, 12, 0x20, Some("alias")),
            (0x18, 1, 0x20, None),
            (0x20, 1, 0x30, None),
            (0x20, 13, 0x28, Some("second")),
            (0x40, 10, 0x40, Some("label")),
            (0x50, 13, 0x90, Some("long")),
            (0x60, 13, 0x70, Some("inner")),
        ] {
            add(&mut found, start, (rank, end, name.map(str::to_owned)));
        }
        let expected = [
            known(0x10, 0x20, Some("first")),
            known(0x20, 0x28, Some("second")),
            known(0x40, 0x50, Some("label")),
            known(0x50, 0x60, Some("long")),
            known(0x60, 0x70, Some("inner")),
        ];
        assert_eq!(apart(found), expected);
    }

    #[test]
    fn an_entry_jumps_by_its_word() {
        // ENDBR64; JMP [RIP+0x2f76]; NOP.
        let entry = [
            0xf3, 0x0f, 0x1e, 0xfa, 0xff, 0x25, 0x76, 0x2f, 0, 0, 0x66, 0x0f, 0x1f, 0x44, 0, 0,
        ];
        assert_eq!(slot(0x1050, &entry), Some(0x1050 + 10 + 0x2f76));
        assert_eq!(slot(0x1050, &[0x90; 16]), None);
    }

    #[test]
    fn a_file_of_this_machine_has_its_functions() {
        let own = std::env::current_exe().expect("a path");
        let bytes = std::fs::read(own).expect("a file");
        let symbols = Symbols::of(&bytes);
        let names: Vec<&str> = symbols
            .functions
            .iter()
            .filter_map(|function| function.name.as_deref())
            .collect();
        assert!(
            names
                .iter()
                .any(|name| name.contains("an_entry_jumps_by_its_word"))
        );
        let all = symbols.functions.windows(2);
        all.for_each(|two| assert!(two[0].end <= two[1].start));
        let one = symbols
            .functions
            .iter()
            .find(|one| one.end - one.start > 32)
            .expect("one");
        let segment = symbols.segments.iter();
        let mut segment = segment.filter(|part| one.start.wrapping_sub(part.address) < part.len);
        let segment = segment.next().expect("it is loaded");
        let offset = one.start - segment.address + segment.offset;
        let covers = symbols.at(offset + 7).expect("it is covered");
        assert_eq!((covers.before, covers.offset), (7, offset));
        assert_eq!(covers.name, one.name.as_deref().map(shown));
    }

    #[test]
    fn what_is_no_elf_file_has_none() {
        for bytes in [&b""[..], b"\x7fELF", b"#!/bin/sh\n", &[0x7f; 4096]] {
            assert_eq!(Symbols::of(bytes).at(0), None);
        }
    }
}
