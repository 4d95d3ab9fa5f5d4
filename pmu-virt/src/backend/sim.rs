//! `sim`: declared rates over the time in which a vCPU runs.

mod clocks;
mod curve;
mod cycles;
mod error;
mod names;
mod slot;
mod table;

pub use clocks::SimClocks;
pub use error::{RateError, RateProblem};
pub use table::RateTable;

use std::num::NonZeroU64;

use pmu_model::{
    Constraint, CountRequest, OwnerId, Progress, Provenance, Reading, Ring, SlotIndex, SlotSet,
    Ticks, Tsc, Unavailable, UnavailableReason,
};

use super::{CountPlan, CounterBackend};
use clocks::{OwnerClock, Rings, What};
use cycles::Threshold;
use slot::SimSlot;

const NAME: &str = "sim";

/// Makes counts up from a [`RateTable`]; every one is labelled simulated.
///
/// Time is that of the vCPU ([`CounterBackend::attach`]): the TSC ticks from
/// entry to exit, less those halted, whether anything counts or not. It begins
/// at 0 with the machine, the phases with it, and goes from core to core with
/// its vCPU ([`SimClocks`]). A count is the difference of two totals, in whole
/// events, which are pure functions of that time and of the rings in which it
/// passed. So a counter that moves to another slot or core, or has to make room
/// for a while that its vCPU is away, counts the same, to the last event, as
/// one that stays.
#[derive(Debug)]
pub struct SimBackend {
    clocks: SimClocks,
    /// That of the vCPU which is attached.
    clock: OwnerClock,
    owner: OwnerId,
    slots: Vec<Option<SimSlot>>,
    running: SlotSet,
    overflowed: SlotSet,
    /// TSC at the entry, and the clock then.
    entered: Option<(Tsc, u64)>,
}

impl SimBackend {
    /// A backend with clocks of its own, for a machine of one core and a TSC
    /// of `tsc_khz` ticks in a millisecond (0 is taken for 1).
    pub fn new(table: RateTable, tsc_khz: u32) -> Self {
        SimBackend::of(&SimClocks::new(table, tsc_khz))
    }

    /// The backend of one core of the machine that has `clocks`. Until a vCPU
    /// is attached it counts for the default one.
    pub fn of(clocks: &SimClocks) -> Self {
        let owner = OwnerId::default();
        SimBackend {
            slots: (0..clocks.table().capacity).map(|_| None).collect(),
            clock: clocks.of(owner),
            clocks: clocks.clone(),
            owner,
            running: SlotSet::EMPTY,
            overflowed: SlotSet::EMPTY,
            entered: None,
        }
    }

    fn get(&self, slot: SlotIndex) -> Option<&SimSlot> {
        self.slots.get(usize::from(slot.0))?.as_ref()
    }

    fn running(&self) -> impl Iterator<Item = &SimSlot> {
        self.running.iter().filter_map(|slot| self.get(slot))
    }

    fn find(&self, request: &CountRequest) -> Result<(usize, &table::Entry), UnavailableReason> {
        let (index, entry) =
            self.clocks
                .table()
                .find(&request.event)
                .ok_or(UnavailableReason::Event {
                    backend: NAME,
                    event: request.event,
                })?;
        // Of cycles with noise nobody can say in closed form how many have enough.
        let threshold = Threshold::of(request).is_some();
        if request.any_thread || threshold && entry.curve.noise_ppm > 0 {
            return Err(UnavailableReason::Modifier { backend: NAME });
        }
        Ok((index, entry))
    }

    /// Why a counter with `constraint` cannot be at `slot`.
    fn misplaced(&self, slot: SlotIndex, constraint: &Constraint) -> Option<UnavailableReason> {
        if usize::from(slot.0) >= self.slots.len() {
            return Some(UnavailableReason::NoSuchSlot {
                backend: NAME,
                slot,
            });
        }
        // Slots of others: an odd one that belongs to a pair, or the partner.
        let partner = SlotIndex(slot.0 ^ 1);
        let neighbour = self.get(partner);
        let in_pair = slot.0 % 2 == 1 && neighbour.is_some_and(SimSlot::is_paired);
        let partner_taken = constraint.paired && neighbour.is_some();
        let free = constraint.slots;
        (in_pair || partner_taken || !constraint.allows(slot, free)).then_some(
            UnavailableReason::Misplaced {
                backend: NAME,
                slot,
            },
        )
    }

    fn enter(&mut self, tsc: Tsc) {
        self.entered = Some((tsc, self.clock.lock().time()));
        for index in self.running.iter() {
            if let Some(slot) = at(&mut self.slots, index) {
                slot.enter();
            }
        }
    }

    fn leave(&mut self, tsc: Tsc, halted: Ticks, ring: Option<Ring>) {
        let Some((entered, _)) = self.entered.take() else {
            return;
        };
        let Ticks(ticks) = tsc - entered - halted;
        let mut clock = self.clock.lock();
        clock.pass(&self.clocks, ticks, ring);
        for index in self.running.iter() {
            if at(&mut self.slots, index).is_some_and(|slot| slot.leave(&self.clocks, &clock)) {
                self.overflowed.insert(index);
            }
        }
    }
}

fn at(slots: &mut [Option<SimSlot>], index: SlotIndex) -> Option<&mut SimSlot> {
    slots.get_mut(usize::from(index.0))?.as_mut()
}

impl CounterBackend for SimBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capacity(&self) -> usize {
        self.slots.len()
    }

    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        match self.find(request) {
            Ok((_, entry)) => Ok(CountPlan {
                provenance: Provenance::Simulated,
                constraint: entry.constraint,
            }),
            Err(reason) => Err(Unavailable { reason }),
        }
    }

    fn is_shared(&self, _: SlotIndex) -> bool {
        // As a register, it counts for whoever runs.
        true
    }

    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        self.release(slot);
        let refuse = |reason| Unavailable { reason };
        let (index, entry) = self.find(request).map_err(refuse)?;
        if let Some(reason) = self.misplaced(slot, &entry.constraint) {
            return Err(refuse(reason));
        }
        let what = What {
            entry: index,
            rings: Rings::of(request, &entry.curve),
            threshold: Threshold::of(request),
        };
        let programmed = SimSlot::new(what, entry.constraint.paired);
        self.clock.lock().begin(&self.clocks, what);
        if let Some(place) = self.slots.get_mut(usize::from(slot.0)) {
            *place = Some(programmed);
        }
        Ok(Provenance::Simulated)
    }

    fn release(&mut self, slot: SlotIndex) {
        self.running.remove(slot);
        self.overflowed.remove(slot);
        let place = self.slots.get_mut(usize::from(slot.0));
        if let Some(programmed) = place.and_then(Option::take) {
            self.clock.lock().end(programmed.what());
        }
    }

    fn start(&mut self, slot: SlotIndex) {
        if let Some(programmed) = at(&mut self.slots, slot) {
            programmed.start(&self.clocks, &self.clock.lock());
            self.running.insert(slot);
        }
    }

    fn stop(&mut self, slot: SlotIndex) {
        self.running.remove(slot);
        if let Some(programmed) = at(&mut self.slots, slot) {
            programmed.stop(&self.clocks, &self.clock.lock());
        }
    }

    /// A slot that still runs goes on with the time of the new vCPU.
    fn attach(&mut self, owner: OwnerId) {
        if owner == self.owner {
            return;
        }
        let running = self.running;
        self.pause(running);
        self.entered = None;
        let left = std::mem::replace(&mut self.clock, self.clocks.of(owner));
        self.owner = owner;
        for slot in self.slots.iter().flatten() {
            left.lock().end(slot.what());
            self.clock.lock().begin(&self.clocks, slot.what());
        }
        self.resume(running);
    }

    fn read(&self, slot: SlotIndex) -> Reading {
        match self.get(slot) {
            Some(slot) => Reading::Counted {
                value: slot.count(&self.clocks, &self.clock.lock()),
                provenance: Provenance::Simulated,
            },
            None if usize::from(slot.0) >= self.slots.len() => {
                Reading::Unavailable(UnavailableReason::NoSuchSlot {
                    backend: NAME,
                    slot,
                })
            }
            None => Reading::Unavailable(UnavailableReason::NotProgrammed {
                backend: NAME,
                slot,
            }),
        }
    }

    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        self.overflowed.remove(slot);
        if let Some(slot) = at(&mut self.slots, slot) {
            slot.arm(&self.clocks, &self.clock.lock(), after);
        }
    }

    fn observe(&mut self, progress: &Progress) {
        match *progress {
            Progress::Entered { tsc } => self.enter(tsc),
            Progress::Left { tsc, halted, ring } => self.leave(tsc, halted, ring),
            // Time passes between entry and exit, not at an instruction.
            Progress::Retired { .. }
            | Progress::Delivered { .. }
            | Progress::Executed { .. }
            | Progress::Lost { .. } => {}
        }
    }

    fn take_overflows(&mut self) -> SlotSet {
        std::mem::take(&mut self.overflowed)
    }

    fn deadline(&self) -> Option<Tsc> {
        let (entered, time) = self.entered?;
        let due = self.running().filter_map(SimSlot::due).min();
        let overflow = due.map(|due| due.saturating_sub(time).max(1));
        // A sample of the ring every millisecond, where it matters.
        let sample = self
            .needs_ring()
            .then_some(u64::from(self.clocks.tsc_khz()));
        let ticks = match (overflow, sample) {
            (Some(overflow), Some(sample)) => overflow.min(sample),
            (overflow, sample) => overflow.or(sample)?,
        };
        Some(entered + Ticks(ticks))
    }

    fn needs_ring(&self) -> bool {
        self.running().any(|slot| slot.what().rings.matter())
    }
}
