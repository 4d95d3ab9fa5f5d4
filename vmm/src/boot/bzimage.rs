//! The bzImage: a setup header, real-mode code that is not used here, and the kernel proper.
//!
//! Source: the kernel's `Documentation/arch/x86/boot.rst`; field names are its own.

use std::mem::offset_of;

use linux_loader::bootparam::{LOADED_HIGH, XLF_KERNEL_64, boot_params, setup_header};
use vm_memory::ByteValued;

use super::error::BootError;
use super::image::Image;
use super::memory::{GuestMemory, HIGH_MEMORY_START};
use super::segments::{Span, check_fit};
use super::wire::{align_up, bytes_at, u16_at};

/// First byte of the setup header, in the file and in the zero page.
pub(crate) const HEADER_START: usize = offset_of!(boot_params, hdr);
/// Where the zero page's next field begins: the header may not reach further.
const HEADER_MAX_END: usize = offset_of!(boot_params, edd_mbr_sig_buffer);
/// The magic number of the header.
pub(crate) const HEADER_MAGIC: &[u8; 4] = b"HdrS";
const MAGIC: usize = HEADER_START + offset_of!(setup_header, header);
/// The last two bytes of every boot sector.
pub(crate) const BOOT_FLAG: u16 = 0xaa55;
/// End of the last field that is read here.
const FIELDS_END: usize = HEADER_START + offset_of!(setup_header, handover_offset);
/// The first protocol version with `xloadflags`.
const VERSION_2_12: u16 = 0x20c;
/// Distance of the 64-bit entry point from the start of the loaded kernel.
const ENTRY_64: u64 = 0x200;
const SECTOR: u64 = 512;

/// A bzImage with its header checked.
#[derive(Debug)]
pub(crate) struct BzImage {
    /// The setup header, from [`HEADER_START`].
    pub(crate) setup_header: Vec<u8>,
    /// Longest command line in bytes, without its terminator.
    pub(crate) cmdline_limit: usize,
    /// Highest address that an initrd may take.
    pub(crate) initrd_addr_max: u64,
    kernel_offset: u64,
    kernel_len: u64,
    payload_offset: u64,
    payload_len: usize,
    relocatable: bool,
    pref_address: u64,
    kernel_alignment: u64,
    init_size: u64,
}

/// Whether the bytes begin like a bzImage.
pub(crate) fn is_bzimage(head: &[u8]) -> bool {
    let boot_flag = HEADER_START + offset_of!(setup_header, boot_flag);
    u16_at(head, boot_flag) == Some(BOOT_FLAG) && bytes_at(head, MAGIC) == Some(*HEADER_MAGIC)
}

/// Reads and checks the setup header.
pub(crate) fn parse(image: &Image) -> Result<BzImage, BootError> {
    let fields = image.read(
        HEADER_START as u64,
        FIELDS_END - HEADER_START,
        "the setup header",
    )?;
    // Fields that are not read here stay 0.
    let mut header = setup_header::default();
    header.as_mut_slice()[..fields.len()].copy_from_slice(&fields);
    check_entry(&header, image)?;
    // The second byte of the jump over the header is the header's length.
    let [_, header_len] = header.jump.to_le_bytes();
    let header_end = MAGIC + usize::from(header_len);
    if !(FIELDS_END..=HEADER_MAX_END).contains(&header_end) {
        return Err(malformed(
            image,
            "its setup header has an impossible length",
        ));
    }
    let kernel_alignment = u64::from(header.kernel_alignment);
    if !kernel_alignment.is_power_of_two() {
        return Err(malformed(
            image,
            "its kernel_alignment is not a power of two",
        ));
    }
    let (kernel_offset, kernel_len) = kernel_part(&header, image)?;
    let init_size = u64::from(header.init_size);
    if init_size < kernel_len {
        return Err(malformed(
            image,
            "its init_size is smaller than the kernel itself",
        ));
    }
    Ok(BzImage {
        setup_header: image.read(
            HEADER_START as u64,
            header_end - HEADER_START,
            "the setup header",
        )?,
        cmdline_limit: usize::try_from(header.cmdline_size).unwrap_or(usize::MAX),
        initrd_addr_max: header.initrd_addr_max.into(),
        kernel_offset,
        kernel_len,
        payload_offset: kernel_offset.saturating_add(header.payload_offset.into()),
        payload_len: usize::try_from(header.payload_length).unwrap_or(usize::MAX),
        relocatable: header.relocatable_kernel != 0,
        pref_address: header.pref_address,
        kernel_alignment,
        init_size,
    })
}

fn malformed(image: &Image, what: &str) -> BootError {
    BootError::Malformed {
        path: image.path().to_owned(),
        what: what.into(),
    }
}

/// Whether the kernel can be entered in 64-bit mode.
fn check_entry(header: &setup_header, image: &Image) -> Result<(), BootError> {
    let what = if header.version < VERSION_2_12 {
        "its boot protocol is older than 2.12; give Linux 3.8 or later"
    } else if header.loadflags & LOADED_HIGH == 0 {
        "it is a zImage, which loads low; give a bzImage"
    } else if header.xloadflags & XLF_KERNEL_64 == 0 {
        "it has no 64-bit entry point; give an x86-64 kernel"
    } else {
        return Ok(());
    };
    Err(BootError::Unsupported {
        path: image.path().to_owned(),
        what: what.into(),
    })
}

/// Where the kernel proper begins in the file, and its length.
fn kernel_part(header: &setup_header, image: &Image) -> Result<(u64, u64), BootError> {
    // The protocol defines 0 as 4.
    let setup_sects = match header.setup_sects {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let kernel_offset = (setup_sects + 1) * SECTOR;
    let declared = u64::from(header.syssize) * 16;
    let present = image.len().saturating_sub(kernel_offset);
    // The last 16-byte unit may be partly filled.
    if present + 15 < declared {
        return Err(BootError::Truncated {
            role: image.role(),
            path: image.path().to_owned(),
            what: "the kernel",
            needed: kernel_offset + declared,
            len: image.len(),
        });
    }
    let kernel_len = declared.min(present);
    if kernel_len <= ENTRY_64 {
        return Err(malformed(image, "it ends before its 64-bit entry point"));
    }
    Ok((kernel_offset, kernel_len))
}

impl BzImage {
    /// Copies the kernel proper and returns where it begins and which memory it will use.
    ///
    /// A relocatable kernel goes straight to its preferred address, because its decompressor would
    /// move there from any lower one. Any other kernel is loaded at 1 MiB and moves itself.
    pub(crate) fn load(&self, image: &Image, mem: &GuestMemory) -> Result<(u64, Span), BootError> {
        let runs_at = self
            .runs_at()
            .filter(|start| start.checked_add(self.init_size).is_some())
            .ok_or_else(|| BootError::Malformed {
                path: image.path().to_owned(),
                what: "its preferred address is beyond the address space".into(),
            })?;
        let loads_at = if self.relocatable {
            runs_at
        } else {
            HIGH_MEMORY_START
        };
        let span = Span {
            start: loads_at.min(runs_at),
            end: (runs_at + self.init_size).max(loads_at + self.kernel_len),
        };
        check_fit(image, mem, span)?;
        image.copy_to_guest(
            mem,
            loads_at,
            self.kernel_offset,
            self.kernel_len,
            "the kernel",
        )?;
        Ok((loads_at, span))
    }

    /// The 64-bit entry point of a kernel that was loaded at `start`.
    pub(crate) fn entry_64(start: u64) -> u64 {
        start + ENTRY_64
    }

    /// The compressed kernel inside.
    pub(crate) fn payload(&self, image: &Image) -> Result<Vec<u8>, BootError> {
        image.read(
            self.payload_offset,
            self.payload_len,
            "the compressed payload",
        )
    }

    /// `runtime_start` of the protocol.
    fn runs_at(&self) -> Option<u64> {
        if self.relocatable {
            align_up(
                self.pref_address.max(HIGH_MEMORY_START),
                self.kernel_alignment,
            )
        } else {
            Some(self.pref_address)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::boot::memory::{MIB, create};
    use crate::boot::testing::BzImageBuilder;

    /// Where a field of the setup header lies in the file.
    macro_rules! at {
        ($field:ident) => {
            HEADER_START + offset_of!(setup_header, $field)
        };
    }

    fn image(bytes: Vec<u8>) -> Image {
        Image::from_bytes("kernel", Path::new("k"), bytes)
    }

    fn check(bytes: Vec<u8>, mib: u64, expected: Result<(u64, u64, u64), &str>) {
        let image = image(bytes);
        let mem = create(mib).expect("memory");
        let result = parse(&image).and_then(|kernel| kernel.load(&image, &mem));
        match (result, expected) {
            (Ok((start, span)), Ok(expected)) => {
                assert_eq!((start, span.start, span.end), expected);
                let first: [u8; 4] = mem.read_obj(GuestAddress(start)).expect("inside");
                assert_eq!(&first, b"KERN");
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (result, expected) => panic!("{result:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn kernels_load_where_they_run() {
        let builder = || BzImageBuilder::new(b"payload");
        let run = 16 * MIB;
        let end = run + 4 * MIB;
        check(builder().build(), 32, Ok((run, run, end)));
        check(
            builder().set_u8(at!(relocatable_kernel), 0).build(),
            32,
            Ok((MIB, MIB, end)),
        );
        check(
            builder().set_u64(at!(pref_address), 0).build(),
            32,
            Ok((2 * MIB, 2 * MIB, 6 * MIB)),
        );
        check(
            builder().build(),
            19,
            Err("needs 20 MiB, the guest has 19 MiB"),
        );
    }

    #[test]
    fn headers_are_checked() {
        let builder = || BzImageBuilder::new(b"payload");
        let cases = [
            (builder().set_u16(at!(version), 0x20b), "older than 2.12"),
            (builder().set_u8(at!(loadflags), 0), "zImage"),
            (builder().set_u16(at!(xloadflags), 2), "no 64-bit entry"),
            (builder().set_u8(at!(jump) + 1, 0x20), "impossible length"),
            (builder().set_u8(at!(jump) + 1, 0xff), "impossible length"),
            (builder().set_u32(at!(kernel_alignment), 0), "power of two"),
            (builder().set_u32(at!(kernel_alignment), 3), "power of two"),
            (builder().set_u32(at!(syssize), u32::MAX), "truncated"),
            (
                builder().set_u32(at!(syssize), 1),
                "ends before its 64-bit entry",
            ),
            (builder().set_u32(at!(init_size), 16), "init_size"),
            (
                builder().set_u64(at!(pref_address), u64::MAX),
                "address space",
            ),
            (builder().set_u64(at!(pref_address), 1 << 40), "hole"),
            (
                builder()
                    .set_u8(at!(relocatable_kernel), 0)
                    .set_u64(at!(pref_address), 0),
                "1 MiB or above",
            ),
        ];
        for (builder, part) in cases {
            check(builder.build(), 32, Err(part));
        }
        check(
            builder().build()[..0x250].to_vec(),
            32,
            Err("the setup header ends"),
        );
    }

    #[test]
    fn the_payload_is_found_and_bounded() {
        let bytes = BzImageBuilder::new(b"payload").build();
        let image = image(bytes);
        let kernel = parse(&image).expect("header");
        assert_eq!(kernel.payload(&image).expect("payload"), b"payload");
        assert_eq!(kernel.cmdline_limit, 2047);
        let beyond = BzImageBuilder::new(b"payload")
            .set_u32(at!(payload_length), u32::MAX)
            .build();
        let image = self::image(beyond);
        let error = parse(&image)
            .and_then(|kernel| kernel.payload(&image))
            .expect_err("beyond");
        assert!(
            error.to_string().contains("payload ends at byte"),
            "{error}"
        );
    }
}
