//! What the guests of a VM have reserved, vCPU by vCPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arbiter::{CounterSet, PerKind};
use pmu_model::OwnerId;

/// vCPUs of a VM, at most.
const VCPUS: usize = 64;

/// The counters that each vCPU's firmware and kernel hold. All cores of a VM keep room
/// for the most that one of its vCPUs holds, wherever that one is; nobody waits for
/// another to look.
#[derive(Clone, Debug)]
pub struct Holdings(Arc<[AtomicU64; VCPUS]>);

impl Default for Holdings {
    fn default() -> Self {
        Holdings(Arc::new(std::array::from_fn(|_| AtomicU64::new(0))))
    }
}

impl Holdings {
    /// `vcpu` holds these and no others.
    pub(crate) fn note(&self, vcpu: OwnerId, held: CounterSet) {
        let word = usize::try_from(vcpu.0).ok().and_then(|at| self.0.get(at));
        if let Some(word) = word {
            word.store(held.bits(), Ordering::Relaxed);
        }
    }

    /// The most programmable counters that one vCPU holds, and the fixed-function ones
    /// that any does.
    pub(crate) fn largest(&self) -> (usize, CounterSet) {
        let held = self.0.iter().map(|word| {
            let held = CounterSet::from_bits(word.load(Ordering::Relaxed));
            (PerKind::count(held).programmable, held)
        });
        let (most, all) = held.fold((0, CounterSet::EMPTY), |(most, all), (count, held)| {
            (most.max(count), all | held)
        });
        let fixed = all & CounterSet::first(0, arbiter::MAX_FIXED);
        (usize::from(most), fixed)
    }
}
