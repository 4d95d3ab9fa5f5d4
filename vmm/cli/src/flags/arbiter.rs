//! The flags of `umpire bench arbiter`.

use clap::{Args, ValueEnum};
use umpire_bench::ArbiterPart;

use super::Output;

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ArbiterPartFlag {
    /// Decisions of the core on one thread.
    Core,
    /// Requests of many clients over the socket.
    Requests,
    /// From a revocation until another lease has the counters.
    Revocation,
    /// Restarts with many leases, and their memory.
    Restart,
    /// Leases of control groups; of real ones as well where some can be made.
    Groups,
    /// Trapped accesses of a guest while the arbiter decides.
    Traps,
}

impl From<ArbiterPartFlag> for ArbiterPart {
    fn from(flag: ArbiterPartFlag) -> Self {
        match flag {
            ArbiterPartFlag::Core => Self::Core,
            ArbiterPartFlag::Requests => Self::Requests,
            ArbiterPartFlag::Revocation => Self::Revocation,
            ArbiterPartFlag::Restart => Self::Restart,
            ArbiterPartFlag::Groups => Self::Groups,
            ArbiterPartFlag::Traps => Self::Traps,
        }
    }
}

/// `umpire bench arbiter`.
#[derive(Clone, Debug, Args)]
pub struct ArbiterBenchFlags {
    /// The form of the report.
    #[command(flatten)]
    pub output: Output,
    /// Parts to measure [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub part: Vec<ArbiterPartFlag>,
    /// How long clients make requests, for each row, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 5_000,
          value_parser = clap::value_parser!(u32).range(100..=600_000))]
    pub load: u32,
    /// Clients that make requests at the same time
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=512))]
    pub clients: u32,
    /// Leases of the large host, and control groups that have some
    #[arg(long, value_name = "N", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(200..=100_000))]
    pub leases: u32,
    /// Revocations of each kind, and leases of a control group; a tenth as many restarts
    #[arg(long, value_name = "N", default_value_t = 200,
          value_parser = clap::value_parser!(u32).range(10..=100_000))]
    pub rounds: u32,
    /// How often each access is measured on each side
    #[arg(long, value_name = "N", default_value_t = 20_000,
          value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
    pub iterations: u32,
}
