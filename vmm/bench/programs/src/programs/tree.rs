//! A binary tree of strings, which counts them.

use crate::Random;
use crate::sys::Memory;

/// Words of a node: left, right, where its string is, how long that is, how often it came.
const NODE: usize = 5;
const LEFT: usize = 0;
const RIGHT: usize = 1;
const TEXT: usize = 2;
const LEN: usize = 3;
const COUNT: usize = 4;

/// No node: the first one is the root, to which none leads.
const NONE: u32 = 0;

/// Strings of a round.
const STRINGS: u32 = 2_000;

/// Counts strings of few letters.
pub(crate) fn count(memory: &mut Memory, rounds: u64) -> u64 {
    let (nodes, text) = memory.halves();
    let mut sum = 0u64;
    for round in 0..rounds {
        let mut random = Random(round as u32);
        let mut tree = Tree {
            nodes: &mut *nodes,
            text: &mut *text,
            used: 0,
            written: 0,
        };
        for _ in 0..STRINGS {
            tree.add(&mut random);
        }
        sum = sum.wrapping_mul(31).wrapping_add(u64::from(tree.used));
        sum = sum.wrapping_add(u64::from(tree.nodes[COUNT]));
    }
    sum
}

struct Tree<'a> {
    nodes: &'a mut [u32],
    text: &'a mut [u8],
    used: u32,
    written: usize,
}

impl Tree<'_> {
    /// Adds a string of up to eight of four letters.
    #[inline(never)]
    fn add(&mut self, random: &mut Random) {
        let len = random.below(8) as usize + 1;
        let at = self.written;
        for letter in &mut self.text[at..at + len] {
            *letter = b'a' + random.below(4) as u8;
        }
        if self.used == 0 {
            self.put(at, len);
            return;
        }
        let mut node = 0;
        loop {
            let order = self.compare(node, at, len);
            let side = match order {
                core::cmp::Ordering::Equal => {
                    self.nodes[node + COUNT] += 1;
                    return;
                }
                core::cmp::Ordering::Less => LEFT,
                core::cmp::Ordering::Greater => RIGHT,
            };
            match self.nodes[node + side] {
                NONE => {
                    self.nodes[node + side] = self.put(at, len);
                    return;
                }
                next => node = next as usize * NODE,
            }
        }
    }

    /// How the string at `at` stands to that of a node.
    fn compare(&self, node: usize, at: usize, len: usize) -> core::cmp::Ordering {
        let (from, other) = (
            self.nodes[node + TEXT] as usize,
            self.nodes[node + LEN] as usize,
        );
        for n in 0..len.min(other) {
            let (a, b) = (self.text[at + n], self.text[from + n]);
            if a != b {
                return a.cmp(&b);
            }
        }
        len.cmp(&other)
    }

    /// A new node with the string that was written last.
    fn put(&mut self, at: usize, len: usize) -> u32 {
        let number = self.used;
        let node = number as usize * NODE;
        self.nodes[node + LEFT] = NONE;
        self.nodes[node + RIGHT] = NONE;
        self.nodes[node + TEXT] = at as u32;
        self.nodes[node + LEN] = len as u32;
        self.nodes[node + COUNT] = 1;
        self.used += 1;
        self.written += len;
        number
    }
}
