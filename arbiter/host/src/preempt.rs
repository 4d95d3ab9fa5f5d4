//! What would be if leases held less: who has to leave for one that waits, whether it will
//! fit, and whose counters outsiders have.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::book::Book;
use super::ids::{BootTime, LeaseId};
use super::lease::{Cause, Departure, Holding, Lease};
use super::policy::HostPolicy;
use super::queue::Choosy;
use super::room::Room;

/// Another lease, that holds what one could want which waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rival<'a> {
    lease: &'a Lease,
    /// Whether the one that waits may take it, if it is of higher rank.
    gives_way: bool,
}

/// The others that hold what the lease could want.
pub(crate) fn rivals<'a>(
    lease: &Lease,
    book: &'a Book,
    room: &Room,
    policy: &HostPolicy,
) -> Vec<Rival<'a>> {
    let choosy = Choosy::of(book, room, policy);
    let competes = |other: &&Lease| {
        other.id != lease.id && other.holds > 0 && room.compete(&other.terms, &lease.terms)
    };
    let rivals = book.all().filter(competes);
    rivals
        .map(|other| Rival {
            lease: other,
            gives_way: choosy.let_take(lease, other),
        })
        .collect()
}

/// A room in which leases hold other than they do. It is as it was once this is dropped.
#[derive(Debug)]
pub(crate) struct Trial<'a> {
    room: &'a mut Room,
    moved: BTreeMap<LeaseId, (Holding<'a>, usize)>,
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        for (was, to) in self.moved.values() {
            self.room.change(was.with(*to), was.holds);
        }
    }
}

impl<'a> Trial<'a> {
    pub(crate) fn new(room: &'a mut Room) -> Self {
        let moved = BTreeMap::new();
        Trial { room, moved }
    }

    fn hold(&mut self, lease: &'a Lease, to: usize) {
        let was = lease.holding();
        let (_, holds) = self.moved.entry(lease.id).or_insert((was, was.holds));
        self.room.change(was.with(*holds), to);
        *holds = to;
    }

    /// Whether a lease that holds what it does could hold the first `to` of its demands.
    fn fits(&mut self, lease: &Lease, to: usize) -> bool {
        let holding = lease.holding();
        let fits = self.room.fit(holding, to).is_ok();
        if fits {
            self.room.change(holding.with(to), holding.holds);
        }
        fits
    }

    /// Who of lower rank has to leave by `at` so that the lease could have more than now,
    /// with what they hold and what is leaving anyhow: as few as will do, those of the lowest
    /// rank and the newest first. `None` if it could not.
    pub(crate) fn who_leaves(
        mut self,
        lease: &Lease,
        rivals: Vec<Rival<'a>>,
        at: BootTime,
    ) -> Option<Vec<(LeaseId, Departure)>> {
        // Who leaves later than others would have to can be told to leave sooner.
        let (mut leaving, mut staying) = (Vec::new(), Vec::new());
        for Rival {
            lease: other,
            gives_way,
        } in rivals
        {
            if other.departure.is_some_and(|departure| departure.at <= at) {
                leaving.push(other);
            } else if gives_way && other.terms.rank() < lease.terms.rank() {
                staying.push(other);
            }
        }
        if leaving.is_empty() && staying.is_empty() {
            return None;
        }
        staying.sort_by_key(|other| (other.terms.rank(), Reverse(other.since), Reverse(other.id)));
        for other in leaving {
            let left = other
                .departure
                .map_or(other.holds, |departure| departure.to);
            self.hold(other, left);
        }
        let (to, gone) = self.most(lease, staying)?;
        let gone = self.spare(lease, to, gone);
        let gone = gone.into_iter().filter(|(other, to)| *to < other.holds);
        let told = gone.map(|(other, to)| (other.id, departure(other, to, lease.id, at)));
        Some(told.collect())
    }

    /// The most that the lease could have if some of `staying` left, and these.
    fn most(&mut self, lease: &Lease, staying: Vec<&'a Lease>) -> Option<(usize, Vec<&'a Lease>)> {
        let mut staying = staying.into_iter();
        let mut gone = Vec::new();
        // To have less, no more have to leave: those who do for more stay away.
        let wanted = (lease.least_more()..=lease.terms.demands.len()).rev();
        for to in wanted {
            loop {
                if self.fits(lease, to) {
                    return Some((to, gone));
                }
                let Some(other) = staying.next() else {
                    break;
                };
                self.hold(other, 0);
                gone.push(other);
            }
        }
        None
    }

    /// Whoever need not leave stays, with as much as possible: how much each has left.
    fn spare(&mut self, lease: &Lease, to: usize, gone: Vec<&'a Lease>) -> Vec<(&'a Lease, usize)> {
        let mut left: Vec<(&Lease, usize)> = gone.into_iter().map(|other| (other, 0)).collect();
        for (other, left) in left.iter_mut().rev() {
            let mut usable = (1..=other.holds)
                .rev()
                .filter(|&keeps| other.terms.usable(keeps) == keeps);
            let keeps = usable.find(|&keeps| {
                self.hold(other, keeps);
                self.fits(lease, to)
            });
            *left = keeps.unwrap_or(0);
            self.hold(other, *left);
        }
        left
    }

    /// Whether the lease, which waits, will have more when those end that leave, or that
    /// cannot be renewed beside it. After it has waited for long, those count too that were
    /// not renewed since.
    pub(crate) fn will_fit(mut self, lease: &Lease, rivals: Vec<Rival<'a>>) -> bool {
        let left = |rival: &Rival<'_>| match rival.lease.departure {
            Some(departure) => Some(departure.to),
            None => {
                let other = rival.lease;
                let gives_way = rival.gives_way && other.terms.rank() <= lease.terms.rank();
                let is_renewed = other.renewed_since(lease.waits_since);
                let ends =
                    !lease.is_patient() && other.until.is_some() && (gives_way || !is_renewed);
                ends.then_some(0)
            }
        };
        let mut ends = false;
        for rival in rivals {
            if let Some(left) = left(&rival) {
                self.hold(rival.lease, left);
                ends = true;
            }
        }
        ends && self.fits(lease, lease.least_more())
    }

    /// Whose counters outsiders have: where leases hold more than there is left beside them,
    /// those of the lowest rank are broken, as many ranks as it takes.
    pub(crate) fn broken(mut self, book: &'a Book) -> BTreeSet<LeaseId> {
        let mut broken = BTreeSet::new();
        while let Some((place, set)) = self.room.overdrawn() {
            let cpus = self.room.cpus(place);
            let needs = |lease: &&Lease| {
                let mut demands = lease.holding().demands().iter();
                !broken.contains(&lease.id)
                    && lease.terms.cpus.meets(cpus)
                    && demands.any(|demand| {
                        demand.pmu == place.pmu && (demand.counters & !set).is_empty()
                    })
            };
            let holders: Vec<&Lease> = book.all().filter(needs).collect();
            let Some(lowest) = holders.iter().map(|lease| lease.terms.rank()).min() else {
                break;
            };
            for lease in holders {
                if lease.terms.rank() == lowest {
                    self.hold(lease, 0);
                    broken.insert(lease.id);
                }
            }
        }
        broken
    }
}

fn departure(other: &Lease, to: usize, by: LeaseId, at: BootTime) -> Departure {
    match other.departure {
        // A revocation stays one, and nobody spares its lease.
        Some(Departure {
            to: left,
            why: why @ Cause::Revoked { .. },
            ..
        }) => Departure {
            at,
            to: to.min(left),
            why,
        },
        _ => Departure {
            at,
            to,
            why: Cause::Preempted { by },
        },
    }
}
