//! The books: every change of a lease goes through these, so that what it holds, what is
//! due for it, and whether it waits agree.

use std::ops::Range;

use super::{Cause, Change, Departure, HostArbiter, Lease, LeaseId, Terms};

impl HostArbiter {
    /// Changes a lease, and keeps what is due for it and whether it waits.
    pub(super) fn update(&mut self, id: LeaseId, change: impl FnOnce(&mut Lease)) {
        let Some(lease) = self.leases.get_mut(&id) else {
            return;
        };
        if let Some(at) = lease.due {
            self.due.remove(&(at, id));
        }
        change(lease);
        if lease.is_waiting() {
            self.queue.insert(id);
        } else {
            lease.blocks = false;
            self.queue.remove(&id);
        }
        if lease.departure.is_some() {
            self.leaving.insert(id);
        } else {
            self.leaving.remove(&id);
        }
        lease.due = lease.next_due(self.policy.patience);
        if let Some(at) = lease.due {
            self.due.insert((at, id));
        }
    }

    /// The lease holds the first `to` of its demands from now on.
    pub(super) fn hold(&mut self, id: LeaseId, to: usize, why: Cause, out: &mut Vec<Change>) {
        self.pretend(id, None, to);
        self.note_holds(id, to, why, out);
    }

    /// The lease holds the first `to` of its demands from now on, and the room knows.
    pub(super) fn note_holds(&mut self, id: LeaseId, to: usize, why: Cause, out: &mut Vec<Change>) {
        let now = self.now;
        let lease = &self.leases[&id];
        let tenant = lease.owner.tenant;
        let changed = self.counters(&lease.terms, lease.holds.min(to)..lease.holds.max(to));
        let (less, more) = if to < lease.holds {
            (changed, 0)
        } else {
            (0, changed)
        };
        self.usage.changed(tenant, less, more, now);
        let arrival = self.arrivals;
        self.arrivals += 1;
        let mut generation = 0;
        self.update(id, |lease| {
            lease.settle(now);
            if lease.holds == 0 {
                lease.until = lease.terms.lasts.map(|lasts| now.after(lasts));
            }
            if to < lease.holds {
                // It begins to wait, behind those who do already.
                lease.waits_since = now;
                lease.patient = true;
                lease.arrival = arrival;
            }
            if to == 0 {
                lease.until = None;
            }
            lease.since.get_or_insert(now);
            // What was announced still comes, if it takes anything.
            lease.departure = lease
                .departure
                .take()
                .filter(|departure| departure.to < to && departure.at > now);
            lease.holds = to;
            lease.generation += 1;
            generation = lease.generation;
        });
        out.push(Change::Holds {
            lease: id,
            holds: to,
            generation,
            why,
        });
    }

    pub(super) fn announce(&mut self, id: LeaseId, departure: Departure, out: &mut Vec<Change>) {
        self.update(id, |lease| lease.departure = Some(departure.clone()));
        out.push(Change::Announced {
            lease: id,
            departure,
        });
    }

    pub(super) fn end(&mut self, id: LeaseId, why: Cause, out: &mut Vec<Change>) {
        if let Some(mut lease) = self.forget(id) {
            lease.settle(self.now);
            out.push(Change::Ended {
                lease: Box::new(lease),
                why,
            });
        }
    }

    /// Removes a lease, and what it holds.
    pub(super) fn forget(&mut self, id: LeaseId) -> Option<Lease> {
        let lease = self.leases.remove(&id)?;
        self.room.remove(lease.holding());
        let counters = self.counters(&lease.terms, 0..lease.holds);
        self.usage
            .changed(lease.owner.tenant, counters, 0, self.now);
        self.usage.left(lease.owner.tenant);
        self.queue.remove(&id);
        self.leaving.remove(&id);
        if let Some(at) = lease.due {
            self.due.remove(&(at, id));
        }
        Some(lease)
    }

    /// The counters that these demands take, each CPU's by itself.
    pub(super) fn counters(&self, terms: &Terms, demands: Range<usize>) -> u64 {
        self.room.counters(&terms.demands[demands], &terms.cpus)
    }

    /// Adds everything that is held to the room anew.
    pub(super) fn fill_room(&mut self) {
        self.room.clear();
        for lease in self.leases.values() {
            self.room.add(lease.holding());
        }
    }

    /// Whether both can want the same counter.
    pub(super) fn compete(&self, one: &Terms, other: &Terms) -> bool {
        let pairs = one
            .demands
            .iter()
            .flat_map(|a| other.demands.iter().map(move |b| (a, b)));
        let mut same = pairs.filter(|(a, b)| a.pmu == b.pmu);
        same.any(|(a, b)| {
            !(a.counters & b.counters).is_empty() && self.room.meet(a.pmu, &one.cpus, &other.cpus)
        })
    }
}
