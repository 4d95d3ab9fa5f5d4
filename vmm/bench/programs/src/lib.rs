//! Eleven small programs of integers, two of doubles, and three ways to run the same bytes: on the host's processor, on that
//! of `emu`, and under Valgrind's Callgrind, which counts instructions as well.
//!
//! The build script builds them for `x86_64-unknown-none`; where that target is not installed
//! there are none ([`image`]).
#![cfg_attr(target_os = "none", no_std)]
#![forbid(unsafe_code)]

#[cfg(not(target_os = "none"))]
mod guest;
#[cfg(not(target_os = "none"))]
mod host;

#[cfg(not(target_os = "none"))]
pub use emu::SlowPath;
#[cfg(not(target_os = "none"))]
pub use guest::{GuestError, GuestRun, run_in_emu};
#[cfg(not(target_os = "none"))]
pub use host::{Callgrind, HostError, HostRun, ProgramFile};

/// One of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// What people call it.
    pub name: &'static str,
    /// Its first argument.
    letter: char,
    /// Rounds that make some ten million instructions.
    pub rounds: u64,
}

const fn program(letter: char, name: &'static str, rounds: u64) -> Program {
    Program {
        name,
        letter,
        rounds,
    }
}

/// Those of integers.
pub const PROGRAMS: [Program; 11] = [
    program('a', "sum", 100),
    program('b', "random memory", 40),
    program('c', "sieve", 2),
    program('d', "copy", 20),
    program('e', "calls", 50),
    program('f', "heap sort", 8),
    program('g', "byte code", 10),
    program('h', "CRC-32", 20),
    program('i', "SHA-256", 10),
    program('j', "LZ", 10),
    program('k', "tree of strings", 10),
];

/// Those of doubles.
pub const FLOATING: [Program; 2] = [
    program('l', "doubles", 15),
    program('m', "pairs of doubles", 12),
];

/// Words for their file that make it run one of the programs.
#[cfg(not(target_os = "none"))]
#[must_use]
pub fn as_command(program: &Program, rounds: u64) -> [String; 2] {
    [program.letter.to_string(), rounds.to_string()]
}

/// Words for their file as the first process of a Linux: it runs one of the programs, and powers
/// the machine off.
#[cfg(not(target_os = "none"))]
#[must_use]
pub fn as_first_process(program: &Program, rounds: u64) -> String {
    format!("{} {rounds}", program.letter.to_ascii_uppercase())
}

/// Each round is a system call. It needs a Linux.
pub const SYSTEM_CALLS: Program = program('n', "system calls", 1_000_000);

/// Ends at once, likewise.
pub const NOTHING: Program = program('o', "nothing", 1);

/// Their file, a static ELF64 executable for Linux that calls it three times: twice for its CPU
/// time, and to write. `None` where it could not be built.
#[must_use]
pub fn image() -> Option<&'static [u8]> {
    #[cfg(bench_programs)]
    {
        Some(include_bytes!(env!("UMPIRE_BENCH_PROGRAMS")))
    }
    #[cfg(not(bench_programs))]
    {
        None
    }
}
