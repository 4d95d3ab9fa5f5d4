//! Translations that were walked, by who may use them for what.
#![allow(
    clippy::cast_possible_truncation,
    reason = "an index is masked to the size of the table"
)]

/// Entries of a set.
const ENTRIES: usize = 1024;
const SETS: usize = 8;

/// Which accesses an entry is for. Reads and writes of one who accesses stand side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Set {
    /// CPL 3 reads.
    UserRead,
    /// CPL 3 writes.
    UserWrite,
    /// CPL 0 reads; under SMAP no user page.
    KernelRead,
    /// CPL 0 writes.
    KernelWrite,
    /// CPL 0 reads with AC set.
    OpenRead,
    /// CPL 0 writes with AC set.
    OpenWrite,
    /// CPL 3 fetches.
    UserFetch,
    /// CPL 0 fetches.
    KernelFetch,
}

impl Set {
    pub(crate) fn writes(self) -> bool {
        matches!(self, Set::UserWrite | Set::KernelWrite | Set::OpenWrite)
    }

    pub(crate) fn fetches(self) -> bool {
        matches!(self, Set::UserFetch | Set::KernelFetch)
    }

    pub(crate) fn is_user(self) -> bool {
        matches!(self, Set::UserRead | Set::UserWrite | Set::UserFetch)
    }
}

/// A page's linear address, and the offset of its memory in RAM.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Translation {
    tag: u64,
    base: u64,
}

/// The translations.
#[derive(Debug)]
pub(crate) struct Tlb {
    entries: Box<[Translation; ENTRIES * SETS]>,
    global: Box<[u64; ENTRIES * SETS / 64]>,
    /// Some entry stands for a part of a large page: INVLPG does not know which.
    large: bool,
}

/// No address has this tag in this place: the page's number would lead elsewhere.
fn nothing(index: usize) -> Translation {
    Translation {
        tag: ((index & (ENTRIES - 1)) as u64 ^ 1) << 12,
        base: 0,
    }
}

/// In the tag of a page that is found the slow way only: in its place nobody asks for it.
const SLOW: u64 = 2 << 12;

#[inline(always)]
fn place(set: Set, linear: u64) -> usize {
    (set as usize * ENTRIES) | (linear >> 12) as usize & (ENTRIES - 1)
}

impl Tlb {
    pub(crate) fn new() -> Self {
        let entries: Vec<Translation> = (0..ENTRIES * SETS).map(nothing).collect();
        let entries = entries.try_into().unwrap_or_else(|_| unreachable!());
        Self {
            entries,
            global: Box::new([0; ENTRIES * SETS / 64]),
            large: false,
        }
    }

    /// The offset of `bytes` at a linear address that lie in one known page.
    #[inline(always)]
    pub(crate) fn find(&self, set: Set, linear: u64, bytes: u64) -> Option<u64> {
        let entry = &self.entries[place(set, linear)];
        // Right page, enough room and no crossing, by one comparison.
        let inside = linear ^ entry.tag;
        (inside <= 4096 - bytes).then(|| entry.base + inside)
    }

    /// The offset of a linear address on a page that is known, slow or not.
    pub(crate) fn find_any(&self, set: Set, linear: u64) -> Option<u64> {
        let entry = &self.entries[place(set, linear)];
        let page = linear & !0xfff;
        let known = entry.tag == page || entry.tag == page ^ SLOW;
        known.then_some(entry.base | linear & 0xfff)
    }

    /// Keeps that the page at `linear` lies at `base`; the page that is forgotten for it.
    pub(crate) fn fill(&mut self, set: Set, linear: u64, base: u64, kind: Kind) -> Option<u64> {
        let at = place(set, linear);
        let before = self.entries[at].tag;
        let tag = linear & !0xfff;
        self.entries[at] = Translation {
            tag: if kind.slow { tag ^ SLOW } else { tag },
            base,
        };
        let bit = 1 << (at % 64);
        self.global[at / 64] &= !bit;
        if kind.global {
            self.global[at / 64] |= bit;
        }
        self.large |= kind.large;
        (before != nothing(at).tag && before & !SLOW != tag & !SLOW).then_some(before)
    }

    /// The page at `linear`, if it is known, is slow no more.
    pub(crate) fn quicken(&mut self, set: Set, linear: u64) {
        let entry = &mut self.entries[place(set, linear)];
        if entry.tag == (linear & !0xfff) ^ SLOW {
            entry.tag ^= SLOW;
        }
    }

    /// All of them go.
    pub(crate) fn clear(&mut self) {
        for (index, entry) in self.entries.iter_mut().enumerate() {
            *entry = nothing(index);
        }
        self.global.fill(0);
        self.large = false;
    }

    /// All go but those of global pages.
    pub(crate) fn clear_local(&mut self) {
        let words = self.entries.chunks_exact_mut(64).zip(self.global.iter());
        for (word, (entries, global)) in words.enumerate() {
            for (bit, entry) in entries.iter_mut().enumerate() {
                if global >> bit & 1 == 0 {
                    *entry = nothing(word * 64 + bit);
                }
            }
        }
    }

    /// The page at `linear` goes; where large pages are known, all do.
    pub(crate) fn clear_page(&mut self, linear: u64) {
        if self.large {
            self.clear();
            return;
        }
        for set in 0..SETS {
            let at = (set * ENTRIES) | (linear >> 12) as usize & (ENTRIES - 1);
            if self.entries[at].tag & !SLOW == linear & !0xfff & !SLOW {
                self.entries[at] = nothing(at);
            }
        }
    }

    /// Writes to the page at `base` go the slow way. It stays known: when the tables are walked
    /// again must not depend on where code is.
    pub(crate) fn protect(&mut self, base: u64) {
        for set in [Set::UserWrite, Set::KernelWrite, Set::OpenWrite] {
            let first = set as usize * ENTRIES;
            for at in first..first + ENTRIES {
                let entry = &mut self.entries[at];
                if entry.base == base && (entry.tag >> 12) as usize & (ENTRIES - 1) == at - first {
                    entry.tag ^= SLOW;
                }
            }
        }
    }
}

/// What a translation is a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) global: bool,
    pub(crate) large: bool,
    /// It is found the slow way only.
    pub(crate) slow: bool,
}
