//! From linear to guest-physical addresses (SDM vol. 3A, chapter 5 "Paging";
//! APM vol. 2, chapter 5).

use crate::memory::GuestMemory;

const CR0_PG: u64 = 1 << 31;
const CR4_PSE: u64 = 1 << 4;
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
const EFER_LMA: u64 = 1 << 10;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The registers that choose how linear addresses are translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paging {
    cr3: u64,
    mode: PagingMode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PagingMode {
    Off,
    /// 32-bit entries, two levels; `true` where 4 MiB pages are on.
    Bits32(bool),
    Pae,
    Levels(u32),
}

impl Paging {
    /// As these control registers have it.
    #[must_use]
    pub fn of_registers(cr0: u64, cr3: u64, cr4: u64, efer: u64) -> Self {
        let mode = if cr0 & CR0_PG == 0 {
            PagingMode::Off
        } else if efer & EFER_LMA != 0 {
            PagingMode::Levels(if cr4 & CR4_LA57 != 0 { 5 } else { 4 })
        } else if cr4 & CR4_PAE != 0 {
            PagingMode::Pae
        } else {
            PagingMode::Bits32(cr4 & CR4_PSE != 0)
        };
        Self { cr3, mode }
    }

    /// Long mode with the tables at `root`, five levels of them or four.
    #[must_use]
    pub fn long_mode(root: u64, five_levels: bool) -> Self {
        let mode = PagingMode::Levels(if five_levels { 5 } else { 4 });
        Self { cr3: root, mode }
    }

    /// Where `linear` leads to, and who may go there; `None` where nothing is mapped.
    /// At most five reads, of 8 bytes each.
    #[must_use]
    pub fn map(&self, memory: &dyn GuestMemory, linear: u64) -> Option<Mapped> {
        match self.mode {
            // No rights without paging: as writable pages of CPL 0.
            PagingMode::Off => Some(Mapped::by(WRITABLE, linear & 0xffff_ffff, 32)),
            PagingMode::Bits32(large) => bits32(memory, self.cr3, linear, large),
            PagingMode::Pae => {
                let root = (self.cr3 & 0xffff_ffe0) + 8 * (linear >> 30 & 3);
                let entry = read64(memory, root)?;
                walk(memory, entry & ADDRESS, linear, 2)
            }
            PagingMode::Levels(levels) => {
                let bits = 12 + 9 * levels;
                let sign = linear.cast_signed() >> (bits - 1);
                // A non-canonical address is mapped nowhere.
                if sign != 0 && sign != -1 {
                    return None;
                }
                walk(memory, self.cr3 & ADDRESS, linear, levels)
            }
        }
    }
}

/// What a linear address leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapped {
    /// Guest-physical address.
    pub physical: u64,
    /// Every level lets CPL 3 write, or CPL 0 with CR0.WP.
    pub writable: bool,
    /// Every level lets CPL 3 in.
    pub user: bool,
    /// Base-2 logarithm of the page's size.
    pub page: u32,
}

impl Mapped {
    /// Behind entries whose rights, taken together, are `rights`.
    fn by(rights: u64, physical: u64, page: u32) -> Self {
        Self {
            physical,
            writable: rights & WRITABLE != 0,
            user: rights & USER != 0,
            page,
        }
    }
}

/// Walks `levels` levels of 64-bit entries from the table at `table`.
fn walk(memory: &dyn GuestMemory, mut table: u64, linear: u64, levels: u32) -> Option<Mapped> {
    let mut rights = u64::MAX;
    for level in (0..levels).rev() {
        let shift = 12 + 9 * level;
        let entry = read64(memory, table + 8 * (linear >> shift & 0x1ff))?;
        rights &= entry;
        let leaf = level == 0 || (level <= 2 && entry & LARGE != 0);
        if leaf {
            let offset = (1u64 << shift) - 1;
            let physical = (entry & ADDRESS & !offset) | (linear & offset);
            return Some(Mapped::by(rights, physical, shift));
        }
        table = entry & ADDRESS;
    }
    None
}

fn bits32(memory: &dyn GuestMemory, cr3: u64, linear: u64, large_pages: bool) -> Option<Mapped> {
    let directory = (cr3 & 0xffff_f000) + 4 * (linear >> 22 & 0x3ff);
    let entry = read32(memory, directory)?;
    if large_pages && entry & LARGE != 0 {
        // PSE-36: bits 20:13 are address bits 39:32.
        let high = (entry >> 13 & 0xff) << 32;
        let physical = high | (entry & 0xffc0_0000) | (linear & 0x3f_ffff);
        return Some(Mapped::by(entry, physical, 22));
    }
    let table = (entry & 0xffff_f000) + 4 * (linear >> 12 & 0x3ff);
    let rights = entry;
    let entry = read32(memory, table)?;
    let physical = (entry & 0xffff_f000) | (linear & 0xfff);
    Some(Mapped::by(rights & entry, physical, 12))
}

fn read64(memory: &dyn GuestMemory, address: u64) -> Option<u64> {
    let entry = u64::from_le_bytes(memory.array(address)?);
    (entry & PRESENT != 0).then_some(entry)
}

fn read32(memory: &dyn GuestMemory, address: u64) -> Option<u64> {
    let entry = u64::from(u32::from_le_bytes(memory.array(address)?));
    (entry & PRESENT != 0).then_some(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Words<'a>(&'a [(u64, u64)]);

    /// Memory that is 0 where no word is given, up to 1 MiB.
    impl GuestMemory for Words<'_> {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            let byte = |at: u64| {
                let word = self
                    .0
                    .iter()
                    .find(|(start, _)| (*start..start + 8).contains(&at));
                word.map_or(0, |(start, word)| {
                    (word >> (8 * (at - start)) & 0xff).try_into().unwrap_or(0)
                })
            };
            buffer
                .iter_mut()
                .zip(address..)
                .for_each(|(to, at)| *to = byte(at));
            address + buffer.len() as u64 <= 1 << 20
        }
    }

    fn registers(cr0: u64, cr3: u64, cr4: u64, efer: u64) -> Paging {
        Paging::of_registers(cr0, cr3, cr4, efer)
    }

    fn check(words: &[(u64, u64)], paging: &Paging, linear: u64, expected: Option<u64>) {
        let found = paging.map(&Words(words), linear);
        let found = found.map(|mapped| mapped.physical);
        assert_eq!(found, expected, "linear {linear:#x}");
    }

    #[test]
    fn without_paging_linear_is_physical() {
        check(&[], &registers(0, 0, 0, 0), 0x1_2345, Some(0x1_2345));
    }

    #[test]
    fn four_levels() {
        let long = registers(CR0_PG, 0x1000, CR4_PAE, EFER_LMA);
        let high = 0xffff_ffff_8123_4567;
        let slot = 0x4000 + 8 * (high >> 12 & 0x1ff);
        let tables = [
            (0x1ff8, 0x2003),
            (0x2ff0, 0x3003),
            (0x3000 + 8 * (high >> 21 & 0x1ff), 0x4003),
            (slot, 0x8000_0000_000a_b003),
        ];
        check(&tables, &long, high, Some(0xa_b567));
        check(&tables, &long, 0x0000_9000_0000_0000, None);
        check(&tables, &long, 0x1000, None);
    }

    #[test]
    fn large_pages() {
        let long = registers(CR0_PG, 0x1000, CR4_PAE, EFER_LMA);
        let two_mib = [(0x1000, 0x2003), (0x2000, 0x3003), (0x3008, 0x4000_0083)];
        check(&two_mib, &long, 0x0023_4567, Some(0x4003_4567));
        let one_gib = [(0x1000, 0x2003), (0x2008, 0x4000_0083)];
        check(&one_gib, &long, 0x7fff_ffff, Some(0x7fff_ffff));
    }

    #[test]
    fn five_levels() {
        let la57 = registers(CR0_PG, 0x1000, CR4_PAE | CR4_LA57, EFER_LMA);
        let words = [
            (0x1000 + 8, 0x2003),
            (0x2000, 0x3003),
            (0x3000, 0x8000_0083),
        ];
        check(&words, &la57, 0x0001_0000_0000_1234, Some(0x8000_1234));
    }

    #[test]
    fn pae_and_32_bit() {
        let pae = registers(CR0_PG, 0x1020, CR4_PAE, 0);
        let words = [(0x1020 + 24, 0x2001), (0x2000, 0x3003), (0x3008, 0x5003)];
        check(&words, &pae, 0xc000_1abc, Some(0x5abc));
        let plain = registers(CR0_PG, 0x1000, 0, 0);
        check(
            &[(0x1004, 0x3003), (0x3004, 0x6003)],
            &plain,
            0x0040_1abc,
            Some(0x6abc),
        );
        let pse = registers(CR0_PG, 0x1000, CR4_PSE, 0);
        check(
            &[(0x1004, 0x00c0_0083)],
            &pse,
            0x0041_1abc,
            Some(0x00c1_1abc),
        );
    }

    #[test]
    fn tables_outside_memory_map_nothing() {
        let long = registers(CR0_PG, 0xff_ffff_f000, CR4_PAE, EFER_LMA);
        check(&[], &long, 0x1000, None);
    }
}
