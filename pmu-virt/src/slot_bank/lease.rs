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
    slot: SlotIndex,
    /// No other lease of the core has it.
    stamp: u64,
    request: CountRequest,
    /// The slot's count at the last settlement.
    settled: u64,
    /// The slot's count at which its overflow is armed.
    armed: Option<u64>,
    /// It counts while the vCPU runs. If not, it is kept until somebody needs it.
    running: bool,
}

/// What a slot has counted since the last settlement.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Settled {
    /// So many events, counted so.
    Counted(u64, Provenance),
    /// Nobody counted.
    Uncounted(UnavailableReason),
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
    /// One that is stopped, at `begin`.
    pub(super) fn new(slot: SlotIndex, stamp: u64, request: CountRequest, begin: u64) -> Self {
        SlotLease {
            slot,
            stamp,
            request,
            settled: begin,
            armed: None,
            running: false,
        }
    }

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

    /// Takes in what the slot has counted since the last time; nothing if it does
    /// not run, or is somebody else's by now.
    #[inline]
    pub(crate) fn settle(&mut self, bank: &mut SlotBank) -> Option<Settled> {
        if !self.running {
            return None;
        }
        let reading = bank.read(self)?;
        Some(self.absorb(reading))
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

    /// Has it count while the vCPU runs.
    #[inline]
    pub(crate) fn start(&mut self, bank: &mut SlotBank) {
        self.running = true;
        if !bank.is_running(self.slot) {
            bank.start(self.slot);
        }
    }

    /// Has it stand still. Away from its core (`bank` is none), it is stopped when
    /// it comes back.
    #[inline]
    pub(crate) fn stop(&mut self, bank: Option<&mut SlotBank>) {
        self.running = false;
        if let Some(bank) = bank
            && bank.holds(self)
        {
            bank.stop(self.slot);
        }
    }

    /// Asks for its overflow when `until` more events were counted than were
    /// settled; `None`: nobody waits for one.
    #[inline]
    pub(crate) fn arm(&mut self, until: Option<NonZeroU64>, bank: &mut SlotBank) {
        let armed = until.map(|until| self.settled.saturating_add(until.get()));
        if armed.is_none() || self.armed != armed {
            self.armed = armed;
            bank.arm(self.slot, until);
        }
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
