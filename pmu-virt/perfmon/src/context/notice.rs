//! What a context tells its tool (§3.3), and what it notes of itself.

use perfmon_abi::consts::{
    PFM_MSG_END, PFM_MSG_OVFL, PFM_MSG_PREEMPTED, PFM_MSG_RESTORED, PFM_MSG_THROTTLED,
};
use perfmon_abi::{Message, PMD_WORDS};
use pmu_model::Nanos;

use crate::bits::PmdBits;
use crate::moment::MessageQueue;

/// Messages that wait for the tool at most, where no format says how many.
pub(super) const DEPTH: usize = 8;

const NO_PMDS: [u64; PMD_WORDS] = [0; PMD_WORDS];

/// What has happened to a context besides counting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Interrupts with an overflow.
    pub overflows: u64,
    /// Overflows that were found while monitoring was masked, or the context was
    /// attached to nothing.
    pub spurious: u64,
    /// Messages that found the queue full.
    pub dropped: u64,
    /// Times that overflows came too often.
    pub throttled: u64,
    /// Times that others took its counters.
    pub preempted: u64,
    /// Time without counters that no message has told of.
    pub blind: Nanos,
}

/// Of what a message tells: the set that was active, in which load of the context.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    pub(super) active_set: u16,
    pub(super) generation: u16,
}

impl Origin {
    fn message(self, kind: u32, words: [u64; PMD_WORDS]) -> Message {
        Message {
            kind,
            active_set: self.active_set,
            generation: self.generation,
            ovfl_pmds: words,
        }
    }
}

/// Messages to the tool, and the account of what they tell.
#[derive(Debug)]
pub(super) struct Notices {
    /// Messages that wait at most.
    depth: usize,
    /// Overflows are told without a message (PFM_FL_OVFL_NO_MSG).
    silent: bool,
    account: Account,
}

impl Notices {
    pub(super) fn new(depth: usize, silent: bool) -> Self {
        Notices {
            depth,
            silent,
            account: Account::default(),
        }
    }

    pub(super) fn account(&self) -> &Account {
        &self.account
    }

    pub(super) fn note_spurious(&mut self) {
        self.account.spurious = self.account.spurious.saturating_add(1);
    }

    pub(super) fn note_overflow(&mut self) {
        self.account.overflows = self.account.overflows.saturating_add(1);
    }

    /// A message of an overflow would not find room.
    pub(super) fn cannot_notify(&self, queue: &dyn MessageQueue) -> bool {
        !self.silent && self.is_full(queue)
    }

    pub(super) fn notify(&mut self, from: Origin, pmds: PmdBits, queue: &mut dyn MessageQueue) {
        if self.silent {
            queue.post(None);
        } else {
            self.post(&from.message(PFM_MSG_OVFL, pmds.words()), queue);
        }
    }

    pub(super) fn throttled(&mut self, from: Origin, queue: &mut dyn MessageQueue) {
        self.account.throttled = self.account.throttled.saturating_add(1);
        self.post(&from.message(PFM_MSG_THROTTLED, NO_PMDS), queue);
    }

    pub(super) fn preempted(&mut self, from: Origin, queue: &mut dyn MessageQueue) {
        self.account.preempted = self.account.preempted.saturating_add(1);
        self.post(&from.message(PFM_MSG_PREEMPTED, NO_PMDS), queue);
    }

    /// Tells all blind nanoseconds that no message has told before, and how often the
    /// context was preempted since it was made.
    pub(super) fn restored(&mut self, from: Origin, blind: Nanos, queue: &mut dyn MessageQueue) {
        self.account.blind += blind;
        let blind_spot = [self.account.blind.0, self.account.preempted];
        if self.post(&from.message(PFM_MSG_RESTORED, blind_spot), queue) {
            self.account.blind = Nanos(0);
        }
    }

    /// No flag suppresses this message, nor does a full queue.
    pub(super) fn ended(&self, from: Origin, queue: &mut dyn MessageQueue) {
        queue.post(Some(&from.message(PFM_MSG_END, NO_PMDS)));
    }

    fn is_full(&self, queue: &dyn MessageQueue) -> bool {
        queue.waiting() >= self.depth
    }

    /// Posts a message if there is room, and says so.
    fn post(&mut self, message: &Message, queue: &mut dyn MessageQueue) -> bool {
        let full = self.is_full(queue);
        if full {
            self.account.dropped = self.account.dropped.saturating_add(1);
        } else {
            queue.post(Some(message));
        }
        !full
    }
}
