//! Guests that were built as ELF files.

use anyhow::{Context, Result};
use object::read::elf::ElfFile64;
use object::{LittleEndian, Object, ObjectSegment, ObjectSymbol};
use vmm::micro::MicroGuest;

/// A program for the micro-machine.
#[derive(Debug)]
pub struct MicroImage {
    guest: MicroGuest,
    entry: u64,
    symbols: Vec<(String, u64)>,
}

impl MicroImage {
    /// Reads a static ELF64 executable.
    ///
    /// # Errors
    /// It is none.
    pub fn parse(file: &[u8]) -> Result<Self> {
        let elf = ElfFile64::<LittleEndian>::parse(file).context("the guest's image")?;
        let mut guest = MicroGuest::new();
        for segment in elf.segments() {
            // Memory that the file lacks is 0, as all of the machine's memory.
            guest = guest.code(segment.address(), segment.data()?.to_vec());
        }
        let symbols = elf.symbols();
        let symbols = symbols.map(|symbol| Ok((symbol.name()?.to_owned(), symbol.address())));
        Ok(Self {
            guest,
            entry: elf.entry(),
            symbols: symbols.collect::<Result<_>>()?,
        })
    }

    /// Its first instruction.
    #[must_use]
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// The address of a symbol.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn symbol(&self, name: &str) -> Result<u64> {
        let found = self.symbols.iter().find(|(symbol, _)| symbol == name);
        let found = found.with_context(|| format!("the guest's image has no symbol {name}"))?;
        Ok(found.1)
    }

    /// The guest without handlers and vCPUs.
    #[must_use]
    pub fn guest(&self) -> MicroGuest {
        self.guest.clone()
    }
}
