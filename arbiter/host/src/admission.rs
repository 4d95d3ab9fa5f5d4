//! Whether a command may be given at all, whoever holds what.

use super::host::MOST_DEMANDS;
use super::room::whole_kinds;
use super::{
    Caller, CpuSet, Demand, HostArbiter, HostPolicy, HostPolicyError, Lease, LeaseId, Owner, PmuId,
    Refusal, Scope, Tenant, Terms,
};
use arbiter::{CounterId, PerKind};

impl HostArbiter {
    pub(super) fn fits_the_host(&self, policy: &HostPolicy) -> Result<(), HostPolicyError> {
        let Some(pmu) = self.pmus.first() else {
            return Ok(());
        };
        let there = PerKind::count(pmu.counters);
        for cpu in pmu.domains.iter().flat_map(CpuSet::iter) {
            let here =
                |tenant: &&Tenant| tenant.cpus.as_ref().is_none_or(|cpus| cpus.contains(cpu));
            for (kind, counter) in [
                ("programmable", CounterId::Programmable(0)),
                ("fixed-function", CounterId::Fixed(0)),
            ] {
                let of = |kinds: PerKind| kinds.of(counter);
                let tenants = || policy.tenants.iter().filter(here);
                let cpus: u32 = tenants()
                    .map(|tenant| u32::from(of(tenant.minimum.cpu)))
                    .sum();
                let threads = tenants()
                    .map(|tenant| u32::from(of(tenant.minimum.thread)))
                    .max();
                let promised = cpus + threads.unwrap_or(0);
                let there = u32::from(of(there));
                if promised > there {
                    return Err(HostPolicyError::MoreThanThereIs {
                        kind,
                        promised,
                        there,
                        cpu,
                    });
                }
            }
        }
        Ok(())
    }

    /// Whether the request may be made at all.
    pub(super) fn admit(&self, owner: &Owner, terms: &Terms) -> Result<(), Refusal> {
        let tenant = self
            .policy
            .tenant(owner.tenant)
            .filter(|tenant| !tenant.retired);
        let tenant = tenant.ok_or(Refusal::UnknownTenant)?;
        let count = terms.demands.len();
        if count > MOST_DEMANDS || terms.at_least == 0 || terms.at_least > count {
            return Err(Refusal::WrongNumber { most: MOST_DEMANDS });
        }
        if terms.cpus.is_empty() {
            return Err(Refusal::NoCpus);
        }
        if let Some(cpu) = terms.cpus.first_beyond(self.online()) {
            return Err(Refusal::NoSuchCpu {
                cpu,
                there: self.online().clone(),
            });
        }
        if let Some(allowed) = &tenant.cpus
            && let Some(cpu) = terms.cpus.first_beyond(allowed)
        {
            return Err(Refusal::CpuNotAllowed {
                cpu,
                allowed: allowed.clone(),
            });
        }
        if terms.priority > tenant.priority {
            return Err(Refusal::Priority {
                most: tenant.priority,
            });
        }
        if terms.guaranteed && !tenant.guaranteed {
            return Err(Refusal::NoGuarantees);
        }
        if !terms.can_be_preempted() && !tenant.keeps {
            return Err(Refusal::MustBePreemptible);
        }
        match &terms.scope {
            Scope::Cpu if !tenant.whole_cpus => return Err(Refusal::NoWholeCpus),
            Scope::Thread(threads) if threads.is_empty() => return Err(Refusal::NoThreads),
            _ => {}
        }
        if let Some(most) = tenant.longest
            && terms.lasts.is_none_or(|lasts| lasts > most)
        {
            return Err(Refusal::TooLong { most });
        }
        self.names_few_sets(owner, terms, tenant.most_sets)?;
        if self.usage.leases(owner.tenant) >= tenant.most_leases {
            return Err(Refusal::TooManyLeases {
                most: tenant.most_leases,
            });
        }
        Ok(())
    }

    /// Whether the tenant's leases, with this one, name few enough sets of counters: the room
    /// counts by their unions, which are few for all tenants together.
    fn names_few_sets(&self, owner: &Owner, terms: &Terms, most: usize) -> Result<(), Refusal> {
        let named = |demand: &&Demand| {
            let pmu = self.pmus.get(usize::from(demand.pmu.0));
            pmu.is_some_and(|pmu| !whole_kinds(pmu.counters).contains(&demand.counters))
        };
        if !terms.demands.iter().any(|demand| named(&demand)) {
            return Ok(());
        }
        let own = self.leases.values();
        let own = own.filter(|lease| lease.owner.tenant == owner.tenant);
        let own = own.flat_map(|lease| &lease.terms.demands);
        let mut sets: Vec<(PmuId, u64)> = own
            .chain(&terms.demands)
            .filter(named)
            .map(|demand| (demand.pmu, demand.counters.bits()))
            .collect();
        sets.sort_unstable();
        sets.dedup();
        let of_pmu = |pmu: PmuId| sets.iter().filter(|(other, _)| *other == pmu).count();
        let too_many = terms.demands.iter().any(|demand| of_pmu(demand.pmu) > most);
        if too_many {
            return Err(Refusal::TooManySets { most });
        }
        Ok(())
    }

    /// Whether the request would be possible if nobody held anything, and the least of it
    /// for its tenant.
    pub(super) fn alone(&self, owner: &Owner, terms: &Terms) -> Result<(), Refusal> {
        let tenant = self.policy.tenant(owner.tenant);
        let most = tenant.map_or(PerKind::ALL, |tenant| tenant.maximum);
        self.room
            .can_have(&terms.demands, &terms.cpus, PerKind::ALL)?;
        self.room
            .can_have(&terms.demands[..terms.at_least], &terms.cpus, most)
    }

    /// Has the room know which sets of counters are asked for.
    pub(super) fn learn(&mut self, terms: &Terms) -> Result<(), Refusal> {
        let mut learnt = self.room.learn(&terms.demands);
        if learnt == Err(Refusal::TooManyKinds) {
            // Those that nobody asks for any more make room for others.
            self.room.forget();
            for lease in self.leases.values() {
                // They were learnt before, when there were more.
                let _ = self.room.learn(&lease.terms.demands);
            }
            learnt = self.room.learn(&terms.demands);
            self.fill_room();
        }
        // Of a set that is refused, others may have been learnt.
        if learnt != Ok(false) {
            self.fill_room();
        }
        learnt.map(|_| ())
    }

    /// Whether the lease is of the caller's user, and of the tenant for which it speaks. A
    /// tenant that has no members any more is told by the user alone.
    pub(super) fn is_own(&self, lease: &Lease, by: Caller) -> bool {
        let owner = &lease.owner;
        let retired = self
            .policy
            .tenant(owner.tenant)
            .is_none_or(|tenant| tenant.retired);
        by.uid == owner.uid && (retired || by.tenant == owner.tenant)
    }

    /// Whether a caller may give commands about a lease.
    ///
    /// # Errors
    /// There is no such lease, it is another's, or it has changed since.
    pub fn own(&self, id: LeaseId, generation: Option<u64>, by: Caller) -> Result<(), Refusal> {
        let lease = self.leases.get(&id).ok_or(Refusal::NoSuchLease)?;
        if !by.operator && !self.is_own(lease, by) {
            return Err(self.foreign(lease));
        }
        match generation {
            Some(known) if known != lease.generation => Err(Refusal::WrongGeneration {
                now: lease.generation,
            }),
            _ => Ok(()),
        }
    }

    pub(super) fn foreign(&self, lease: &Lease) -> Refusal {
        let tenant = self.policy.tenant(lease.owner.tenant);
        Refusal::Foreign {
            tenant: tenant.map(|tenant| tenant.name.clone()).unwrap_or_default(),
        }
    }
}
