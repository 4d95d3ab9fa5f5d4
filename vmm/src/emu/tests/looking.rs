//! What looks at a guest from outside, a tool or the log, changes nothing in it.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use emu::{Event, EventClass, EventTotals, Observer, Ring, Sight};
use log::{LevelFilter, Log, Metadata, Record};
use perfmon_abi::wire::{Call, Refusal};
use perfmon_abi::{Message, PmcArg, PmdArg, consts as pfm};
use pmu_virt::perfmon::{
    AttachedContext, Context, ContextId, Control, HostPolicy, LogicalPmu, MessageQueue, Moment,
    OverflowArg, Quantities, Sampler, SamplingFormat, Setup, VirtualPmd,
};
use pmu_virt::{CorePmu, PmuModel, VcpuPmu};

use super::super::TSC_KHZ;
use super::{
    MODEL, REWRITTEN, ROUNDS, SECOND, TIMER_HANDLER, guest, nobody, room_with, run_to_its_end,
};

/// Instructions between two samples, and what selects them.
const PERIODS: [u64; 2] = [97, 1_009];
const INSTRUCTIONS: u64 = 0x53_00c0;

/// Records nothing and goes on sampling; how often it was asked to.
#[derive(Debug, Default)]
struct Tally(AtomicU64);

impl SamplingFormat for Tally {
    fn name(&self) -> &str {
        "tally"
    }

    fn uuid(&self) -> [u8; 16] {
        [7; 16]
    }

    fn handler(&self, _: &mut [u8], arg: &mut OverflowArg<'_>, _: &Moment) -> Result<(), Refusal> {
        self.0.fetch_add(1, Ordering::Relaxed);
        arg.control = Control {
            reset_ovfl_pmds: true,
            ..Control::default()
        };
        Ok(())
    }
}

/// A tool that reads no message, and knows no quantity.
#[derive(Debug)]
struct Nobody;

impl MessageQueue for Nobody {
    fn waiting(&self) -> usize {
        0
    }

    fn post(&mut self, _: Option<&Message>) {}
}

impl Quantities for Nobody {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }
}

/// Attaches a tool that samples instructions of this vCPU every `period`, and tells `tally`.
fn attach((pmu, core): (&mut VcpuPmu, &mut CorePmu), period: u64, tally: &Arc<Tally>) {
    let khz = NonZeroU32::new(TSC_KHZ).expect("a frequency");
    core.enable_hosting(HostPolicy::GuestFirst, khz);
    let setup = Setup {
        ctx_flags: 0,
        num_pmds: 1,
        arg: &[],
    };
    let sampler = Sampler::new(tally.clone(), &setup, Box::new(Vec::new())).expect("a sampler");
    let model = PmuModel::parse(MODEL).expect("a model");
    let registers = Arc::new(LogicalPmu::new(model));
    let mut context = Context::new(registers, 0, Some(sampler)).expect("a context");
    let left = period.wrapping_neg();
    let commands = [
        Call::WritePmcs(vec![PmcArg {
            num: 0,
            value: INSTRUCTIONS,
            flags: pfm::PFM_REGFL_OVFL_NOTIFY,
            ..PmcArg::default()
        }]),
        Call::WritePmds(vec![PmdArg {
            num: 0,
            value: left,
            long_reset: left,
            short_reset: left,
            ..PmdArg::default()
        }]),
    ];
    for mut command in commands {
        assert_eq!(context.call(&mut command, &Nobody), Ok(()));
    }
    let id = ContextId(1);
    let hosted = AttachedContext::new(id, Box::new(context), Box::new(Nobody));
    let mut tools = pmu.host_side(Some(core));
    assert!(tools.load(hosted, 0).is_ok(), "there is room");
    let started = tools.call(id, &mut Call::Start(None), &Nobody);
    assert_eq!(started, Ok(()));
}

#[test]
fn a_tool_that_samples_changes_nothing() {
    let run = |period: Option<u64>| {
        let tally = Arc::new(Tally::default());
        let (mut room, control) = room_with(&guest(), nobody, |pmu, core| {
            if let Some(period) = period {
                attach((pmu, core), period, &tally);
            }
        });
        let end = run_to_its_end(&mut room, &control, None);
        (end, tally.0.load(Ordering::Relaxed))
    };
    let (alone, none) = run(None);
    assert_eq!(none, 0);
    for period in PERIODS {
        let (looked_at, samples) = run(Some(period));
        assert!(samples > 10, "{samples} samples, one every {period}");
        assert_eq!(looked_at, alone, "a sample every {period}");
    }
}

/// Somebody who is told of whatever there is.
#[derive(Debug, Default)]
struct Onlooker {
    told: Arc<AtomicU64>,
    executed: Arc<AtomicU64>,
}

impl Observer for Onlooker {
    fn executed(&mut self, _: Ring, done: &EventTotals) {
        let done = done.of(EventClass::Instructions);
        self.executed.fetch_add(done, Ordering::Relaxed);
    }

    fn event(&mut self, _: Event, _: &Sight<'_>) {
        self.told.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn who_looks_on_changes_nothing() {
    let run = |onlooker: Option<Onlooker>, places: &[u64]| {
        let (mut room, control) = room_with(&guest(), nobody, |_, _| {});
        room.observe(
            onlooker.map(|one| Box::new(one) as Box<dyn Observer>),
            places,
        );
        run_to_its_end(&mut room, &control, None)
    };
    let alone = run(None, &[]);
    let (told, executed) = <(Arc<AtomicU64>, Arc<AtomicU64>)>::default();
    let onlooker = Onlooker {
        told: told.clone(),
        executed: executed.clone(),
    };
    let looked_at = run(Some(onlooker), &[REWRITTEN, TIMER_HANDLER, SECOND + 32]);
    assert_eq!(looked_at, alone);
    let told = told.load(Ordering::Relaxed);
    assert!(told > 2 * u64::from(ROUNDS), "told of {told} places");
    assert!(executed.load(Ordering::Relaxed) > 1000);
}

/// A log that is read by nobody; how many lines it was given.
struct Lines(AtomicU64);

impl Log for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // Written out, as for a file.
        if !record.args().to_string().is_empty() {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

static LINES: Lines = Lines(AtomicU64::new(0));

/// `-vvv` has all of the PMU's accesses in the log.
#[test]
fn a_log_of_everything_changes_nothing() {
    let run = || {
        let (mut room, control) = room_with(&guest(), nobody, |_, _| {});
        run_to_its_end(&mut room, &control, None)
    };
    let quiet = run();
    log::set_logger(&LINES).expect("no other test has one");
    log::set_max_level(LevelFilter::Trace);
    let before = LINES.0.load(Ordering::Relaxed);
    let told = run();
    let lines = LINES.0.load(Ordering::Relaxed) - before;
    assert!(lines > 10, "{lines} lines");
    assert_eq!(told, quiet);
}
