//! Recognises a kernel by the content of its file.

use super::bzimage::{self, BzImage};
use super::elf::{self, Elf};
use super::error::BootError;
use super::image::Image;
use super::multiboot::{self, MultibootKernel};
use super::unpack;
use super::wire::u32_at;

/// A kernel with its headers read.
#[derive(Debug)]
pub(crate) enum Kernel {
    /// Linux with its own decompressor.
    BzImage(BzImage),
    /// An ELF file: Linux unpacked, or anything with a PVH entry point.
    Elf(Elf),
    /// Multiboot v1.
    Multiboot(MultibootKernel),
}

/// Reads the headers of whatever kind of kernel this is.
///
/// # Errors
/// When it is none, or when its headers are not sound.
pub(crate) fn recognise(image: &Image) -> Result<Kernel, BootError> {
    let head = image.head(multiboot::SEARCH_LEN)?;
    if bzimage::is_bzimage(&head) {
        return bzimage::parse(image).map(Kernel::BzImage);
    }
    if let Some(header) = multiboot::find_header(&head) {
        return multiboot::parse(image, header).map(Kernel::Multiboot);
    }
    if elf::is_elf(&head) {
        return elf::parse(image).map(Kernel::Elf);
    }
    Err(BootError::NotAKernel {
        path: image.path().to_owned(),
        seen: what_is_it(&head),
    })
}

/// Well-known beginnings of files that people take for kernels.
const LOOKALIKES: [(&[u8], &str); 7] = [
    (b"MZ", "a PE executable without a Linux boot header"),
    (b"#!", "a script"),
    (
        b"070701",
        "a cpio archive; if it is the initrd, give it with --initrd",
    ),
    (
        b"070702",
        "a cpio archive; if it is the initrd, give it with --initrd",
    ),
    (b"!<arch>", "an archive, perhaps a package: unpack it first"),
    (b"\x27\x05\x19\x56", "a U-Boot image"),
    (b"QFI\xfb", "a disk image"),
];
const MULTIBOOT2_MAGIC: u32 = 0xe852_50d6;

pub(crate) fn what_is_it(head: &[u8]) -> String {
    if head.is_empty() {
        return "an empty file".into();
    }
    if let Some(format) = unpack::detect(head) {
        return format!("a {format} file: unpack it first");
    }
    if let Some((_, name)) = LOOKALIKES.iter().find(|(magic, _)| head.starts_with(magic)) {
        return (*name).into();
    }
    let is_multiboot2 = |offset| u32_at(head, offset) == Some(MULTIBOOT2_MAGIC);
    if (0..head.len()).step_by(8).any(is_multiboot2) {
        return "a Multiboot 2 kernel".into();
    }
    format!(
        "a file that begins with {:02x?}",
        &head[..head.len().min(8)]
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::boot::testing::{BzImageBuilder, ElfBuilder, multiboot_header};

    fn check(bytes: &[u8], expected: &str) {
        let image = Image::from_bytes("kernel", Path::new("some/file.gz"), bytes.to_vec());
        let found = match recognise(&image) {
            Ok(Kernel::BzImage(_)) => "bzImage".into(),
            Ok(Kernel::Elf(_)) => "ELF".into(),
            Ok(Kernel::Multiboot(_)) => "Multiboot".into(),
            Err(error) => error.to_string(),
        };
        assert!(found.contains(expected), "{found}, expected {expected}");
    }

    #[test]
    fn kinds_are_told_by_content() {
        check(&BzImageBuilder::new(b"payload").build(), "bzImage");
        check(
            &ElfBuilder::elf64().segment(0x10_0000, b"code", 4).build(),
            "ELF",
        );
        let code = multiboot_header(0);
        check(
            &ElfBuilder::elf32().segment(0x10_0000, &code, 12).build(),
            "Multiboot",
        );
        check(
            &ElfBuilder::elf64().segment(0x10_0000, &code, 12).build(),
            "Multiboot",
        );
    }

    #[test]
    fn what_is_no_kernel_is_named() {
        check(b"", "it is an empty file");
        check(b"\x1f\x8b\x08\0", "a gzip file: unpack it first");
        check(b"070701000", "--initrd");
        check(b"#!/bin/sh\n", "a script");
        check(b"MZ\0\0", "PE executable");
        check(b"\0\0\0\0\0\0\0\0\xd6\x50\x52\xe8", "Multiboot 2");
        check(b"hello", "begins with [68, 65, 6c, 6c, 6f]");
        check(
            b"\x7fELF",
            "the ELF header ends at byte 20, the file has 4 bytes",
        );
    }
}
