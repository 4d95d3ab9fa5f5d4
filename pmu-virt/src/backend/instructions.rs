//! What counts by what instructions did, whoever saw them: each by itself, or a sum of many.

use std::fmt::Debug;
use std::num::NonZeroU64;

use pmu_model::{
    CountRequest, EventClass, EventCode, EventCounts, EventFamily, EventTotals, KnownEvent,
    LossReason, Progress, Provenance, Reading, Ring, SlotIndex, SlotSet, Tsc, Unavailable,
    UnavailableReason, Vendor,
};

use super::slots::{ANY_SLOT, CAPACITY, Slots};
use super::{CountPlan, CounterBackend};

/// Who sees the instructions that a backend is told of.
pub trait Watcher: Debug + Send {
    /// The backend's name.
    const NAME: &'static str;

    /// The guest has to be stepped while something counts.
    const STEPS: bool;

    /// It never sees what happens at CPL 1 to 3.
    fn is_blind_to_users(&self) -> bool;

    /// Its ticks of virtual time may be counted as cycles.
    fn lends_ticks(&self) -> bool;
}

/// Counts the instructions that a [`Watcher`] saw: exact, by ring.
///
/// AMD's load and store events count operations at dispatch, wrong paths
/// included; here those of retired instructions are counted. Which of x87, MMX
/// and SSE an instruction is to AMD's event 0CBh, no manual lists; here the
/// registers decide. So these counts are labelled derived on AMD. After [`Progress::Lost`] every
/// running counter is labelled scaled until it is programmed anew.
#[derive(Debug)]
pub struct InstructionBackend<W> {
    watcher: W,
    slots: Slots,
    meanings: Box<[Option<Meaning>; CAPACITY]>,
}

/// What a slot counts, looked up once.
#[derive(Clone, Copy, Debug)]
struct Meaning {
    lane: Lane,
    /// A delivery is one of its events.
    deliveries: bool,
    os: bool,
    usr: bool,
}

/// What of [`EventTotals`] is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lane {
    Class(EventClass),
    Ticks,
}

impl Meaning {
    /// Of a request that can be counted.
    fn of(request: &CountRequest) -> Option<Self> {
        Some(Meaning {
            lane: lane_of(request)?,
            deliveries: counts_deliveries(request),
            os: request.counts_in(Ring::Kernel),
            usr: request.counts_in(Ring::User),
        })
    }

    fn events(&self, ring: Ring, done: &EventTotals) -> u64 {
        let counts = match ring {
            Ring::Kernel => self.os,
            Ring::User => self.usr,
        };
        if !counts {
            return 0;
        }
        let deliveries = if self.deliveries {
            done.deliveries()
        } else {
            0
        };
        deliveries
            + match self.lane {
                Lane::Class(class) => done.of(class),
                Lane::Ticks => done.ticks(),
            }
    }

    /// Events of one instruction or delivery at most.
    fn most(&self) -> u64 {
        match self.lane {
            Lane::Class(class) => class.most().into(),
            // An instruction of several is the last before anybody looks.
            Lane::Ticks => 1,
        }
    }
}

impl<W: Watcher> InstructionBackend<W> {
    /// A backend with all counters free.
    pub(super) fn of(watcher: W) -> Self {
        InstructionBackend {
            watcher,
            slots: Slots::new(W::NAME),
            meanings: Box::new([None; CAPACITY]),
        }
    }

    fn count(&mut self, slots: SlotSet, ring: Ring, done: &EventTotals) {
        for index in slots.iter() {
            if let Some(Some(meaning)) = self.meanings.get(usize::from(index.0)) {
                self.slots.add(index, meaning.events(ring, done));
            }
        }
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

/// What of a sum a request is about; `None` if it is about nothing that instructions do or take.
fn lane_of(request: &CountRequest) -> Option<Lane> {
    if request.is_every_cycle() {
        return Some(Lane::Ticks);
    }
    match request.event.known()? {
        KnownEvent::CoreCycles | KnownEvent::RefCycles => Some(Lane::Ticks),
        event => class_of(event, request.event.vendor()).map(Lane::Class),
    }
}

/// What instructions are counted by `event`; `None` if it is no event of theirs.
fn class_of(event: KnownEvent, vendor: Option<Vendor>) -> Option<EventClass> {
    Some(match event {
        KnownEvent::Instructions => EventClass::Instructions,
        KnownEvent::Branches => EventClass::Branches,
        // Intel's event is "near taken", AMD's counts far transfers too.
        KnownEvent::TakenBranches if vendor == Some(Vendor::Intel) => EventClass::NearTakenBranches,
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

/// How well the lane tells what `event` is.
fn provenance_of(lane: Lane, event: EventCode) -> Provenance {
    match (lane, event.vendor()) {
        (Lane::Ticks, _) => Provenance::Simulated,
        (
            Lane::Class(
                EventClass::Loads
                | EventClass::Stores
                | EventClass::FloatingPoint
                | EventClass::X87
                | EventClass::Mmx
                | EventClass::Sse,
            ),
            Some(Vendor::Amd),
        ) => Provenance::Derived,
        _ => Provenance::Exact,
    }
}

impl<W: Watcher> CounterBackend for InstructionBackend<W> {
    fn name(&self) -> &'static str {
        W::NAME
    }

    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        let refuse = |reason| Err(Unavailable { reason });
        let lane = lane_of(request);
        let Some(lane) = lane.filter(|lane| *lane != Lane::Ticks || self.watcher.lends_ticks())
        else {
            return refuse(UnavailableReason::Event {
                backend: W::NAME,
                event: request.event,
            });
        };
        if request.has_modifier() && !request.is_every_cycle() {
            return refuse(UnavailableReason::Modifier { backend: W::NAME });
        }
        // What is never seen is not counted; together with CPL 0 it is counted
        // in part, which the label says when the guest gets there.
        if request.usr && !request.os && self.watcher.is_blind_to_users() {
            return refuse(UnavailableReason::Unseen { backend: W::NAME });
        }
        Ok(CountPlan {
            provenance: provenance_of(lane, request.event),
            constraint: ANY_SLOT,
        })
    }

    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        let provenance = self.slots.program(slot, request, self.plan(request))?;
        if let Some(meaning) = self.meanings.get_mut(usize::from(slot.0)) {
            *meaning = Meaning::of(request);
        }
        Ok(provenance)
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
            Progress::Retired { ring, insn } => {
                let did = EventCounts::of(&insn).into();
                self.count(self.slots.running_set(), ring, &did);
            }
            Progress::Delivered { ring } => {
                self.count(self.slots.running_set(), ring, &EventTotals::DELIVERY);
            }
            // What has started a slot is told after that, and not counted by it.
            Progress::Executed { ring, ref done } => {
                self.count(self.slots.interval(), ring, done);
            }
            Progress::Lost { reason } => self.lose(reason),
            Progress::Entered { .. } => self.slots.enter(),
            // Nothing is counted by the host's time.
            Progress::Left { .. } => {}
        }
    }

    fn take_overflows(&mut self) -> SlotSet {
        self.slots.take_overflows()
    }

    fn deadline(&self) -> Option<Tsc> {
        None
    }

    fn horizon(&self) -> Option<u64> {
        let far = |index: SlotIndex| {
            let most = self.meanings.get(usize::from(index.0))?.as_ref()?.most();
            // The instruction that may complete it is the last one.
            Some((self.slots.get(index)?.remaining()? / most).max(1))
        };
        self.slots.running_set().iter().filter_map(far).min()
    }

    fn skids(&self) -> bool {
        false
    }

    fn needs_stepping(&self) -> bool {
        W::STEPS && !self.slots.running_set().is_empty()
    }

    fn loss(&self, slot: SlotIndex) -> Option<LossReason> {
        self.slots.get(slot)?.loss
    }
}
