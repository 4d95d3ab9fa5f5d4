//! Measurements of a host that runs guests with a virtual PMU, with their reports.

#![forbid(unsafe_code)]

mod bare;
mod beside;
mod emu;
mod error;
mod guest;
mod harness;
mod host_arbiter;
mod neighbour;
mod pcr;
mod perfmon;
mod pmi;
mod registers;
mod report;
mod scale;
mod slowdown;
mod sources;
mod stats;
mod storm;
mod switch;
mod traps;

pub use beside::Ratios;
pub use emu::{
    EmuOptions, EmuReport, EmuRow, EmuSpeeds, KernelReport, KernelRow, RegisterRow, SlowPathRow,
};
pub use error::BenchError;
pub use guest::Access;
pub use host_arbiter::{
    ArbiterOptions, ArbiterPart, ArbiterReport, CoreRow, GroupsCoreRow, GroupsReport, GroupsRow,
    LoadedTraps, Memory, RequestsRow, RestartReport, RevocationRow,
};
pub use neighbour::{Hostility, NeighbourReport, NeighbourRow};
pub use pcr::{DecisionRow, PcrAccess, PcrOptions, PcrReport, PcrRow};
pub use perfmon::{
    CallersRow, CommandRow, Events, Failure, FloodReport, Format, ManyReport, ObserverRow,
    PerfmonOptions, PerfmonPart, PerfmonReport, SampleRow, SetCost, SetRow, SlowRow, Spent,
    TrapsRow,
};
pub use pmi::{BarePmi, PmiReport, PmiRow};
pub use report::{Report, micros, write_report};
pub use scale::{ScaleReport, ScaleRow};
pub use slowdown::{FrozenAccess, FrozenRow, Load, SlowdownReport, SlowdownRow, SlowdownSource};
pub use sources::LeftOut;
pub use stats::{Percentiles, percentiles};
pub use switch::{Cost, SwitchReport, SwitchRow};
pub use traps::{TrapReport, TrapRow, TrapsReport, measure};

use std::io::Write;
use std::path::PathBuf;

use vmm::doctor;
use vmm::vcpu::TrapMode;

use self::harness::Harness;

/// A measurement.
#[derive(Clone, Debug)]
pub enum Measurement {
    /// Round trips of trapped PMU accesses against bare exits of the same kind.
    Traps {
        /// The counter sources.
        counters: Counters,
        /// How often each access is measured.
        iterations: u32,
        /// How RDPMC is trapped.
        rdpmc_trap: TrapMode,
    },
    /// Round trips of trapped PMU accesses beside a hostile VM and a quiet one.
    Neighbour {
        /// How often each access is measured beside each neighbour.
        iterations: u32,
        /// What the hostile one does.
        hostility: Hostility,
    },
    /// Round trips of PMU accesses with counter reservations and without.
    Pcr(PcrOptions),
    /// From a counter's overflow to the first instruction of the guest's handler.
    Pmi {
        /// The counter sources.
        counters: Counters,
        /// How many overflows are measured.
        samples: u32,
    },
    /// Speed of a guest's loop with four counters, and with one of them sampling.
    Slowdown {
        /// The counter sources.
        counters: Counters,
        /// How often each loop is run.
        rounds: u32,
    },
    /// Operations and time of a vCPU switch.
    Switch {
        /// The counter sources.
        counters: Counters,
        /// How many time slices each scenario has.
        slices: u32,
    },
    /// The PMU's own part with several vCPUs and counters.
    Scale {
        /// The counter sources.
        counters: Counters,
        /// How often each figure is taken.
        runs: u32,
    },
    /// Host tools through the control socket.
    Perfmon(PerfmonOptions),
    /// The host's arbiter.
    Arbiter(ArbiterOptions),
    /// The processor in software.
    Emu(EmuOptions),
    /// Be the client that floods this socket, as standard input says.
    FloodingClient(PathBuf),
}

/// Counter sources to be measured one by one, as in `--counters`; without a list
/// every one that this host has.
pub type Counters = Option<String>;

/// How a measurement came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything that was asked for has its figures.
    Whole,
    /// A part failed, and the report names it.
    Partial,
}

/// Measures `what` and writes the report to `out`, as text or JSON.
///
/// # Errors
/// This host cannot run a guest with a virtual PMU or has not the counter source
/// that was asked for; a guest did not do what it should; `out` cannot be written
/// to.
pub fn run(what: &Measurement, json: bool, out: &mut dyn Write) -> Result<Outcome, BenchError> {
    if let Measurement::FloodingClient(socket) = what {
        return perfmon::hostile(socket).map(|()| Outcome::Whole);
    }
    if let Measurement::Arbiter(options) = what {
        return arbiter(options, json, out);
    }
    if let Measurement::Emu(options) = what {
        print(&emu::measure(options)?, json, out)?;
        return Ok(Outcome::Whole);
    }
    let host = doctor::open()?;
    let probe = doctor::check(&host)?;
    let harness = Harness::new(&host, &probe)?;
    let env = harness.env()?;
    let sources = |counters: &Counters| sources::choose(&probe, env, counters.as_deref());
    match what {
        Measurement::Traps {
            counters,
            iterations,
            rdpmc_trap,
        } => {
            let (chosen, left_out) = sources(counters)?;
            let how = (*iterations, *rdpmc_trap);
            let report = traps::measure_all(&harness, &chosen, left_out, how)?;
            print(&report, json, out)?;
        }
        Measurement::Neighbour {
            iterations,
            hostility,
        } => {
            let report = neighbour::measure(&harness, *iterations, *hostility)?;
            print(&report, json, out)?;
        }
        Measurement::Pcr(options) => print(&pcr::measure(&harness, options)?, json, out)?,
        Measurement::Pmi { counters, samples } => {
            let (chosen, left_out) = sources(counters)?;
            print(
                &pmi::measure(&harness, &chosen, left_out, *samples)?,
                json,
                out,
            )?;
        }
        Measurement::Slowdown { counters, rounds } => {
            let (chosen, left_out) = sources(counters)?;
            let report = slowdown::measure(&harness, &chosen, left_out, *rounds)?;
            print(&report, json, out)?;
        }
        Measurement::Switch { counters, slices } => {
            let (chosen, left_out) = sources(counters)?;
            let report = switch::measure(&chosen, left_out, *slices, env.tsc_khz)?;
            print(&report, json, out)?;
        }
        Measurement::Scale { counters, runs } => {
            let (chosen, left_out) = sources(counters)?;
            print(&scale::measure(&chosen, left_out, *runs)?, json, out)?;
        }
        Measurement::Perfmon(options) => {
            let (chosen, left_out) = sources(&options.counters)?;
            let report = perfmon::measure(&harness, env, (&chosen, left_out), options)?;
            print(&report, json, out)?;
            if !report.is_whole() {
                return Ok(Outcome::Partial);
            }
        }
        Measurement::Arbiter(_) | Measurement::Emu(_) | Measurement::FloodingClient(_) => {}
    }
    Ok(Outcome::Whole)
}

/// The host's arbiter alone is measured without KVM: parts that need it open it themselves.
fn arbiter(
    options: &ArbiterOptions,
    json: bool,
    out: &mut dyn Write,
) -> Result<Outcome, BenchError> {
    let report = host_arbiter::measure(options, |act| {
        let host = doctor::open()?;
        let probe = doctor::check(&host)?;
        act(&Harness::new(&host, &probe)?)
    });
    print(&report, json, out)?;
    Ok(if report.is_whole() {
        Outcome::Whole
    } else {
        Outcome::Partial
    })
}

fn print(report: &impl Report, json: bool, out: &mut dyn Write) -> Result<(), BenchError> {
    write_report(report, json, out).map_err(BenchError::Output)
}
