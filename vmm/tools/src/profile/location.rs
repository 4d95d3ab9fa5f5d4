//! What a sample's instruction pointer is called.

use super::record::{Ring, Sample};
use super::symbols::{SymbolIndex, SymbolTable};

/// Bits of CR3 that hold no address: those of the PCID or of caching below, and
/// those that are reserved or steer an invalidation above (SDM Vol. 3A, 2.5).
const CR3_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Where in the guest a sample was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CodeLocation {
    /// In this symbol.
    Symbol(SymbolIndex),
    /// At this address, which no symbol covers.
    Unknown(u64),
    /// In a program of the guest, known by the address of its page tables
    /// where CR3 was sampled.
    User(Option<u64>),
}

impl CodeLocation {
    /// The location of `sample`. Where its ring was not sampled, an address that a
    /// symbol covers is the kernel's.
    #[must_use]
    pub fn of(sample: &Sample, symbols: &SymbolTable) -> Self {
        if sample.ring == Some(Ring::User) {
            return Self::User(process(sample.cr3));
        }
        match symbols.find(sample.ip) {
            Some(found) => Self::Symbol(found.index),
            None => Self::Unknown(sample.ip),
        }
    }

    /// Its name: `do_idle`, `nft_do_chain [nf_tables]`,
    /// `[unknown] 0xffffffff81000000`, `[user cr3=0x1000]`.
    #[must_use]
    pub fn name(self, symbols: &SymbolTable) -> String {
        match self {
            Self::Symbol(index) => match symbols.module(index) {
                Some(module) => format!("{} [{module}]", symbols.name(index)),
                None => symbols.name(index).to_owned(),
            },
            Self::Unknown(ip) => format!("[unknown] {ip:#x}"),
            Self::User(None) => "[user]".to_owned(),
            Self::User(Some(cr3)) => format!("[user cr3={cr3:#x}]"),
        }
    }
}

/// How a guest's processes differ: the address of the page tables in CR3.
/// A kernel that keeps its own page tables apart (PTI) has two for each process.
#[must_use]
pub fn process(cr3: Option<u64>) -> Option<u64> {
    cr3.map(|cr3| cr3 & CR3_ADDRESS)
}
