//! What those who wait may have of others: room that leases make, and who is kept from
//! passing.

use std::collections::BTreeSet;

use super::room::{Holding, Shortage};
use super::{Cause, Change, Departure, HostArbiter, Lease, LeaseId};

impl HostArbiter {
    /// Has the room hold the first `to` of the lease's demands, if they fit.
    pub(super) fn fit(&mut self, id: LeaseId, to: usize) -> Result<(), Shortage> {
        self.pretend(id, None, to);
        let holding = self.leases[&id].holding();
        let wanted = Holding {
            holds: to,
            ..holding
        };
        let fits = self.room.check(wanted);
        if fits.is_err() {
            self.pretend(id, Some(to), holding.holds);
        }
        fits
    }

    /// Whether the lease could hold the first `to` of its demands now.
    fn could_hold(&mut self, id: LeaseId, to: usize) -> bool {
        let fits = self.fit(id, to).is_ok();
        if fits {
            self.pretend(id, Some(to), self.leases[&id].holds);
        }
        fits
    }

    /// The others that hold what the lease could want.
    fn rivals(&self, id: LeaseId) -> impl Iterator<Item = &Lease> {
        let terms = &self.leases[&id].terms;
        self.leases.values().filter(move |other| {
            other.id != id && other.holds > 0 && self.compete(&other.terms, terms)
        })
    }

    /// Whether counters of `other` may be taken for a lease of higher rank.
    pub(super) fn gives_way(&self, other: &Lease, id: LeaseId) -> bool {
        let tenant = self.policy.tenant(other.owner.tenant);
        let only = tenant.and_then(|tenant| tenant.gives_way_to.as_ref());
        let taker = self.leases[&id].owner.tenant;
        other.terms.can_be_preempted() && only.is_none_or(|only| only.contains(&taker))
    }

    /// Tells leases of lower rank to leave, if with what they hold and what is leaving
    /// anyhow the lease could have more than now: as few of them as will do, those of the
    /// lowest rank and the newest first. Returns whether it could.
    pub(super) fn make_room(&mut self, id: LeaseId, out: &mut Vec<Change>) -> bool {
        let lease = &self.leases[&id];
        let rank = lease.terms.rank();
        let (most, held) = (lease.terms.demands.len(), lease.holds);
        let least = lease.terms.at_least.max(held + 1);
        // Who leaves later than others would have to can be told to leave sooner.
        let at = self.now().after(self.policy.grace);
        let leaves = |other: &&Lease| {
            let departure = other.departure.as_ref();
            departure.is_some_and(|departure| departure.at <= at)
        };
        let (leaving, mut staying): (Vec<&Lease>, Vec<&Lease>) = self.rivals(id).partition(leaves);
        let leaving: Vec<(LeaseId, usize)> = leaving
            .into_iter()
            .filter_map(|other| Some((other.id, other.departure.as_ref()?.to)))
            .collect();
        staying.retain(|other| other.terms.rank() < rank && self.gives_way(other, id));
        staying.sort_by_key(|other| {
            (
                other.terms.rank(),
                std::cmp::Reverse(other.since),
                std::cmp::Reverse(other.id),
            )
        });
        let staying: Vec<LeaseId> = staying.into_iter().map(|other| other.id).collect();
        if leaving.is_empty() && staying.is_empty() {
            return false;
        }

        let mut gone: Vec<(LeaseId, usize)> = Vec::new();
        for &(other, to) in &leaving {
            self.pretend(other, None, to);
        }
        let mut untold = staying.into_iter();
        // To have less, no more have to leave: those who do for more stay away.
        let wanted = (least..=most).rev().find(|&to| {
            loop {
                if self.could_hold(id, to) {
                    return true;
                }
                let Some(other) = untold.next() else {
                    return false;
                };
                self.pretend(other, None, 0);
                gone.push((other, 0));
            }
        });
        if let Some(to) = wanted {
            // Whoever need not leave stays, with as much as possible.
            for (other, left) in gone.iter_mut().rev() {
                let held = &self.leases[other];
                let terms = held.terms.clone();
                for keeps in (1..=held.holds)
                    .rev()
                    .filter(|&keeps| terms.usable(keeps) == keeps)
                {
                    self.pretend(*other, Some(0), keeps);
                    if self.could_hold(id, to) {
                        *left = keeps;
                        break;
                    }
                    self.pretend(*other, Some(keeps), 0);
                }
            }
        }
        // All are where they were, before any is told.
        for &(other, to) in gone.iter().chain(&leaving) {
            let holds = self.leases[&other].holds;
            self.pretend(other, Some(to), holds);
        }
        if wanted.is_some() {
            for (other, to) in gone {
                if to < self.leases[&other].holds {
                    let revoked = self.leases[&other].departure.as_ref();
                    // A revocation stays one, and nobody spares its lease.
                    let revoked = revoked.filter(|one| matches!(one.why, Cause::Revoked { .. }));
                    let (to, why) = match revoked {
                        Some(one) => (to.min(one.to), one.why),
                        None => (to, Cause::Preempted { by: id }),
                    };
                    self.announce(other, Departure { at, to, why }, out);
                }
            }
        }
        wanted.is_some()
    }

    /// Changes what the room has of a lease from `from`, or what it holds, to `to`.
    pub(super) fn pretend(&mut self, id: LeaseId, from: Option<usize>, to: usize) {
        let holding = self.leases[&id].holding();
        let from = from.unwrap_or(holding.holds);
        self.room.remove(Holding {
            holds: from,
            ..holding
        });
        self.room.add(Holding {
            holds: to,
            ..holding
        });
    }

    /// Whether those who are served later are kept from passing: others leave for it, or
    /// it has waited for long and will fit when leases end that cannot be renewed beside
    /// it, or were not since it waits.
    pub(super) fn blocks(&mut self, id: LeaseId) -> bool {
        let lease = &self.leases[&id];
        let rank = lease.terms.rank();
        let (patient, waits_since) = (lease.patient, lease.waits_since);
        let ends: Vec<(LeaseId, usize)> = self
            .rivals(id)
            .filter_map(|other| match &other.departure {
                Some(departure) => Some((other.id, departure.to)),
                None => {
                    // It cannot be renewed beside this one, or was not since this one waits.
                    let gives_way = self.gives_way(other, id) && other.terms.rank() <= rank;
                    let is_renewed = other.renewed.is_some_and(|renewed| renewed >= waits_since);
                    let ends = !patient && other.until.is_some() && (gives_way || !is_renewed);
                    ends.then_some((other.id, 0))
                }
            })
            .collect();
        if ends.is_empty() {
            return false;
        }
        for &(other, to) in &ends {
            self.pretend(other, None, to);
        }
        let lease = &self.leases[&id];
        let fits = self.could_hold(id, lease.terms.at_least.max(lease.holds + 1));
        for &(other, to) in &ends {
            let holds = self.leases[&other].holds;
            self.pretend(other, Some(to), holds);
        }
        fits
    }

    /// Spares those who were to leave for a lease that does not wait any more. Returns
    /// whether there was one.
    pub(super) fn spare_needless(&mut self, out: &mut Vec<Change>) -> bool {
        let needless: Vec<LeaseId> = self
            .leaving
            .iter()
            .copied()
            .filter(|id| {
                match self
                    .leases
                    .get(id)
                    .and_then(|lease| lease.departure.as_ref())
                {
                    Some(Departure {
                        why: Cause::Preempted { by },
                        ..
                    }) => !self.waits(*by),
                    _ => false,
                }
            })
            .collect();
        for &lease in &needless {
            self.update(lease, |lease| lease.departure = None);
            out.push(Change::Spared { lease });
        }
        !needless.is_empty()
    }

    /// Finds out whose counters outsiders have: where leases hold more than there is left
    /// beside them, those of the lowest rank are broken, as many ranks as it takes.
    pub(super) fn mark_broken(&mut self, out: &mut Vec<Change>) {
        let mut broken: BTreeSet<LeaseId> = BTreeSet::new();
        let mut here: Vec<(LeaseId, usize)> = Vec::new();
        while let Some((place, set)) = self.room.overdrawn() {
            let needs = |lease: &&Lease| {
                !broken.contains(&lease.id)
                    && lease.terms.cpus.meets(self.room.cpus(place))
                    && lease.terms.demands[..lease.holds].iter().any(|demand| {
                        demand.pmu == place.pmu && (demand.counters & !set).is_empty()
                    })
            };
            let holders: Vec<&Lease> = self.leases.values().filter(needs).collect();
            let Some(lowest) = holders.iter().map(|lease| lease.terms.rank()).min() else {
                break;
            };
            let lowest = holders.iter().filter(|lease| lease.terms.rank() == lowest);
            let ids: Vec<LeaseId> = lowest.map(|lease| lease.id).collect();
            for id in ids {
                here.push((id, self.leases[&id].holds));
                self.pretend(id, None, 0);
                broken.insert(id);
            }
        }
        for (id, holds) in here {
            self.pretend(id, Some(0), holds);
        }
        let now = self.now();
        let changed: Vec<LeaseId> = self
            .broken
            .symmetric_difference(&broken)
            .copied()
            .filter(|id| self.leases.contains_key(id))
            .collect();
        for id in changed {
            let mut lasted = None;
            self.update(id, |lease| {
                lease.settle(now);
                lasted = lease.broken.map(|since| now.since(since));
                lease.broken = if lasted.is_some() { None } else { Some(now) };
            });
            out.push(match lasted {
                Some(lasted) => Change::Mended { lease: id, lasted },
                None => Change::Broken { lease: id },
            });
        }
        self.broken = broken;
    }
}
