//! The virtual time of each vCPU, and what happens in it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pmu_model::{CountRequest, OwnerId, Ring};

use super::curve::{Curve, unit};
use super::cycles::{CountedCycles, CycleTally, Start, Threshold};
use super::table::{Entry, RateTable};

/// The declared rates of a machine, and the time that each of its vCPUs has
/// run under them.
///
/// Clones are handles of the same clocks: every core of a machine has one
/// ([`SimBackend::of`](super::SimBackend::of)), so a vCPU takes its time along
/// from core to core. A vCPU runs on one core at a time.
#[derive(Clone, Debug)]
pub struct SimClocks {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    table: RateTable,
    tsc_khz: u32,
    owners: Mutex<HashMap<OwnerId, OwnerClock>>,
}

impl SimClocks {
    /// Clocks at 0, for a TSC of `tsc_khz` ticks in a millisecond (0 is taken
    /// for 1).
    pub fn new(table: RateTable, tsc_khz: u32) -> Self {
        let shared = Shared {
            table,
            tsc_khz: tsc_khz.max(1),
            owners: Mutex::default(),
        };
        SimClocks {
            shared: Arc::new(shared),
        }
    }

    /// Clocks at 0 under the same rates, for another machine.
    #[must_use]
    pub fn anew(&self) -> Self {
        SimClocks::new(self.shared.table.clone(), self.shared.tsc_khz)
    }

    pub(super) fn table(&self) -> &RateTable {
        &self.shared.table
    }

    pub(super) fn tsc_khz(&self) -> u32 {
        self.shared.tsc_khz
    }

    /// The clock of one vCPU; at 0 if it is asked for the first time.
    pub(super) fn of(&self, owner: OwnerId) -> OwnerClock {
        let mut owners = lock(&self.shared.owners);
        let entries = self.shared.table.entries.len();
        let clock = owners.entry(owner).or_insert_with(|| OwnerClock {
            clock: Arc::new(Mutex::new(Clock::new(entries))),
        });
        clock.clone()
    }
}

/// No holder of such a lock leaves anything half done, whatever became of it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A handle of one vCPU's clock.
#[derive(Clone, Debug)]
pub(super) struct OwnerClock {
    clock: Arc<Mutex<Clock>>,
}

impl OwnerClock {
    pub(super) fn lock(&self) -> MutexGuard<'_, Clock> {
        lock(&self.clock)
    }
}

/// What a counter counts of an entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rings {
    /// Both, and their rates are the same: which one it was does not matter.
    Alike,
    /// Both, at different rates.
    Both,
    /// One alone.
    One(Ring),
    None,
}

impl Rings {
    /// What a request counts of events with these rates.
    pub(super) fn of(request: &CountRequest, curve: &Curve) -> Self {
        match (request.os, request.usr) {
            (true, true) if curve.depends_on_ring() => Rings::Both,
            (true, true) => Rings::Alike,
            (true, false) => Rings::One(Ring::Kernel),
            (false, true) => Rings::One(Ring::User),
            (false, false) => Rings::None,
        }
    }

    /// Whether the ring in which time passes makes a difference.
    pub(super) fn matter(self) -> bool {
        matches!(self, Rings::Both | Rings::One(_))
    }

    /// The rings in which it counts; any one for both where they are alike.
    pub(super) fn counted(self) -> impl Iterator<Item = Ring> {
        let all = [Ring::Kernel, Ring::User].into_iter();
        all.filter(move |ring| match self {
            Rings::Both => true,
            Rings::Alike => *ring == Ring::User,
            Rings::One(one) => *ring == one,
            Rings::None => false,
        })
    }
}

/// What a counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct What {
    /// Index of the table's entry.
    pub(super) entry: usize,
    pub(super) rings: Rings,
    /// Cycles with enough events instead of events.
    pub(super) threshold: Option<Threshold>,
}

/// How long one vCPU has run, and in which rings.
///
/// The totals that it gives are functions of this history alone, whoever
/// counts, where and since when. So a count that is a difference of two of
/// them is the same in one piece and in many.
#[derive(Debug)]
pub(super) struct Clock {
    /// Ticks that the vCPU has run.
    time: u64,
    /// The ring in which it has been since `since`, and the one before.
    ring: Ring,
    since: u64,
    before: Ring,
    /// For each entry of the table, its events of either ring until `since`, in
    /// units of [`unit`].
    sums: Vec<[u128; 2]>,
    /// Cycles of what counters count of these.
    tallies: Vec<Cycles>,
}

/// Cycles that count for some counters, of a time on.
#[derive(Debug)]
struct Cycles {
    what: What,
    threshold: Threshold,
    counters: usize,
    /// Those until `time`.
    tally: CycleTally,
    time: u64,
}

impl Clock {
    fn new(entries: usize) -> Self {
        Clock {
            time: 0,
            // Where a vCPU begins.
            ring: Ring::Kernel,
            since: 0,
            before: Ring::Kernel,
            sums: vec![[0; 2]; entries],
            tallies: Vec::new(),
        }
    }

    pub(super) fn time(&self) -> u64 {
        self.time
    }

    /// One more counter counts this: cycles are counted from now on, if not before.
    pub(super) fn begin(&mut self, clocks: &SimClocks, what: What) {
        let Some(threshold) = what.threshold else {
            return;
        };
        if let Some(known) = self.tallies.iter_mut().find(|one| one.what == what) {
            known.counters += 1;
            return;
        }
        // From the cycle before on, to know whether that was one that counts.
        let mut cycles = Cycles {
            what,
            threshold,
            counters: 1,
            tally: CycleTally::default(),
            time: self.time.saturating_sub(1),
        };
        cycles.tally = CycleTally {
            cycles: 0,
            ..self.tally(clocks, &cycles)
        };
        cycles.time = self.time;
        self.tallies.push(cycles);
    }

    /// A counter of this is no more.
    pub(super) fn end(&mut self, what: What) {
        self.tallies.retain_mut(|one| {
            one.counters -= usize::from(one.what == what);
            one.counters > 0
        });
    }

    /// Lets the vCPU run. Where nobody has looked, it is in the ring in which
    /// it was seen last.
    pub(super) fn pass(&mut self, clocks: &SimClocks, ticks: u64, ring: Option<Ring>) {
        // What was counted until now is not counted again and again.
        for at in 0..self.tallies.len() {
            let tally = self.tally(clocks, &self.tallies[at]);
            let cycles = &mut self.tallies[at];
            (cycles.tally, cycles.time) = (tally, self.time);
        }
        if let Some(ring) = ring.filter(|ring| *ring != self.ring) {
            let (old, since, time) = (self.ring, self.since, self.time);
            for (sums, entry) in self.sums.iter_mut().zip(&clocks.table().entries) {
                let events = grown(&entry.curve, old, since, time, clocks.tsc_khz());
                let sum = &mut sums[index(old)];
                *sum = sum.saturating_add(events);
            }
            if since < time {
                self.before = old;
            }
            (self.ring, self.since) = (ring, time);
        }
        self.time = self.time.saturating_add(ticks);
    }

    /// Events of an entry by a time in the present ring, in units of [`unit`]. Never falls.
    fn total(&self, clocks: &SimClocks, what: What, time: u64) -> u128 {
        let (Some(Entry { curve, .. }), Some(sums)) = (
            clocks.table().entries.get(what.entry),
            self.sums.get(what.entry),
        ) else {
            return 0;
        };
        if what.rings == Rings::Alike {
            return curve.integral(Ring::User, time, clocks.tsc_khz());
        }
        what.rings.counted().fold(0, |total: u128, ring| {
            let present = if ring == self.ring {
                grown(curve, ring, self.since, time, clocks.tsc_khz())
            } else {
                0
            };
            total
                .saturating_add(sums[index(ring)])
                .saturating_add(present)
        })
    }

    /// From where on cycles are still to be counted.
    fn start(&self, clocks: &SimClocks, cycles: &Cycles) -> Start {
        let Cycles { what, time, .. } = *cycles;
        if what.rings == Rings::Alike || time >= self.since {
            let counted = what.rings.counted();
            let mut here = counted.filter(|one| what.rings == Rings::Alike || *one == self.ring);
            return Start {
                time,
                total: self.total(clocks, what, time),
                ring: here.next(),
            };
        }
        // A cycle before the present ring was one of the ring before.
        let ring = what.rings.counted().find(|one| *one == self.before);
        let until = self.total(clocks, what, self.since);
        let curve = clocks.table().entries.get(what.entry).map(|one| &one.curve);
        let last = ring.zip(curve).map_or(0, |(ring, curve)| {
            grown(curve, ring, time, self.since, clocks.tsc_khz())
        });
        Start {
            time,
            total: until.saturating_sub(last),
            ring,
        }
    }

    /// The cycles that have counted by now.
    fn tally(&self, clocks: &SimClocks, cycles: &Cycles) -> CycleTally {
        let Some(Entry { curve, .. }) = clocks.table().entries.get(cycles.what.entry) else {
            return cycles.tally;
        };
        let counted = CountedCycles {
            curve,
            threshold: cycles.threshold,
            tsc_khz: clocks.tsc_khz(),
        };
        counted.count(self.start(clocks, cycles), self.time, cycles.tally)
    }

    /// Whole events so far, or cycles that have counted.
    pub(super) fn events(&self, clocks: &SimClocks, what: What) -> u64 {
        if what.threshold.is_some() {
            let known = self.tallies.iter().find(|one| one.what == what);
            return known.map_or(0, |one| self.tally(clocks, one).cycles);
        }
        let total = self.total(clocks, what, self.time) / unit(clocks.tsc_khz());
        u64::try_from(total).unwrap_or(u64::MAX)
    }

    /// The time at which these will be `events`: exactly, or at the
    /// earliest if that depends on the ring, or is far away. `None` if never.
    pub(super) fn reaches(&self, clocks: &SimClocks, what: What, events: u64) -> Option<u64> {
        let khz = clocks.tsc_khz();
        let curve = &clocks.table().entries.get(what.entry)?.curve;
        if let Some(threshold) = what.threshold {
            let known = self.tallies.iter().find(|one| one.what == what)?;
            let tally = self.tally(clocks, known);
            let now = Cycles {
                tally,
                time: self.time,
                ..*known
            };
            let start = self.start(clocks, &now);
            let horizon = self.time.saturating_add(u64::from(khz) * HORIZON_MS);
            let cycles = CountedCycles {
                curve,
                threshold,
                tsc_khz: khz,
            };
            return Some(cycles.reaches(start, horizon, tally, events));
        }
        let wanted = u128::from(events).saturating_mul(unit(khz));
        let growth = wanted.saturating_sub(self.total(clocks, what, self.time));
        what.rings
            .counted()
            .filter_map(|ring| curve.reaches(ring, self.time, growth, khz))
            .min()
    }
}

/// So far ahead cycles are looked at for the one that overflows.
const HORIZON_MS: u64 = 10;

/// What a rate's integral grows by from one time to another.
fn grown(curve: &Curve, ring: Ring, from: u64, until: u64, tsc_khz: u32) -> u128 {
    let at = |ticks| curve.integral(ring, ticks, tsc_khz);
    at(until) - at(from)
}

fn index(ring: Ring) -> usize {
    match ring {
        Ring::Kernel => 0,
        Ring::User => 1,
    }
}
