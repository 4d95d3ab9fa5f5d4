//! What an instruction pointer is called.

use perfmon_abi::compact::ChainEnd;

use super::names::Names;
use super::programs::FileId;
use super::record::{Ring, Sample};
use super::symbols::SymbolIndex;

/// Bits of CR3 that hold no address: those of the PCID or of caching below, and
/// those that are reserved or steer an invalidation above (SDM Vol. 3A, 2.5).
const CR3_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The lowest address of the kernel's half.
const UPPER_HALF: u64 = 1 << 63;

/// Where in the guest a sample was taken, or a caller is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CodeLocation {
    /// In this symbol of the kernel.
    Symbol(SymbolIndex),
    /// At this address, which no symbol covers.
    Unknown(u64),
    /// In a program of which nothing is known but the address of its page tables, where CR3
    /// was sampled.
    User(Option<u64>),
    /// In this file of a program, and its symbol if that is known.
    Program(FileId, Option<SymbolIndex>),
    /// Nowhere: callers are missing, and why.
    Missing(ChainEnd),
    /// Nowhere: who called the outermost known function of a program is not known. Nearly every
    /// chain of frame pointers ends so, in the C library's start code, which has none.
    BrokenProgram,
}

impl CodeLocation {
    /// The location of `sample`. Where its ring was not sampled, an address that a
    /// symbol covers is the kernel's.
    #[must_use]
    pub fn of(sample: &Sample, names: &Names) -> Self {
        match sample.ring {
            Some(Ring::User) => Self::program(sample, sample.ip, sample.guest.mapping, names),
            Some(Ring::Kernel) => Self::kernel(sample.ip, names),
            None => match Self::kernel(sample.ip, names) {
                Self::Unknown(_) if names.programs.mapping(sample.guest.mapping).is_some() => {
                    Self::program(sample, sample.ip, sample.guest.mapping, names)
                }
                location => location,
            },
        }
    }

    /// That of an address in the kernel.
    #[must_use]
    pub fn kernel(address: u64, names: &Names) -> Self {
        match names.kernel.find(address) {
            Some(found) => Self::Symbol(found.index),
            None => Self::Unknown(address),
        }
    }

    /// That of an address in the program that runs in `sample`.
    #[must_use]
    pub fn program(sample: &Sample, address: u64, mapping: u64, names: &Names) -> Self {
        match names.in_program_of(sample.guest.task, mapping, address) {
            Some((file, found)) => Self::Program(file, found.map(|found| found.index)),
            None if names.task_of(sample).is_some() => Self::Program(FileId::UNKNOWN, None),
            None => Self::User(process(sample.cr3)),
        }
    }

    /// It is in the kernel; what has no name is where its address is.
    #[must_use]
    pub fn is_kernel(self) -> bool {
        match self {
            Self::Symbol(_) => true,
            Self::Unknown(address) => address >= UPPER_HALF,
            Self::User(_) | Self::Program(..) | Self::Missing(_) | Self::BrokenProgram => false,
        }
    }

    /// It has a row in tables of callers, and a layer in drawings. Who misses something in
    /// nearly every chain is only told where single chains are shown.
    #[must_use]
    pub fn is_layer(self) -> bool {
        self != Self::BrokenProgram
    }

    /// The name of its symbol, without that of what it is in: `do_idle`, `[unknown]`.
    #[must_use]
    pub fn symbol(self, names: &Names) -> String {
        match self {
            Self::Symbol(index) => names.kernel.name(index).to_owned(),
            Self::Unknown(ip) => format!("[unknown] {ip:#x}"),
            Self::User(None) => "[user]".to_owned(),
            Self::User(Some(cr3)) => format!("[user cr3={cr3:#x}]"),
            Self::Program(_, None) => "[unknown]".to_owned(),
            Self::Program(file, Some(symbol)) => names.program_symbol(file, symbol),
            Self::Missing(end) => missing(end).to_owned(),
            Self::BrokenProgram => missing(ChainEnd::Broken).to_owned(),
        }
    }

    /// Its name: `do_idle`, `nft_do_chain [nf_tables]`,
    /// `[unknown] 0xffffffff81000000`, `[user cr3=0x1000]`, `main`.
    #[must_use]
    pub fn name(self, names: &Names) -> String {
        match self {
            Self::Symbol(index) => match names.kernel.module(index) {
                Some(module) => format!("{} [{module}]", names.kernel.name(index)),
                None => self.symbol(names),
            },
            _ => self.symbol(names),
        }
    }

    /// What it is in, as perf names it in a column: `[kernel.kallsyms]`, `[nf_tables]`,
    /// `libc.so.6`, `[unknown]`.
    #[must_use]
    pub fn object(self, names: &Names) -> String {
        match self {
            Self::Program(file, _) => names.file(file).short().into_owned(),
            _ => self.whole_object(names),
        }
    }

    /// The same with the whole name of a program's file.
    #[must_use]
    pub fn whole_object(self, names: &Names) -> String {
        match self {
            Self::Symbol(index) => match names.kernel.module(index) {
                Some(module) => format!("[{module}]"),
                None => "[kernel.kallsyms]".to_owned(),
            },
            Self::Program(file, _) => names.file(file).shown().to_owned(),
            _ if self.is_kernel() => "[kernel.kallsyms]".to_owned(),
            _ => "[unknown]".to_owned(),
        }
    }
}

/// What stands where callers are missing.
fn missing(end: ChainEnd) -> &'static str {
    match end {
        ChainEnd::Depth => "[more callers]",
        ChainEnd::NoProgram => "[program not known]",
        ChainEnd::Outermost | ChainEnd::Entry | ChainEnd::Broken => "[broken chain]",
    }
}

/// How a guest's processes differ: the address of the page tables in CR3.
/// A kernel that keeps its own page tables apart (PTI) has two for each process.
#[must_use]
pub fn process(cr3: Option<u64>) -> Option<u64> {
    cr3.map(|cr3| cr3 & CR3_ADDRESS)
}
