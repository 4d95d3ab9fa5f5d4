//! From linear to guest-physical addresses (SDM vol. 3A, chapter 5): by tables of four levels, by
//! PAE's, and by those of 32 bits.
#![allow(
    clippy::cast_possible_truncation,
    reason = "entries of 32 bits, and numbers below the size of a table"
)]

use crate::cpuid::Cpuid;
use crate::state::{
    CR0_PG, CR0_WP, CR4_PAE, CR4_PGE, CR4_PSE, CR4_SMAP, CR4_SMEP, EFER_LMA, EFER_NXE, State,
};
use crate::sys::ram::Ram;
use crate::tlb::Set;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Bits between the address and NX.
const UPPER: u64 = 0x7ff << 52;

/// Bits of #PF's error code.
const CODE_PRESENT: u32 = 1;
const CODE_WRITE: u32 = 1 << 1;
const CODE_USER: u32 = 1 << 2;
const CODE_RESERVED: u32 = 1 << 3;
const CODE_FETCH: u32 = 1 << 4;

/// How the tables are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tables {
    /// There are none: addresses are as they are.
    None,
    /// Two levels of 1024 entries of 32 bits.
    Narrow,
    /// Two levels of 512 entries of 64 bits, below four that are loaded with CR3.
    Pae,
    /// Four levels of 512 entries of 64 bits.
    Long,
}

/// What decides about a translation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    tables: Tables,
    cr3: u64,
    /// What was loaded with CR3, under PAE.
    top: [u64; 4],
    /// Pages of 4 MiB in tables of 32 bits.
    page_size: bool,
    write_protect: bool,
    global: bool,
    smep: bool,
    smap: bool,
    no_execute: bool,
    /// Address bits that have to be 0.
    beyond: u64,
    gigabyte_pages: bool,
    /// Bits of an entry of 32 bits that are a page's address from bit 32 on (SDM vol. 3A, table
    /// 5-4).
    pse36: u64,
}

/// What is added to the place of such a bit.
const PSE36: u32 = 32 - 13;

impl Rules {
    /// As the registers say, on a processor.
    pub(crate) fn of(state: &State, cpuid: &Cpuid) -> Self {
        let physical_bits = cpuid.physical_bits();
        let pse36 = if cpuid.has_pse36() {
            ((1 << (physical_bits.min(40) - 32)) - 1) << 13
        } else {
            0
        };
        let known = (1u64 << physical_bits) - 1;
        let tables = match (state.cr0 & CR0_PG != 0, state.efer & EFER_LMA != 0) {
            (false, _) => Tables::None,
            (true, true) => Tables::Long,
            (true, false) if state.cr4 & CR4_PAE != 0 => Tables::Pae,
            (true, false) => Tables::Narrow,
        };
        // In long mode the bits from 52 on are the system's.
        let rest = if tables == Tables::Pae { UPPER } else { 0 };
        Self {
            tables,
            cr3: state.cr3,
            top: state.pdptes,
            page_size: state.cr4 & CR4_PSE != 0,
            write_protect: state.cr0 & CR0_WP != 0,
            global: state.cr4 & CR4_PGE != 0,
            smep: state.cr4 & CR4_SMEP != 0,
            smap: state.cr4 & CR4_SMAP != 0,
            no_execute: state.efer & EFER_NXE != 0 && tables != Tables::Narrow,
            beyond: ADDRESS & !known | rest,
            gigabyte_pages: cpuid.has_gigabyte_pages(),
            pse36,
        }
    }

    /// Bits that an entry of this level must not have; `level` is 0 for page tables.
    fn reserved(&self, level: u32, entry: u64) -> u64 {
        if self.tables == Tables::Narrow {
            // The address of a page of 4 MiB.
            return if self.is_page(level, entry) && level > 0 {
                0x3f_e000 & !self.pse36
            } else {
                0
            };
        }
        let mut reserved = self.beyond;
        if !self.no_execute {
            reserved |= NO_EXECUTE;
        }
        let large = entry & LARGE != 0;
        match level {
            1 if large => reserved | 0x1f_e000,
            2 if large && self.gigabyte_pages => reserved | 0x3fff_e000,
            2 | 3 => reserved | LARGE,
            _ => reserved,
        }
    }

    /// Whether an entry of this level leads to a page and not to a table.
    fn is_page(&self, level: u32, entry: u64) -> bool {
        let large = entry & LARGE != 0;
        match self.tables {
            Tables::Narrow => level == 0 || large && self.page_size,
            _ => level == 0 || large && level < 3,
        }
    }

    /// Levels, bits of the place in a table, bytes of an entry.
    fn shape(&self) -> (u32, u32, u64) {
        match self.tables {
            Tables::Long => (4, 9, 8),
            Tables::Pae => (2, 9, 8),
            Tables::Narrow | Tables::None => (2, 10, 4),
        }
    }

    /// Where the walk begins, if there is such a table.
    fn first(&self, linear: u64) -> Option<u64> {
        match self.tables {
            Tables::Pae => {
                let top = self.top[(linear >> 30 & 3) as usize];
                (top & PRESENT != 0).then_some(top & ADDRESS)
            }
            Tables::Narrow => Some(self.cr3 & 0xffff_f000),
            Tables::Long | Tables::None => Some(self.cr3 & ADDRESS),
        }
    }

    /// Whether entries whose rights are `all` (those that every level has) let `set` in.
    fn allows(&self, all: u64, never: bool, set: Set) -> bool {
        let user_page = all & USER != 0;
        let writable = all & WRITABLE != 0;
        if set.fetches() {
            let smep = self.smep && !set.is_user() && user_page;
            return !never && !smep && (user_page || !set.is_user());
        }
        if set.is_user() {
            return user_page && (writable || !set.writes());
        }
        let closed = self.smap && user_page && !matches!(set, Set::OpenRead | Set::OpenWrite);
        !closed && (writable || !set.writes() || !self.write_protect)
    }

    fn code(&self, set: Set, code: u32) -> u32 {
        let mut code = code;
        if set.writes() {
            code |= CODE_WRITE;
        }
        if set.is_user() {
            code |= CODE_USER;
        }
        if set.fetches() && (self.no_execute || self.smep) {
            code |= CODE_FETCH;
        }
        code
    }
}

/// Where a linear address leads to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Mapped {
    /// Guest-physical address.
    pub(crate) physical: u64,
    /// It stays when CR3 is written.
    pub(crate) global: bool,
    /// The page is larger than 4 KiB.
    pub(crate) large: bool,
    /// Entries have 32 bits.
    narrow: bool,
    /// The base-2 logarithm of its size; 32 without paging.
    pub(crate) page: u32,
    /// Entries that are to be marked as used, the leaf first: their offsets in RAM, and their
    /// new values.
    marks: [Option<(u64, u64)>; 4],
}

impl Mapped {
    /// Offsets of the entries that [`Mapped::mark`] changes.
    pub(crate) fn marked(&self) -> impl Iterator<Item = u64> + use<> {
        self.marks.into_iter().flatten().map(|(at, _)| at)
    }

    /// Sets A in the entries of the walk, and D in the leaf.
    pub(crate) fn mark(&self, ram: &mut Ram) {
        for (at, entry) in self.marks.into_iter().flatten() {
            if self.narrow {
                ram.store(at, entry as u32);
            } else {
                ram.store(at, entry);
            }
        }
    }
}

/// Walks the tables for an access; A and D are set by [`Mapped::mark`]. An error is #PF's error
/// code.
pub(crate) fn walk(ram: &Ram, rules: &Rules, linear: u64, set: Set) -> Result<Mapped, u32> {
    if rules.tables == Tables::None {
        return Ok(Mapped {
            physical: linear & 0xffff_ffff,
            large: true,
            page: 32,
            ..Mapped::default()
        });
    }
    let (levels, bits, bytes) = rules.shape();
    let narrow = bytes == 4;
    let Some(mut table) = rules.first(linear) else {
        return Err(rules.code(set, 0));
    };
    let mut all = u64::MAX;
    let mut never = false;
    let mut seen = [(None, 0); 4];
    for level in (0..levels).rev() {
        let shift = 12 + bits * level;
        let physical = table + bytes * (linear >> shift & ((1 << bits) - 1));
        let at = ram.offset_of(physical);
        // A table that is nowhere reads as all ones, whose reserved bits are set if it has any.
        let entry = match (at, narrow) {
            (Some(at), true) => u64::from(ram.load::<u32>(at)),
            (Some(at), false) => ram.load::<u64>(at),
            (None, true) => u64::from(u32::MAX),
            (None, false) => u64::MAX,
        };
        if entry & PRESENT == 0 {
            return Err(rules.code(set, 0));
        }
        if entry & rules.reserved(level, entry) != 0 {
            return Err(rules.code(set, CODE_PRESENT | CODE_RESERVED));
        }
        all &= entry;
        never |= entry & NO_EXECUTE != 0;
        seen[level as usize] = (at, entry);
        if rules.is_page(level, entry) {
            if !rules.allows(all, never, set) {
                return Err(rules.code(set, CODE_PRESENT));
            }
            let inside = (1u64 << shift) - 1;
            let high = if narrow && level > 0 {
                (entry & rules.pse36) << PSE36
            } else {
                0
            };
            return Ok(Mapped {
                physical: high | entry & ADDRESS & !inside | linear & inside,
                global: rules.global && entry & GLOBAL != 0,
                large: level > 0,
                page: shift,
                narrow,
                marks: marks(&seen[level as usize..levels as usize], set.writes()),
            });
        }
        table = entry & ADDRESS;
    }
    Err(rules.code(set, 0))
}

/// Those of a walk's entries, the leaf first, that lack A, or D in the leaf.
fn marks(seen: &[(Option<u64>, u64)], dirty: bool) -> [Option<(u64, u64)>; 4] {
    let mut marks = [None; 4];
    for (level, (at, entry)) in seen.iter().enumerate() {
        let mut marked = entry | ACCESSED;
        if level == 0 && dirty {
            marked |= DIRTY;
        }
        if marked != *entry {
            marks[level] = at.map(|at| (at, marked));
        }
    }
    marks
}

#[cfg(test)]
mod tests;
