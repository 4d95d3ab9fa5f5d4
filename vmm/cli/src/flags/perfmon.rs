//! The flags of `umpire bench perfmon`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use umpire_bench::PerfmonPart;

use super::Measured;

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PartFlag {
    /// Commands through the socket.
    Commands,
    /// Samples into the buffer.
    Samples,
    /// A computing guest while it is sampled.
    Slowdown,
    /// Switches of event sets.
    Sets,
    /// Several contexts of one vCPU.
    Observers,
    /// A thousand contexts.
    Many,
    /// A flood of the socket.
    Flood,
}

impl From<PartFlag> for PerfmonPart {
    fn from(flag: PartFlag) -> Self {
        match flag {
            PartFlag::Commands => Self::Commands,
            PartFlag::Samples => Self::Samples,
            PartFlag::Slowdown => Self::Slowdown,
            PartFlag::Sets => Self::Sets,
            PartFlag::Observers => Self::Observers,
            PartFlag::Many => Self::Many,
            PartFlag::Flood => Self::Flood,
        }
    }
}

/// `umpire bench perfmon`.
#[derive(Clone, Debug, Args)]
pub struct PerfmonFlags {
    /// The form of the report, and the sources.
    #[command(flatten)]
    pub measured: Measured,
    /// Parts to measure [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub part: Vec<PartFlag>,
    /// How often each way of sampling is tried in the slow-down
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub rounds: u32,
    /// How often each command, access and switch is timed
    #[arg(long, value_name = "N", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
    pub iterations: u32,
    /// Contexts of the part `many`; 64 of them are loaded
    #[arg(long, value_name = "N", default_value_t = 1_000,
          value_parser = clap::value_parser!(u32).range(65..=4_000))]
    pub contexts: u32,
    /// Seconds that each part may take on each source
    #[arg(long, value_name = "S", default_value_t = 600,
          value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub timeout: u32,
    /// Be the client that floods this socket, as standard input says
    #[arg(long, value_name = "SOCKET", hide = true)]
    pub hostile: Option<PathBuf>,
}
