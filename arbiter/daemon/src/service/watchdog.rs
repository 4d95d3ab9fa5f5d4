//! The NMI watchdog as one of those who share the counters: a lease like others, which the
//! policy lets nobody take, or guaranteed leases only. What the lease holds says whether
//! the watchdog is to be on. Pure: the switch is turned elsewhere.

use arbiter::{CounterId, CounterSet};
use arbiter_host::{
    BootTime, Cause, CpuSet, Demand, LeaseId, Outcome, Owner, PmuId, Scope, Terms, Waits,
};

use super::Service;
use crate::config::{ArbiterConfig, WATCHDOG};

/// The watchdog's claim.
#[derive(Debug, Default)]
pub(super) struct Claim {
    /// Where it is to be; empty: nowhere.
    cpus: CpuSet,
    lease: Option<LeaseId>,
    /// It was to be turned off, and could not be.
    stuck: bool,
    /// The CPUs of that.
    stuck_on: CpuSet,
}

impl Service {
    /// The watchdog is for these CPUs; none: the kernel has none, or nobody wants it.
    pub(crate) fn set_watchdog(&mut self, cpus: Option<CpuSet>, now: BootTime) {
        let pmu = self.arbiter.pmus().first();
        let there = pmu.map(|pmu| pmu.domains.iter().flat_map(CpuSet::iter).collect());
        let there: CpuSet = there.unwrap_or_default();
        self.watchdog.cpus = cpus.unwrap_or_default().and(&there);
        self.follow_watchdog(now);
    }

    /// Its lease is for all of its CPUs that are online, and stays for those that went.
    pub(super) fn follow_watchdog(&mut self, now: BootTime) {
        if self.stuck.is_some() {
            // Nothing is given meanwhile, and what it has it keeps.
            return;
        }
        let wanted = self.watchdog.cpus.and(self.arbiter.online());
        let lease = self.watchdog.lease.and_then(|id| self.arbiter.lease(id));
        let covered = lease.is_some_and(|lease| wanted.without(&lease.terms.cpus).is_empty());
        let nowhere = self.watchdog.cpus.is_empty();
        if nowhere && lease.is_some() || !nowhere && !covered {
            self.claim_anew(now);
        }
    }

    /// Asks for what the watchdog has, and gives nobody else what it had before meanwhile.
    fn claim_anew(&mut self, now: BootTime) {
        self.arbiter.freeze();
        self.end_watchdog(now);
        self.claim_watchdog(now);
        self.arbiter.thaw(now, &mut self.changes);
        self.settle();
    }

    /// Its lease ends; it asks for another when it is looked at again.
    fn end_watchdog(&mut self, now: BootTime) {
        self.set_watchdog_stuck(false, now);
        if let Some(id) = self.watchdog.lease.take() {
            self.arbiter.holder_gone(id, now, &mut self.changes);
            self.settle();
        }
    }

    fn claim_watchdog(&mut self, now: BootTime) {
        let tenant = self.arbiter.policy().named(WATCHDOG);
        let (Some(tenant), Some(demand)) = (tenant, self.watchdog_demand()) else {
            return;
        };
        let cpus = self.watchdog.cpus.and(self.arbiter.online());
        if cpus.is_empty() {
            return;
        }
        let owner = Owner {
            tenant,
            uid: 0,
            pid: 0,
            label: WATCHDOG.to_owned(),
        };
        let terms = Terms {
            demands: vec![demand],
            at_least: 1,
            cpus,
            scope: Scope::Cpu,
            guaranteed: self.config.watchdog.keep,
            priority: u8::MAX,
            preemptible: false,
            lasts: None,
            waits: Waits::Always,
        };
        let outcome = self.arbiter.request(owner, terms, now, &mut self.changes);
        match outcome {
            Ok(Outcome::Granted { lease, .. } | Outcome::Waits { lease, .. }) => {
                self.watchdog.lease = Some(lease);
            }
            Err(refusal) => {
                let why = crate::words::message(&self.arbiter, &refusal);
                log::warn!("the NMI watchdog's counter is not accounted for: {why}");
            }
        }
        self.settle();
    }

    /// The counter that it uses: the fixed-function one for cycles, where there is one.
    fn watchdog_demand(&self) -> Option<Demand> {
        let counters = self.arbiter.pmus().first()?.counters;
        let cycles = CounterSet::from_iter([CounterId::Fixed(1)]);
        let any = counters & CounterSet::from_bits(u64::from(u32::MAX));
        let one = [counters & cycles, any].into_iter();
        let counters = one.into_iter().find(|set| !set.is_empty())?;
        let pmu = PmuId(0);
        Some(Demand { pmu, counters })
    }

    /// Whether the watchdog is to be on. `None`: it is nobody's affair here.
    pub(crate) fn watchdog_on(&self) -> Option<bool> {
        let lease = self.arbiter.lease(self.watchdog.lease?)?;
        // What was not written may be taken back. One that is kept is never turned off, not
        // even if it was turned on after others had its counter.
        (self.stuck.is_none()).then_some(lease.holds > 0 || self.config.watchdog.keep)
    }

    /// Whether leases hold the watchdog's counter, also while the journal cannot be written.
    pub(crate) fn needs_watchdogs_counter(&self) -> bool {
        let lease = self.watchdog.lease.and_then(|id| self.arbiter.lease(id));
        lease.is_some_and(|lease| lease.holds == 0) && !self.config.watchdog.keep
    }

    /// Whether the watchdog has a lease, or waits for one.
    pub(super) fn has_watchdog(&self) -> bool {
        self.watchdog.lease.is_some()
    }

    /// Whether this is the watchdog's lease.
    pub(super) fn is_watchdog(&self, id: LeaseId) -> bool {
        self.watchdog.lease == Some(id)
    }

    /// The watchdog's lease has ended.
    pub(super) fn forget_watchdog(&mut self, why: Cause) {
        log::debug!("the watchdog's lease has ended: {why:?}");
        self.watchdog.lease = None;
    }

    /// It should be off, and is on, since it cannot be turned: it has counters that leases
    /// need. Where counters are measured, that is seen anyway.
    pub(crate) fn set_watchdog_stuck(&mut self, stuck: bool, now: BootTime) {
        if self.watchdog.stuck == stuck || self.config.pmus.is_empty() {
            return;
        }
        self.watchdog.stuck = stuck;
        let demand = self.watchdog_demand().filter(|_| stuck);
        let outside: Vec<CounterSet> = demand.map(|demand| demand.counters).into_iter().collect();
        // What it had where it was then is free again, wherever it is now.
        let now_on = if stuck {
            self.watchdog.cpus.clone()
        } else {
            CpuSet::default()
        };
        let before = std::mem::replace(&mut self.watchdog.stuck_on, now_on.clone());
        let cpus = if stuck { now_on } else { before };
        for cpu in cpus.iter() {
            if let Some(place) = self.arbiter.place(PmuId(0), cpu) {
                let changes = &mut self.changes;
                self.arbiter
                    .set_outside(place, outside.clone(), now, changes);
            }
        }
        self.settle();
    }

    /// Another configuration is in force: the claim is as that one says.
    pub(super) fn renew_watchdog(&mut self, before: &ArbiterConfig, now: BootTime) {
        if before.watchdog.keep != self.config.watchdog.keep {
            if self.stuck.is_none() {
                self.claim_anew(now);
            } else {
                // When the journal can be written, it asks as the configuration says then.
                self.end_watchdog(now);
            }
        }
    }
}
