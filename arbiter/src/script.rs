//! Arbitration by script: who does what when, and what comes of it under a
//! scheme. `docs/arbitration.md` has the format.

mod parse;
mod play;
mod trace;

pub use parse::{Problem, ScriptError};
pub use play::play;
pub use trace::{End, Row, Setup, Trace, What};

use crate::message::Wanted;
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
