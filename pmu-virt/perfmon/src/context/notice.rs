//! What a context tells its tool (§3.3).

use perfmon_abi::consts::{
    PFM_FL_OVFL_NO_MSG, PFM_MSG_END, PFM_MSG_OVFL, PFM_MSG_PREEMPTED, PFM_MSG_RESTORED,
    PFM_MSG_THROTTLED,
};
use perfmon_abi::{Message, PMD_WORDS};
use pmu_model::Nanos;

use super::Context;
use crate::bits::PmdBits;
use crate::moment::MessageQueue;
use crate::throttle::Throttle;

/// Messages that wait for the tool at most, where no format says how many.
const DEPTH: usize = 8;

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

impl Context {
    /// What has happened to it besides counting.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// From now on, how often it may interrupt. A new context may as often as it
    /// likes: only its host knows the frequency of the TSC.
    pub fn set_throttle(&mut self, throttle: Throttle) {
        self.throttle = throttle;
    }

    /// Its vCPU or its VM has ended, and it is detached. No flag suppresses this
    /// message, nor does a full queue.
    pub fn ended(&mut self, queue: &mut dyn MessageQueue) {
        queue.post(Some(&self.message(PFM_MSG_END, [0; PMD_WORDS])));
    }

    /// Others have taken its counters.
    pub fn preempted(&mut self, queue: &mut dyn MessageQueue) {
        self.account.preempted = self.account.preempted.saturating_add(1);
        let message = self.message(PFM_MSG_PREEMPTED, [0; PMD_WORDS]);
        self.post(&message, queue);
    }

    /// It has its counters again, after a `blind` time without. The message
    /// tells all blind nanoseconds that none has told before, and how often it
    /// was preempted since it was made.
    pub fn restored(&mut self, blind: Nanos, queue: &mut dyn MessageQueue) {
        self.account.blind += blind;
        let blind_spot = [self.account.blind.0, self.account.preempted];
        let message = self.message(PFM_MSG_RESTORED, blind_spot);
        if self.post(&message, queue) {
            self.account.blind = Nanos(0);
        }
    }

    pub(super) fn throttled(&mut self, queue: &mut dyn MessageQueue) {
        self.account.throttled = self.account.throttled.saturating_add(1);
        let message = self.message(PFM_MSG_THROTTLED, [0; PMD_WORDS]);
        self.post(&message, queue);
    }

    /// Notifies of overflows in `set`; with PFM_FL_OVFL_NO_MSG, without a
    /// message.
    pub(super) fn notify(&mut self, set: u16, pmds: PmdBits, queue: &mut dyn MessageQueue) {
        if self.flags & PFM_FL_OVFL_NO_MSG != 0 {
            queue.post(None);
            return;
        }
        let message = Message {
            active_set: set,
            ..self.message(PFM_MSG_OVFL, pmds.words())
        };
        self.post(&message, queue);
    }

    /// A message of an overflow would not find room.
    pub(super) fn cannot_notify(&self, queue: &dyn MessageQueue) -> bool {
        self.flags & PFM_FL_OVFL_NO_MSG == 0 && self.is_full(queue)
    }

    fn is_full(&self, queue: &dyn MessageQueue) -> bool {
        let depth = self.sampler.as_ref();
        let depth = depth.map_or(DEPTH, |sampler| sampler.format().queue_depth().max(1));
        queue.waiting() >= depth
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

    fn message(&self, kind: u32, words: [u64; PMD_WORDS]) -> Message {
        Message {
            kind,
            active_set: self.active,
            generation: self.generation,
            ovfl_pmds: words,
        }
    }
}
