//! ELF files with one loadable segment (System V ABI, "Object Files").

/// File offset of the segment: inside the 8 KiB in which a Multiboot header is
/// searched.
const SEGMENT_OFFSET: usize = 0x1000;
const NOTE_OFFSET: usize = 0x200;

const ET_EXEC: u16 = 2;
const EM_386: u16 = 3;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const READ_WRITE_EXECUTE: u32 = 7;

/// What a file holds.
#[derive(Debug)]
pub(super) struct Image<'a> {
    pub(super) is_64: bool,
    pub(super) address: u32,
    pub(super) entry: u32,
    pub(super) bytes: &'a [u8],
    /// Bytes in memory; what the file lacks is zero.
    pub(super) size: u32,
    /// Contents of a note segment.
    pub(super) note: &'a [u8],
}

/// The file.
pub(super) fn write(image: &Image<'_>) -> Vec<u8> {
    let mut file = header(image);
    let file_len = word(image.bytes.len());
    file.extend(program_header(
        image.is_64,
        PT_LOAD,
        word(SEGMENT_OFFSET),
        image.address,
        file_len,
        image.size.max(file_len),
    ));
    if !image.note.is_empty() {
        let len = word(image.note.len());
        file.extend(program_header(
            image.is_64,
            PT_NOTE,
            word(NOTE_OFFSET),
            0,
            len,
            len,
        ));
        file.resize(NOTE_OFFSET, 0);
        file.extend(image.note);
    }
    file.resize(SEGMENT_OFFSET, 0);
    file.extend(image.bytes);
    file
}

fn word(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// An address, offset or size in the file's class.
fn native(is_64: bool, value: u32) -> Vec<u8> {
    match is_64 {
        true => u64::from(value).to_le_bytes().to_vec(),
        false => value.to_le_bytes().to_vec(),
    }
}

fn header(image: &Image<'_>) -> Vec<u8> {
    let (class, machine, len, entry_len) = match image.is_64 {
        true => (2, EM_X86_64, 64u16, 56u16),
        false => (1, EM_386, 52, 32),
    };
    let segments = if image.note.is_empty() { 1u16 } else { 2 };
    let mut bytes = vec![0x7f, b'E', b'L', b'F', class, 1, 1];
    bytes.resize(16, 0);
    bytes.extend(ET_EXEC.to_le_bytes());
    bytes.extend(machine.to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(native(image.is_64, image.entry));
    bytes.extend(native(image.is_64, len.into()));
    bytes.extend(native(image.is_64, 0));
    bytes.extend(0u32.to_le_bytes());
    for half in [len, entry_len, segments, 0, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    bytes
}

fn program_header(
    is_64: bool,
    kind: u32,
    offset: u32,
    address: u32,
    file_len: u32,
    memory_len: u32,
) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    if is_64 {
        bytes.extend(READ_WRITE_EXECUTE.to_le_bytes());
    }
    for value in [offset, address, address, file_len, memory_len] {
        bytes.extend(native(is_64, value));
    }
    if !is_64 {
        bytes.extend(READ_WRITE_EXECUTE.to_le_bytes());
    }
    bytes.extend(native(is_64, 4));
    bytes
}
