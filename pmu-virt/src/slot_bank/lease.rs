//! What a claim holds while it is placed: guest counters, and counters of host contexts.
//! It knows how far the slot's count was taken in; the bank knows the slot. Their holder
//! lets the two meet.

use std::num::NonZeroU64;

use pmu_model::{CountRequest, Provenance, Reading, SlotIndex, UnavailableReason};

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
#[must_use]
pub(crate) enum Arming {
    /// Nothing: it is armed so.
    AsBefore,
    /// It is to come when so many more events were counted than were settled.
    After(NonZeroU64),
    /// The same, and a little later is as good.
    #[cfg(feature = "contexts")]
    About(NonZeroU64),
    /// Nobody waits for one.
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

    /// It counts from now on, if its slot does.
    #[inline]
    pub(crate) fn run(&mut self) {
        self.running = true;
    }

    /// It counts no longer. Away from its core, its slot is stopped when its vCPU is back.
    #[inline]
    pub(crate) fn stand(&mut self) {
        self.running = false;
    }

    /// Its overflow has come: the next one has to be armed.
    #[inline]
    pub(crate) fn overflowed(&mut self) {
        self.armed = None;
    }

    /// Takes in what its slot tells. One that tells no count keeps its place: it may count
    /// again.
    #[inline]
    pub(crate) fn absorb(&mut self, reading: Reading) -> Settled {
        match reading {
            Reading::Counted { value, provenance } => {
                let events = value.wrapping_sub(self.settled);
                self.settled = value;
                Settled::Counted(events, provenance)
            }
            Reading::Unavailable(reason) => Settled::Uncounted(reason),
        }
    }

    /// Its overflow is wanted when `until` more events were counted than were settled;
    /// `None`: nobody waits for one.
    #[inline]
    pub(crate) fn await_overflow(&mut self, until: Option<NonZeroU64>) -> Arming {
        let armed = until.map(|until| self.settled.saturating_add(until.get()));
        if armed.is_some() && self.armed == armed {
            return Arming::AsBefore;
        }
        self.armed = armed;
        until.map_or(Arming::Off, Arming::After)
    }

    /// The same for somebody to whom a little later is as good.
    #[cfg(feature = "contexts")]
    #[inline]
    pub(crate) fn await_about(&mut self, until: Option<NonZeroU64>) -> Arming {
        match self.await_overflow(until) {
            Arming::After(until) => Arming::About(until),
            arming => arming,
        }
    }

    /// Events since the last settlement by a count that was looked at.
    #[inline]
    pub(crate) fn since(&self, value: u64) -> u64 {
        value.wrapping_sub(self.settled)
    }
}
