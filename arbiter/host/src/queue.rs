//! Those who wait: in which order they are served, and whom they keep waiting.

use std::cmp::Reverse;

use super::book::Book;
use super::ids::{BootTime, LeaseId};
use super::lease::Lease;
use super::policy::HostPolicy;
use super::room::Room;
use super::usage::Usage;

/// What the order of service compares: rank, what the tenant has had, and arrival.
type Turn = (Reverse<(bool, u8)>, u128, u64);

fn turn(lease: &Lease, usage: &Usage, now: BootTime) -> Turn {
    let had = usage.had(lease.owner.tenant, now);
    (Reverse(lease.terms.rank()), had, lease.arrival())
}

/// Who waits, in the order of service.
pub(crate) fn order<'a>(book: &'a Book, usage: &Usage, now: BootTime) -> Vec<&'a Lease> {
    let mut order: Vec<&Lease> = book.waiting().collect();
    order.sort_by_cached_key(|lease| turn(lease, usage, now));
    order
}

/// The others that wait and are served before a lease.
pub(crate) fn before<'a>(
    lease: &Lease,
    book: &'a Book,
    usage: &Usage,
    now: BootTime,
) -> Vec<&'a Lease> {
    let own = turn(lease, usage, now);
    let before = |other: &&Lease| other.id != lease.id && turn(other, usage, now) < own;
    book.waiting().filter(before).collect()
}

/// Whether a lease gives way, to some tenants only.
pub(crate) fn is_choosy(lease: &Lease, policy: &HostPolicy) -> bool {
    let tenant = policy.tenant(lease.owner.tenant);
    tenant.is_some_and(|tenant| tenant.gives_way_to.is_some())
        && lease.terms.can_be_preempted()
        && lease.departure.is_none()
}

/// Who of those that wait gives way to some tenants only. What one of these tenants has had
/// of it is not the next one's.
pub(crate) struct Choosy<'a> {
    leases: Vec<&'a Lease>,
    room: &'a Room,
    policy: &'a HostPolicy,
}

impl<'a> Choosy<'a> {
    pub(crate) fn of(book: &'a Book, room: &'a Room, policy: &'a HostPolicy) -> Self {
        let waiting = book.waiting();
        Choosy {
            leases: waiting.filter(|one| is_choosy(one, policy)).collect(),
            room,
            policy,
        }
    }

    /// Whether a lease is served after all others, whatever its rank: another tenant's, that
    /// gives it no way, waits for what it wants.
    fn comes_last(&self, lease: &Lease) -> bool {
        self.leases.iter().any(|other| {
            other.owner.tenant != lease.owner.tenant
                && !other.gives_way(lease.owner.tenant, self.policy)
                && self.room.compete(&other.terms, &lease.terms)
        })
    }

    /// Whether `taker`, if it is of higher rank, may take counters of a lease. From one that
    /// is served before it, it would take in vain: without a grace, for ever.
    pub(crate) fn let_take(&self, taker: &Lease, lease: &Lease) -> bool {
        lease.gives_way(taker.owner.tenant, self.policy)
            && (!self.comes_last(taker) || self.comes_last(lease))
    }
}

/// Who waits, as they are served: in the order of service, but some come last.
pub(crate) fn served_in(
    book: &Book,
    usage: &Usage,
    room: &Room,
    policy: &HostPolicy,
    now: BootTime,
) -> Vec<LeaseId> {
    let choosy = Choosy::of(book, room, policy);
    let is_last = |lease: &&Lease| choosy.comes_last(lease);
    let (last, first): (Vec<&Lease>, Vec<&Lease>) =
        order(book, usage, now).into_iter().partition(is_last);
    let served = first.into_iter().chain(last);
    served.map(|lease| lease.id).collect()
}

/// Who waits for what `lease` holds and would get it at its end.
pub(crate) fn wanted_by(
    lease: &Lease,
    book: &Book,
    room: &Room,
    policy: &HostPolicy,
) -> Option<LeaseId> {
    let choosy = Choosy::of(book, room, policy);
    let mut waiting = book
        .waiting()
        .filter(|other| other.blocks() && other.id != lease.id);
    let by = waiting.find(|other| {
        other.terms.rank() >= lease.terms.rank()
            && choosy.let_take(other, lease)
            && room.compete(&lease.terms, &other.terms)
    });
    by.map(|other| other.id)
}
