//! The KVM half of a virtual PMU, for any VMM on kvm-ioctls.
#![deny(unsafe_code)]

pub mod cpuid;
mod debug;
mod error;
mod gp_watch;
mod halt;
mod memory;
mod observe;
mod pmi;
mod pmu;
mod registers;
mod step_driver;
#[allow(unsafe_code, reason = "the one place of the crate with unsafe code")]
mod sys;
mod thread;
mod time;
mod trap;
mod vm;

pub use debug::DebugQuirks;
pub use error::{KvmPmuError, PmiError, VcpuError, VcpuId};
pub use memory::GuestBytes;
pub use observe::{NoObserver, TrapEvent, TrapObserver};
pub use pmi::{PmiDelivery, PmiRoute};
pub use pmu::{ExitOwner, KvmPmu, KvmPmuParts, Lent};
pub use step_driver::StepSupport;
pub use sys::{
    DebugExit, HaltStats, Halted, KickFlag, KickGuard, KickTarget, KickTimer, StatsError,
    answer_msr, install_kick_handler, kick_signal, thread_cpu_time,
};
pub use thread::ThreadContext;
pub use time::Tsc;
pub use vm::{MsrFilter, MsrFilterError, msr_ranges, switch_off_vpmu};
