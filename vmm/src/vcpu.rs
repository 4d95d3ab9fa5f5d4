//! One vCPU: the run loop, and what each exit leads to.

mod exits;
mod firmware;
mod hosted;
mod observe;
mod outcome;
mod run;
mod timer;

pub(crate) use exits::{Handled, handle};
pub(crate) use hosted::{Hosted, VcpuFacts};
pub use kvm_pmu::{
    Armed, DebugQuirks, PatchRefusal, PmiDelivery, PmiRoute, StepSupport, ThreadContext, TrapEvent,
    TrapMode, TrapPlan, now,
};
pub(crate) use observe::Reports;
pub use observe::{Observer, PmuLog, Silent};
pub use outcome::{RunOutcome, Runnability, Timeslice, VcpuEnd, VcpuFailure};
pub use run::{Vcpu, VcpuControl, VcpuParts};
