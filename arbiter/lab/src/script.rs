//! Arbitration by script: what each layer does at which time, and the trace that it
//! leaves under a scheme. `docs/guide/arbitration.md` has the format.

mod parse;
mod play;

pub use parse::{Problem, ScriptError};
pub use play::play;

use arbiter::{
    Answer, CounterId, Event, Layer, NamedEvent, Outcome, PerKind, Policy, Reason, Scheme, Wanted,
};

/// A script: what layers do, in the order of time. Its text is read by [`str::parse`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    steps: Vec<Step>,
    has_firmware: bool,
}

impl Script {
    /// The steps, in the order of time.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Whether firmware takes part. The machine starts in the firmware's phase then.
    pub fn has_firmware(&self) -> bool {
        self.has_firmware
    }
}

/// One line of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The number of the line, from 1.
    pub line: usize,
    /// The time in milliseconds from the start.
    pub at_ms: u32,
    /// The layer that acts. `None` means that only time passes.
    pub layer: Option<Layer>,
    /// What the layer does.
    pub action: Action,
}

/// What a layer does in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Asks for counters by the mailbox.
    Reserve {
        /// Which counters.
        wanted: Wanted,
        /// The length of the lease in milliseconds. `None` means as long as policy
        /// allows.
        lease_ms: Option<u32>,
        /// The event that they are for. `None` means any.
        event: Option<NamedEvent>,
    },
    /// Reserves by `MANAGEMENT_KEY`, without the mailbox.
    Claim(CounterId),
    /// Asks for a counter that the layer holds, which renews the lease.
    Renew(CounterId),
    /// Gives a counter back. `None` means all that the layer holds.
    Release(Option<CounterId>),
    /// Agrees to the revocation of a counter when another layer is short, or takes
    /// the agreement back.
    Lend(CounterId, bool),
    /// Answers the last question that the layer was asked, or the one about a
    /// counter.
    Reply {
        /// Whether the layer gives the counter back.
        yields: bool,
        /// The counter. `None` means the counter of the last question.
        counter: Option<CounterId>,
    },
    /// Withdraws the pending request of the layer.
    Withdraw,
    /// Ends the firmware's phase.
    EndPhase,
    /// Does nothing while time passes.
    Tick,
}

/// The machine on which a script is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// The counters of its PMU.
    pub counters: PerKind,
    /// How many counters each layer may hold.
    pub policy: Policy,
    /// How the layers arbitrate.
    pub scheme: Scheme,
}

/// What happened while a script was played.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Everything that happened, in order.
    pub rows: Vec<Row>,
    /// The result of each step, in the order of the script.
    pub ends: Vec<End>,
    /// The holder of each counter at the end.
    pub owners: Vec<(CounterId, Option<Layer>)>,
}

/// One event of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The time in milliseconds from the start.
    pub at_ms: u32,
    /// The layer that acts or is affected. `None` means that only time passes.
    pub layer: Option<Layer>,
    /// The counter, if the row is about one.
    pub counter: Option<CounterId>,
    /// What happened.
    pub what: What,
}

/// What a [`Row`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The layer performs this action.
    Does(Action),
    /// The arbiter made this decision; the audit trail records it.
    Decided(Event),
    /// The layer's request has a new answer.
    Answered(Answer),
    /// A register access of the layer raised #GP, for this reason.
    Faulted(Reason),
    /// The layer was to reply, and nobody had asked it.
    NotAsked,
}

/// The final result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The step was done, or there was nothing to do.
    Done,
    /// The step was a request, and this is its last answer.
    Answered {
        /// The answer.
        outcome: Outcome,
        /// When the answer came, in milliseconds.
        at_ms: u32,
    },
    /// The step raised #GP, for this reason.
    Faulted(Reason),
    /// The step was a reply, and nobody had asked.
    NotAsked,
}
