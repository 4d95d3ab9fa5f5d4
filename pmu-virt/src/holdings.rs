//! What the guests of a VM have reserved, vCPU by vCPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use arbiter::{CounterSet, PerKind};
use pmu_model::OwnerId;

/// vCPUs of a VM, at most.
const VCPUS: usize = 64;

/// The counters that each vCPU's firmware and kernel hold. All cores of a VM keep room
/// for the most that one of its vCPUs holds, wherever that one is; nobody waits for
/// another to look.
#[derive(Clone, Debug)]
pub struct Holdings(Arc<[Holding; VCPUS]>);

impl Default for Holdings {
    fn default() -> Self {
        Holdings(Arc::new(std::array::from_fn(|_| Holding::default())))
    }
}

/// One vCPU's.
#[derive(Debug, Default)]
struct Holding {
    counters: AtomicU64,
    /// Counters that its guest may want, and one more; 0 if nobody has said so.
    wish: AtomicU8,
}

impl Holdings {
    fn of(&self, vcpu: OwnerId) -> Option<&Holding> {
        self.0.get(usize::try_from(vcpu.0).ok()?)
    }

    /// `vcpu` holds these and no others, and its guest may want so many counters.
    pub(crate) fn note(&self, vcpu: OwnerId, held: CounterSet, wish: usize) {
        if let Some(holding) = self.of(vcpu) {
            holding.counters.store(held.bits(), Ordering::Relaxed);
            let wish = u8::try_from(wish).unwrap_or(u8::MAX).saturating_add(1);
            holding.wish.store(wish, Ordering::Relaxed);
        }
    }

    /// How many counters the guest of `vcpu` may want, wherever that vCPU is.
    pub(crate) fn wish(&self, vcpu: OwnerId) -> Option<usize> {
        let wish = self.of(vcpu)?.wish.load(Ordering::Relaxed);
        wish.checked_sub(1).map(usize::from)
    }

    /// The most programmable counters that one vCPU holds, and the fixed-function ones
    /// that any does.
    pub(crate) fn largest(&self) -> (usize, CounterSet) {
        let held = self.0.iter().map(|holding| {
            let held = CounterSet::from_bits(holding.counters.load(Ordering::Relaxed));
            (PerKind::count(held).programmable, held)
        });
        let (most, all) = held.fold((0, CounterSet::EMPTY), |(most, all), (count, held)| {
            (most.max(count), all | held)
        });
        let fixed = all & CounterSet::first(0, arbiter::MAX_FIXED);
        (usize::from(most), fixed)
    }
}
