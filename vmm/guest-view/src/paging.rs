//! Where Linux has the page tables of a task.

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Where the tables at this CR3 are, and where the kernel's beside them are if these are a
/// program's under page-table isolation (`PTI_USER_PGTABLE_BIT`, `arch/x86/mm/tlb.c`).
pub(crate) fn tables_of(cr3: u64) -> [u64; 2] {
    const PROGRAMS: u64 = 0x1000;
    [cr3 & ADDRESS, cr3 & ADDRESS & !PROGRAMS]
}
