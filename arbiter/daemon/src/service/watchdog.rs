//! The NMI watchdog as one of those who share the counters: a lease like others, which the
//! policy lets nobody take, or guaranteed leases only. What the lease holds says whether
//! the watchdog is to be on. Pure: the switch is turned elsewhere.

use arbiter::{CounterId, CounterSet, PerKind};
use arbiter_host::{
    CpuSet, Demand, HostArbiter, Lease, LeaseId, Owner, Place, PmuId, Scope, Terms, Waits,
};

use crate::config::WATCHDOG;

/// The watchdog's claim.
#[derive(Debug, Default)]
pub(crate) struct Claim {
    /// Where it is to be; empty: nowhere.
    cpus: CpuSet,
    lease: Option<LeaseId>,
    /// It was to be turned off, and could not be.
    stuck: bool,
    /// The CPUs of that.
    stuck_on: CpuSet,
}

impl Claim {
    /// The watchdog is for these CPUs; none: the kernel has none, or nobody wants it.
    pub(crate) fn set_cpus(&mut self, cpus: Option<CpuSet>, arbiter: &HostArbiter) {
        let pmu = arbiter.pmus().first();
        let there = pmu.map(|pmu| pmu.domains.iter().flat_map(CpuSet::iter).collect());
        let there: CpuSet = there.unwrap_or_default();
        self.cpus = cpus.unwrap_or_default().and(&there);
    }

    /// Whether it is to ask for a lease anew: that is for all of its CPUs that are online,
    /// stays for those of them that went, and is for no others.
    pub(crate) fn is_due(&self, arbiter: &HostArbiter) -> bool {
        let wanted = self.cpus.and(arbiter.online());
        match self.lease(arbiter).map(|lease| &lease.terms.cpus) {
            Some(cpus) => {
                let lacking = wanted.without(cpus);
                let beyond = cpus.without(&self.cpus);
                !lacking.is_empty() || !beyond.is_empty()
            }
            None => !self.cpus.is_empty(),
        }
    }

    /// What it asks for. `keep`: nobody else gets its counter.
    pub(crate) fn request(&self, arbiter: &HostArbiter, keep: bool) -> Option<(Owner, Terms)> {
        let tenant = arbiter.policy().named(WATCHDOG)?;
        let demand = demand(arbiter)?;
        let cpus = self.cpus.and(arbiter.online());
        if cpus.is_empty() {
            return None;
        }
        let owner = Owner {
            tenant,
            uid: 0,
            pid: 0,
            label: WATCHDOG.to_owned(),
            by: None,
        };
        let terms = Terms {
            demands: vec![demand],
            at_least: 1,
            cpus,
            scope: Scope::Cpu,
            guaranteed: keep,
            priority: u8::MAX,
            preemptible: false,
            lasts: None,
            waits: Waits::Always,
        };
        Some((owner, terms))
    }

    pub(crate) fn has(&mut self, lease: LeaseId) {
        self.lease = Some(lease);
    }

    /// It asks for another lease when it is looked at again.
    pub(crate) fn take_lease(&mut self) -> Option<LeaseId> {
        self.lease.take()
    }

    /// Whether it has a lease, or waits for one.
    pub(super) fn has_lease(&self) -> bool {
        self.lease.is_some()
    }

    /// Whether this is its lease.
    pub(crate) fn is(&self, id: LeaseId) -> bool {
        self.lease == Some(id)
    }

    /// Its lease, while that is there.
    pub(super) fn lease<'a>(&self, arbiter: &'a HostArbiter) -> Option<&'a Lease> {
        arbiter.lease(self.lease?)
    }

    /// What its lease holds of a place.
    pub(crate) fn holds(&self, place: Place, arbiter: &HostArbiter) -> PerKind {
        let mut holds = PerKind::default();
        let lease = self.lease(arbiter).filter(|lease| lease.holds > 0);
        let Some(Terms { demands, cpus, .. }) = lease.map(|lease| &lease.terms) else {
            return holds;
        };
        let is_here = |demand: &Demand| {
            let mut places = cpus.iter().filter_map(|cpu| arbiter.place(demand.pmu, cpu));
            places.any(|its| its == place)
        };
        // It demands one.
        for demand in demands.iter().filter(|demand| is_here(demand)) {
            if PerKind::count(demand.counters).fixed > 0 {
                holds.fixed += 1;
            } else {
                holds.programmable += 1;
            }
        }
        holds
    }

    /// It should be off, and is on, since it cannot be turned: it has counters that leases
    /// need. Returns what outsiders have now, and where; `None`: that is as it was.
    pub(super) fn set_stuck(
        &mut self,
        stuck: bool,
        arbiter: &HostArbiter,
    ) -> Option<(Vec<Place>, Vec<CounterSet>)> {
        if self.stuck == stuck {
            return None;
        }
        self.stuck = stuck;
        let demand = demand(arbiter).filter(|_| stuck);
        let outside = demand.map(|demand| demand.counters).into_iter().collect();
        // What it had where it was then is free again, wherever it is now.
        let now_on = if stuck {
            self.cpus.clone()
        } else {
            CpuSet::default()
        };
        let before = std::mem::replace(&mut self.stuck_on, now_on.clone());
        let cpus = if stuck { now_on } else { before };
        let places = cpus.iter().filter_map(|cpu| arbiter.place(PmuId(0), cpu));
        Some((places.collect(), outside))
    }
}

/// The counter that it uses: the fixed-function one for cycles, where there is one.
fn demand(arbiter: &HostArbiter) -> Option<Demand> {
    let counters = arbiter.pmus().first()?.counters;
    let cycles = CounterSet::from_iter([CounterId::Fixed(1)]);
    let any = counters & CounterSet::from_bits(u64::from(u32::MAX));
    let one = [counters & cycles, any].into_iter();
    let counters = one.into_iter().find(|set| !set.is_empty())?;
    let pmu = PmuId(0);
    Some(Demand { pmu, counters })
}
