//! The book of the host's leases: the one place that asks the host's arbiter, and what has
//! changed in it and was not followed yet.

use std::collections::{BTreeMap, BTreeSet};

use arbiter::{CounterSet, Nanos};
use arbiter_host::{
    BootTime, Caller, Cause, Change, CpuSet, HeldBefore, HostArbiter, HostPolicy, LeaseId, Outcome,
    Owner, Place, Refusal, TenantId, Terms, ThreadId,
};
use umpire_lease as wire;

/// The longest notice of a revocation.
const MOST_GRACE: Nanos = Nanos(60_000_000_000);
const MS: u64 = 1_000_000;

#[derive(Debug)]
pub(super) struct Book {
    arbiter: HostArbiter,
    changes: Vec<Change>,
}

impl Book {
    pub(super) fn new(arbiter: HostArbiter) -> Self {
        Book {
            arbiter,
            changes: Vec::new(),
        }
    }

    pub(super) fn arbiter(&self) -> &HostArbiter {
        &self.arbiter
    }

    /// What has changed since this was asked last.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    pub(super) fn set_policy(&mut self, policy: HostPolicy, now: BootTime) -> Result<(), String> {
        let set = self.arbiter.set_policy(policy, now, &mut self.changes);
        set.map_err(|error| error.to_string())
    }

    pub(super) fn set_online(&mut self, online: &CpuSet, now: BootTime) {
        self.arbiter
            .set_online(online.clone(), now, &mut self.changes);
    }

    /// Outsiders have these counters of a place now.
    pub(super) fn set_outside(&mut self, place: Place, outside: Vec<CounterSet>, now: BootTime) {
        self.arbiter
            .set_outside(place, outside, now, &mut self.changes);
    }

    pub(super) fn advance(&mut self, now: BootTime) {
        self.arbiter.advance(now, &mut self.changes);
    }

    pub(super) fn hold_due(&mut self, after: Option<BootTime>) {
        self.arbiter.hold_due(after);
    }

    /// Nothing is given to anybody until [`Book::thaw`].
    pub(super) fn freeze(&mut self) {
        self.arbiter.freeze();
    }

    pub(super) fn thaw(&mut self, now: BootTime) {
        self.arbiter.thaw(now, &mut self.changes);
    }

    pub(super) fn request(
        &mut self,
        owner: Owner,
        terms: Terms,
        now: BootTime,
    ) -> Result<Outcome, Refusal> {
        self.arbiter.request(owner, terms, now, &mut self.changes)
    }

    pub(super) fn claim(
        &mut self,
        asked: &wire::ClaimIn,
        caller: Caller,
        now: BootTime,
    ) -> Result<(), Refusal> {
        let id = LeaseId(asked.lease);
        let changes = &mut self.changes;
        self.arbiter
            .claim(id, asked.generation, caller, now, changes)
    }

    pub(super) fn release(
        &mut self,
        asked: &wire::ReleaseIn,
        caller: Caller,
        now: BootTime,
    ) -> Result<(), Refusal> {
        let keep = usize::try_from(asked.keep.unwrap_or(0)).unwrap_or(usize::MAX);
        let (id, changes) = (LeaseId(asked.lease), &mut self.changes);
        self.arbiter
            .release(id, keep, asked.generation, caller, now, changes)
    }

    pub(super) fn renew(
        &mut self,
        asked: &wire::RenewIn,
        caller: Caller,
        now: BootTime,
    ) -> Result<wire::RenewOut, Refusal> {
        let (id, changes) = (LeaseId(asked.lease), &mut self.changes);
        let until = self
            .arbiter
            .renew_first(id, asked.generation, caller, now, changes)?;
        let left_ms = until.map(|until| until.since(now).0 / MS);
        Ok(wire::RenewOut { left_ms })
    }

    /// A user may revoke what is of any of its tenants; the last refusal is told.
    pub(super) fn revoke(
        &mut self,
        asked: &wire::RevokeIn,
        caller: Caller,
        others: &[TenantId],
        now: BootTime,
    ) -> Result<wire::RevokeOut, Refusal> {
        let grace = asked.grace_ms.map(|ms| Nanos(ms.saturating_mul(MS)));
        // Only operators choose another notice than the policy's.
        let grace = grace
            .filter(|_| caller.operator)
            .map(|grace| grace.min(MOST_GRACE));
        let callers = others.iter().map(|&tenant| Caller { tenant, ..caller });
        let mut at = Err(Refusal::NoSuchLease);
        for caller in std::iter::once(caller).chain(callers) {
            let (id, changes) = (LeaseId(asked.lease), &mut self.changes);
            at = self.arbiter.revoke(id, grace, caller, now, changes);
            if at.is_ok() {
                break;
            }
        }
        let in_ms = at?.since(now).0 / MS;
        Ok(wire::RevokeOut { in_ms })
    }

    /// Whoever had the lease is gone.
    pub(super) fn gone(&mut self, id: LeaseId, now: BootTime) {
        self.arbiter.holder_gone(id, now, &mut self.changes);
    }

    pub(super) fn threads_ended(
        &mut self,
        ended: &BTreeMap<LeaseId, BTreeSet<ThreadId>>,
        now: BootTime,
    ) {
        self.arbiter.threads_ended(ended, now, &mut self.changes);
    }

    /// Ends leases at once, for something that was seen.
    pub(super) fn end_now(&mut self, leases: &[LeaseId], why: Cause, now: BootTime) {
        self.arbiter.end_now(leases, why, now, &mut self.changes);
    }

    /// Takes over what was held before a restart. Returns what cannot be any more.
    pub(super) fn restore(
        &mut self,
        before: HeldBefore,
        window: Nanos,
        now: BootTime,
    ) -> Vec<LeaseId> {
        self.arbiter.restore(before, window, now, &mut self.changes)
    }

    /// A lease holds so many as before: what came since was not written.
    pub(super) fn take_back(&mut self, id: LeaseId, holds: usize, now: BootTime) {
        self.arbiter.take_back(id, holds, now, &mut self.changes);
    }
}
