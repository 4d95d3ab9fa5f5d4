//! Guest memory of one moment: what a look reads lies close together, so a few bytes more are
//! read at once, and kept for as long as the look takes.

use std::cell::{Cell, RefCell};

use crate::memory::GuestMemory;
use crate::space::READ;

/// Bytes that are read at once, a part of a page, and how many of them are kept.
const LINE: usize = 128;
const LINES: usize = 32;
/// The start of no line.
const NOTHING: u64 = 1;

/// Guest-physical memory of which what was read is kept.
pub(crate) struct Lines<'a> {
    memory: &'a dyn GuestMemory,
    /// Bytes that may still be read.
    left: Cell<usize>,
    starts: [Cell<u64>; LINES],
    lines: RefCell<[[u8; LINE]; LINES]>,
}

impl<'a> Lines<'a> {
    /// Of `memory`, of which at most `budget` bytes are read; a read of fewer than 64 counts as 64.
    pub(crate) fn of(memory: &'a dyn GuestMemory, budget: usize) -> Self {
        Self {
            memory,
            left: Cell::new(budget),
            starts: [const { Cell::new(NOTHING) }; LINES],
            lines: RefCell::new([[0; LINE]; LINES]),
        }
    }

    fn read_now(&self, address: u64, buffer: &mut [u8]) -> bool {
        let left = self.left.get().checked_sub(buffer.len().max(READ));
        self.left.set(left.unwrap_or(0));
        left.is_some() && self.memory.read(address, buffer)
    }
}

impl GuestMemory for Lines<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let start = address & !(LINE as u64 - 1);
        let offset = usize::try_from(address - start).unwrap_or(LINE);
        // One read more costs more than what is read.
        if offset + buffer.len() > LINE {
            return self.read_now(address, buffer);
        }
        let number = start / LINE as u64;
        let mixed = number ^ number >> 5 ^ number >> 10;
        let place = usize::try_from(mixed % LINES as u64).unwrap_or(0);
        let line = &mut self.lines.borrow_mut()[place];
        if self.starts[place].get() != start {
            let read = self.read_now(start, line);
            self.starts[place].set(if read { start } else { NOTHING });
            if !read {
                // Memory may end within.
                return self.read_now(address, buffer);
            }
        }
        let found = &line[offset..offset + buffer.len()];
        // Most are words, which need no loop.
        match (<&mut [u8; 8]>::try_from(&mut *buffer), found.try_into()) {
            (Ok(word), Ok(found)) => *word = found,
            _ => buffer.copy_from_slice(found),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1000 bytes, which are their own numbers.
    struct Bytes(Cell<usize>);

    impl GuestMemory for Bytes {
        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            self.0.set(self.0.get() + 1);
            let numbers = (0..1000u64).map(|at| at.to_le_bytes()[0]);
            let start = usize::try_from(address).unwrap_or(usize::MAX);
            let mut found = numbers.skip(start);
            buffer
                .iter_mut()
                .all(|byte| found.next().map(|found| *byte = found).is_some())
        }
    }

    #[test]
    fn what_is_read_is_what_is_there() {
        let bytes = Bytes(Cell::new(0));
        let lines = Lines::of(&bytes, 1 << 20);
        for len in [1, 4, 8, 100, 168, 256, 300] {
            for address in (0..=1000 - len as u64).chain([u64::MAX - 7]) {
                let (mut ours, mut theirs) = (vec![0; len], vec![0; len]);
                let known = lines.read(address, &mut ours);
                assert_eq!(
                    known,
                    bytes.read(address, &mut theirs),
                    "{len} at {address}"
                );
                assert!(!known || ours == theirs, "{len} at {address}");
            }
            assert!(!lines.read(1001 - len as u64, &mut vec![0; len]));
        }
    }

    #[test]
    fn nothing_is_read_twice_or_behind_the_budget() {
        let bytes = Bytes(Cell::new(0));
        let lines = Lines::of(&bytes, 3 * LINE);
        for _ in 0..10 {
            for address in [0, 8, 100, 300] {
                assert!(lines.read(address, &mut [0; 8]));
            }
        }
        assert_eq!(bytes.0.get(), 2);
        assert!(lines.read(500, &mut [0; 8]));
        assert!(!lines.read(700, &mut [0; 8]));
        assert_eq!(bytes.0.get(), 3);
    }
}
