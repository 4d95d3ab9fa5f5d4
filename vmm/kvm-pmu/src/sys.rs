//! What the standard library and the rust-vmm crates have no safe call for:
//! the time stamp counter, CPU time, per-thread timers, the signal that kicks a
//! vCPU's thread, KVM's statistics, and memory that is mapped twice.
//!
//! This module is the only place of the crate with `unsafe` code.

mod bare_vm;
pub(crate) mod ioctl;
mod kick;
mod memory;
#[cfg(feature = "kvm-ioctls")]
mod of_kvm_ioctls;
mod run;
mod shared;
mod stats;
mod time;

pub(crate) use bare_vm::{BareVm, BareVmError};
pub(crate) use kick::{KickFlag, KickGuard, check_kicks};
pub use kick::{
    KickTarget, install_kick_handler, install_kick_handler_of, kick_signal, on_kick,
    own_kick_handler,
};
#[cfg(any(test, feature = "vm-memory"))]
pub(crate) use memory::protect_page;
#[cfg(any(test, feature = "vm-memory"))]
pub(crate) use memory::unnamed_file;
#[cfg(feature = "kvm-ioctls")]
pub use of_kvm_ioctls::{vcpu_fd, vm_fd};
pub(crate) use run::{RunPages, answer_mmio, answer_msr, exit_after, expect_interruption};
pub use shared::{SharedError, SharedMemory};
pub use stats::{HaltStats, Halted, StatsError};
pub(crate) use time::rdtsc;
pub use time::{KickTimer, thread_cpu_time};
