//! The `umpire` program.

use std::fmt::Display;
use std::io::{Write, stderr, stdout};
use std::process::ExitCode;

use vmm::cli::{Cli, Command, RunFlags, parse};
use vmm::config::{ExitStatus, RunConfig, UserError};
use vmm::doctor;
use vmm::machine::{Machine, run};
use vmm::vcpu::PmuLog;

fn main() -> ExitCode {
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(exit) => {
            if exit.status == ExitStatus::SUCCESS {
                // A closed pipe behind `--help | head` is no failure.
                let _ = writeln!(stdout(), "{}", exit.text.trim_end());
            } else {
                complain(&exit.text);
            }
            return exit.status.into();
        }
    };
    match execute(cli) {
        Ok(code) => code.into(),
        Err(error) => {
            vmm::terminal::restore_all();
            complain(&error);
            error.status().into()
        }
    }
}

/// One line on standard error. Where nobody reads that, the exit status says
/// enough; `eprintln!` would panic.
fn complain(what: &dyn Display) {
    let _ = writeln!(stderr(), "umpire: {what}");
}

fn execute(cli: Cli) -> Result<u8, UserError> {
    match cli.command {
        Command::Run(flags) => boot(&flags),
        Command::Doctor(output) => doctor::run(output.json).map(ExitStatus::code),
        Command::Demo(flags) => vmm::demo::run(&flags).map(ExitStatus::code),
        Command::Events(flags) => {
            vmm::events::run(flags.pattern.as_deref(), flags.pmu.as_deref(), flags.json)
                .map(ExitStatus::code)
        }
        Command::Arbitrate(flags) => vmm::arbitrate::run(&flags).map(ExitStatus::code),
        Command::Stat(flags) => vmm::stat::run(&flags).map(ExitStatus::code),
        Command::Record(flags) => vmm::record::run(&flags).map(ExitStatus::code),
        Command::Ls(flags) => vmm::ls::run(&flags).map(ExitStatus::code),
        Command::Report(flags) => vmm::profile::run_report(&flags).map(ExitStatus::code),
        Command::Script(flags) => vmm::profile::run_script(&flags).map(ExitStatus::code),
        Command::Bench { what } => vmm::bench::run(&what).map(ExitStatus::code),
    }
}

/// `umpire run`.
fn boot(flags: &RunFlags) -> Result<u8, UserError> {
    let config = RunConfig::load(flags)?;
    vmm::logging::start(config.verbose, config.log_file.as_deref())?;
    let host = doctor::open().map_err(UserError::bad_input)?;
    let probes = doctor::check(&host).map_err(UserError::bad_input)?;
    doctor::check_backends(&probes, &config.counters).map_err(UserError::bad_input)?;
    let machine = Machine::build(&host, &probes, &config, Box::new(stdout()), |_| {
        Box::new(PmuLog)
    })
    .map_err(UserError::bad_input)?;
    let failed = |error| UserError::with_status(error, ExitStatus::HOST_FAILURE);
    let audit = machine.audit();
    let end = run(machine, &config);
    let (summary, written) = audit.finish();
    if summary.decisions() > 0 {
        let _ = write!(stderr(), "umpire: {summary}");
    }
    let end = match (end, written) {
        (Ok(end), Ok(())) => end,
        (Ok(_), Err(error)) => return Err(UserError::with_status(error, ExitStatus::HOST_FAILURE)),
        (Err(failure), written) => {
            // Why the run failed comes last; what it left is incomplete besides.
            if let Err(error) = written {
                complain(&error);
            }
            return Err(failed(failure));
        }
    };
    if !end.is_success() {
        complain(&end);
    } else {
        log::info!("{end}");
    }
    Ok(end.exit_code())
}
