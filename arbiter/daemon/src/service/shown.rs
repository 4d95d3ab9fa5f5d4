//! What is shown: leases, places, and outsiders.

use arbiter::host::{CpuSet, HostPmu, PmuId, Refusal, TenantId};
use umpire_budget::Holder;
use umpire_lease as wire;
use varlink::Reply;

use super::Service;
use crate::convert;

impl Service {
    pub(super) fn visible(&self, tenants: &[TenantId], operator: bool) -> Vec<wire::Lease> {
        let leases = self.arbiter.leases();
        let leases = leases.filter(|lease| operator || tenants.contains(&lease.owner.tenant));
        leases
            .map(|lease| convert::lease(&self.arbiter, lease))
            .collect()
    }

    pub(super) fn who(&self, only: Option<u32>) -> Result<Vec<wire::Place>, Reply> {
        let mut places = Vec::new();
        for pmu in self.arbiter.pmus() {
            let kinds = arbiter::PerKind::count(pmu.counters);
            for cpus in &pmu.domains {
                if only.is_some_and(|cpu| !cpus.contains(cpu)) {
                    continue;
                }
                let here = self.arbiter.leases().filter(|lease| {
                    let held = &lease.terms.demands[..lease.holds];
                    lease.terms.cpus.meets(cpus)
                        && held.iter().any(|demand| {
                            let place = &self.arbiter.pmus()[usize::from(demand.pmu.0)];
                            place.name == pmu.name
                        })
                });
                places.push(wire::Place {
                    pmu: pmu.name.clone(),
                    cpus: cpus.to_string(),
                    programmable: kinds.programmable.into(),
                    fixed: kinds.fixed.into(),
                    // Threads are many, and the same everywhere.
                    leases: here
                        .map(|lease| wire::Lease {
                            threads: Vec::new(),
                            ..convert::lease(&self.arbiter, lease)
                        })
                        .collect(),
                    outside: self.outside(pmu, cpus),
                });
            }
        }
        match only {
            Some(cpu) if places.is_empty() => Err(self.refused(&Refusal::NoSuchCpu {
                cpu,
                there: self.arbiter.online().clone(),
            })),
            _ => Ok(places),
        }
    }

    /// How many counters outsiders have of those that `cpus` share.
    pub(super) fn outside(&self, pmu: &HostPmu, cpus: &CpuSet) -> u32 {
        let index = self
            .arbiter
            .pmus()
            .iter()
            .position(|other| other.name == pmu.name);
        let index = index.and_then(|index| u16::try_from(index).ok()).map(PmuId);
        let place = index
            .zip(cpus.iter().next())
            .and_then(|(pmu, cpu)| self.arbiter.place(pmu, cpu));
        place.map_or(0, |place| {
            u32::try_from(self.arbiter.outside(place).len()).unwrap_or(u32::MAX)
        })
    }

    /// Who has counters, or may, without a lease: as far as the kernel shows.
    pub(super) fn outsiders(&self, only: Option<u32>) -> Vec<wire::Outsider> {
        let found = self.holders.iter().flat_map(|holders| &holders.found);
        let ours = |one: &Holder| {
            let mut leases = self.arbiter.leases();
            leases.any(|lease| super::is_of(one, lease.owner.pid))
        };
        let shown = found.filter_map(|holder| match holder {
            Holder::NmiWatchdog { cpus } => (only.is_none_or(|cpu| cpus.contains(cpu))
                && !self.has_watchdog())
            .then(|| wire::Outsider {
                what: "nmi-watchdog".to_owned(),
                name: "the kernel's NMI watchdog".to_owned(),
                cpus: Some(cpus.to_string()),
                ..wire::Outsider::default()
            }),
            Holder::Process {
                pid,
                uid,
                comm,
                events,
                msr_cpus,
                ..
            } => (!ours(holder)).then(|| wire::Outsider {
                what: "process".to_owned(),
                name: comm.clone(),
                pid: Some(*pid),
                uid: Some(*uid),
                events: Some(*events),
                cpus: (!msr_cpus.is_empty()).then(|| msr_cpus.to_string()),
            }),
        });
        let mut outsiders: Vec<wire::Outsider> = shown.collect();
        if let Some(hidden) = self
            .holders
            .as_ref()
            .map(|holders| holders.hidden)
            .filter(|hidden| *hidden > 0)
        {
            outsiders.push(wire::Outsider {
                what: "hidden".to_owned(),
                name: format!("{hidden} processes that the arbiter may not look at"),
                ..wire::Outsider::default()
            });
        }
        outsiders
    }
}
