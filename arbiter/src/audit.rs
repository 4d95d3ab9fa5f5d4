//! What is told of every decision.

use crate::control::Control;
use crate::reason::Reason;
use crate::{CounterId, Layer};
use core::fmt;

/// A decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// The layer that it is about: who asked, or who loses.
    pub layer: Layer,
    /// The counter, if it is about one.
    pub counter: Option<CounterId>,
    /// What was decided.
    pub event: Event,
}

/// What was decided. Nothing here carries a cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The layer reserved the counter, or was granted it. If it was
    /// [`Event::Gathered`] before, the layer keeps it.
    Reserved {
        /// How long for, in milliseconds.
        lease_ms: Option<u32>,
    },
    /// The layer renewed its lease.
    Renewed,
    /// The counter went over to the layer.
    HandedOver {
        /// Who held it.
        from: Layer,
    },
    /// The layer, which knows its management cookie, gave it back.
    Released,
    /// The layer, which was asked for it, gave it away.
    Yielded {
        /// Who has it now.
        to: Layer,
    },
    /// A request of the layer that waits for others has come by it: the layer
    /// holds it until its answer.
    Gathered,
    /// That request was refused, and nobody holds it any more.
    Returned,
    /// The access cookie was set.
    AccessSet {
        /// Whether legacy accesses are shut out now.
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
    /// The holder was asked to yield.
    Asked {
        /// Who wants the counter.
        wanted_by: Layer,
    },
    /// The holder keeps the counter that it was asked for.
    Declined {
        /// Who wants the counter.
        wanted_by: Layer,
        /// It refused, or did not answer in time.
        reason: Reason,
    },
    /// The holder was told that it will lose the counter.
    Revoking {
        /// Who wants it.
        wanted_by: Layer,
        /// Why.
        reason: Reason,
        /// When, in milliseconds.
        in_ms: u32,
    },
    /// The revocation that was announced does not take place.
    Spared,
    /// The holder has lost the counter.
    Revoked(Reason),
    /// The vCPU is kept off its core for presenting wrong cookies.
    LockedOut {
        /// How long, in milliseconds.
        ms: u32,
    },
    /// No cookie of a program is compared, as programs presented wrong ones.
    Deaf {
        /// How long, in milliseconds.
        ms: u32,
    },
    /// The firmware's phase has ended.
    PhaseEnded,
}

impl Event {
    /// One word for machines.
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
        }
    }

    /// Why, where there is a reason.
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
            | Event::PhaseEnded => None,
        }
    }
}

/// Receives every decision, on the thread of the vCPU: it must not block.
pub trait Auditor: fmt::Debug + Send {
    /// A decision was taken.
    fn record(&mut self, record: &Record);
}

/// Keeps nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoAudit;

impl Auditor for NoAudit {
    fn record(&mut self, _record: &Record) {}
}

/// Random bits from the host's operating system.
pub trait Entropy: fmt::Debug + Send {
    /// 64 of them; `None` if the source has failed.
    fn bits(&mut self) -> Option<u64>;
}
