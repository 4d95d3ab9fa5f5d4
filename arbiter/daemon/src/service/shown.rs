//! What is shown: leases, places, and what would become of a request. Pure functions of the
//! arbiter as it is, and of who looks.

use std::collections::BTreeMap;

use arbiter_host::{
    BootTime, Caller, Change, CpuSet, Fate, HostArbiter, HostPmu, Lease, LeaseId, Outcome, Owner,
    Place, PmuId, Reason, Refusal, TenantId, Terms,
};
use umpire_lease as wire;

use crate::convert;

/// The user of a lease that is another's to whoever may not know: `(uid_t)-1` is nobody's.
const NOT_SHOWN: u32 = u32::MAX;

/// Whom something is shown to. Processes, users and names are for root, for operators, and
/// for the user whose they are; others see the tenant, and how many counters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Viewer {
    pub(super) uid: u32,
    pub(super) operator: bool,
}

impl Viewer {
    pub(crate) fn of(caller: Caller) -> Self {
        Viewer {
            uid: caller.uid,
            operator: caller.operator,
        }
    }

    /// Whether it may know all that belongs to this user.
    pub(super) fn knows(self, uid: u32) -> bool {
        self.operator || self.uid == 0 || self.uid == uid
    }

    /// The lease as it is shown.
    pub(super) fn lease(self, lease: wire::Lease) -> wire::Lease {
        if self.knows(lease.uid) {
            return lease;
        }
        let leaving = lease.leaving.map(|leaving| wire::Leaving {
            // By whom is not for everybody.
            why: "its holder was told".to_owned(),
            ..leaving
        });
        wire::Lease {
            uid: NOT_SHOWN,
            pid: 0,
            label: String::new(),
            threads: Vec::new(),
            leaving,
            ..lease
        }
    }

    pub(super) fn refusal(self, mut refusal: wire::Refusal) -> wire::Refusal {
        let held_by = refusal.held_by.into_iter();
        refusal.held_by = held_by.map(|lease| self.lease(lease)).collect();
        refusal
    }

    /// What would happen: the caller's own lease first, then those of others.
    pub(super) fn explained(self, explained: wire::ExplainOut) -> wire::ExplainOut {
        let events = explained.events.into_iter().map(|event| {
            let others = !self.knows(event.lease.uid);
            let lease = self.lease(event.lease);
            let message = match event.why {
                Some(Reason::Revoked) if others => "was revoked".to_owned(),
                _ => event.message,
            };
            wire::Event {
                lease,
                message,
                ..event
            }
        });
        wire::ExplainOut {
            events: events.collect(),
            why: explained.why.map(|why| self.refusal(why)),
            ..explained
        }
    }
}

/// Most leases that are shown of all places together, each as often as it holds something;
/// and of each place, where they are more.
const MOST_SHOWN: usize = 8192;
const MOST_OF_PLACE: usize = 16;

/// The leases of these tenants; all, for an operator.
pub(super) fn visible(
    arbiter: &HostArbiter,
    tenants: &[TenantId],
    viewer: Viewer,
) -> Vec<wire::Lease> {
    let leases = arbiter.leases();
    let leases = leases.filter(|lease| viewer.operator || tenants.contains(&lease.owner.tenant));
    leases
        .map(|lease| viewer.lease(convert::lease(arbiter, lease)))
        .collect()
}

/// The control groups of the leases of these tenants, of users whom the viewer may know.
pub(super) fn groups(
    arbiter: &HostArbiter,
    tenants: &[TenantId],
    viewer: Viewer,
) -> Vec<wire::LeasedGroup> {
    let leases = arbiter.leases();
    let leases = leases.filter(|lease| viewer.operator || tenants.contains(&lease.owner.tenant));
    let groups = leases.filter_map(|lease| convert::group(arbiter, lease));
    groups.filter(|group| viewer.knows(group.uid)).collect()
}

/// Who holds which counters, place by place; those of one CPU with `only`.
///
/// # Errors
/// There is no such CPU.
pub(crate) fn who(
    arbiter: &HostArbiter,
    only: Option<u32>,
    viewer: Viewer,
) -> Result<Vec<wire::Place>, Refusal> {
    let held = held_at(arbiter, only);
    let all: usize = held.values().map(Vec::len).sum();
    let most = match only {
        None if all > MOST_SHOWN => MOST_OF_PLACE,
        _ => usize::MAX,
    };
    let mut brief = Brief {
        arbiter,
        viewer,
        shown: BTreeMap::new(),
    };
    let mut places = Vec::new();
    for (id, pmu) in (0u16..).map(PmuId).zip(arbiter.pmus()) {
        let kinds = arbiter::PerKind::count(pmu.counters);
        for (domain, cpus) in (0u32..).zip(&pmu.domains) {
            if only.is_some_and(|cpu| !cpus.contains(cpu)) {
                continue;
            }
            let here = held.get(&Place { pmu: id, domain });
            let here = here.map(Vec::as_slice).unwrap_or_default();
            places.push(wire::Place {
                pmu: pmu.name.clone(),
                cpus: cpus.to_string(),
                programmable: kinds.programmable.into(),
                fixed: kinds.fixed.into(),
                leases: brief.some(here, most, cpus),
                outside: outside(arbiter, pmu, cpus),
            });
        }
    }
    match only {
        Some(cpu) if places.is_empty() => Err(Refusal::NoSuchCpu {
            cpu,
            there: arbiter.online().clone(),
        }),
        _ => Ok(places),
    }
}

/// Leases without their threads, which are many, and the same everywhere.
struct Brief<'a> {
    arbiter: &'a HostArbiter,
    viewer: Viewer,
    shown: BTreeMap<LeaseId, wire::Lease>,
}

impl Brief<'_> {
    /// The first `most` of those of one place, and how many more there are.
    fn some(&mut self, here: &[&Lease], most: usize, cpus: &CpuSet) -> Vec<wire::Lease> {
        let some = here.iter().take(most);
        let mut leases: Vec<wire::Lease> = some.map(|lease| self.lease(lease)).collect();
        if let Some(more) = here.len().checked_sub(most).filter(|more| *more > 0) {
            let cpu = cpus.iter().next().unwrap_or_default();
            leases.push(wire::Lease {
                label: format!("{more} more leases; name the CPU for all: umpire who {cpu}"),
                ..wire::Lease::default()
            });
        }
        leases
    }

    fn lease(&mut self, lease: &Lease) -> wire::Lease {
        let shown = self.shown.entry(lease.id);
        let shown = shown.or_insert_with(|| wire::Lease {
            threads: Vec::new(),
            ..self.viewer.lease(convert::lease(self.arbiter, lease))
        });
        shown.clone()
    }
}

/// The leases that hold something of each place, or of those of one CPU.
fn held_at(arbiter: &HostArbiter, only: Option<u32>) -> BTreeMap<Place, Vec<&Lease>> {
    let mut held: BTreeMap<Place, Vec<&Lease>> = BTreeMap::new();
    for lease in arbiter.leases() {
        let demands = &lease.terms.demands[..lease.holds];
        let mut pmus: Vec<PmuId> = demands.iter().map(|demand| demand.pmu).collect();
        pmus.sort_unstable();
        pmus.dedup();
        for pmu in pmus {
            let of_cpu = |cpu| arbiter.place(pmu, cpu);
            let add = |place| {
                let here: &mut Vec<&Lease> = held.entry(place).or_default();
                // Several of its CPUs may share a place.
                if here.last().is_none_or(|last| last.id != lease.id) {
                    here.push(lease);
                }
            };
            let domains = &arbiter.pmus()[usize::from(pmu.0)].domains;
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

/// How many counters outsiders have of those that `cpus` share.
fn outside(arbiter: &HostArbiter, pmu: &HostPmu, cpus: &CpuSet) -> u32 {
    let mut pmus = arbiter.pmus().iter();
    let index = pmus.position(|other| other.name == pmu.name);
    let index = index.and_then(|index| u16::try_from(index).ok()).map(PmuId);
    let place = index
        .zip(cpus.iter().next())
        .and_then(|(pmu, cpu)| arbiter.place(pmu, cpu));
    place.map_or(0, |place| {
        u32::try_from(arbiter.outside(place).len()).unwrap_or(u32::MAX)
    })
}

/// What would become of a request, and what would follow for others.
pub(crate) fn explained(
    arbiter: &HostArbiter,
    owner: Owner,
    terms: Terms,
    now: BootTime,
) -> wire::ExplainOut {
    let mut after = arbiter.clone();
    let mut changes = Vec::new();
    let outcome = after.request(owner, terms, now, &mut changes);
    let own = after.next_id() - 1;
    let is_others = |change: &&Change| outcome.is_err() || change.lease().0 != own;
    let events = changes.iter().filter(is_others);
    let events = events.filter_map(|change| convert::event(&after, change));
    let events = events.collect();
    let lease = |id| after.lease(id).map(|lease| convert::lease(&after, lease));
    let (outcome, lease, why) = match outcome {
        Ok(Outcome::Granted { lease: id, .. }) => (Fate::Granted, lease(id), None),
        Ok(Outcome::Waits { lease: id, why, .. }) => {
            (Fate::Waits, lease(id), Some(convert::refusal(&after, &why)))
        }
        Err(why) => (Fate::Refused, None, Some(convert::refusal(arbiter, &why))),
    };
    wire::ExplainOut {
        outcome,
        lease,
        why,
        events,
    }
}

#[cfg(test)]
mod tests {
    use arbiter::CounterSet;
    use arbiter_host::{Demand, Scope, ThreadId, Waits};

    use super::*;
    use crate::config::{ArbiterConfig, PmuConfig};

    /// So many threads' leases, each on 16 of 512 CPUs.
    fn arbiter(leases: u32) -> HostArbiter {
        let mut config = ArbiterConfig {
            pmus: vec![PmuConfig::stated(4, 0).expect("four counters")],
            ..ArbiterConfig::default()
        };
        config.policy.tenants[0].most_leases = usize::MAX;
        let pmus = config.host_pmus(&(0..512).collect());
        let mut arbiter = HostArbiter::new(pmus, config.policy).expect("the policy fits");
        for lease in 0..leases {
            let owner = Owner {
                tenant: TenantId(0),
                uid: 0,
                pid: 1,
                label: format!("vm{lease}"),
                by: None,
            };
            let demand = Demand {
                pmu: PmuId(0),
                counters: CounterSet::first(4, 0),
            };
            let terms = Terms {
                demands: vec![demand],
                at_least: 1,
                cpus: (0..16).map(|cpu| (lease * 16 + cpu) % 512).collect(),
                scope: Scope::Thread(vec![ThreadId {
                    number: lease,
                    started: 0,
                }]),
                guaranteed: true,
                priority: 0,
                preemptible: false,
                lasts: None,
                waits: Waits::No,
            };
            let granted = arbiter.request(owner, terms, BootTime(0), &mut Vec::new());
            granted.expect("they share in time");
        }
        arbiter
    }

    #[test]
    fn few_leases_are_shown_wherever_they_are() {
        let arbiter = arbiter(40);
        let places = who(&arbiter, None, ROOT).expect("places");
        assert_eq!(places.len(), 512);
        let labels = |place: &wire::Place| -> Vec<String> {
            place.leases.iter().map(|one| one.label.clone()).collect()
        };
        assert_eq!(labels(&places[0]), ["vm0", "vm32"]);
        assert_eq!(labels(&places[511]), ["vm31"]);
        assert_eq!(
            who(&arbiter, Some(511), ROOT).expect("one"),
            [places[511].clone()]
        );
        assert!(who(&arbiter, Some(512), ROOT).is_err());
    }

    #[test]
    fn of_many_leases_a_few_are_shown_of_each_place() {
        let arbiter = arbiter(10_000);
        let places = who(&arbiter, None, ROOT).expect("places");
        assert!(
            places
                .iter()
                .all(|place| place.leases.len() <= MOST_OF_PLACE + 1)
        );
        let last = places[3].leases.last().expect("one that stands for others");
        let more = 10_000usize.div_ceil(32) - MOST_OF_PLACE;
        assert!(last.id == 0 && last.label.starts_with(&format!("{more} more leases")));
        let one = who(&arbiter, Some(3), ROOT).expect("one");
        assert_eq!(one[0].leases.len(), 10_000usize.div_ceil(32));
    }

    const ROOT: Viewer = Viewer {
        uid: 0,
        operator: true,
    };

    /// The lease of user 0 as each of these sees it: label, process, user, and the tenant and
    /// the counters, which all do.
    #[test]
    fn processes_and_names_are_for_root_operators_and_their_own_user() {
        let arbiter = arbiter(1);
        let check = |uid, operator, expected: (&str, u32, u32)| {
            let viewer = Viewer { uid, operator };
            let places = who(&arbiter, Some(0), viewer).expect("one");
            let listed = visible(&arbiter, &[TenantId(0)], viewer);
            for lease in [&places[0].leases[0], &listed[0]] {
                let shown = (lease.label.as_str(), lease.pid, lease.uid);
                assert_eq!(shown, expected, "{viewer:?}");
                assert_eq!((lease.id, lease.holds), (1, 1));
                assert!(!lease.tenant.is_empty());
            }
            assert_eq!(listed[0].threads.is_empty(), expected.1 == 0);
        };
        check(0, false, ("vm0", 1, 0));
        check(7, true, ("vm0", 1, 0));
        check(7, false, ("", 0, NOT_SHOWN));
    }

    /// Whoever is refused, or asks what would happen, sees no more of others than in `Who`.
    #[test]
    fn what_is_in_the_way_is_shown_as_who_shows_it() {
        let lease = |uid| wire::Lease {
            uid,
            pid: 1041,
            label: "secret".to_owned(),
            tenant: "blue".to_owned(),
            threads: vec![1142],
            leaving: Some(wire::Leaving {
                why: "user 1243 revoked it".to_owned(),
                ..wire::Leaving::default()
            }),
            ..wire::Lease::default()
        };
        let explained = wire::ExplainOut {
            why: Some(wire::Refusal {
                held_by: vec![lease(7), lease(9)],
                ..wire::Refusal::default()
            }),
            events: vec![wire::Event {
                lease: lease(9),
                why: Some(Reason::Revoked),
                message: "has ended: user 1243 revoked it".to_owned(),
                ..wire::Event::default()
            }],
            ..wire::ExplainOut::default()
        };
        let viewer = Viewer {
            uid: 7,
            operator: false,
        };
        let shown = viewer.explained(explained);
        let why = shown.why.expect("a refusal");
        assert_eq!(why.held_by[0], lease(7));
        for others in [&why.held_by[1], &shown.events[0].lease] {
            let text = serde_json::to_string(others).expect("JSON");
            for hidden in ["secret", "1041", "1142", "1243", "\"uid\":9,"] {
                assert!(!text.contains(hidden), "{hidden}: {text}");
            }
            assert_eq!(others.tenant, "blue");
        }
        assert_eq!(shown.events[0].message, "was revoked");
    }
}
