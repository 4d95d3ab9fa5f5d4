//! The counters of one PMU: numbers for each CPU and each union of sets.

use std::collections::BTreeMap;

use crate::cpus::CpuSet;
use crate::ids::{HostPmu, PmuId, TenantId};
use crate::terms::Demand;
use arbiter::{CounterSet, PerKind};

/// Most unions of the sets that are asked for on one PMU.
pub(crate) const MOST_UNIONS: usize = 64;

pub(crate) const PROGRAMMABLE: CounterSet = CounterSet::from_bits(u32::MAX as u64);
pub(crate) const FIXED: CounterSet = CounterSet::from_bits((u32::MAX as u64) << 32);

/// How many demands are confined to each union.
pub(crate) type Need = [u8; MOST_UNIONS];

/// How many threads need so many counters: entry 0 is of those that need one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram(Vec<u32>);

impl Histogram {
    pub(crate) fn most(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn add(&mut self, need: u8) {
        if let Some(at) = usize::from(need).checked_sub(1) {
            if at >= self.0.len() {
                self.0.resize(at + 1, 0);
            }
            self.0[at] += 1;
        }
    }

    pub(crate) fn remove(&mut self, need: u8) {
        if let Some(at) = usize::from(need).checked_sub(1) {
            self.0[at] -= 1;
            while self.0.last() == Some(&0) {
                self.0.pop();
            }
        }
    }
}

/// What one tenant uses of a domain.
#[derive(Clone, Debug, Default)]
pub(crate) struct TenantUse {
    /// By leases of scope `cpu`.
    pub(crate) cpu: PerKind,
    /// By threads, for each kind.
    pub(crate) threads: [Histogram; 2],
}

#[derive(Clone, Debug)]
pub(crate) struct Domain {
    pub(crate) cpus: CpuSet,
    /// How many demands of leases of scope `cpu` are confined to each union.
    pub(crate) held: Vec<u16>,
    /// The same of each thread.
    pub(crate) threads: Vec<Histogram>,
    /// Counters that somebody who holds no lease has.
    pub(crate) outside: Vec<CounterSet>,
    pub(crate) tenants: BTreeMap<TenantId, TenantUse>,
}

#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub(crate) counters: CounterSet,
    pub(crate) for_threads: bool,
    /// Unions of the sets that were asked for; the whole kinds come first.
    pub(crate) unions: Vec<CounterSet>,
    pub(crate) domains: Vec<Domain>,
    /// The CPUs that it counts on.
    pub(crate) cpus: CpuSet,
    /// The domain of each of them, by the number of the CPU: each decision asks for that of
    /// each CPU several times.
    by_cpu: Vec<u32>,
}

impl Pool {
    pub(crate) fn new(pmu: &HostPmu) -> Self {
        let cpus: CpuSet = pmu.domains.iter().flat_map(CpuSet::iter).collect();
        let mut by_cpu = Vec::new();
        for (index, cpus) in (0u32..).zip(&pmu.domains) {
            for cpu in cpus.iter() {
                let at = cpu as usize;
                by_cpu.resize(by_cpu.len().max(at + 1), 0);
                by_cpu[at] = index;
            }
        }
        let unions = whole_kinds(pmu.counters);
        let domain = |cpus: &CpuSet| Domain {
            cpus: cpus.clone(),
            held: vec![0; unions.len()],
            threads: vec![Histogram::default(); unions.len()],
            outside: Vec::new(),
            tenants: BTreeMap::new(),
        };
        Pool {
            counters: pmu.counters,
            for_threads: pmu.for_threads,
            domains: pmu.domains.iter().map(domain).collect(),
            unions,
            cpus,
            by_cpu,
        }
    }

    /// The domain of a CPU that the PMU counts on.
    pub(crate) fn domain_of(&self, cpu: u32) -> Option<u32> {
        let domain = self.by_cpu.get(cpu as usize);
        domain.copied().filter(|_| self.cpus.contains(cpu))
    }

    /// Adds a set, and its unions with those that it meets. Returns whether it was not
    /// known, or `None` if there would be too many.
    pub(crate) fn learn(&mut self, set: CounterSet) -> Option<bool> {
        if self.unions.contains(&set) {
            return Some(false);
        }
        let mut unions = self.unions.clone();
        let mut new = vec![set];
        for &known in &self.unions {
            for at in 0..new.len() {
                if !(known & new[at]).is_empty() {
                    new.push(known | new[at]);
                }
            }
            new.sort_unstable_by_key(|set| set.bits());
            new.dedup();
        }
        new.retain(|set| !self.unions.contains(set));
        unions.extend(new);
        if unions.len() > MOST_UNIONS {
            return None;
        }
        self.unions = unions;
        Some(true)
    }

    pub(crate) fn need(&self, demands: &[Demand], pmu: PmuId) -> Need {
        let mut need = [0; MOST_UNIONS];
        for demand in demands.iter().filter(|demand| demand.pmu == pmu) {
            for (need, &union) in need.iter_mut().zip(&self.unions) {
                *need += u8::from((demand.counters & !union).is_empty());
            }
        }
        need
    }
}

/// All counters of each kind that there is.
pub(crate) fn whole_kinds(counters: CounterSet) -> Vec<CounterSet> {
    let kinds = [counters & PROGRAMMABLE, counters & FIXED];
    kinds.into_iter().filter(|kind| !kind.is_empty()).collect()
}

/// How many counters of each kind are asked for.
pub(crate) fn kinds(demands: &[Demand], pmu: PmuId) -> PerKind {
    let mut kinds = PerKind::default();
    for demand in demands.iter().filter(|demand| demand.pmu == pmu) {
        if (demand.counters & FIXED).is_empty() {
            kinds.programmable += 1;
        } else {
            kinds.fixed += 1;
        }
    }
    kinds
}
