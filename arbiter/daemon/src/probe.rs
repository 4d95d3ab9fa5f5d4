//! What the kernel's PMUs have, and what somebody who has no lease has taken of them: a
//! thread measures it again and again, since the kernel tells nobody.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::budget::{Budget, FixedState, Free, Holders, MAX_TIME, Pmu, Scope};
use arbiter::{CounterId, CounterSet, PerKind};
use arbiter_host::{CpuSet, HostPmu, Place, PmuId};

/// From one look at all CPUs to the next. What two looks saw is there, so an outsider is
/// found within a second as long as a look takes no more than a fifth of one.
const LOOKS: Duration = Duration::from_millis(400);
/// The least pause between them.
const PAUSE: Duration = Duration::from_millis(100);
/// Between two looks at all processes.
const LOOKS_AT_HOLDERS: Duration = Duration::from_secs(5);

/// A PMU that the kernel shows, and what the arbiter makes of it.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pmu: Pmu,
    /// The CPU that each domain is measured on.
    measured_on: Vec<u32>,
    pub(crate) host: HostPmu,
    /// Nobody had any of its counters at the start, where it was looked at.
    pub(crate) untouched: bool,
}

/// The PMUs that the kernel shows, and that this process may measure. Those that it may not
/// are named with what to do.
///
/// Of a PMU that does not say what it has, `recorded` leases may have counters that are not
/// free now, and are counted, too.
///
/// With `only` uncore PMUs are left out, and so are all other CPUs.
///
/// A core PMU of all CPUs has a domain also for those of `present` that are offline.
pub(crate) fn found(
    present: &CpuSet,
    only: Option<&CpuSet>,
    recorded: &BTreeMap<String, CounterSet>,
) -> Result<Vec<Found>, String> {
    let pmus = crate::budget::discover(Path::new("/")).map_err(|error| error.to_string())?;
    let mut found = Vec::new();
    let mut not_measured = Vec::new();
    for pmu in pmus {
        if only.is_some() && !matches!(pmu.scope, Scope::Core(_)) {
            continue;
        }
        let is_asked_for = |cpu: &u32| only.is_none_or(|only| only.contains(*cpu));
        let mut measured_on: Vec<u32> = pmu.measured_on().iter().filter(is_asked_for).collect();
        let Some(&first) = measured_on.first() else {
            continue;
        };
        match crate::budget::measure(&pmu, first, MAX_TIME) {
            Ok(budget) => {
                if pmu.name == "cpu" {
                    measured_on = present.iter().filter(is_asked_for).collect();
                }
                let domains = match &pmu.scope {
                    Scope::Core(_) => measured_on
                        .iter()
                        .map(|&cpu| [cpu].into_iter().collect())
                        .collect(),
                    Scope::Uncore(domains) => domains
                        .iter()
                        .map(|domain| domain.shared_by.clone())
                        .collect(),
                };
                let host = HostPmu {
                    name: pmu.name.clone(),
                    counters: capacity(&budget, recorded.get(&pmu.name).copied()),
                    domains,
                    for_threads: matches!(pmu.scope, Scope::Core(_)),
                };
                if host.counters.is_empty() {
                    not_measured.push(format!("{}: all its counters are taken", pmu.name));
                } else {
                    found.push(Found {
                        pmu,
                        measured_on,
                        host,
                        untouched: untouched(&budget),
                    });
                }
            }
            Err(error) => not_measured.push(format!("{}: {error}", pmu.name)),
        }
    }
    // Minima of tenants are for the first.
    found.sort_by_key(|found| !found.host.for_threads);
    match (found.is_empty(), not_measured.is_empty()) {
        (true, false) => Err(not_measured.join("; ")),
        _ => {
            not_measured
                .iter()
                .for_each(|why| log::warn!("PMU {why}; it is left out"));
            Ok(found)
        }
    }
}

/// Whether nobody has any counter, for sure.
fn untouched(budget: &Budget) -> bool {
    let mut fixed = budget.fixed.iter().map(|(_, state)| *state);
    let all = budget.capacity.map(|capacity| capacity.programmable);
    fixed.all(|state| matches!(state, FixedState::Free | FixedState::Absent))
        && all.is_some_and(|all| budget.programmable == Free::Exactly(all))
}

fn small(number: u32) -> u8 {
    u8::try_from(number.min(32)).unwrap_or(32)
}

fn free(budget: &Budget) -> u32 {
    match budget.programmable {
        Free::Exactly(count) | Free::AtLeast(count) => count,
    }
}

/// The counters that the PMU has: by CPUID, or as many as were free at the start.
fn capacity(budget: &Budget, recorded: Option<CounterSet>) -> CounterSet {
    let (programmable, fixed) = match budget.capacity {
        Some(capacity) => (capacity.programmable, capacity.fixed_mask),
        None => {
            let free = CounterSet::first(small(free(budget)), 0);
            return free | recorded.unwrap_or(CounterSet::EMPTY);
        }
    };
    let absent = budget
        .fixed
        .iter()
        .filter(|(_, state)| *state == FixedState::Absent);
    let absent = absent.fold(0, |mask, (fixed, _)| mask | 1u32 << fixed.index());
    let known = budget
        .fixed
        .iter()
        .fold(0, |mask, (fixed, _)| mask | 1u32 << fixed.index());
    let fixed = u64::from(fixed & known & !absent);
    CounterSet::first(small(programmable), 0) | CounterSet::from_bits(fixed << 32)
}

/// What one look at a place found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) place: Place,
    /// Programmable counters that nobody had; `None`: not known.
    pub(crate) free: Option<u32>,
    /// Fixed-function counters that somebody had.
    fixed: CounterSet,
}

/// What was seen last.
#[derive(Debug, Default)]
pub(crate) struct Sight {
    pub(crate) places: Vec<Seen>,
    pub(crate) holders: Option<Holders>,
}

/// Shared between the thread that looks and the one that decides.
pub(crate) type Sights = Arc<Mutex<Sight>>;

/// Looks again and again, and writes a byte into `told` after each look. It ends when
/// nobody reads them any more.
pub(crate) fn watch(mut found: Vec<Found>, mut told: UnixStream) -> std::io::Result<Sights> {
    let sights = Sights::default();
    let shared = sights.clone();
    std::thread::Builder::new()
        .name("probe".to_owned())
        .spawn(move || {
            let mut holders_at = None::<Instant>;
            let mut online = None;
            let mut seen: Vec<Seen> = Vec::new();
            loop {
                let begun = Instant::now();
                let now_online = crate::sysfs::online(Path::new("/")).ok();
                if online.is_some() && online != now_online {
                    follow(&mut found);
                }
                online = now_online;
                let places = (0u16..).map(PmuId).zip(&found);
                let places: Vec<Seen> = places.flat_map(|(pmu, found)| found.look(pmu)).collect();
                // Who has taken or given back something is looked for at once.
                let due =
                    places != seen || holders_at.is_none_or(|at| at.elapsed() >= LOOKS_AT_HOLDERS);
                seen.clone_from(&places);
                let holders =
                    due.then(|| crate::budget::holders(Path::new("/"), &[std::process::id()]));
                {
                    let mut sight = shared.lock().unwrap_or_else(PoisonError::into_inner);
                    sight.places = places;
                    if let Some(holders) = holders {
                        holders_at = Some(Instant::now());
                        sight.holders = holders.ok();
                    }
                }
                if told.write_all(&[1]).is_err() {
                    return;
                }
                std::thread::sleep(LOOKS.saturating_sub(begun.elapsed()).max(PAUSE));
            }
        })?;
    Ok(sights)
}

/// CPUs have come or gone: the kernel may count for a domain on another CPU now.
fn follow(found: &mut [Found]) {
    let Ok(pmus) = crate::budget::discover(Path::new("/")) else {
        return;
    };
    for found in found {
        let Some(pmu) = pmus.iter().find(|pmu| pmu.name == found.pmu.name) else {
            continue;
        };
        for (cpu, domain) in found.measured_on.iter_mut().zip(&found.host.domains) {
            if let Some(other) = domain.iter().find_map(|cpu| pmu.pool_of(cpu)) {
                *cpu = other;
            }
        }
        found.pmu = pmu.clone();
    }
}

impl Found {
    /// The kernel's number of it.
    pub(crate) fn perf_type(&self) -> u32 {
        self.pmu.perf_type
    }

    pub(crate) fn look(&self, pmu: PmuId) -> Vec<Seen> {
        let cpus = &self.measured_on;
        let budgets = crate::budget::measure_each(&self.pmu, cpus, MAX_TIME);
        let looks = (0u32..).zip(cpus).zip(budgets);
        let looks = looks.map(|((domain, cpu), budget)| {
            let place = Place { pmu, domain };
            match budget {
                Ok(budget) => Seen::of(place, &budget),
                Err(error) => {
                    log::debug!("{} on CPU {cpu}: {error}", self.pmu.name);
                    Seen {
                        place,
                        free: None,
                        fixed: CounterSet::EMPTY,
                    }
                }
            }
        });
        looks.collect()
    }
}

impl Seen {
    /// Nobody has a fixed-function counter.
    #[cfg(test)]
    pub(crate) fn for_test(place: Place, free: u32) -> Self {
        Seen {
            place,
            free: Some(free),
            fixed: CounterSet::EMPTY,
        }
    }

    fn of(place: Place, budget: &Budget) -> Self {
        let held = budget
            .fixed
            .iter()
            .filter(|(_, state)| *state == FixedState::Held);
        let fixed = held.fold(0u64, |bits, (fixed, _)| bits | 1 << (32 + fixed.index()));
        let free = match budget.programmable {
            Free::Exactly(count) => Some(count),
            Free::AtLeast(_) => None,
        };
        Seen {
            place,
            free,
            fixed: CounterSet::from_bits(fixed),
        }
    }

    /// What outsiders surely have, where leases of holders that may use them hold `leased` of
    /// `counters`. Such a holder need not use all that it holds, and its events may be on
    /// counters of the other kind: what that explains is nobody else's.
    pub(crate) fn outside(&self, counters: CounterSet, leased: PerKind) -> Option<Vec<CounterSet>> {
        let there = PerKind::count(counters);
        let programmable = u32::from(there.programmable).saturating_sub(self.free?);
        let fixed = self.fixed & counters;
        let used = programmable + fixed.len();
        let mut unexplained =
            used.saturating_sub(u32::from(leased.programmable) + u32::from(leased.fixed));
        let any = counters & CounterSet::from_bits(u64::from(u32::MAX));
        let mut outside = Vec::new();
        let more = programmable
            .saturating_sub(u32::from(leased.programmable))
            .min(unexplained);
        outside.extend(std::iter::repeat_n(any, more as usize));
        unexplained -= more;
        let fixed = fixed.iter().take(unexplained as usize);
        outside.extend(fixed.map(|counter: CounterId| CounterSet::from_iter([counter])));
        Some(outside)
    }
}

/// What outsiders have of each place: what two looks in a row saw. A lease may have come or
/// gone between a look and its judgement.
#[derive(Debug, Default)]
pub(crate) struct Outside {
    /// What the last look saw.
    seen: BTreeMap<Place, Vec<CounterSet>>,
    /// What they have by that, and by the look before.
    believed: BTreeMap<Place, Vec<CounterSet>>,
}

impl Outside {
    /// What a look saw before is of other CPUs.
    pub(crate) fn look_anew(&mut self) {
        self.seen.clear();
    }

    /// What they have of a place.
    pub(crate) fn of(&self, place: Place) -> &[CounterSet] {
        self.believed.get(&place).map_or(&[], Vec::as_slice)
    }

    /// Takes over what was seen of a place of a PMU with these counters, of which holders that
    /// may use them have `leased`. `may_be_any`: somebody may have counters who has no lease.
    /// Returns whether anything was seen.
    pub(crate) fn see(
        &mut self,
        seen: &Seen,
        counters: CounterSet,
        leased: PerKind,
        may_be_any: bool,
    ) -> bool {
        let Some(now_outside) = seen.outside(counters, leased) else {
            return false;
        };
        let place = seen.place;
        let known = self.of(place);
        let less = now_outside.len() < known.len();
        let outside = if less && seen.free == Some(0) && may_be_any {
            // A holder has come, and found less than it holds. What it has now explains
            // no counter that outsiders had before, as long as none is free.
            known.to_vec()
        } else {
            let before = self.seen.insert(place, now_outside.clone());
            let before = before.unwrap_or_default();
            if before.len() < now_outside.len() {
                before
            } else {
                now_outside
            }
        };
        self.believed.insert(place, outside);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_that_are_leased_are_there_after_a_restart() {
        let budget = |capacity| Budget {
            cpu: 0,
            capacity,
            programmable: Free::Exactly(1),
            fixed: Vec::new(),
            flexible_waits: None,
            took: Duration::ZERO,
        };
        let recorded = Some(CounterSet::first(4, 0));
        let one = CounterSet::first(1, 0);
        assert_eq!(capacity(&budget(None), None), one);
        assert_eq!(capacity(&budget(None), recorded), CounterSet::first(4, 0));
        let by_cpuid = crate::budget::Capacity {
            programmable: 2,
            fixed_mask: 0,
        };
        let two = CounterSet::first(2, 0);
        assert_eq!(capacity(&budget(Some(by_cpuid)), recorded), two);
    }

    #[test]
    fn what_was_not_measured_may_be_somebodys() {
        let by_cpuid = crate::budget::Capacity {
            programmable: 2,
            fixed_mask: 2,
        };
        let check = |programmable, cycles, expected| {
            let budget = Budget {
                cpu: 0,
                capacity: Some(by_cpuid),
                programmable,
                fixed: vec![(crate::budget::Fixed::Cycles, cycles)],
                flexible_waits: None,
                took: Duration::ZERO,
            };
            assert_eq!(untouched(&budget), expected, "{budget:?}");
        };
        check(Free::Exactly(2), FixedState::Free, true);
        check(Free::Exactly(2), FixedState::Absent, true);
        check(Free::Exactly(2), FixedState::Held, false);
        check(Free::Exactly(2), FixedState::Unmeasured, false);
        check(Free::Exactly(1), FixedState::Free, false);
        check(Free::AtLeast(2), FixedState::Free, false);
    }

    #[test]
    fn what_leases_explain_is_nobody_elses() {
        let all = CounterSet::first(4, 3);
        let any = CounterSet::first(4, 0);
        let cycles = CounterSet::from_iter([CounterId::Fixed(1)]);
        let check = |free, fixed, (programmable, of_fixed), outside: &[CounterSet]| {
            let place = Place {
                pmu: PmuId(0),
                domain: 0,
            };
            let seen = Seen {
                place,
                free: Some(free),
                fixed,
            };
            let leased = PerKind {
                programmable,
                fixed: of_fixed,
            };
            assert_eq!(seen.outside(all, leased).as_deref(), Some(outside));
        };
        check(4, CounterSet::EMPTY, (0, 0), &[]);
        check(2, CounterSet::EMPTY, (0, 0), &[any, any]);
        check(2, CounterSet::EMPTY, (2, 0), &[]);
        check(1, CounterSet::EMPTY, (2, 0), &[any]);
        // Nobody uses what was leased, or its cycles are on the fixed-function counter.
        check(4, CounterSet::EMPTY, (2, 0), &[]);
        check(4, cycles, (1, 0), &[]);
        check(4, cycles, (0, 0), &[cycles]);
        check(3, cycles, (1, 0), &[cycles]);
    }
}
