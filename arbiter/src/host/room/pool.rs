//! The counters of one PMU: numbers for each CPU and each union of sets.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use crate::host::cpus::CpuSet;
use crate::host::ids::{HostPmu, PmuId, TenantId};
use crate::host::terms::Demand;
use crate::{CounterSet, PerKind};

/// Most unions of the sets that are asked for on one PMU.
pub(in crate::host) const MOST_UNIONS: usize = 64;

pub(in crate::host) const PROGRAMMABLE: CounterSet = CounterSet::from_bits(u32::MAX as u64);
pub(in crate::host) const FIXED: CounterSet = CounterSet::from_bits((u32::MAX as u64) << 32);

/// How many demands are confined to each union.
pub(in crate::host) type Need = [u8; MOST_UNIONS];

/// How many threads need so many counters: entry 0 is of those that need one.
#[derive(Clone, Debug, Default)]
pub(in crate::host) struct Histogram(Vec<u32>);

impl Histogram {
    pub(in crate::host) fn most(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    pub(in crate::host) fn add(&mut self, need: u8) {
        if let Some(at) = usize::from(need).checked_sub(1) {
            if at >= self.0.len() {
                self.0.resize(at + 1, 0);
            }
            self.0[at] += 1;
        }
    }

    pub(in crate::host) fn remove(&mut self, need: u8) {
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
pub(in crate::host) struct TenantUse {
    /// By leases of scope `cpu`.
    pub(in crate::host) cpu: PerKind,
    /// By threads, for each kind.
    pub(in crate::host) threads: [Histogram; 2],
}

#[derive(Clone, Debug)]
pub(in crate::host) struct Domain {
    pub(in crate::host) cpus: CpuSet,
    /// How many demands of leases of scope `cpu` are confined to each union.
    pub(in crate::host) held: Vec<u16>,
    /// The same of each thread.
    pub(in crate::host) threads: Vec<Histogram>,
    /// Counters that somebody who holds no lease has.
    pub(in crate::host) outside: Vec<CounterSet>,
    pub(in crate::host) tenants: BTreeMap<TenantId, TenantUse>,
}

#[derive(Clone, Debug)]
pub(in crate::host) struct Pool {
    pub(in crate::host) counters: CounterSet,
    pub(in crate::host) for_threads: bool,
    /// Unions of the sets that were asked for; the whole kinds come first.
    pub(in crate::host) unions: Vec<CounterSet>,
    pub(in crate::host) domains: Vec<Domain>,
    /// The CPUs that it counts on.
    pub(in crate::host) cpus: CpuSet,
    /// The domain of each of them, by the number of the CPU: each decision asks for that of
    /// each CPU several times.
    by_cpu: Vec<u32>,
}

impl Pool {
    pub(in crate::host) fn new(pmu: &HostPmu) -> Self {
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
    pub(in crate::host) fn domain_of(&self, cpu: u32) -> Option<u32> {
        let domain = self.by_cpu.get(cpu as usize);
        domain.copied().filter(|_| self.cpus.contains(cpu))
    }

    /// Adds a set, and its unions with those that it meets. Returns whether it was not
    /// known, or `None` if there would be too many.
    pub(in crate::host) fn learn(&mut self, set: CounterSet) -> Option<bool> {
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

    pub(in crate::host) fn need(&self, demands: &[Demand], pmu: PmuId) -> Need {
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
pub(in crate::host) fn whole_kinds(counters: CounterSet) -> Vec<CounterSet> {
    let kinds = [counters & PROGRAMMABLE, counters & FIXED];
    kinds.into_iter().filter(|kind| !kind.is_empty()).collect()
}

/// How many counters of each kind are asked for.
pub(in crate::host) fn kinds(demands: &[Demand], pmu: PmuId) -> PerKind {
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
