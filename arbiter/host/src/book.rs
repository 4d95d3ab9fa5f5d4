//! The book of leases: which there are, who waits, who leaves, and what is due when. Each
//! change of a lease goes through it, so that these agree.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use arbiter::Nanos;

use super::ids::{BootTime, GroupId, LeaseId, TenantId, ThreadId};
use super::lease::{Departure, Lease, Owner};
use super::terms::{Scope, Terms};

#[derive(Clone, Debug)]
pub(crate) struct Book {
    leases: BTreeMap<LeaseId, Lease>,
    waiting: BTreeSet<LeaseId>,
    /// Those that were told that they will lose something.
    leaving: BTreeSet<LeaseId>,
    /// Those of whose counters somebody outside has some.
    broken: BTreeSet<LeaseId>,
    due: BTreeSet<(BootTime, LeaseId)>,
    /// Those of each control group, and those of the groups below each.
    of_group: BTreeMap<GroupId, BTreeSet<LeaseId>>,
    below: BTreeMap<GroupId, BTreeSet<LeaseId>>,
    /// Who begins to wait is patient for so long.
    patience: Nanos,
    next: u64,
    arrivals: u64,
}

impl Book {
    pub(crate) fn new(patience: Nanos) -> Self {
        Book {
            leases: BTreeMap::new(),
            waiting: BTreeSet::new(),
            leaving: BTreeSet::new(),
            broken: BTreeSet::new(),
            due: BTreeSet::new(),
            of_group: BTreeMap::new(),
            below: BTreeMap::new(),
            patience,
            next: 1,
            arrivals: 0,
        }
    }

    pub(crate) fn set_patience(&mut self, patience: Nanos) {
        self.patience = patience;
        let due = |lease: &Lease| Some((lease.next_due(patience)?, lease.id));
        self.due = self.leases.values().filter_map(due).collect();
    }

    /// All, in the order in which they were asked for.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Lease> + Clone {
        self.leases.values()
    }

    pub(crate) fn count(&self) -> usize {
        self.leases.len()
    }

    pub(crate) fn get(&self, id: LeaseId) -> Option<&Lease> {
        self.leases.get(&id)
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.next
    }

    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Lease> {
        self.waiting.iter().filter_map(|id| self.get(*id))
    }

    pub(crate) fn waits(&self, id: LeaseId) -> bool {
        self.waiting.contains(&id)
    }

    pub(crate) fn count_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn count_waiting_of(&self, tenant: TenantId) -> usize {
        let of = |lease: &&Lease| lease.owner.tenant == tenant;
        self.waiting().filter(of).count()
    }

    pub(crate) fn leaving(&self) -> impl Iterator<Item = &Lease> {
        self.leaving.iter().filter_map(|id| self.get(*id))
    }

    pub(crate) fn broken(&self) -> &BTreeSet<LeaseId> {
        &self.broken
    }

    /// The control groups of all, and those of each.
    pub(crate) fn groups(&self) -> &BTreeMap<GroupId, BTreeSet<LeaseId>> {
        &self.of_group
    }

    /// Those of a control group, also those that wait.
    pub(crate) fn of_group(&self, group: GroupId) -> impl Iterator<Item = LeaseId> {
        self.of_group.get(&group).into_iter().flatten().copied()
    }

    /// Those of the groups below a control group, and of parts of it, the newest first.
    pub(crate) fn below(&self, group: GroupId) -> impl Iterator<Item = LeaseId> {
        let below = self.below.get(&group).into_iter();
        below.flat_map(|all| all.iter().rev()).copied()
    }

    /// How many those are.
    pub(crate) fn count_below(&self, group: GroupId) -> usize {
        self.below.get(&group).map_or(0, BTreeSet::len)
    }

    /// The outermost group above a lease that has leases, or waits for some, and one of these.
    pub(crate) fn above_leased(&self, scope: &Scope) -> Option<(GroupId, LeaseId)> {
        let mut above = scope.above();
        above.find_map(|id| Some((id, self.of_group(id).next()?)))
    }

    /// What is due first, and for which lease.
    pub(crate) fn first_due(&self) -> Option<(BootTime, LeaseId)> {
        self.due.first().copied()
    }

    /// Enters a request. It holds nothing yet.
    pub(crate) fn enter(&mut self, owner: Owner, terms: Terms, now: BootTime) -> LeaseId {
        let id = LeaseId(self.next);
        let lease = Lease::new(id, owner, terms, now, self.arrivals);
        self.next += 1;
        self.arrivals += 1;
        self.insert(lease);
        id
    }

    /// Strikes out the request that was entered last: the next one gets its number.
    pub(crate) fn withdraw(&mut self, id: LeaseId) -> Option<Lease> {
        let lease = self.remove(id)?;
        self.next -= 1;
        self.arrivals -= 1;
        Some(lease)
    }

    /// Enters a lease of before a restart, which has to be claimed by `claim_by`.
    pub(crate) fn recall(&mut self, mut lease: Lease, now: BootTime, claim_by: BootTime) {
        lease.recall(now, claim_by);
        self.next = self.next.max(lease.id.0 + 1);
        self.arrivals = self.arrivals.max(lease.arrival() + 1);
        self.insert(lease);
    }

    /// Numbers below `next` were given.
    pub(crate) fn skip_to(&mut self, next: u64) {
        self.next = self.next.max(next);
    }

    /// The lease holds the first `to` of its demands. Returns its generation.
    pub(crate) fn hold(&mut self, id: LeaseId, to: usize, now: BootTime) -> u64 {
        let arrival = self.arrivals;
        self.arrivals += 1;
        let hold = |lease: &mut Lease| {
            lease.hold(to, now, arrival);
            lease.generation
        };
        self.change(id, hold).unwrap_or_default()
    }

    pub(crate) fn announce(&mut self, id: LeaseId, departure: Departure) {
        self.change(id, |lease| lease.set_departure(Some(departure)));
    }

    /// It does not leave after all.
    pub(crate) fn spare(&mut self, id: LeaseId) {
        self.change(id, |lease| lease.set_departure(None));
    }

    pub(crate) fn want_only(&mut self, id: LeaseId, keep: usize) {
        self.change(id, |lease| lease.want_only(keep));
    }

    /// Returns until when it lasts.
    pub(crate) fn renew(&mut self, id: LeaseId, now: BootTime) -> Option<BootTime> {
        self.change(id, |lease| lease.renew(now)).flatten()
    }

    pub(crate) fn claim(&mut self, id: LeaseId) {
        self.change(id, Lease::claim);
    }

    /// Returns, of one that is mended, for how long it was broken.
    pub(crate) fn break_or_mend(&mut self, id: LeaseId, now: BootTime) -> Option<Nanos> {
        self.change(id, |lease| lease.break_or_mend(now)).flatten()
    }

    /// Returns which of its threads have ended.
    pub(crate) fn lose_threads(
        &mut self,
        id: LeaseId,
        ended: &BTreeSet<ThreadId>,
    ) -> Vec<ThreadId> {
        let lost = self.change(id, |lease| lease.lose_threads(ended));
        lost.unwrap_or_default()
    }

    pub(crate) fn lose_patience(&mut self, id: LeaseId) {
        self.change(id, Lease::lose_patience);
    }

    pub(crate) fn set_blocks(&mut self, id: LeaseId, blocks: bool) {
        self.change(id, |lease| lease.set_blocks(blocks));
    }

    pub(crate) fn remove(&mut self, id: LeaseId) -> Option<Lease> {
        let lease = self.leases.remove(&id)?;
        for index in [&mut self.waiting, &mut self.leaving, &mut self.broken] {
            index.remove(&id);
        }
        if let Some(at) = lease.next_due(self.patience) {
            self.due.remove(&(at, id));
        }
        let leave = |index: &mut BTreeMap<GroupId, BTreeSet<LeaseId>>, group: GroupId| {
            if let Entry::Occupied(mut those) = index.entry(group) {
                those.get_mut().remove(&id);
                if those.get().is_empty() {
                    those.remove();
                }
            }
        };
        if let Some(group) = lease.terms.scope.group() {
            leave(&mut self.of_group, group.id);
        }
        if lease.terms.scope.is_of_groups() {
            let above = lease.terms.scope.above();
            above.for_each(|above| leave(&mut self.below, above));
        }
        Some(lease)
    }

    fn insert(&mut self, lease: Lease) {
        let id = lease.id;
        if let Some(group) = lease.terms.scope.group() {
            self.of_group.entry(group.id).or_default().insert(id);
        }
        if lease.terms.scope.is_of_groups() {
            for above in lease.terms.scope.above() {
                self.below.entry(above).or_default().insert(id);
            }
        }
        self.leases.insert(id, lease);
        self.change(id, |_| ());
    }

    /// Changes a lease, and notes whether it waits, leaves, is broken, and what is due for it.
    fn change<T>(&mut self, id: LeaseId, change: impl FnOnce(&mut Lease) -> T) -> Option<T> {
        let lease = self.leases.get_mut(&id)?;
        let was_due = lease.next_due(self.patience);
        let changed = change(lease);
        let waits = lease.is_waiting();
        if !waits {
            lease.set_blocks(false);
        }
        for (index, is_in) in [
            (&mut self.waiting, waits),
            (&mut self.leaving, lease.departure.is_some()),
            (&mut self.broken, lease.broken.is_some()),
        ] {
            if is_in {
                index.insert(id);
            } else {
                index.remove(&id);
            }
        }
        if let Some(at) = was_due {
            self.due.remove(&(at, id));
        }
        if let Some(at) = lease.next_due(self.patience) {
            self.due.insert((at, id));
        }
        Some(changed)
    }
}
