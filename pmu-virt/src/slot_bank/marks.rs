//! What the counter on each slot does now, and what of it has yet to be told.

use pmu_model::{SlotIndex, SlotSet};

/// What is known of the counters on a core's slots beside who has them.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// They count while the attached vCPU runs.
    running: SlotSet,
    /// They are started when the switch under way ends; none outside of one.
    batch: Option<SlotSet>,
    /// They have run since they were read.
    stale: SlotSet,
    /// They have an overflow to be told.
    armed: SlotSet,
    /// Their overflow was told by the backend, and their owner has not heard of it.
    flagged: SlotSet,
    /// Those of host contexts that are present.
    flagged_hosts: SlotSet,
}

/// Who hears of an overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hearer {
    Guest,
    Host,
    /// Its vCPU hears of it when it is back.
    NobodyYet,
}

impl Marks {
    #[inline]
    pub(super) fn is_any_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// Whether it counts while the attached vCPU runs, now or from the end of the switch on.
    pub(super) fn runs(&self, slot: SlotIndex) -> bool {
        self.running.contains(slot) || self.batch.is_some_and(|batch| batch.contains(slot))
    }

    /// Whether it counts now.
    pub(super) fn runs_now(&self, slot: SlotIndex) -> bool {
        self.running.contains(slot)
    }

    /// A slot is to run. True if the backend is to start it at once.
    #[inline]
    pub(super) fn start(&mut self, slot: SlotIndex) -> bool {
        if self.running.contains(slot) {
            return false;
        }
        if let Some(batch) = &mut self.batch {
            batch.insert(slot);
            return false;
        }
        self.running.insert(slot)
    }

    /// A slot is to stand. True if the backend is to stop it.
    #[inline]
    pub(super) fn stop(&mut self, slot: SlotIndex) -> bool {
        if let Some(batch) = &mut self.batch {
            batch.remove(slot);
        }
        self.running.remove(slot)
    }

    /// All stand; those that ran.
    pub(super) fn stop_all(&mut self) -> SlotSet {
        std::mem::take(&mut self.running)
    }

    /// What is started from now on runs when the switch ends.
    pub(super) fn begin_batch(&mut self) {
        self.batch = Some(SlotSet::EMPTY);
    }

    /// The switch ends; those that the backend is to start.
    pub(super) fn end_batch(&mut self) -> SlotSet {
        let batch = self.batch.take().unwrap_or(SlotSet::EMPTY);
        let stopped = batch.difference(self.running);
        self.running = self.running.union(stopped);
        stopped
    }

    /// What runs has counted.
    #[inline]
    pub(super) fn have_run(&mut self) {
        self.stale = self.stale.union(self.running);
    }

    /// A slot is read. True if it had run since the last time.
    #[inline]
    pub(super) fn read(&mut self, slot: SlotIndex) -> bool {
        self.stale.remove(slot)
    }

    /// An overflow is wanted of a slot, another one than before.
    #[inline]
    pub(super) fn arm(&mut self, slot: SlotIndex) {
        self.unflag(slot);
        self.armed.insert(slot);
    }

    /// None is wanted. True if the backend has to be told.
    #[inline]
    pub(super) fn disarm(&mut self, slot: SlotIndex) -> bool {
        self.unflag(slot);
        self.armed.remove(slot)
    }

    #[inline]
    fn unflag(&mut self, slot: SlotIndex) {
        self.flagged.remove(slot);
        self.flagged_hosts.remove(slot);
    }

    /// The backend has told these overflows.
    pub(super) fn flag(&mut self, told: SlotSet) {
        self.flagged = self.flagged.union(told);
    }

    #[inline]
    pub(super) fn is_any_flagged(&self) -> bool {
        !self.flagged.is_empty()
    }

    /// Guests hear of their overflows: these. Those of host contexts wait until they are
    /// taken.
    pub(super) fn tell_guests(&mut self, hearer: impl Fn(SlotIndex) -> Hearer) -> SlotSet {
        let (mut guests, mut hosts) = (SlotSet::EMPTY, SlotSet::EMPTY);
        for slot in self.flagged.iter() {
            match hearer(slot) {
                Hearer::Guest => guests.insert(slot),
                Hearer::Host => hosts.insert(slot),
                Hearer::NobodyYet => false,
            };
        }
        self.flagged = self.flagged.difference(guests).difference(hosts);
        self.flagged_hosts = self.flagged_hosts.union(hosts);
        guests
    }

    /// Host contexts hear of theirs.
    #[cfg(feature = "contexts")]
    pub(super) fn tell_hosts(&mut self) -> SlotSet {
        std::mem::take(&mut self.flagged_hosts)
    }

    /// Forgets what was known of a slot's counter.
    pub(super) fn forget(&mut self, slot: SlotIndex) {
        let marks = [
            &mut self.running,
            &mut self.flagged,
            &mut self.flagged_hosts,
            &mut self.stale,
            &mut self.armed,
        ];
        for mark in marks.into_iter().chain(&mut self.batch) {
            mark.remove(slot);
        }
    }
}
