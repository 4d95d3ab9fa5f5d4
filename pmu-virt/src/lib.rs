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

pub mod accounting;
mod assign;
mod backend;
pub mod contract;
mod core_pmu;
mod cpuid;
mod event;
mod ids;
mod model;
pub mod perfmon;
mod progress;
mod register;
mod request;
mod state;
pub mod step;
mod sys;
mod throttle;
mod vcpu;

pub use arbiter::{Access, Caller, CounterId, CounterSet, Denial, Grant, Layer, Verdict};
pub use assign::{AssignError, Constraint, Demand, MAX_DEMANDS, Placement, assign, assign_most};
pub use backend::msr;
pub use backend::perf;
pub use backend::{
    BackendEnv, BackendError, BackendSummary, ClockBackend, CombinedBackend, CounterBackend,
    HostCpuid, MsrBackend, MsrDevice, MsrOptions, MsrRefusal, MsrReport, Provenance, RateError,
    RateProblem, RateTable, Reading, SimBackend, SimClocks, Source, Sources, StepBackend,
    Unavailable, UnavailableReason, backend_names,
};
pub use core_pmu::{CorePmu, Holder, HolderReport, SwitchStats};
pub use cpuid::{CpuidRegs, PmuCpuid};
pub use event::{EventCode, EventFamily, FixedFunction, KnownEvent, SoftwareEvent};
pub use ids::{MsrIndex, OwnerId, Ring, SlotIndex, SlotSet, Vendor};
pub use model::{
    ModelError, ModelSummary, PmuModel, RegisterKind, RegisterRow, all_pmu_msr_ranges,
};
pub use progress::{LossReason, Progress};
pub use register::{Register, Reserved, WriteForm, WriteRule};
pub use request::CountRequest;
pub use state::{PmuState, StateError};
pub use throttle::{PmiThrottle, ThrottleDecision};
pub use vcpu::{
    CounterReport, Needs, Oversubscribe, PmiRequest, ReadOutcome, Reservations, VcpuPmu,
    WriteOutcome,
};
