//! What the PMU's own part costs as vCPUs and counters grow in number, without
//! KVM: settling an interval, reading a counter, switching.

use std::io::{self, Write};
use std::time::Instant;

use pmu_virt::{
    Caller, CorePmu, Grant, Layer, MsrIndex, OwnerId, PmuModel, Progress, ReadOutcome, Ring, Ticks,
    Tsc, VcpuPmu,
};
use serde::Serialize;

use super::error::BenchError;
use super::harness;
use super::registers::PmuMsrs;
use super::report::{Report, table};
use super::sources::{LeftOut, Source};
use super::stats::median;
use super::switch;

/// vCPUs of one machine.
const VCPUS: [u32; 3] = [1, 8, 64];
/// Counters that each of them uses.
const COUNTERS: [usize; 3] = [1, 4, 8];
/// Times that all vCPUs are gone through in one measured run.
const CALLS: u32 = 6_400;
const INTERVAL: u64 = 100_000;

/// Costs with some number of vCPUs and counters.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ScaleRow {
    /// Where the counts come from.
    pub backend: &'static str,
    /// vCPUs that are gone through in turn.
    pub vcpus: u32,
    /// Counters that each of them uses.
    pub counters: usize,
    /// One entry and one exit, each vCPU on a core of its own.
    pub settle_ns: f64,
    /// RDMSR of a running counter, each vCPU on a core of its own.
    pub rdmsr_ns: f64,
    /// One switch out and in, all vCPUs on one core.
    pub switch_ns: f64,
    /// Operations on physical counters in it.
    pub operations: f64,
}

/// The whole measurement.
#[derive(Clone, Debug, Serialize)]
pub struct ScaleReport {
    /// The host's processor.
    pub processor: Option<String>,
    /// PMU model of the vCPUs.
    pub model: &'static str,
    /// Runs of which the median is given.
    pub runs: u32,
    /// One for each source, number of vCPUs and number of counters.
    pub rows: Vec<ScaleRow>,
    /// Sources without figures.
    pub left_out: Vec<LeftOut>,
}

/// Measures every combination `runs` times on each of `sources`.
pub(super) fn measure(
    sources: &[Source],
    mut left_out: Vec<LeftOut>,
    runs: u32,
) -> Result<ScaleReport, BenchError> {
    let model = PmuModel::parse(switch::MODEL)?;
    let mut rows = Vec::new();
    for source in sources {
        let codes = match switch::codes(&model, source)? {
            Ok(codes) => codes,
            Err(none) => {
                left_out.push(none);
                continue;
            }
        };
        for vcpus in VCPUS {
            for counters in COUNTERS {
                let case = Case {
                    model: &model,
                    msrs: PmuMsrs::of(&model),
                    source,
                    vcpus,
                    selects: codes.iter().copied().cycle().take(counters).collect(),
                };
                rows.push(case.measure(runs)?);
            }
        }
    }
    Ok(ScaleReport {
        processor: harness::processor(),
        model: switch::MODEL,
        runs,
        rows,
        left_out,
    })
}

struct Case<'a> {
    model: &'a PmuModel,
    msrs: PmuMsrs,
    source: &'a Source,
    vcpus: u32,
    selects: Vec<u64>,
}

impl Case<'_> {
    fn measure(&self, runs: u32) -> Result<ScaleRow, BenchError> {
        let mut core = CorePmu::new(self.source.open()?);
        let mut apart = Vec::new();
        for mut pmu in self.pmus(&mut core) {
            let mut own = CorePmu::new(self.source.open()?);
            pmu.attach(&mut own);
            apart.push((pmu, Box::new(own)));
        }
        let mut tsc = 0;
        let settle_ns = self.per_call(runs, &mut apart, |(pmu, core)| {
            interval(pmu, core, &mut tsc);
        });
        let counter = MsrIndex(self.msrs.first().1);
        let mut failed = false;
        let rdmsr_ns = self.per_call(runs, &mut apart, |(pmu, core)| {
            let read = pmu.rdmsr(
                core,
                std::hint::black_box(counter),
                Caller::legacy(Layer::GuestKernel),
            );
            failed |= !matches!(read.outcome, ReadOutcome::Value(_));
        });
        if failed {
            return Err(BenchError::Miscount(
                "a counter of the measurement cannot be read".to_owned(),
            ));
        }
        let mut together = self.pmus(&mut core);
        let before = self.switch_all(&mut together, &mut core);
        let switch_ns = self.per_call(runs, &mut together, |pmu| {
            pmu.attach(&mut core);
            pmu.park(&mut core);
        });
        let switches = u64::from(runs) * u64::from(self.rounds() * self.vcpus);
        let operations = core.operations() - before;
        Ok(ScaleRow {
            backend: self.source.name,
            vcpus: self.vcpus,
            counters: self.selects.len(),
            settle_ns,
            rdmsr_ns,
            switch_ns,
            operations: harness::ratio(operations, switches),
        })
    }

    /// One round that warms up; the operations until its end.
    fn switch_all(&self, pmus: &mut [VcpuPmu], core: &mut CorePmu) -> u64 {
        for pmu in pmus {
            pmu.attach(core);
            pmu.park(core);
        }
        core.operations()
    }

    /// vCPUs that are to run on `core` or one like it, programmed before.
    fn pmus(&self, core: &mut CorePmu) -> Vec<VcpuPmu> {
        let pmu = |n| {
            let mut pmu = VcpuPmu::detached(OwnerId(n), self.model.clone(), Grant::everything());
            for (msr, select) in self.msrs.selects.iter().zip(&self.selects) {
                pmu.wrmsr(
                    core,
                    MsrIndex(*msr),
                    *select,
                    Caller::legacy(Layer::GuestKernel),
                );
            }
            if let Some(msr) = self.msrs.global_control {
                let all = self.model.global_mask();
                pmu.wrmsr(core, MsrIndex(msr), all, Caller::legacy(Layer::GuestKernel));
            }
            pmu
        };
        (0..self.vcpus).map(pmu).collect()
    }

    fn rounds(&self) -> u32 {
        (CALLS / self.vcpus).max(1)
    }

    /// Median nanoseconds of one call, over runs through all vCPUs in turn.
    #[allow(
        clippy::cast_precision_loss,
        reason = "runs take far less than 2^52 ns"
    )]
    fn per_call<T>(&self, runs: u32, pmus: &mut [T], mut call: impl FnMut(&mut T)) -> f64 {
        let mut times = Vec::new();
        for _ in 0..runs {
            let begin = Instant::now();
            for _ in 0..self.rounds() {
                pmus.iter_mut().for_each(&mut call);
            }
            times.push(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        let calls = f64::from(self.rounds()) * f64::from(self.vcpus);
        median(&mut times).unwrap_or_default() as f64 / calls
    }
}

/// The guest runs for a while, at CPL 0.
fn interval(pmu: &mut VcpuPmu, core: &mut CorePmu, tsc: &mut u64) {
    pmu.observe(core, Progress::Entered { tsc: Tsc(*tsc) });
    *tsc += INTERVAL;
    pmu.observe(
        core,
        Progress::Left {
            tsc: Tsc(*tsc),
            halted: Ticks(0),
            ring: Some(Ring::Kernel),
        },
    );
    std::hint::black_box(pmu.deadline(core));
}

impl Report for ScaleReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "The PMU's own part as the work grows, in nanoseconds (median of {} runs)\n\
             {}, model {}\n",
            self.runs,
            self.processor.as_deref().unwrap_or("unknown processor"),
            self.model
        )?;
        let rows = self.rows.iter().map(|row| {
            [
                row.backend.to_string(),
                row.vcpus.to_string(),
                row.counters.to_string(),
                format!("{:.1}", row.settle_ns),
                format!("{:.1}", row.rdmsr_ns),
                format!("{:.1}", row.switch_ns),
                format!("{:.2}", row.operations),
            ]
        });
        let titles = [
            "backend",
            "vCPUs",
            "counters",
            "entry and exit",
            "RDMSR",
            "switch",
            "operations in it",
        ];
        table(titles, 1..=6, rows, out)?;
        writeln!(
            out,
            "\nentry and exit, RDMSR: each vCPU on a core of its own, in turn; switch: all on one core"
        )?;
        LeftOut::text(&self.left_out, out)
    }
}
