//! Virtual PMUs: what a guest sees at its performance counters, and where the
//! counts behind them come from.
//!
//! - [`PmuModel`] says which registers exist and which values they take; one
//!   constant table per model, from which decoding and MSR ranges derive.
//! - [`VcpuPmu`] is one virtual CPU's PMU: registers, a grant of counters, and
//!   a [`CounterBackend`]. A guest's mistake is an outcome, never an error.
//! - [`ClockBackend`] and [`StepBackend`] count, [`perf`] has the host's kernel
//!   count; [`contract`] is the suite that every backend has to pass.
//! - [`assign()`] says which physical counter counts for which logical one.
//! - [`perfmon`] is the perfmon2 interface of host tools.
//! - [`step`] decodes and classifies the instructions of a stepped guest.
//!
//! Nothing here knows KVM or blocks, and only [`perf`] performs I/O. The rules of the registers,
//! each with its source, are listed in `docs/registers.md`.
#![deny(unsafe_code)]

mod admission;
mod assign;
mod attached;
mod backend;
pub mod contract;
mod core_pmu;
mod placement;
mod policy;
mod slot_bank;
mod state;
pub mod step;
mod throttle;
mod vcpu;

pub use arbiter::{Access, Caller, CounterId, CounterSet, Denial, Grant, Layer, Verdict};
pub use assign::{Demand, MAX_DEMANDS, Placement, assign, assign_most};
pub use backend::msr;
pub use backend::perf;
pub use backend::{
    BackendEnv, BackendError, BackendSummary, ClockBackend, CombinedBackend, CountPlan,
    CounterBackend, HostCpuid, MsrBackend, MsrDevice, MsrOptions, MsrRefusal, MsrReport, RateError,
    RateProblem, RateTable, SimBackend, SimClocks, Source, Sources, StepBackend, backend_names,
};
pub use core_pmu::CorePmu;
pub use pmu_model::accounting;
pub use pmu_model::{
    AssignError, Constraint, CountRequest, CpuidRegs, EventCode, EventFamily, FixedFunction,
    KnownEvent, LossReason, ModelError, ModelSummary, MsrIndex, OwnerId, PmuCpuid, PmuModel,
    Progress, Provenance, Reading, Register, RegisterKind, RegisterRow, Reserved, Ring, SlotIndex,
    SlotSet, SoftwareEvent, Unavailable, UnavailableReason, Vendor, WriteForm, WriteRule,
    accounting_leaves, all_pmu_msr_ranges,
};
pub use slot_bank::{Claimant, HolderReport, SwitchStats};
pub use state::{PmuState, StateError};
pub use throttle::{PmiThrottle, ThrottleDecision};
pub use vcpu::{
    CounterReport, MsrRead, MsrWrite, Needs, Oversubscribe, PmiDue, PmiRequest, ReadOutcome,
    Reservations, VcpuPmu, WriteOutcome,
};

/// perfmon2 for host tools: the contexts themselves, and what attaches them to
/// vCPUs and cores.
pub mod perfmon {
    pub use crate::admission::{Claimed, ContextDemand, GuestRoom, NoRoom, Room, admit};
    pub use crate::attached::AttachedContext as Hosted;
    pub use crate::attached::{AttachedContext, HostAudit, HostEvent, HostRecord, NotLoaded};
    pub use crate::policy::{HostPolicy, HostPolicyError, Standing};
    pub use ::perfmon::*;
}
