//! The `umpire` program.

use std::io::{Write, stdout};
use std::process::ExitCode;

use umpire::exit::{ExitStatus, UserError, complain};
use umpire::flags::{Cli, Command, parse};
use umpire::{arbitrate, bench, count, demo, doctor, events, host, packaging, run, slurm, tools};

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

fn execute(cli: Cli) -> Result<u8, UserError> {
    let status = match cli.command {
        // The status may be the guest's.
        Command::Run(flags) => return run::run(&flags),
        // The status may be the program's.
        Command::Count(flags) => return Ok(count::run(&flags)),
        // The status may be the command's.
        Command::Lease(flags) => return host::lease(&flags),
        Command::Hog(flags) => return host::hog(&flags),
        Command::Arbiterd(flags) => host::arbiterd(&flags),
        Command::Leases(flags) => host::leases(&flags),
        Command::Who(flags) => host::who(&flags),
        Command::Revoke(flags) => host::revoke(&flags),
        Command::Pardon(flags) => host::pardon(&flags),
        Command::Slurm(flags) => slurm::run(&flags),
        Command::Doctor(output) => doctor::run(output.json),
        Command::Demo(flags) => demo::run(&flags),
        Command::Events(flags) => events::run(&flags),
        Command::Arbitrate(flags) => arbitrate::run(&flags),
        Command::Stat(flags) => tools::stat(&flags),
        Command::Pause(flags) => tools::pause(&flags, true),
        Command::Resume(flags) => tools::pause(&flags, false),
        Command::Stop(flags) => tools::stop(&flags),
        Command::Track(flags) => tools::track(&flags),
        Command::Record(flags) => tools::record(&flags),
        Command::Top(flags) => tools::top(&flags),
        Command::Ls(flags) => tools::ls(&flags),
        Command::Pcr(flags) => tools::pcr(&flags),
        Command::Budget(flags) => tools::budget(&flags),
        Command::Report(flags) => tools::report(&flags),
        Command::Annotate(flags) => tools::annotate(&flags),
        Command::Diff(flags) => tools::diff(&flags),
        Command::Script(flags) => tools::script(&flags),
        Command::Man { folder } => packaging::man(&folder),
        Command::Completions { shell } => packaging::completions(shell),
        Command::Bench { what } => bench::run(what),
    };
    status.map(ExitStatus::code)
}
