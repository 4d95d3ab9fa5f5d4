//! The kernel's own symbols: the compressed table that `scripts/kallsyms.c` makes and
//! `kernel/kallsyms.c` reads, by the addresses that VMCOREINFO has since 6.0.

use std::ops::Range;

use crate::note::Note;
use crate::space::Space;
use crate::symbols::{LONGEST, MOST, SymbolTable};
use crate::text::visible;

/// Most bytes of compressed names.
const MOST_NAMES: u64 = 64 << 20;
/// Bytes of names that are read at once.
const CHUNK: usize = 1 << 16;
/// Most bytes of the 256 tokens.
const MOST_TOKENS: usize = 1 << 16;

/// How `kallsyms_offsets` says an address.
#[derive(Clone, Copy)]
enum Offsets {
    /// `CONFIG_KALLSYMS_ABSOLUTE_PERCPU` (x86 with several processors up to 6.14): offsets
    /// from 0 on are themselves addresses, of per-CPU variables; others go from
    /// `kallsyms_relative_base`, less 1, downwards.
    AbsolutePerCpu,
    /// All are unsigned, from the base on (6.15 to 6.19).
    Relative,
    /// All are signed, from their own places on: since 7.0 there is no base.
    OwnPlace,
}

impl Offsets {
    /// What `offset` stands for, which lies at `place`.
    fn address(self, base: u64, (place, offset): (u64, u32)) -> u64 {
        let signed = i64::from(offset.cast_signed());
        match self {
            Self::AbsolutePerCpu if signed >= 0 => u64::from(offset),
            Self::AbsolutePerCpu => base.wrapping_sub(1).wrapping_add_signed(-signed),
            Self::Relative => base.wrapping_add(u64::from(offset)),
            Self::OwnPlace => place.wrapping_add_signed(signed),
        }
    }
}

/// The whole table; `None` where it is none, or is not where `note` says.
pub(crate) fn read(space: &Space<'_>, note: &Note) -> Option<SymbolTable> {
    let count = space.u32(note.symbol("kallsyms_num_syms")?).ok()?;
    let count = usize::try_from(count).ok().filter(|count| *count <= MOST)?;
    let base = note.symbol("kallsyms_relative_base");
    let base = base.map(|at| space.u64(at)).transpose().ok()?;
    let first = note.symbol("kallsyms_offsets")?;
    let offsets = space.bytes(first, 4 * count)?;
    let tokens = Tokens::read(space, note)?;
    let mut names = Names::at(space, note.symbol("kallsyms_names")?);
    let mut table = SymbolTable::default();
    for word in offsets.chunks_exact(4) {
        let offset = u32::from_le_bytes(word.try_into().ok()?);
        let (kind, name) = names.next(&tokens)?;
        table.push(space, offset.into(), kind, &name)?;
    }
    // Nothing in memory says how the kernel was built. One of its own addresses does: the
    // note has it, too.
    let known = note.symbol("_stext")?;
    let (stext, offset) = table.position("_stext")?;
    let offset = u32::try_from(offset).ok()?;
    let ways: &[Offsets] = match base {
        Some(_) => &[Offsets::AbsolutePerCpu, Offsets::Relative],
        None => &[Offsets::OwnPlace],
    };
    let base = base.unwrap_or_default();
    let place = |index: usize| first.wrapping_add(4 * index as u64);
    let is_it = |way: &&Offsets| way.address(base, (place(stext), offset)) == known;
    let way = ways.iter().find(is_it)?;
    table.move_to(|index, offset| {
        way.address(base, (place(index), u32::try_from(offset).unwrap_or(0)))
    });
    table.sort();
    Some(table)
}

/// What each byte of a compressed name stands for.
struct Tokens {
    text: Vec<u8>,
    /// Where in `text`, for each byte; longer than a name can be is none.
    places: Vec<Range<usize>>,
}

impl Tokens {
    fn read(space: &Space<'_>, note: &Note) -> Option<Self> {
        let index = space.bytes(note.symbol("kallsyms_token_index")?, 512)?;
        let mut text = vec![0; MOST_TOKENS];
        let read = space.read_some(note.symbol("kallsyms_token_table")?, &mut text);
        text.truncate(read);
        let place = |word: &[u8]| {
            let start = usize::from(u16::from_le_bytes(word.try_into().ok()?));
            let rest = text.get(start..)?;
            let rest = &rest[..rest.len().min(LONGEST)];
            let len = rest.iter().position(|byte| *byte == 0);
            Some(start..start + len.unwrap_or(rest.len()))
        };
        let places = index.chunks_exact(2).map(place);
        let places = places.collect::<Option<_>>()?;
        Some(Self { text, places })
    }

    fn of(&self, byte: u8) -> Option<&[u8]> {
        self.text.get(self.places.get(usize::from(byte))?.clone())
    }
}

/// Compressed names, one behind the other.
struct Names<'a> {
    space: &'a Space<'a>,
    /// Where the next chunk is.
    next: u64,
    left: u64,
    chunk: Vec<u8>,
    used: usize,
}

impl<'a> Names<'a> {
    fn at(space: &'a Space<'a>, next: u64) -> Self {
        Self {
            space,
            next,
            left: MOST_NAMES,
            chunk: Vec::new(),
            used: 0,
        }
    }

    /// Letter and name of the next symbol.
    fn next(&mut self, tokens: &Tokens) -> Option<(u8, String)> {
        // Up to 127 in one byte; the most significant bit says that there is another one
        // (since 6.1).
        let mut len = usize::from(self.byte()?);
        if len & 0x80 != 0 {
            len = len & 0x7f | usize::from(self.byte()?) << 7;
        }
        let mut whole = Vec::with_capacity(64);
        for _ in 0..len {
            let token = tokens.of(self.byte()?)?;
            let room = LONGEST - whole.len();
            whole.extend_from_slice(&token[..token.len().min(room)]);
        }
        let (kind, name) = whole.split_first()?;
        kind.is_ascii_alphabetic().then(|| (*kind, visible(name)))
    }

    fn byte(&mut self) -> Option<u8> {
        if self.used == self.chunk.len() {
            self.left = self.left.checked_sub(CHUNK as u64)?;
            self.chunk.resize(CHUNK, 0);
            let read = self.space.read_some(self.next, &mut self.chunk);
            self.chunk.truncate(read);
            self.next = self.next.wrapping_add(read as u64);
            self.used = 0;
        }
        let byte = *self.chunk.get(self.used)?;
        self.used += 1;
        Some(byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets() {
        fn check(way: Offsets, offset: u32, expected: u64) {
            let place = 0xffff_ffff_8200_0040;
            let found = way.address(0xffff_ffff_8100_0000, (place, offset));
            assert_eq!(found, expected);
        }
        check(Offsets::AbsolutePerCpu, 0x2_0000, 0x2_0000);
        check(Offsets::AbsolutePerCpu, u32::MAX, 0xffff_ffff_8100_0000);
        check(
            Offsets::AbsolutePerCpu,
            0u32.wrapping_sub(0x101),
            0xffff_ffff_8100_0100,
        );
        check(Offsets::Relative, 0x100, 0xffff_ffff_8100_0100);
        check(Offsets::Relative, 0x9000_0000, 0x1100_0000);
        check(Offsets::OwnPlace, 0, 0xffff_ffff_8200_0040);
        check(Offsets::OwnPlace, 0x100, 0xffff_ffff_8200_0140);
        check(Offsets::OwnPlace, 0xfeff_ffc0, 0xffff_ffff_8100_0000);
    }
}
