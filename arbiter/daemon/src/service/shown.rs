//! What is shown: leases and places.

use arbiter::host::{Refusal, TenantId};
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
}
