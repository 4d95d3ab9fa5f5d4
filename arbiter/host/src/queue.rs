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

/// The order, but that those come last to whom a lease gives no way that waits for what
/// they want: what one tenant has had of it is not the next one's. Whoever would have to
/// leave for one of these at once comes after it.
pub(crate) fn served_in(order: Vec<&Lease>, room: &Room, policy: &HostPolicy) -> Vec<LeaseId> {
    let is_choosy = |lease: &&&Lease| {
        let tenant = policy.tenant(lease.owner.tenant);
        tenant.is_some_and(|tenant| tenant.gives_way_to.is_some())
            && lease.terms.can_be_preempted()
            && lease.departure.is_none()
    };
    let choosy: Vec<&Lease> = order.iter().filter(is_choosy).copied().collect();
    let (mut first, mut last): (Vec<&Lease>, Vec<&Lease>) = (Vec::new(), Vec::new());
    for lease in order {
        let competes = |other: &Lease| room.compete(&other.terms, &lease.terms);
        let comes_last = choosy.iter().any(|other| {
            other.id != lease.id && !other.gives_way(lease.owner.tenant, policy) && competes(other)
        });
        // Those of higher rank were looked at before.
        let would_leave = last.iter().any(|other| {
            other.terms.rank() > lease.terms.rank()
                && lease.gives_way(other.owner.tenant, policy)
                && competes(other)
        });
        if comes_last || would_leave {
            last.push(lease);
        } else {
            first.push(lease);
        }
    }
    first
        .into_iter()
        .chain(last)
        .map(|lease| lease.id)
        .collect()
}

/// Who waits for what `lease` holds and would get it at its end.
pub(crate) fn wanted_by(
    lease: &Lease,
    book: &Book,
    room: &Room,
    policy: &HostPolicy,
) -> Option<LeaseId> {
    let mut waiting = book
        .waiting()
        .filter(|other| other.blocks() && other.id != lease.id);
    let by = waiting.find(|other| {
        other.terms.rank() >= lease.terms.rank()
            && lease.gives_way(other.owner.tenant, policy)
            && room.compete(&lease.terms, &other.terms)
    });
    by.map(|other| other.id)
}
