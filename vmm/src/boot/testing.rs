//! Builders of small kernel images for the tests.

use std::io::Write;

use liblzma::stream::{Check, Filters, LzmaOptions, Stream};
use liblzma::write::XzEncoder;

use super::unpack::Compression;

/// Every compression that a kernel can have.
pub(crate) const FORMATS: [Compression; 6] = [
    Compression::Gzip,
    Compression::Xz,
    Compression::Zstd,
    Compression::Lz4,
    Compression::Lzma,
    Compression::Bzip2,
];

/// Compresses as the kernel's build does, without the appended size.
pub(crate) fn compress(format: Compression, data: &[u8]) -> Vec<u8> {
    let xz = |stream: Stream| {
        let mut encoder = XzEncoder::new_stream(Vec::new(), stream);
        encoder.write_all(data).expect("compressed");
        encoder.finish().expect("compressed")
    };
    let options = LzmaOptions::new_preset(0).expect("preset");
    match format {
        Compression::Gzip => {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(data).expect("compressed");
            encoder.finish().expect("compressed")
        }
        Compression::Bzip2 => {
            let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
            encoder.write_all(data).expect("compressed");
            encoder.finish().expect("compressed")
        }
        Compression::Xz => {
            let mut filters = Filters::new();
            filters.x86().lzma2(&options);
            xz(Stream::new_stream_encoder(&filters, Check::Crc32).expect("encoder"))
        }
        Compression::Lzma => xz(Stream::new_lzma_encoder(&options).expect("encoder")),
        Compression::Zstd => {
            ruzstd::encoding::compress_to_vec(data, ruzstd::encoding::CompressionLevel::Fastest)
        }
        Compression::Lz4 => {
            let mut frame = 0x184c_2102u32.to_le_bytes().to_vec();
            for block in data.chunks(8 << 20) {
                let block = lz4_flex::block::compress(block);
                frame.extend(u32::try_from(block.len()).expect("short").to_le_bytes());
                frame.extend(block);
            }
            frame
        }
    }
}

/// A Multiboot header with the right checksum.
pub(crate) fn multiboot_header(flags: u32) -> Vec<u8> {
    let magic = 0x1bad_b002u32;
    let checksum = 0u32.wrapping_sub(magic.wrapping_add(flags));
    [magic, flags, checksum]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect()
}

/// One ELF note.
pub(crate) fn note(name: &[u8], kind: u32, content: &[u8]) -> Vec<u8> {
    let len = |part: &[u8]| u32::try_from(part.len()).expect("short").to_le_bytes();
    let mut note = [len(name), len(content), kind.to_le_bytes()].concat();
    for part in [name, content] {
        note.extend_from_slice(part);
        note.resize(note.len().next_multiple_of(4), 0);
    }
    note
}

/// Builds ELF executables.
#[derive(Debug, Clone)]
pub(crate) struct ElfBuilder {
    is_64: bool,
    entry: u64,
    parts: Vec<Part>,
}

#[derive(Debug, Clone)]
struct Part {
    kind: u32,
    address: u64,
    data: Vec<u8>,
    memory_len: u64,
}

impl ElfBuilder {
    pub(crate) fn elf32() -> Self {
        Self {
            is_64: false,
            entry: 0x10_0000,
            parts: Vec::new(),
        }
    }

    pub(crate) fn elf64() -> Self {
        Self {
            is_64: true,
            ..Self::elf32()
        }
    }

    pub(crate) fn entry(self, entry: u64) -> Self {
        Self { entry, ..self }
    }

    pub(crate) fn segment(self, address: u64, data: &[u8], memory_len: u64) -> Self {
        self.part(1, address, data, memory_len)
    }

    pub(crate) fn interpreter(self) -> Self {
        self.part(3, 0, b"/lib/ld.so\0", 11)
    }

    pub(crate) fn notes(self, notes: &[u8]) -> Self {
        self.part(4, 0, notes, notes.len() as u64)
    }

    fn part(mut self, kind: u32, address: u64, data: &[u8], memory_len: u64) -> Self {
        self.parts.push(Part {
            kind,
            address,
            data: data.to_vec(),
            memory_len,
        });
        self
    }

    /// Where the first part's bytes lie in the file.
    pub(crate) fn data_offset(&self) -> u64 {
        let (header, entry) = if self.is_64 { (64, 56) } else { (52, 32) };
        header + entry * self.parts.len() as u64
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let word = |value: u64| {
            let len = if self.is_64 { 8 } else { 4 };
            value.to_le_bytes()[..len].to_vec()
        };
        let half = |value: u16| value.to_le_bytes().to_vec();
        let (class, machine, header_len, entry_len) = if self.is_64 {
            (2, 62, 64u16, 56)
        } else {
            (1, 3, 52, 32)
        };
        let mut file = b"\x7fELF".to_vec();
        file.extend([class, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let executable = 2;
        let count = u16::try_from(self.parts.len()).expect("few");
        file.extend([half(executable), half(machine), vec![1, 0, 0, 0]].concat());
        file.extend(
            [
                word(self.entry),
                word(header_len.into()),
                word(0),
                vec![0; 4],
            ]
            .concat(),
        );
        file.extend([header_len, entry_len, count, 0, 0, 0].map(half).concat());

        let mut offset = self.data_offset();
        let mut content = Vec::new();
        for Part {
            kind,
            address,
            data,
            memory_len,
        } in &self.parts
        {
            let len = data.len() as u64;
            let flags = vec![7, 0, 0, 0];
            file.extend(kind.to_le_bytes());
            if self.is_64 {
                file.extend(&flags);
            }
            let fields = [offset, *address, *address, len, *memory_len];
            file.extend(fields.map(word).concat());
            if !self.is_64 {
                file.extend(&flags);
            }
            file.extend(word(4));
            content.extend_from_slice(data);
            content.resize(content.len().next_multiple_of(4), 0);
            offset += len.next_multiple_of(4);
        }
        file.extend(content);
        file
    }
}

/// Builds bzImages whose kernel begins with "KERN".
#[derive(Debug, Clone)]
pub(crate) struct BzImageBuilder {
    bytes: Vec<u8>,
}

impl BzImageBuilder {
    pub(crate) fn new(payload: &[u8]) -> Self {
        let kernel_offset = 1024;
        let payload_offset = 0x210;
        let mut bytes = vec![0; kernel_offset + payload_offset];
        bytes[kernel_offset..kernel_offset + 4].copy_from_slice(b"KERN");
        bytes.extend_from_slice(payload);
        let len = |len: usize| u32::try_from(len).expect("short");
        let paragraphs = len((bytes.len() - kernel_offset).div_ceil(16));
        let init_size = len((4 << 20) + 2 * payload.len()) & !0xf_ffff;
        Self { bytes }
            .set_u8(0x1f1, 1)
            .set_u32(0x1f4, paragraphs)
            .set_u16(0x1fe, 0xaa55)
            .set_u16(0x200, 0x6aeb)
            .set_u32(0x202, u32::from_le_bytes(*b"HdrS"))
            .set_u16(0x206, 0x20f)
            .set_u8(0x211, 1)
            .set_u32(0x22c, 0x7fff_ffff)
            .set_u32(0x230, 0x20_0000)
            .set_u8(0x234, 1)
            .set_u16(0x236, 1)
            .set_u32(0x238, 2047)
            .set_u32(0x248, len(payload_offset))
            .set_u32(0x24c, len(payload.len()))
            .set_u64(0x258, 16 << 20)
            .set_u32(0x260, init_size)
    }

    pub(crate) fn set_u8(self, offset: usize, value: u8) -> Self {
        self.set(offset, &[value])
    }

    pub(crate) fn set_u16(self, offset: usize, value: u16) -> Self {
        self.set(offset, &value.to_le_bytes())
    }

    pub(crate) fn set_u32(self, offset: usize, value: u32) -> Self {
        self.set(offset, &value.to_le_bytes())
    }

    pub(crate) fn set_u64(self, offset: usize, value: u64) -> Self {
        self.set(offset, &value.to_le_bytes())
    }

    fn set(mut self, offset: usize, value: &[u8]) -> Self {
        self.bytes[offset..offset + value.len()].copy_from_slice(value);
        self
    }

    pub(crate) fn build(self) -> Vec<u8> {
        self.bytes
    }
}
