//! Several sources at once, each for the events it counts best.

use std::num::NonZeroU64;

use pmu_model::{
    CountRequest, LossReason, OwnerId, Progress, Provenance, Reading, SlotIndex, SlotSet, Tsc,
    Unavailable, UnavailableReason,
};

use super::{CountPlan, CounterBackend};

const NAME: &str = "combined";

/// Sources side by side in one slot space.
///
/// A request goes to the first source that can count it.
#[derive(Debug)]
pub struct CombinedBackend {
    sources: Vec<SourcePart>,
}

/// A source and its part of the slots.
#[derive(Debug)]
struct SourcePart {
    backend: Box<dyn CounterBackend>,
    first: u8,
    count: u8,
}

impl SourcePart {
    fn slots(&self) -> SlotSet {
        SlotSet::below(self.count.into()).shifted_up(self.first)
    }

    /// A set of all slots, as the source numbers its own.
    fn inner(&self, slots: SlotSet) -> SlotSet {
        slots.intersection(self.slots()).shifted_down(self.first)
    }

    /// A set of the source's own slots, among all.
    fn outer(&self, slots: SlotSet) -> SlotSet {
        slots
            .intersection(SlotSet::below(self.count.into()))
            .shifted_up(self.first)
    }
}

impl CombinedBackend {
    /// The sources in order of preference. Where their slots are more than
    /// can be numbered, each gives up some.
    pub fn new(backends: Vec<Box<dyn CounterBackend>>) -> Self {
        let share = usize::from(SlotSet::CAPACITY) / backends.len().max(1);
        let mut first = 0u8;
        let sources = backends
            .into_iter()
            .map(|backend| {
                // A pair is an even slot and the next: parts begin at even ones.
                let count = backend.capacity().min(share & !1);
                let count = u8::try_from(count).unwrap_or(SlotSet::CAPACITY);
                let source = SourcePart {
                    backend,
                    first,
                    count,
                };
                first = first.saturating_add(count + count % 2);
                source
            })
            .collect();
        CombinedBackend { sources }
    }

    /// The source that counts `request`. Of several refusals the first one is told
    /// that says more than that there is no such event.
    fn chosen(&self, request: &CountRequest) -> Result<(&SourcePart, CountPlan), Unavailable> {
        let (mut first, mut telling) = (None, None);
        for source in &self.sources {
            match source.backend.plan(request) {
                Ok(plan) => return Ok((source, plan)),
                Err(no) => {
                    first.get_or_insert(no);
                    // A source that has the event tells more than one that has not.
                    if !matches!(no.reason, UnavailableReason::Event { .. }) {
                        telling.get_or_insert(no);
                    }
                }
            }
        }
        Err(telling.or(first).unwrap_or(Unavailable {
            reason: UnavailableReason::Event {
                backend: NAME,
                event: request.event,
            },
        }))
    }

    fn at(&self, slot: SlotIndex) -> Option<(&SourcePart, SlotIndex)> {
        let source = self
            .sources
            .iter()
            .find(|source| source.slots().contains(slot))?;
        Some((source, SlotIndex(slot.0 - source.first)))
    }

    fn at_mut(&mut self, slot: SlotIndex) -> Option<(&mut dyn CounterBackend, SlotIndex)> {
        let source = self
            .sources
            .iter_mut()
            .find(|source| source.slots().contains(slot))?;
        let inner = SlotIndex(slot.0 - source.first);
        Some((source.backend.as_mut(), inner))
    }

    fn no_such_slot(slot: SlotIndex) -> UnavailableReason {
        UnavailableReason::NoSuchSlot {
            backend: NAME,
            slot,
        }
    }
}

impl CounterBackend for CombinedBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capacity(&self) -> usize {
        self.sources
            .last()
            .map_or(0, |last| usize::from(last.first) + usize::from(last.count))
    }

    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        let (source, mut plan) = self.chosen(request)?;
        // What was cut off for want of numbers is given up for what is left.
        plan.constraint.slots = match source.outer(plan.constraint.slots) {
            SlotSet::EMPTY => source.slots(),
            some => some,
        };
        Ok(plan)
    }

    /// A slot of a source that cannot count the request is refused by it.
    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        match self.at_mut(slot) {
            Some((backend, inner)) => backend.program(inner, request),
            None => Err(Unavailable {
                reason: CombinedBackend::no_such_slot(slot),
            }),
        }
    }

    fn release(&mut self, slot: SlotIndex) {
        if let Some((backend, inner)) = self.at_mut(slot) {
            backend.release(inner);
        }
    }

    fn start(&mut self, slot: SlotIndex) {
        if let Some((backend, inner)) = self.at_mut(slot) {
            backend.start(inner);
        }
    }

    fn stop(&mut self, slot: SlotIndex) {
        if let Some((backend, inner)) = self.at_mut(slot) {
            backend.stop(inner);
        }
    }

    fn resume(&mut self, slots: SlotSet) {
        for source in &mut self.sources {
            let inner = source.inner(slots);
            if !inner.is_empty() {
                source.backend.resume(inner);
            }
        }
    }

    fn pause(&mut self, slots: SlotSet) {
        for source in &mut self.sources {
            let inner = source.inner(slots);
            if !inner.is_empty() {
                source.backend.pause(inner);
            }
        }
    }

    fn attach(&mut self, owner: OwnerId) {
        for source in &mut self.sources {
            source.backend.attach(owner);
        }
    }

    fn read(&self, slot: SlotIndex) -> Reading {
        match self.at(slot) {
            Some((source, inner)) => source.backend.read(inner),
            None => Reading::Unavailable(CombinedBackend::no_such_slot(slot)),
        }
    }

    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        if let Some((backend, inner)) = self.at_mut(slot) {
            backend.arm(inner, after);
        }
    }

    fn arm_about(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        if let Some((backend, inner)) = self.at_mut(slot) {
            backend.arm_about(inner, after);
        }
    }

    fn observe(&mut self, progress: &Progress) {
        for source in &mut self.sources {
            source.backend.observe(progress);
        }
    }

    fn take_overflows(&mut self) -> SlotSet {
        self.sources
            .iter_mut()
            .fold(SlotSet::EMPTY, |overflowed, source| {
                let inner = source.backend.take_overflows();
                overflowed.union(source.outer(inner))
            })
    }

    fn deadline(&self) -> Option<Tsc> {
        let deadlines = self.sources.iter().map(|source| source.backend.deadline());
        deadlines.flatten().min()
    }

    fn horizon(&self) -> Option<u64> {
        let horizons = self.sources.iter().map(|source| source.backend.horizon());
        horizons.flatten().min()
    }

    fn needs_ring(&self) -> bool {
        self.sources
            .iter()
            .any(|source| source.backend.needs_ring())
    }

    fn skids(&self) -> bool {
        self.sources.iter().any(|source| source.backend.skids())
    }

    fn needs_stepping(&self) -> bool {
        self.sources
            .iter()
            .any(|source| source.backend.needs_stepping())
    }

    fn loss(&self, slot: SlotIndex) -> Option<LossReason> {
        let (source, inner) = self.at(slot)?;
        source.backend.loss(inner)
    }

    fn is_shared(&self, slot: SlotIndex) -> bool {
        self.at(slot)
            .is_some_and(|(source, inner)| source.backend.is_shared(inner))
    }

    fn sources(&self) -> Vec<&'static str> {
        let sources = self.sources.iter();
        sources.flat_map(|part| part.backend.sources()).collect()
    }

    fn source(&self, slot: SlotIndex) -> &'static str {
        match self.at(slot) {
            Some((source, inner)) => source.backend.source(inner),
            None => NAME,
        }
    }
}
