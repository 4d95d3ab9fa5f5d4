//! Virtual PMUs: what a guest sees at its performance counters, and where the
//! counts behind them come from.
//!
//! - [`VcpuPmu`] is one virtual CPU's PMU: registers, a grant of counters, times,
//!   the PMI that is pending. A guest's mistake is an outcome, never an error. What its
//!   samples need of the guest it asks of a [`Moment`].
//! - [`CorePmu`] is one core's: its physical counters, and the host contexts that
//!   count on them too. Its thread owns it, and lends it to each operation of the
//!   vCPU that runs there. The registers of a vCPU that is switched out can change;
//!   its counters do not.
//! - [`CounterBackend`] counts: [`ClockBackend`], [`StepBackend`], [`EmuBackend`],
//!   `SimBackend` (of the feature `toml`, off by default), the host's kernel ([`perf`]), the processor's registers ([`msr`]);
//!   [`contract`] is the suite that every backend has to pass.
//! - `perfmon` (of the feature `contexts`, off by default) attaches contexts of host tools to
//!   vCPUs and cores, and decides whether there is room for them.
//!
//! What is to be counted is a claim: of a guest's counter, or of a context's PMD.
//! One pure function places all claims on slots, built on [`assign()`] and
//! [`assign_most`]; what a claim holds while it is placed is a lease, by which all
//! of them settle and leave.
//!
//! What a PMU is without anybody who counts (models, registers, events, readings)
//! is the crate `pmu-model`; its names are shown here as well.
//!
//! Nothing here knows KVM, reads a clock or blocks, and only [`perf`] and [`msr`]
//! perform I/O. See `examples/overflow.rs` for a PMU at work.
#![deny(unsafe_code)]

#[cfg(feature = "contexts")]
mod admission;
mod assign;
#[cfg(feature = "contexts")]
mod attached;
mod backend;
pub mod contract;
mod core_pmu;
mod filter;
mod holdings;
mod moment;
mod pebs;
mod placement;
mod pmi_line;
#[cfg(feature = "contexts")]
mod policy;
mod slot_bank;
mod state;
mod throttle;
mod vcpu;

pub use arbiter::{Access, Caller, CounterId, CounterSet, Denial, Grant, Layer, Verdict};
pub use assign::{Demand, MAX_DEMANDS, Placement, assign, assign_most, try_assign};
pub use backend::msr;
pub use backend::perf;
pub use backend::{
    BackendEnv, BackendError, BackendSummary, ClockBackend, CombinedBackend, CountPlan,
    CounterBackend, EmuBackend, EmuCycles, HostCpuid, MsrBackend, MsrDevice, MsrOptions,
    MsrRefusal, MsrReport, Source, Sources, StepBackend, backend_names,
};
#[cfg(feature = "toml")]
pub use backend::{RateError, RateProblem, RateTable, SimBackend, SimClocks};
pub use core_pmu::CorePmu;
#[cfg(feature = "toml")]
pub use filter::FilterError;
pub use filter::{EventFilter, EventFilters, EventProfile};
pub use holdings::Holdings;
pub use moment::{CodePlace, Moment, MomentRegisters, SampledInstruction};
pub use pebs::LinearMemory;
pub use pmi_line::{Lvtpc, PmiDelivery, PmiForwarded, PmiLine, PmiRequest, PmiRoute};
pub use pmu_model::accounting;
pub use pmu_model::cpuid;
pub use pmu_model::ibs;
pub use pmu_model::ibs::IbsSample;
pub use pmu_model::{
    AssignError, Constraint, ContextId, CountRequest, CpuidRegs, EventClass, EventCode,
    EventFamily, EventTotals, FixedFunction, IbsKind, IbsRegister, KnownEvent, LossReason,
    MathUnit, ModelError, ModelSummary, MsrIndex, Nanos, OwnerId, Pebs, PebsFormat, PebsPrecision,
    PmuCpuid, PmuModel, Progress, Provenance, Reading, Register, RegisterKind, RegisterRow,
    Reserved, Retirement, Ring, SlotIndex, SlotSet, SoftwareEvent, Ticks, Tsc, Unavailable,
    UnavailableReason, Vendor, WriteForm, WriteRule, accounting_leaves, all_pmu_msr_ranges,
};
pub use slot_bank::{Claimant, HolderReport, SwitchStats};
pub use state::{NotSettled, PmuState, StateError};
pub use throttle::PmiThrottle;
pub use vcpu::{
    BudgetRefused, Claims, CounterReport, IbsDue, Interrupts, MsrRead, MsrWrite, Needs, OtherCores,
    Oversubscribe, ReadOutcome, Reservations, VcpuPmu, WriteOutcome,
};
#[cfg(feature = "contexts")]
pub use vcpu::{HostSide, Hosts};

/// perfmon2 for host tools: the contexts themselves, and what attaches them to
/// vCPUs and cores.
#[cfg(feature = "contexts")]
pub mod perfmon {
    pub use crate::admission::{Claimed, ContextDemand, GuestRoom, NoRoom, Room, admit};
    pub use crate::attached::{
        AttachedContext, GuestLimit, HostAudit, HostEvent, HostRecord, MAX_CONTEXTS, NotLoaded,
    };
    pub use crate::policy::{HostPolicy, HostPolicyError, Standing};
    pub use ::perfmon::*;
}
