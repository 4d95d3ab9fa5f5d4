//! Loops over arrays.

use core::hint::black_box;

use crate::Random;
use crate::sys::Memory;

/// Adds up 32,768 numbers.
pub(crate) fn sum(memory: &mut Memory, rounds: u64) -> u64 {
    let longs = &mut memory.longs()[..32_768];
    let mut random = Random(1);
    for long in longs.iter_mut() {
        *long = random.next().into();
    }
    let mut sum = 0u64;
    for _ in 0..rounds {
        // Or the compiler would multiply.
        for long in black_box(&*longs) {
            sum = sum.wrapping_add(*long);
        }
    }
    sum
}

/// Adds to words anywhere in 1 MiB.
pub(crate) fn random(memory: &mut Memory, rounds: u64) -> u64 {
    let words = &mut memory.words()[..1 << 18];
    let mut random = Random(12_345);
    for _ in 0..rounds * 30_000 {
        let number = random.next();
        let word = &mut words[(number >> 14) as usize];
        *word = word.wrapping_add(number);
    }
    let add = |sum: u64, word: &u32| sum.wrapping_mul(31).wrapping_add(u64::from(*word));
    words.iter().step_by(64).fold(0, add)
}

/// Eratosthenes' sieve of the numbers below 2^20, a byte each.
pub(crate) fn sieve(memory: &mut Memory, rounds: u64) -> u64 {
    const LIMIT: usize = 1 << 20;
    let marks = &mut memory.bytes()[..LIMIT];
    let mut found = 0;
    for round in 0..rounds {
        // A mark of its own each round: nothing has to be cleared.
        let mark = (round % 255) as u8 + 1;
        for number in 2..1 << 10 {
            if marks[number] == mark {
                continue;
            }
            let mut multiple = number * number;
            while multiple < LIMIT {
                marks[multiple] = mark;
                multiple += number;
            }
        }
        found += marks[2..]
            .iter()
            .step_by(97)
            .filter(|it| **it != mark)
            .count() as u64;
    }
    found
}

/// Copies strings byte by byte up to their ends.
pub(crate) fn copy(memory: &mut Memory, rounds: u64) -> u64 {
    const LEN: usize = 1 << 16;
    let (from, to) = memory.bytes().split_at_mut(LEN);
    let mut random = Random(7);
    for byte in from.iter_mut() {
        let number = random.below(40);
        *byte = if number == 0 { 0 } else { number as u8 + b'@' };
    }
    from[LEN - 1] = 0;
    let mut strings = 0u64;
    for _ in 0..rounds {
        let mut at = 0;
        while at < LEN {
            at = copy_string(from, to, at);
            strings += 1;
        }
    }
    strings * 1000 + u64::from(to[LEN / 2])
}

/// Copies the string at `at`; where the next one is.
#[inline(never)]
fn copy_string(from: &[u8], to: &mut [u8], mut at: usize) -> usize {
    loop {
        let byte = from[at];
        to[at] = byte;
        at += 1;
        if byte == 0 {
            return at;
        }
    }
}
