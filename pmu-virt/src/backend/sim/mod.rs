//! `sim`: declared rates over the time in which a counter runs.

mod curve;
mod error;
mod names;
mod parse;
mod table;

pub use error::{RateError, RateProblem};
pub use table::RateTable;

use super::{CounterBackend, Provenance, Reading, Unavailable, UnavailableReason};
use crate::assign::Constraint;
use crate::ids::{Ring, SlotIndex, SlotSet};
use crate::progress::Progress;
use crate::request::CountRequest;
use curve::{Curve, unit};
use std::num::NonZeroU64;

const NAME: &str = "sim";

/// Makes counts up from a [`RateTable`]; every one is labelled simulated.
///
/// Each slot has a virtual clock of its own: the TSC ticks from entry to exit
/// while it runs, less those halted. Its count is a pure function of that
/// clock (and of the rings in which the time passed, where the rates differ),
/// exact to the event: time counted in pieces gives the same as in one. The
/// clock begins at 0 when the slot is programmed, and with it the phases.
#[derive(Debug)]
pub struct SimBackend {
    table: RateTable,
    tsc_khz: u32,
    slots: Vec<Option<SimSlot>>,
    running: SlotSet,
    overflowed: SlotSet,
    entered: Option<u64>,
}

#[derive(Debug)]
struct SimSlot {
    request: CountRequest,
    /// Index of the table's entry.
    entry: usize,
    /// Whether the ring in which time passes makes a difference.
    by_ring: bool,
    paired: bool,
    /// Ticks in which it ran, and whose ring is known where that matters.
    time: u64,
    /// Ticks after those whose ring is yet to be told.
    unattributed: u64,
    /// The count, in parts of an event: [`unit`] of them are one.
    sum: u128,
    /// The count at which the armed overflow comes.
    armed: Option<u64>,
    /// When that is at the earliest, on the slot's clock.
    due: Option<u64>,
    /// Running since before the present interval began.
    in_interval: bool,
}

impl SimBackend {
    /// A backend for a TSC of `tsc_khz` ticks in a millisecond (0 is taken
    /// for 1).
    pub fn new(table: RateTable, tsc_khz: u32) -> Self {
        SimBackend {
            slots: (0..table.capacity).map(|_| None).collect(),
            table,
            tsc_khz: tsc_khz.max(1),
            running: SlotSet::EMPTY,
            overflowed: SlotSet::EMPTY,
            entered: None,
        }
    }

    fn get(&self, slot: SlotIndex) -> Option<&SimSlot> {
        self.slots.get(usize::from(slot.0))?.as_ref()
    }

    /// A slot with its rates.
    fn get_mut(&mut self, slot: SlotIndex) -> Option<(&mut SimSlot, &Curve)> {
        let slot = self.slots.get_mut(usize::from(slot.0))?.as_mut()?;
        let entry = self.table.entries.get(slot.entry)?;
        Some((slot, &entry.curve))
    }

    fn running(&self) -> impl Iterator<Item = &SimSlot> {
        self.running.iter().filter_map(|slot| self.get(slot))
    }

    fn find(&self, request: &CountRequest) -> Result<(usize, &table::Entry), UnavailableReason> {
        let (index, entry) = self
            .table
            .find(&request.event)
            .ok_or(UnavailableReason::Event {
                backend: NAME,
                event: request.event,
            })?;
        if request.has_modifier() {
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
        let in_pair = slot.0 % 2 == 1 && neighbour.is_some_and(|slot| slot.paired);
        let partner_taken = constraint.paired && neighbour.is_some();
        let free = constraint.slots;
        (in_pair || partner_taken || !constraint.allows(slot, free)).then_some(
            UnavailableReason::Misplaced {
                backend: NAME,
                slot,
            },
        )
    }

    fn leave(&mut self, tsc: u64, halted: u64, ring: Option<Ring>) {
        let Some(entered) = self.entered.take() else {
            return;
        };
        let ticks = tsc.saturating_sub(entered).saturating_sub(halted);
        let tsc_khz = self.tsc_khz;
        for index in self.running.iter() {
            let Some((slot, curve)) = self.get_mut(index) else {
                continue;
            };
            if std::mem::take(&mut slot.in_interval) && slot.pass(curve, ticks, ring, tsc_khz) {
                self.overflowed.insert(index);
            }
        }
    }
}

impl SimSlot {
    fn count(&self, tsc_khz: u32) -> u64 {
        u64::try_from(self.sum / unit(tsc_khz)).unwrap_or(u64::MAX)
    }

    /// Lets time pass; true when the armed overflow came.
    fn pass(&mut self, curve: &Curve, ticks: u64, ring: Option<Ring>, tsc_khz: u32) -> bool {
        self.unattributed = self.unattributed.saturating_add(ticks);
        let ring = match (self.by_ring, ring) {
            // Any ring stands for both where they are alike.
            (false, _) => Ring::User,
            (true, Some(ring)) => ring,
            (true, None) => return false,
        };
        let until = self
            .time
            .saturating_add(std::mem::take(&mut self.unattributed));
        if self.request.counts_in(ring) || !self.by_ring {
            let at = |ticks| curve.integral(ring, ticks, tsc_khz);
            self.sum = self.sum.saturating_add(at(until) - at(self.time));
        }
        self.time = until;
        let Some(target) = self.armed else {
            return false;
        };
        if self.count(tsc_khz) < target {
            if self.by_ring {
                self.foresee(curve, tsc_khz);
            }
            return false;
        }
        (self.armed, self.due) = (None, None);
        true
    }

    /// Finds out when the armed overflow will come: exactly, or at the
    /// earliest if that depends on the ring.
    fn foresee(&mut self, curve: &Curve, tsc_khz: u32) {
        self.due = self.armed.and_then(|target| {
            let target = u128::from(target).saturating_mul(unit(tsc_khz));
            let growth = target.saturating_sub(self.sum);
            [Ring::Kernel, Ring::User]
                .into_iter()
                .filter(|ring| self.request.counts_in(*ring) || !self.by_ring)
                .filter_map(|ring| curve.reaches(ring, self.time, growth, tsc_khz))
                .min()
        });
    }

    /// Ticks until then.
    fn remaining(&self) -> Option<u64> {
        let now = self.time.saturating_add(self.unattributed);
        Some(self.due?.saturating_sub(now).max(1))
    }
}

impl CounterBackend for SimBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capacity(&self) -> usize {
        self.slots.len()
    }

    fn can_count(&self, request: &CountRequest) -> Result<Provenance, Unavailable> {
        self.find(request)
            .map(|_| Provenance::Simulated)
            .map_err(|reason| Unavailable { reason })
    }

    fn constraint(&self, request: &CountRequest) -> Constraint {
        match self.find(request) {
            Ok((_, entry)) => entry.constraint,
            Err(_) => Constraint::slots(SlotSet::EMPTY),
        }
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
        let programmed = SimSlot {
            request: *request,
            entry: index,
            by_ring: request.is_ring_filtered() || entry.curve.depends_on_ring(),
            paired: entry.constraint.paired,
            time: 0,
            unattributed: 0,
            sum: 0,
            armed: None,
            due: None,
            in_interval: false,
        };
        if let Some(place) = self.slots.get_mut(usize::from(slot.0)) {
            *place = Some(programmed);
        }
        Ok(Provenance::Simulated)
    }

    fn release(&mut self, slot: SlotIndex) {
        self.running.remove(slot);
        self.overflowed.remove(slot);
        if let Some(place) = self.slots.get_mut(usize::from(slot.0)) {
            *place = None;
        }
    }

    fn start(&mut self, slot: SlotIndex) {
        if self.get(slot).is_some() {
            self.running.insert(slot);
        }
    }

    fn stop(&mut self, slot: SlotIndex) {
        self.running.remove(slot);
        if let Some((slot, _)) = self.get_mut(slot) {
            slot.in_interval = false;
        }
    }

    fn read(&self, slot: SlotIndex) -> Reading {
        match self.get(slot) {
            Some(slot) => Reading::Counted {
                value: slot.count(self.tsc_khz),
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
        let tsc_khz = self.tsc_khz;
        let Some((slot, curve)) = self.get_mut(slot) else {
            return;
        };
        slot.armed = after.map(|after| slot.count(tsc_khz).saturating_add(after.get()));
        slot.foresee(curve, tsc_khz);
    }

    fn observe(&mut self, progress: &Progress) {
        match *progress {
            Progress::Entered { tsc } => {
                self.entered = Some(tsc);
                for slot in self.running.iter() {
                    if let Some((slot, _)) = self.get_mut(slot) {
                        slot.in_interval = true;
                    }
                }
            }
            Progress::Left { tsc, halted, ring } => self.leave(tsc, halted, ring),
            // Time passes between entry and exit, not at an instruction.
            Progress::Retired { .. } | Progress::Delivered { .. } | Progress::Lost { .. } => {}
        }
    }

    fn take_overflows(&mut self) -> SlotSet {
        std::mem::take(&mut self.overflowed)
    }

    fn deadline(&self) -> Option<u64> {
        let entered = self.entered?;
        let overflow = self.running().filter_map(SimSlot::remaining).min();
        // A sample of the ring every millisecond, where it matters.
        let sample = self.needs_ring().then_some(u64::from(self.tsc_khz));
        let ticks = match (overflow, sample) {
            (Some(overflow), Some(sample)) => overflow.min(sample),
            (overflow, sample) => overflow.or(sample)?,
        };
        Some(entered.saturating_add(ticks))
    }

    fn needs_ring(&self) -> bool {
        self.running().any(|slot| slot.by_ring)
    }
}
