//! Those who wait: in which order they are served, and with what.

use std::cmp::Reverse;

use super::{BootTime, Cause, Change, HostArbiter, Lease, LeaseId, Refusal, TenantId};

impl HostArbiter {
    /// Who waits, in the order of service.
    pub fn order(&self, now: BootTime) -> Vec<LeaseId> {
        let mut order: Vec<LeaseId> = self.queue.iter().copied().collect();
        order.sort_by_cached_key(|id| self.turn(*id, now));
        order
    }

    /// What the order of service compares.
    pub(super) fn turn(&self, id: LeaseId, now: BootTime) -> (Reverse<(bool, u8)>, u128, u64) {
        let lease = &self.leases[&id];
        let had = self.usage.had(lease.owner.tenant, now);
        (Reverse(lease.terms.rank()), had, lease.arrival)
    }

    /// Who waits for what `lease` holds and would get it at its end.
    pub(super) fn wanted_by(&self, lease: &Lease) -> Option<LeaseId> {
        let waiting = self.queue.iter().map(|id| &self.leases[id]);
        let mut waiting = waiting.filter(|other| other.blocks && other.id != lease.id);
        waiting
            .find(|other| {
                other.terms.rank() >= lease.terms.rank()
                    && self.gives_way(lease, other.id)
                    && self.compete(&lease.terms, &other.terms)
            })
            .map(|other| other.id)
    }

    /// What follows after something became free, or the rules changed: those who wait are
    /// served in their order.
    pub(super) fn go_on(&mut self, out: &mut Vec<Change>) {
        // Who is spared stays, so others may wait for somebody else than it seemed.
        while {
            self.serve_all(out);
            self.spare_needless(out)
        } {}
        self.mark_broken(out);
    }

    pub(super) fn serve_all(&mut self, out: &mut Vec<Change>) {
        if self.frozen {
            return;
        }
        let mut blockers: Vec<LeaseId> = Vec::new();
        for id in self.served_in(self.order(self.now)) {
            let lease = &self.leases[&id];
            let behind = blockers
                .iter()
                .any(|blocker| self.compete(&self.leases[blocker].terms, &lease.terms));
            let mut blocks = false;
            // Who was told to leave gets no more before it has left.
            if !behind && lease.departure.is_none() {
                // Why it has to wait longer was said when it came.
                let served = self.serve(id, out);
                let offline = matches!(served, Err(Refusal::NoSuchCpu { .. }));
                blocks = !offline && self.waits(id) && (self.make_room(id, out) || self.blocks(id));
            }
            self.update(id, |lease| lease.blocks = blocks);
            if blocks {
                blockers.push(id);
            }
        }
    }

    /// The order, but that those come last to whom a lease gives no way that waits for what
    /// they want: what one tenant has had of it is not the next one's.
    fn served_in(&self, order: Vec<LeaseId>) -> impl Iterator<Item = LeaseId> + use<> {
        let choosy: Vec<&Lease> = order
            .iter()
            .map(|id| &self.leases[id])
            .filter(|lease| {
                let tenant = self.policy.tenant(lease.owner.tenant);
                tenant.is_some_and(|tenant| tenant.gives_way_to.is_some())
            })
            .collect();
        let is_last = |id: &LeaseId| {
            choosy.iter().any(|other| {
                other.id != *id
                    && other.terms.can_be_preempted()
                    && other.departure.is_none()
                    && !self.gives_way(other, *id)
                    && self.compete(&other.terms, &self.leases[id].terms)
            })
        };
        let (last, first): (Vec<LeaseId>, Vec<LeaseId>) = order.into_iter().partition(is_last);
        first.into_iter().chain(last)
    }

    /// Gives a lease that waits as much as there is.
    pub(super) fn serve(&mut self, id: LeaseId, out: &mut Vec<Change>) -> Result<(), Refusal> {
        let lease = &self.leases[&id];
        // Nothing new is given on a CPU that is offline.
        if let Some(cpu) = lease.terms.cpus.first_beyond(self.online()) {
            let there = self.online().clone();
            return Err(Refusal::NoSuchCpu { cpu, there });
        }
        let least = lease.terms.at_least.max(lease.holds + 1);
        let mut short = None;
        for to in (least..=lease.terms.demands.len()).rev() {
            match self.fit(id, to) {
                Ok(()) => {
                    self.note_holds(id, to, Cause::Granted, out);
                    return Ok(());
                }
                Err(shortage) => short = Some(shortage),
            }
        }
        let others = self.leases.values().filter(|other| other.id != id);
        match short {
            Some(short) => Err(self.room.reason(short, others.map(Lease::holding))),
            None => Ok(()),
        }
    }

    /// How many requests of a tenant wait.
    pub(super) fn waiting_of(&self, tenant: TenantId) -> usize {
        let of = |id: &&LeaseId| self.leases[*id].owner.tenant == tenant;
        self.queue.iter().filter(of).count()
    }

    /// How many requests of a tenant may wait.
    pub(super) fn most_waiting(&self, tenant: TenantId) -> usize {
        let tenant = self.policy.tenant(tenant);
        tenant.map_or(0, |tenant| tenant.most_waiting)
    }

    pub(super) fn waits(&self, id: LeaseId) -> bool {
        self.queue.contains(&id)
    }
}
