//! Marks parts of a program, which `umpire count` and Callgrind then count apart: Valgrind's client
//! requests, under their names. `include/umpire_regions.h` is the same for C and C++.
//!
//! A request is some fifteen instructions that do nothing where nobody looks on, and on other
//! processors than x86-64 none at all. Nothing is to be linked, and nothing of it fails.
//!
//! ```
//! umpire_regions::zero_stats();
//! let sum: u64 = (0..1000u64).map(|number| number * number).sum();
//! umpire_regions::dump_stats_at(c"squares");
//! assert_eq!(sum, 332_833_500);
//! ```
//!
//! Instrumentation is a process's, collection a thread's; both are on at the start unless
//! `--instr-atstart no` or `--collect-atstart no` says otherwise.
#![no_std]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod sys;

use core::ffi::CStr;

use sys::{Question, ask};

/// How deep Valgrinds run this program within each other: 0 without one, and under `umpire count`,
/// where programs do what they do on a processor.
#[must_use]
pub fn running_on_valgrind() -> usize {
    ask(Question::RunningOnValgrind, None)
}

/// Begins to count, in all threads.
pub fn start_instrumentation() {
    ask(Question::StartInstrumentation, None);
}

/// Counts no longer, in all threads, until [`start_instrumentation`].
pub fn stop_instrumentation() {
    ask(Question::StopInstrumentation, None);
}

/// Counts what this thread executes from now on, or does so no longer.
pub fn toggle_collect() {
    ask(Question::ToggleCollect, None);
}

/// Forgets what has been counted since the last region: one begins here.
pub fn zero_stats() {
    ask(Question::ZeroStats, None);
}

/// Ends a region without a name, and begins the next one.
pub fn dump_stats() {
    ask(Question::DumpStats, None);
}

/// Ends a region, which gets this name, and begins the next one. Regions of one name are compared
/// by their sum.
pub fn dump_stats_at(name: &CStr) {
    ask(Question::DumpStatsAt, Some(name));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_anybody_who_looks_on_nothing_happens() {
        start_instrumentation();
        toggle_collect();
        zero_stats();
        dump_stats();
        dump_stats_at(c"name");
        stop_instrumentation();
        assert_eq!(running_on_valgrind(), 0);
    }
}
