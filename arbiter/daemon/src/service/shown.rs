//! What is shown: leases and places.

use std::collections::BTreeMap;

use arbiter::host::{Lease, LeaseId, Place, PmuId, Refusal, TenantId};
use umpire_lease as wire;
use varlink::Reply;

use super::Service;
use crate::convert;

/// Most leases that are shown of all places together, each as often as it holds something;
/// and of each place, where they are more.
const MOST_SHOWN: usize = 8192;
const MOST_OF_PLACE: usize = 16;

impl Service {
    pub(super) fn visible(&self, tenants: &[TenantId], operator: bool) -> Vec<wire::Lease> {
        let leases = self.arbiter.leases();
        let leases = leases.filter(|lease| operator || tenants.contains(&lease.owner.tenant));
        leases
            .map(|lease| convert::lease(&self.arbiter, lease))
            .collect()
    }

    /// Who holds which counters, place by place; those of one CPU with `only`. `labels`:
    /// names are shown.
    pub(super) fn who(&self, only: Option<u32>, labels: bool) -> Result<Vec<wire::Place>, Reply> {
        let held = self.held_at(only);
        let all: usize = held.values().map(Vec::len).sum();
        let most = match only {
            None if all > MOST_SHOWN => MOST_OF_PLACE,
            _ => usize::MAX,
        };
        let mut shown: BTreeMap<LeaseId, wire::Lease> = BTreeMap::new();
        let mut places = Vec::new();
        for (id, pmu) in (0u16..).map(PmuId).zip(self.arbiter.pmus()) {
            let kinds = arbiter::PerKind::count(pmu.counters);
            for (domain, cpus) in (0u32..).zip(&pmu.domains) {
                if only.is_some_and(|cpu| !cpus.contains(cpu)) {
                    continue;
                }
                let here = held.get(&Place { pmu: id, domain });
                let here = here.map(Vec::as_slice).unwrap_or_default();
                let mut leases: Vec<wire::Lease> = here
                    .iter()
                    .take(most)
                    .map(|lease| {
                        let shown = shown.entry(lease.id);
                        let shown = shown.or_insert_with(|| self.brief(lease, labels));
                        shown.clone()
                    })
                    .collect();
                if let Some(more) = here.len().checked_sub(most).filter(|more| *more > 0) {
                    let cpu = cpus.iter().next().unwrap_or_default();
                    leases.push(wire::Lease {
                        label: format!(
                            "{more} more leases; name the CPU for all: umpire who {cpu}"
                        ),
                        ..wire::Lease::default()
                    });
                }
                places.push(wire::Place {
                    pmu: pmu.name.clone(),
                    cpus: cpus.to_string(),
                    programmable: kinds.programmable.into(),
                    fixed: kinds.fixed.into(),
                    leases,
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

    /// The leases that hold something of each place, or of those of one CPU.
    fn held_at(&self, only: Option<u32>) -> BTreeMap<Place, Vec<&Lease>> {
        let mut held: BTreeMap<Place, Vec<&Lease>> = BTreeMap::new();
        for lease in self.arbiter.leases() {
            let demands = &lease.terms.demands[..lease.holds];
            let mut pmus: Vec<PmuId> = demands.iter().map(|demand| demand.pmu).collect();
            pmus.sort_unstable();
            pmus.dedup();
            for pmu in pmus {
                let of_cpu = |cpu| self.arbiter.place(pmu, cpu);
                let add = |place| {
                    let here: &mut Vec<&Lease> = held.entry(place).or_default();
                    // Several of its CPUs may share a place.
                    if here.last().is_none_or(|last| last.id != lease.id) {
                        here.push(lease);
                    }
                };
                let domains = &self.arbiter.pmus()[usize::from(pmu.0)].domains;
                match only {
                    None => lease.terms.cpus.iter().filter_map(of_cpu).for_each(add),
                    Some(cpu) => of_cpu(cpu)
                        .filter(|place| lease.terms.cpus.meets(&domains[place.domain as usize]))
                        .into_iter()
                        .for_each(add),
                }
            }
        }
        held
    }

    /// A lease without its threads, which are many, and the same everywhere.
    fn brief(&self, lease: &Lease, labels: bool) -> wire::Lease {
        let mut brief = convert::lease(&self.arbiter, lease);
        brief.threads = Vec::new();
        if !labels {
            brief.label = String::new();
        }
        brief
    }
}

#[cfg(test)]
mod tests {
    use arbiter::CounterSet;
    use arbiter::host::{BootTime, Demand, HostArbiter, Owner, Scope, Terms, ThreadId, Waits};

    use super::*;
    use crate::config::{ArbiterConfig, PmuConfig};

    /// So many threads' leases, each on 16 of 512 CPUs.
    fn service(leases: u32) -> Service {
        let mut config = ArbiterConfig {
            pmus: vec![PmuConfig::stated(4, 0).expect("four counters")],
            ..ArbiterConfig::default()
        };
        config.policy.tenants[0].most_leases = usize::MAX;
        let pmus = config.host_pmus(&(0..512).collect());
        let arbiter = HostArbiter::new(pmus, config.policy.clone()).expect("the policy fits");
        let mut service = Service::new(arbiter, config);
        for lease in 0..leases {
            let owner = Owner {
                tenant: TenantId(0),
                uid: 0,
                pid: 1,
                label: format!("vm{lease}"),
            };
            let demand = Demand {
                pmu: PmuId(0),
                counters: CounterSet::first(4, 0),
            };
            let terms = Terms {
                demands: vec![demand],
                at_least: 1,
                cpus: (0..16).map(|cpu| (lease * 16 + cpu) % 512).collect(),
                scope: Scope::Thread(vec![ThreadId(lease)]),
                guaranteed: true,
                priority: 0,
                preemptible: false,
                lasts: None,
                waits: Waits::No,
            };
            let granted = service
                .arbiter
                .request(owner, terms, BootTime(0), &mut Vec::new());
            granted.expect("they share in time");
        }
        service
    }

    #[test]
    fn few_leases_are_shown_wherever_they_are() {
        let service = service(40);
        let places = service.who(None, true).expect("places");
        assert_eq!(places.len(), 512);
        let labels = |place: &wire::Place| -> Vec<String> {
            place.leases.iter().map(|one| one.label.clone()).collect()
        };
        assert_eq!(labels(&places[0]), ["vm0", "vm32"]);
        assert_eq!(labels(&places[511]), ["vm31"]);
        assert_eq!(
            service.who(Some(511), true).expect("one"),
            [places[511].clone()]
        );
        assert!(service.who(Some(512), true).is_err());
    }

    #[test]
    fn of_many_leases_a_few_are_shown_of_each_place() {
        let service = service(10_000);
        let places = service.who(None, true).expect("places");
        assert!(
            places
                .iter()
                .all(|place| place.leases.len() <= MOST_OF_PLACE + 1)
        );
        let last = places[3].leases.last().expect("one that stands for others");
        let more = 10_000usize.div_ceil(32) - MOST_OF_PLACE;
        assert!(last.id == 0 && last.label.starts_with(&format!("{more} more leases")));
        let one = service.who(Some(3), true).expect("one");
        assert_eq!(one[0].leases.len(), 10_000usize.div_ceil(32));
    }

    #[test]
    fn names_are_for_those_who_have_a_tenant() {
        let places = service(1).who(Some(0), false).expect("one");
        let lease = &places[0].leases[0];
        assert_eq!((lease.id, lease.label.as_str(), lease.pid), (1, "", 1));
    }
}
