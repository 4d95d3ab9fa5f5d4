//! `umpire-agent`: runs in a Linux guest of `umpire run --agent`.

use std::process::ExitCode;

use clap::Parser;
use umpire_agent::{Arguments, run};

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("umpire-agent: {error}");
            ExitCode::from(2)
        }
    }
}
