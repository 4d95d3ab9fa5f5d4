//! What the standard library and the rust-vmm crates have no safe call for:
//! the time stamp counter, CPU time, per-thread timers and the signals of a
//! vCPU's thread.
//!
//! This module and the other modules named `sys` are the only places of the
//! crate with `unsafe` code.

mod affinity;
mod cpu_time;
mod kick;
mod nap;
mod pending;
mod resident;
mod stats;
mod timer;
mod tsc;

pub use affinity::{allowed_cpus, pin_this_thread, while_on_cpu};
pub use cpu_time::thread_cpu_ns;
pub use kick::{
    ImmediateExitGuard, KickTarget, bind_immediate_exit, install_kick_handler, kick_signal,
};
pub use nap::nap;
pub use pending::{SignalMask, hold_pending_signal};
pub use resident::resident_bytes;
pub use stats::{HaltStats, Halted, StatsError};
pub use timer::KickTimer;
pub use tsc::rdtsc;
