//! What takes place, whoever counts it: simulated counters without number.

use pmu_virt::{
    CountRequest, CounterBackend, OwnerId, PmuModel, Progress, RateTable, Reading, SimBackend,
    SimClocks, SlotIndex, Tsc,
};
use std::num::NonZeroU32;

/// TSC ticks in a millisecond of `sim`: one is a nanosecond.
pub(crate) const KHZ: NonZeroU32 = NonZeroU32::new(1_000_000).expect("not 0");

/// Rates that differ by ring, over time, and from tick to tick.
const RATES: &str = r#"
seed = 5

[event.cycles]
rate = 333.333333
noise = 0.9

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

/// Event selects that count something: events, rings, with and without INT.
pub(crate) const EVENTS: [u64; 8] = [
    0x43_0076, 0x53_0076, 0x41_00c0, 0x52_00c0, 0x53_00c0, 0x43_00c2, 0x51_00c2, 0x43_00c3,
];

/// A machine's clocks; each of its cores has `counters`.
pub(crate) fn clocks(counters: usize) -> SimClocks {
    let text = format!("counters = {counters}\n{RATES}");
    let table = RateTable::parse(&text, "rates").unwrap_or_else(|error| panic!("{error}"));
    SimClocks::new(table, KHZ.get())
}

/// The request of an event of [`EVENTS`].
pub(crate) fn request(event: usize) -> CountRequest {
    let model = PmuModel::parse("amd-core").expect("a model");
    CountRequest::decode(model.events(), EVENTS[event])
}

/// One vCPU, with every event counted from the beginning on.
#[derive(Debug)]
pub(crate) struct Truth {
    backend: SimBackend,
}

impl Truth {
    pub(crate) fn new(clocks: &SimClocks, vcpu: u32) -> Self {
        let mut backend = SimBackend::of(clocks);
        backend.attach(OwnerId(vcpu));
        for event in 0..EVENTS.len() {
            backend
                .program(slot(event), &request(event))
                .expect("it counts");
            backend.start(slot(event));
        }
        Truth { backend }
    }

    /// The vCPU runs; how many of each event took place.
    pub(crate) fn run(&mut self, entered: u64, left: &Progress) -> Vec<u64> {
        let before: Vec<u64> = (0..EVENTS.len()).map(|event| self.read(event)).collect();
        self.backend
            .observe(&Progress::Entered { tsc: Tsc(entered) });
        self.backend.observe(left);
        let after = (0..EVENTS.len()).map(|event| self.read(event));
        after.zip(before).map(|(now, then)| now - then).collect()
    }

    fn read(&self, event: usize) -> u64 {
        match self.backend.read(slot(event)) {
            Reading::Counted { value, .. } => value,
            Reading::Unavailable(reason) => panic!("{reason}"),
        }
    }
}

fn slot(event: usize) -> SlotIndex {
    SlotIndex(u8::try_from(event).expect("a small number"))
}
