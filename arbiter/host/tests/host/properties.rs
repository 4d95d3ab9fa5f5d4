//! Whatever is asked, when, by whom: after each step the arbiter's decisions are held
//! against the naive model.

use std::collections::{BTreeMap, BTreeSet};

use arbiter::{CounterSet, Nanos};
use arbiter_host::{
    BootTime, Cause, Change, Demand, Departure, HeldBefore, HostArbiter, HostPolicy, Lease,
    LeaseId, Outcome, Place, Refusal, Scope, Tenant, TenantId, Terms, Waits,
};
use proptest::prelude::*;

use super::fixture::*;
use super::naive::{Held, Naive, Outside, all_held};

#[derive(Clone, Debug)]
enum Step {
    Ask {
        tenant: u16,
        terms: Terms,
    },
    Release {
        which: usize,
        keep: usize,
    },
    Renew {
        which: usize,
    },
    Revoke {
        which: usize,
        grace: Option<u64>,
    },
    Gone {
        which: usize,
    },
    Pass {
        ms: u64,
    },
    Outside {
        place: u32,
        sets: Vec<CounterSet>,
    },
    Policy {
        kept: bool,
    },
    /// Which lease does not come back, if one does not.
    Restart {
        lost: Option<usize>,
    },
    Claim {
        which: usize,
    },
    /// A thread ends.
    Ends {
        number: u32,
    },
    /// Nothing runs any more in a group, and in those below it.
    Empty {
        group: u64,
    },
}

fn demand() -> impl Strategy<Value = Demand> {
    prop_oneof![
        6 => Just(Demand { pmu: CORE, counters: CounterSet::first(3, 0) }),
        // Some have a counter that is not there.
        3 => (1u64..9).prop_map(|bits| Demand { pmu: CORE, counters: CounterSet::from_bits(bits) }),
        2 => (1u64..4).prop_map(|bits| Demand {
            pmu: CORE,
            counters: CounterSet::from_bits(bits << 32),
        }),
        1 => Just(Demand { pmu: UNCORE, counters: CounterSet::first(2, 0) }),
    ]
}

fn terms_of_any_kind() -> impl Strategy<Value = Terms> {
    let scope = prop_oneof![
        Just(Scope::Cpu),
        proptest::collection::btree_set(1u32..5, 1..3)
            .prop_map(|threads| of_threads(&threads.into_iter().collect::<Vec<_>>())),
        (1u64..7).prop_map(of_group),
        part(),
    ];
    let waits = prop_oneof![
        Just(Waits::No),
        Just(Waits::Always),
        (1u64..400).prop_map(|ms| Waits::For(Nanos(ms * MS))),
    ];
    (
        proptest::collection::vec(demand(), 1..4),
        any::<prop::sample::Index>(),
        prop::sample::select(vec!["0", "1", "0-1", "1-2", "0-3"]),
        scope,
        any::<(bool, bool)>(),
        0u8..3,
        proptest::option::of(1u64..3000),
        waits,
    )
        .prop_map(
            |(demands, least, on, scope, (guaranteed, preemptible), priority, lasts, waits)| {
                Terms {
                    at_least: least.index(demands.len()) + 1,
                    demands,
                    cpus: cpus(on),
                    scope,
                    guaranteed,
                    priority,
                    preemptible,
                    lasts: lasts.map(|ms| Nanos(ms * MS)),
                    waits,
                }
            },
        )
}

/// Part of what a group has.
fn part() -> impl Strategy<Value = Scope> {
    let threads = proptest::collection::btree_set(1u32..5, 1..3);
    (1u64..7, threads, any::<bool>()).prop_map(|(group, threads, with_others)| {
        let most = if with_others { 1 } else { threads.len() };
        let threads: Vec<u32> = threads.into_iter().take(most).collect();
        of_part(group, &threads, with_others)
    })
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0usize..8;
    prop_oneof![
        8 => (0u16..3, terms_of_any_kind()).prop_map(|(tenant, terms)| Step::Ask { tenant, terms }),
        3 => (which(), 0usize..3).prop_map(|(which, keep)| Step::Release { which, keep }),
        2 => which().prop_map(|which| Step::Renew { which }),
        1 => (which(), proptest::option::of(0u64..200))
            .prop_map(|(which, grace)| Step::Revoke { which, grace }),
        1 => which().prop_map(|which| Step::Gone { which }),
        4 => prop_oneof![0u64..20, 50u64..1500].prop_map(|ms| Step::Pass { ms }),
        1 => (0u32..6, proptest::collection::vec(Just(CounterSet::first(3, 0)), 0..3))
            .prop_map(|(place, sets)| Step::Outside { place, sets }),
        1 => any::<bool>().prop_map(|kept| Step::Policy { kept }),
        1 => proptest::option::of(0usize..8).prop_map(|lost| Step::Restart { lost }),
        2 => which().prop_map(|which| Step::Claim { which }),
        2 => (1u32..5).prop_map(|number| Step::Ends { number }),
        1 => (1u64..7).prop_map(|group| Step::Empty { group }),
    ]
}

/// Steps on two CPUs, on which most requests are in each other's way.
fn narrow_step() -> impl Strategy<Value = Step> {
    let counters = prop_oneof![3 => Just(7u64), 1 => 1u64..8];
    let demand = counters.prop_map(|bits| Demand {
        pmu: CORE,
        counters: CounterSet::from_bits(bits),
    });
    let scope = prop_oneof![
        3 => Just(Scope::Cpu),
        3 => (1u64..7).prop_map(of_group),
        2 => part(),
    ];
    let terms = (
        proptest::collection::vec(demand, 1..4),
        any::<prop::sample::Index>(),
        (prop::sample::select(vec!["0", "0", "1", "0-1"]), scope),
        any::<(bool, bool)>(),
        0u8..3,
        prop_oneof![1 => Just(Waits::No), 3 => Just(Waits::Always)],
    );
    let terms = terms.prop_map(
        |(demands, least, (on, scope), (guaranteed, preemptible), priority, waits)| Terms {
            at_least: least.index(demands.len()) + 1,
            scope,
            guaranteed,
            preemptible,
            priority,
            waits,
            ..super::fixture::terms(demands, on)
        },
    );
    prop_oneof![
        6 => (0u16..3, terms).prop_map(|(tenant, terms)| Step::Ask { tenant, terms }),
        1 => (0usize..8, 0usize..3).prop_map(|(which, keep)| Step::Release { which, keep }),
        1 => prop_oneof![Just(100u64), Just(1500)].prop_map(|ms| Step::Pass { ms }),
        1 => (1u64..7).prop_map(|group| Step::Empty { group }),
        1 => (0usize..8).prop_map(|lost| Step::Restart { lost: Some(lost) }),
    ]
}

/// The rules of a world beside who its tenants are: how long a notice is, and to whom each
/// tenant gives way, if not to all.
#[derive(Clone, Debug)]
struct Rules {
    grace: u64,
    give_way_to: [Option<BTreeSet<TenantId>>; 3],
}

fn rules() -> impl Strategy<Value = Rules> {
    let some = proptest::collection::btree_set((0u16..3).prop_map(TenantId), 0..3);
    let to_some = || prop_oneof![2 => Just(None), 1 => some.clone().prop_map(Some)];
    let grace = prop_oneof![Just(0u64), Just(100)];
    (grace, [to_some(), to_some(), to_some()])
        .prop_map(|(grace, give_way_to)| Rules { grace, give_way_to })
}

impl Rules {
    fn applied_to(&self, mut policy: HostPolicy) -> HostPolicy {
        policy.grace = Nanos(self.grace * MS);
        for (tenant, only) in policy.tenants.iter_mut().zip(&self.give_way_to) {
            tenant.gives_way_to.clone_from(only);
        }
        policy
    }
}

/// More changes than one call can have to make for so many leases.
fn too_many(leases: usize) -> usize {
    32 * (leases + 8)
}

/// Whether one is for a group that is in the other's, or for a part of what that has.
fn is_below(one: &Terms, other: &Terms) -> bool {
    let Scope::Group(other) = &other.scope else {
        return false;
    };
    match &one.scope {
        Scope::Cpu | Scope::Thread(_) => false,
        Scope::Group(one) => one.above.contains(&other.id),
        Scope::Part(part) => part.of.id == other.id || part.of.above.contains(&other.id),
    }
}

/// Whether two leases could want one counter, each instead of the other. Of an uncore PMU,
/// wherever they are.
fn compete(one: &Terms, other: &Terms) -> bool {
    if is_below(one, other) || is_below(other, one) {
        return false;
    }
    let meet = one.cpus.meets(&other.cpus);
    one.demands.iter().any(|a| {
        other.demands.iter().any(|b| {
            a.pmu == b.pmu && (meet || a.pmu == UNCORE) && !(a.counters & b.counters).is_empty()
        })
    })
}

/// Whether it is a part of what a group has that has no lease.
fn is_of_nothing(terms: &Terms, before: &[Held]) -> bool {
    let Scope::Part(part) = &terms.scope else {
        return false;
    };
    let mut groups = before
        .iter()
        .filter_map(|held| held.lease.terms.scope.group());
    groups.all(|group| group.id != part.of.id)
}

/// Who goes before whom.
fn rank(terms: &Terms) -> (bool, u8) {
    (terms.guaranteed, terms.priority)
}

/// The arbiter, and what the test knows about it by itself.
struct World {
    host: Host,
    rules: Rules,
    outside: Outside,
    generations: BTreeMap<LeaseId, u64>,
    ended: BTreeSet<LeaseId>,
}

impl World {
    fn new(policy: HostPolicy, rules: Rules) -> Self {
        World {
            host: Host::new(rules.applied_to(policy)),
            rules,
            outside: Vec::new(),
            generations: BTreeMap::new(),
            ended: BTreeSet::new(),
        }
    }

    fn gives_way(&self, lease: &Lease, taker: &Lease) -> bool {
        let only = &self.rules.give_way_to[usize::from(lease.owner.tenant.0)];
        let may_take = |only: &BTreeSet<TenantId>| only.contains(&taker.owner.tenant);
        (lease.terms.preemptible || !lease.terms.guaranteed) && only.as_ref().is_none_or(may_take)
    }

    /// Whether one of `all`, of another tenant, waits for what `lease` wants, and gives it no
    /// way.
    fn comes_last(&self, lease: &Lease, all: &[Held]) -> bool {
        all.iter().map(|held| &held.lease).any(|other| {
            other.owner.tenant != lease.owner.tenant
                && other.is_waiting()
                && other.departure.is_none()
                && (other.terms.preemptible || !other.terms.guaranteed)
                && !self.gives_way(other, lease)
                && compete(&other.terms, &lease.terms)
        })
    }

    fn naive(&self, held: Vec<Held>) -> Naive<'_> {
        Naive {
            pmus: self.host.arbiter.pmus(),
            policy: self.host.arbiter.policy(),
            outside: &self.outside,
            held,
        }
    }

    fn lease(&self, which: usize) -> Option<&Lease> {
        let count = self.host.arbiter.leases().count();
        self.host.arbiter.leases().nth(which % count.max(1))
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Ask { tenant, terms } => self.ask(tenant, terms),
            Step::Release { which, keep } => {
                if let Some(lease) = self.lease(which) {
                    let (id, tenant) = (lease.id, lease.owner.tenant.0);
                    let generation = Some(lease.generation);
                    let (now, out) = (self.host.now, &mut self.host.out);
                    let done =
                        self.host
                            .arbiter
                            .release(id, keep, generation, caller(tenant), now, out);
                    assert_eq!(done, Ok(()));
                }
            }
            Step::Renew { which } => {
                if let Some(lease) = self.lease(which).cloned() {
                    let tenant = lease.owner.tenant.0;
                    let (now, out) = (self.host.now, &mut self.host.out);
                    match self
                        .host
                        .arbiter
                        .renew(lease.id, None, caller(tenant), now, out)
                    {
                        Ok(until) if lease.holds > 0 => {
                            assert_eq!(until, lease.terms.lasts.map(|lasts| now.after(lasts)));
                        }
                        Ok(until) => assert_eq!(until, None),
                        Err(Refusal::Leaving { .. }) => assert!(lease.departure.is_some()),
                        Err(Refusal::Wanted { by }) => {
                            assert!(lease.terms.preemptible || !lease.terms.guaranteed);
                            let by = self.host.arbiter.lease(by).expect("it waits");
                            assert!(by.holds < by.terms.demands.len());
                        }
                        Err(other) => panic!("{other:?}"),
                    }
                }
            }
            Step::Revoke { which, grace } => {
                if let Some(lease) = self.lease(which) {
                    let (id, tenant) = (lease.id, lease.owner.tenant.0);
                    let (now, out) = (self.host.now, &mut self.host.out);
                    let grace = grace.map(|ms| Nanos(ms * MS));
                    let at = self
                        .host
                        .arbiter
                        .revoke(id, grace, caller(tenant), now, out);
                    assert!(at.expect("it is its own") >= now);
                }
            }
            Step::Gone { which } => {
                if let Some(id) = self.lease(which).map(|lease| lease.id) {
                    let (now, out) = (self.host.now, &mut self.host.out);
                    self.host.arbiter.holder_gone(id, now, out);
                    assert_eq!(self.host.holds(id), None);
                }
            }
            Step::Pass { ms } => self.host.pass(ms),
            Step::Outside { place, sets } => {
                let (pmu, cpu) = if place < 4 {
                    (CORE, place)
                } else {
                    (UNCORE, (place - 4) * 2)
                };
                let allowed = self.host.arbiter.pmus()[usize::from(pmu.0)].counters;
                let sets: Vec<CounterSet> = sets.into_iter().map(|set| set & allowed).collect();
                let place = self.host.arbiter.place(pmu, cpu).expect("a CPU");
                let Place { pmu, domain } = place;
                let key = (pmu.0, domain);
                self.outside.retain(|(place, _)| *place != key);
                self.outside.extend(sets.iter().map(|set| (key, *set)));
                let (now, out) = (self.host.now, &mut self.host.out);
                self.host.arbiter.set_outside(place, sets, now, out);
            }
            Step::Policy { kept } => {
                let mut policy = self.rules.applied_to(policy());
                if !kept {
                    policy.tenants[2].minimum = Default::default();
                    policy.tenants[2].maximum = arbiter::PerKind::ALL;
                }
                let (now, out) = (self.host.now, &mut self.host.out);
                self.host
                    .arbiter
                    .set_policy(policy, now, out)
                    .expect("it fits");
            }
            Step::Restart { lost } => {
                let before = &self.host.arbiter;
                let mut leases: Vec<Lease> = before.leases().cloned().collect();
                let lost = lost.and_then(|lost| {
                    let which = lost.checked_rem(leases.len())?;
                    leases.remove(which).terms.scope.group().cloned()
                });
                let mut after = HostArbiter::new(pmus(), before.policy().clone()).expect("it fits");
                for ((pmu, domain), _) in &self.outside {
                    let place = Place {
                        pmu: arbiter_host::PmuId(*pmu),
                        domain: *domain,
                    };
                    let here = self.outside.iter().filter(|(at, _)| *at == (*pmu, *domain));
                    let sets = here.map(|(_, set)| *set).collect();
                    after.set_outside(place, sets, self.host.now, &mut Vec::new());
                }
                let before = HeldBefore {
                    leases,
                    lost: lost.iter().map(|group| group.id).collect(),
                    next: before.next_id(),
                };
                let window = Nanos(300 * MS);
                after.restore(before, window, self.host.now, &mut self.host.out);
                self.host.arbiter = after;
                if let Some(lost) = lost {
                    self.look_below(Scope::Group(lost));
                }
            }
            Step::Claim { which } => {
                if let Some(lease) = self.lease(which) {
                    let (id, tenant) = (lease.id, lease.owner.tenant.0);
                    let generation = lease.generation;
                    let (now, out) = (self.host.now, &mut self.host.out);
                    let done =
                        self.host
                            .arbiter
                            .claim(id, Some(generation), caller(tenant), now, out);
                    assert_eq!(done, Ok(()));
                }
            }
            Step::Ends { number } => self.end_thread(number),
            Step::Empty { group } => self.empty(group),
        }
        self.look();
    }

    /// Nothing is below a group that has no lease any more.
    fn look_below(&self, group: Scope) {
        let mut leases = self.host.arbiter.leases();
        let is_leased = leases.any(|lease| lease.terms.scope == group);
        let mut leases = self.host.arbiter.leases();
        let has_below = leases.any(|lease| lease.terms.scope.is_below(&group));
        assert!(is_leased || !has_below, "below {group:?}");
    }

    /// All leases that are for a thread are told that it has ended.
    fn end_thread(&mut self, number: u32) {
        let ended = thread(number, 0);
        let is_for = |lease: &&Lease| lease.terms.scope.threads().contains(&ended);
        let leases = self.host.arbiter.leases();
        let leases: Vec<Lease> = leases.filter(is_for).cloned().collect();
        let told = leases
            .iter()
            .map(|lease| (lease.id, BTreeSet::from([ended])));
        let (now, out) = (self.host.now, &mut self.host.out);
        self.host.arbiter.threads_ended(&told.collect(), now, out);
        for before in leases {
            let id = before.id;
            let others = before.terms.scope.threads().len() - 1;
            let ends = self.host.out.iter().any(|change| {
                matches!(change, Change::Ended { lease, why: Cause::ThreadsEnded } if lease.id == id)
            });
            assert_eq!(ends, others == 0, "lease {id:?}");
            if let Some(after) = self.host.arbiter.lease(id) {
                assert!(!is_for(&after) && after.terms.scope != Scope::Cpu);
            }
        }
    }

    /// The leases of a group end, and with them those of the groups below it.
    fn empty(&mut self, group: u64) {
        let group = of_group(group);
        let of = |lease: &&Lease| lease.terms.scope == group;
        let leases = self.host.arbiter.leases();
        let ids: Vec<LeaseId> = leases.filter(of).map(|lease| lease.id).collect();
        let (now, out) = (self.host.now, &mut self.host.out);
        self.host.arbiter.end_now(&ids, Cause::GroupEmpty, now, out);
        assert!(ids.iter().all(|id| self.host.holds(*id).is_none()));
        let terms = Terms {
            scope: group,
            ..terms(programmable(1), "0")
        };
        let mut left = self.host.arbiter.leases();
        let has_below = left.any(|lease| is_below(&lease.terms, &terms));
        assert!(ids.is_empty() || !has_below);
    }

    fn ask(&mut self, tenant: u16, terms: Terms) {
        self.host.pass(0);
        let mut leases = self.host.arbiter.leases();
        let has_below = leases.any(|lease| is_below(&lease.terms, &terms));
        drop(leases);
        let before = all_held(&self.host.arbiter);
        let blocked = self.blocked(&terms);
        let next = self.host.arbiter.next_id();
        let outcome = self.host.ask(tenant, terms.clone());
        let lease = Lease::new(
            LeaseId(next),
            owner(tenant),
            terms.clone(),
            self.host.now,
            0,
        );
        let fits = |to| self.naive(before.clone()).fits(&lease, to);
        let most = (terms.at_least..=terms.demands.len())
            .rev()
            .find(|&to| fits(to));
        assert!(!has_below || outcome.is_err(), "{terms:?} {outcome:?}");
        match &outcome {
            Err(Refusal::GroupsBelow { .. }) => assert!(has_below, "{terms:?}"),
            // Nobody waits for a lease of the group.
            Err(Refusal::BeyondGroup { above: None, .. }) if is_of_nothing(&terms, &before) => {}
            Ok(Outcome::Granted { lease, holds }) => {
                assert_eq!(*lease, LeaseId(next));
                assert_eq!(Some(*holds), most, "{terms:?}");
            }
            Ok(Outcome::Waits { .. }) => {
                self.look_at_who_leaves_for(&lease, &before);
                assert_ne!(terms.waits, Waits::No);
                assert!(most.is_none() || blocked, "{terms:?} {outcome:?}");
            }
            Err(
                Refusal::Held { .. }
                | Refusal::Kept { .. }
                | Refusal::Outside { .. }
                | Refusal::BeyondGroup { .. },
            ) => {
                assert_eq!(terms.waits, Waits::No);
                assert_eq!(most, None, "{terms:?} {outcome:?} beside {before:#?}");
            }
            Err(Refusal::OverMaximum { .. }) => assert_eq!(most, None, "{terms:?}"),
            Err(Refusal::Behind { lease }) => {
                assert!(blocked, "{terms:?} {outcome:?}");
                assert!(self.host.arbiter.lease(*lease).is_some());
            }
            Err(Refusal::MoreThanThereIs { .. }) => {
                let nobody = self.naive(Vec::new()).fits(&lease, terms.demands.len());
                assert!(!nobody, "{terms:?}");
            }
            Err(Refusal::NoSuchCounters { counters, .. }) => {
                assert_eq!(counters.bits(), 8);
            }
            Err(Refusal::NotForThreads { .. }) => {
                assert_ne!(terms.scope, Scope::Cpu);
                assert!(terms.demands.iter().any(|demand| demand.pmu == UNCORE));
            }
            Err(other) => panic!("{other:?} of {terms:?}"),
        }
    }

    /// Those who were told just now to leave for `lease` would not be served before it.
    fn look_at_who_leaves_for(&self, lease: &Lease, before: &[Held]) {
        let by = Cause::Preempted { by: lease.id };
        let told = self.host.out.iter().filter_map(|change| match change {
            Change::Announced {
                lease: id,
                departure,
            } if departure.why == by => before.iter().find(|held| held.lease.id == *id),
            _ => None,
        });
        let mut all = before.to_vec();
        all.push(Held {
            lease: lease.clone(),
            holds: 0,
        });
        for Held { lease: other, .. } in told {
            // It leaves with one above it.
            if all
                .iter()
                .any(|above| is_below(&other.terms, &above.lease.terms))
            {
                continue;
            }
            assert!(self.gives_way(other, lease), "{other:?} for {lease:?}");
            let in_vain = self.comes_last(lease, before) && !self.comes_last(other, &all);
            assert!(!in_vain, "{other:?} for {lease:?}");
        }
    }

    /// Whether somebody who waits may keep `terms` from passing: others leave for it, or
    /// it has waited for longer than its patience.
    fn blocked(&self, terms: &Terms) -> bool {
        let patience = self.host.arbiter.policy().patience;
        let leaving = self
            .host
            .arbiter
            .leases()
            .any(|lease| lease.departure.is_some());
        self.host.arbiter.leases().any(|lease| {
            lease.is_waiting()
                && rank(&lease.terms) >= rank(terms)
                && (leaving || self.host.now.since(lease.waits_since) >= patience)
        })
    }

    /// What is true after every step.
    fn look(&mut self) {
        // Without a grace, leases leave now.
        self.host.pass(0);
        let changes = self.host.changes();
        let most = too_many(self.host.arbiter.leases().count() + self.ended.len());
        assert!(changes.len() < most, "it goes on and on: {changes:#?}");
        for change in &changes {
            let id = change.lease();
            assert!(!self.ended.contains(&id), "it had ended: {change:?}");
            match change {
                Change::Holds { generation, .. } => {
                    let before = self.generations.insert(id, *generation).unwrap_or(0);
                    assert!(*generation > before, "{change:?}");
                }
                Change::Ended { why, .. } => {
                    self.ended.insert(id);
                    let told = !matches!(why, Cause::Granted);
                    assert!(told, "{change:?}");
                }
                _ => {}
            }
        }
        let held = all_held(&self.host.arbiter);
        if self.outside.is_empty() {
            let naive = self.naive(held.clone());
            assert!(naive.is_possible(), "more is held than there is");
        }
        for lease in self.host.arbiter.leases() {
            self.look_at(lease, &held);
        }
        let due = self.host.arbiter.deadline();
        assert!(
            due.is_none_or(|due| due > self.host.now),
            "something is overdue: {due:?}"
        );
    }

    /// Where all that a group above holds is to go, who holds something below it was told.
    fn leaves_with_those_above(&self, lease: &Lease, held: &[Held]) {
        let above = held.iter().map(|above| &above.lease);
        let above = above.filter(|above| is_below(&lease.terms, &above.terms));
        for above in above.filter(|above| above.holds > 0 && lease.holds > 0) {
            let id = |lease: &Lease| lease.terms.scope.group().map(|group| group.id);
            let of_it = held.iter().filter(|other| id(&other.lease) == id(above));
            if let Some(Departure { at, to: 0, .. }) = above.departure
                && of_it.filter(|other| other.lease.holds > 0).count() == 1
            {
                let told = lease.departure;
                let told = told.is_some_and(|told| told.to == 0 && told.at <= at);
                assert!(told, "{lease:?} is below {above:?}");
            }
        }
    }

    fn look_at(&self, lease: &Lease, held: &[Held]) {
        let now = self.host.now;
        let terms = &lease.terms;
        assert!(lease.holds == 0 || lease.holds >= terms.at_least);
        assert!(lease.holds <= terms.demands.len());
        assert_eq!(
            lease.until.is_some(),
            terms.lasts.is_some() && lease.holds > 0
        );
        assert!(lease.until.is_none_or(|until| until > now));
        if lease.holds > 0 {
            let naive = self.naive(held.to_vec());
            let is_within = naive.is_within_groups(lease, lease.holds);
            assert!(
                is_within,
                "more than a group above it: {lease:?} of {held:#?}"
            );
        }
        if lease.holds == 0 {
            let unclaimed = lease.claim_by.is_some();
            assert!(
                terms.waits != Waits::No || unclaimed,
                "it waits for nothing: {lease:?}"
            );
        }
        self.leaves_with_those_above(lease, held);
        if let Some(Departure { at, to, why }) = &lease.departure {
            assert!(*at > now && *to < lease.holds);
            if let Cause::Preempted { by } = why {
                let by = self.host.arbiter.lease(*by).expect("it waits");
                assert!(by.is_waiting());
                if held.iter().any(|above| is_below(terms, &above.lease.terms)) {
                    return;
                }
                assert!(rank(&by.terms) > rank(terms), "{by:?} takes from {lease:?}");
                assert!(self.gives_way(lease, by), "{by:?} takes from {lease:?}");
            }
        }
        if !self.outside.is_empty() {
            return;
        }
        assert_eq!(lease.broken, None);
        // Nobody waits for what is free, unless it is kept for somebody before it.
        if lease.is_waiting() && lease.departure.is_none() && !self.blocked_at_all(lease) {
            let naive = self.naive(held.to_vec());
            let least = terms.at_least.max(lease.holds + 1);
            let could = (least..=terms.demands.len()).any(|to| naive.fits(lease, to));
            assert!(!could, "it could be served: {lease:?}");
        }
    }

    fn blocked_at_all(&self, lease: &Lease) -> bool {
        let comes_last = self.comes_last(lease, &all_held(&self.host.arbiter));
        let patience = self.host.arbiter.policy().patience;
        let leaving = self
            .host
            .arbiter
            .leases()
            .any(|other| other.departure.is_some());
        self.host.arbiter.leases().any(|other| {
            other.id != lease.id
                && other.is_waiting()
                && (comes_last || rank(&other.terms) >= rank(&lease.terms))
                && (leaving || self.host.now.since(other.waits_since) >= patience)
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn decisions_are_right(
        rules in rules(),
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        let mut world = World::new(policy(), rules);
        for step in steps {
            world.step(step);
        }
    }

    /// The same where most are in each other's way, and often by a third.
    #[test]
    fn decisions_are_right_in_a_narrow_world(
        rules in rules(),
        steps in proptest::collection::vec(narrow_step(), 1..20),
    ) {
        let mut policy = open_policy();
        policy.tenants.push(Tenant {
            priority: 9,
            ..Tenant::open("c")
        });
        let mut world = World::new(policy, rules);
        for step in steps {
            world.step(step);
        }
    }

    /// Everybody ends or gives back in the end: then nobody waits, and nothing is held.
    #[test]
    fn nobody_waits_for_ever(
        rules in rules(),
        steps in proptest::collection::vec(step(), 1..30),
    ) {
        let mut world = World::new(open_policy(), rules);
        for step in steps {
            let allowed = match &step {
                Step::Ask { tenant, terms } => *tenant < 2 && terms.lasts.is_some(),
                Step::Outside { .. } | Step::Policy { .. } => false,
                _ => true,
            };
            if allowed {
                world.step(step);
            }
        }
        // Each lease lasts for 3 s at most, and nobody renews. There are 30 of them.
        for _ in 0..200 {
            world.host.pass(1000);
            world.look();
        }
        let left: Vec<&Lease> = world.host.arbiter.leases().collect();
        prop_assert!(left.is_empty(), "{left:?}");
    }
}

/// What each of two tenants has of the counters' time, in counters times nanoseconds, while
/// `wanting` always want more than there is, until so many leases have ended.
fn time_had(host: &mut Host, wanting: &[u16], ends: usize) -> [u64; 2] {
    let mut had = [0u64; 2];
    for _ in 0..ends {
        for (tenant, (count, ms)) in (0u16..).zip([(3, 10), (3, 30)]) {
            let of_it = |lease: &&Lease| lease.owner.tenant.0 == tenant;
            while wanting.contains(&tenant) && host.arbiter.leases().filter(of_it).count() < 4 {
                let terms = Terms {
                    waits: Waits::Always,
                    lasts: Some(Nanos(ms * MS)),
                    ..terms(programmable(count), "0")
                };
                host.ask(tenant, terms).expect("it waits");
            }
        }
        let at = host
            .arbiter
            .deadline()
            .expect("leases end")
            .max(BootTime(host.now.0 + 1));
        let passed = at.since(host.now).0;
        for lease in host.arbiter.leases() {
            had[usize::from(lease.owner.tenant.0)] += lease.holds as u64 * passed;
        }
        host.now = at;
        host.arbiter.advance(at, &mut host.out);
    }
    had
}

/// Two tenants that always want more than there is get the counters' time by their
/// shares, whatever the sizes of their requests.
#[test]
fn shares_hold_over_time() {
    let mut host = Host::new(open_policy());
    let had = time_had(&mut host, &[0, 1], 4000);
    let ratio = had[1] as f64 / had[0] as f64;
    assert!(
        (1.9..2.1).contains(&ratio),
        "shares of 1 and 2 got {had:?}: {ratio}"
    );
}

/// Who wanted nothing for a while gets its share from then on, and nothing for the time before.
#[test]
fn who_was_away_has_no_claim_to_that_time() {
    for (away, stays) in [(0u16, 1u16), (1, 0)] {
        let mut host = Host::new(open_policy());
        let alone = time_had(&mut host, &[stays], 1000);
        assert_eq!(alone[usize::from(away)], 0u64, "{alone:?}");
        let had = time_had(&mut host, &[0, 1], 1000);
        let ratio = had[1] as f64 / had[0] as f64;
        assert!(
            (1.8..2.2).contains(&ratio),
            "{away} was away, and shares of 1 and 2 got {had:?}: {ratio}"
        );
    }
}
