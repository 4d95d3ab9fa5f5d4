//! `step`: every instruction, seen one by one.

use std::num::NonZeroU64;

use instruction_facts::{EventClass, EventCounts};
use pmu_model::{
    CountRequest, EventCode, EventFamily, KnownEvent, LossReason, Progress, Provenance, Reading,
    Retirement, Ring, SlotIndex, SlotSet, Tsc, Unavailable, UnavailableReason, Vendor,
};

use super::slots::{ANY_SLOT, CAPACITY, Slots};
use super::{BackendEnv, CountPlan, CounterBackend};

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
        let counts = EventCounts::of(&insn);
        self.slots.advance(self.slots.running_set(), |slot| {
            if !slot.request.counts_in(ring) {
                return 0;
            }
            // `plan` let nothing else through.
            class_of(slot.request.event).map_or(0, |class| counts.get(class).into())
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

/// What instructions are counted by `event`; `None` if it is no event of theirs.
fn class_of(event: EventCode) -> Option<EventClass> {
    Some(match event.known()? {
        KnownEvent::Instructions => EventClass::Instructions,
        KnownEvent::Branches => EventClass::Branches,
        // Intel's event is "near taken", AMD's counts far transfers too.
        KnownEvent::TakenBranches if event.vendor() == Some(Vendor::Intel) => {
            EventClass::NearTakenBranches
        }
        KnownEvent::TakenBranches => EventClass::TakenBranches,
        KnownEvent::ConditionalBranches => EventClass::ConditionalBranches,
        KnownEvent::FarBranches => EventClass::FarBranches,
        KnownEvent::Loads => EventClass::Loads,
        KnownEvent::Stores => EventClass::Stores,
        KnownEvent::Calls => EventClass::Calls,
        KnownEvent::Returns => EventClass::Returns,
        KnownEvent::FloatingPoint => EventClass::FloatingPoint,
        KnownEvent::X87 => EventClass::X87,
        KnownEvent::Mmx => EventClass::Mmx,
        KnownEvent::Sse => EventClass::Sse,
        KnownEvent::Strings => EventClass::Strings,
        _ => return None,
    })
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
        let Some(class) = class_of(request.event) else {
            return Err(Unavailable {
                reason: UnavailableReason::Event {
                    backend: NAME,
                    event: request.event,
                },
            });
        };
        let provenance = match (class, request.event.vendor()) {
            (
                EventClass::Loads
                | EventClass::Stores
                | EventClass::FloatingPoint
                | EventClass::X87
                | EventClass::Mmx
                | EventClass::Sse,
                Some(Vendor::Amd),
            ) => Provenance::Derived,
            _ => Provenance::Exact,
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
