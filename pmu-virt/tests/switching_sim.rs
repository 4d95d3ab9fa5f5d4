//! vCPUs that share a few simulated counters against vCPUs that have all
//! counters of the world: equal to the last count, whatever the rates.

use pmu_virt::{CounterBackend, RateTable, SimBackend, SimClocks};
use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, proptest};

use crate::schedules::{Registers, Turn, amd, check_schedule, intel, turn};

/// TSC ticks in a millisecond of `sim`: one is a nanosecond.
const KHZ: u32 = 1_000_000;

/// Rates that differ by ring, over time, and from tick to tick, from one event
/// in several turns to several in a tick.
const RATES: &str = r#"
seed = 5

[event.cycles]
rate = 333.333333
noise = 0.9

[event.ref-cycles]
rate = 1000

[event.instructions]
kernel = 77.7
user = 4321.000001
noise = 0.3

[event.branches]
phases = [{ us = 1, rate = 0.7 }, { us = 2, kernel = 2000, user = 0 }, { us = 7, rate = 31 }]

[event.branch-misses]
phases = [{ us = 3, kernel = 0.2, user = 0.9 }, { us = 5, rate = 0 }]
noise = 0.5
"#;

/// A machine's clocks; each of its cores has `counters`.
fn sim(counters: usize) -> SimClocks {
    let text = format!("counters = {counters}\n{RATES}");
    let table = RateTable::parse(&text, "rates").unwrap_or_else(|error| panic!("{error}"));
    SimClocks::new(table, KHZ)
}

fn amd_events() -> Registers {
    let events = [0x43_0076, 0x53_0076, 0x41_00c0, 0x52_00c0, 0x53_00c0];
    let branches = [0x53_00c2, 0x51_00c2, 0x42_00c2, 0x53_00c3, 0x51_00c3];
    Registers {
        events: [[0; 5], events, branches].concat(),
        ..amd()
    }
}

fn intel_events() -> Registers {
    let events = [0x43_003c, 0x53_003c, 0x41_00c0, 0x52_00c0, 0x53_00c0];
    let branches = [0x53_00c4, 0x51_00c4, 0x42_00c4, 0x53_00c5, 0x51_00c5];
    Registers {
        events: [[0; 5], events, branches].concat(),
        ..intel()
    }
}

/// `check_schedule` on simulated counters, `slots` for each core. In the turns
/// of `untold` nobody looks at the ring.
fn check_sim(
    spec: &str,
    slots: usize,
    mut turns: Vec<Turn>,
    untold: &[bool],
) -> Result<(), proptest::test_runner::TestCaseError> {
    for (turn, untold) in turns.iter_mut().zip(untold) {
        turn.ring = turn.ring.filter(|_| !untold);
    }
    let clocks = sim(slots);
    let shared = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&clocks)) };
    let own = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&sim(64))) };
    check_schedule(spec, shared, own, &turns)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn amd_counts_never_leak_on_sim(
        slots in 6usize..13,
        turns in vec(turn(&amd_events()), 0..60),
        untold in vec(proptest::bool::weighted(0.1), 60),
    ) {
        check_sim(amd().spec, slots, turns, &untold)?;
    }

    #[test]
    fn intel_counts_never_leak_on_sim(
        slots in 7usize..13,
        turns in vec(turn(&intel_events()), 0..60),
        untold in vec(proptest::bool::weighted(0.1), 60),
    ) {
        check_sim(intel().spec, slots, turns, &untold)?;
    }
}
