//! The KVM half of a virtual PMU, for any VMM that owns its own `KVM_RUN` loop.
//!
//! Descriptors of VMs and vCPUs are taken by `AsFd`, whatever crate has them. Registers have the
//! types of [`kvm_bindings`], of which a VMM may have another version beside. What knows types
//! of kvm-ioctls and vm-memory is behind the features `kvm-ioctls` and `vm-memory`, and what serves
//! contexts of tools behind `contexts`, all off by default.
//!
//! - Before vCPUs exist: [`KvmVm`], [`switch_off_vpmu`], and a VM's one MSR filter by
//!   [`msr_ranges`] and [`MsrFilter`].
//! - CPUID: [`cpuid::merge`].
//! - Each vCPU is a [`KvmVcpu`] and has a [`KvmPmu`], each thread that runs vCPUs a
//!   [`ThreadContext`], and the process [`install_kick_handler`].
//! - The loop: [`KvmPmu::enter`], with what the VMM lends ([`Lent`]), makes an [`Entered`],
//!   whose `KVM_RUN` ends in an [`Exited`]: counts are settled by then, and it says who answers
//!   the exit. What devices then take is not the guest's time.
//! - [`TrapObserver`] gets reports.
//!
//! But for [`probe()`], whose tiny VMs are gone when it returns, the crate makes no VM, and enters
//! no guest but by [`KvmVcpu::enter`]. It answers RDMSR, WRMSR and RDPMC of the guest, sends PMIs, steps the guest where a counter needs that, and keeps
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
#[doc(hidden)]
pub mod layout;
mod memory;
mod moment;
mod observe;
mod pmi;
mod pmu;
mod probe;
mod protect;
mod step_driver;
#[allow(unsafe_code, reason = "the one place of the crate with unsafe code")]
mod sys;
mod thread;
mod time;
mod trap;
#[cfg(any(test, feature = "vm-memory"))]
mod twice_mapped;
mod vcpu;
mod vm;
mod vm_traps;

pub use debug::DebugQuirks;
pub use error::{
    DescriptorError, EntryError, Errno, KickError, KvmPmuError, PmiError, VcpuError, VcpuId,
};
pub use guest_exit::{Answer, DebugExit, InternalError, VmExit};
pub use kvm_bindings;
pub use memory::GuestBytes;
pub use observe::{Armed, NoObserver, TrapEvent, TrapObserver};
pub use pmu::{Entered, Exited, KvmPmu, KvmPmuParts, Lent, MsrAccess, MsrHolder, MsrTraps};
pub use pmu_virt::{PmiDelivery, PmiRoute, Tsc};
pub use probe::{
    GuestStep, HandlerOut, HostRefusal, ProbeError, ProbeReport, ProtectedStore, RdpmcBehaviour,
    probe,
};
pub use protect::ProtectPages;
pub use step_driver::StepSupport;
pub use sys::{
    HaltStats, Halted, KickTarget, KickTimer, SharedError, SharedMemory, StatsError,
    install_kick_handler, install_kick_handler_of, kick_signal, on_kick, own_kick_handler,
    thread_cpu_time,
};
#[cfg(feature = "kvm-ioctls")]
pub use sys::{vcpu_fd, vm_fd};
pub use thread::ThreadContext;
pub use time::now;
pub use trap::PatchRefusal;
#[cfg(any(test, feature = "vm-memory"))]
pub use twice_mapped::TwiceMapped;
pub use vcpu::KvmVcpu;
pub use vm::{
    KvmVm, MsrDefault, MsrFilter, MsrFilterError, MsrRange, SetupError, msr_ranges, switch_off_vpmu,
};
pub use vm_traps::{TrapMode, TrapPlan, VmTraps};
