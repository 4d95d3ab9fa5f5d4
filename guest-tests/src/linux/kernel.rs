//! The kernel inside a bzImage, without what it says of its own types.

use std::io::{self, Read};
use std::ops::Range;

use object::{Object, ObjectSection};

/// `setup_sects`, `payload_offset` and `payload_length` of the setup header
/// (`Documentation/arch/x86/boot.rst`).
const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD: usize = 0x248;
const SECTOR: usize = 512;
/// Output of one block in LZ4's legacy frame.
const LZ4_BLOCK: usize = 8 << 20;

/// The vmlinux in `image`, with zeros in place of BTF: as if it had been built without
/// `CONFIG_DEBUG_INFO_BTF`.
///
/// # Errors
/// It is no bzImage of Debian's, or has no BTF.
pub(super) fn without_btf(image: &[u8]) -> io::Result<Vec<u8>> {
    let bad = || io::Error::other("it is no bzImage, or one that is cut off");
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let sectors = usize::from(*image.get(SETUP_SECTORS).ok_or_else(bad)?);
    let (offset, length) = (word(PAYLOAD), word(PAYLOAD + 4));
    let (offset, length) = offset.zip(length).ok_or_else(bad)?;
    let start = (sectors + 1) * SECTOR + offset;
    let payload = image.get(start..start + length).ok_or_else(bad)?;
    let mut kernel = unpack(payload)?;
    let place = btf(&kernel).ok_or_else(|| io::Error::other("its kernel has no BTF"))?;
    kernel[place].fill(0);
    Ok(kernel)
}

/// Where the types are.
fn btf(kernel: &[u8]) -> Option<Range<usize>> {
    let file = object::File::parse(kernel).ok()?;
    let (start, length) = file.section_by_name(".BTF")?.file_range()?;
    let start = usize::try_from(start).ok()?;
    Some(start..start + usize::try_from(length).ok()?)
}

fn unpack(payload: &[u8]) -> io::Result<Vec<u8>> {
    let mut kernel = Vec::new();
    if payload.starts_with(b"\x28\xb5\x2f\xfd") {
        let decoder = ruzstd::decoding::StreamingDecoder::new(payload);
        decoder
            .map_err(io::Error::other)?
            .read_to_end(&mut kernel)?;
    } else if let Some(mut rest) = payload.strip_prefix(b"\x02\x21\x4c\x18") {
        let mut block = vec![0; LZ4_BLOCK];
        // Behind the blocks is the size of all.
        while let Some((length, blocks)) = rest.split_first_chunk().filter(|(_, it)| !it.is_empty())
        {
            let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
            let (packed, next) = blocks
                .split_at_checked(length)
                .ok_or(io::ErrorKind::UnexpectedEof)?;
            let count = lz4_flex::block::decompress_into(packed, &mut block);
            kernel.extend_from_slice(&block[..count.map_err(io::Error::other)?]);
            rest = next;
        }
    } else {
        return Err(io::Error::other(
            "its kernel is packed with neither zstd nor LZ4",
        ));
    }
    Ok(kernel)
}
