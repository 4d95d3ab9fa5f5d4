//! The identity map of the 64-bit entry point.

use super::memory::{GuestMemory, MemoryError, write};

/// Entries of one table.
const TABLE_ENTRIES: u64 = 512;
/// Bytes that one page-directory entry maps.
pub(crate) const LARGE_PAGE: u64 = 2 << 20;
const TABLE_SIZE: u64 = 4096;
/// Page directories for 4 GiB.
const DIRECTORIES: u64 = 4;
/// Page-table entry: present and writable.
const PTE_PRESENT_WRITABLE: u64 = 0b11;
/// Page-directory entry: maps 2 MiB itself.
pub(crate) const PTE_LARGE: u64 = 1 << 7;

/// Maps the first 4 GiB to themselves, with 2 MiB pages (SDM vol. 3A, 4.5), by six
/// tables from `root` on.
pub(crate) fn write_page_tables(mem: &GuestMemory, root: u64) -> Result<(), MemoryError> {
    let table = |number: u64| root + number * TABLE_SIZE;
    let pml4 = [table(1) | PTE_PRESENT_WRITABLE];
    let pdpt: Vec<u64> = (0..DIRECTORIES)
        .map(|number| table(2 + number) | PTE_PRESENT_WRITABLE)
        .collect();
    let directories: Vec<u64> = (0..DIRECTORIES * TABLE_ENTRIES)
        .map(|number| (number * LARGE_PAGE) | PTE_PRESENT_WRITABLE | PTE_LARGE)
        .collect();
    write(mem, table(0), &little_endian(&pml4))?;
    write(mem, table(1), &little_endian(&pdpt))?;
    write(mem, table(2), &little_endian(&directories))
}

/// Words as they lie in memory.
pub(crate) fn little_endian(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert_eq, proptest};
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::boot::memory::{PAGE_TABLES_START, create};

    fn word(mem: &GuestMemory, address: u64) -> u64 {
        mem.read_obj(GuestAddress(address))
            .expect("inside guest memory")
    }

    /// Walks the tables as the CPU does for a 2 MiB page.
    fn translate(mem: &GuestMemory, cr3: u64, linear: u64) -> Option<u64> {
        let entry = |table: u64, shift: u32| {
            let entry = word(mem, (table & !0xfff) + ((linear >> shift) & 0x1ff) * 8);
            (entry & 1 != 0).then_some(entry)
        };
        let directory = entry(entry(entry(cr3, 39)?, 30)?, 21)?;
        assert_ne!(directory & PTE_LARGE, 0);
        Some((directory & !(LARGE_PAGE - 1)) | (linear & (LARGE_PAGE - 1)))
    }

    proptest! {
        #[test]
        fn the_first_4_gib_map_to_themselves(linear in 0u64..1 << 40) {
            let mem = create(2).expect("memory");
            write_page_tables(&mem, PAGE_TABLES_START).expect("tables");
            prop_assert_eq!(translate(&mem, PAGE_TABLES_START, linear), (linear < 4 << 30).then_some(linear));
        }
    }
}
