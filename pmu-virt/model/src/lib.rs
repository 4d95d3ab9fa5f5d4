//! What a performance monitoring unit is, without anybody who counts.
//!
//! - [`PmuModel`] says which registers exist and which values they take; one
//!   constant table per model, from which decoding, MSR ranges and CPUID
//!   ([`PmuCpuid`]) derive.
//! - [`CountRequest`] is what a control register asks for, in the words of
//!   [`EventCode`] and [`KnownEvent`].
//! - [`Reading`] is a count with its [`Provenance`], or the
//!   [`UnavailableReason`] why there is none; [`Constraint`] says on which
//!   physical counters something can be counted.
//! - [`Progress`] is what befalls a vCPU, as far as counting is concerned; [`EventTotals`] what
//!   instructions did, by [`EventClass`].
//! - [`cpuid`] has the table of leaves, what of it is about a PMU, and what a guest sees.
//! - [`accounting`] is the page of registers that tells a guest how far its
//!   counts can be trusted.
//!
//! The rules of the registers, each with its source, are listed in
//! `docs/reference/registers.md`.
#![deny(unsafe_code)]

pub mod accounting;
mod constraint;
mod counts;
pub mod cpuid;
mod event;
pub mod ibs;
mod ids;
mod model;
mod pebs;
mod progress;
mod reading;
mod register;
mod request;
mod retirement;
mod text;
mod virtual_pmd;

pub use arbiter::{CounterId, CounterSet, Nanos, PerKind, Ticks, Tsc};
pub use constraint::{AssignError, Constraint};
pub use counts::{EventClass, EventCounts, EventTotals};
pub use cpuid::{CpuidRegs, PmuCpuid, accounting_leaves};
pub use event::{EventCode, EventFamily, FixedFunction, KnownEvent, SoftwareEvent};
pub use ibs::{IbsKind, IbsRegister};
pub use ids::{ContextId, MsrIndex, OwnerId, Ring, SlotIndex, SlotSet, Vendor, low_bits};
pub use model::{
    CTR_FRZ, DEBUGCTL, MAX_FIXED, MAX_PROGRAMMABLE, MISC_ENABLE, ModelError, ModelSummary,
    OVF_BUFFER, PMI_IN_USE, PmuModel, RegisterKind, RegisterRow, all_pmu_msr_ranges, written_count,
};
pub use pebs::{Pebs, PebsFormat, PebsPrecision};
pub use progress::{LossReason, Progress};
pub use reading::{Provenance, Reading, Unavailable, UnavailableReason};
pub use register::{Register, Reserved, WriteForm, WriteRule};
pub use request::CountRequest;
pub use retirement::{MathUnit, Retirement};
pub use text::list;
pub use virtual_pmd::VirtualPmd;
