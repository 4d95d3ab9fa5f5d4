//! Users who had an event count after its lease had ended. The kernel takes no descriptor
//! back, so that is prevented by its price: such a user has no leases and no events until an
//! operator says so, and what it has taken is an outsider's, which nobody else is promised.

use std::collections::{BTreeMap, BTreeSet};

use arbiter::{CounterSet, PerKind};
use arbiter_host::{BootTime, CpuSet, Lease, LeaseId, Place, PmuId};
use serde_json::{Value, json};
use umpire_lease as wire;
use varlink::Reply;

use super::{Allowed, Answered, Calling, Service, error, parsed, refusal, wrong};
use crate::journal::{Barred, Entry};

/// A counter that somebody has taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) uid: u32,
    pub(crate) pid: u32,
    pub(crate) lease: LeaseId,
    pub(crate) pmu: PmuId,
    pub(crate) counters: CounterSet,
    pub(crate) thread: Option<u32>,
    pub(crate) cpu: Option<u32>,
}

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

impl Service {
    /// An event counts after its lease has ended, and not by an oversight.
    pub(crate) fn outlived(&mut self, uid: u32, pid: u32, allowed: &Allowed) {
        if self.bars.users.contains_key(&uid) {
            return;
        }
        let lease = allowed.lease.0;
        let barred = Barred { uid, pid, lease };
        log::error!(
            "user {uid} is barred: process {pid} has an event count after its lease {lease} has \
             ended; its leases end, and it gets none until: umpire pardon {uid}"
        );
        let record = self.event_record("barred", uid, pid, allowed);
        self.record(&record);
        self.output.entries.push(Entry::Barred(barred.clone()));
        self.bars.users.insert(uid, barred);
        self.metrics.set_barred(self.bars.users.len());
    }

    /// What is taken now. Nobody is promised it; then those who took it lose their leases.
    pub(crate) fn set_taken(&mut self, taken: Vec<Taken>, now: BootTime) {
        if self.bars.taken != taken {
            let before = std::mem::replace(&mut self.bars.taken, taken);
            self.record_taken(&before);
            let at = self.taken_at();
            let before = std::mem::replace(&mut self.bars.at, at);
            let places: BTreeSet<Place> = before.into_keys().collect();
            let places: Vec<Place> = places
                .into_iter()
                .chain(self.bars.at.keys().copied())
                .collect();
            for place in places {
                self.set_outside(place, now);
            }
            self.settle();
        }
        self.end_barred(now);
    }

    /// Ends what users who are barred have.
    pub(super) fn end_barred(&mut self, now: BootTime) {
        let barred =
            |lease: &&Lease| self.is_barred(lease.owner.uid) && !self.is_watchdog(lease.id);
        let barred = self.arbiter.leases().filter(barred);
        let barred: Vec<LeaseId> = barred.map(|lease| lease.id).collect();
        if !barred.is_empty() {
            self.arbiter.bar(&barred, now, &mut self.changes);
            self.settle();
        }
    }

    /// The audit has who is an outsider with what had been lent to it.
    fn record_taken(&mut self, before: &[Taken]) {
        let what = |taken: &[Taken]| -> BTreeSet<(u32, u32, u64, PmuId)> {
            let what = taken.iter();
            what.map(|one| (one.uid, one.pid, one.lease.0, one.pmu))
                .collect()
        };
        let (before, now) = (what(before), what(&self.bars.taken));
        let come = now.difference(&before).map(|one| ("outsider", one));
        let gone = before.difference(&now).map(|one| ("outsider-gone", one));
        for (event, (uid, pid, lease, pmu)) in come.chain(gone) {
            let pmu = self.arbiter.pmus().get(usize::from(pmu.0));
            let record = json!({
                "event": event,
                "uid": uid,
                "pid": pid,
                "lease": lease,
                "tenant": self.tenant_of(LeaseId(*lease), *uid),
                "pmu": pmu.map(|pmu| pmu.name.as_str()),
            });
            self.record(&record);
        }
    }

    /// What is taken of each place. Threads share a counter in time: it is what that one has
    /// which has most, and what is of the whole CPU.
    fn taken_at(&self) -> BTreeMap<Place, Vec<CounterSet>> {
        let mut anywhere: BTreeMap<(PmuId, u32), Vec<CounterSet>> = BTreeMap::new();
        let mut here: BTreeMap<Place, BTreeMap<Option<u32>, Vec<CounterSet>>> = BTreeMap::new();
        for one in &self.bars.taken {
            match (one.cpu, one.thread) {
                (None, Some(thread)) => {
                    anywhere
                        .entry((one.pmu, thread))
                        .or_default()
                        .push(one.counters);
                }
                // There is no event of nothing.
                (None, None) => {}
                (Some(cpu), thread) => {
                    let place = self.arbiter.place(one.pmu, cpu);
                    let threads = place.map(|place| here.entry(place).or_default());
                    if let Some(threads) = threads {
                        threads.entry(thread).or_default().push(one.counters);
                    }
                }
            }
        }
        let mut at = BTreeMap::new();
        for (id, pmu) in (0u16..).map(PmuId).zip(self.arbiter.pmus()) {
            let of_pmu = anywhere.range((id, 0)..=(id, u32::MAX));
            let most = of_pmu.max_by_key(|(_, sets)| sets.len());
            let most = most.map(|(_, sets)| sets.clone()).unwrap_or_default();
            for domain in 0..u32::try_from(pmu.domains.len()).unwrap_or(0) {
                let place = Place { pmu: id, domain };
                let mut threads = here.remove(&place).unwrap_or_default();
                let mut taken = threads.remove(&None).unwrap_or_default();
                let also = threads.into_iter().map(|(thread, mut sets)| {
                    let wherever = thread.and_then(|thread| anywhere.get(&(id, thread)));
                    sets.extend(wherever.into_iter().flatten());
                    sets
                });
                taken.extend(
                    also.chain([most.clone()])
                        .max_by_key(Vec::len)
                        .into_iter()
                        .flatten(),
                );
                taken.truncate(pmu.counters.len() as usize);
                if !taken.is_empty() {
                    at.insert(place, taken);
                }
            }
        }
        at
    }

    /// What outsiders have of a place: as it was measured, and at least what is taken.
    pub(super) fn set_outside(&mut self, place: Place, now: BootTime) {
        let mut outside = self.measured.get(&place).cloned().unwrap_or_default();
        let is_fixed = |set: &CounterSet| PerKind::count(*set).fixed > 0;
        for fixed in [false, true] {
            let taken = self.bars.at.get(&place).into_iter().flatten();
            let taken = taken.filter(|set| is_fixed(set) == fixed);
            let known = outside.iter().filter(|set| is_fixed(set) == fixed).count();
            outside.extend(taken.skip(known).copied().collect::<Vec<_>>());
        }
        if self.arbiter.outside(place) != outside {
            let changes = &mut self.changes;
            self.arbiter.set_outside(place, outside, now, changes);
        }
    }

    /// Processes that have taken counters: for each user and process how many events, and
    /// where.
    pub(super) fn takers(&self) -> BTreeMap<(u32, u32), (u32, CpuSet)> {
        let mut takers: BTreeMap<(u32, u32), (u32, CpuSet)> = BTreeMap::new();
        for one in &self.bars.taken {
            let (events, cpus) = takers.entry((one.uid, one.pid)).or_default();
            *events += 1;
            match one.cpu {
                Some(cpu) => cpus.insert(cpu),
                None if *events > 1 => {}
                None => {
                    let pmu = self.arbiter.pmus().get(usize::from(one.pmu.0));
                    let all = pmu.into_iter().flat_map(|pmu| &pmu.domains);
                    all.flat_map(CpuSet::iter).for_each(|cpu| cpus.insert(cpu));
                }
            }
        }
        takers
    }

    /// The users that are barred, as they are shown.
    pub(super) fn barred(&self) -> impl Iterator<Item = wire::Outsider> {
        self.bars.users.values().map(|barred| wire::Outsider {
            what: "barred".to_owned(),
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

    pub(crate) fn is_barred(&self, uid: u32) -> bool {
        self.bars.users.contains_key(&uid)
    }

    /// # Errors
    /// The user is barred.
    pub(super) fn not_barred(&self, uid: u32) -> Result<(), Reply> {
        let Some(barred) = self.bars.users.get(&uid) else {
            return Ok(());
        };
        let why = format!(
            "process {} of this user had an event count after its lease {} had ended: the user \
             gets no leases and no events until an operator lifts it (umpire pardon {uid})",
            barred.pid, barred.lease
        );
        Err(refusal("barred".to_owned(), why))
    }

    /// What the journal has of them.
    pub(super) fn bars(&self) -> impl Iterator<Item = Entry> {
        self.bars.users.values().cloned().map(Entry::Barred)
    }

    /// Takes over what the journal has.
    pub(crate) fn restore_bars(&mut self, bars: BTreeMap<u32, Barred>) {
        for uid in bars.keys() {
            log::warn!("user {uid} is barred since before; see: umpire pardon {uid}");
        }
        self.bars.users = bars;
        self.metrics.set_barred(self.bars.users.len());
    }

    /// Users that were forgiven since this was asked last.
    pub(crate) fn take_forgiven(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.bars.forgiven)
    }

    /// `Pardon`: an operator lifts it.
    pub(super) fn pardon(&mut self, calling: &Calling<'_>, parameters: Value) -> Answered {
        let wire::PardonIn { uid } = parsed(parameters)?;
        if !calling.operator {
            return Err(refusal(
                "foreign".to_owned(),
                "only operators pardon a user who is barred".to_owned(),
            ));
        }
        if let Some(why) = &self.stuck {
            return Err(error(
                "JournalFailed",
                &json!({ "message": format!("the arbiter cannot write its journal ({why})") }),
            ));
        }
        if self.bars.users.remove(&uid).is_none() {
            return Err(wrong(format!(
                "user {uid} is not barred; those who are: umpire who"
            )));
        }
        self.metrics.set_barred(self.bars.users.len());
        let by = calling.client.uid;
        log::warn!("user {uid} is pardoned by user {by}");
        self.output.entries.push(Entry::Pardoned(uid));
        self.bars.forgiven.push(uid);
        self.record(&json!({
            "event": "pardoned",
            "uid": uid,
            "by": by,
            "pid": calling.client.pid,
        }));
        Ok(Some(json!({})))
    }
}

#[cfg(test)]
#[path = "barred_tests.rs"]
mod tests;
