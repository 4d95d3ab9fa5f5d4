//! The Linux zero page (`struct boot_params`), for the 64-bit entry point.
//!
//! Source: the kernel's `Documentation/arch/x86/zero-page.rst` and `boot.rst`.

use linux_loader::bootparam::{
    E820_MAX_ENTRIES_ZEROPAGE, LOADED_HIGH, boot_e820_entry, boot_params,
};
use vm_memory::ByteValued;

use super::acpi::RSDP_ADDRESS;
use super::bzimage::{BOOT_FLAG, HEADER_MAGIC, HEADER_START};
use super::error::BootError;
use super::memory::{BOOT_INFO_START, CMDLINE_START, GuestMemory, Region, ZERO_PAGE_START, write};
use super::segments::Span;

/// A boot loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
/// The newest protocol that is followed here, for kernels that come without a header.
const PROTOCOL_2_15: u16 = 0x20f;

/// `SETUP_RNG_SEED` (`uapi/asm/setup_data.h`), which kernels since Linux 6.0 know.
const RNG_SEED: u32 = 9;

/// Writes a seed for the kernel's random numbers to where `hdr.setup_data` is to lead; the
/// kernel wipes it.
pub(crate) fn write_rng_seed(mem: &GuestMemory, seed: &[u8; 32]) -> Result<u64, BootError> {
    let mut data = Vec::with_capacity(48);
    // `struct setup_data`: next, type, length.
    data.extend(0_u64.to_le_bytes());
    data.extend(RNG_SEED.to_le_bytes());
    data.extend(32_u32.to_le_bytes());
    data.extend(seed);
    write(mem, BOOT_INFO_START, &data)?;
    Ok(BOOT_INFO_START)
}

/// Writes the zero page. `setup_data` is the address of what more the kernel is told, or 0.
///
/// `setup_header` comes from the bzImage; a vmlinux has none and gets a minimal one.
pub(crate) fn write_zero_page(
    mem: &GuestMemory,
    setup_header: Option<&[u8]>,
    kernel_start: u64,
    initrd: Option<Span>,
    regions: &[Region],
    setup_data: u64,
) -> Result<(), BootError> {
    let mut page = boot_params::default();
    if let Some(header) = setup_header {
        // The kernel sets the length, which may be longer than the fields that are known here.
        page.as_mut_slice()[HEADER_START..][..header.len()].copy_from_slice(header);
    } else {
        page.hdr.boot_flag = BOOT_FLAG;
        page.hdr.header = u32::from_le_bytes(*HEADER_MAGIC);
        page.hdr.version = PROTOCOL_2_15;
        page.hdr.kernel_alignment = 0x20_0000;
    }
    page.hdr.type_of_loader = LOADER_UNDEFINED;
    page.hdr.loadflags |= LOADED_HIGH;
    page.hdr.code32_start = low_half(kernel_start);
    page.hdr.cmd_line_ptr = low_half(CMDLINE_START);
    page.hdr.setup_data = setup_data;
    page.acpi_rsdp_addr = RSDP_ADDRESS;
    // The ramdisk fields of a header are for the boot loader to fill.
    let (start, len) = initrd.map_or((0, 0), |span| (span.start, span.end - span.start));
    page.hdr.ramdisk_image = low_half(start);
    page.hdr.ramdisk_size = low_half(len);

    let regions = &regions[..regions.len().min(E820_MAX_ENTRIES_ZEROPAGE)];
    page.e820_entries = u8::try_from(regions.len()).unwrap_or(u8::MAX);
    for (number, region) in regions.iter().enumerate() {
        page.e820_table[number] = boot_e820_entry {
            addr: region.start,
            size: region.len,
            r#type: region.kind.e820_type(),
        };
    }
    Ok(write(mem, ZERO_PAGE_START, page.as_slice())?)
}

/// Everything that is loaded lies below the hole, so the upper half is 0.
fn low_half(address: u64) -> u32 {
    u32::try_from(address).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::boot::memory::{Conventional, MIB, create, regions};

    fn page(header: Option<&[u8]>, initrd: Option<Span>) -> Vec<u8> {
        let mem = create(5000).expect("memory");
        let regions = regions(&mem, Conventional::Free).expect("map");
        write_zero_page(&mem, header, 16 * MIB, initrd, &regions, 0).expect("written");
        let mut page = vec![0; size_of::<boot_params>()];
        mem.read_slice(&mut page, GuestAddress(ZERO_PAGE_START))
            .expect("read");
        page
    }

    #[test]
    fn fields_are_where_linux_reads_them() {
        let page = page(
            None,
            Some(Span {
                start: 0x300_0000,
                end: 0x300_1234,
            }),
        );
        assert_eq!(&page[0x202..0x206], b"HdrS");
        assert_eq!(page[0x210], 0xff);
        assert_eq!(page[0x211] & 1, 1);
        assert_eq!(page[0x218..0x220], [0, 0, 0, 3, 0x34, 0x12, 0, 0]);
        assert_eq!(page[0x228..0x22c], 0x2_0000u32.to_le_bytes());
        assert_eq!(page[0x70..0x78], 0xe_0000u64.to_le_bytes());
        assert_eq!(page[0x1e8], 7);
        assert_eq!(
            page[0x2d0..0x2e4],
            [&[0u8; 8][..], &0x9_fc00u64.to_le_bytes(), &[1, 0, 0, 0]].concat()
        );
        let last = 0x2d0 + 6 * 20;
        assert_eq!(page[last..last + 8], (4u64 << 30).to_le_bytes());
    }

    /// `struct setup_data`: next, type, length, data.
    #[test]
    fn a_seed_is_where_the_zero_page_leads() {
        let mem = create(64).expect("memory");
        let at = write_rng_seed(&mem, &[0x5a; 32]).expect("written");
        let mut data = [0; 48];
        mem.read_slice(&mut data, GuestAddress(at)).expect("read");
        assert_eq!(data[..16], [[0; 8], [9, 0, 0, 0, 32, 0, 0, 0]].concat());
        assert_eq!(data[16..], [0x5a; 32]);
        let regions = regions(&mem, Conventional::Free).expect("map");
        write_zero_page(&mem, None, 16 * MIB, None, &regions, at).expect("written");
        let mut field = [0; 8];
        mem.read_slice(&mut field, GuestAddress(ZERO_PAGE_START + 0x250))
            .expect("read");
        assert_eq!(u64::from_le_bytes(field), at);
    }

    #[test]
    fn the_header_is_copied_and_its_ramdisk_replaced() {
        let mut header = vec![0xee; 0x264 - HEADER_START];
        header[0x211 - HEADER_START] = 0x80;
        let page = page(Some(&header), None);
        assert_eq!(page[0x260..0x264], [0xee; 4]);
        assert_eq!(page[0x264..0x270], [0; 12]);
        assert_eq!(page[0x211], 0x81);
        assert_eq!(page[0x218..0x220], [0; 8]);
        assert_eq!(
            page[0x1ef], 0,
            "the sentinel says that the page was cleared"
        );
    }
}
