//! What a VM asks of an arbiter, and what its guest may use of what it gets.

use std::sync::Arc;

use arbiter::PerKind;
use arbiter_host::CpuSet;
use umpire_lease::{
    CallError, Counters, Event, ExplainOut, Kept, LeaseScope, Leases, Place, Request, What,
};

/// The physical counters that a guest's counters want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Programmable ones for its programmable ones.
    programmable: u8,
    /// Fixed-function ones for its fixed-function ones.
    fixed: u8,
    /// Programmable ones for the rest of these: processors of AMD have no others.
    instead: u8,
}

impl Wanted {
    /// What the counters of a guest want where each CPU has at least `there`; no more than
    /// that, if fewer will do.
    pub(super) fn of(guest: PerKind, there: PerKind, fewer: bool) -> Self {
        let fixed = guest.fixed.min(there.fixed);
        let most = if fewer { there.programmable } else { u8::MAX };
        let programmable = guest.programmable.min(most);
        Wanted {
            programmable,
            fixed,
            instead: (guest.fixed - fixed).min(most - programmable),
        }
    }

    /// In the order in which they are given.
    fn counters(self) -> Vec<Counters> {
        let programmable = |count: u8| Counters::programmable(count.into());
        let all = [
            (self.programmable, programmable(self.programmable)),
            (self.fixed, Counters::fixed(self.fixed.into())),
            (self.instead, programmable(self.instead)),
        ];
        let some = all.into_iter().filter(|(count, _)| *count > 0);
        some.map(|(_, counters)| counters).collect()
    }

    /// What the guest may use of the first `holds` of them.
    pub(super) fn lets(self, holds: u32) -> PerKind {
        let holds = u8::try_from(holds).unwrap_or(u8::MAX);
        let programmable = holds.min(self.programmable);
        PerKind {
            programmable,
            fixed: (holds - programmable).min(self.fixed + self.instead),
        }
    }
}

/// What a VM asks of which arbiter.
#[derive(Clone, Debug)]
pub struct LeasePlan {
    /// The arbiter.
    pub leases: Arc<dyn Leases>,
    /// What the lease is to be like.
    pub terms: Request,
    /// The host CPUs on which vCPUs may run.
    pub cpus: CpuSet,
    /// The counters are there for whatever runs on these CPUs (`msr`).
    pub whole_cpus: bool,
    /// What the guest may use at most.
    pub guest: PerKind,
}

impl LeasePlan {
    /// The request, on a host with these places.
    pub(super) fn request(&self, places: &[Place], fewer: bool) -> (Wanted, Request) {
        let (cpus, there) = there(places, &self.cpus);
        let wanted = Wanted::of(self.guest, there, fewer);
        let request = Request {
            // Fewer are of use while the guest runs: its counters take turns.
            at_least: Some(1),
            ..self.ask(&cpus, wanted.counters())
        };
        (wanted, request)
    }

    fn ask(&self, cpus: &CpuSet, counters: Vec<Counters>) -> Request {
        let threads = || vec![std::process::id()];
        Request {
            counters,
            cpus: Some(cpus.to_string()),
            scope: Some(if self.whole_cpus {
                LeaseScope::Cpu
            } else {
                LeaseScope::Thread
            }),
            // This one stands for the threads of all vCPUs, which want the same.
            threads: (!self.whole_cpus).then(threads),
            // What it loses later it has again when it can.
            waits_ms: Some(-1),
            ..self.terms.clone()
        }
    }

    /// A lease for what `tool` is to count beside the guest, all of it or nothing. It does not
    /// hold all yet if others were told to make room for it.
    pub(super) fn lease_for_tool(
        &self,
        counters: usize,
        tool: &str,
    ) -> Result<Box<dyn Kept>, CallError> {
        let (cpus, _) = there(&self.leases.places()?, &self.cpus);
        let counters = u32::try_from(counters).unwrap_or(u32::MAX);
        let label = self.terms.label.as_deref().unwrap_or_default();
        let request = Request {
            label: Some(format!("{label}: {tool}")),
            // What is left of it after a loss serves some of the contexts.
            at_least: Some(1),
            ..self.ask(&cpus, vec![Counters::programmable(counters)])
        };
        let lease = self.leases.acquire(&request)?;
        if lease.lease().holds == lease.lease().wants {
            return Ok(lease);
        }
        // Its place in the queue is of no use if nobody has to go.
        drop(lease);
        let whole = Request {
            at_least: None,
            ..request.clone()
        };
        let explained = self.leases.explain(&whole)?;
        let goes = |event: &Event| event.what == What::Leaving;
        match explained.why {
            Some(why) if !explained.events.iter().any(goes) => {
                Err(CallError::Refused(Box::new(why)))
            }
            _ => self.leases.acquire(&request),
        }
    }

    /// Why it cannot have all that it asked for.
    pub(super) fn explain(&self, request: Request) -> CallError {
        let whole = Request {
            at_least: None,
            waits_ms: None,
            ..request
        };
        match self.leases.explain(&whole) {
            Ok(ExplainOut { why: Some(why), .. }) => CallError::Refused(Box::new(why)),
            Ok(_) => CallError::Other("the counters are free by now; try again".to_owned()),
            Err(error) => error,
        }
    }
}

/// The CPUs of `cpus` that have the first PMU, and the fewest counters that one of them has.
pub(super) fn there(places: &[Place], cpus: &CpuSet) -> (CpuSet, PerKind) {
    let small = |count: u32| u8::try_from(count).unwrap_or(u8::MAX);
    let first = places.first().map(|place| &place.pmu);
    let mut fewest: Option<PerKind> = None;
    let mut here = CpuSet::default();
    for place in places.iter().filter(|place| Some(&place.pmu) == first) {
        let shared: CpuSet = place.cpus.parse().unwrap_or_default();
        let shared = shared.and(cpus);
        if shared.is_empty() {
            continue;
        }
        shared.iter().for_each(|cpu| here.insert(cpu));
        let there = PerKind {
            programmable: small(place.programmable),
            fixed: small(place.fixed),
        };
        fewest = Some(fewest.map_or(there, |fewest| fewest.min_of_each(there)));
    }
    match fewest {
        Some(fewest) => (here, fewest),
        // The arbiter says what is wrong with these.
        None => (cpus.clone(), PerKind::ALL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn per_kind(programmable: u8, fixed: u8) -> PerKind {
        PerKind {
            programmable,
            fixed,
        }
    }

    #[test]
    fn what_a_guest_wants_and_may_use() {
        let few = [(7, (4, 3)), (5, (4, 1)), (3, (3, 0)), (0, (0, 0))];
        // The guest's counters, those of each CPU, whether fewer will do; the sum that is
        // asked for; what is held, and may be used.
        for (guest, there, fewer, sum, held) in [
            (per_kind(4, 3), per_kind(4, 3), false, 7, &few[..]),
            (
                per_kind(4, 3),
                per_kind(6, 0),
                false,
                7,
                &[(7, (4, 3)), (6, (4, 2)), (4, (4, 0))],
            ),
            (
                per_kind(4, 3),
                per_kind(6, 0),
                true,
                6,
                &[(6, (4, 2)), (7, (4, 2))],
            ),
            (
                per_kind(2, 3),
                per_kind(9, 1),
                false,
                5,
                &[(5, (2, 3)), (3, (2, 1))],
            ),
            (
                per_kind(6, 0),
                per_kind(4, 3),
                false,
                6,
                &[(6, (6, 0)), (200, (6, 0))],
            ),
            (
                per_kind(6, 0),
                per_kind(4, 3),
                true,
                4,
                &[(4, (4, 0)), (1, (1, 0))],
            ),
        ] {
            let wanted = Wanted::of(guest, there, fewer);
            let asked: u32 = wanted.counters().iter().filter_map(|one| one.count).sum();
            assert_eq!(asked, sum, "{wanted:?}");
            for &(holds, (programmable, fixed)) in held {
                assert_eq!(
                    wanted.lets(holds),
                    per_kind(programmable, fixed),
                    "{wanted:?}"
                );
            }
        }
    }

    #[test]
    fn what_each_cpu_has() {
        let place = |pmu: &str, cpus: &str, fixed| Place {
            pmu: pmu.to_owned(),
            cpus: cpus.to_owned(),
            programmable: 8,
            fixed,
            ..Place::default()
        };
        let places = [
            place("cpu_core", "0-3", 4),
            place("cpu_core", "4-7", 3),
            place("cpu_atom", "8", 0),
        ];
        for (cpus, here, fixed) in [("0", "0", 4), ("3-4", "3-4", 3), ("0-15", "0-7", 3)] {
            let (found, fewest) = there(&places, &cpus.parse().unwrap());
            assert_eq!(
                (found.to_string().as_str(), fewest),
                (here, per_kind(8, fixed))
            );
        }
        // The arbiter says that they are not there.
        let (found, fewest) = there(&places, &"99".parse().unwrap());
        assert_eq!((found.to_string().as_str(), fewest), ("99", PerKind::ALL));
    }
}
