//! What the tool is told (§3.3).

use std::collections::BTreeSet;

use perfmon_abi::{Message, consts as pfm};

use super::{Format, Model, words};

/// Messages that a queue holds.
const DEPTH: usize = 8;

impl Model {
    pub(super) fn depth(&self) -> usize {
        match self.format {
            Some(Format::Puppet(..)) => 1,
            _ => DEPTH,
        }
    }

    /// One message for all counters that overflowed at once.
    pub(super) fn notify(&mut self, set: u16, counters: &BTreeSet<u16>) {
        if self.quiet {
            self.queue.push(None);
        } else {
            let active = std::mem::replace(&mut self.active, set);
            self.tell(pfm::PFM_MSG_OVFL, words(counters));
            self.active = active;
        }
    }

    /// A message, if there is room.
    pub(super) fn tell(&mut self, kind: u32, words: [u64; 2]) -> bool {
        let room = self.queue.len() < self.depth();
        if room {
            self.push(kind, words);
        } else {
            self.account.dropped += 1;
        }
        room
    }

    fn push(&mut self, kind: u32, words: [u64; 2]) {
        self.queue.push(Some(Message {
            kind,
            active_set: self.active,
            generation: self.generation,
            ovfl_pmds: words,
        }));
    }

    pub(crate) fn ended(&mut self) {
        self.push(pfm::PFM_MSG_END, [0; 2]);
    }

    pub(crate) fn preempted(&mut self) {
        self.account.preempted += 1;
        self.tell(pfm::PFM_MSG_PREEMPTED, [0; 2]);
    }

    pub(crate) fn restored(&mut self, blind: u64) {
        self.account.blind.0 += blind;
        let words = [self.account.blind.0, self.account.preempted];
        if self.tell(pfm::PFM_MSG_RESTORED, words) {
            self.account.blind.0 = 0;
        }
    }
}
