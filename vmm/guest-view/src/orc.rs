//! ORC, a kernel's own unwind tables (`arch/x86/include/asm/orc_types.h`,
//! `Documentation/arch/x86/orc-unwinder.rst`): for every instruction, where the caller's
//! frame is.

use crate::btf::{BitField, Btf, BtfError};
use crate::space::Space;

/// Most entries of a table.
const MOST: usize = 8 << 20;
/// Most bytes of code (`KERNEL_IMAGE_SIZE` with KASLR).
const MOST_CODE: u32 = 1 << 30;
/// Bytes of code to one entry of the index (`LOOKUP_BLOCK_SIZE` of `orc_lookup.h`).
const BLOCK: u32 = 256;
/// Bytes of an entry.
const ENTRY: u32 = 6;

/// Where the caller's stack pointer comes from (`ORC_REG_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Base {
    Undefined,
    PreviousSp,
    Ax,
    Dx,
    Di,
    Bp,
    Sp,
    R10,
    R13,
    BpIndirect,
    SpIndirect,
}

/// What lies where the caller's frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// Nobody knows.
    Undefined,
    /// This is the outermost frame.
    End,
    /// A return address below the caller's stack pointer.
    Call,
    /// All registers of what was interrupted, as `struct pt_regs`.
    Registers,
    /// The processor's own part of them: from `ip` on.
    Interrupt,
}

/// How to get from an instruction's frame to its caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) sp: Base,
    pub(crate) sp_offset: i16,
    pub(crate) bp: Base,
    pub(crate) bp_offset: i16,
    pub(crate) kind: FrameKind,
    /// The caller was interrupted at its address, and did not call.
    pub(crate) interrupted: bool,
}

/// Which number stands for which register: the position in each. No kernel's types say it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Numbers {
    /// From 4.14 on.
    First,
    /// Those of 7.3.
    Second,
}

impl Numbers {
    const FIRST: [Base; 10] = [
        Base::Undefined,
        Base::PreviousSp,
        Base::Dx,
        Base::Di,
        Base::Bp,
        Base::Sp,
        Base::R10,
        Base::R13,
        Base::BpIndirect,
        Base::SpIndirect,
    ];
    const SECOND: [Base; 11] = [
        Base::Undefined,
        Base::Ax,
        Base::Dx,
        Base::Sp,
        Base::Bp,
        Base::Di,
        Base::R10,
        Base::R13,
        Base::PreviousSp,
        Base::SpIndirect,
        Base::BpIndirect,
    ];

    fn base(self, number: u64) -> Option<Base> {
        let all: &[Base] = match self {
            Self::First => &Self::FIRST,
            Self::Second => &Self::SECOND,
        };
        all.get(usize::try_from(number).ok()?).copied()
    }
}

/// Where a kernel's `struct orc_entry` has what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Format {
    sp: u32,
    bp: u32,
    kind: BitField,
    /// Says that the caller was interrupted: since 6.3. Before, the kind says it.
    signal: Option<u32>,
    /// Says that this is the outermost frame: up to 6.3. Since then, the kind says it.
    end: Option<u32>,
    numbers: Numbers,
}

impl Format {
    /// By the kernel's own description.
    pub(crate) fn of(btf: &Btf) -> Result<Self, BtfError> {
        const NAME: &str = "orc_entry";
        let unexpected = || BtfError::Unexpected(NAME.to_owned());
        let field = |name, width| {
            let found = btf.bit_field(NAME, name)?;
            let end = found.offset.checked_add(found.width);
            let inside = end.is_some_and(|end| end <= 8 * ENTRY);
            let right = inside && found.width == width;
            right.then_some(found.offset).ok_or_else(unexpected)
        };
        let half = |name, offset| {
            let found = btf.member(NAME, name)?;
            let right = found.offset == offset && found.size == 2;
            right.then_some(()).ok_or_else(unexpected)
        };
        let optional = |name| match field(name, 1) {
            Err(BtfError::Missing(_)) => Ok(None),
            found => found.map(Some),
        };
        half("sp_offset", 0)?;
        half("bp_offset", 2)?;
        if btf.size_of(NAME)? != ENTRY {
            return Err(unexpected());
        }
        let kind = btf.bit_field(NAME, "type")?;
        let format = Self {
            sp: field("sp_reg", 4)?,
            bp: field("bp_reg", 4)?,
            kind,
            signal: optional("signal")?,
            end: optional("end")?,
            numbers: Numbers::First,
        };
        // 4.14 to 6.3: two bits, and one of its own for the end. Since 6.4: three bits.
        let known = matches!(
            (kind.width, format.end, format.signal),
            (2, Some(_), _) | (3, None, Some(_))
        );
        let end = kind.offset.checked_add(kind.width);
        let inside = end.is_some_and(|end| end <= 8 * ENTRY);
        (known && inside).then_some(format).ok_or_else(unexpected)
    }

    /// The same with the numbers that the kernel's own table uses: nearly all frames are found
    /// by the stack pointer, and by no other register as many.
    fn numbered(self, entries: &[[u8; 6]]) -> Self {
        let by = |numbers: Numbers| {
            let format = Self { numbers, ..self };
            let is_usual = |entry: Entry| entry.kind == FrameKind::Call && entry.sp == Base::Sp;
            let usual = |bytes: &&[u8; 6]| format.decode(**bytes).is_some_and(is_usual);
            (entries.iter().filter(usual).count(), format)
        };
        let (first, second) = (by(Numbers::First), by(Numbers::Second));
        if second.0 > first.0 {
            second.1
        } else {
            first.1
        }
    }

    fn decode(&self, bytes: [u8; 6]) -> Option<Entry> {
        let mut whole = [0; 8];
        whole[..6].copy_from_slice(&bytes);
        let whole = u64::from_le_bytes(whole);
        let base = |number| self.numbers.base(number);
        let bits = |offset: u32, width: u32| whole >> offset & ((1 << width) - 1);
        let is_set = |bit: Option<u32>| bit.map(|bit| bits(bit, 1) != 0);
        let sp = base(bits(self.sp, 4))?;
        let kind = bits(self.kind.offset, self.kind.width);
        let frame = match is_set(self.end) {
            Some(end) => match (sp, end, kind) {
                (Base::Undefined, true, _) => FrameKind::End,
                (Base::Undefined, false, _) => FrameKind::Undefined,
                (_, _, 0) => FrameKind::Call,
                (_, _, 1) => FrameKind::Registers,
                (_, _, 2) => FrameKind::Interrupt,
                _ => return None,
            },
            None => match kind {
                0 => FrameKind::Undefined,
                1 => FrameKind::End,
                2 => FrameKind::Call,
                3 => FrameKind::Registers,
                4 => FrameKind::Interrupt,
                _ => return None,
            },
        };
        let by_kind = matches!(frame, FrameKind::Registers | FrameKind::Interrupt);
        Some(Entry {
            sp,
            sp_offset: i16::from_le_bytes([bytes[0], bytes[1]]),
            bp: base(bits(self.bp, 4))?,
            bp_offset: i16::from_le_bytes([bytes[2], bytes[3]]),
            kind: frame,
            interrupted: is_set(self.signal).unwrap_or(by_kind),
        })
    }
}

/// A table, copied out of the guest.
#[derive(Debug)]
pub(crate) struct Table {
    format: Format,
    /// What the addresses are relative to.
    start: u64,
    addresses: Vec<u32>,
    entries: Vec<[u8; 6]>,
    /// For each block of code, the first entry that begins in it or behind it.
    blocks: Vec<u32>,
}

impl Table {
    /// How its entries are to be read.
    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// The kernel's own table, which also says how modules' are to be read.
    pub(crate) fn of_kernel(mut self) -> Self {
        self.format = self.format.numbered(&self.entries);
        self
    }

    /// The table of `count` entries at `entries`, whose addresses are at `addresses`;
    /// `None` where it is not in order, or covers more than 1 GiB.
    pub(crate) fn read(
        space: &Space<'_>,
        format: Format,
        addresses: u64,
        entries: u64,
        count: usize,
    ) -> Option<Self> {
        if count == 0 || count > MOST {
            return None;
        }
        let places = space.bytes(addresses, 4 * count)?;
        let ats = (0..).map(|place: u64| addresses.wrapping_add(4 * place));
        let places = places.chunks_exact(4).zip(ats);
        let places = places.map(|(word, at)| {
            let relative = i32::from_le_bytes(word.try_into().unwrap_or_default());
            at.wrapping_add_signed(i64::from(relative))
        });
        let places: Vec<u64> = places.collect();
        let start = *places.first()?;
        if !places.is_sorted() {
            return None;
        }
        let relative = places.iter().map(|at| u32::try_from(at - start).ok());
        let addresses: Vec<u32> = relative.collect::<Option<_>>()?;
        let raw = space.bytes(entries, 6 * count)?;
        let raw = raw.chunks_exact(6);
        let entries = raw.map(|entry| entry.try_into().unwrap_or_default());
        let last = *addresses.last()?;
        let count = last / BLOCK + 1;
        if last > MOST_CODE || !space.charge(4 * count as usize) {
            return None;
        }
        let mut blocks = Vec::with_capacity(count as usize);
        for (index, address) in (0u32..).zip(&addresses) {
            while blocks.len() <= (address / BLOCK) as usize {
                blocks.push(index);
            }
        }
        Some(Self {
            format,
            start,
            entries: entries.collect(),
            addresses,
            blocks,
        })
    }

    /// What the table says of the instruction at `address`: its last entry that does not
    /// begin behind it, as `__orc_find` of `arch/x86/kernel/unwind_orc.c` has it.
    pub(crate) fn find(&self, address: u64) -> Option<Entry> {
        let relative = u32::try_from(address.checked_sub(self.start)?).unwrap_or(u32::MAX);
        let block = (relative / BLOCK) as usize;
        let bound = |block: usize| self.blocks.get(block).map(|index| *index as usize);
        let first = bound(block).unwrap_or(self.addresses.len());
        let end = bound(block + 1).unwrap_or(self.addresses.len());
        let within = self.addresses[first..end].partition_point(|at| *at <= relative);
        let index = (first + within).checked_sub(1)?;
        self.format.decode(self.entries[index])
    }
}
