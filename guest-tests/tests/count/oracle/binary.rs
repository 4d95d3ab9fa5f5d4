//! The functions of a file, so that two who name them otherwise are compared.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::Range;
use std::path::Path;

use object::elf::PF_X;
use object::{
    Object, ObjectSection, ObjectSegment, ObjectSymbol, SectionKind, SegmentFlags, SymbolKind,
};

/// What starts where, in one file.
#[derive(Default)]
pub(super) struct Binary {
    /// The name of each start: of several the first in the alphabet.
    starts: BTreeMap<u64, String>,
    places: HashMap<String, u64>,
    /// Its entries for functions of other files.
    plts: Vec<Range<u64>>,
}

impl Binary {
    /// Of a file, in which functions without a name start at `unnamed` as well.
    pub(super) fn of(path: &Path, unnamed: impl Iterator<Item = u64>) -> Self {
        let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = object::File::parse(&*bytes).expect("an ELF file");
        for segment in file.segments() {
            let is_code =
                matches!(segment.flags(), SegmentFlags::Elf { p_flags } if p_flags & PF_X != 0);
            // So a place in the file is an address in it.
            assert!(!is_code || segment.address() == segment.file_range().0);
        }
        let mut binary = Self::default();
        for start in unnamed {
            binary.starts.insert(start, format!("[{start:#x}]"));
        }
        let symbols = file.symbols().chain(file.dynamic_symbols());
        for symbol in symbols.filter(|symbol| symbol.is_definition()) {
            let section = symbol.section_index();
            let section = section.and_then(|index| file.section_by_index(index).ok());
            let is_code = section.is_some_and(|section| section.kind() == SectionKind::Text);
            let is_function = matches!(symbol.kind(), SymbolKind::Text | SymbolKind::Unknown);
            if is_code && is_function {
                let name = symbol.name().expect("a name").to_owned();
                let known = binary
                    .starts
                    .entry(symbol.address())
                    .or_insert(name.clone());
                if known.starts_with('[') || name < *known {
                    known.clone_from(&name);
                }
                binary.places.insert(name, symbol.address());
            }
        }
        for section in file.sections() {
            if section.name().is_ok_and(|name| name.starts_with(".plt")) {
                let start = section.address();
                binary.plts.push(start..start + section.size());
            }
        }
        binary
    }

    /// The function that a place is in; none for an entry of the PLT.
    pub(super) fn at(&self, place: u64) -> Option<&str> {
        if self.plts.iter().any(|plt| plt.contains(&place)) {
            return None;
        }
        let before = self.starts.range(..=place).next_back();
        Some(before.map_or("[start]", |(_, name)| name))
    }

    /// Where a function of this name starts.
    pub(super) fn place(&self, name: &str) -> Option<u64> {
        self.places.get(name).copied()
    }
}
