//! Records of decisions, and what a machine has for the arbiter: a receiver for
//! records and a source of random bits.

#[cfg(feature = "alloc")]
use alloc::vec::Vec;
use core::fmt;

#[cfg(feature = "alloc")]
use crate::backing::Backing;
use crate::control::Control;
#[cfg(feature = "alloc")]
use crate::counter::PerKind;
#[cfg(feature = "alloc")]
use crate::message::{Answer, NamedEvent, Reply, Wanted};
#[cfg(feature = "alloc")]
use crate::policy::{Scheme, Share};
use crate::reason::Reason;
use crate::{CounterId, Layer};

/// A decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// The layer that asked, or the layer that loses the counter.
    pub layer: Layer,
    /// The counter, if the decision is about one.
    pub counter: Option<CounterId>,
    /// What was decided.
    pub event: Event,
}

/// What was decided. No event carries a cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The layer reserved the counter, or a request granted it. A counter that
    /// was [`Event::Gathered`] before stays with the layer.
    Reserved {
        /// The length of the lease in milliseconds, if there is a lease.
        lease_ms: Option<u32>,
    },
    /// The layer renewed its lease.
    Renewed,
    /// The layer took the counter over with its management cookie.
    HandedOver {
        /// The layer that held it.
        from: Layer,
    },
    /// The layer gave the counter back, with its management cookie.
    Released,
    /// The layer gave the counter to another layer, which had asked for it.
    Yielded {
        /// The layer that has it now.
        to: Layer,
    },
    /// A request of the layer gained the counter and still waits for others. The
    /// layer holds the counter until the request has its answer.
    Gathered,
    /// The request that had gathered the counter was refused. The counter is free.
    Returned,
    /// The access cookie was set.
    AccessSet {
        /// Whether legacy accesses are locked out now.
        private: bool,
    },
    /// The control word was set.
    ControlSet(Control),
    /// The drop value was set.
    DropValueSet(u64),
    /// An operation or a request was refused.
    Refused(Reason),
    /// A read was dropped.
    DroppedRead(Reason),
    /// A write was dropped.
    DroppedWrite(Reason),
    /// An access raised #GP.
    Faulted(Reason),
    /// The arbiter asked the holder to yield.
    Asked {
        /// The layer that wants the counter.
        wanted_by: Layer,
    },
    /// The holder keeps the counter that another layer asked for.
    Declined {
        /// The layer that wants the counter.
        wanted_by: Layer,
        /// Whether the holder refused or did not answer in time.
        reason: Reason,
    },
    /// The arbiter announced to the holder that it will lose the counter.
    Revoking {
        /// The layer that wants the counter.
        wanted_by: Layer,
        /// Why the holder loses it.
        reason: Reason,
        /// Milliseconds until the revocation.
        in_ms: u32,
    },
    /// An announced revocation does not take place.
    Spared,
    /// The holder has lost the counter.
    Revoked(Reason),
    /// The vCPU is locked out of its core, because firmware or kernel presented
    /// wrong cookies. The audit's word for this is `barred`.
    LockedOut {
        /// The length of the penalty in milliseconds.
        ms: u32,
    },
    /// The arbiter compares no cookie of a program for a while, because programs
    /// presented wrong ones.
    Deaf {
        /// The length of the penalty in milliseconds.
        ms: u32,
    },
    /// The firmware's phase has ended.
    PhaseEnded,
    /// The administrator has barred a layer from reserving.
    LayerBarred(Layer),
    /// The administrator lets a layer reserve again.
    LayerUnbarred(Layer),
    /// The administrator has changed the share of a layer.
    #[cfg(feature = "alloc")]
    PolicySet {
        of: Layer,
        /// Its share from now on.
        share: Share,
    },
    /// The host's kernel has taken the physical counter of one that the layer holds.
    Taken,
    /// That counter has a physical one again.
    Back,
    /// The administrator has set the scheme.
    #[cfg(feature = "alloc")]
    SchemeSet(Scheme),
    /// The host has set how many counters of each kind the guest may use at a time.
    #[cfg(feature = "alloc")]
    BudgetSet(PerKind),
}

impl Event {
    /// The event's word in the audit trail.
    pub const fn name(&self) -> &'static str {
        match self {
            Event::Reserved { .. } => "reserved",
            Event::Renewed => "renewed",
            Event::HandedOver { .. } => "handed-over",
            Event::Released => "released",
            Event::Yielded { .. } => "yielded",
            Event::Gathered => "gathered",
            Event::Returned => "returned",
            Event::AccessSet { .. } => "access-set",
            Event::ControlSet(_) => "control-set",
            Event::DropValueSet(_) => "drop-value-set",
            Event::Refused(_) => "refused",
            Event::DroppedRead(_) => "dropped-read",
            Event::DroppedWrite(_) => "dropped-write",
            Event::Faulted(_) => "faulted",
            Event::Asked { .. } => "asked",
            Event::Declined { .. } => "declined",
            Event::Revoking { .. } => "revoking",
            Event::Spared => "spared",
            Event::Revoked(_) => "revoked",
            Event::LockedOut { .. } => "barred",
            Event::Deaf { .. } => "deaf",
            Event::PhaseEnded => "phase-ended",
            Event::LayerBarred(_) => "layer-barred",
            Event::LayerUnbarred(_) => "layer-unbarred",
            Event::Taken => "taken",
            Event::Back => "back",
            #[cfg(feature = "alloc")]
            Event::PolicySet { .. } => "policy-set",
            #[cfg(feature = "alloc")]
            Event::SchemeSet(_) => "scheme-set",
            #[cfg(feature = "alloc")]
            Event::BudgetSet(_) => "budget-set",
        }
    }

    /// The reason of the decision, if the event has one.
    pub const fn reason(&self) -> Option<Reason> {
        match self {
            Event::Refused(reason)
            | Event::DroppedRead(reason)
            | Event::DroppedWrite(reason)
            | Event::Faulted(reason)
            | Event::Declined { reason, .. }
            | Event::Revoking { reason, .. }
            | Event::Revoked(reason) => Some(*reason),
            Event::Reserved { .. }
            | Event::Renewed
            | Event::HandedOver { .. }
            | Event::Released
            | Event::Yielded { .. }
            | Event::Gathered
            | Event::Returned
            | Event::AccessSet { .. }
            | Event::ControlSet(_)
            | Event::DropValueSet(_)
            | Event::Asked { .. }
            | Event::Spared
            | Event::LockedOut { .. }
            | Event::Deaf { .. }
            | Event::PhaseEnded
            | Event::LayerBarred(_)
            | Event::LayerUnbarred(_)
            | Event::Taken
            | Event::Back => None,
            #[cfg(feature = "alloc")]
            Event::PolicySet { .. } | Event::SchemeSet(_) | Event::BudgetSet(_) => None,
        }
    }
}

/// What a layer asked of the arbiter, whatever became of it. The requests of a run,
/// with their times, are enough to play the run again. No cookie is in them.
#[cfg(feature = "alloc")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AskRecord {
    /// The layer that asked.
    pub layer: Layer,
    /// What it asked for.
    pub ask: Ask,
    /// Whose cookie it presented.
    pub presented: Presented,
    /// What came of it.
    pub result: AskResult,
}

/// What a layer can ask of the arbiter. What the arbiter cannot decode, it never hears.
#[cfg(feature = "alloc")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Counters, by the mailbox; or the renewal of one that the layer holds.
    Reserve {
        /// Which counters.
        wanted: Wanted,
        /// The length of the lease in milliseconds.
        lease_ms: Option<u32>,
        /// The event that it names.
        event: Option<NamedEvent>,
    },
    /// To give a counter back, by the mailbox.
    Release(CounterId),
    /// To withdraw the pending request.
    Withdraw,
    /// To yield a counter, or to keep it.
    Reply(Reply),
    /// A write of `MANAGEMENT_KEY`.
    Key {
        counter: CounterId,
        /// The counter is given back; else it is reserved, renewed or taken over.
        gives_back: bool,
    },
    /// A write of `CONTROL`.
    Control(CounterId, Control),
    /// The end of the firmware's phase.
    EndPhase,
    /// A counter that the hypervisor sets aside.
    SetAside(CounterId),
    /// Nothing: the hypervisor says what the guest's layers can hold from now on.
    Backed(Backing),
    /// Nothing: the pending request of the layer has its answer.
    Answer,
    /// Nothing: the administrator of the host has acted, as the decisions before say.
    Administered,
}

/// Whose cookie a layer presented.
#[cfg(feature = "alloc")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presented {
    /// The default cookie.
    Nothing,
    /// The cookie of this layer: of its counter or its pending request, or a new one of
    /// its own.
    Of(Layer),
    /// A wrong cookie.
    Wrong,
}

/// What came of something that a layer asked for.
#[cfg(feature = "alloc")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskResult {
    Done,
    /// The answer in the mailbox.
    Answered(Answer),
    /// It was refused without an answer, for this reason. A guest gets #GP.
    Faulted(Reason),
}

#[cfg(feature = "alloc")]
impl AskResult {
    /// What came of something that has no answer in the mailbox.
    pub(crate) fn of<T>(done: &Result<T, Reason>) -> Self {
        match done {
            Ok(_) => AskResult::Done,
            Err(reason) => AskResult::Faulted(*reason),
        }
    }
}

/// Receives every decision. It runs on the thread of the vCPU and must not block.
pub trait Auditor: fmt::Debug + Send {
    /// Receives one decision.
    fn record(&mut self, record: &Record);

    /// Receives what a layer asked for, after the decisions that it led to.
    #[cfg(feature = "alloc")]
    fn asked(&mut self, _ask: &AskRecord) {}
}

/// An auditor that keeps nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoAudit;

impl Auditor for NoAudit {
    fn record(&mut self, _record: &Record) {}
}

/// Keeps every record, in order.
#[cfg(feature = "alloc")]
impl Auditor for Vec<Record> {
    fn record(&mut self, record: &Record) {
        self.push(*record);
    }
}

/// A source of random bits, such as the host's operating system.
pub trait Entropy: fmt::Debug + Send {
    /// Draws 64 bits. `None` means that the source has failed.
    fn bits(&mut self) -> Option<u64>;
}

/// A source without random bits. Reads of `RANDOM` raise #GP with it.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEntropy;

impl Entropy for NoEntropy {
    fn bits(&mut self) -> Option<u64> {
        None
    }
}
