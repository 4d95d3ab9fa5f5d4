//! The virtual time of each vCPU, and what happens in it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pmu_model::{CountRequest, OwnerId, Ring};

use super::curve::{Curve, unit};
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
    /// None.
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

/// How long one vCPU has run, and in which rings.
///
/// The totals that it gives are functions of this history alone, whoever
/// counts, where and since when. So a count that is a difference of two of
/// them is the same in one piece and in many.
#[derive(Debug)]
pub(super) struct Clock {
    /// Ticks that the vCPU has run.
    time: u64,
    /// The ring in which it has been since `since`.
    ring: Ring,
    since: u64,
    /// For each entry of the table, its events of either ring until `since`, in
    /// units of [`unit`].
    sums: Vec<[u128; 2]>,
}

impl Clock {
    fn new(entries: usize) -> Self {
        Clock {
            time: 0,
            // Where a vCPU begins.
            ring: Ring::Kernel,
            since: 0,
            sums: vec![[0; 2]; entries],
        }
    }

    pub(super) fn time(&self) -> u64 {
        self.time
    }

    /// Lets the vCPU run. Where nobody has looked, it is in the ring in which
    /// it was seen last.
    pub(super) fn pass(&mut self, clocks: &SimClocks, ticks: u64, ring: Option<Ring>) {
        if let Some(ring) = ring.filter(|ring| *ring != self.ring) {
            let (old, since, time) = (self.ring, self.since, self.time);
            for (sums, entry) in self.sums.iter_mut().zip(&clocks.table().entries) {
                let events = grown(&entry.curve, old, since, time, clocks.tsc_khz());
                let sum = &mut sums[index(old)];
                *sum = sum.saturating_add(events);
            }
            (self.ring, self.since) = (ring, time);
        }
        self.time = self.time.saturating_add(ticks);
    }

    /// Events of an entry so far, in units of [`unit`]. Never falls.
    pub(super) fn total(&self, clocks: &SimClocks, entry: usize, rings: Rings) -> u128 {
        let (Some(Entry { curve, .. }), Some(sums)) =
            (clocks.table().entries.get(entry), self.sums.get(entry))
        else {
            return 0;
        };
        if rings == Rings::Alike {
            return curve.integral(Ring::User, self.time, clocks.tsc_khz());
        }
        rings.counted().fold(0, |total: u128, ring| {
            let present = if ring == self.ring {
                grown(curve, ring, self.since, self.time, clocks.tsc_khz())
            } else {
                0
            };
            total
                .saturating_add(sums[index(ring)])
                .saturating_add(present)
        })
    }

    /// The same in whole events.
    pub(super) fn events(&self, clocks: &SimClocks, entry: usize, rings: Rings) -> u64 {
        let total = self.total(clocks, entry, rings) / unit(clocks.tsc_khz());
        u64::try_from(total).unwrap_or(u64::MAX)
    }

    /// The time at which an entry's events will be `events`: exactly, or at the
    /// earliest if that depends on the ring. `None` if never.
    pub(super) fn reaches(
        &self,
        clocks: &SimClocks,
        entry: usize,
        rings: Rings,
        events: u64,
    ) -> Option<u64> {
        let khz = clocks.tsc_khz();
        let curve = &clocks.table().entries.get(entry)?.curve;
        let wanted = u128::from(events).saturating_mul(unit(khz));
        let growth = wanted.saturating_sub(self.total(clocks, entry, rings));
        rings
            .counted()
            .filter_map(|ring| curve.reaches(ring, self.time, growth, khz))
            .min()
    }
}

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
