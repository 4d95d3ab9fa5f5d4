//! The Linux zero page (`struct boot_params`), for the 64-bit entry point.
//!
//! Source: the kernel's `Documentation/arch/x86/zero-page.rst` and `boot.rst`.

use linux_loader::bootparam::{E820_MAX_ENTRIES_ZEROPAGE, LOADED_HIGH};

use super::acpi::RSDP_ADDRESS;
use super::bzimage::HEADER_START;
use super::error::BootError;
use super::memory::{CMDLINE_START, GuestMemory, Region, ZERO_PAGE_START, write};
use super::segments::Span;
use super::wire::put;

const SIZE: usize = 4096;
const ACPI_RSDP_ADDR: usize = 0x70;
const EXT_RAMDISK_IMAGE: usize = 0xc0;
const E820_ENTRIES: usize = 0x1e8;
const BOOT_FLAG: usize = 0x1fe;
const HEADER_MAGIC: usize = 0x202;
const VERSION: usize = 0x206;
const TYPE_OF_LOADER: usize = 0x210;
const LOADFLAGS: usize = 0x211;
const CODE32_START: usize = 0x214;
const RAMDISK_IMAGE: usize = 0x218;
const RAMDISK_SIZE: usize = 0x21c;
const CMD_LINE_PTR: usize = 0x228;
const KERNEL_ALIGNMENT: usize = 0x230;
const E820_TABLE: usize = 0x2d0;
const E820_ENTRY_SIZE: usize = 20;

/// A boot loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
/// The newest protocol that is followed here, for kernels that come without a header.
const PROTOCOL_2_15: u16 = 0x20f;

/// Writes the zero page.
///
/// `setup_header` comes from the bzImage; a vmlinux has none and gets a minimal one.
pub(crate) fn write_zero_page(
    mem: &GuestMemory,
    setup_header: Option<&[u8]>,
    kernel_start: u64,
    initrd: Option<Span>,
    regions: &[Region],
) -> Result<(), BootError> {
    let mut page = [0; SIZE];
    match setup_header {
        Some(header) => put(&mut page, HEADER_START, header),
        None => {
            put(&mut page, BOOT_FLAG, &0xaa55u16.to_le_bytes());
            put(&mut page, HEADER_MAGIC, b"HdrS");
            put(&mut page, VERSION, &PROTOCOL_2_15.to_le_bytes());
            put(&mut page, KERNEL_ALIGNMENT, &0x20_0000u32.to_le_bytes());
        }
    }
    page[TYPE_OF_LOADER] = LOADER_UNDEFINED;
    page[LOADFLAGS] |= LOADED_HIGH;
    put(&mut page, CODE32_START, &low_half(kernel_start));
    put(&mut page, CMD_LINE_PTR, &low_half(CMDLINE_START));
    put(&mut page, ACPI_RSDP_ADDR, &RSDP_ADDRESS.to_le_bytes());
    // What a header says of a ramdisk is for its boot loader to fill.
    let (start, len) = initrd.map_or((0, 0), |span| (span.start, span.end - span.start));
    put(&mut page, RAMDISK_IMAGE, &low_half(start));
    put(&mut page, RAMDISK_SIZE, &low_half(len));
    put(&mut page, EXT_RAMDISK_IMAGE, &[0; 8]);

    let regions = &regions[..regions.len().min(E820_MAX_ENTRIES_ZEROPAGE)];
    page[E820_ENTRIES] = u8::try_from(regions.len()).unwrap_or(u8::MAX);
    for (number, region) in regions.iter().enumerate() {
        let at = E820_TABLE + number * E820_ENTRY_SIZE;
        put(&mut page, at, &region.start.to_le_bytes());
        put(&mut page, at + 8, &region.len.to_le_bytes());
        put(&mut page, at + 16, &region.kind.e820_type().to_le_bytes());
    }
    Ok(write(mem, ZERO_PAGE_START, &page)?)
}

/// Everything that is loaded lies below the hole, so the upper half is 0.
fn low_half(address: u64) -> [u8; 4] {
    let [a, b, c, d, ..] = address.to_le_bytes();
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::boot::memory::{Conventional, MIB, create, regions};

    fn page(header: Option<&[u8]>, initrd: Option<Span>) -> Vec<u8> {
        let mem = create(5000).expect("memory");
        let regions = regions(&mem, Conventional::Free).expect("map");
        write_zero_page(&mem, header, 16 * MIB, initrd, &regions).expect("written");
        let mut page = vec![0; SIZE];
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

    #[test]
    fn the_header_is_copied_and_its_ramdisk_replaced() {
        let mut header = vec![0xee; 0x264 - HEADER_START];
        header[LOADFLAGS - HEADER_START] = 0x80;
        let page = page(Some(&header), None);
        assert_eq!(page[0x260..0x264], [0xee; 4]);
        assert_eq!(page[0x264..0x270], [0; 12]);
        assert_eq!(page[LOADFLAGS], 0x81);
        assert_eq!(page[0x218..0x220], [0; 8]);
        assert_eq!(
            page[0x1ef], 0,
            "the sentinel says that the page was cleared"
        );
    }
}
