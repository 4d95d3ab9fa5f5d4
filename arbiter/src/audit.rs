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
    /// The layer reserved the counter, or was granted it.
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
    /// The layer gave it back.
    Released,
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
    /// The holder was told that it will lose the counter.
    Revoking {
        /// Who wants it.
        wanted_by: Layer,
        /// Why.
        reason: Reason,
        /// When, in milliseconds.
        in_ms: u32,
    },
    /// The holder has lost the counter.
    Revoked(Reason),
    /// The vCPU is kept off its core for presenting wrong cookies.
    Barred {
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
            Event::AccessSet { .. } => "access-set",
            Event::ControlSet(_) => "control-set",
            Event::DropValueSet(_) => "drop-value-set",
            Event::Refused(_) => "refused",
            Event::DroppedRead(_) => "dropped-read",
            Event::DroppedWrite(_) => "dropped-write",
            Event::Faulted(_) => "faulted",
            Event::Asked { .. } => "asked",
            Event::Revoking { .. } => "revoking",
            Event::Revoked(_) => "revoked",
            Event::Barred { .. } => "barred",
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
            | Event::Revoking { reason, .. }
            | Event::Revoked(reason) => Some(*reason),
            Event::Reserved { .. }
            | Event::Renewed
            | Event::HandedOver { .. }
            | Event::Released
            | Event::AccessSet { .. }
            | Event::ControlSet(_)
            | Event::DropValueSet(_)
            | Event::Asked { .. }
            | Event::Barred { .. }
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
