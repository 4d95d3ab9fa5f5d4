//! One context: registers of every set, state, and what comes of commands.

mod count;
#[cfg(test)]
mod flow_tests;
mod ibs;
mod last;
mod notice;
mod overflow;
mod registers;
mod reset;
mod restart;
mod session;
mod sets;
mod switching;

pub use notice::Account;
pub(crate) use registers::{Bad, UNKNOWN};

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;

use pmu_model::{CountRequest, Nanos, Provenance};

use super::bits::PmdBits;
use super::description::LogicalPmu;
use super::format::Sampler;
use super::moment::Moment;
use super::throttle::Throttle;

/// Names a context of the machine; no other one has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContextId(pub u32);

impl fmt::Display for ContextId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "context {}", self.0)
    }
}

/// Where a context is. A context without a descriptor is a zombie until its
/// host lets it go; no command reaches it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Attached to nothing.
    Unloaded,
    /// Attached; counts if it was started.
    Loaded,
    /// Attached; nothing counts before PFM_RESTART.
    Masked,
}

/// How the value of a counter came about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum How {
    /// Nobody has counted since it was written.
    #[default]
    NotCounted,
    /// All of it was counted, so.
    Counted(Provenance),
    /// Some was counted, but not all of the time that it was to be.
    Lost,
}

/// A counter that is to count now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Index of the PMD.
    pub pmd: u16,
    /// What it counts.
    pub request: CountRequest,
    /// Events until its overflow; `None` if nobody waits for it.
    pub until: Option<NonZeroU64>,
}

/// A PMC of one set.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pmc {
    pub(super) value: u64,
    /// PFM_REGFL_*.
    pub(super) flags: u32,
    pub(super) reset_pmds: PmdBits,
    pub(super) smpl_pmds: PmdBits,
    pub(super) eventid: u64,
}

/// A PMD of one set.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pmd {
    /// As the tool sees it: 64 bits, or the hardware's width with
    /// PFM_REGFL_NO_64BIT_EMUL. A sampler's is its count alone.
    pub(super) value: u64,
    /// Of a sampler, what its control says of its sample.
    pub(super) sample: u64,
    pub(super) long_reset: u64,
    pub(super) short_reset: u64,
    pub(super) last_reset: u64,
    /// Overflows before a switch, as written, and those that are left.
    pub(super) threshold: u64,
    pub(super) threshold_left: u64,
    pub(super) random_mask: u64,
    /// State of Carta's generator.
    pub(super) random: u32,
    pub(super) how: How,
}

/// An event set: the whole state of the PMU under one number.
#[derive(Clone, Debug, Default)]
pub(super) struct EventSet {
    /// PFM_SETFL_*.
    pub(super) flags: u32,
    pub(super) next: u16,
    /// Effective timeout, and what is left of it.
    pub(super) timeout: Nanos,
    pub(super) timeout_left: Nanos,
    /// Registers that were written, or are not at their default.
    pub(super) pmcs: BTreeMap<u16, Pmc>,
    pub(super) pmds: BTreeMap<u16, Pmd>,
    pub(super) runs: u64,
    pub(super) switch_pmds: PmdBits,
    /// How long it was active.
    pub(super) active_time: Nanos,
    /// Overflowed, and not reset since.
    pub(super) overflowed: PmdBits,
}

/// A context, without its place on a core.
#[derive(Debug)]
pub struct Context {
    pub(super) pmu: Arc<LogicalPmu>,
    /// PFM_FL_*.
    pub(super) flags: u32,
    pub(super) sampler: Option<Sampler>,
    /// Set 0 is always there.
    pub(super) sets: BTreeMap<u16, EventSet>,
    pub(super) phase: Phase,
    pub(super) started: bool,
    /// The active set.
    pub(super) active: u16,
    /// Counts the times that it was loaded.
    pub(super) generation: u16,
    /// The vCPU is kept off its core until PFM_RESTART.
    pub(super) blocked: bool,
    /// A switch of sets was put off until PFM_RESTART.
    pub(super) switch_pending: bool,
    /// The last overflow that was dealt with since it was loaded.
    pub(super) moment: Option<Moment>,
    /// PMDs of the active set that wrapped since the last [`Context::overflow`].
    pub(super) pending: PmdBits,
    /// Samplers of the active set that wait for [`Context::sampled`].
    pub(super) due: PmdBits,
    /// Which of what can be counted for fetches is.
    pub(super) fetch_choice: usize,
    /// Time that passed after the active set's timeout was up, and whether it
    /// counts with PFM_SETFL_EXCL_IDLE.
    pub(super) overdue: Nanos,
    pub(super) overdue_counts: bool,
    /// Quantities of the VMM when the context was detached, by PMD.
    pub(super) kept: BTreeMap<u16, u64>,
    pub(super) throttle: Throttle,
    pub(super) account: Account,
}
