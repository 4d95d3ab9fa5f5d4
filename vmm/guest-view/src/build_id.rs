//! The GNU build id of a file that a program has mapped, out of the program's memory: the ELF
//! header at the file's start, and the notes behind it (`elf(5)`).

use std::fmt;

use crate::bytes::{u32_at, u64_at};
use crate::mapping::Mapping;
use crate::space::Space;

/// Most bytes of an id: those of SHA-1.
const MOST: usize = 20;
/// `\x7fELF`, 64 bits, little-endian, version 1.
const MAGIC: [u8; 7] = *b"\x7fELF\x02\x01\x01";
/// Bytes of `Elf64_Ehdr`, `Elf64_Phdr` and `Elf64_Nhdr`.
const HEADER: usize = 64;
const SEGMENT: usize = 56;
const NOTE: usize = 12;
/// Most segments and notes that are looked at; files have some ten of each at most.
const MOST_SEGMENTS: u16 = 32;
const MOST_NOTES: usize = 16;
/// `PT_NOTE` and `NT_GNU_BUILD_ID`.
const NOTES: u32 = 4;
const BUILD_ID: u32 = 3;
const NAME: [u8; 4] = *b"GNU\0";

/// A file's GNU build id, of at most 20 bytes. It is what the program has in its memory, which
/// it may have changed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BuildId {
    bytes: [u8; MOST],
    len: u8,
}

impl BuildId {
    /// Its bytes, at least one.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// In hexadecimal digits.
impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = self.bytes().iter();
        bytes.try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BuildId({self})")
    }
}

/// The id of the file that begins at the start of `first`, if it is in that mapping.
pub(crate) fn read(program: &Space<'_>, first: &Mapping) -> Option<BuildId> {
    let file = FileStart {
        program,
        start: first.start,
        len: first.end.checked_sub(first.start)?,
    };
    let header: [u8; HEADER] = file.array(0)?;
    let half = |bytes: &[u8], at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    if header[..MAGIC.len()] != MAGIC || usize::from(half(&header, 54)) != SEGMENT {
        return None;
    }
    let segments = u64_at(&header, 32);
    (0..half(&header, 56).min(MOST_SEGMENTS)).find_map(|index| {
        let at = segments.checked_add(u64::from(index) * SEGMENT as u64)?;
        let segment: [u8; SEGMENT] = file.array(at)?;
        let kind = u32_at(&segment, 0);
        if kind != NOTES {
            return None;
        }
        // Only these have their content in multiples of another number.
        let align = if u64_at(&segment, 48) == 8 { 8 } else { 4 };
        file.build_id(u64_at(&segment, 8), u64_at(&segment, 32), align)
    })
}

/// What a program has mapped from a file's first byte on.
struct FileStart<'a> {
    program: &'a Space<'a>,
    start: u64,
    len: u64,
}

impl FileStart<'_> {
    fn array<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        let end = offset.checked_add(N as u64)?;
        let inside = end <= self.len;
        inside.then(|| self.program.array(self.start.checked_add(offset)?))?
    }

    /// The id among the notes in the `bytes` bytes at `at`.
    fn build_id(&self, mut at: u64, bytes: u64, align: u64) -> Option<BuildId> {
        let end = at.checked_add(bytes)?;
        for _ in 0..MOST_NOTES {
            let header: [u8; NOTE] = self.array(at)?;
            let part = |at| u32_at(&header, at);
            let (name, content, kind) = (u64::from(part(0)), u64::from(part(4)), part(8));
            let named = at.checked_add(NOTE as u64)?;
            let start = named.checked_add(name)?.checked_next_multiple_of(align)?;
            let behind = start.checked_add(content)?;
            if behind > end {
                return None;
            }
            let is_one = kind == BUILD_ID && name == NAME.len() as u64;
            if is_one && self.array(named) == Some(NAME) {
                return self.id(start, content);
            }
            at = behind.checked_next_multiple_of(align)?;
        }
        None
    }

    fn id(&self, at: u64, bytes: u64) -> Option<BuildId> {
        let len = u8::try_from(bytes).ok()?;
        let mut id = BuildId {
            bytes: [0; MOST],
            len,
        };
        let part = id.bytes.get_mut(..usize::from(len))?;
        let inside = len > 0 && at.checked_add(bytes)? <= self.len;
        (inside && self.program.read(self.start.checked_add(at)?, part)).then_some(id)
    }
}
