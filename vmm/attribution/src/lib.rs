//! Who executed what in an emulated guest.
#![forbid(unsafe_code)]

mod counts;

pub use counts::{Counts, Events, Function, Program, Region, Rest, Syscall, Thread};
