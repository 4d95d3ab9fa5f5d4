//! The arbiter: commands of owners and of the host, and what follows from them.

use std::collections::{BTreeMap, BTreeSet};

use super::room::Room;
use super::usage::Usage;
use super::{
    BootTime, Cause, Change, CpuSet, Departure, HostPmu, HostPolicy, HostPolicyError, Lease,
    LeaseId, Owner, Place, PmuId, Refusal, Scope, TenantId, Terms, ThreadId, Waits,
};
use arbiter::{CounterSet, Nanos, PerKind};

/// Most counters of one lease.
pub(super) const MOST_DEMANDS: usize = 128;

/// What became of a request that was not refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It holds so many of its demands.
    Granted {
        /// The lease.
        lease: LeaseId,
        /// The number.
        holds: usize,
    },
    /// It waits.
    Waits {
        /// The lease that it will be.
        lease: LeaseId,
        /// How many are served before it.
        behind: usize,
        /// What it waits for.
        why: Refusal,
    },
}

/// Who gives a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The one of its user's tenants that it speaks for.
    pub tenant: TenantId,
    /// The user.
    pub uid: u32,
    /// Whether it may do everything.
    pub operator: bool,
}

/// The arbiter of a host.
#[derive(Clone, Debug)]
pub struct HostArbiter {
    pub(super) pmus: Vec<HostPmu>,
    pub(super) policy: HostPolicy,
    pub(super) room: Room,
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    pub(super) usage: Usage,
    /// Those that wait for something.
    pub(super) queue: BTreeSet<LeaseId>,
    /// Those that were told that they will lose something.
    pub(super) leaving: BTreeSet<LeaseId>,
    /// Those of whose counters somebody outside has some.
    pub(super) broken: BTreeSet<LeaseId>,
    /// When something is due for which lease.
    pub(super) due: BTreeSet<(BootTime, LeaseId)>,
    next: u64,
    pub(super) arrivals: u64,
    /// Nothing is granted.
    pub(super) frozen: bool,
    /// What is due after it is not done yet.
    due_until: Option<BootTime>,
    pub(super) now: BootTime,
}

impl HostArbiter {
    /// An arbiter of these PMUs. The minima of a policy are for counters of the first.
    ///
    /// # Errors
    /// The policy promises more than there is.
    pub fn new(pmus: Vec<HostPmu>, policy: HostPolicy) -> Result<Self, HostPolicyError> {
        let mut arbiter = HostArbiter {
            room: Room::new(&pmus),
            pmus,
            policy: HostPolicy::default(),
            leases: BTreeMap::new(),
            usage: Usage::default(),
            queue: BTreeSet::new(),
            leaving: BTreeSet::new(),
            broken: BTreeSet::new(),
            due: BTreeSet::new(),
            next: 1,
            arrivals: 0,
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
        self.leases.values()
    }

    /// One lease.
    pub fn lease(&self, id: LeaseId) -> Option<&Lease> {
        self.leases.get(&id)
    }

    /// The number that the next lease gets.
    pub fn next_id(&self) -> u64 {
        self.next
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
        self.due.first().map(|&(at, _)| at)
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
        self.learn(&terms)?;
        if let Scope::Thread(_) = terms.scope
            && let Some(pmu) = self.room.not_for_threads(&terms.demands)
        {
            return Err(Refusal::NotForThreads { pmu });
        }
        self.alone(&owner, &terms)?;

        let id = LeaseId(self.next);
        let tenant = owner.tenant;
        let waits = terms.waits;
        let lease = Lease::new(id, owner, terms, self.now, self.arrivals);
        self.usage.came(tenant, self.now);
        self.leases.insert(id, lease);
        self.update(id, |_| {});

        let turn = self.turn(id, self.now);
        let before = |other: &LeaseId| self.turn(*other, self.now) < turn;
        let ahead: Vec<LeaseId> = self
            .queue
            .iter()
            .copied()
            .filter(|other| *other != id && before(other))
            .collect();
        let blocker = ahead.iter().copied().find(|other| {
            self.leases[other].blocks
                && self.compete(&self.leases[other].terms, &self.leases[&id].terms)
        });
        let served = match blocker {
            Some(lease) => Err(Refusal::Behind { lease }),
            None => self.serve(id, out),
        };
        if let Err(why) = &served {
            let refused = match waits {
                Waits::No => Some(why.clone()),
                _ if self.queue.len() > self.policy.most_waiting => Some(Refusal::QueueFull {
                    most: self.policy.most_waiting,
                }),
                _ if self.waiting_of(tenant) > self.most_waiting(tenant) => {
                    let most = self.most_waiting(tenant);
                    Some(Refusal::OwnQueueFull { most })
                }
                _ => None,
            };
            if let Some(why) = refused {
                self.forget(id);
                return Err(why);
            }
        }
        self.next += 1;
        self.arrivals += 1;
        if self.waits(id) && blocker.is_none() {
            let blocks = self.make_room(id, out) || self.blocks(id);
            self.update(id, |lease| lease.blocks = blocks);
        }
        match served {
            Ok(()) => Ok(Outcome::Granted {
                lease: id,
                holds: self.leases[&id].holds,
            }),
            Err(why) => {
                let behind = ahead.len();
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
        self.own(id, generation, by)?;
        let lease = &self.leases[&id];
        let keep = lease.terms.usable(keep.min(lease.holds));
        if keep == 0 {
            self.end(id, Cause::Released, out);
        } else if keep < lease.terms.demands.len() {
            self.hold(id, keep, Cause::Released, out);
            // What was given back is not waited for.
            self.update(id, |lease| lease.terms.demands.truncate(keep));
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
        self.own(id, generation, by)?;
        let lease = &self.leases[&id];
        if let Some(departure) = &lease.departure {
            return Err(Refusal::Leaving { at: departure.at });
        }
        if let Some(by) = self.wanted_by(lease) {
            return Err(Refusal::Wanted { by });
        }
        if lease.holds == 0 {
            return Ok(None);
        }
        let until = lease.terms.lasts.map(|lasts| now.after(lasts));
        self.update(id, |lease| {
            lease.until = until;
            lease.renewed = Some(now);
        });
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
        let lease = self.leases.get(&id).ok_or(Refusal::NoSuchLease)?;
        let may = self
            .policy
            .tenant(by.tenant)
            .is_some_and(|own| own.revokes.contains(&lease.owner.tenant) && !own.retired);
        if !may && !by.operator && !self.is_own(lease, by) {
            return Err(self.foreign(lease));
        }
        let at = self.now.after(grace.unwrap_or(self.policy.grace));
        // What was announced comes no later for it.
        let at = lease
            .departure
            .as_ref()
            .map_or(at, |departure| departure.at.min(at));
        if lease.holds == 0 {
            self.end(id, Cause::Revoked { by: by.uid }, out);
        } else {
            self.announce(
                id,
                Departure {
                    at,
                    to: 0,
                    why: Cause::Revoked { by: by.uid },
                },
                out,
            );
        }
        self.go_on(out);
        self.advance(now, out);
        Ok(at)
    }

    /// The owner's connection has ended, and with it the lease.
    pub fn holder_gone(&mut self, id: LeaseId, now: BootTime, out: &mut Vec<Change>) {
        self.advance(now, out);
        if self.leases.contains_key(&id) {
            self.end(id, Cause::HolderGone, out);
            self.go_on(out);
        }
    }

    /// Ends leases at once: their user has counted on after another had ended.
    pub fn bar(&mut self, ids: &[LeaseId], now: BootTime, out: &mut Vec<Change>) {
        self.advance(now, out);
        for &id in ids {
            self.end(id, Cause::Barred, out);
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
            let Some(lease) = self.leases.get_mut(&id) else {
                continue;
            };
            self.room.remove(lease.holding());
            let gone: Vec<ThreadId> = match &mut lease.terms.scope {
                Scope::Cpu => Vec::new(),
                Scope::Thread(threads) => threads
                    .extract_if(.., |thread| ended.contains(thread))
                    .collect(),
            };
            self.room.add(lease.holding());
            if lease.terms.scope == Scope::Thread(Vec::new()) {
                self.end(id, Cause::ThreadsEnded, out);
            } else if !gone.is_empty() {
                let threads = gone;
                out.push(Change::ThreadsGone { lease: id, threads });
            }
        }
        self.go_on(out);
    }

    /// Takes over what was held before a restart. Each lease stays for `window`; its
    /// owner has to claim it in that time. `next` is the first number that was never
    /// given. Nothing that leases hold can be granted meanwhile. Returns those that cannot
    /// be: the host or the policy has changed.
    pub fn restore(
        &mut self,
        leases: Vec<Lease>,
        next: u64,
        window: Nanos,
        now: BootTime,
        out: &mut Vec<Change>,
    ) -> Vec<LeaseId> {
        self.now = self.now.max(now);
        let mut lost = Vec::new();
        for mut lease in leases {
            if lease.owner.tenant.0 as usize >= self.policy.tenants.len()
                || self.room.learn(&lease.terms.demands).is_err()
            {
                lost.push(lease.id);
                continue;
            }
            lease.settled = self.now;
            let claim_by = self.now.after(window);
            lease.claim_by = Some(claim_by);
            // Its owner could not renew it while nobody was there.
            lease.until = lease.until.map(|until| until.max(claim_by));
            self.next = self.next.max(lease.id.0 + 1);
            self.arrivals = self.arrivals.max(lease.arrival + 1);
            self.usage.came(lease.owner.tenant, self.now);
            let id = lease.id;
            let counters = self.counters(&lease.terms, 0..lease.holds);
            self.usage
                .changed(lease.owner.tenant, 0, counters, self.now);
            if lease.broken.is_some() {
                self.broken.insert(id);
            }
            self.leases.insert(id, lease);
            self.update(id, |_| {});
        }
        self.next = self.next.max(next);
        self.fill_room();
        self.go_on(out);
        lost
    }

    /// Takes back what was just granted, to `holds` counters: the caller could not keep its
    /// books. It waits for them again, if it waits at all.
    pub fn take_back(&mut self, id: LeaseId, holds: usize, now: BootTime, out: &mut Vec<Change>) {
        self.advance(now, out);
        let less = self
            .leases
            .get(&id)
            .is_some_and(|lease| holds < lease.holds);
        if less {
            self.hold(id, holds, Cause::Released, out);
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
        self.update(id, |lease| lease.claim_by = None);
        out.push(Change::Claimed { lease: id });
        self.go_on(out);
        // It may have waited for long enough meanwhile.
        self.advance(now, out);
        Ok(())
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
        self.fits_the_host(&policy)?;
        self.advance(now, out);
        self.policy = policy.following(&self.policy);
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
        for lease in self.leases.values() {
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
    /// for the latest that was given.
    pub fn advance(&mut self, now: BootTime, out: &mut Vec<Change>) {
        let until = self.now.max(now);
        let done = self.due_until.map_or(until, |most| most.min(until));
        // In the order of the instants, however late the caller is.
        while let Some(&(at, id)) = self.due.first().filter(|(at, _)| *at <= done) {
            self.now = self.now.max(at);
            let lease = &self.leases[&id];
            if lease
                .departure
                .as_ref()
                .is_some_and(|departure| departure.at <= self.now)
            {
                self.depart(id, out);
            } else if lease.until.is_some_and(|until| until <= self.now) {
                self.end(id, Cause::Expired, out);
            } else if lease.claim_by.is_some_and(|claim_by| claim_by <= self.now) {
                self.end(id, Cause::Unclaimed, out);
            } else if lease
                .gives_up()
                .is_some_and(|gives_up| gives_up <= self.now)
            {
                self.end(id, Cause::TimedOut, out);
            } else {
                // Its patience is over: whether it blocks others is decided below.
                self.update(id, |lease| lease.patient = false);
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

    fn depart(&mut self, id: LeaseId, out: &mut Vec<Change>) {
        let lease = &self.leases[&id];
        let Some(Departure { to, why, .. }) = lease.departure.clone() else {
            return;
        };
        if to == 0 && (lease.terms.waits == Waits::No || !matches!(why, Cause::Preempted { .. })) {
            self.end(id, why, out);
        } else {
            self.hold(id, to, why, out);
        }
    }

    /// The latest instant that it was told.
    pub fn now(&self) -> BootTime {
        self.now
    }
}
