//! Linear memory of the guest's kernel, or of one of its programs: guest memory through
//! page tables. Whatever is there, no more is read and kept than a budget allows.

use std::cell::Cell;
use std::fmt;

use guest_exit::{GuestMemory, Paging};

use crate::btf::Member;
use crate::unknown::Unknown;

/// Translations that are kept; a sample touches about as many pages.
const KNOWN: usize = 8;
const PAGE: u64 = 0x1000;
/// What a read costs of the budget at least, in bytes: about what it takes.
const READ: usize = 64;
/// Reads for a page that is looked up, with five levels.
const LEVELS: usize = 5;

/// A page that was looked up.
#[derive(Clone, Copy)]
struct Known {
    start: u64,
    /// One less than its bytes.
    mask: u64,
    physical: u64,
}

/// No address has this start: with this mask all of them have 0.
const NOTHING: Known = Known {
    start: 1,
    mask: u64::MAX,
    physical: 0,
};

/// Linear memory, for as long as one look at the guest takes: a page is looked up once.
pub(crate) struct Space<'a> {
    memory: &'a dyn GuestMemory,
    paging: Paging,
    known: [Cell<Known>; KNOWN],
    next: Cell<usize>,
    left: Cell<usize>,
}

impl fmt::Debug for Space<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Space")
            .field("paging", &self.paging)
            .finish_non_exhaustive()
    }
}

impl<'a> Space<'a> {
    /// Of which at most `budget` bytes are read; a read of fewer than 64 counts as 64.
    pub(crate) fn new(memory: &'a dyn GuestMemory, paging: Paging, budget: usize) -> Self {
        Self {
            memory,
            paging,
            known: [const { Cell::new(NOTHING) }; KNOWN],
            next: Cell::new(0),
            left: Cell::new(budget),
        }
    }

    /// Looks everything up again: what was known may be no longer so.
    pub(crate) fn forget(&self) {
        self.known.iter().for_each(|known| known.set(NOTHING));
    }

    /// Takes `bytes` of the budget; false where there is too little. Whoever keeps something
    /// that is larger than what was read calls it for the rest.
    pub(crate) fn charge(&self, bytes: usize) -> bool {
        let left = self.left.get().checked_sub(bytes);
        self.left.set(left.unwrap_or(0));
        left.is_some()
    }

    /// What is left of the budget.
    pub(crate) fn left(&self) -> usize {
        self.left.get()
    }

    /// The guest-physical address of `linear`.
    pub(crate) fn physical(&self, linear: u64) -> Option<u64> {
        for known in &self.known {
            let known = known.get();
            if linear & !known.mask == known.start {
                return Some(known.physical | linear & known.mask);
            }
        }
        if !self.charge(LEVELS * READ) {
            return None;
        }
        let mapped = self.paging.map(self.memory, linear)?;
        let mask = (1u64 << mapped.page) - 1;
        let next = self.next.get();
        self.known[next].set(Known {
            start: linear & !mask,
            mask,
            physical: mapped.physical & !mask,
        });
        self.next.set((next + 1) % KNOWN);
        Some(mapped.physical)
    }

    /// Fills `buffer` from `linear`; says how many bytes there were before memory ended.
    pub(crate) fn read_some(&self, linear: u64, buffer: &mut [u8]) -> usize {
        let mut done = 0;
        while done < buffer.len() {
            let at = linear.wrapping_add(done as u64);
            let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
            let len = in_page.min(buffer.len() - done);
            let part = &mut buffer[done..done + len];
            let paid = self.charge(len.max(READ));
            let read = self
                .physical(at)
                .map(|at| paid && self.memory.read(at, part));
            if read != Some(true) {
                break;
            }
            done += len;
        }
        done
    }

    /// Fills `buffer` from `linear`; false where some of it is no memory.
    pub(crate) fn read(&self, linear: u64, buffer: &mut [u8]) -> bool {
        self.read_some(linear, buffer) == buffer.len()
    }

    pub(crate) fn array<const N: usize>(&self, linear: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read(linear, &mut bytes).then_some(bytes)
    }

    /// A pointer, or another number of 64 bits.
    pub(crate) fn u64(&self, linear: u64) -> Result<u64, Unknown> {
        let bytes = self.array(linear).ok_or(Unknown::Unmapped(linear))?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// A number of 32 bits.
    pub(crate) fn u32(&self, linear: u64) -> Result<u32, Unknown> {
        let bytes = self.array(linear).ok_or(Unknown::Unmapped(linear))?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// The number of at most eight bytes that `member` of the structure at `linear` is.
    pub(crate) fn number(&self, linear: u64, member: Member) -> Result<u64, Unknown> {
        let at = linear.wrapping_add(member.offset.into());
        let mut bytes = [0; 8];
        let part = bytes.get_mut(..member.size as usize);
        let read = part.is_some_and(|part| self.read(at, part));
        read.then(|| u64::from_le_bytes(bytes))
            .ok_or(Unknown::Unmapped(at))
    }

    /// The `bytes` bytes at `linear`.
    pub(crate) fn bytes(&self, linear: u64, bytes: usize) -> Option<Vec<u8>> {
        if bytes > self.left() {
            return None;
        }
        let mut found = vec![0; bytes];
        self.read(linear, &mut found).then_some(found)
    }
}
