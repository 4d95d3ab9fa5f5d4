//! Whether counters are enough, the slow way: by every family of the sets that anybody
//! wants counters of.

use arbiter::{CounterSet, PerKind};
use arbiter_host::{
    CpuSet, Demand, Group, GroupId, HostArbiter, HostPmu, HostPolicy, Lease, Part, PmuId, Scope,
    TenantId, ThreadId,
};

/// A lease as the model sees it: so many of its demands are held.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) lease: Lease,
    pub(crate) holds: usize,
}

impl Held {
    fn group(&self) -> Option<&Group> {
        self.lease.terms.scope.group().map(AsRef::as_ref)
    }

    /// Whether it holds something for `group` itself.
    fn is_of(&self, group: GroupId) -> bool {
        self.holds > 0 && self.group().is_some_and(|own| own.id == group)
    }

    /// Whether it holds something on the way from below `above` down to `to`.
    fn is_between(&self, above: GroupId, to: &Way) -> bool {
        let on_the_way = |id: &GroupId| to.groups.contains(id);
        let is_between = match &self.lease.terms.scope {
            Scope::Cpu | Scope::Thread(_) => false,
            Scope::Group(own) => own.above.contains(&above) && on_the_way(&own.id),
            // Whatever its holder runs there may run on the way.
            Scope::Part(part) if part.with_others => {
                let is_in = part.of.id == above || part.of.above.contains(&above);
                is_in && on_the_way(&part.of.id)
            }
            Scope::Part(part) => {
                let is_to =
                    |thread| to.groups.last() == Some(&part.of.id) && part.threads.contains(thread);
                on_the_way(&above) && to.thread.as_ref().is_some_and(is_to)
            }
        };
        self.holds > 0 && is_between
    }

    /// The ways down to what it is for.
    fn ways(&self) -> Vec<Way> {
        let to = |group: &Group, thread| Way {
            groups: group.above.iter().chain([&group.id]).copied().collect(),
            thread,
        };
        match &self.lease.terms.scope {
            Scope::Cpu | Scope::Thread(_) => Vec::new(),
            Scope::Group(group) => vec![to(group, None)],
            Scope::Part(part) => {
                let Part {
                    of,
                    threads,
                    with_others,
                } = &**part;
                let threads = threads.iter().filter(|_| !with_others);
                let all = with_others.then_some(None).into_iter();
                all.chain(threads.map(|thread| Some(*thread)))
                    .map(|thread| to(of, thread))
                    .collect()
            }
        }
    }

    fn demands(&self, pmu: PmuId) -> impl Iterator<Item = CounterSet> + '_ {
        let held = self.lease.terms.demands[..self.holds].iter();
        held.filter(move |demand| demand.pmu == pmu)
            .map(|demand| demand.counters)
    }
}

/// From the outermost group down to one, and to a thread in it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Way {
    groups: Vec<GroupId>,
    thread: Option<ThreadId>,
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
        }) && model.is_within_groups(lease, to)
    }

    /// Whether what a lease holds of its first `to` demands is no more than each group above it
    /// has that has a lease, together with what else is taken out of that.
    pub(crate) fn is_within_groups(&self, lease: &Lease, to: usize) -> bool {
        let (in_groups, is_part) = match &lease.terms.scope {
            Scope::Cpu | Scope::Thread(_) => return true,
            Scope::Group(group) => (group.above.clone(), false),
            Scope::Part(part) => ([&part.of.above[..], &[part.of.id]].concat(), true),
        };
        let asked = |above: &GroupId| {
            let is_of = |held: &Held| held.group().is_some_and(|own| own.id == *above);
            self.held.iter().any(is_of)
        };
        let above: Vec<GroupId> = in_groups.into_iter().filter(asked).collect();
        let hold = |above: &GroupId| self.held.iter().any(|held| held.is_of(*above));
        if !above.iter().all(hold) || is_part && above.is_empty() {
            return false;
        }
        let has_pmu = |pmu| {
            lease.terms.demands[..to]
                .iter()
                .any(|demand| demand.pmu == pmu)
        };
        let mut here = self.places();
        above.is_empty()
            || here.all(|(pmu, _, cpus)| {
                !has_pmu(pmu)
                    || !cpus.meets(&lease.terms.cpus)
                    || self.is_within(&above, &lease.terms.scope, pmu, cpus)
            })
    }

    fn is_within(&self, above: &[GroupId], scope: &Scope, pmu: PmuId, cpus: &CpuSet) -> bool {
        let count = |is_in: &dyn Fn(&Held) -> bool, fixed: bool| -> usize {
            let those = self.here(cpus).filter(|held| is_in(held));
            those
                .flat_map(|held| held.demands(pmu))
                .filter(|set| kind(*set) == fixed)
                .count()
        };
        let is_by_it = |way: &Way| match scope {
            Scope::Cpu | Scope::Thread(_) => false,
            Scope::Group(group) => way.groups.contains(&group.id),
            Scope::Part(part) if part.with_others => way.groups.contains(&part.of.id),
            Scope::Part(part) => way.thread.is_some_and(|one| {
                part.threads.contains(&one) && way.groups.last() == Some(&part.of.id)
            }),
        };
        let ways = self
            .here(cpus)
            .filter(|held| held.holds > 0)
            .flat_map(Held::ways);
        let ways: Vec<Way> = ways.filter(is_by_it).collect();
        let is_as_many = |above: &GroupId| {
            [false, true].into_iter().all(|fixed| {
                let has = count(&|held| held.is_of(*above), fixed);
                let asked = |to: &Way| count(&|held| held.is_between(*above, to), fixed);
                ways.iter().map(asked).all(|asked| asked <= has)
            })
        };
        // Each is for counters of which one above has some.
        let has_some = |above: &GroupId, set: CounterSet| {
            let own = self.here(cpus).filter(|held| held.is_of(*above));
            let mut has = own.flat_map(|held| held.demands(pmu));
            has.any(|one| !(one & set).is_empty())
        };
        let has_of_each = |above: &GroupId| {
            let is_between = |held: &&Held| ways.iter().any(|way| held.is_between(*above, way));
            let between = self.here(cpus).filter(is_between);
            let mut sets = between.flat_map(|held| held.demands(pmu));
            sets.all(|set| has_some(above, set))
        };
        above
            .iter()
            .all(|above| is_as_many(above) && has_of_each(above))
    }

    /// What runs at a time at one place, in groups: for each group that is in no other with a
    /// lease, those for itself, and those on the way down to each one below it.
    fn runs_of_groups(&self, cpus: &CpuSet) -> Vec<Vec<&Held>> {
        let groups: Vec<&Group> = self
            .here(cpus)
            .filter(|held| held.holds > 0)
            .filter_map(Held::group)
            .collect();
        let is_leased = |id: &GroupId| groups.iter().any(|group| group.id == *id);
        let roots = groups
            .iter()
            .filter(|group| !group.above.iter().any(is_leased));
        let mut runs = Vec::new();
        for root in roots {
            runs.push(self.here(cpus).filter(|held| held.is_of(root.id)).collect());
            let ways = self
                .here(cpus)
                .filter(|held| held.holds > 0)
                .flat_map(Held::ways);
            for to in ways.filter(|way| way.groups.contains(&root.id)) {
                let between = self.here(cpus).filter(|held| held.is_between(root.id, &to));
                runs.push(between.collect());
            }
        }
        runs
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
                Scope::Group(_) | Scope::Part(_) => {}
            }
        }
        let mut runs: Vec<Vec<CounterSet>> = vec![Vec::new()];
        for thread in threads {
            let its = self.here(cpus).filter(
                |held| matches!(&held.lease.terms.scope, Scope::Thread(of) if of.contains(&thread)),
            );
            runs.push(its.flat_map(|held| held.demands(pmu)).collect());
        }
        for run in self.runs_of_groups(cpus) {
            runs.push(run.into_iter().flat_map(|held| held.demands(pmu)).collect());
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
                    Scope::Cpu | Scope::Group(_) | Scope::Part(_) => Vec::new(),
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
                let groups = self.runs_of_groups(cpus);
                let groups = groups.iter().map(|run| -> usize {
                    let own = run.iter().filter(|held| held.lease.owner.tenant == tenant);
                    own.map(|held| count(held)).sum()
                });
                let busiest: usize = busiest.chain(groups).max().unwrap_or(0);
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
