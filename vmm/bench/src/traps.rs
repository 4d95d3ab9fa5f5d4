//! Trapped PMU accesses against bare exits of the same kind, side by side in one
//! VM: vCPU 0 runs in the real run loop with the `clock` backend, vCPU 1 in a
//! loop that only answers. Both run the same code, in turn and on one thread, so
//! that noise hits both alike.

use std::io::{self, Write};
use std::sync::Arc;

use pmu_virt::{ClockBackend, CounterBackend};
use serde::Serialize;
use vmm::kvm::{Host, KvmVm};
use vmm::micro::Solo;
use vmm::probe::ProbeReport;
use vmm::vcpu::Silent;

use super::bare::Bare;
use super::error::BenchError;
use super::guest::{Access, BATCH, guest, samples_at};
use super::harness::{self, BatchPort, Harness, PATIENCE, ratio};
use super::report::{Report, micros, pair, table, verdict, where_it_ran};
use super::sources::{Event, LeftOut, Source, first_countable};
use super::stats::{Percentiles, percentiles};

/// A stepped guest takes this much fewer samples: an exit for every instruction.
const STEPPED: u32 = 10;
const SUBJECT: u8 = 0;
const BARE: u8 = 1;
/// Places of the series; a side's own comes first.
const UNARMED: usize = 2;

/// Round trips of one kind of access.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TrapRow {
    /// What the guest did.
    pub access: Access,
    /// Through Umpire's run loop.
    pub umpire: Percentiles,
    /// Through the loop that only answers, with the same breakpoint in place.
    pub bare: Percentiles,
    /// Through the loop that only answers, without a breakpoint; none for RDPMC, which needs it.
    pub bare_unarmed: Option<Percentiles>,
    /// Ratio of the medians.
    pub ratio_p50: f64,
    /// Ratio of the 99th percentiles.
    pub ratio_p99: f64,
    /// Highest `ratio_p50` that is wanted; none where the source steps the guest.
    pub target: Option<f64>,
    /// `ratio_p50` is no higher.
    pub met: Option<bool>,
}

/// The measurement with every source.
#[derive(Clone, Debug, Serialize)]
pub struct TrapsReport {
    /// One for each source.
    pub sources: Vec<TrapReport>,
    /// Sources without figures.
    pub left_out: Vec<LeftOut>,
}

/// The measurement with one source.
#[derive(Clone, Debug, Serialize)]
pub struct TrapReport {
    /// The host's processor.
    pub processor: Option<String>,
    /// Guest CPL 0 runs in KVM's instruction emulator.
    pub slow_cpl0: bool,
    /// PMU model of the guest.
    pub model: &'static str,
    /// The counter backend.
    pub backend: &'static str,
    /// What its counter counts.
    pub event: String,
    /// The source has every instruction of the guest stepped.
    pub stepping: bool,
    /// Samples of each kind on the bare side; twice as many through Umpire.
    pub iterations: u32,
    /// TSC frequency in kHz.
    pub tsc_khz: u32,
    /// One for each kind of access.
    pub rows: Vec<TrapRow>,
}

/// Measures with each of `sources` in turn.
pub(super) fn measure_all(
    harness: &Harness<'_>,
    sources: &[Source],
    mut left_out: Vec<LeftOut>,
    iterations: u32,
) -> Result<TrapsReport, BenchError> {
    let mut reports = Vec::new();
    for source in sources {
        let backend = source.open()?;
        match first_countable(&harness.model, backend.as_ref()) {
            Ok(event) => reports.push(measure_one(harness, backend, event, iterations)?),
            Err(none) => left_out.push(none),
        }
    }
    Ok(TrapsReport {
        sources: reports,
        left_out,
    })
}

/// Measures `iterations` round trips of each kind with the `clock` backend,
/// rounded up to whole batches of 100.
///
/// # Errors
/// The guest could not be made or run, or did something unexpected.
pub fn measure(
    host: &Host,
    probe: &ProbeReport,
    iterations: u32,
) -> Result<TrapReport, BenchError> {
    let harness = Harness::new(host, probe)?;
    let backend = Box::new(ClockBackend::new());
    let event = first_countable(&harness.model, backend.as_ref());
    let event = event.map_err(|none| BenchError::Guest(none.reason))?;
    measure_one(&harness, backend, event, iterations)
}

fn measure_one(
    harness: &Harness<'_>,
    backend: Box<dyn CounterBackend>,
    event: Event,
    iterations: u32,
) -> Result<TrapReport, BenchError> {
    let name = backend.name();
    let mut pair = Pair::new(harness, backend, event)?;
    // Caches, and the first write that finds the #GP handler.
    pair.round(false, true)?;
    let stepping = pair.subject.steps();
    let slower = if stepping { STEPPED } else { 1 };
    let rounds = iterations.div_ceil(BATCH * slower).max(1);
    pair.samples = Default::default();
    // The bare side is measured with and without the breakpoint in turn, so it
    // takes two rounds for one of each.
    for round in 0..2 * rounds {
        pair.round(round / 2 % 2 == 1, round % 2 == 0)?;
    }
    Ok(TrapReport {
        processor: harness::processor(),
        slow_cpl0: harness.probe.slow_cpl0(),
        model: harness.model.name(),
        backend: name,
        event: event.known.to_string(),
        stepping,
        iterations: rounds * BATCH,
        tsc_khz: pair.subject.tsc_khz(),
        rows: pair.rows(stepping)?,
    })
}

/// Samples of one side, by the place of the access in [`Access::ALL`].
type Series = [Vec<u32>; Access::ALL.len()];

/// The two vCPUs.
#[derive(Debug)]
struct Pair {
    vm: Arc<KvmVm>,
    subject: Solo,
    bare: Bare,
    samples: [Series; 3],
}

impl Pair {
    fn new(
        harness: &Harness<'_>,
        backend: Box<dyn CounterBackend>,
        event: Event,
    ) -> Result<Self, BenchError> {
        let (vm, vcpus) = harness.build(&guest(&harness.model, event.code, 2)?)?;
        let Ok([subject, bare]) = <[_; 2]>::try_from(vcpus) else {
            return Err(BenchError::Guest("it must have two vCPUs".to_owned()));
        };
        let port = Arc::new(BatchPort);
        Ok(Self {
            subject: harness.solo(subject, &vm, backend, port, Box::new(Silent))?,
            bare: Bare::new(bare, vm.clone())?,
            vm,
            samples: Default::default(),
        })
    }

    /// One batch of each kind on each side; which side comes first alternates.
    fn round(&mut self, bare_first: bool, armed: bool) -> Result<(), BenchError> {
        let sides = if bare_first {
            [BARE, SUBJECT]
        } else {
            [SUBJECT, BARE]
        };
        for (expected, access) in Access::ALL.into_iter().enumerate() {
            let armed = armed || access.is_rdpmc();
            for side in sides {
                let number = match side {
                    SUBJECT => harness::batch(&mut self.subject, PATIENCE)?,
                    _ => self.bare.batch(access, armed, PATIENCE)?,
                };
                if usize::try_from(number) != Ok(expected) {
                    return Err(BenchError::Guest(format!(
                        "vCPU {side} finished batch {number} instead of {expected}"
                    )));
                }
                let series = if side == BARE && !armed {
                    UNARMED
                } else {
                    usize::from(side)
                };
                self.collect(side, series, expected)?;
            }
        }
        Ok(())
    }

    fn collect(&mut self, side: u8, series: usize, access: usize) -> Result<(), BenchError> {
        let ticks = harness::words(&self.vm, samples_at(side), BATCH)?;
        let ticks = ticks.into_iter().map(u32::from_le_bytes);
        self.samples[series][access].extend(ticks);
        Ok(())
    }

    fn rows(&mut self, stepping: bool) -> Result<Vec<TrapRow>, BenchError> {
        let tsc_khz = self.subject.tsc_khz();
        let [subject, bare, unarmed] = &mut self.samples;
        let none = || BenchError::Guest("it took no samples".to_owned());
        Access::ALL
            .into_iter()
            .zip(subject.iter_mut().zip(bare.iter_mut().zip(unarmed)))
            .map(|(access, (subject, (bare, unarmed)))| {
                let umpire = percentiles(subject, tsc_khz).ok_or_else(none)?;
                let bare = percentiles(bare, tsc_khz).ok_or_else(none)?;
                let ratio_p50 = ratio(umpire.p50_ns, bare.p50_ns);
                let target = (!stepping).then(|| access.target());
                Ok(TrapRow {
                    access,
                    umpire,
                    bare,
                    bare_unarmed: percentiles(unarmed, tsc_khz),
                    ratio_p50,
                    ratio_p99: ratio(umpire.p99_ns, bare.p99_ns),
                    target,
                    met: target.map(|target| ratio_p50 <= target),
                })
            })
            .collect()
    }
}

impl Report for TrapsReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "Round trips of trapped PMU accesses, timed in the guest"
        )?;
        for report in &self.sources {
            report.text(out)?;
        }
        writeln!(
            out,
            "\nbare: the same exit with the same breakpoint in place, and a handler that only answers\n\
             (MSR) or returns from the #GP (RDPMC); no breakpoint: its p50 where none is in place"
        )?;
        LeftOut::text(&self.left_out, out)
    }
}

impl TrapReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "\n{}, TSC {} MHz, model {}, {} samples of each kind",
            where_it_ran(self.processor.as_deref(), self.slow_cpl0),
            self.tsc_khz / 1000,
            self.model,
            self.iterations
        )?;
        let stepped = if self.stepping {
            ", every instruction stepped"
        } else {
            ""
        };
        writeln!(out, "backend {}, {}{stepped}\n", self.backend, self.event)?;
        let rows = self.rows.iter().map(|row| {
            [
                row.access.name().to_owned(),
                pair(row.umpire),
                pair(row.bare),
                format!("{:.3}", row.ratio_p50),
                row.target.map_or("-".to_owned(), |t| format!("{t:.2}")),
                row.bare_unarmed
                    .map_or(String::new(), |bare| micros(bare.p50_ns)),
                verdict(row.met).to_owned(),
            ]
        });
        let titles = [
            "",
            "umpire p50 / p99 [us]",
            "bare p50 / p99 [us]",
            "ratio",
            "target",
            "no breakpoint [us]",
            "",
        ];
        table(titles, 1..=5, rows, out)
    }
}
