//! Users who had an event count after its lease had ended. The kernel takes no descriptor
//! back, so that is prevented by its price: such a user has no leases and no events until an
//! operator says so, and what it has taken is an outsider's, which nobody else is promised.

use std::collections::{BTreeMap, BTreeSet};

use arbiter::{CounterSet, PerKind};
use arbiter_host::{CpuSet, GroupId, HostArbiter, LeaseId, OutsiderKind, Place, PmuId, Reason};
use serde_json::{Value, json};
use umpire_lease as wire;

use super::said::Denial;
use crate::journal::{Barred, Entry};

/// A counter that somebody has taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) uid: u32,
    pub(crate) pid: u32,
    pub(crate) lease: LeaseId,
    pub(crate) pmu: PmuId,
    pub(crate) counters: CounterSet,
    pub(crate) by: TakenBy,
    pub(crate) cpu: Option<u32>,
}

/// What an event that is taken counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TakenBy {
    /// All that runs on its CPU.
    Cpu,
    Thread(u32),
    /// A thread of a control group, and what it has started: each of these may have all that the
    /// group has.
    Group(GroupId),
}

/// Who has taken something, with which lease, and of which PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Taker {
    uid: u32,
    pid: u32,
    lease: LeaseId,
    pmu: PmuId,
}

/// What became another's with what is taken now.
#[derive(Debug)]
pub(super) struct Moved {
    come: Vec<Taker>,
    gone: Vec<Taker>,
    pub(super) places: Vec<Place>,
}

impl Moved {
    /// What the audit has of it: who is an outsider with what had been lent to it. `tenant`: of a
    /// lease, or of a user where that has ended.
    pub(super) fn records<'a>(
        &self,
        arbiter: &HostArbiter,
        tenant: impl Fn(LeaseId, u32) -> Option<&'a str>,
    ) -> Vec<Value> {
        let come = self.come.iter().map(|one| ("outsider", one));
        let gone = self.gone.iter().map(|one| ("outsider-gone", one));
        let record = |(event, one): (&str, &Taker)| {
            let pmu = arbiter.pmus().get(usize::from(one.pmu.0));
            json!({
                "event": event,
                "uid": one.uid,
                "pid": one.pid,
                "lease": one.lease.0,
                "tenant": tenant(one.lease, one.uid),
                "pmu": pmu.map(|pmu| pmu.name.as_str()),
            })
        };
        come.chain(gone).map(record).collect()
    }
}

/// For each user and process how many events, and where.
pub(super) type Takers = BTreeMap<(u32, u32), (u32, CpuSet)>;

/// Those users, and what they have.
#[derive(Debug, Default)]
pub(super) struct Bars {
    users: BTreeMap<u32, Barred>,
    taken: Vec<Taken>,
    /// What that comes to.
    at: BTreeMap<Place, Vec<CounterSet>>,
    /// Users that were forgiven, of whom the broker does not know yet.
    forgiven: Vec<u32>,
}

impl Bars {
    /// Takes over what the journal has.
    pub(super) fn restore(&mut self, users: BTreeMap<u32, Barred>) {
        self.users = users;
    }

    /// Bars a user. `false`: it is barred.
    pub(super) fn add(&mut self, barred: &Barred) -> bool {
        if self.has(barred.uid) {
            return false;
        }
        self.users.insert(barred.uid, barred.clone());
        true
    }

    pub(super) fn has(&self, uid: u32) -> bool {
        self.users.contains_key(&uid)
    }

    /// How many users there are.
    pub(super) fn len(&self) -> usize {
        self.users.len()
    }

    /// # Errors
    /// The user is barred.
    pub(super) fn check(&self, uid: u32) -> Result<(), Denial> {
        let Some(barred) = self.users.get(&uid) else {
            return Ok(());
        };
        let why = format!(
            "process {} of this user had an event count after its lease {} had ended: the user \
             gets no leases and no events until an operator lifts it (umpire pardon {uid})",
            barred.pid, barred.lease
        );
        Err(wire::Refusal::of(Reason::Barred, why).into())
    }

    /// An operator lifts it.
    ///
    /// # Errors
    /// The user is not barred.
    pub(super) fn pardon(&mut self, uid: u32) -> Result<(), Denial> {
        if self.users.remove(&uid).is_none() {
            return Err(Denial::wrong(format!(
                "user {uid} is not barred; those who are: umpire who"
            )));
        }
        self.forgiven.push(uid);
        Ok(())
    }

    /// Users that were forgiven since this was asked last.
    pub(super) fn take_forgiven(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.forgiven)
    }

    /// What the journal has of them.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> {
        self.users.values().cloned().map(Entry::Barred)
    }

    /// The users, as they are shown.
    pub(super) fn shown(&self) -> impl Iterator<Item = wire::Outsider> {
        self.users.values().map(|barred| wire::Outsider {
            what: OutsiderKind::Barred,
            name: format!(
                "user {uid}, who had an event count after lease {lease} had ended, gets nothing \
                 until: umpire pardon {uid}",
                uid = barred.uid,
                lease = barred.lease
            ),
            uid: Some(barred.uid),
            ..wire::Outsider::default()
        })
    }

    /// What is taken now. `None`: that is as it was.
    pub(super) fn set_taken(&mut self, taken: Vec<Taken>, arbiter: &HostArbiter) -> Option<Moved> {
        if self.taken == taken {
            return None;
        }
        let at = taken_at(&taken, arbiter);
        let takers = |taken: &[Taken]| -> BTreeSet<Taker> {
            let taken = taken.iter();
            taken
                .map(|one| Taker {
                    uid: one.uid,
                    pid: one.pid,
                    lease: one.lease,
                    pmu: one.pmu,
                })
                .collect()
        };
        let (before, now) = (takers(&self.taken), takers(&taken));
        let was_at = std::mem::replace(&mut self.at, at);
        self.taken = taken;
        Some(Moved {
            come: now.difference(&before).copied().collect(),
            gone: before.difference(&now).copied().collect(),
            places: was_at.into_keys().chain(self.at.keys().copied()).collect(),
        })
    }

    /// What outsiders have of a place: as it was measured, and at least what is taken.
    pub(super) fn outside(&self, place: Place, measured: &[CounterSet]) -> Vec<CounterSet> {
        let mut outside = measured.to_vec();
        let is_fixed = |set: &CounterSet| PerKind::count(*set).fixed > 0;
        for fixed in [false, true] {
            let taken = self.at.get(&place).into_iter().flatten();
            let taken = taken.filter(|set| is_fixed(set) == fixed);
            let known = outside.iter().filter(|set| is_fixed(set) == fixed).count();
            outside.extend(taken.skip(known).copied().collect::<Vec<_>>());
        }
        outside
    }

    /// Processes that have taken counters.
    pub(super) fn takers(&self, arbiter: &HostArbiter) -> Takers {
        let mut takers = Takers::new();
        for one in &self.taken {
            let (events, cpus) = takers.entry((one.uid, one.pid)).or_default();
            *events += 1;
            match one.cpu {
                Some(cpu) => cpus.insert(cpu),
                None if *events > 1 => {}
                None => {
                    let pmu = arbiter.pmus().get(usize::from(one.pmu.0));
                    let all = pmu.into_iter().flat_map(|pmu| &pmu.domains);
                    all.flat_map(CpuSet::iter).for_each(|cpu| cpus.insert(cpu));
                }
            }
        }
        takers
    }
}

/// What is taken of each place. Threads share a counter in time, as groups do: it is what that one
/// has which has most, and what is of the whole CPU.
fn taken_at(taken: &[Taken], arbiter: &HostArbiter) -> BTreeMap<Place, Vec<CounterSet>> {
    let mut anywhere: BTreeMap<(PmuId, TakenBy), Vec<CounterSet>> = BTreeMap::new();
    let mut here: BTreeMap<Place, BTreeMap<TakenBy, Vec<CounterSet>>> = BTreeMap::new();
    for one in taken {
        match (one.cpu, one.by) {
            // There is no event of nothing.
            (None, TakenBy::Cpu) => {}
            (None, by) => {
                anywhere
                    .entry((one.pmu, by))
                    .or_default()
                    .push(one.counters);
            }
            (Some(cpu), by) => {
                let place = arbiter.place(one.pmu, cpu);
                let threads = place.map(|place| here.entry(place).or_default());
                if let Some(threads) = threads {
                    threads.entry(by).or_default().push(one.counters);
                }
            }
        }
    }
    let mut at = BTreeMap::new();
    for (id, pmu) in (0u16..).map(PmuId).zip(arbiter.pmus()) {
        let of_pmu = anywhere.iter().filter(|((pmu, _), _)| *pmu == id);
        let most = of_pmu.max_by_key(|(_, sets)| sets.len());
        let most = most.map(|(_, sets)| sets.clone()).unwrap_or_default();
        for domain in 0..u32::try_from(pmu.domains.len()).unwrap_or(0) {
            let place = Place { pmu: id, domain };
            let mut threads = here.remove(&place).unwrap_or_default();
            let mut taken = threads.remove(&TakenBy::Cpu).unwrap_or_default();
            let also = threads.into_iter().map(|(by, mut sets)| {
                let wherever = anywhere.get(&(id, by));
                sets.extend(wherever.into_iter().flatten());
                sets
            });
            let also = also.chain([most.clone()]).max_by_key(Vec::len);
            taken.extend(also.into_iter().flatten());
            taken.truncate(pmu.counters.len() as usize);
            if !taken.is_empty() {
                at.insert(place, taken);
            }
        }
    }
    at
}
