//! Doubles: one after the other, and two at a time.

use crate::sys::{self, Memory};

/// `x = 2 x / 3 + 1 / x`, which comes to the root of 3.
pub(crate) fn scalar(_: &mut Memory, rounds: u64) -> u64 {
    sys::scalar_doubles(rounds * 100_000)
}

/// Adds the squares of one array to another: 2 x 4,096 doubles.
pub(crate) fn vector(memory: &mut Memory, rounds: u64) -> u64 {
    const LEN: usize = 4_096;
    // 1.5 and 0.25, whose sums are exact for a while.
    let (to, from) = memory.longs()[..2 * LEN].split_at_mut(LEN);
    for (to, from) in to.iter_mut().zip(from) {
        *to = 0x3ff8_0000_0000_0000;
        *from = 0x3fd0_0000_0000_0000;
    }
    sys::vector_doubles(&mut memory.longs()[..2 * LEN], rounds * 50);
    memory.longs()[LEN / 2]
}
