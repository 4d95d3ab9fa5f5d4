//! Thirteen small programs that compute, in one file: `bench-programs LETTER ROUNDS`. Eleven use
//! integers, memory and calls, the last two doubles. None repeats string instructions, which
//! Valgrind counts otherwise.
//!
//! Who runs it gets 16 bytes on its standard output: the result, which is the same on every
//! processor, and the CPU time of the rounds in nanoseconds. In them the program calls nobody.
//!
//! With a capital letter it is the first process of a Linux, and powers that off at its end. There
//! are two programs more for it: system calls, and nothing.
#![no_std]
#![no_main]
#![deny(unsafe_code)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::precedence,
    reason = "hashes and generators take low bits, as their definitions say"
)]

mod arrays;
mod float;
mod hash;
mod machine;
mod pack;
mod sort;
#[allow(unsafe_code)]
mod sys;
mod tree;

use sys::Memory;

/// What a program does with memory of 4 MiB, which is 0, in so many rounds.
type Program = fn(&mut Memory, u64) -> u64;

/// In the order of their letters.
const PROGRAMS: [Program; 15] = [
    arrays::sum,
    arrays::random,
    arrays::sieve,
    arrays::copy,
    machine::calls,
    sort::heap,
    machine::interpret,
    hash::crc32,
    hash::sha256,
    pack::compress,
    tree::count,
    float::scalar,
    float::vector,
    machine::system_calls,
    machine::nothing,
];

/// Entered by [`sys`].
fn start(letter: u8, rounds: u64, memory: &mut Memory) -> ! {
    let is_first = letter.is_ascii_uppercase();
    let number = usize::from(letter.to_ascii_lowercase().wrapping_sub(b'a'));
    let Some(program) = PROGRAMS.get(number) else {
        sys::exit(1);
    };
    let began = sys::cpu_time();
    let result = program(memory, rounds);
    if is_first {
        sys::power_off();
    }
    let took = sys::cpu_time() - began;
    if sys::tell([result, took]) {
        sys::exit(0);
    }
    sys::exit(2);
}

/// A linear congruential generator (Numerical Recipes, 2nd edition, 7.1): the same numbers
/// everywhere.
struct Random(u32);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.0
    }

    /// A number below `limit`, which is at most 65536; of the upper bits, which are the better.
    fn below(&mut self, limit: u32) -> u32 {
        (self.next() >> 16) * limit >> 16
    }
}
