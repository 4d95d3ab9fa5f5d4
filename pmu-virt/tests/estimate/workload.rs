//! Workloads made up from a seed, run on `sim`: what multiplexed counters
//! counted in each slice, and what counters that ran all the time counted.

use pmu_virt::{
    CountRequest, CounterBackend, EventCode, EventFamily, Progress, RateTable, Reading, SimBackend,
    SimClocks, SlotIndex, Ticks, Tsc,
};
use std::fmt::Write;

/// TSC ticks in a millisecond: one in a nanosecond.
const KHZ: u32 = 1_000_000;

/// SplitMix64.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// From 0 to below 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn chance(&mut self, share: f64) -> bool {
        self.unit() < share
    }

    pub(crate) fn whole(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from + 1)
    }

    /// Even on a logarithmic scale.
    pub(crate) fn scale(&mut self, from: f64, to: f64) -> f64 {
        from * (to / from).powf(self.unit())
    }
}

/// What kind of workload is made up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) sets: (u64, u64),
    /// Shortest and longest phase, in rounds of all sets; `None` for rates that
    /// never change.
    pub(crate) phase_rounds: Option<(f64, f64)>,
    /// Share of the events that have phases of their own.
    pub(crate) apart: f64,
    /// Share of the workloads in which one event is counted all the time.
    pub(crate) fixed: f64,
    /// Largest noise.
    pub(crate) noise: f64,
    /// Rounds of the run.
    pub(crate) rounds: (f64, f64),
}

/// Phases of the program that most events change with, each by a factor of its
/// own, while some have phases of their own; 2 to 4 sets of 1 to 3 events.
pub(crate) const PHASES: Kind = Kind {
    sets: (2, 4),
    phase_rounds: Some((2.0, 20.0)),
    apart: 0.25,
    fixed: 0.25,
    noise: 0.2,
    rounds: (20.0, 200.0),
};

/// The same without phases.
pub(crate) const CONSTANT: Kind = Kind {
    phase_rounds: None,
    ..PHASES
};

/// A workload that was run.
#[derive(Debug)]
pub(crate) struct Run {
    /// Length in nanoseconds, and the counts of the events that were on.
    pub(crate) slices: Slices,
    /// What each event's unmultiplexed counter counted.
    pub(crate) truth: Vec<u64>,
    /// Which events have phases of their own.
    pub(crate) apart: Vec<bool>,
}

/// Lengths of phases in microseconds.
fn phases(random: &mut Random, kind: &Kind, round_us: f64) -> Vec<u64> {
    let Some((shortest, longest)) = kind.phase_rounds else {
        return vec![1000];
    };
    let count = random.whole(2, 6);
    let mut length = || random.scale(shortest, longest) * round_us;
    (0..count).map(|_| length() as u64 + 1).collect()
}

/// The table's entry of an event with phases of these lengths; two rates in a
/// row are the same in a fifth of the cases.
fn entry(random: &mut Random, event: usize, noise: f64, lengths: &[u64]) -> String {
    let base = random.scale(1.0, 1000.0);
    let mut rate = base;
    let mut text = format!("[event.r{:04x}]\nnoise = {noise:.6}\nphases = [", event + 1);
    for us in lengths {
        if !random.chance(0.2) {
            rate = base * random.scale(0.125, 8.0);
        }
        write!(text, "{{ us = {us}, rate = {rate:.6} }}, ").unwrap();
    }
    text + "]\n"
}

/// Makes a workload of that kind up and runs it.
pub(crate) fn run(kind: &Kind, seed: u64) -> Run {
    let random = &mut Random(seed);
    let sets = usize::try_from(random.whole(kind.sets.0, kind.sets.1)).unwrap();
    let slice_us = [1000, 2000, 5000, 10_000][usize::try_from(random.whole(0, 3)).unwrap()];
    let round_us = slice_us as f64 * sets as f64;
    let jitter = if random.chance(0.5) { 0.2 } else { 0.0 };
    let mut set_of: Vec<Option<usize>> = Vec::new();
    for set in 0..sets {
        set_of.extend((0..random.whole(1, 3)).map(|_| Some(set)));
    }
    if random.chance(kind.fixed) {
        set_of.push(None);
    }
    let noise = if random.chance(0.3) {
        0.0
    } else {
        random.unit() * kind.noise
    };
    let program = phases(random, kind, round_us);
    let mut table = format!("seed = {}\n", random.next() >> 2);
    let mut apart = Vec::new();
    for event in 0..set_of.len() {
        let own = phases(random, kind, round_us);
        apart.push(random.chance(kind.apart));
        let lengths = if apart[event] { &own } else { &program };
        table += &entry(random, event, noise, lengths);
    }
    let rounds = random.scale(kind.rounds.0, kind.rounds.1) as usize;
    let extra = usize::try_from(random.whole(0, sets as u64 - 1)).unwrap();
    let slices: Vec<(u64, usize)> = (0..rounds * sets + extra)
        .map(|slice| {
            let vary = 1.0 + jitter * (2.0 * random.unit() - 1.0);
            ((slice_us as f64 * 1000.0 * vary) as u64, slice % sets)
        })
        .collect();
    let (slices, truth) = simulate(&table, &set_of, &slices);
    Run {
        slices,
        truth,
        apart,
    }
}

type Slices = Vec<(u64, Vec<(usize, u64)>)>;

/// Runs slices, each of a length in nanoseconds and a set. `set_of` says which
/// set each event is in: `None` for one that is always counted. Each event has
/// two counters: one is switched with its set, the other never stops.
fn simulate(table: &str, set_of: &[Option<usize>], slices: &[(u64, usize)]) -> (Slices, Vec<u64>) {
    let table = RateTable::parse(table, "t").unwrap_or_else(|error| panic!("{error}\n{table}"));
    let mut backend = SimBackend::of(&SimClocks::new(table, KHZ));
    let events = set_of.len();
    let slot = |index: usize| SlotIndex(u8::try_from(index).unwrap());
    for event in 0..events {
        let code = EventCode::Selected {
            family: EventFamily::Intel,
            select: u16::try_from(event + 1).unwrap(),
            umask: 0,
        };
        let request = CountRequest::plain(code, true, true);
        for index in [event, events + event] {
            backend
                .program(slot(index), &request)
                .expect("in the table");
        }
        backend.start(slot(event));
    }
    let read = |backend: &SimBackend, index| match backend.read(slot(index)) {
        Reading::Counted { value, .. } => value,
        Reading::Unavailable(reason) => panic!("{reason}"),
    };
    let mut counts = vec![0; events];
    let mut tsc = 0;
    let mut taken = Vec::new();
    for &(ns, set) in slices {
        let active = |event: &usize| set_of[*event].is_none_or(|of| of == set);
        let active: Vec<usize> = (0..events).filter(active).collect();
        active
            .iter()
            .for_each(|event| backend.start(slot(events + event)));
        backend.observe(&Progress::Entered { tsc: Tsc(tsc) });
        tsc += ns;
        backend.observe(&Progress::Left {
            tsc: Tsc(tsc),
            halted: Ticks(0),
            ring: None,
        });
        active
            .iter()
            .for_each(|event| backend.stop(slot(events + event)));
        let mut take = |event: usize| {
            let now = read(&backend, events + event);
            (event, now - std::mem::replace(&mut counts[event], now))
        };
        taken.push((ns, active.iter().map(|event| take(*event)).collect()));
    }
    let truth = (0..events).map(|event| read(&backend, event)).collect();
    (taken, truth)
}
