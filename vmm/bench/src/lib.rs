//! `umpire bench`: measurements of this host.

mod bare;
mod beside;
mod error;
mod guest;
mod neighbour;
mod pcr;
mod perfmon;
mod pmi;
mod registers;
mod report;
mod rig;
mod scale;
mod slowdown;
mod sources;
mod stats;
mod storm;
mod switch;
mod traps;

pub use beside::Ratios;
pub use error::BenchError;
pub use guest::Access;
pub use neighbour::{NeighbourReport, NeighbourRow};
pub use pcr::{PcrAccess, PcrReport, PcrRow};
pub use perfmon::{
    CommandRow, Events, Failure, FloodReport, Format, ManyReport, PerfmonReport, SampleRow,
    SetCost, SetRow, SlowRow, TrapsRow,
};
pub use pmi::{PmiReport, PmiRow};
pub(crate) use report::micros;
pub use report::{Report, write_report};
pub use scale::{ScaleReport, ScaleRow};
pub use slowdown::{Load, SlowdownReport, SlowdownRow, SlowdownSource};
pub use sources::LeftOut;
pub use stats::{Percentiles, percentiles};
pub use switch::{Cost, SwitchReport, SwitchRow};
pub use traps::{TrapReport, TrapRow, TrapsReport, measure};

use std::io;

use self::rig::Rig;
use crate::cli::{Bench, Measured, PerfmonFlags};
use crate::config::{ExitStatus, UserError};
use crate::doctor;

/// Measures `what` and prints the report on standard output.
///
/// # Errors
/// This host cannot run a guest with a virtual PMU or has not the counter source
/// that was asked for; a guest did not do what it should; standard output cannot
/// be written to.
pub fn run(what: &Bench) -> Result<ExitStatus, UserError> {
    if let Bench::Perfmon(PerfmonFlags {
        hostile: Some(socket),
        ..
    }) = what
    {
        let failed = |error| UserError::with_status(error, ExitStatus::HOST_FAILURE);
        return perfmon::hostile(socket)
            .map(|()| ExitStatus::SUCCESS)
            .map_err(failed);
    }
    let host = doctor::open().map_err(UserError::bad_input)?;
    let probe = doctor::check(&host).map_err(UserError::bad_input)?;
    let failed = |error: BenchError| UserError::with_status(error, ExitStatus::HOST_FAILURE);
    let rig = Rig::new(&host, &probe).map_err(failed)?;
    let env = rig.env().map_err(failed)?;
    let sources = |options: &Measured| sources::choose(&probe, env, options.counters.as_deref());
    let json = what.output().json;
    match what {
        Bench::Traps {
            measured,
            iterations,
        } => {
            let (chosen, left_out) = sources(measured)?;
            let report = traps::measure_all(&rig, &chosen, left_out, *iterations);
            print(&report.map_err(failed)?, json)
        }
        Bench::Neighbour { iterations, .. } => {
            let report = neighbour::measure(&rig, *iterations);
            print(&report.map_err(failed)?, json)
        }
        Bench::Pcr { iterations, .. } => {
            print(&pcr::measure(&rig, *iterations).map_err(failed)?, json)
        }
        Bench::Pmi { measured, samples } => {
            let (chosen, left_out) = sources(measured)?;
            let report = pmi::measure(&rig, &chosen, left_out, *samples);
            print(&report.map_err(failed)?, json)
        }
        Bench::Slowdown { measured, rounds } => {
            let (chosen, left_out) = sources(measured)?;
            let report = slowdown::measure(&rig, &chosen, left_out, *rounds);
            print(&report.map_err(failed)?, json)
        }
        Bench::Switch { measured, slices } => {
            let (chosen, left_out) = sources(measured)?;
            let report = switch::measure(&chosen, left_out, *slices, env.tsc_khz);
            print(&report.map_err(failed)?, json)
        }
        Bench::Scale { measured, runs } => {
            let (chosen, left_out) = sources(measured)?;
            let report = scale::measure(&chosen, left_out, *runs);
            print(&report.map_err(failed)?, json)
        }
        Bench::Perfmon(flags) => {
            let (chosen, left_out) = sources(&flags.measured)?;
            let report = perfmon::measure(&rig, env, (&chosen, left_out), flags);
            let report = report.map_err(failed)?;
            print(&report, json)?;
            match report.is_whole() {
                true => Ok(ExitStatus::SUCCESS),
                false => Ok(ExitStatus::HOST_FAILURE),
            }
        }
    }
}

fn print(report: &impl Report, json: bool) -> Result<ExitStatus, UserError> {
    write_report(report, json, &mut io::stdout().lock()).map_err(UserError::unwritable)?;
    Ok(ExitStatus::SUCCESS)
}
