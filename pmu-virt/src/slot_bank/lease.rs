//! What a claim holds while it is placed. Guest counters and counters of host
//! contexts settle, run, arm and leave by this and in no other way.

use std::num::NonZeroU64;

use pmu_model::{CountRequest, LossReason, Provenance, Reading, SlotIndex, UnavailableReason};

use super::SlotBank;

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

/// What the source is to be told of an overflow that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arming {
    AsBefore,
    Armed,
    Off,
}

impl SlotLease {
    /// A slot whose count is `settled`, stopped.
    pub(super) fn new(slot: SlotIndex, stamp: u64, request: &CountRequest, settled: u64) -> Self {
        SlotLease {
            slot,
            stamp,
            request: *request,
            settled,
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

    #[inline]
    pub(super) fn set_running(&mut self, running: bool) {
        self.running = running;
    }

    /// The slot's count that was taken in.
    #[inline]
    pub(super) fn settled(&self) -> u64 {
        self.settled
    }

    /// Its overflow has come: the next one has to be armed.
    #[inline]
    pub(crate) fn overflowed(&mut self) {
        self.armed = None;
    }

    /// A slot that tells no count keeps its place: it may count again.
    #[inline]
    pub(super) fn absorb(&mut self, reading: Reading) -> Settled {
        match reading {
            Reading::Counted { value, provenance } => {
                let events = value.wrapping_sub(self.settled);
                self.settled = value;
                Settled::Counted(events, provenance)
            }
            Reading::Unavailable(reason) => Settled::Uncounted(reason),
        }
    }

    /// Its overflow is asked for when `until` more events were counted than were settled.
    #[inline]
    pub(super) fn note_armed(&mut self, until: Option<NonZeroU64>) -> Arming {
        let armed = until.map(|until| self.settled.saturating_add(until.get()));
        if armed.is_some() && self.armed == armed {
            return Arming::AsBefore;
        }
        self.armed = armed;
        match armed {
            Some(_) => Arming::Armed,
            None => Arming::Off,
        }
    }

    /// Events since the last settlement by a count that was looked at.
    #[inline]
    pub(crate) fn since(&self, value: u64) -> u64 {
        value.wrapping_sub(self.settled)
    }
}

/// What its holder does with it on a core's bank.
impl SlotLease {
    /// Its vCPU is back on the core, and wants `now` counted. In a place that is
    /// still right, it counts on or stands still, as it did.
    pub(crate) fn come_back(&mut self, now: Option<CountRequest>, bank: &mut SlotBank) -> Return {
        bank.take_back(self, now)
    }

    /// Takes in what the slot has counted since the last time; nothing if it does
    /// not run, or is somebody else's by now.
    #[inline]
    pub(crate) fn settle(&mut self, bank: &mut SlotBank) -> Option<Settled> {
        bank.settle(self)
    }

    /// Has it count while the vCPU runs; in a switch, from its end on.
    #[inline]
    pub(crate) fn start(&mut self, bank: &mut SlotBank) {
        bank.start(self);
    }

    /// Has it stand still. Away from its core (`bank` is none), it is stopped when
    /// it comes back.
    #[inline]
    pub(crate) fn stop(&mut self, bank: Option<&mut SlotBank>) {
        self.running = false;
        if let Some(bank) = bank {
            bank.stop(self);
        }
    }

    /// Asks for its overflow when `until` more events were counted than were
    /// settled; `None`: nobody waits for one.
    #[inline]
    pub(crate) fn arm(&mut self, until: Option<NonZeroU64>, bank: &mut SlotBank) {
        bank.arm(self, until);
    }

    /// Gives the slot back, and yields the last count and why it is no longer
    /// exact.
    #[inline]
    pub(crate) fn end(self, bank: &mut SlotBank) -> (Option<Settled>, Option<LossReason>) {
        bank.end(self)
    }
}
