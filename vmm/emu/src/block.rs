//! Blocks of decoded code, and how one leads to the next.
#![allow(
    clippy::cast_possible_truncation,
    reason = "blocks and pages are bounded far below 32 bits"
)]

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use crate::events::{LANES, Vector};
use crate::insn::Op;
use crate::quick::quick;

/// Operations, blocks and kept instructions that a guest can make us hold: then all are dropped.
const MOST_OPS: usize = 2_000_000;
const MOST_BLOCKS: usize = 300_000;
const MOST_KEPT: usize = 400_000;
const JUMPS: usize = 4096;
/// Places of a page's jumps.
const GROUP: usize = 256;
/// No generation has this number.
const HIDDEN: u32 = u32::MAX;

/// How a block ends, for who follows calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Flow {
    #[default]
    Other,
    Call,
    Return,
}

/// Where a block leads to, as it was found once.
#[derive(Debug, Clone, Copy, Default)]
struct Successor {
    rip: u64,
    id: u32,
    generation: u32,
}

/// Code without a branch but at its end.
#[derive(Debug)]
pub(crate) struct Block {
    first: u32,
    /// Operations, one an instruction.
    pub(crate) count: u32,
    /// Where the operations are for who runs it as a whole, and how many.
    quick: (u32, u32),
    /// Bytes.
    pub(crate) len: u32,
    /// What all of them count for.
    pub(crate) sum: [u16; LANES],
    next: [Successor; 2],
    pub(crate) flow: Flow,
    /// Offset in RAM of the page that the last instruction reaches into.
    pub(crate) second: Option<u64>,
    pub(crate) key: Key,
}

impl Block {
    /// RIP of its first instruction.
    #[inline(always)]
    pub(crate) fn rip(&self) -> u64 {
        self.key.rip
    }
}

/// What a block was decoded from: where the bytes are, RIP, and bits of the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) offset: u64,
    pub(crate) rip: u64,
    pub(crate) bits: u8,
}

/// A decoded block, before it has a number.
#[derive(Debug, Default)]
pub(crate) struct Decoded {
    pub(crate) ops: Vec<Op>,
    pub(crate) len: u32,
    pub(crate) flow: Flow,
    pub(crate) second: Option<u64>,
}

/// In place of an offset: where no RAM is. What comes from there is fetched each time.
pub(crate) const NOWHERE: u64 = u64::MAX;

impl Decoded {
    /// Keeps the operations that begin within `bytes`, the first at least.
    pub(crate) fn cut(&mut self, bytes: u64) {
        let mut len = 0;
        let mut keep = 0;
        for op in &self.ops {
            if u64::from(len) >= bytes && keep > 0 {
                self.flow = Flow::Other;
                break;
            }
            len += u32::from(op.len);
            keep += 1;
        }
        self.ops.truncate(keep);
        self.len = len;
    }

    /// Offsets of the pages that the bytes are on.
    pub(crate) fn pages(&self, key: Key) -> impl Iterator<Item = u64> + use<> {
        let second = self.second.filter(|second| *second != NOWHERE);
        [Some(key.offset), second].into_iter().flatten()
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Jump {
    rip: u64,
    tag: u64,
    id: u32,
}

/// Mixes the few words of a key; what it gives is never seen in an order.
#[derive(Debug, Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(23) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 29;
    }
}

type Map<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

/// All blocks.
#[derive(Debug)]
pub(crate) struct Blocks {
    list: Vec<Block>,
    ops: Vec<Op>,
    by_key: Map<Key, u32>,
    by_page: BTreeMap<u32, Vec<u32>>,
    jumps: Vec<Jump>,
    vectors: Vec<Vector>,
    vector_numbers: Map<Vector, u16>,
    /// Goes up when blocks are dropped.
    generation: u32,
    /// The generation whose successors are known to the run loop: none while each end of a block
    /// is looked at.
    shown: u32,
    /// Goes up when translations are dropped.
    flushes: u32,
}

impl Blocks {
    pub(crate) fn new() -> Self {
        Self {
            jumps: vec![Jump::default(); JUMPS],
            ..Self::empty()
        }
    }

    /// Without the table of jumps.
    fn empty() -> Self {
        Self {
            list: Vec::new(),
            ops: Vec::new(),
            by_key: Map::default(),
            by_page: BTreeMap::new(),
            jumps: Vec::new(),
            vectors: Vec::new(),
            vector_numbers: Map::default(),
            generation: 1,
            shown: 1,
            flushes: 0,
        }
    }

    #[inline(always)]
    pub(crate) fn get(&self, id: u32) -> &Block {
        &self.list[id as usize]
    }

    /// The first `count` operations of a block.
    #[inline(always)]
    pub(crate) fn ops(&self, block: &Block, count: u32) -> &[Op] {
        let first = block.first as usize;
        &self.ops[first..first + count as usize]
    }

    /// The operations of a block for who runs it as a whole. Those of more than one instruction
    /// do not just retire because of the last one, if at all.
    #[inline(always)]
    pub(crate) fn quick(&self, block: &Block) -> &[Op] {
        let (first, count) = block.quick;
        &self.ops[first as usize..first as usize + count as usize]
    }

    /// Which instruction of a block it is that an operation has not just retired with, and of how
    /// many that were to be run: of a part of the block, or of the whole.
    #[cold]
    #[inline(never)]
    pub(crate) fn place(&self, id: u32, part: Option<u32>, op: &Op) -> (usize, u32) {
        let block = self.get(id);
        let ops = match part {
            Some(count) => self.ops(block, count),
            None => self.quick(block),
        };
        let before = ops.iter().take_while(|one| !std::ptr::eq(*one, op));
        let before: usize = before.map(Op::instructions).sum();
        (
            // The last of its instructions is the one.
            before + op.instructions() - 1,
            part.unwrap_or(block.count),
        )
    }

    /// Bytes that all of this takes, about: of the maps what their entries need.
    pub(crate) fn bytes(&self) -> usize {
        const PER_BLOCK: usize = size_of::<(Key, u32)>() + 2 * size_of::<u32>();
        self.ops.capacity() * size_of::<Op>()
            + self.list.capacity() * size_of::<Block>()
            + self.by_key.capacity() * PER_BLOCK
            + self.jumps.capacity() * size_of::<Jump>()
            + self.vectors.capacity() * size_of::<Vector>()
    }

    /// What an operation counts for.
    pub(crate) fn vector(&self, op: &Op) -> Vector {
        self.vectors
            .get(usize::from(op.events))
            .copied()
            .unwrap_or_default()
    }

    /// The number of an event vector.
    pub(crate) fn number(&mut self, vector: Vector) -> u16 {
        if let Some(number) = self.vector_numbers.get(&vector) {
            return *number;
        }
        // There are far fewer vectors than numbers: loads, stores and some bits.
        let number = u16::try_from(self.vectors.len()).unwrap_or(u16::MAX);
        self.vectors.push(vector);
        self.vector_numbers.insert(vector, number);
        number
    }

    /// From now on the run loop knows no successor of a block, and asks at each end, or does
    /// again.
    pub(crate) fn hide(&mut self, hide: bool) {
        self.shown = if hide { HIDDEN } else { self.generation };
    }

    /// What the run loop finds jumps under: nothing, while they are hidden.
    #[inline(never)]
    pub(crate) fn shown_tag(&self, mode: u8) -> u64 {
        if self.shown == HIDDEN {
            // No mode has these bits.
            u64::MAX
        } else {
            self.tag(mode)
        }
    }

    /// The block at `rip` that follows `id`, hidden or not.
    pub(crate) fn known_after(&self, id: u32, rip: u64, tag: u64) -> Option<u32> {
        let next = self.list[id as usize].next.iter();
        let mut next = next.filter(|next| next.rip == rip && next.generation == self.generation);
        match next.next() {
            Some(next) => Some(next.id),
            None => self.jump(rip, tag),
        }
    }

    /// What jumps of code in a mode are found under, until translations or blocks go.
    pub(crate) fn tag(&self, mode: u8) -> u64 {
        u64::from(self.generation) << 34 | u64::from(self.flushes) << 4 | u64::from(mode)
    }

    /// The block at `rip` that follows another, if that is known.
    #[inline(always)]
    pub(crate) fn after(&self, block: &Block, rip: u64, tag: u64) -> Option<u32> {
        for next in &block.next {
            if next.rip == rip && next.generation == self.shown {
                return Some(next.id);
            }
        }
        self.jump(rip, tag)
    }

    #[inline(always)]
    pub(crate) fn jump(&self, rip: u64, tag: u64) -> Option<u32> {
        let jump = &self.jumps[place(rip)];
        (jump.rip == rip && jump.tag == tag).then_some(jump.id)
    }

    /// Keeps that `id` is at `rip`.
    pub(crate) fn learn(&mut self, rip: u64, tag: u64, id: u32) {
        self.jumps[place(rip)] = Jump { rip, tag, id };
    }

    /// The translation of the page of `rip` is gone: jumps into it, and to what reaches into it
    /// from the page before, are known no more.
    pub(crate) fn forget_jumps(&mut self, rip: u64) {
        for page in [rip, rip.wrapping_sub(4096)] {
            let first = group(page);
            for jump in &mut self.jumps[first..first + GROUP] {
                if jump.rip >> 12 == page >> 12 {
                    *jump = Jump::default();
                }
            }
        }
    }

    /// Keeps that `to` follows `from`. Within a page nothing can come between: whoever came to
    /// the one by that page comes to the other. Of other code than of 64 bits CS decides too.
    pub(crate) fn chain(&mut self, from: u32, to: u32) {
        let generation = self.generation;
        let (Some(before), Some(after)) =
            (self.list.get(from as usize), self.list.get(to as usize))
        else {
            return;
        };
        let same = before.rip() >> 12 == after.rip() >> 12
            && before.key.offset >> 12 == after.key.offset >> 12
            && before.key.offset.wrapping_sub(before.rip())
                == after.key.offset.wrapping_sub(after.rip())
            && before.key.bits == 64
            && after.key.bits == 64;
        if !same || after.second.is_some() {
            return;
        }
        let rip = after.rip();
        let next = &mut self.list[from as usize].next;
        let free = usize::from(next[0].generation == generation);
        next[free] = Successor {
            rip,
            id: to,
            generation,
        };
    }

    pub(crate) fn find(&self, key: &Key) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    /// Whether there is no room for another block, with so many kept instructions.
    pub(crate) fn is_full(&self, kept: usize) -> bool {
        self.ops.len() + 128 > MOST_OPS || self.list.len() >= MOST_BLOCKS || kept + 64 > MOST_KEPT
    }

    pub(crate) fn add(&mut self, key: Key, decoded: Decoded) -> u32 {
        let id = self.list.len() as u32;
        let mut sum = [0; LANES];
        for op in &decoded.ops {
            let vector = self.vector(op);
            for (sum, lane) in sum.iter_mut().zip(vector) {
                *sum += u16::from(lane);
            }
        }
        for page in decoded.pages(key) {
            let page = (page >> 12) as u32;
            self.by_page.entry(page).or_default().push(id);
        }
        let first = self.ops.len() as u32;
        let count = decoded.ops.len() as u32;
        self.ops.extend_from_slice(&decoded.ops);
        let quick = match quick(&decoded.ops) {
            Some(ops) => {
                let quick = (self.ops.len() as u32, ops.len() as u32);
                self.ops.extend(ops);
                quick
            }
            None => (first, count),
        };
        self.list.push(Block {
            first,
            count,
            quick,
            len: decoded.len,
            sum,
            next: [Successor::default(); 2],
            flow: decoded.flow,
            second: decoded.second,
            key,
        });
        self.by_key.insert(key, id);
        id
    }

    /// Drops the blocks of pages that were written to.
    pub(crate) fn drop_pages(&mut self, pages: &[u32]) {
        for page in pages {
            for id in self.by_page.remove(page).unwrap_or_default() {
                let key = self.list[id as usize].key;
                if self.by_key.get(&key) == Some(&id) {
                    self.by_key.remove(&key);
                }
            }
        }
        self.next_generation();
    }

    pub(crate) fn flush(&mut self) {
        self.flushes = self.flushes.wrapping_add(1) & 0x3fff_ffff;
        if self.flushes == 0 {
            self.next_generation();
        }
    }

    /// What is known of successors is true no more. A tag has 30 bits for the number; when they
    /// are used up, all is forgotten.
    fn next_generation(&mut self) {
        let hidden = self.shown == HIDDEN;
        self.generation = (self.generation + 1) & 0x3fff_ffff;
        if self.generation == 0 {
            self.generation = 1;
            self.jumps.fill(Jump::default());
            for block in &mut self.list {
                block.next = [Successor::default(); 2];
            }
        }
        self.hide(hidden);
    }

    /// All blocks go.
    pub(crate) fn clear(&mut self) {
        self.list.clear();
        self.next_generation();
        let (generation, shown, flushes) = (self.generation, self.shown, self.flushes);
        // The jumps are of a generation that is over.
        let jumps = std::mem::take(&mut self.jumps);
        *self = Self {
            jumps,
            generation,
            shown,
            flushes,
            ..Self::empty()
        };
    }
}

#[inline(always)]
fn place(rip: u64) -> usize {
    group(rip) | (rip ^ rip >> 8 ^ rip >> 16) as usize & (GROUP - 1)
}

/// The first place of jumps to the page of `rip`, and to some others.
#[inline(always)]
fn group(rip: u64) -> usize {
    ((rip >> 12) as usize * GROUP) & (JUMPS - 1)
}
