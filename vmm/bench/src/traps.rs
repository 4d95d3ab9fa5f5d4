//! Trapped PMU accesses against bare exits of the same kind, side by side in one
//! VM: vCPU 0 runs in the real run loop, vCPU 1 in a loop that only answers, with
//! nothing armed. Both run the same code, in turn and on one thread, so that noise
//! hits both alike.

use std::io::{self, Write};
use std::sync::Arc;

use pmu_virt::{ClockBackend, CounterBackend};
use serde::Serialize;
use vmm::kvm::{Host, KvmVm};
use vmm::micro::Solo;
use vmm::probe::ProbeReport;
use vmm::vcpu::{Silent, TrapMode};

use super::bare::Bare;
use super::error::BenchError;
use super::guest::{Access, AccessSamples, BATCH, Placement, guest_placed, samples_at};
use super::harness::{self, BatchPort, Harness, PATIENCE, ratio};
use super::report::{Report, micros, pair, table, verdict, where_it_ran};
use super::sources::{Event, LeftOut, Source, first_countable};
use super::stats::{Percentiles, percentiles};

/// A stepped guest takes this much fewer samples: an exit for every instruction.
const STEPPED: u32 = 10;
const SUBJECT: u8 = 0;
const BARE: u8 = 1;
/// Place of the bare side's samples that were taken with the breakpoint.
const ARMED: usize = 2;
/// Highest ratio to the bare exit that is wanted.
const TARGET: f64 = 1.10;

/// Round trips of one kind of access.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TrapRow {
    /// What the guest did.
    pub access: Access,
    /// Through Umpire's run loop.
    pub umpire: Percentiles,
    /// Through the loop that only answers, with nothing armed: the MSR exit, or for
    /// RDPMC the #GP and a handler that does one OUT.
    pub bare: Percentiles,
    /// `bare` of an MSR access; none for RDPMC.
    pub bare_unarmed: Option<Percentiles>,
    /// Ratio of the medians.
    pub ratio_p50: f64,
    /// Ratio of the 99th percentiles.
    pub ratio_p99: f64,
    /// Highest `ratio_p50` that is wanted; none where the source steps the guest.
    pub target: Option<f64>,
    /// `ratio_p50` is no higher.
    pub met: Option<bool>,
    /// Through the loop that only answers, with the breakpoint in place by which
    /// Umpire catches RDPMC, and from which RDPMC returns; none where it has patched
    /// the handler.
    pub bare_armed: Option<Percentiles>,
    /// Ratio of the medians to that.
    pub ratio_armed_p50: Option<f64>,
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
    /// How Umpire caught RDPMC: `patch` or `breakpoint`.
    pub rdpmc_trap: &'static str,
    /// The source has every instruction of the guest stepped.
    pub stepping: bool,
    /// Samples of each kind on the bare side; twice as many through Umpire.
    pub iterations: u32,
    /// TSC frequency in kHz.
    pub tsc_khz: u32,
    /// One for each kind of access.
    pub rows: Vec<TrapRow>,
    /// The same with the #GP handler on the page of the code.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub same_page: Vec<TrapRow>,
}

/// Measures with each of `sources` in turn.
pub(super) fn measure_all(
    harness: &Harness<'_>,
    sources: &[Source],
    mut left_out: Vec<LeftOut>,
    (iterations, mode): (u32, TrapMode),
) -> Result<TrapsReport, BenchError> {
    let mut reports = Vec::new();
    for source in sources {
        let backends = vec![source.open()?, source.open()?];
        match first_countable(&harness.model, backends[0].as_ref()) {
            Ok(event) => {
                let how = (iterations, mode);
                reports.push(measure_one(harness, (source.name, backends), event, how)?);
            }
            Err(none) => left_out.push(none),
        }
    }
    Ok(TrapsReport {
        sources: reports,
        left_out,
    })
}

/// Measures `iterations` round trips of each kind with the `clock` backend,
/// rounded up to whole batches of 100, and with the handler on a page of its own.
///
/// # Errors
/// The guest could not be made or run, or did something unexpected.
pub fn measure(
    host: &Host,
    probe: &ProbeReport,
    iterations: u32,
) -> Result<TrapReport, BenchError> {
    let harness = Harness::new(host, probe)?;
    let clock = Box::new(ClockBackend::new());
    let event = first_countable(&harness.model, clock.as_ref());
    let event = event.map_err(|none| BenchError::Guest(none.reason))?;
    let how = (iterations, TrapMode::Auto);
    measure_one(&harness, (clock.name(), vec![clock]), event, how)
}

/// With the code placed in as many ways as there are `backends`.
fn measure_one(
    harness: &Harness<'_>,
    (backend, backends): (&'static str, Vec<Box<dyn CounterBackend>>),
    event: Event,
    (iterations, mode): (u32, TrapMode),
) -> Result<TrapReport, BenchError> {
    let places = [Placement::Apart, Placement::Together];
    let mut pairs = Vec::new();
    for (backend, place) in backends.into_iter().zip(places) {
        let mut pair = Pair::new(harness, backend, event, (place, mode))?;
        // Caches, and the first write that finds the #GP handler.
        pair.round(false, false)?;
        pair.samples = Default::default();
        pair.patched = pair.is_patched()?;
        pairs.push(pair);
    }
    let first = pairs.first();
    let first = first.ok_or_else(|| BenchError::Guest("there is nothing to count".to_owned()))?;
    let (patched, tsc_khz) = (first.patched, first.subject.tsc_khz());
    let stepping = first.subject.steps();
    let slower = if stepping { STEPPED } else { 1 };
    let rounds = iterations.div_ceil(BATCH * slower).max(1);
    // Where there is a breakpoint, the bare side is measured with and without it in
    // turn, so it takes two rounds for one of each.
    for round in 0..2 * rounds {
        for pair in &mut pairs {
            let armed = !pair.patched && round % 2 == 0;
            pair.round(round / 2 % 2 == 1, armed)?;
        }
    }
    let mut rows = pairs.iter_mut().map(|pair| pair.rows(stepping));
    Ok(TrapReport {
        processor: harness::processor(),
        slow_cpl0: harness.probe.slow_cpl0(),
        model: harness.model.name(),
        backend,
        event: event.known.to_string(),
        rdpmc_trap: if patched { "patch" } else { "breakpoint" },
        stepping,
        iterations: rounds * BATCH,
        tsc_khz,
        rows: rows.next().transpose()?.unwrap_or_default(),
        same_page: rows.next().transpose()?.unwrap_or_default(),
    })
}

/// The two vCPUs.
#[derive(Debug)]
struct Pair {
    vm: Arc<KvmVm>,
    subject: Solo,
    bare: Bare,
    place: Placement,
    /// Umpire has patched the #GP handler.
    patched: bool,
    samples: [AccessSamples; 3],
}

impl Pair {
    fn new(
        harness: &Harness<'_>,
        backend: Box<dyn CounterBackend>,
        event: Event,
        (place, mode): (Placement, TrapMode),
    ) -> Result<Self, BenchError> {
        let guest = guest_placed(&harness.model, event.code, 2, place)?;
        let (vm, vcpus) = harness.build_trapping(&guest, mode)?;
        let Ok([subject, bare]) = <[_; 2]>::try_from(vcpus) else {
            return Err(BenchError::Guest("it must have two vCPUs".to_owned()));
        };
        let port = Arc::new(BatchPort);
        Ok(Self {
            subject: harness.solo(subject, &vm, backend, port, Box::new(Silent))?,
            bare: Bare::new(bare, vm.clone(), place.reference_handler())?,
            vm,
            place,
            patched: false,
            samples: Default::default(),
        })
    }

    /// Whether an OUT is at the handler's first byte.
    fn is_patched(&self) -> Result<bool, BenchError> {
        const OUT: u8 = 0xe6;
        let first = harness::words(&self.vm, self.place.gp_handler(), 1)?;
        Ok(first == [[OUT]])
    }

    /// One batch of each kind on each side, the bare one with the breakpoint if
    /// `armed`; which side comes first alternates.
    fn round(&mut self, bare_first: bool, armed: bool) -> Result<(), BenchError> {
        let sides = if bare_first {
            [BARE, SUBJECT]
        } else {
            [SUBJECT, BARE]
        };
        for (expected, access) in Access::ALL.into_iter().enumerate() {
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
                let series = match side {
                    BARE if armed => ARMED,
                    side => usize::from(side),
                };
                let ticks = harness::words(&self.vm, samples_at(side), BATCH)?;
                let ticks = ticks.into_iter().map(u32::from_le_bytes);
                self.samples[series][expected].extend(ticks);
            }
        }
        Ok(())
    }

    fn rows(&mut self, stepping: bool) -> Result<Vec<TrapRow>, BenchError> {
        let (tsc_khz, patched) = (self.subject.tsc_khz(), self.patched);
        let mut figures = |series: usize, access: usize| {
            let none = || BenchError::Guest("it took no samples".to_owned());
            percentiles(&mut self.samples[series][access], tsc_khz).ok_or_else(none)
        };
        let rows = Access::ALL.into_iter().enumerate().map(|(place, access)| {
            let umpire = figures(usize::from(SUBJECT), place)?;
            let bare = figures(usize::from(BARE), place)?;
            let bare_armed = (!patched).then(|| figures(ARMED, place)).transpose()?;
            let ratio_p50 = ratio(umpire.p50_ns, bare.p50_ns);
            Ok(TrapRow {
                access,
                umpire,
                bare,
                bare_unarmed: (!access.is_rdpmc()).then_some(bare),
                ratio_p50,
                ratio_p99: ratio(umpire.p99_ns, bare.p99_ns),
                target: (!stepping).then_some(TARGET),
                met: (!stepping).then_some(ratio_p50 <= TARGET),
                bare_armed,
                ratio_armed_p50: bare_armed.map(|bare| ratio(umpire.p50_ns, bare.p50_ns)),
            })
        });
        rows.collect()
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
            "\nbare: the same exit with nothing armed, and a handler that only answers; for RDPMC the #GP\n\
             and a handler that does one OUT. With breakpoint: the bare exit with the breakpoint in place\n\
             that catches RDPMC, and its ratio"
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
        writeln!(
            out,
            "backend {}, {}{stepped}, RDPMC by {}\n",
            self.backend, self.event, self.rdpmc_trap
        )?;
        write_rows("", &self.rows, out)?;
        if !self.same_page.is_empty() {
            writeln!(out)?;
            write_rows("#GP handler on the page of the code", &self.same_page, out)?;
        }
        Ok(())
    }
}

fn write_rows(title: &str, rows: &[TrapRow], out: &mut dyn Write) -> io::Result<()> {
    let cells = rows.iter().map(|row| {
        [
            row.access.name().to_owned(),
            pair(row.umpire),
            pair(row.bare),
            format!("{:.3}", row.ratio_p50),
            row.target.map_or("-".to_owned(), |t| format!("{t:.2}")),
            row.bare_armed
                .map_or("-".to_owned(), |bare| micros(bare.p50_ns)),
            row.ratio_armed_p50
                .map_or("-".to_owned(), |ratio| format!("{ratio:.3}")),
            verdict(row.met).to_owned(),
        ]
    });
    let titles = [
        title,
        "umpire p50 / p99 [us]",
        "bare p50 / p99 [us]",
        "ratio",
        "target",
        "with breakpoint [us]",
        "ratio",
        "",
    ];
    table(titles, 1..=6, cells, out)
}
