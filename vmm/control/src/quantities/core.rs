//! The quantities of a core that vCPUs share.

use std::collections::BTreeMap;

use pmu_virt::perfmon::{Quantities, VirtualPmd};

use super::clock::monotonic_ns;

/// Quantities of a vCPU or core at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    values: BTreeMap<u16, u64>,
}

impl Snapshot {
    /// The quantities of `source` now.
    #[must_use]
    pub fn of(source: &dyn Quantities) -> Self {
        let known = |&which: &VirtualPmd| Some((which.pmd(), source.read(which)?));
        let values = VirtualPmd::ALL.iter().filter_map(known).collect();
        Self { values }
    }
}

impl Quantities for Snapshot {
    fn read(&self, which: VirtualPmd) -> Option<u64> {
        self.values.get(&which.pmd()).copied()
    }
}

/// The sum of what vCPUs did while a core had them. It never goes back, whichever
/// vCPUs come and go. A vCPU is named by its number.
#[derive(Debug, Default)]
pub struct CoreQuantities {
    /// Of those that the core has, as of their arrival.
    here: BTreeMap<usize, Snapshot>,
    /// Of those that have left.
    gone: BTreeMap<u16, u64>,
    /// Quantities that some vCPU did not know, so that nobody knows the sum.
    unknown: Vec<VirtualPmd>,
}

/// Whether a quantity adds up over vCPUs. Guest memory is the whole machine's, and so is time.
fn adds_up(which: VirtualPmd) -> bool {
    !matches!(which, VirtualPmd::GuestMemory | VirtualPmd::Clock) && !which.is_of_overflow()
}

impl CoreQuantities {
    /// The core has vCPU `id` from now on.
    pub fn arrive(&mut self, id: usize, now: Snapshot) {
        self.here.insert(id, now);
    }

    /// The core has vCPU `id` no more.
    pub fn leave(&mut self, id: usize, now: &Snapshot) {
        let Some(before) = self.here.remove(&id) else {
            return;
        };
        for &which in VirtualPmd::ALL {
            match (adds_up(which), passed(which, &before, now)) {
                (true, Some(passed)) => *self.gone.entry(which.pmd()).or_default() += passed,
                (true, None) if !self.unknown.contains(&which) => self.unknown.push(which),
                (true, None) => {}
                (false, _) => {
                    let value = now.read(which).map(|value| (which.pmd(), value));
                    self.gone.extend(value);
                }
            }
        }
    }

    /// The core's quantities now. `now` gives those of a vCPU that the core has.
    pub fn read<'a>(&self, now: impl Fn(usize) -> Option<Snapshot> + 'a) -> Snapshot {
        let here: Vec<_> = self
            .here
            .iter()
            .map(|(id, before)| (before, now(*id).unwrap_or_default()))
            .collect();
        let gone = |which: VirtualPmd| self.gone.get(&which.pmd()).copied();
        let value = |which: VirtualPmd| {
            if which == VirtualPmd::Clock {
                return Some(monotonic_ns());
            }
            if !adds_up(which) {
                let last = here.iter().find_map(|(_, now)| now.read(which));
                return last.or_else(|| gone(which));
            }
            if self.unknown.contains(&which) {
                return None;
            }
            here.iter()
                .map(|(before, now)| passed(which, before, now))
                .try_fold(gone(which).unwrap_or(0), |sum, passed| Some(sum + passed?))
        };
        let known = |&which: &VirtualPmd| Some((which.pmd(), value(which)?));
        Snapshot {
            values: VirtualPmd::ALL.iter().filter_map(known).collect(),
        }
    }
}

fn passed(which: VirtualPmd, before: &Snapshot, now: &Snapshot) -> Option<u64> {
    Some(now.read(which)?.saturating_sub(before.read(which)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Exits(u64);

    impl Quantities for Exits {
        fn read(&self, which: VirtualPmd) -> Option<u64> {
            match which {
                VirtualPmd::Exits => Some(self.0),
                VirtualPmd::GuestMemory => Some(4096 * self.0),
                _ => None,
            }
        }
    }

    fn exits(exits: u64) -> Snapshot {
        Snapshot::of(&Exits(exits))
    }

    #[test]
    fn a_core_has_the_sum_of_what_was_done_on_it() {
        let mut core = CoreQuantities::default();
        let check = |core: &CoreQuantities, now: &[(usize, u64)], expected: u64| {
            let of = |id: usize| now.iter().find(|(n, _)| *n == id).map(|(_, n)| exits(*n));
            let read = core.read(of);
            assert_eq!(read.read(VirtualPmd::Exits), Some(expected), "{now:?}");
        };
        core.arrive(0, exits(100));
        check(&core, &[(0, 100)], 0);
        core.arrive(1, exits(7));
        check(&core, &[(0, 130), (1, 9)], 32);
        core.leave(0, &exits(140));
        check(&core, &[(1, 9)], 42);
        // What vCPU 0 did elsewhere is not this core's.
        core.arrive(0, exits(1000));
        check(&core, &[(0, 1001), (1, 9)], 43);
        core.leave(1, &exits(10));
        core.leave(0, &exits(1001));
        check(&core, &[], 44);
    }

    #[test]
    fn what_one_vcpu_does_not_know_nobody_knows() {
        let mut core = CoreQuantities::default();
        core.arrive(0, exits(1));
        let read = core.read(|_| Some(exits(2)));
        assert_eq!(read.read(VirtualPmd::RunTime), None);
        core.leave(0, &exits(2));
        let read = core.read(|_| None);
        assert_eq!(read.read(VirtualPmd::RunTime), None);
        // The machine's memory is no sum: its last value stays.
        assert_eq!(read.read(VirtualPmd::GuestMemory), Some(2 * 4096));
    }
}
