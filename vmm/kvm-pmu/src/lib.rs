//! The KVM half of a virtual PMU, for any VMM on kvm-ioctls and vm-memory that owns
//! its own `KVM_RUN` loop.
//!
//! - Before vCPUs exist: [`switch_off_vpmu`], and a VM's one MSR filter by
//!   [`msr_ranges`] and [`MsrFilter`].
//! - CPUID: [`cpuid::merge`].
//! - Each vCPU is a [`KvmVcpu`] and has a [`KvmPmu`], each thread that runs vCPUs a
//!   [`ThreadContext`], and the process [`install_kick_handler`].
//! - The loop: [`KvmPmu::enter`], with what the VMM lends ([`Lent`]), makes an [`Entered`],
//!   whose `KVM_RUN` ends in an [`Exited`]: counts are settled by then, and it says who answers
//!   the exit. What devices then take is not the guest's time.
//! - [`TrapObserver`] gets reports.
//!
//! The crate makes no VM, and enters no guest but by [`KvmVcpu::enter`]. It answers RDMSR, WRMSR and RDPMC of
//! the guest, sends PMIs, steps the guest where a counter needs that, and keeps
//! halted time out of the counts. What a register means, pmu-virt knows.
//!
//! `docs/guide/embedding.md` goes through it step by step; `examples/minimal_vmm.rs` is a
//! whole VMM.
#![deny(unsafe_code)]

pub mod cpuid;
mod debug;
mod error;
mod gp_watch;
mod guest_tsc;
mod halt;
mod memory;
mod moment;
mod observe;
mod pmi;
mod pmu;
mod protect;
mod step_driver;
#[allow(unsafe_code, reason = "the one place of the crate with unsafe code")]
mod sys;
mod thread;
mod time;
mod trap;
mod vcpu;
mod vm;
mod vm_traps;

pub use debug::DebugQuirks;
pub use error::{EntryError, KickError, KvmPmuError, PmiError, VcpuError, VcpuId};
pub use guest_exit::{Answer, DebugExit, InternalError, VmExit};
pub use memory::GuestBytes;
pub use observe::{Armed, NoObserver, TrapEvent, TrapObserver};
pub use pmu::{Entered, Exited, KvmPmu, KvmPmuParts, Lent, MsrAccess, MsrHolder, MsrTraps};
pub use pmu_virt::{PmiDelivery, PmiRoute, Tsc};
pub use protect::{ProtectPages, TwiceMapped};
pub use step_driver::StepSupport;
pub use sys::{
    HaltStats, Halted, KickTarget, KickTimer, SharedError, SharedMemory, StatsError,
    install_kick_handler, install_kick_handler_of, kick_signal, on_kick, own_kick_handler,
    thread_cpu_time,
};
pub use thread::ThreadContext;
pub use time::now;
pub use trap::PatchRefusal;
pub use vcpu::KvmVcpu;
pub use vm::{MsrFilter, MsrFilterError, msr_ranges, switch_off_vpmu};
pub use vm_traps::{TrapMode, TrapPlan, VmTraps};
