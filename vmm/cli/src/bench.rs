//! `umpire bench`: from its flags to the measurements.

use std::io;

use arbiter::Scheme;
use umpire_bench::{
    ArbiterOptions, BenchError, EmuOptions, Hostility, Measurement, Outcome, PcrOptions,
    PerfmonOptions,
};
use vmm::config::trap_mode;

use crate::config::parse_policy;
use crate::exit::{ExitStatus, UserError};
use crate::flags::{ArbiterBenchFlags, Bench, PerfmonFlags};

/// Measures `what` and prints the report on standard output.
///
/// # Errors
/// This host cannot run a guest with a virtual PMU or has not the counter source
/// that was asked for; a guest did not do what it should; standard output cannot
/// be written to.
pub fn run(what: Bench) -> Result<ExitStatus, UserError> {
    let json = what.output().json;
    match umpire_bench::run(&lowered(what)?, json, &mut io::stdout().lock())? {
        Outcome::Whole => Ok(ExitStatus::SUCCESS),
        Outcome::Partial => Ok(ExitStatus::HOST_FAILURE),
    }
}

fn lowered(what: Bench) -> Result<Measurement, UserError> {
    Ok(match what {
        Bench::Traps {
            measured,
            iterations,
            rdpmc_trap,
        } => Measurement::Traps {
            counters: measured.counters,
            iterations,
            rdpmc_trap: trap_mode(&rdpmc_trap).unwrap_or_default(),
        },
        Bench::Neighbour {
            iterations,
            hostile,
            ..
        } => Measurement::Neighbour {
            iterations,
            hostility: hostility(&hostile),
        },
        Bench::Pcr {
            iterations,
            scheme,
            policy,
            contention,
            vcpus,
            ..
        } => Measurement::Pcr(PcrOptions {
            iterations,
            scheme: Scheme::named(&scheme).unwrap_or_default(),
            policy: parse_policy(&policy).map_err(UserError::bad_input)?,
            contention,
            vcpus,
        }),
        Bench::Pmi { measured, samples } => Measurement::Pmi {
            counters: measured.counters,
            samples,
        },
        Bench::Slowdown { measured, rounds } => Measurement::Slowdown {
            counters: measured.counters,
            rounds,
        },
        Bench::Switch { measured, slices } => Measurement::Switch {
            counters: measured.counters,
            slices,
        },
        Bench::Scale { measured, runs } => Measurement::Scale {
            counters: measured.counters,
            runs,
        },
        Bench::Arbiter(flags) => Measurement::Arbiter(of_arbiter(flags)),
        Bench::Emu {
            length,
            turns,
            no_valgrind,
            kernel,
            ..
        } => Measurement::Emu(EmuOptions {
            length,
            turns,
            valgrind: !no_valgrind,
            kernel,
        }),
        Bench::Perfmon(PerfmonFlags {
            hostile: Some(socket),
            ..
        }) => Measurement::FloodingClient(socket),
        Bench::Perfmon(flags) => Measurement::Perfmon(of_perfmon(flags)),
    })
}

/// One of those that clap has let through.
fn hostility(name: &str) -> Hostility {
    let named = Hostility::ALL.into_iter().find(|one| one.name() == name);
    named.unwrap_or_default()
}

fn of_arbiter(flags: ArbiterBenchFlags) -> ArbiterOptions {
    ArbiterOptions {
        parts: flags.part.into_iter().map(Into::into).collect(),
        load_ms: flags.load,
        clients: flags.clients,
        leases: flags.leases,
        rounds: flags.rounds,
        iterations: flags.iterations,
    }
}

fn of_perfmon(flags: PerfmonFlags) -> PerfmonOptions {
    PerfmonOptions {
        counters: flags.measured.counters,
        parts: flags.part.into_iter().map(Into::into).collect(),
        rounds: flags.rounds,
        iterations: flags.iterations,
        contexts: flags.contexts,
        timeout_s: flags.timeout,
    }
}

impl From<BenchError> for UserError {
    fn from(error: BenchError) -> Self {
        let status = match error {
            BenchError::NoGuest(_)
            | BenchError::Sources(_)
            | BenchError::Reservations(_)
            | BenchError::Kernel { .. } => ExitStatus::BAD_INPUT,
            _ => ExitStatus::HOST_FAILURE,
        };
        Self::with_status(error, status)
    }
}
