//! What the standard library and the rust-vmm crates have no safe call for:
//! the time stamp counter, CPU time, per-thread timers, the signal that kicks a
//! vCPU's thread, and KVM's statistics.
//!
//! This module is the only place of the crate with `unsafe` code.

mod cpu_time;
mod kick;
mod run;
mod stats;
mod timer;
mod tsc;

pub use cpu_time::thread_cpu_ns;
pub use kick::{KickFlag, KickGuard, KickTarget, install_kick_handler, kick_signal};
pub(crate) use run::PmuExit;
pub use run::{DebugExit, answer_msr};
pub use stats::{HaltStats, Halted, StatsError};
pub use timer::KickTimer;
pub use tsc::rdtsc;
