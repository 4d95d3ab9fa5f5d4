//! One vCPU: the run loop, and what each exit leads to.

mod exits;
mod hosted;
mod observe;
mod outcome;
mod reserved;
mod run;
mod saved;
mod timer;
mod timeslice;

pub use kvm_pmu::{
    Armed, DebugQuirks, PatchRefusal, PmiDelivery, PmiRoute, StepSupport, ThreadContext, TrapEvent,
    TrapMode, TrapPlan,
};
pub use observe::{Observer, PmuLog, Silent};
pub use outcome::{RunOutcome, Runnability, Timeslice, VcpuEnd};
pub use run::{Vcpu, VcpuControl, VcpuFailure, VcpuParts};
