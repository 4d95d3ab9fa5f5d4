//! What is played, and what came of it.

use super::Action;
use crate::audit::Event;
use crate::message::{Answer, Outcome};
use crate::policy::{PerKind, Policy};
use crate::reason::Reason;
use crate::scheme::Scheme;
use crate::{CounterId, Layer};
use alloc::vec::Vec;

/// The machine on which a script is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Its counters.
    pub counters: PerKind,
    /// Who may hold how many.
    pub policy: Policy,
    /// How layers arbitrate.
    pub scheme: Scheme,
}

/// What came of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// All that happened, in order.
    pub rows: Vec<Row>,
    /// What came of each step.
    pub ends: Vec<End>,
    /// Who holds which counter at the end.
    pub owners: Vec<(CounterId, Option<Layer>)>,
}

/// One thing that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// When, in milliseconds.
    pub at_ms: u32,
    /// To whom, or by whom; `None` if only time passes.
    pub layer: Option<Layer>,
    /// The counter, if it is about one.
    pub counter: Option<CounterId>,
    /// What.
    pub what: What,
}

/// See [`Row`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A layer does this.
    Does(Action),
    /// A decision, as the audit has it.
    Decided(Event),
    /// The layer's request has another answer.
    Answered(Answer),
    /// A register access of the layer raised #GP.
    Faulted(Reason),
    /// The layer was to reply and had not been asked.
    NotAsked,
}

/// What came of a step in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It was done, or there was nothing to do.
    Done,
    /// It was a request, and this is its last answer.
    Answered {
        /// The answer.
        outcome: Outcome,
        /// When it came, in milliseconds.
        at_ms: u32,
    },
    /// It raised #GP, for this reason.
    Faulted(Reason),
    /// Nothing had been asked.
    NotAsked,
}
