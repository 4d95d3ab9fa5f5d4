//! The guest's physical memory: where everything lies, and how it is made.
//!
//! | from | to | content |
//! |---|---|---|
//! | `0x0` | `0x500` | real-mode vectors and BIOS data, left 0 |
//! | [`GDT_START`] | | global descriptor table |
//! | [`TSS_START`] | | task state segment |
//! | [`ZERO_PAGE_START`] | +4 KiB | Linux `boot_params` |
//! | [`BOOT_INFO_START`] | +4 KiB | PVH start info, Multiboot information, or Linux `setup_data` |
//! | [`PAGE_TABLES_START`] | +24 KiB | PML4, PDPT, four page directories |
//! | | [`BOOT_STACK_TOP`] | stack that the kernel replaces at once |
//! | [`CMDLINE_START`] | +64 KiB | the kernel's command line |
//! | [`MODULE_LIST_START`] | +64 KiB | module table and the modules' strings |
//! | [`FIRMWARE_START`] | [`EBDA_START`] | firmware, where there is any: reserved then (`firmware::layout`) |
//! | [`EBDA_START`] | `0xa0000` | BIOS data area, reserved, left 0 |
//! | `0xa0000` | `0xe0000` | legacy video and ROM, not reported |
//! | [`ACPI_START`] | `0xf0000` | RSDP, then the other ACPI tables |
//! | [`FACS_START`] | `0x100000` | FACS, then the BIOS area, reserved |
//! | [`HIGH_MEMORY_START`] | hole | kernel at its own address; modules behind it; initrd at the top |
//! | [`HOLE_START`] | [`HOLE_END`] | no memory: [`IOAPIC_START`], [`LAPIC_START`], KVM's own pages |
//! | [`HOLE_END`] | | the rest of the memory |

use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// Guest memory as [`create`] makes it: one region below the hole, perhaps one above.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;

/// Bytes in one MiB.
pub const MIB: u64 = 1 << 20;
/// Bytes in one page.
pub const PAGE_SIZE: u64 = 4096;

/// Global descriptor table, behind the BIOS data area.
pub const GDT_START: u64 = 0x500;
/// Task state segment of the boot processor, 104 bytes.
pub const TSS_START: u64 = 0x600;
/// The Linux zero page (`boot_params`), 4 KiB.
pub const ZERO_PAGE_START: u64 = 0x7000;
/// PVH start info or Multiboot information structure, with its memory map, or what Linux's
/// zero page leads to, 4 KiB.
pub const BOOT_INFO_START: u64 = 0x8000;
/// PML4, page-directory-pointer table and four page directories, 4 KiB each.
pub const PAGE_TABLES_START: u64 = 0x9000;
/// Initial stack pointer; the page below is free.
pub const BOOT_STACK_TOP: u64 = 0x1_0000;
/// The kernel's command line.
pub const CMDLINE_START: u64 = 0x2_0000;
/// Room for the command line in bytes, with its terminator.
pub const CMDLINE_SIZE: usize = 0x1_0000;
/// Module table (PVH and Multiboot), 4 KiB, then the modules' strings.
pub const MODULE_LIST_START: u64 = 0x3_0000;
/// Bytes of the module table.
pub const MODULE_LIST_SIZE: usize = 0x1000;
/// The modules' strings.
pub const MODULE_STRINGS_START: u64 = MODULE_LIST_START + 0x1000;
/// Room for all modules' strings in bytes, with their terminators.
pub const MODULE_STRINGS_SIZE: usize = 0xf000;
/// Firmware and everything that belongs to it. Without firmware this is ordinary memory.
pub const FIRMWARE_START: u64 = firmware::layout::START;
/// Extended BIOS data area: the top KiB of conventional memory.
pub const EBDA_START: u64 = 0x9_fc00;
/// End of conventional memory.
pub const CONVENTIONAL_END: u64 = 0xa_0000;
/// The RSDP, where a BIOS has it and guests look for it, and the other ACPI tables behind it.
pub const ACPI_START: u64 = 0xe_0000;
/// End of the area for ACPI tables.
pub const ACPI_END: u64 = 0xf_0000;
/// The firmware ACPI control structure: written by the guest, so not among the tables.
pub const FACS_START: u64 = 0xf_0000;
/// First byte above the BIOS area; kernels lie from here on.
pub const HIGH_MEMORY_START: u64 = 0x10_0000;
/// Memory stops here and goes on at [`HOLE_END`].
pub const HOLE_START: u64 = 3 << 30;
/// First byte above the hole.
pub const HOLE_END: u64 = 4 << 30;
/// Registers of the I/O APIC.
pub const IOAPIC_START: u64 = 0xfec0_0000;
/// Registers of the local APIC.
pub const LAPIC_START: u64 = 0xfee0_0000;

/// The least memory a guest can have: the first MiB is the machine's own.
pub const MIN_MIB: u64 = 2;
/// The most memory a guest can have; its addresses fit into 41 bits.
pub const MAX_MIB: u64 = 1 << 20;

/// A reason why guest memory could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Fewer MiB than [`MIN_MIB`].
    #[error("{mib} MiB of guest memory are too few: give --memory {MIN_MIB} or more")]
    TooSmall {
        /// What was asked for.
        mib: u64,
    },
    /// More MiB than [`MAX_MIB`].
    #[error("{mib} MiB of guest memory are too many: give --memory {MAX_MIB} or less")]
    TooLarge {
        /// What was asked for.
        mib: u64,
    },
    /// The host lacks that much address space or memory.
    #[error(
        "the host cannot provide {mib} MiB of guest memory ({reason}): give a smaller --memory"
    )]
    Allocation {
        /// What was asked for.
        mib: u64,
        /// The system's reason.
        reason: String,
    },
    /// The memory has no region at address 0 that reaches beyond the first MiB.
    #[error(
        "guest memory has no region from address 0 to above 1 MiB: make it with `memory::create`"
    )]
    Shape,
    /// A write failed although the layout says it must fit.
    #[error("cannot write {len} bytes at guest address {address:#x}: {reason}")]
    Write {
        /// Guest-physical address.
        address: u64,
        /// Number of bytes.
        len: usize,
        /// The memory's reason.
        reason: String,
    },
}

/// Makes `mib` MiB of zeroed guest memory, the part above 3 GiB moved over the hole to 4 GiB.
///
/// # Errors
/// When `mib` is outside [`MIN_MIB`] to [`MAX_MIB`], or the host refuses the mapping.
pub fn create(mib: u64) -> Result<GuestMemory, MemoryError> {
    let memory = GuestMemory::from_ranges(&ranges(mib)?);
    memory.map_err(|error| MemoryError::Allocation {
        mib,
        reason: error.to_string(),
    })
}

/// Where `mib` MiB of memory lie.
///
/// # Errors
/// [`MemoryError`]: too little or too much.
pub fn ranges(mib: u64) -> Result<Vec<(GuestAddress, usize)>, MemoryError> {
    if mib < MIN_MIB {
        return Err(MemoryError::TooSmall { mib });
    }
    if mib > MAX_MIB {
        return Err(MemoryError::TooLarge { mib });
    }
    let bytes = mib * MIB;
    let mut ranges = vec![(0, bytes.min(HOLE_START))];
    if bytes > HOLE_START {
        ranges.push((HOLE_END, bytes - HOLE_START));
    }
    ranges
        .into_iter()
        .map(|(start, len)| Ok((GuestAddress(start), usize::try_from(len)?)))
        .collect::<Result<_, std::num::TryFromIntError>>()
        .map_err(|error| MemoryError::Allocation {
            mib,
            reason: error.to_string(),
        })
}

/// What a guest may do with a range of its physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind {
    /// Ordinary memory.
    Ram,
    /// Not for the guest's own use.
    Reserved,
    /// ACPI tables; free once read.
    Acpi,
}

impl RegionKind {
    /// The type number that E820, Multiboot and PVH memory maps share.
    #[must_use]
    pub const fn e820_type(self) -> u32 {
        match self {
            Self::Ram => 1,
            Self::Reserved => 2,
            Self::Acpi => 3,
        }
    }
}

/// One line of the guest's memory map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// First guest-physical address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    pub kind: RegionKind,
}

/// Bytes of memory from address 0 up to the hole.
///
/// # Errors
/// [`MemoryError::Shape`] when the memory does not come from [`create`].
pub fn low_end(mem: &GuestMemory) -> Result<u64, MemoryError> {
    mem.find_region(GuestAddress(0))
        .map(GuestMemoryRegion::len)
        .filter(|&len| len > HIGH_MEMORY_START && len <= HOLE_START)
        .ok_or(MemoryError::Shape)
}

/// What conventional memory is used for beside the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conventional {
    /// It is the kernel's, up to [`EBDA_START`].
    Free,
    /// Firmware keeps what lies from [`FIRMWARE_START`] on.
    Firmware,
}

/// The memory map that every boot protocol reports, in ascending order.
///
/// # Errors
/// [`MemoryError::Shape`] when the memory does not come from [`create`].
pub fn regions(mem: &GuestMemory, below: Conventional) -> Result<Vec<Region>, MemoryError> {
    let low_end = low_end(mem)?;
    let region = |start, end: u64, kind| Region {
        start,
        len: end - start,
        kind,
    };
    let free_end = match below {
        Conventional::Free => EBDA_START,
        Conventional::Firmware => FIRMWARE_START,
    };
    let mut list = vec![
        region(0, free_end, RegionKind::Ram),
        region(free_end, CONVENTIONAL_END, RegionKind::Reserved),
        region(ACPI_START, ACPI_END, RegionKind::Acpi),
        region(FACS_START, HIGH_MEMORY_START, RegionKind::Reserved),
        region(HIGH_MEMORY_START, low_end, RegionKind::Ram),
        region(IOAPIC_START, HOLE_END, RegionKind::Reserved),
    ];
    list.extend(
        mem.iter()
            .filter(|part| part.start_addr().raw_value() >= HOLE_END)
            .map(|part| Region {
                start: part.start_addr().raw_value(),
                len: part.len(),
                kind: RegionKind::Ram,
            }),
    );
    Ok(list)
}

/// Writes `data` at a guest-physical address.
pub(crate) fn write(mem: &GuestMemory, address: u64, data: &[u8]) -> Result<(), MemoryError> {
    use vm_memory::Bytes;
    mem.write_slice(data, GuestAddress(address))
        .map_err(|error| MemoryError::Write {
            address,
            len: data.len(),
            reason: error.to_string(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(mib: u64, expected: Result<&[(u64, u64)], &str>) {
        let parts = create(mib).map(|mem| {
            mem.iter()
                .map(|r| (r.start_addr().raw_value(), r.len()))
                .collect::<Vec<_>>()
        });
        match (parts, expected) {
            (Ok(parts), Ok(expected)) => assert_eq!(parts, expected, "{mib} MiB"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (parts, expected) => panic!("{mib} MiB: {parts:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn memory_leaves_the_hole_free() {
        check(0, Err("give --memory 2"));
        check(1, Err("1 MiB of guest memory are too few"));
        check(2, Ok(&[(0, 2 * MIB)]));
        check(3072, Ok(&[(0, HOLE_START)]));
        check(3073, Ok(&[(0, HOLE_START), (HOLE_END, MIB)]));
        check(MAX_MIB + 1, Err("too many"));
        check(u64::MAX, Err("too many"));
    }

    #[test]
    fn the_map_is_ascending_and_reports_all_memory() {
        let kinds = [Conventional::Free, Conventional::Firmware];
        for (mib, below) in [2, 512, 3072, 5000]
            .into_iter()
            .flat_map(|m| kinds.map(|k| (m, k)))
        {
            let mem = create(mib).expect("memory");
            let list = regions(&mem, below).expect("map");
            for pair in list.windows(2) {
                assert!(pair[0].start + pair[0].len <= pair[1].start, "{pair:x?}");
            }
            let unreported = CONVENTIONAL_END..ACPI_START;
            let covered: u64 = list
                .iter()
                .filter(|r| r.start < HOLE_START || r.start >= HOLE_END)
                .map(|r| r.len)
                .sum();
            assert_eq!(covered + (unreported.end - unreported.start), mib * MIB);
        }
    }

    #[test]
    fn foreign_memory_is_refused() {
        let mem = GuestMemory::from_ranges(&[(GuestAddress(0x1000), 0x40_0000)]).expect("memory");
        assert!(matches!(low_end(&mem), Err(MemoryError::Shape)));
    }

    #[test]
    fn a_write_outside_memory_is_an_error() {
        let mem = create(2).expect("memory");
        let error = write(&mem, 2 * MIB - 1, &[0; 2]).expect_err("beyond the end");
        assert!(error.to_string().contains("0x1fffff"), "{error}");
    }
}
