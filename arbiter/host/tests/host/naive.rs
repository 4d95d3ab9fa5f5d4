//! Whether counters are enough, the slow way: by every family of the sets that anybody
//! wants counters of.

use arbiter::{CounterSet, PerKind};
use arbiter_host::{
    CpuSet, Demand, HostArbiter, HostPmu, HostPolicy, Lease, PmuId, Scope, TenantId, ThreadId,
};

/// A lease as the model sees it: so many of its demands are held.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) lease: Lease,
    pub(crate) holds: usize,
}

impl Held {
    fn demands(&self, pmu: PmuId) -> impl Iterator<Item = CounterSet> + '_ {
        let held = self.lease.terms.demands[..self.holds].iter();
        held.filter(move |demand| demand.pmu == pmu)
            .map(|demand| demand.counters)
    }
}

/// What outsiders have: a place is a PMU and the index of its domain.
pub(crate) type Outside = Vec<((u16, u32), CounterSet)>;

pub(crate) struct Naive<'a> {
    pub(crate) pmus: &'a [HostPmu],
    pub(crate) policy: &'a HostPolicy,
    pub(crate) outside: &'a Outside,
    pub(crate) held: Vec<Held>,
}

pub(crate) fn all_held(arbiter: &HostArbiter) -> Vec<Held> {
    let held = arbiter.leases().map(|lease| Held {
        lease: lease.clone(),
        holds: lease.holds,
    });
    held.collect()
}

fn kind(set: CounterSet) -> bool {
    PerKind::count(set).fixed > 0
}

impl Naive<'_> {
    /// Whether `lease` could hold `to` beside what the others of `held` hold.
    pub(crate) fn fits(&self, lease: &Lease, to: usize) -> bool {
        let mut model = Naive {
            held: self.held.clone(),
            ..*self
        };
        model.held.retain(|held| held.lease.id != lease.id);
        model.held.push(Held {
            lease: lease.clone(),
            holds: to,
        });
        let new: Vec<Demand> = lease.terms.demands[..to].to_vec();
        model.places().all(|(pmu, domain, cpus)| {
            !cpus.meets(&lease.terms.cpus)
                || model.fits_at(pmu, domain, cpus, true, Some(&new))
                    && model.within_maximum(pmu, cpus, lease.owner.tenant, &new)
        })
    }

    /// Whether all that is held can be, whatever is kept for tenants.
    pub(crate) fn is_possible(&self) -> bool {
        self.places()
            .all(|(pmu, domain, cpus)| self.fits_at(pmu, domain, cpus, false, None))
    }

    fn places(&self) -> impl Iterator<Item = (PmuId, u32, &CpuSet)> {
        (0u16..).zip(self.pmus).flat_map(|(pmu, host)| {
            (0u32..)
                .zip(&host.domains)
                .map(move |(at, cpus)| (PmuId(pmu), at, cpus))
        })
    }

    fn here(&self, cpus: &CpuSet) -> impl Iterator<Item = &Held> {
        self.held
            .iter()
            .filter(move |held| held.lease.terms.cpus.meets(cpus))
    }

    /// Whether everything has a counter at one place while any one thread runs. With `new`
    /// only shortages that it has a part in count.
    fn fits_at(
        &self,
        pmu: PmuId,
        domain: u32,
        cpus: &CpuSet,
        minima: bool,
        new: Option<&[Demand]>,
    ) -> bool {
        let all = self.pmus[usize::from(pmu.0)].counters;
        let of_kind = |fixed: bool| {
            CounterSet::from_iter(
                all.iter()
                    .filter(|counter| kind(CounterSet::from_iter([*counter])) == fixed),
            )
        };
        let mut always: Vec<CounterSet> = Vec::new();
        let there = self
            .outside
            .iter()
            .filter(|(place, _)| *place == (pmu.0, domain));
        always.extend(there.map(|(_, set)| *set));
        let mut threads: Vec<ThreadId> = Vec::new();
        for held in self.here(cpus) {
            match &held.lease.terms.scope {
                Scope::Cpu => always.extend(held.demands(pmu)),
                Scope::Thread(of) => threads.extend(of),
            }
        }
        let mut runs: Vec<Vec<CounterSet>> = vec![Vec::new()];
        for thread in threads {
            let its = self.here(cpus).filter(
                |held| matches!(&held.lease.terms.scope, Scope::Thread(of) if of.contains(&thread)),
            );
            runs.push(its.flat_map(|held| held.demands(pmu)).collect());
        }
        if minima && pmu == PmuId(0) {
            for (id, tenant) in self.policy.all() {
                if tenant.cpus.as_ref().is_some_and(|own| !own.meets(cpus)) {
                    continue;
                }
                let has = |fixed: bool| {
                    let own = self.here(cpus).filter(|held| {
                        held.lease.owner.tenant == id && held.lease.terms.scope == Scope::Cpu
                    });
                    own.flat_map(|held| held.demands(pmu))
                        .filter(|set| kind(*set) == fixed)
                        .count()
                };
                let mut run = Vec::new();
                for (fixed, cpu, thread) in [
                    (
                        false,
                        tenant.minimum.cpu.programmable,
                        tenant.minimum.thread.programmable,
                    ),
                    (true, tenant.minimum.cpu.fixed, tenant.minimum.thread.fixed),
                ] {
                    let missing = usize::from(cpu).saturating_sub(has(fixed));
                    always.extend(std::iter::repeat_n(of_kind(fixed), missing));
                    run.extend(std::iter::repeat_n(of_kind(fixed), usize::from(thread)));
                }
                runs.push(run);
            }
        }
        let new: Option<Vec<CounterSet>> = new.map(|new| {
            new.iter()
                .filter(|demand| demand.pmu == pmu)
                .map(|demand| demand.counters)
                .collect()
        });
        runs.iter().all(|run| {
            let mut demands = always.clone();
            demands.extend(run);
            enough(&demands, new.as_deref())
        })
    }

    fn within_maximum(&self, pmu: PmuId, cpus: &CpuSet, tenant: TenantId, new: &[Demand]) -> bool {
        if new.iter().all(|demand| demand.pmu != pmu) {
            return true;
        }
        let Some(rules) = self.policy.tenant(tenant) else {
            return true;
        };
        [(false, rules.maximum.programmable), (true, rules.maximum.fixed)].iter().all(
            |&(fixed, most)| {
                let own = || self.here(cpus).filter(|held| held.lease.owner.tenant == tenant);
                let count = |held: &Held| {
                    held.demands(pmu).filter(|set| kind(*set) == fixed).count()
                };
                let whole: usize =
                    own().filter(|held| held.lease.terms.scope == Scope::Cpu).map(count).sum();
                let threads = own().flat_map(|held| match &held.lease.terms.scope {
                    Scope::Cpu => Vec::new(),
                    Scope::Thread(of) => of.clone(),
                });
                let busiest = threads.map(|thread| {
                    own()
                        .filter(|held| {
                            matches!(&held.lease.terms.scope, Scope::Thread(of) if of.contains(&thread))
                        })
                        .map(count)
                        .sum()
                });
                let busiest: usize = busiest.max().unwrap_or(0);
                most == u8::MAX || whole + busiest <= usize::from(most)
            },
        )
    }
}

/// Whether each demand finds a counter of its own. With `new`, whether those that share
/// counters with one of them, directly or by others, do.
fn enough(demands: &[CounterSet], new: Option<&[CounterSet]>) -> bool {
    let mut sets: Vec<CounterSet> = demands.to_vec();
    sets.sort_by_key(|set| set.bits());
    sets.dedup();
    (1u32..1 << sets.len()).all(|family| {
        let family: Vec<CounterSet> = (0..sets.len())
            .filter(|at| family & (1 << at) != 0)
            .map(|at| sets[at])
            .collect();
        let all = family.iter().fold(CounterSet::EMPTY, |all, set| all | *set);
        // A family of two parts that have nothing in common is looked at by its parts.
        let mut part = family[0];
        for _ in &family {
            for set in &family {
                if !(*set & part).is_empty() {
                    part = part | *set;
                }
            }
        }
        if part != all {
            return true;
        }
        let confined = |set: &&CounterSet| (**set & !all).is_empty();
        let has_part = new.is_none_or(|new| new.iter().any(|set| confined(&set)));
        !has_part || demands.iter().filter(confined).count() <= all.len() as usize
    })
}

#[test]
fn sets_that_share_counters_are_looked_at_together() {
    let set = CounterSet::from_bits;
    assert!(enough(&[set(1), set(3)], None));
    assert!(!enough(&[set(1), set(3), set(3)], None));
    assert!(!enough(&[set(3), set(6), set(5), set(7)], None));
    // What was too much before the new one does not count.
    assert!(enough(&[set(1), set(1), set(2)], Some(&[set(2)])));
    assert!(!enough(&[set(1), set(1), set(3)], Some(&[set(3)])));
}
