//! The whole state of one vCPU's PMU, to be kept in a file.
//!
//! [`PmuState`] is plain data; what it means to a PMU, and whether it can be
//! restored, is decided in `vcpu/saved.rs`.

mod words;

use arbiter::CounterId;
use pmu_model::ibs::EXTENDED_VECTORS;
use pmu_model::{LossReason, OwnerId, Provenance};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub(crate) use words::{CounterName, Hex};

/// Everything that a PMU's registers and its accounting depend on.
///
/// It holds what the guest can see and what follows from that; not how the
/// counts came about, which the restoring host has to find out for itself:
/// physical counters, grants and turns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PmuState {
    /// The model with every property, as [`crate::PmuModel::parse`] takes it.
    pub(crate) model: String,
    /// One per programmable counter.
    pub(crate) selects: Vec<Hex>,
    pub(crate) fixed_control: Hex,
    pub(crate) global_control: Hex,
    pub(crate) global_status: Hex,
    /// The PMU's bits of IA32_DEBUGCTL, if one is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) debug_control: Option<Hex>,
    /// PEBS, where the model has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pebs: Option<SavedPebs>,
    /// One per counter, programmable ones first.
    pub(crate) counters: Vec<SavedCounter>,
    /// Counters whose overflow has yet to raise its PMI.
    pub(crate) pending_pmi: Vec<CounterName>,
    pub(crate) snapshot: SavedSnapshot,
    /// The guest has set or asked for a counter, which nothing else here shows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) was_programmed: bool,
    /// Instruction-based sampling, where the model has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ibs: Option<SavedIbs>,
    /// Kept for counter reservations, whose cookies will be stored as keyed
    /// hashes only. Whoever meets them without knowing them has to refuse.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reservations: Option<words::Unknown>,
}

/// One counter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct SavedCounter {
    pub(crate) counter: CounterName,
    pub(crate) value: Hex,
    /// The guest has written its control since reset.
    pub(crate) programmed: bool,
    /// Events since it was programmed.
    pub(crate) events: u64,
    /// In TSC ticks of guest time.
    pub(crate) time_enabled: u64,
    pub(crate) time_running: u64,
    /// The part of `time_enabled` that it waited for a physical counter, and
    /// for which its count has yet to be scaled.
    pub(crate) time_unaccounted: u64,
    /// How the events were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) provenance: Option<Provenance>,
    /// Why they are no longer exact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) loss: Option<LossReason>,
}

impl SavedCounter {
    /// One that nobody has used since reset.
    pub(crate) fn unused(counter: CounterId) -> Self {
        SavedCounter {
            counter: CounterName(counter),
            value: Hex(0),
            programmed: false,
            events: 0,
            time_enabled: 0,
            time_running: 0,
            time_unaccounted: 0,
            provenance: None,
            loss: None,
        }
    }
}

/// The registers of PEBS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct SavedPebs {
    pub(crate) enable: Hex,
    pub(crate) data_config: Hex,
    pub(crate) ds_area: Hex,
    /// Counters that have overflowed, and whose next event makes a record.
    pub(crate) armed: Vec<CounterName>,
}

/// The snapshot that the accounting page shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct SavedSnapshot {
    pub(crate) sequence: u64,
    /// Status, time enabled, time running and count of each counter.
    pub(crate) counters: Vec<[Hex; 4]>,
}

/// Registers of the last samples.
pub(crate) const IBS_DATA: usize = 9;

/// Instruction-based sampling in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct SavedIbs {
    /// `IbsFetchCtl` and `IbsOpCtl`, as they read.
    pub(crate) fetch_control: Hex,
    pub(crate) op_control: Hex,
    /// The bits of the fetch count that are not in it.
    pub(crate) fetch_count: Hex,
    /// The registers of the last samples, in the order of their indices.
    pub(crate) data: [Hex; IBS_DATA],
    pub(crate) vectors: [Hex; EXTENDED_VECTORS as usize],
    pub(crate) seed: Hex,
    /// Delivery mode and vector of an interrupt that waits to be sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pending: Option<Hex>,
}

impl PmuState {
    /// The model with every property, as `--pmu` takes it.
    pub fn model(&self) -> &str {
        &self.model
    }
}

/// A PMU cannot be saved: some of its counts may still be on a core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{0} cannot be saved: it has to leave its thread, or its core, first")]
pub struct NotSettled(pub OwnerId);

/// Why a state cannot be restored. Nothing was changed then.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StateError {
    /// Another model, or another property of it.
    #[error("it was saved from PMU model {saved}, this one is {here}")]
    Model {
        /// The model in the state.
        saved: String,
        /// The model of this PMU.
        here: String,
    },
    /// A list whose length does not fit the model.
    #[error("it has {found} {what}, the model has {expected}")]
    Length {
        /// What the list holds.
        what: &'static str,
        /// Its length.
        found: usize,
        /// What would fit.
        expected: usize,
    },
    /// A counter at another one's place.
    #[error("counter {found} stands where {expected} belongs")]
    Order {
        found: CounterId,
        expected: CounterId,
    },
    /// A counter that the model lacks.
    #[error("the model has no counter {0}")]
    NoSuchCounter(CounterId),
    /// Bits that the register does not have.
    #[error("{register} is {value:#x}, of which the model has no bits {surplus:#x}")]
    Bits {
        /// Name of the register.
        register: String,
        /// Its value in the state.
        value: u64,
        /// The bits that it does not have.
        surplus: u64,
    },
    /// A counter that counted for longer than it was enabled.
    #[error("{0} was counted for longer than it was enabled")]
    Times(CounterId),
    /// Labels of events that were never counted.
    #[error("{0} has a label or events, but was never programmed")]
    Unprogrammed(CounterId),
    /// Samples of a model that takes none.
    #[error("it has the registers of IBS, and the model has none; give --pmu with ibs=on")]
    Ibs,
    /// An address that no guest can have written.
    #[error("{register} is {value:#x}, which is no canonical address")]
    Address {
        /// Name of the register.
        register: &'static str,
        /// Its value in the state.
        value: u64,
    },
    /// Counter reservations.
    #[error("it holds counter reservations, which this version of Umpire cannot restore")]
    Reservations,
}
