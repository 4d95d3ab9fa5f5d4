//! The arbiter: commands of owners and of the host, and what follows from them.
//!
//! The book has the leases, the room what they hold of each counter, and the accounts what
//! tenants have had. They meet here, in three verbs: [`HostArbiter::grant`] gives a lease
//! what there is, [`HostArbiter::take`] leaves it less, [`HostArbiter::end`] ends it. After
//! each command [`HostArbiter::go_on`] serves those who wait, in a written order. Who is
//! served when, and who has to leave, is decided by functions that change nothing (`queue`,
//! `preempt`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use arbiter::{CounterSet, Nanos, PerKind};

use super::admission;
use super::book::Book;
use super::cpus::CpuSet;
use super::ids::{BootTime, GroupId, HostPmu, LeaseId, Place, PmuId, TenantId, ThreadId};
use super::lease::{Caller, Cause, Change, Departure, Due, Lease, Owner};
use super::policy::{HostPolicy, HostPolicyError};
use super::preempt::{Trial, rivals};
use super::queue;
use super::refusal::Refusal;
use super::room::{MOST_BELOW, MOST_THREADS_BELOW, Room};
use super::terms::{Group, Scope, Terms, Waits};
use super::usage::Usage;

/// What one call does at most of what is due, for each lease, and besides: several times
/// what leases can need.
const MOST_DUE: usize = 8;

/// So many groups, looked at on one CPU each, cost as much as a call.
const COSTS: usize = 256;

/// What became of a request that was not refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It holds so many of its demands.
    Granted { lease: LeaseId, holds: usize },
    Waits {
        /// The lease that it will be.
        lease: LeaseId,
        /// How many are served before it.
        behind: usize,
        /// What it waits for.
        why: Refusal,
    },
}

/// What is kept over a restart.
#[derive(Clone, Debug, Default)]
pub struct HeldBefore {
    /// The leases.
    pub leases: Vec<Lease>,
    /// The control groups of which a lease was kept that cannot be any more.
    pub lost: BTreeSet<GroupId>,
    /// The first number that was never given.
    pub next: u64,
}

/// The arbiter of a host.
#[derive(Clone, Debug)]
pub struct HostArbiter {
    pmus: Vec<HostPmu>,
    policy: HostPolicy,
    book: Book,
    room: Room,
    usage: Usage,
    /// Nothing is granted.
    frozen: bool,
    /// What is due after it is not done yet.
    due_until: Option<BootTime>,
    now: BootTime,
}

impl HostArbiter {
    /// An arbiter of these PMUs. The minima of a policy are for counters of the first.
    ///
    /// # Errors
    /// The policy promises more than there is.
    pub fn new(pmus: Vec<HostPmu>, policy: HostPolicy) -> Result<Self, HostPolicyError> {
        let mut arbiter = HostArbiter {
            book: Book::new(policy.patience),
            room: Room::new(&pmus),
            pmus,
            policy: HostPolicy::default(),
            usage: Usage::default(),
            frozen: false,
            due_until: None,
            now: BootTime(0),
        };
        arbiter.set_policy(policy, BootTime(0), &mut Vec::new())?;
        Ok(arbiter)
    }

    /// The PMUs.
    pub fn pmus(&self) -> &[HostPmu] {
        &self.pmus
    }

    /// The rules.
    pub fn policy(&self) -> &HostPolicy {
        &self.policy
    }

    /// All leases, and those that wait, in the order in which they were asked for.
    pub fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.book.all()
    }

    /// One lease.
    pub fn lease(&self, id: LeaseId) -> Option<&Lease> {
        self.book.get(id)
    }

    /// The control groups that have leases, or wait for some, and these.
    pub fn leased_groups(&self) -> &BTreeMap<GroupId, BTreeSet<LeaseId>> {
        self.book.groups()
    }

    /// The number that the next lease gets.
    pub fn next_id(&self) -> u64 {
        self.book.next_id()
    }

    /// The CPUs that are online.
    pub fn online(&self) -> &CpuSet {
        self.room.online()
    }

    /// The place of a CPU's counters of a PMU.
    pub fn place(&self, pmu: PmuId, cpu: u32) -> Option<Place> {
        self.room.place_of(pmu, cpu)
    }

    /// What leases hold of a place at most at a time.
    pub fn leased(&self, place: Place) -> PerKind {
        self.room.leased(place)
    }

    /// What somebody who holds no lease has of a place, as it was set.
    pub fn outside(&self, place: Place) -> &[CounterSet] {
        self.room.outside(place)
    }

    /// When [`HostArbiter::advance`] has something to do next.
    pub fn deadline(&self) -> Option<BootTime> {
        self.book.first_due().map(|(at, _)| at)
    }

    /// The latest instant that it was told.
    pub fn now(&self) -> BootTime {
        self.now
    }

    /// What a request for a control group costs at most, where one for a thread costs 1: each
    /// number of counters is tried on each CPU, and what is beside it below a leased group is
    /// looked at.
    pub fn cost(&self, terms: &Terms) -> u64 {
        if matches!(terms.scope, Scope::Cpu | Scope::Thread(_)) {
            return 0;
        }
        let nodes = terms.scope.threads().len().max(1);
        let tries = (terms.demands.len() + 1)
            .saturating_sub(terms.at_least)
            .max(1);
        let below = self.book.above_leased(&terms.scope);
        let beside = below.map_or(0, |(group, _)| self.book.count_below(group));
        let mut above = terms.scope.above().flat_map(|id| self.book.of_group(id));
        let leaves = |id| {
            self.book
                .get(id)
                .is_some_and(|lease| lease.departure.is_some())
        };
        // Then all below it are looked at anew.
        let times = if above.any(leaves) { 8 } else { 1 };
        let looks = tries * terms.cpus.len() * (MOST_BELOW / 4 + beside) * times;
        (nodes * looks / COSTS) as u64
    }

    /// Who waits, in the order of service.
    pub fn order(&self, now: BootTime) -> Vec<LeaseId> {
        let order = queue::order(&self.book, &self.usage, now);
        order.into_iter().map(|lease| lease.id).collect()
    }

    /// Asks for a lease. What follows from it for others is added to `out`, and for it
    /// too: a grant is a [`Change::Holds`].
    ///
    /// # Errors
    /// Why it cannot be granted, now (with [`Waits::No`]) or at all.
    pub fn request(
        &mut self,
        owner: Owner,
        terms: Terms,
        now: BootTime,
        out: &mut Vec<Change>,
    ) -> Result<Outcome, Refusal> {
        self.advance(now, out);
        self.admit(&owner, &terms)?;
        let held = self.book.all().map(Lease::holding);
        self.room.learn(&terms.demands, held)?;
        self.could_have(&owner, &terms)?;

        let id = self.enter(owner, terms);
        let (behind, blocker) = self.ahead(id);
        let served = match blocker {
            Some(lease) => Err(Refusal::Behind { lease }),
            None => self.grant(id, out),
        };
        if let Err(why) = &served
            && let Err(why) = self.may_wait(id, why)
        {
            self.withdraw(id);
            return Err(why);
        }
        if blocker.is_none() {
            let blocks = self.make_room(id, out);
            self.book.set_blocks(id, blocks);
        }
        match served {
            Ok(()) => {
                let holds = self.book.get(id).map_or(0, |lease| lease.holds);
                Ok(Outcome::Granted { lease: id, holds })
            }
            Err(why) => {
                out.push(Change::Waits {
                    lease: id,
                    behind,
                    why: why.clone(),
                });
                Ok(Outcome::Waits {
                    lease: id,
                    behind,
                    why,
                })
            }
        }
    }

    /// What would become of a request, and what would follow for others. Nothing changes.
    ///
    /// # Errors
    /// As [`HostArbiter::request`].
    pub fn explain(
        &self,
        owner: Owner,
        terms: Terms,
        now: BootTime,
    ) -> (Result<Outcome, Refusal>, Vec<Change>) {
        let mut out = Vec::new();
        let outcome = self.clone().request(owner, terms, now, &mut out);
        (outcome, out)
    }

    /// Gives back what is beyond the first `keep` counters, or all; a request that waits
    /// is withdrawn.
    ///
    /// # Errors
    /// There is no such lease, it is another's, or it has changed since.
    pub fn release(
        &mut self,
        id: LeaseId,
        keep: usize,
        generation: Option<u64>,
        by: Caller,
        now: BootTime,
        out: &mut Vec<Change>,
    ) -> Result<(), Refusal> {
        self.advance(now, out);
        let lease = self.owned(id, generation, by)?;
        let wanted = lease.terms.demands.len();
        let keep = lease.terms.usable(keep.min(lease.holds));
        if keep == 0 {
            self.end(id, Cause::Released, out);
        } else if keep < wanted {
            self.take(id, keep, Cause::Released, out);
            // What was given back is not waited for.
            self.book.want_only(id, keep);
        }
        self.go_on(out);
        Ok(())
    }

    /// Has a lease last for its time again, from now on.
    ///
    /// # Errors
    /// There is no such lease, it is another's, or has changed since; or it may be
    /// preempted, and somebody waits for its counters.
    pub fn renew(
        &mut self,
        id: LeaseId,
        generation: Option<u64>,
        by: Caller,
        now: BootTime,
        out: &mut Vec<Change>,
    ) -> Result<Option<BootTime>, Refusal> {
        self.advance(now, out);
        self.renew_first(id, generation, by, now, out)
    }

    /// The same, before what is due by then is done: a lease that has not ended yet goes on,
    /// also if it was to end before.
    ///
    /// # Errors
    /// Those of [`HostArbiter::renew`].
    pub fn renew_first(
        &mut self,
        id: LeaseId,
        generation: Option<u64>,
        by: Caller,
        now: BootTime,
        out: &mut Vec<Change>,
    ) -> Result<Option<BootTime>, Refusal> {
        let now = self.now.max(now);
        let lease = self.owned(id, generation, by)?;
        if let Some(departure) = &lease.departure {
            return Err(Refusal::Leaving { at: departure.at });
        }
        if let Some(by) = queue::wanted_by(lease, &self.book, &self.room, &self.policy) {
            return Err(Refusal::Wanted { by });
        }
        if lease.holds == 0 {
            return Ok(None);
        }
        let until = self.book.renew(id, now);
        out.push(Change::Renewed { lease: id, until });
        Ok(until)
    }

    /// Takes a lease from its owner after `grace`, or the policy's.
    ///
    /// # Errors
    /// There is no such lease, or the caller may not revoke it.
    pub fn revoke(
        &mut self,
        id: LeaseId,
        grace: Option<Nanos>,
        by: Caller,
        now: BootTime,
        out: &mut Vec<Change>,
    ) -> Result<BootTime, Refusal> {
        self.advance(now, out);
        let lease = self.book.get(id).ok_or(Refusal::NoSuchLease)?;
        if !admission::may_revoke(lease, by, &self.policy) {
            return Err(admission::foreign(lease, &self.policy));
        }
        let at = self.now.after(grace.unwrap_or(self.policy.grace));
        // What was announced comes no later for it.
        let at = lease.departure.map_or(at, |departure| departure.at.min(at));
        let why = Cause::Revoked { by: by.uid };
        if lease.holds == 0 {
            self.end(id, why, out);
        } else {
            self.announce(id, Departure { at, to: 0, why }, out);
        }
        self.go_on(out);
        self.advance(now, out);
        Ok(at)
    }

    /// The owner's connection has ended, and with it the lease.
    pub fn holder_gone(&mut self, id: LeaseId, now: BootTime, out: &mut Vec<Change>) {
        self.advance(now, out);
        if self.book.get(id).is_some() {
            self.end(id, Cause::HolderGone, out);
            self.go_on(out);
        }
    }

    /// Ends leases at once, for something that the caller has seen: [`Cause::Barred`],
    /// [`Cause::GroupEmpty`] or [`Cause::NobodyCame`].
    pub fn end_now(&mut self, ids: &[LeaseId], why: Cause, now: BootTime, out: &mut Vec<Change>) {
        self.advance(now, out);
        for &id in ids {
            self.end(id, why, out);
        }
        self.go_on(out);
    }

    /// Threads of leases have ended. A lease is for those that are left, and ends with the last.
    pub fn threads_ended(
        &mut self,
        ended: &BTreeMap<LeaseId, BTreeSet<ThreadId>>,
        now: BootTime,
        out: &mut Vec<Change>,
    ) {
        self.advance(now, out);
        for (&id, ended) in ended {
            let Some(lease) = self.book.get(id) else {
                continue;
            };
            self.room.remove(lease.holding());
            let threads = self.book.lose_threads(id, ended);
            let Some(lease) = self.book.get(id) else {
                continue;
            };
            self.room.add(lease.holding());
            if !threads.is_empty() && lease.terms.scope.threads().is_empty() {
                self.end(id, Cause::ThreadsEnded, out);
            } else if !threads.is_empty() {
                out.push(Change::ThreadsGone { lease: id, threads });
            }
        }
        self.go_on(out);
    }

    /// Takes over what was held before a restart. Each lease stays for `window`; its
    /// owner has to claim it in that time. Nothing that leases hold can be granted meanwhile.
    /// Returns those that cannot be: the host or the policy has changed. What was taken out of
    /// leases that are not there any more ends.
    pub fn restore(
        &mut self,
        before: HeldBefore,
        window: Nanos,
        now: BootTime,
        out: &mut Vec<Change>,
    ) -> Vec<LeaseId> {
        self.now = self.now.max(now);
        let claim_by = self.now.after(window);
        let (mut lost, mut lost_groups) = (Vec::new(), before.lost);
        for lease in before.leases {
            let tenant = lease.owner.tenant;
            if self.policy.tenant(tenant).is_none()
                || self.room.learn_sets(&lease.terms.demands).is_err()
            {
                lost.push(lease.id);
                lost_groups.extend(lease.terms.scope.group().map(|group| group.id));
                continue;
            }
            self.usage.came(tenant, self.now);
            let counters = self.counters(&lease.terms, 0..lease.holds);
            self.usage.changed(tenant, 0, counters, self.now);
            self.book.recall(lease, self.now, claim_by);
        }
        self.book.skip_to(before.next);
        self.room.count(self.book.all().map(Lease::holding));
        let of_groups = self.book.all().filter(|one| one.terms.scope.is_of_groups());
        let of_groups: Vec<LeaseId> = of_groups.map(|lease| lease.id).collect();
        // The newest first, as always: what it gives up may do for the others.
        for id in of_groups.into_iter().rev() {
            let lease = self.book.get(id);
            if lease.is_some_and(|one| is_orphan(&self.book, &self.room, one, &lost_groups)) {
                self.end(id, Cause::AboveEnded, out);
            }
        }
        self.go_on(out);
        lost
    }

    /// Takes back what was just granted, to `holds` counters: the caller could not keep its
    /// books. It waits for them again, if it waits at all.
    pub fn take_back(&mut self, id: LeaseId, holds: usize, now: BootTime, out: &mut Vec<Change>) {
        self.advance(now, out);
        if self.book.get(id).is_some_and(|lease| holds < lease.holds) {
            self.take(id, holds, Cause::Released, out);
        }
    }

    /// Serves nobody who waits, until [`HostArbiter::thaw`]: the caller cannot keep its
    /// books, and has to refuse requests itself. What ends, ends.
    pub fn freeze(&mut self) {
        self.frozen = true;
    }

    /// Grants again.
    pub fn thaw(&mut self, now: BootTime, out: &mut Vec<Change>) {
        self.advance(now, out);
        self.frozen = false;
        self.go_on(out);
    }

    /// The owner of a lease of before a restart is there again.
    ///
    /// # Errors
    /// There is no such lease, it is another's, or it has changed since.
    pub fn claim(
        &mut self,
        id: LeaseId,
        generation: Option<u64>,
        by: Caller,
        now: BootTime,
        out: &mut Vec<Change>,
    ) -> Result<(), Refusal> {
        self.advance(now, out);
        self.own(id, generation, by)?;
        self.book.claim(id);
        out.push(Change::Claimed { lease: id });
        self.go_on(out);
        // It may have waited for long enough meanwhile.
        self.advance(now, out);
        Ok(())
    }

    /// Whether a caller may give commands about a lease.
    ///
    /// # Errors
    /// There is no such lease, it is another's, or it has changed since.
    pub fn own(&self, id: LeaseId, generation: Option<u64>, by: Caller) -> Result<(), Refusal> {
        self.owned(id, generation, by).map(|_| ())
    }

    fn owned(&self, id: LeaseId, generation: Option<u64>, by: Caller) -> Result<&Lease, Refusal> {
        let lease = self.book.get(id).ok_or(Refusal::NoSuchLease)?;
        if !by.operator && !admission::is_own(lease, by, &self.policy) {
            return Err(admission::foreign(lease, &self.policy));
        }
        let now = lease.generation;
        if generation.is_some_and(|known| known != now) {
            return Err(Refusal::WrongGeneration { now });
        }
        Ok(lease)
    }

    /// Sets the rules. Leases that they would not allow stay.
    ///
    /// # Errors
    /// The rules promise more than there is. Then nothing changes.
    pub fn set_policy(
        &mut self,
        policy: HostPolicy,
        now: BootTime,
        out: &mut Vec<Change>,
    ) -> Result<(), HostPolicyError> {
        policy.check()?;
        if let Some(pmu) = self.pmus.first() {
            admission::fits_the_host(&policy, pmu)?;
        }
        self.advance(now, out);
        self.policy = policy.following(&self.policy);
        self.book.set_patience(self.policy.patience);
        self.room.set_policy(&self.policy);
        self.usage.set_policy(&self.policy, self.now);
        self.go_on(out);
        Ok(())
    }

    /// Sets which CPUs are online. Leases on others stay, are told, and nothing new is
    /// granted there.
    pub fn set_online(&mut self, online: CpuSet, now: BootTime, out: &mut Vec<Change>) {
        self.advance(now, out);
        let gone = self.online().without(&online);
        let back = online.without(self.online());
        self.room.set_online(online);
        for lease in self.book.all() {
            let [gone, back] = [&gone, &back].map(|cpus| lease.terms.cpus.and(cpus));
            let id = lease.id;
            if !gone.is_empty() {
                let cpus = gone;
                out.push(Change::CpusGone { lease: id, cpus });
            }
            if !back.is_empty() {
                let cpus = back;
                out.push(Change::CpusBack { lease: id, cpus });
            }
        }
        self.go_on(out);
    }

    /// Sets what somebody who holds no lease has of a place: one set for each counter,
    /// of those that it may be.
    pub fn set_outside(
        &mut self,
        place: Place,
        outside: Vec<CounterSet>,
        now: BootTime,
        out: &mut Vec<Change>,
    ) {
        self.advance(now, out);
        self.room.set_outside(place, outside);
        self.go_on(out);
    }

    /// Does what is due at `now`. Time does not run backwards: an earlier `now` is taken
    /// for the latest that was given. However much there is, a call ends: what is left is
    /// due at once.
    pub fn advance(&mut self, now: BootTime, out: &mut Vec<Change>) {
        let until = self.now.max(now);
        let done = self.due_until.map_or(until, |most| most.min(until));
        // In the order of the instants, however late the caller is.
        for _ in 0..MOST_DUE * (self.book.count() + MOST_DUE) {
            let due = self.book.first_due().filter(|(at, _)| *at <= done);
            let Some((at, id)) = due else {
                break;
            };
            self.now = self.now.max(at);
            match self.book.get(id).map(|lease| lease.due(self.now)) {
                Some(Due::Ends(why)) => self.end(id, why, out),
                Some(Due::Keeps { to, why }) => self.take(id, to, why, out),
                // Whether it blocks others now is decided below.
                Some(Due::LosesPatience) => self.book.lose_patience(id),
                None => {}
            }
            self.go_on(out);
        }
        self.now = until;
    }

    /// What is due later is not done until this is told `None`, whatever time it is: somebody may
    /// have renewed in time who was not read yet.
    pub fn hold_due(&mut self, after: Option<BootTime>) {
        self.due_until = after;
    }

    /// Whether the request may be made at all.
    fn admit(&self, owner: &Owner, terms: &Terms) -> Result<(), Refusal> {
        let tenant = self.policy.tenant(owner.tenant);
        let tenant = tenant.filter(|tenant| !tenant.retired);
        let tenant = tenant.ok_or(Refusal::UnknownTenant)?;
        admission::allowed(tenant, terms, self.online())?;
        let below = terms.scope.group().map(|group| self.book.below(group.id));
        let by: Vec<LeaseId> = below.into_iter().flatten().collect();
        if !by.is_empty() {
            return Err(Refusal::GroupsBelow { by });
        }
        if terms.scope.is_of_groups() {
            fits_below(&self.book, &terms.scope, owner.tenant)?;
        }
        if let Scope::Part(part) = &terms.scope
            && self.book.of_group(part.of.id).next().is_none()
        {
            let cpu = terms.cpus.iter().next().unwrap_or_default();
            return Err(Refusal::BeyondGroup { cpu, above: None });
        }
        let own = self.book.all();
        let own = own.filter(|lease| lease.owner.tenant == owner.tenant);
        let own = own.flat_map(|lease| &lease.terms.demands);
        admission::names_few_sets(&terms.demands, own, &self.pmus, tenant.most_sets)?;
        if self.usage.leases(owner.tenant) >= tenant.most_leases {
            let most = tenant.most_leases;
            return Err(Refusal::TooManyLeases { most });
        }
        Ok(())
    }

    /// Whether the request would be possible if nobody held anything, and the least of it
    /// for its tenant.
    fn could_have(&self, owner: &Owner, terms: &Terms) -> Result<(), Refusal> {
        if terms.scope != Scope::Cpu
            && let Some(pmu) = self.room.not_for_threads(&terms.demands)
        {
            return Err(Refusal::NotForThreads { pmu });
        }
        let tenant = self.policy.tenant(owner.tenant);
        let most = tenant.map_or(PerKind::ALL, |tenant| tenant.maximum);
        let (all, least) = (&terms.demands, &terms.demands[..terms.at_least]);
        self.room.could_give(all, &terms.cpus, PerKind::ALL)?;
        self.room.could_give(least, &terms.cpus, most)
    }

    /// How many are served before a lease that waits, and who of them keeps it from passing.
    fn ahead(&self, id: LeaseId) -> (usize, Option<LeaseId>) {
        let Some(lease) = self.book.get(id) else {
            return (0, None);
        };
        let ahead = queue::before(lease, &self.book, &self.usage, self.now);
        let mut blockers = ahead
            .iter()
            .filter(|other| other.blocks() && self.room.disturb(&other.terms, &lease.terms));
        (ahead.len(), blockers.next().map(|other| other.id))
    }

    /// Whether a new request may wait because of `why`.
    fn may_wait(&self, id: LeaseId, why: &Refusal) -> Result<(), Refusal> {
        let Some(lease) = self.book.get(id).filter(|one| one.terms.waits != Waits::No) else {
            return Err(why.clone());
        };
        let most = self.policy.most_waiting;
        if self.book.count_waiting() > most {
            return Err(Refusal::QueueFull { most });
        }
        let tenant = lease.owner.tenant;
        let most = self
            .policy
            .tenant(tenant)
            .map_or(0, |tenant| tenant.most_waiting);
        if self.book.count_waiting_of(tenant) > most {
            return Err(Refusal::OwnQueueFull { most });
        }
        Ok(())
    }

    /// Enters a request, which holds nothing yet.
    fn enter(&mut self, owner: Owner, terms: Terms) -> LeaseId {
        self.usage.came(owner.tenant, self.now);
        self.book.enter(owner, terms, self.now)
    }

    /// Strikes out the request that was just entered.
    fn withdraw(&mut self, id: LeaseId) {
        if let Some(lease) = self.book.withdraw(id) {
            self.clear(&lease);
        }
    }

    /// Gives a lease that waits as much as there is.
    fn grant(&mut self, id: LeaseId, out: &mut Vec<Change>) -> Result<(), Refusal> {
        let lease = self.book.get(id).ok_or(Refusal::NoSuchLease)?;
        admission::is_online(&lease.terms, self.room.online())?;
        let is_of_groups = lease.terms.scope.is_of_groups();
        if is_of_groups {
            above_hold(&self.book, &self.room, lease)?;
        }
        let holding = lease.holding();
        let mut short = None;
        for to in (lease.least_more()..=lease.terms.demands.len()).rev() {
            match self.room.fit(holding, to) {
                Ok(()) => {
                    self.note(id, to, Cause::Granted, out);
                    if is_of_groups {
                        self.tell_with_those_above(id, out);
                    }
                    return Ok(());
                }
                Err(shortage) => short = Some(shortage),
            }
        }
        let others = self.book.all().filter(|other| other.id != id);
        match short {
            Some(short) => Err(self.room.reason(short, others.map(Lease::holding))),
            None => Ok(()),
        }
    }

    /// Leaves a lease the first `to` of its demands.
    fn take(&mut self, id: LeaseId, to: usize, why: Cause, out: &mut Vec<Change>) {
        if let Some(lease) = self.book.get(id) {
            let group = lease.terms.scope.group().cloned();
            self.room.change(lease.holding(), to);
            self.note(id, to, why, out);
            self.end_below(group.as_deref(), out);
        }
    }

    /// Leases of the control groups below one end that would have more than that now has.
    fn end_below(&mut self, group: Option<&Group>, out: &mut Vec<Change>) {
        let Some(group) = group else {
            return;
        };
        let is_leased = self.book.of_group(group.id).next().is_some();
        let below: Vec<LeaseId> = self.book.below(group.id).collect();
        for id in below {
            let lease = self.book.get(id);
            if lease.is_some_and(|lease| !is_leased || is_beyond(&self.room, lease, group)) {
                self.end(id, Cause::AboveEnded, out);
            }
        }
        if self.book.count_below(group.id) > 0 {
            self.tell_with(above_and_own(group), out);
        }
    }

    fn end(&mut self, id: LeaseId, why: Cause, out: &mut Vec<Change>) {
        if let Some(mut lease) = self.book.remove(id) {
            self.clear(&lease);
            lease.settle(self.now);
            let group = lease.terms.scope.group().cloned();
            let lease = Box::new(lease);
            out.push(Change::Ended { lease, why });
            self.end_below(group.as_deref(), out);
        }
    }

    /// The lease holds the first `to` of its demands from now on, as the room knows already.
    fn note(&mut self, id: LeaseId, to: usize, why: Cause, out: &mut Vec<Change>) {
        let Some(lease) = self.book.get(id) else {
            return;
        };
        let changed = lease.holds.min(to)..lease.holds.max(to);
        let changed = self.counters(&lease.terms, changed);
        let (less, more) = if to < lease.holds {
            (changed, 0)
        } else {
            (0, changed)
        };
        self.usage.changed(lease.owner.tenant, less, more, self.now);
        out.push(Change::Holds {
            lease: id,
            holds: to,
            generation: self.book.hold(id, to, self.now),
            why,
        });
    }

    /// A lease that is struck out of the book holds nothing any more.
    fn clear(&mut self, lease: &Lease) {
        self.room.remove(lease.holding());
        let tenant = lease.owner.tenant;
        let counters = self.counters(&lease.terms, 0..lease.holds);
        self.usage.changed(tenant, counters, 0, self.now);
        self.usage.left(tenant);
    }

    /// The counters that these demands take, each CPU's by itself.
    fn counters(&self, terms: &Terms, demands: Range<usize>) -> u64 {
        self.room.counters(&terms.demands[demands], &terms.cpus)
    }

    /// Tells a lease that it will lose something, and those that will lose all with it.
    fn announce(&mut self, id: LeaseId, departure: Departure, out: &mut Vec<Change>) {
        let with = self.leave_with(id, departure);
        for (lease, departure) in std::iter::once((id, departure)).chain(with) {
            self.book.announce(lease, departure);
            out.push(Change::Announced { lease, departure });
        }
    }

    /// What a lease holds has changed: who has to leave with it or with one above, and was not
    /// told, is told.
    fn tell_with_those_above(&mut self, id: LeaseId, out: &mut Vec<Change>) {
        let scope = self.book.get(id).map(|lease| &lease.terms.scope);
        if let Some(scope) = scope {
            let own = scope.group().map(|group| group.id);
            let groups = scope.above().chain(own).collect();
            self.tell_with(groups, out);
        }
    }

    /// The same of whatever is in these control groups, from the outermost on.
    fn tell_with(&mut self, groups: Vec<GroupId>, out: &mut Vec<Change>) {
        let above = groups.into_iter();
        let above = above.flat_map(|group| self.book.of_group(group));
        let leaving = above.filter_map(|above| Some((above, self.book.get(above)?.departure?)));
        let leaving: Vec<(LeaseId, Departure)> = leaving.collect();
        for (above, departure) in leaving {
            for (lease, departure) in self.leave_with(above, departure) {
                let told = self.book.get(lease).and_then(|lease| lease.departure);
                if told.is_none_or(|told| told.to > 0 || told.at > departure.at) {
                    self.book.announce(lease, departure);
                    out.push(Change::Announced { lease, departure });
                }
            }
        }
    }

    /// Leases of the control groups below that of a lease that would have more than is left to
    /// it, and how they leave: the newest first, as [`HostArbiter::end_below`] ends them.
    fn leave_with(&mut self, id: LeaseId, departure: Departure) -> Vec<(LeaseId, Departure)> {
        let Some(lease) = self.book.get(id) else {
            return Vec::new();
        };
        let Some(group) = lease.terms.scope.group() else {
            return Vec::new();
        };
        let below: Vec<LeaseId> = self.book.below(group.id).collect();
        let holding = lease.holding();
        if departure.to == 0 && self.room.holding(group.id) == 1 {
            // All that the group has goes.
            let below = below.iter().filter_map(|id| self.book.get(*id));
            return below
                .filter(|lease| lease.holds > 0)
                .map(|lease| (lease.id, lease.departs_with(departure)))
                .collect();
        }
        self.room.change(holding, departure.to);
        let mut gone = Vec::new();
        for lease in below.iter().filter_map(|id| self.book.get(*id)) {
            if is_beyond(&self.room, lease, group) {
                self.room.remove(lease.holding());
                gone.push(lease);
            }
        }
        gone.iter()
            .rev()
            .for_each(|lease| self.room.add(lease.holding()));
        self.room.change(holding.with(departure.to), holding.holds);
        let leave = gone.iter();
        leave
            .map(|lease| (lease.id, lease.departs_with(departure)))
            .collect()
    }

    /// What follows after something became free, or the rules changed: those who wait are
    /// served in their order, those spared whose counters nobody waits for any more, and
    /// leases marked whose counters an outsider has.
    fn go_on(&mut self, out: &mut Vec<Change>) {
        // Who is spared stays, so others may wait for somebody else than it seemed. It ends,
        // since serving announces departures only for those who wait.
        while self.serve_all(out) || self.spare_needless(out) {}
        self.mark_broken(out);
    }

    /// Serves those who wait. Returns whether some of them are to be served anew: one was served
    /// that others came after whatever their rank, or out of which others are given something.
    fn serve_all(&mut self, out: &mut Vec<Change>) -> bool {
        if self.frozen {
            return false;
        }
        let (book, usage) = (&self.book, &self.usage);
        let order = queue::served_in(book, usage, &self.room, &self.policy, self.now);
        let mut blockers: Vec<LeaseId> = Vec::new();
        for id in order {
            let Some(lease) = self.book.get(id) else {
                continue;
            };
            let mut before = blockers.iter().filter_map(|other| self.book.get(*other));
            let is_behind = before.any(|other| self.room.disturb(&other.terms, &lease.terms));
            // Who was told to leave gets no more before it has left.
            let is_served = !is_behind && lease.departure.is_none();
            let is_choosy = queue::is_choosy(lease, &self.policy);
            let held = lease.holds;
            let blocks = is_served && self.serve(id, out);
            self.book.set_blocks(id, blocks);
            if blocks {
                blockers.push(id);
            }
            if is_choosy && !self.book.waits(id) || self.serves_below(id, held) {
                return true;
            }
        }
        false
    }

    /// Whether a lease that held so much has got more, and others below its control group wait.
    fn serves_below(&self, id: LeaseId, held: usize) -> bool {
        let lease = self.book.get(id).filter(|lease| lease.holds > held);
        let group = lease.and_then(|lease| lease.terms.scope.group());
        group.is_some_and(|group| {
            let mut below = self.book.below(group.id);
            below.any(|id| self.book.waits(id))
        })
    }

    /// Serves one that waits. Returns whether those behind it may not pass.
    fn serve(&mut self, id: LeaseId, out: &mut Vec<Change>) -> bool {
        // Why it has to wait longer was said when it came.
        let served = self.grant(id, out);
        let is_offline = matches!(served, Err(Refusal::NoSuchCpu { .. }));
        !is_offline && self.make_room(id, out)
    }

    /// Tells others to leave for one that waits. Returns whether those behind it may not
    /// pass: others leave for it, or it will fit when leases end that are not renewed.
    fn make_room(&mut self, id: LeaseId, out: &mut Vec<Change>) -> bool {
        let Some(lease) = self.book.get(id).filter(|_| self.book.waits(id)) else {
            return false;
        };
        // Nobody's leaving gives it what the group above it does not hold.
        if above_hold(&self.book, &self.room, lease).is_err() {
            return false;
        }
        let rivals = rivals(lease, &self.book, &self.room, &self.policy);
        let at = self.now.after(self.policy.grace);
        let trial = Trial::new(&mut self.room);
        if let Some(told) = trial.who_leaves(lease, rivals.clone(), at) {
            for (other, departure) in told {
                let own = self.book.get(other).and_then(|other| other.departure);
                // It may just have been told that it leaves with one above.
                if own.is_none_or(|own| own.to > departure.to || own.at > departure.at) {
                    self.announce(other, departure, out);
                }
            }
            return true;
        }
        Trial::new(&mut self.room).will_fit(lease, rivals)
    }

    /// Spares those who were to leave for a lease that does not wait any more. Returns
    /// whether there was one.
    fn spare_needless(&mut self, out: &mut Vec<Change>) -> bool {
        let is_needless = |lease: &&Lease| match lease.departure.map(|departure| departure.why) {
            Some(Cause::Preempted { by }) => !self.book.waits(by),
            _ => false,
        };
        let needless = self.book.leaving().filter(is_needless);
        let needless: Vec<LeaseId> = needless.map(|lease| lease.id).collect();
        for &lease in &needless {
            self.book.spare(lease);
            out.push(Change::Spared { lease });
        }
        // One above may leave all the same.
        for &lease in &needless {
            self.tell_with_those_above(lease, out);
        }
        !needless.is_empty()
    }

    fn mark_broken(&mut self, out: &mut Vec<Change>) {
        let broken = Trial::new(&mut self.room).broken(&self.book);
        let changed = self.book.broken().symmetric_difference(&broken);
        let changed: Vec<LeaseId> = changed.copied().collect();
        for lease in changed {
            out.push(match self.book.break_or_mend(lease, self.now) {
                Some(lasted) => Change::Mended { lease, lasted },
                None => Change::Broken { lease },
            });
        }
    }
}

fn above_and_own(group: &Group) -> Vec<GroupId> {
    group.above.iter().chain([&group.id]).copied().collect()
}

/// Whether one lease more of a tenant may be below the leased control groups that this one is in.
/// Whose the outermost of these is may have what others leave, and who else half of that: so
/// nobody but its owner uses all up.
fn fits_below(book: &Book, scope: &Scope, tenant: TenantId) -> Result<(), Refusal> {
    let Some((outermost, above)) = book.above_leased(scope) else {
        return Ok(());
    };
    let is_its = |lease: &Lease| lease.owner.tenant == tenant;
    let mut leases = book.of_group(outermost).filter_map(|id| book.get(id));
    let is_own = leases.any(is_its);
    // What the tenant has, and the most that it may have.
    let share = |all: usize, count: fn(&Lease) -> usize| {
        let below = book.below(outermost).filter_map(|id| book.get(id));
        let (own, others): (Vec<&Lease>, Vec<&Lease>) = below.partition(|lease| is_its(lease));
        let sum = |leases: Vec<&Lease>| leases.into_iter().map(count).sum::<usize>();
        let left = all.saturating_sub(sum(others));
        (sum(own), if is_own { left } else { left / 2 })
    };
    let (has, most) = share(MOST_BELOW, |_| 1);
    if has >= most {
        return Err(Refusal::TooManyBelow { above, most });
    }
    let more = scope.threads().len();
    let (has, most) = share(MOST_THREADS_BELOW, |lease| {
        lease.terms.scope.threads().len()
    });
    if more > 0 && has + more > most {
        return Err(Refusal::TooManyThreadsBelow { above, most });
    }
    Ok(())
}

/// Whether the control groups above that of a lease hold something, as far as they have
/// asked for it: what they do not hold, nobody can be given out of it.
fn above_hold(book: &Book, room: &Room, lease: &Lease) -> Result<(), Refusal> {
    let above = lease.terms.scope.above();
    let mut waiting = above.filter(|group| !room.has_group(*group));
    match waiting.find_map(|group| book.of_group(group).next()) {
        Some(id) => Err(Refusal::BeyondGroup {
            cpu: lease.terms.cpus.iter().next().unwrap_or_default(),
            above: Some(id),
        }),
        None => Ok(()),
    }
}

/// Whether what a lease was taken out of has not come back after a restart: `lost` are groups of
/// which a lease has not.
fn is_orphan(book: &Book, room: &Room, lease: &Lease, lost: &BTreeSet<GroupId>) -> bool {
    let scope = &lease.terms.scope;
    let is_leased = |id: GroupId| book.of_group(id).next().is_some();
    // There is no part without a whole, whatever is known of that.
    let is_of_nothing = matches!(scope, Scope::Part(part) if !is_leased(part.of.id));
    let mut above = scope.above();
    is_of_nothing
        || above.any(|id| lost.contains(&id) && !is_leased(id))
        || lease.holds > 0
            && (above_hold(book, room, lease).is_err() || room.is_beyond(lease.holding()))
}

/// Whether a lease below a control group holds more than that has.
fn is_beyond(room: &Room, lease: &Lease, above: &Group) -> bool {
    lease.holds > 0 && (!room.has_group(above.id) || room.is_beyond(lease.holding()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Tenant;
    use crate::room::JOINED;
    use crate::terms::Demand;

    fn group(id: u64, above: Vec<u64>) -> Group {
        Group {
            id: GroupId(id),
            above: above.into_iter().map(GroupId).collect(),
            path: format!("/{id}"),
        }
    }

    fn ask(
        arbiter: &mut HostArbiter,
        group: Group,
        counters: usize,
        at_least: usize,
    ) -> Result<Outcome, Refusal> {
        let all = Demand {
            pmu: PmuId(0),
            counters: CounterSet::first(8, 0),
        };
        let terms = Terms {
            demands: vec![all; counters],
            at_least,
            cpus: CpuSet::from_iter([0]),
            scope: Scope::Group(group.into()),
            guaranteed: true,
            priority: 0,
            preemptible: false,
            lasts: None,
            waits: Waits::No,
        };
        let owner = Owner {
            tenant: TenantId(0),
            uid: 1000,
            pid: 1,
            label: String::new(),
            by: None,
        };
        arbiter.request(owner, terms, BootTime(0), &mut Vec::new())
    }

    /// The dearest tree that one user can make: groups as deep as they may be, and as many leases
    /// in the innermost as may be below the outermost. What each call costs on a CPU is counted.
    #[test]
    fn a_call_costs_little_whatever_tree_somebody_has_made() {
        let pmu = HostPmu {
            name: "cpu".to_owned(),
            counters: CounterSet::first(8, 0),
            domains: vec![CpuSet::from_iter([0])],
            for_threads: true,
        };
        let policy = HostPolicy {
            tenants: vec![Tenant::open("a")],
            ..HostPolicy::default()
        };
        let mut arbiter = HostArbiter::new(vec![pmu], policy).expect("the policy fits");
        let granted = |outcome| match outcome {
            Ok(Outcome::Granted { lease, .. }) => lease,
            other => panic!("not granted: {other:?}"),
        };
        let outer = (1..=4).zip([8, 4, 2, 1]);
        let outer = outer.map(|(id, counters)| {
            granted(ask(
                &mut arbiter,
                group(id, (1..id).collect()),
                counters,
                counters,
            ))
        });
        let outer: Vec<LeaseId> = outer.collect();
        let deep = || (1..=62).collect::<Vec<u64>>();
        let mut dearest = 0;
        for id in (100..).take(MOST_BELOW - 4) {
            JOINED.set(0);
            granted(ask(&mut arbiter, group(id, deep()), 1, 1));
            dearest = dearest.max(JOINED.get());
        }
        assert!(dearest <= 64, "{dearest} to grant one");
        // Nothing is left below one of these: eight tries.
        let below = [deep(), vec![100]].concat();
        JOINED.set(0);
        let refused = ask(&mut arbiter, group(500, below), 8, 1);
        assert!(
            matches!(refused, Err(Refusal::BeyondGroup { .. })),
            "{refused:?}"
        );
        assert!(JOINED.get() <= 64, "{} to refuse one", JOINED.get());
        granted(ask(&mut arbiter, group(99, deep()), 1, 1));
        let refused = ask(&mut arbiter, group(98, deep()), 1, 1);
        assert!(
            matches!(refused, Err(Refusal::TooManyBelow { .. })),
            "{refused:?}"
        );
        let by = Caller {
            tenant: TenantId(0),
            uid: 1000,
            operator: false,
        };
        JOINED.set(0);
        let (now, out) = (BootTime(0), &mut Vec::new());
        arbiter
            .release(outer[0], 0, None, by, now, out)
            .expect("its own");
        assert_eq!(arbiter.leases().count(), 0);
        let most = (MOST_BELOW * (MOST_BELOW + 16)) as u64;
        assert!(JOINED.get() <= most, "{} to end all", JOINED.get());
    }
}
