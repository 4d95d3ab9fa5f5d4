//! `clock`: the TSC while the guest really runs.

use std::num::NonZeroU64;

use pmu_model::{
    CountRequest, KnownEvent, Progress, Provenance, Reading, Ring, SlotIndex, SlotSet, Ticks, Tsc,
    Unavailable, UnavailableReason,
};

use super::patience::together;
use super::slots::{ANY_SLOT, CAPACITY, Slot, Slots};
use super::{CountPlan, CounterBackend};

const NAME: &str = "clock";

/// Ticks between two samples of the ring where nothing else is asked for:
/// 1 ms of a TSC of 2.5 GHz.
const DEFAULT_SAMPLE_TICKS: NonZeroU64 = NonZeroU64::new(2_500_000).expect("not zero");

/// After so many exits in a row, each in less than an eighth of the distance of samples,
/// the ring is known anyway, and
const LIVELY: u32 = 64;
/// so many times as far away a sample is asked for: to be told that it is not needed
/// costs the host, too.
const RARELY: u64 = 4;

/// A sample waits for an overflow for this part of its distance.
const SAMPLE_WAITS: u64 = 4;

/// Counts TSC ticks between entry and exit, less those in which the vCPU
/// was halted or preempted.
///
/// Reference cycles of both rings are exact: the TSC is the reference clock.
/// Core cycles are derived: one per tick. A counter of one ring takes each
/// interval whole if the guest was found in its ring at the end, and is
/// labelled scaled; while such a counter runs, [`CounterBackend::deadline`]
/// asks for a sample of the ring at short distances, which bounds the error
/// of each change of ring by that distance; by a quarter more where a sample waits for an
/// overflow, and by four times that where a guest goes on without exits that has left
/// all the time.
///
/// Overflows that may wait share an exit ([`CounterBackend::arm_about`]): each is told
/// late by a 32nd of its slot's time at most.
#[derive(Debug)]
pub struct ClockBackend {
    slots: Slots,
    sample_ticks: NonZeroU64,
    entered: Option<Tsc>,
    /// Short intervals in a row.
    short: u32,
}

impl ClockBackend {
    /// A backend that samples the ring every 1 ms of a TSC of 2.5 GHz.
    pub fn new() -> Self {
        ClockBackend::with_sample_ticks(DEFAULT_SAMPLE_TICKS)
    }

    /// A backend that samples the ring every `ticks` TSC ticks while a
    /// counter of one ring runs.
    pub fn with_sample_ticks(ticks: NonZeroU64) -> Self {
        ClockBackend {
            slots: Slots::new(NAME),
            sample_ticks: ticks,
            entered: None,
            short: 0,
        }
    }
}

impl Slot {
    /// What it takes of an interval that ended in `ring`. Ticks without a ring wait
    /// for the next interval that has one, so that none gets lost.
    fn ticks_in(&mut self, ring: Option<Ring>, ticks: u64) -> u64 {
        self.unattributed = self.unattributed.saturating_add(ticks);
        let Some(ring) = ring else { return 0 };
        let pending = std::mem::take(&mut self.unattributed);
        if self.request.counts_in(ring) {
            pending
        } else {
            0
        }
    }
}

impl Default for ClockBackend {
    fn default() -> Self {
        ClockBackend::new()
    }
}

impl CounterBackend for ClockBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        let provenance = match request.event.known() {
            Some(KnownEvent::RefCycles) => Provenance::Exact,
            Some(KnownEvent::CoreCycles) => Provenance::Derived,
            _ if request.is_every_cycle() => Provenance::Derived,
            _ => {
                return Err(Unavailable {
                    reason: UnavailableReason::Event {
                        backend: NAME,
                        event: request.event,
                    },
                });
            }
        };
        if request.has_modifier() && !request.is_every_cycle() {
            return Err(Unavailable {
                reason: UnavailableReason::Modifier { backend: NAME },
            });
        }
        Ok(CountPlan {
            provenance: if request.is_ring_filtered() {
                Provenance::Scaled
            } else {
                provenance
            },
            constraint: ANY_SLOT,
        })
    }

    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        self.slots.program(slot, request, self.plan(request))
    }

    fn release(&mut self, slot: SlotIndex) {
        self.slots.release(slot);
    }

    fn start(&mut self, slot: SlotIndex) {
        self.slots.start(slot);
    }

    fn stop(&mut self, slot: SlotIndex) {
        self.slots.stop(slot);
    }

    fn resume(&mut self, slots: SlotSet) {
        self.slots.resume(slots);
    }

    fn pause(&mut self, slots: SlotSet) {
        self.slots.pause(slots);
    }

    fn read(&self, slot: SlotIndex) -> Reading {
        self.slots.read(slot)
    }

    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        self.slots.arm(slot, after);
    }

    fn arm_about(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        self.slots.arm_about(slot, after);
    }

    fn observe(&mut self, progress: &Progress) {
        match *progress {
            Progress::Entered { tsc } => {
                self.entered = Some(tsc);
                self.slots.enter();
            }
            Progress::Left { tsc, halted, ring } => {
                let entered = self.entered.take().unwrap_or(tsc);
                let due = self.slots.is_patient().then(|| self.due()).flatten();
                let is_short = ring.is_some() && (tsc - entered).0 < self.sample_ticks.get() / 8;
                self.short = if is_short {
                    self.short.saturating_add(1)
                } else {
                    0
                };
                let ran = self.slots.take_interval();
                if !ran.is_empty() {
                    let Ticks(ticks) = tsc - entered - halted;
                    if let Some(due) = due {
                        self.spend_patience(ran, ticks, due);
                    }
                    self.slots.advance(ran, |slot| {
                        if slot.request.is_ring_filtered() {
                            slot.ticks_in(ring, ticks)
                        } else {
                            ticks
                        }
                    });
                }
            }
            // Time passes between entry and exit, not at an instruction.
            Progress::Retired { .. }
            | Progress::Delivered { .. }
            | Progress::Executed { .. }
            | Progress::Lost { .. } => {}
        }
    }

    fn take_overflows(&mut self) -> SlotSet {
        self.slots.take_overflows()
    }

    fn deadline(&self) -> Option<Tsc> {
        let entered = self.entered?;
        Some(entered + Ticks(self.due()?))
    }

    fn needs_ring(&self) -> bool {
        self.slots.any_of_one_ring()
    }
}

impl ClockBackend {
    /// Ticks from the entry to the exit that is due.
    fn due(&self) -> Option<u64> {
        let often = self.sample_ticks.get();
        let distance = if self.short < LIVELY {
            often
        } else {
            often.saturating_mul(RARELY)
        };
        let waits = self.slots.is_patient().then_some(distance / SAMPLE_WAITS);
        let sample = self.needs_ring().then_some((distance, waits.unwrap_or(0)));
        let overflow = |slot: &Slot| Some((slot.remaining()?, slot.patience.ticks()));
        together(|| self.slots.running().filter_map(overflow).chain(sample))
    }

    /// Takes note of what the slots that `ran` have earned by so many ticks, and how long
    /// their overflows have waited for an exit that was `due`.
    #[cold]
    fn spend_patience(&mut self, ran: SlotSet, ticks: u64, due: u64) {
        for index in ran.iter() {
            let Some(slot) = self.slots.get_mut(index) else {
                continue;
            };
            let left = slot.remaining();
            if let Some(waited) = left.and_then(|left| due.min(ticks).checked_sub(left)) {
                slot.patience.spend(waited);
            }
            slot.patience.earn(ticks);
        }
    }
}
