//! What can be typed after `umpire slurm`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::ArbiterFlag;

/// Where packages put the arbiter's configuration.
const ARBITER_FILE: &str = "/etc/umpire/arbiter.toml";

/// The flags of `umpire slurm`.
#[derive(Clone, Debug, Args)]
pub struct SlurmFlags {
    /// What to do.
    #[command(subcommand)]
    pub command: SlurmCommand,
}

/// What there is to do for Slurm.
#[derive(Clone, Debug, Subcommand)]
pub enum SlurmCommand {
    /// Print the lines of gres.conf and slurm.conf for what this node's arbiter has for jobs
    Gres(SlurmShareFlags),
    /// Print job_submit.lua, which turns --counters into GRES where jobs share CPUs
    JobSubmit {
        /// Tasks are not kept on the CPUs of their job (no task/affinity, no ConstrainCores)
        #[arg(long)]
        unconfined: bool,
    },
    /// Say what of this node's Slurm differs from what the arbiter and the plugin need
    Check(SlurmShareFlags),
    /// Print the epilog of slurmd, which runs umpire slurm account at each job's end
    Epilog {
        /// The arbiter's configuration; %n is the node's name
        #[arg(long, value_name = "FILE", default_value = ARBITER_FILE)]
        config: PathBuf,
    },
    /// Write into a job's AdminComment what its counters came to on this node
    Account(SlurmAccountFlags),
}

/// Which job, on which node.
#[derive(Clone, Debug, Args)]
pub struct SlurmAccountFlags {
    /// The job's number (SLURM_JOB_ID)
    #[arg(value_name = "JOB")]
    pub job: u32,
    /// Slurm's name of this node [default: the host's name up to its first dot]
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// The arbiter's configuration, which names its audit; %n is the node's name
    #[arg(long, value_name = "FILE", default_value = ARBITER_FILE)]
    pub config: PathBuf,
}

/// Which node, and what of its counters is not for jobs.
#[derive(Clone, Debug, Args)]
pub struct SlurmShareFlags {
    /// Slurm's name of this node [default: the host's name up to its first dot]
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// The arbiter.
    #[command(flatten)]
    pub arbiter: ArbiterFlag,
    /// The PMU whose counters jobs get [default: the arbiter's first]
    #[arg(long, value_name = "NAME")]
    pub pmu: Option<String>,
    /// Programmable counters of each CPU that are kept for monitoring
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=64))]
    pub keep: Option<u32>,
    /// Fixed-function counters of each CPU that are kept for monitoring
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=32))]
    pub keep_fixed: Option<u32>,
    /// The arbiter's configuration: what it keeps for tenants (minimum-cpu) is not for jobs
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}
