//! What the guests of a VM have reserved, vCPU by vCPU.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arbiter::{CounterId, CounterSet, MAX_PROGRAMMABLE, NamedEvent};
use pmu_model::OwnerId;

/// vCPUs of a VM, at most.
const VCPUS: usize = 64;

/// The counters that each vCPU's firmware and kernel hold. All cores of a VM keep room
/// for the most that one of its vCPUs holds, wherever that one is; nobody waits for
/// another to look.
#[derive(Clone, Debug)]
pub struct Holdings(Arc<Vm>);

#[derive(Debug)]
struct Vm {
    vcpus: [Holding; VCPUS],
    /// Some vCPU has named an event, now or before.
    names: AtomicBool,
}

impl Default for Holdings {
    fn default() -> Self {
        Holdings(Arc::new(Vm {
            vcpus: std::array::from_fn(|_| Holding::default()),
            names: AtomicBool::new(false),
        }))
    }
}

/// One vCPU's.
#[derive(Debug, Default)]
struct Holding {
    counters: AtomicU64,
    /// Counters that its guest may want, and one more; 0 if nobody has said so.
    wish: AtomicU8,
    /// The event for which each programmable one is held, as a select with [`NAMED`]; 0
    /// for any. There from the first one on that it names.
    events: OnceLock<Box<Events>>,
}

type Events = [AtomicU64; MAX_PROGRAMMABLE as usize];

/// What a vCPU holds: each counter with the event that was named for it.
#[cfg(feature = "contexts")]
pub(crate) type Held = Vec<(CounterId, Option<NamedEvent>)>;

/// No select has this bit.
const NAMED: u64 = 1 << 63;

#[cfg(feature = "contexts")]
impl Holding {
    fn held(&self) -> CounterSet {
        CounterSet::from_bits(self.counters.load(Ordering::Relaxed))
    }

    fn event(&self, counter: CounterId) -> Option<NamedEvent> {
        let CounterId::Programmable(n) = counter else {
            return None;
        };
        let events = self.events.get()?;
        let word = events.get(usize::from(n))?.load(Ordering::Relaxed);
        NamedEvent::of_select(word ^ NAMED)
    }
}

impl Holdings {
    fn of(&self, vcpu: OwnerId) -> Option<&Holding> {
        self.0.vcpus.get(usize::try_from(vcpu.0).ok()?)
    }

    /// `vcpu` holds these and no others, each for the event that was named for it, and its
    /// guest may want so many counters.
    pub(crate) fn note(
        &self,
        vcpu: OwnerId,
        held: CounterSet,
        event: impl Fn(CounterId) -> Option<NamedEvent>,
        wish: usize,
    ) {
        let Some(holding) = self.of(vcpu) else { return };
        let names = held.iter().any(|counter| event(counter).is_some());
        if names || holding.events.get().is_some() {
            let events = holding.events.get_or_init(Box::default);
            for (n, known) in (0..).zip(events.iter()) {
                let named = event(CounterId::Programmable(n));
                let word = named.map_or(0, |event| event.select() | NAMED);
                known.store(word, Ordering::Relaxed);
            }
            self.0.names.store(true, Ordering::Relaxed);
        }
        holding.counters.store(held.bits(), Ordering::Relaxed);
        let wish = u8::try_from(wish).unwrap_or(u8::MAX).saturating_add(1);
        holding.wish.store(wish, Ordering::Relaxed);
    }
}

/// For cores, which promise contexts what that leaves.
#[cfg(feature = "contexts")]
impl Holdings {
    /// How many counters the guest of `vcpu` may want, wherever that vCPU is.
    pub(crate) fn wish(&self, vcpu: OwnerId) -> Option<usize> {
        let wish = self.of(vcpu)?.wish.load(Ordering::Relaxed);
        wish.checked_sub(1).map(usize::from)
    }

    /// The most programmable counters that one vCPU holds.
    pub(crate) fn most(&self) -> u8 {
        let held = self.0.vcpus.iter().map(Holding::held);
        let counts = held.map(|held| arbiter::PerKind::count(held).programmable);
        counts.max().unwrap_or(0)
    }

    /// The most programmable counters that one vCPU holds which has named no event, and the
    /// fixed-function ones that any does.
    pub(crate) fn largest(&self) -> (usize, CounterSet) {
        let held = self.0.vcpus.iter().map(|holding| {
            let held = holding.held();
            let names = held.iter().any(|counter| holding.event(counter).is_some());
            let count = if names {
                0
            } else {
                arbiter::PerKind::count(held).programmable
            };
            (count, held)
        });
        let (most, all) = held.fold((0, CounterSet::EMPTY), |(most, all), (count, held)| {
            (most.max(count), all | held)
        });
        let fixed = all & CounterSet::first(0, arbiter::MAX_FIXED);
        (usize::from(most), fixed)
    }

    /// The vCPUs that hold counters for events that they named, with all that they hold,
    /// each with its event.
    pub(crate) fn named(&self) -> Vec<(OwnerId, Held)> {
        if !self.0.names.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let vcpus = (0..).map(OwnerId).zip(&self.0.vcpus);
        let held = vcpus.map(|(vcpu, holding)| {
            let held = holding.held().iter();
            let held = held.map(|counter| (counter, holding.event(counter)));
            (vcpu, held.collect::<Held>())
        });
        held.filter(|(_, held)| held.iter().any(|(_, event)| event.is_some()))
            .collect()
    }
}
