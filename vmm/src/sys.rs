//! What the standard library and the rust-vmm crates have no safe call for:
//! affinity, waits that a kick ends, and the signal that probes need.
//!
//! This module and the other modules named `sys` are the only places of the
//! crate with `unsafe` code.

mod affinity;
mod nap;
mod pending;
mod resident;

pub use affinity::{allowed_cpus, pin_this_thread, while_on_cpu};
pub use kvm_pmu::{
    HaltStats, Halted, KickTarget, KickTimer, StatsError, install_kick_handler, kick_signal,
    thread_cpu_time,
};
pub use nap::nap;
pub use pending::{SignalMask, hold_pending_signal};
pub use resident::resident_bytes;

/// The host's time stamp counter, in ticks.
#[must_use]
#[inline]
pub fn rdtsc() -> u64 {
    kvm_pmu::now().0
}
