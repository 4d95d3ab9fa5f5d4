//! What the standard library and the rust-vmm crates have no safe call for:
//! the time stamp counter, CPU time, per-thread timers, the signal that kicks a
//! vCPU's thread, KVM's statistics, and memory that is mapped twice.
//!
//! This module is the only place of the crate with `unsafe` code.

mod kick;
mod memory;
mod run;
mod shared;
mod stats;
mod time;

pub(crate) use kick::{KickFlag, KickGuard, check_kicks};
pub use kick::{
    KickTarget, install_kick_handler, install_kick_handler_of, kick_signal, on_kick,
    own_kick_handler,
};
pub(crate) use memory::{protect_page, unnamed_file};
pub(crate) use run::{answer_mmio, answer_msr, exit_after, expect_interruption, io_data};
pub use shared::{SharedError, SharedMemory};
pub use stats::{HaltStats, Halted, StatsError};
pub(crate) use time::rdtsc;
pub use time::{KickTimer, thread_cpu_time};
