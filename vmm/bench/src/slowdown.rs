//! What counting costs a guest that computes.
//!
//! Three vCPUs of one VM run the same loop at CPL 3 in turn, on one thread: one
//! without a PMU programmed, one with four counters, one with four of which one
//! samples at 100 Hz. The guest takes RDTSC before and after the loop. Three others compare
//! a counter that samples at 1 kHz with instruction-based sampling.

mod frozen;
mod guest;

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use pmu_virt::PmuModel;
use pmu_virt::ibs::op;
use serde::Serialize;
use vm_memory::{Bytes, GuestAddress};
use vmm::kvm::KvmVm;
use vmm::micro::Solo;
use vmm::vcpu::Silent;

use self::frozen::measure as measure_frozen;
pub use self::frozen::{FrozenAccess, FrozenRow};
use self::guest::{AFTER, BEFORE, NMIS, guest, words_of};
use super::error::BenchError;
use super::harness::{self, BatchPort, Harness, ratio};
use super::report::{Report, micros, millis, table, verdict, where_it_ran};
use super::sources::{Event, LeftOut, Source, countable};
use super::stats::median;

/// Counters that count.
const COUNTERS: u32 = 4;
/// The model whose two ways to sample are compared, on any host.
const WITH_IBS: &str = "amd-core,ibs=on";
/// How long one turn of the loop is to take.
const TURN_MS: u64 = 50;
/// Rounds of the loop from which its length is found.
const TRIAL: u64 = 2_000_000;
const PATIENCE: Duration = Duration::from_secs(30);
/// Wanted speed with counters, and with sampling, as parts of the speed without.
const TARGETS: [f64; 3] = [1.0, 0.99, 0.98];

/// What a vCPU does with its PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// Nothing is programmed.
    None,
    /// Four counters count.
    Counting,
    /// Four counters count, and one of them interrupts at 100 Hz.
    Sampling,
    /// One counter of cycles counts, and interrupts at 1 kHz by NMI.
    Nmi,
    /// The op sampler counts cycles, and interrupts at 1 kHz by NMI.
    Ibs,
}

impl Load {
    /// Those of the first table.
    const COUNTERS: [Self; LOADS] = [Self::None, Self::Counting, Self::Sampling];
    /// Two ways to sample.
    const SAMPLERS: [Self; LOADS] = [Self::None, Self::Nmi, Self::Ibs];

    fn name(self) -> &'static str {
        match self {
            Self::None => "no PMU programmed",
            Self::Counting => "4 counters",
            Self::Sampling => "4 counters, 100 Hz",
            Self::Nmi => "a counter, 1 kHz",
            Self::Ibs => "IBS, 1 kHz",
        }
    }

    /// Programmable counters that count.
    fn counters(self) -> u32 {
        match self {
            Self::None | Self::Ibs => 0,
            Self::Counting | Self::Sampling => COUNTERS,
            Self::Nmi => 1,
        }
    }

    /// What the guest writes at each sample: minus the period of a counter, or the control
    /// of an op sampler whose maximum is the period.
    fn reload(self, tsc_khz: u32) -> u32 {
        match self {
            Self::Ibs => {
                let max = u64::from(tsc_khz);
                let control = max >> 4 & op::MAX | max & op::MAX_EXTENDED | op::ENABLE;
                u32::try_from(control).unwrap_or(0)
            }
            Self::Nmi => tsc_khz.wrapping_neg(),
            _ => (tsc_khz * 10).wrapping_neg(),
        }
    }
}

/// One way to use the PMU.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SlowdownRow {
    /// What the vCPU did.
    pub load: Load,
    /// Median time of the loop.
    pub loop_ns: u64,
    /// Speed as a part of that without a PMU programmed: the ratio of the medians.
    pub speed: f64,
    /// PMIs that the guest took in all measured loops.
    pub pmis: u64,
    /// The least speed wanted; none where no target holds.
    pub target: Option<f64>,
    /// It was reached.
    pub met: Option<bool>,
}

/// One source.
#[derive(Clone, Debug, Serialize)]
pub struct SlowdownSource {
    /// Where the counts come from.
    pub backend: &'static str,
    /// What the four counters counted.
    pub events: Vec<String>,
    /// One for each way to use the PMU.
    pub rows: Vec<SlowdownRow>,
    /// What sampling at 1 kHz costs, by a counter and by IBS, in a guest of its own; empty
    /// if the source has neither cycles nor instructions for IBS.
    pub sampling: Vec<SlowdownRow>,
    /// What events cost that the source does not count; empty if it counts all.
    pub frozen: Vec<FrozenRow>,
}

/// The whole measurement.
#[derive(Clone, Debug, Serialize)]
pub struct SlowdownReport {
    /// The host's processor.
    pub processor: Option<String>,
    /// Guest CPL 0 runs in KVM's instruction emulator.
    pub slow_cpl0: bool,
    /// PMU model of the guest.
    pub model: &'static str,
    /// Loops of each kind.
    pub rounds: u32,
    /// One for each source.
    pub sources: Vec<SlowdownSource>,
    /// Sources without figures.
    pub left_out: Vec<LeftOut>,
}

/// Measures `rounds` loops of each kind with each of `sources`.
pub(super) fn measure(
    harness: &Harness<'_>,
    sources: &[Source],
    mut left_out: Vec<LeftOut>,
    rounds: u32,
) -> Result<SlowdownReport, BenchError> {
    let mut measured = Vec::new();
    for source in sources {
        match Trio::new(harness, source, Load::COUNTERS)? {
            Ok(trio) => {
                let mut one = trio.measure(rounds)?;
                one.sampling = measure_sampling(harness, source, rounds)?;
                one.frozen = measure_frozen(harness, source, rounds)?;
                measured.push(one);
            }
            Err(none) => left_out.push(none),
        }
    }
    Ok(SlowdownReport {
        processor: harness::processor(),
        slow_cpl0: harness.probe.slow_cpl0(),
        model: harness.model.name(),
        rounds,
        sources: measured,
        left_out,
    })
}

/// Measures both ways to sample with `source`; nothing where it cannot do both.
fn measure_sampling(
    harness: &Harness<'_>,
    source: &Source,
    rounds: u32,
) -> Result<Vec<SlowdownRow>, BenchError> {
    let backend = source.open()?;
    let model = PmuModel::parse(WITH_IBS).map_err(|error| BenchError::Guest(error.to_string()))?;
    let model = model.counted(|event| backend.plan(event).is_ok());
    if model.ibs() == 0 {
        return Ok(Vec::new());
    }
    let harness = &Harness {
        model,
        ..harness.clone()
    };
    match Trio::new(harness, source, Load::SAMPLERS)? {
        Ok(trio) => Ok(trio.measure(rounds)?.rows),
        Err(_) => Ok(Vec::new()),
    }
}

/// How many vCPUs take turns.
const LOADS: usize = 3;

/// The three vCPUs, in the order of their loads.
#[derive(Debug)]
struct Trio {
    loads: [Load; LOADS],
    vm: Arc<KvmVm>,
    solos: Vec<Solo>,
    backend: &'static str,
    events: Vec<Event>,
    slow_cpl0: bool,
}

impl Trio {
    /// `Err`: why there is nothing to measure with this source.
    fn new(
        harness: &Harness<'_>,
        source: &Source,
        loads: [Load; LOADS],
    ) -> Result<Result<Self, LeftOut>, BenchError> {
        let left_out = |reason: &str| LeftOut {
            source: source.name,
            reason: reason.to_owned(),
        };
        let mut events = countable(&harness.model, source.open()?.as_ref());
        if events.is_empty() {
            return Ok(Err(left_out("it counts no event of the guest's PMU here")));
        }
        let wanted = usize::try_from(COUNTERS).unwrap_or(usize::MAX);
        events = events.into_iter().cycle().take(wanted).collect();
        let (vm, vcpus) = harness.build(&guest(&harness.model, &events, &loads)?)?;
        let mut solos = Vec::new();
        for (kvm, load) in vcpus.into_iter().zip(loads) {
            let mut regs = kvm.get_regs()?;
            regs.rsi = load.reload(kvm.get_tsc_khz()?).into();
            kvm.set_regs(&regs)?;
            let (port, silent) = (Arc::new(BatchPort), Box::new(Silent));
            solos.push(harness.solo(kvm, &vm, source.open()?, port, silent)?);
        }
        let mut trio = Self {
            loads,
            vm,
            solos,
            backend: source.name,
            events,
            slow_cpl0: harness.probe.slow_cpl0(),
        };
        // A stepped guest would not come to the end of the loop in a day.
        trio.rounds(1)?;
        for vcpu in 0..LOADS {
            trio.turn(vcpu)?;
            if trio.solos[vcpu].steps() {
                return Ok(Err(left_out("it steps the guest through the whole loop")));
            }
        }
        Ok(Ok(trio))
    }

    fn measure(mut self, rounds: u32) -> Result<SlowdownSource, BenchError> {
        self.calibrate()?;
        let mut ticks: [Vec<u64>; LOADS] = Default::default();
        let before = self.nmis()?;
        for round in 0..rounds {
            // Which comes first goes round.
            for place in 0..LOADS {
                let first = usize::try_from(round).unwrap_or(0);
                let vcpu = (first + place) % LOADS;
                ticks[vcpu].push(self.turn(vcpu)?);
            }
        }
        let after = self.nmis()?;
        let pmis: Vec<u64> = before
            .iter()
            .zip(after)
            .map(|(one, two)| two - one)
            .collect();
        self.report(ticks, &pmis)
    }

    /// Finds the rounds that take [`TURN_MS`].
    fn calibrate(&mut self) -> Result<(), BenchError> {
        self.rounds(TRIAL)?;
        // The first one warms up.
        self.turn(0)?;
        let ticks = self.turn(0)?.max(1);
        let wanted = TURN_MS * u64::from(self.solos[0].tsc_khz());
        let rounds = u128::from(TRIAL) * u128::from(wanted) / u128::from(ticks);
        self.rounds(u64::try_from(rounds).unwrap_or(u64::MAX).max(1))
    }

    /// Sets the length of the loop.
    fn rounds(&self, rounds: u64) -> Result<(), BenchError> {
        (0..LOADS).try_for_each(|vcpu| self.write(vcpu, rounds))
    }

    fn write(&self, vcpu: usize, rounds: u64) -> Result<(), BenchError> {
        let written = self
            .vm
            .memory()
            .write_obj(rounds, GuestAddress(words_of(vcpu)));
        written.map_err(|error| BenchError::Guest(error.to_string()))
    }

    /// One loop of a vCPU, in ticks.
    fn turn(&mut self, vcpu: usize) -> Result<u64, BenchError> {
        harness::batch(&mut self.solos[vcpu], PATIENCE)?;
        let (before, after) = (self.read(vcpu, BEFORE)?, self.read(vcpu, AFTER)?);
        Ok(after.wrapping_sub(before))
    }

    /// NMIs that each vCPU has taken so far.
    fn nmis(&self) -> Result<Vec<u64>, BenchError> {
        (0..LOADS).map(|vcpu| self.read(vcpu, NMIS)).collect()
    }

    fn read(&self, vcpu: usize, offset: u64) -> Result<u64, BenchError> {
        let word = harness::words(&self.vm, words_of(vcpu) + offset, 1)?;
        Ok(word.first().map_or(0, |word| u64::from_le_bytes(*word)))
    }

    fn report(&self, ticks: [Vec<u64>; LOADS], pmis: &[u64]) -> Result<SlowdownSource, BenchError> {
        let none = || BenchError::Guest("it ran no loop".to_owned());
        let tsc_khz = u64::from(self.solos[0].tsc_khz().max(1));
        let mut rows = Vec::new();
        let mut unloaded = 0;
        for (vcpu, (load, mut ticks)) in self.loads.into_iter().zip(ticks).enumerate() {
            let ticks = median(&mut ticks).ok_or_else(none)?;
            if load == Load::None {
                unloaded = ticks;
            }
            let speed = ratio(unloaded, ticks);
            let target = match load {
                Load::None | Load::Nmi | Load::Ibs => None,
                Load::Counting => Some(TARGETS[vcpu]),
                // Where guest kernels are emulated, so is each PMI's handler.
                Load::Sampling => (!self.slow_cpl0).then_some(TARGETS[vcpu]),
            };
            rows.push(SlowdownRow {
                load,
                loop_ns: u64::try_from(u128::from(ticks) * 1_000_000 / u128::from(tsc_khz))
                    .unwrap_or(u64::MAX),
                speed,
                pmis: pmis.get(vcpu).copied().unwrap_or_default(),
                target,
                met: target.map(|target| speed >= target),
            });
        }
        Ok(SlowdownSource {
            backend: self.backend,
            events: self
                .events
                .iter()
                .map(|one| one.known.to_string())
                .collect(),
            rows,
            sampling: Vec::new(),
            frozen: Vec::new(),
        })
    }
}

impl SlowdownReport {
    /// Lines of the table of samplers, the one without samples first.
    fn sampling(&self, rows: &[SlowdownRow]) -> impl Iterator<Item = [String; 5]> {
        let unloaded = rows.first().map_or(0, |row| row.loop_ns);
        rows.iter().map(move |row| {
            let slower = (1.0 / row.speed - 1.0) * 100.0;
            let loops_ns = row.loop_ns * u64::from(self.rounds);
            let lost_ns = row.loop_ns.saturating_sub(unloaded) * u64::from(self.rounds);
            let per_second = ratio(row.pmis * 1_000_000_000, loops_ns);
            let each = (row.pmis > 0).then(|| micros(lost_ns / row.pmis));
            [
                row.load.name().to_owned(),
                millis(row.loop_ns),
                format!("{slower:.1} %"),
                format!("{per_second:.0}"),
                each.unwrap_or_else(|| "-".to_owned()),
            ]
        })
    }
}

impl Report for SlowdownReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "A loop at CPL 3 with counters and without, in turn, timed in the guest\n\
             {}, model {}, {} loops of each kind",
            where_it_ran(self.processor.as_deref(), self.slow_cpl0),
            self.model,
            self.rounds
        )?;
        for source in &self.sources {
            let events = source.events.join(", ");
            writeln!(out, "\nbackend {}: {events}\n", source.backend)?;
            let rows = source.rows.iter().map(|row| {
                [
                    row.load.name().to_owned(),
                    millis(row.loop_ns),
                    format!("{:.4}", row.speed),
                    row.target.map_or("-".to_owned(), |t| format!("{t:.2}")),
                    row.pmis.to_string(),
                    verdict(row.met).to_owned(),
                ]
            });
            let titles = ["", "loop [ms]", "speed", "wanted", "PMIs", ""];
            table(titles, 1..=4, rows, out)?;
            if !source.sampling.is_empty() {
                writeln!(out)?;
                let titles = [
                    WITH_IBS,
                    "loop [ms]",
                    "slower by",
                    "samples a second",
                    "each [us]",
                ];
                table(titles, 1..=4, self.sampling(&source.sampling), out)?;
            }
            if !source.frozen.is_empty() {
                writeln!(out)?;
            }
            let rows = source.frozen.iter().map(|row| {
                [
                    row.access.name().to_owned(),
                    row.live_ns.to_string(),
                    row.all_ns.to_string(),
                    format!("{:.3}", row.ratio),
                ]
            });
            let titles = ["p50 [ns]", "2 events", "and 5 that nobody counts", "ratio"];
            if !source.frozen.is_empty() {
                table(titles, 1..=3, rows, out)?;
            }
        }
        LeftOut::text(&self.left_out, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_samplers_have_the_same_period() {
        for tsc_khz in [1_000_000, 2_500_016, 5_000_000] {
            assert_eq!(Load::Nmi.reload(tsc_khz), tsc_khz.wrapping_neg());
            let control = u64::from(Load::Ibs.reload(tsc_khz));
            let max = (control & op::MAX) << 4 | control & op::MAX_EXTENDED;
            assert_eq!(max, u64::from(tsc_khz & !15));
            assert_eq!(control & op::ENABLE, op::ENABLE);
        }
    }
}
