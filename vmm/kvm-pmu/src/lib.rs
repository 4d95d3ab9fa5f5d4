//! The KVM half of a virtual PMU, for any VMM on kvm-ioctls.
#![deny(unsafe_code)]

mod memory;
#[allow(unsafe_code, reason = "the one place of the crate with unsafe code")]
mod sys;
pub mod trap;

pub use memory::GuestBytes;
pub use sys::{
    HaltStats, Halted, ImmediateExitGuard, KickTarget, KickTimer, StatsError, bind_immediate_exit,
    install_kick_handler, kick_signal, rdtsc, thread_cpu_ns,
};
