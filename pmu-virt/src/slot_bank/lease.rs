//! What a claim holds while it is placed. Guest counters and counters of host
//! contexts settle, run, arm and leave by this and in no other way.

use std::num::NonZeroU64;

use pmu_model::{CountRequest, LossReason, Provenance, Reading, SlotIndex, UnavailableReason};

use super::{Claimant, SlotBank};

/// A slot, or a pair, for one claim, and how far its count was taken in.
///
/// Others may end a lease while its vCPU is away, or while it is stopped. The
/// bank keeps its last count then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLease {
    pub(super) slot: SlotIndex,
    /// No other lease of the core has it.
    pub(super) stamp: u64,
    pub(super) request: CountRequest,
    /// The slot's count at the last settlement.
    pub(super) settled: u64,
    /// The slot's count at which its overflow is armed.
    pub(super) armed: Option<u64>,
    /// It counts while the vCPU runs. If not, it is kept until somebody needs it.
    pub(super) running: bool,
}

/// What a slot has counted since the last settlement.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Settled {
    /// So many events, counted so.
    Counted(u64, Provenance),
    /// Nobody counted.
    Uncounted(UnavailableReason),
}

/// What a vCPU that comes back finds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Return {
    /// Its counter where it was.
    InPlace,
    /// Its counter, which counts what is not wanted any more.
    Superseded,
    /// Somebody else in the slot, or nobody.
    Lost,
}

/// The last count of a lease that is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FinalReading {
    pub(super) claimant: Claimant,
    /// None if it has not run since it was read.
    pub(super) reading: Option<Reading>,
    /// Why it is no longer exact.
    pub(super) loss: Option<LossReason>,
}

impl SlotLease {
    #[inline]
    pub(crate) fn slot(&self) -> SlotIndex {
        self.slot
    }

    #[inline]
    pub(super) fn stamp(&self) -> u64 {
        self.stamp
    }

    /// What it counts.
    #[inline]
    pub(crate) fn request(&self) -> &CountRequest {
        &self.request
    }

    /// Whether it counts while the vCPU runs.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        self.running
    }

    /// Its vCPU is back on the core, and wants `now` counted. In a place that is
    /// still right, it counts on or stands still, as it did.
    pub(crate) fn come_back(&mut self, now: Option<CountRequest>, bank: &mut SlotBank) -> Return {
        let resident = bank.residents.get_mut(usize::from(self.slot.0));
        let resident = resident.and_then(Option::as_mut);
        let Some(resident) = resident.filter(|resident| resident.stamp == self.stamp) else {
            return Return::Lost;
        };
        // Its control may have been written while it was away.
        if !now.is_some_and(|now| now.counts_like(&self.request)) {
            return Return::Superseded;
        }
        resident.used = bank.stats.switches;
        bank.stats.in_place += 1;
        if self.running {
            self.start(bank);
        } else {
            self.stop(Some(bank));
        }
        Return::InPlace
    }

    /// Takes in what the slot has counted since the last time; nothing if it does
    /// not run, or is somebody else's by now.
    #[inline]
    pub(crate) fn settle(&mut self, bank: &mut SlotBank) -> Option<Settled> {
        if !self.running {
            return None;
        }
        let resident = bank.residents.get_mut(usize::from(self.slot.0))?.as_mut();
        let resident = resident.filter(|resident| resident.stamp == self.stamp)?;
        bank.operations += 1;
        bank.stale.remove(self.slot);
        let settled = self.absorb(bank.backend.read(self.slot));
        resident.seen = matches!(settled, Settled::Counted(..)).then_some(self.settled);
        Some(settled)
    }

    /// Its overflow has come: the next one has to be armed.
    #[inline]
    pub(crate) fn overflowed(&mut self) {
        self.armed = None;
    }

    /// A slot that tells no count keeps its place: it may count again.
    #[inline]
    fn absorb(&mut self, reading: Reading) -> Settled {
        match reading {
            Reading::Counted { value, provenance } => {
                let events = value.wrapping_sub(self.settled);
                self.settled = value;
                Settled::Counted(events, provenance)
            }
            Reading::Unavailable(reason) => Settled::Uncounted(reason),
        }
    }

    /// Has it count while the vCPU runs; in a switch, from its end on.
    #[inline]
    pub(crate) fn start(&mut self, bank: &mut SlotBank) {
        self.running = true;
        if bank.running.contains(self.slot) {
            return;
        }
        if let Some(batch) = &mut bank.batch {
            batch.insert(self.slot);
            return;
        }
        bank.running.insert(self.slot);
        bank.operations += 1;
        bank.backend.start(self.slot);
    }

    /// Has it stand still. Away from its core (`bank` is none), it is stopped when
    /// it comes back.
    #[inline]
    pub(crate) fn stop(&mut self, bank: Option<&mut SlotBank>) {
        self.running = false;
        let Some(bank) = bank.filter(|bank| bank.holds(self)) else {
            return;
        };
        if let Some(batch) = &mut bank.batch {
            batch.remove(self.slot);
        }
        if bank.running.contains(self.slot) {
            bank.running.remove(self.slot);
            bank.operations += 1;
            bank.backend.stop(self.slot);
        }
    }

    /// Asks for its overflow when `until` more events were counted than were
    /// settled; `None`: nobody waits for one.
    #[inline]
    pub(crate) fn arm(&mut self, until: Option<NonZeroU64>, bank: &mut SlotBank) {
        if self.note_armed(until, bank) {
            bank.backend.arm(self.slot, until);
        }
    }

    /// The same of an overflow that may wait for others.
    #[inline]
    pub(crate) fn arm_about(&mut self, until: Option<NonZeroU64>, bank: &mut SlotBank) {
        if self.note_armed(until, bank) {
            bank.backend.arm_about(self.slot, until);
        }
    }

    /// Whether the backend is to be told.
    #[inline]
    fn note_armed(&mut self, until: Option<NonZeroU64>, bank: &mut SlotBank) -> bool {
        let armed = until.map(|until| self.settled.saturating_add(until.get()));
        if armed.is_some() && self.armed == armed {
            return false;
        }
        self.armed = armed;
        bank.flagged.remove(self.slot);
        bank.flagged_hosts.remove(self.slot);
        match armed {
            Some(_) => bank.armed.insert(self.slot),
            None if bank.armed.contains(self.slot) => bank.armed.remove(self.slot),
            // What is not armed need not be disarmed.
            None => return false,
        }
        bank.operations += 1;
        true
    }

    /// Events since the last settlement by a count that was looked at.
    #[inline]
    pub(crate) fn since(&self, value: u64) -> u64 {
        value.wrapping_sub(self.settled)
    }

    /// Gives the slot back, and yields the last count and why it is no longer
    /// exact.
    #[inline]
    pub(crate) fn end(mut self, bank: &mut SlotBank) -> (Option<Settled>, Option<LossReason>) {
        let last = bank.final_reading(&self);
        bank.release(&self);
        match last {
            Some(last) => (last.reading.map(|reading| self.absorb(reading)), last.loss),
            None => (None, None),
        }
    }
}
