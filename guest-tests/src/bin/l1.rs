//! `cargo l1`: runs a command inside the L1 machine.

use std::process::ExitCode;

use clap::Parser;
use guest_tests::l1::cli::{self, Options};

fn main() -> ExitCode {
    cli::main(&Options::parse())
}
