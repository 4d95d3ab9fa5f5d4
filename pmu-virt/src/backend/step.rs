//! `step`: every instruction, seen one by one.

use std::num::NonZeroU64;

use pmu_model::{
    CountRequest, EventFamily, KnownEvent, LossReason, Progress, Provenance, Reading, Ring,
    SlotIndex, SlotSet, Tsc, Unavailable, UnavailableReason, Vendor,
};

use super::slots::{ANY_SLOT, CAPACITY, Slot, Slots};
use super::{BackendEnv, CountPlan, CounterBackend};
use crate::step::{MathUnit, Retirement};

const NAME: &str = "step";

/// Counts what stepped instructions did: exact, by ring.
///
/// AMD's load and store events count operations at dispatch, wrong paths
/// included; here those of retired instructions are counted. Which of x87, MMX
/// and SSE an instruction is to AMD's event 0CBh, no manual lists; here the
/// registers decide. So these counts are labelled derived on AMD. After [`Progress::Lost`] every running
/// counter is labelled scaled until it is programmed anew. On a host that
/// cannot step CPL 3, nothing is counted for CPL 3 alone.
#[derive(Debug)]
pub struct StepBackend {
    slots: Slots,
    sees_cpl3: bool,
}

impl StepBackend {
    /// A backend with all counters free, on a host that steps every ring.
    pub fn new() -> Self {
        StepBackend {
            slots: Slots::new(NAME),
            sees_cpl3: true,
        }
    }

    /// Likewise, on a host that is as `env` says.
    pub fn on(env: &BackendEnv) -> Self {
        StepBackend {
            sees_cpl3: env.steps_cpl3,
            ..StepBackend::new()
        }
    }

    fn retire(&mut self, ring: Ring, insn: Retirement) {
        self.slots.advance(self.slots.running_set(), |slot| {
            if slot.request.counts_in(ring) {
                events_of(slot, insn)
            } else {
                0
            }
        });
    }

    fn deliver(&mut self, ring: Ring) {
        self.slots.advance(self.slots.running_set(), |slot| {
            u64::from(slot.request.counts_in(ring) && counts_deliveries(&slot.request))
        });
    }

    /// The guest cannot see a label, so the log tells, once for each programming.
    fn lose(&mut self, reason: LossReason) {
        self.slots.advance(self.slots.running_set(), |slot| {
            if slot.loss.is_none() {
                log::info!(
                    "the count of '{}' is exact no longer: {reason}",
                    slot.request
                );
            }
            slot.provenance = Provenance::Scaled;
            slot.loss.get_or_insert(reason);
            0
        });
    }
}

impl Default for StepBackend {
    fn default() -> Self {
        StepBackend::new()
    }
}

/// Events of `slot` in one instruction.
fn events_of(slot: &Slot, insn: Retirement) -> u64 {
    let event = slot.request.event;
    match event.known() {
        Some(KnownEvent::Instructions) => 1,
        Some(KnownEvent::Branches) => u64::from(insn.branch),
        // Intel's event is "near taken", AMD's counts far transfers too.
        Some(KnownEvent::TakenBranches) => {
            u64::from(insn.taken && !(insn.far && event.vendor() == Some(Vendor::Intel)))
        }
        Some(KnownEvent::ConditionalBranches) => u64::from(insn.conditional),
        Some(KnownEvent::FarBranches) => u64::from(insn.far),
        Some(KnownEvent::Loads) => u64::from(insn.loads),
        Some(KnownEvent::Stores) => u64::from(insn.stores),
        Some(KnownEvent::Calls) => u64::from(insn.call),
        Some(KnownEvent::Returns) => u64::from(insn.near_return),
        Some(KnownEvent::FloatingPoint) => u64::from(insn.unit.is_some()),
        Some(KnownEvent::X87) => u64::from(insn.unit == Some(MathUnit::X87)),
        Some(KnownEvent::Mmx) => u64::from(insn.unit == Some(MathUnit::Mmx)),
        Some(KnownEvent::Sse) => u64::from(insn.unit == Some(MathUnit::Sse)),
        Some(KnownEvent::Strings) => u64::from(insn.string),
        // `plan` let none of the others through.
        _ => 0,
    }
}

/// Whether a delivered exception or interrupt is an event of `request`: AMD
/// counts it as a branch, taken and far, and in the older families as an
/// instruction as well (BKDG and PPR, events 0C0h, 0C2h, 0C4h, 0C6h).
fn counts_deliveries(request: &CountRequest) -> bool {
    match request.event.known() {
        Some(KnownEvent::Instructions) => request
            .event
            .family()
            .is_some_and(EventFamily::deliveries_are_instructions),
        Some(KnownEvent::Branches | KnownEvent::TakenBranches | KnownEvent::FarBranches) => {
            request.event.vendor() == Some(Vendor::Amd)
        }
        _ => false,
    }
}

impl CounterBackend for StepBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        let provenance = match (request.event.known(), request.event.vendor()) {
            (
                Some(
                    KnownEvent::Loads
                    | KnownEvent::Stores
                    | KnownEvent::FloatingPoint
                    | KnownEvent::X87
                    | KnownEvent::Mmx
                    | KnownEvent::Sse,
                ),
                Some(Vendor::Amd),
            ) => Provenance::Derived,
            (
                Some(
                    KnownEvent::Instructions
                    | KnownEvent::Branches
                    | KnownEvent::TakenBranches
                    | KnownEvent::ConditionalBranches
                    | KnownEvent::FarBranches
                    | KnownEvent::Loads
                    | KnownEvent::Stores
                    | KnownEvent::Calls
                    | KnownEvent::Returns
                    | KnownEvent::FloatingPoint
                    | KnownEvent::X87
                    | KnownEvent::Mmx
                    | KnownEvent::Sse
                    | KnownEvent::Strings,
                ),
                _,
            ) => Provenance::Exact,
            _ => {
                return Err(Unavailable {
                    reason: UnavailableReason::Event {
                        backend: NAME,
                        event: request.event,
                    },
                });
            }
        };
        if request.has_modifier() {
            return Err(Unavailable {
                reason: UnavailableReason::Modifier { backend: NAME },
            });
        }
        // What is never seen is not counted; together with CPL 0 it is counted
        // in part, which the label says when the guest gets there.
        if request.usr && !request.os && !self.sees_cpl3 {
            return Err(Unavailable {
                reason: UnavailableReason::Unseen { backend: NAME },
            });
        }
        Ok(CountPlan {
            provenance,
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

    fn observe(&mut self, progress: &Progress) {
        match *progress {
            Progress::Retired { ring, insn } => self.retire(ring, insn),
            Progress::Delivered { ring } => self.deliver(ring),
            Progress::Lost { reason } => self.lose(reason),
            // Nothing is counted by time.
            Progress::Entered { .. } | Progress::Left { .. } => {}
        }
    }

    fn take_overflows(&mut self) -> SlotSet {
        self.slots.take_overflows()
    }

    fn deadline(&self) -> Option<Tsc> {
        None
    }

    fn skids(&self) -> bool {
        false
    }

    fn needs_stepping(&self) -> bool {
        !self.slots.running_set().is_empty()
    }

    fn loss(&self, slot: SlotIndex) -> Option<LossReason> {
        self.slots.get(slot)?.loss
    }
}
