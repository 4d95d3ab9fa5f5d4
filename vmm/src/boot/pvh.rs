//! The start info of the PVH boot protocol, as the Xen project defines it
//! (`xen/include/public/arch-x86/hvm/start_info.h`).

use linux_loader::loader::elf::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::ByteValued;

use super::acpi::RSDP_ADDRESS;
use super::error::BootError;
use super::memory::{
    BOOT_INFO_START, CMDLINE_START, GuestMemory, MODULE_LIST_START, Region, write,
};
use super::segments::Span;

/// The memory map follows the start info in its page.
const MEMMAP_START: u64 = BOOT_INFO_START + 0x100;
/// The first version with a memory map.
const VERSION: u32 = 1;

/// Writes the start info, its memory map, and the initrd as the one module.
pub(crate) fn write_start_info(
    mem: &GuestMemory,
    initrd: Option<Span>,
    regions: &[Region],
) -> Result<(), BootError> {
    let mut memmap = Vec::new();
    for region in regions {
        let entry = hvm_memmap_table_entry {
            addr: region.start,
            size: region.len,
            type_: region.kind.e820_type(),
            reserved: 0,
        };
        memmap.extend_from_slice(entry.as_slice());
    }
    write(mem, MEMMAP_START, &memmap)?;
    if let Some(span) = initrd {
        let entry = hvm_modlist_entry {
            paddr: span.start,
            size: span.end - span.start,
            ..Default::default()
        };
        write(mem, MODULE_LIST_START, entry.as_slice())?;
    }
    let start_info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: VERSION,
        nr_modules: u32::from(initrd.is_some()),
        modlist_paddr: if initrd.is_some() {
            MODULE_LIST_START
        } else {
            0
        },
        cmdline_paddr: CMDLINE_START,
        rsdp_paddr: RSDP_ADDRESS,
        memmap_paddr: MEMMAP_START,
        memmap_entries: u32::try_from(regions.len()).unwrap_or(u32::MAX),
        ..Default::default()
    };
    Ok(write(mem, BOOT_INFO_START, start_info.as_slice())?)
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::boot::memory::{Conventional, create, regions};

    #[test]
    fn the_start_info_leads_to_map_module_and_rsdp() {
        let mem = create(5000).expect("memory");
        let map = regions(&mem, Conventional::Free).expect("map");
        let initrd = Span {
            start: 0x100_0000,
            end: 0x100_0123,
        };
        write_start_info(&mem, Some(initrd), &map).expect("written");
        let info: hvm_start_info = mem.read_obj(GuestAddress(BOOT_INFO_START)).expect("read");
        assert_eq!(
            (info.magic, info.version, info.nr_modules),
            (0x336e_c578, 1, 1)
        );
        assert_eq!((info.rsdp_paddr, info.cmdline_paddr), (0xe_0000, 0x2_0000));
        let module: hvm_modlist_entry = mem
            .read_obj(GuestAddress(info.modlist_paddr))
            .expect("read");
        assert_eq!((module.paddr, module.size), (0x100_0000, 0x123));
        assert_eq!(
            usize::try_from(info.memmap_entries).expect("few"),
            map.len()
        );
        for (number, region) in (0u64..).zip(&map) {
            let entry: hvm_memmap_table_entry = mem
                .read_obj(GuestAddress(info.memmap_paddr + number * 24))
                .expect("read");
            let expected = (region.start, region.len, region.kind.e820_type());
            assert_eq!((entry.addr, entry.size, entry.type_), expected);
        }
    }

    #[test]
    fn no_initrd_means_no_module() {
        let mem = create(16).expect("memory");
        write_start_info(&mem, None, &regions(&mem, Conventional::Free).expect("map"))
            .expect("written");
        let info: hvm_start_info = mem.read_obj(GuestAddress(BOOT_INFO_START)).expect("read");
        assert_eq!((info.nr_modules, info.modlist_paddr), (0, 0));
    }
}
