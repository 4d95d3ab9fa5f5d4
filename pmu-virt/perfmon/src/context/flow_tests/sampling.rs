//! Whole measurements: events are counted up to each overflow, a format
//! records, a tool reads the buffer and restarts.

use std::sync::Arc;

use perfmon_abi::compact::Cursor;
use perfmon_abi::consts::{PFM_REGFL_OVFL_NOTIFY, PFM_REGFL_RANDOM};
use perfmon_abi::parse::{Layout, Sample, default_buffer, double_half, double_header, oldest_full};
use perfmon_abi::wire::Call;
use perfmon_abi::{CompactArg, DefaultArg, PmcArg, PmdArg, Record};
use pmu_model::{PmuModel, Provenance, Vendor};
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

use super::{Exits, Queue, moment};
use crate::context::{Context, Phase};
use crate::description::LogicalPmu;
use crate::format::{CompactFormat, DefaultFormat, DoubleFormat, Sampler, SamplingFormat, Setup};

const INITIAL: u64 = 500;
const SHORT: u64 = 100;
const LONG: u64 = 1000;
/// Select of an event that counts in both rings: on, OS, USR.
const COUNTS: u64 = 1 << 22 | 3 << 16 | 0xc0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Default,
    Double,
    Compact,
}

/// A context that samples every so many events of PMD 0, and its tool.
struct Measurement {
    kind: Kind,
    context: Context,
    queue: Queue,
    cursor: Cursor,
    layout: Layout,
    read: Vec<Sample>,
    lost: u64,
    counted: u64,
}

impl Measurement {
    fn new(kind: Kind, buf_size: u64, mask: u64, seed: u32) -> Self {
        let pmu = Arc::new(LogicalPmu::new(PmuModel::default_for(Vendor::Amd)));
        let plain = DefaultArg {
            buf_size,
            buf_flags: 0,
        };
        let compact = CompactArg {
            buf_size,
            ..CompactArg::default()
        };
        let (format, arg): (Arc<dyn SamplingFormat>, _) = match kind {
            Kind::Default => (Arc::new(DefaultFormat), plain.to_bytes()),
            Kind::Double => (Arc::new(DoubleFormat), plain.to_bytes()),
            Kind::Compact => (Arc::new(CompactFormat), compact.to_bytes()),
        };
        let setup = Setup {
            ctx_flags: 0,
            num_pmds: u16::try_from(pmu.pmds().len()).unwrap_or(u16::MAX),
            arg: &arg,
        };
        let size = format.size(&setup).expect("a valid argument");
        let sampler = Sampler::new(format, &setup, Box::new(vec![0u8; size])).expect("a sampler");
        let context = Context::new(pmu, 0, Some(sampler)).expect("a context");
        let mut layout = Layout::default();
        layout.insert(0, 0, [1, 0]);
        let mut measurement = Measurement {
            kind,
            context,
            queue: Queue::default(),
            cursor: Cursor::default(),
            layout,
            read: Vec::new(),
            lost: 0,
            counted: 0,
        };
        measurement.program(mask, seed);
        measurement
    }

    fn program(&mut self, random_mask: u64, random_seed: u32) {
        let pmc = PmcArg {
            flags: PFM_REGFL_OVFL_NOTIFY | PFM_REGFL_RANDOM,
            value: COUNTS,
            smpl_pmds: [1, 0],
            ..PmcArg::default()
        };
        let pmd = PmdArg {
            value: INITIAL.wrapping_neg(),
            long_reset: LONG.wrapping_neg(),
            short_reset: SHORT.wrapping_neg(),
            random_mask,
            random_seed,
            ..PmdArg::default()
        };
        self.call(Call::WritePmcs(vec![pmc]));
        self.call(Call::WritePmds(vec![pmd]));
        self.context.attached(0);
        self.call(Call::Start(None));
    }

    fn call(&mut self, mut call: Call) {
        let result = self.context.call(&mut call, &Exits(0));
        assert_eq!(result, Ok(()), "{call:?}");
    }

    /// `events` take place, each overflow at its very event. The tool comes when
    /// it is told to.
    fn run(&mut self, mut events: u64) {
        while let [wanted] = self.context.wanted()[..] {
            let until = wanted.until.map_or(u64::MAX, std::num::NonZeroU64::get);
            let step = events.min(until);
            self.context.count(0, step, Provenance::Exact);
            self.counted += step;
            events -= step;
            assert_eq!(self.context.has_pending_overflow(), step == until);
            let now = moment(self.counted);
            self.context.overflow(&now, &Exits(0), &mut self.queue);
            if !self.queue.messages.is_empty() {
                self.tool();
            }
            if events == 0 {
                break;
            }
        }
    }

    /// Reads the messages and what they tell of, and restarts.
    fn tool(&mut self) {
        for _ in std::mem::take(&mut self.queue.messages) {
            self.look(false);
            self.call(Call::Restart);
        }
    }

    /// `all`: the end has come, and half-filled buffers are read as well.
    fn look(&mut self, all: bool) {
        let sampler = self.context.sampler.as_mut().expect("a sampler");
        let buffer = sampler.recorded();
        match self.kind {
            Kind::Default => self
                .read
                .extend(default_buffer(buffer, &self.layout).expect("whole")),
            Kind::Double => {
                let header = double_header(buffer).expect("a header");
                self.lost = header.lost;
                let active = header.state.iter().position(|&state| state == 1);
                let halves = [oldest_full(&header), active.filter(|_| all)];
                for half in halves.into_iter().flatten() {
                    let samples = double_half(buffer, half, &self.layout);
                    self.read.extend(samples.expect("whole"));
                }
            }
            Kind::Compact => {
                let mut copy = |offset: usize, to: &mut [u8]| {
                    to.copy_from_slice(&buffer[offset..offset + to.len()]);
                    true
                };
                let batch = self.cursor.follow(&mut copy).expect("a ring");
                self.read.extend(batch.samples);
                self.lost += batch.lost;
            }
        }
    }

    /// The period that each sample ended.
    fn periods(&self) -> Vec<u64> {
        let of = |sample: &Sample| {
            sample
                .entry
                .map(|entry| entry.last_reset_val.wrapping_neg())
        };
        self.read.iter().filter_map(of).collect()
    }

    /// Events since the last overflow.
    fn left(&self) -> u64 {
        let set = self.context.sets.get(0).expect("set 0");
        let pmd = set.pmd(0);
        pmd.value.wrapping_sub(pmd.last_reset)
    }
}

#[test]
fn three_periods_follow_each_other() {
    // Figure 3.19: room for three samples of 48 bytes before the buffer is full.
    let most = 40
        + 8 * {
            let pmu = LogicalPmu::new(PmuModel::default_for(Vendor::Amd));
            u64::try_from(pmu.pmds().len()).unwrap_or(u64::MAX)
        };
    let mut measurement = Measurement::new(Kind::Default, 40 + most + 2 * 48, 0, 1);
    measurement.run(INITIAL + 2 * SHORT + LONG + 2 * SHORT + LONG + 7);
    measurement.look(true);
    let expected = [INITIAL, SHORT, SHORT, LONG, SHORT, SHORT, LONG];
    assert_eq!(measurement.periods(), expected);
    assert_eq!(measurement.left(), 7);
}

#[test]
fn double_and_compact_never_see_the_long_period() {
    for kind in [Kind::Double, Kind::Compact] {
        let mut measurement = Measurement::new(kind, 8192, 0, 1);
        measurement.run(100_000);
        measurement.look(true);
        let periods = measurement.periods();
        assert_eq!(periods.first(), Some(&INITIAL));
        assert!(periods[1..].iter().all(|&period| period == SHORT));
        assert_eq!((measurement.lost, periods.len()), (0, 996), "{kind:?}");
    }
}

#[test]
fn a_saturated_buffer_can_be_restarted() {
    let mut measurement = Measurement::new(Kind::Default, 4096, 0, 1);
    let pmc = PmcArg {
        value: COUNTS,
        ..PmcArg::default()
    };
    measurement.call(Call::WritePmcs(vec![pmc]));
    measurement.run(1_000_000);
    assert_eq!(measurement.context.phase(), Phase::Masked);
    assert!(measurement.queue.messages.is_empty(), "nobody is told");
    let counted = measurement.counted;
    measurement.run(1000);
    assert_eq!(measurement.counted, counted, "nothing is wanted");
    measurement.call(Call::Restart);
    measurement.run(1000);
    assert_eq!(measurement.counted, counted + 1000);
}

proptest! {
    /// The periods of all samples and what was counted since are all events.
    #[test]
    fn counts_are_conserved(
        kind in prop::sample::select(vec![Kind::Default, Kind::Double, Kind::Compact]),
        size in 4096u64..20_000,
        mask in 0u64..64,
        seed in any::<u32>(),
        pieces in prop::collection::vec(0u64..20_000, 1..20),
    ) {
        let run = || {
            let mut measurement = Measurement::new(kind, size, mask, seed);
            for &events in &pieces {
                measurement.run(events);
            }
            measurement.look(true);
            measurement
        };
        let measurement = run();
        prop_assert_eq!(measurement.counted, pieces.iter().sum::<u64>());
        prop_assert_eq!(measurement.lost, 0);
        let sum: u64 = measurement.periods().iter().sum();
        prop_assert_eq!(sum + measurement.left(), measurement.counted);
        // The seed decides: another run has the same samples.
        prop_assert_eq!(&run().read, &measurement.read);
        let varied = measurement.periods();
        let within = |&period: &u64| [SHORT, LONG].iter().any(|&base| base - mask <= period && period <= base);
        prop_assert!(varied.iter().skip(1).all(within), "{:?}", varied);
    }
}
