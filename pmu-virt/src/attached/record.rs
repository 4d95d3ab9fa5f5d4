//! What is told of decisions about host contexts.

use std::fmt::Debug;

use perfmon::ContextId;
use perfmon_abi::wire::Refusal;
use pmu_model::{Nanos, OwnerId};

use crate::policy::Standing;

/// A decision about a host context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRecord {
    pub context: ContextId,
    /// The vCPU that it is, was or was to be loaded on; none if that is the
    /// core.
    pub vcpu: Option<OwnerId>,
    /// What was decided.
    pub event: HostEvent,
}

/// What was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostEvent {
    Loaded {
        /// What it may rely on.
        standing: Standing,
    },
    /// It was not loaded.
    Refused {
        refusal: Refusal,
    },
    Unloaded,
    /// Somebody who comes first needed its counters.
    Preempted,
    /// There was room for it again.
    Restored {
        /// The part of its time in which it counted nothing.
        blind: Nanos,
    },
    /// A write asked for more counters than it was loaded for, and nothing is
    /// left over: from now on it counts what finds room.
    Overdrawn,
}

/// Told of every decision, by the thread of the core. Must not block.
pub trait HostAudit: Send + Debug {
    /// A decision was made.
    fn record(&mut self, record: &HostRecord);
}
