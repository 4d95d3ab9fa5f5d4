//! Arbitration by script: who does what when, and what comes of it under a
//! scheme. `docs/arbitration.md` has the format.

mod parse;
mod play;

pub use parse::{Problem, ScriptError};
pub use play::play;

use crate::audit::Event;
use crate::message::{Answer, Outcome, Wanted};
use crate::policy::{PerKind, Policy, Scheme};
use crate::reason::Reason;
use crate::{CounterId, Layer};
use alloc::vec::Vec;

/// What layers do, in the order of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    steps: Vec<Step>,
    has_firmware: bool,
}

impl Script {
    /// The steps.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Whether firmware takes part; then the machine starts in its phase.
    pub fn has_firmware(&self) -> bool {
        self.has_firmware
    }
}

/// One line of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The line, from 1.
    pub line: usize,
    /// When, in milliseconds from the start.
    pub at_ms: u32,
    /// Who; `None` if only time passes.
    pub layer: Option<Layer>,
    /// What.
    pub action: Action,
}

/// What a layer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Asks by the mailbox for counters.
    Reserve {
        /// Which ones.
        wanted: Wanted,
        /// How long for, in milliseconds; `None`: as long as policy allows.
        lease_ms: Option<u32>,
    },
    /// Reserves by `MANAGEMENT_KEY`, without the mailbox.
    Claim(CounterId),
    /// Asks for a counter that it holds, which renews the lease.
    Renew(CounterId),
    /// Gives a counter back; `None`: all that it holds.
    Release(Option<CounterId>),
    /// Agrees, or no longer agrees, that a counter is revoked when somebody is
    /// short.
    Lend(CounterId, bool),
    /// Answers the question that it was asked last, or that about a counter.
    Reply {
        /// Whether it gives the counter up.
        yields: bool,
        /// Which counter.
        counter: Option<CounterId>,
    },
    /// Withdraws its pending request.
    Withdraw,
    /// The firmware ends its phase.
    EndPhase,
    /// Nothing: time passes.
    Tick,
}

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
