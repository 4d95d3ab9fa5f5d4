//! The command line: what can be typed, and the help that explains it.
//!
//! Only definitions and texts are here. Values are checked where the
//! configuration file is merged in (module `config`), so that a flag and a key
//! of the file get the same answer.

mod arbiter;
mod count;
mod help;
mod host;
mod perf;
mod perfmon;
mod run;
mod slurm;
mod tools;
mod unknown;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use umpire_tools::profile::{AnnotateOptions, DiffOptions, ReportOptions, ScriptOptions};
use umpire_tools::record::RecordOptions;
use umpire_tools::stat::StatOptions;
use umpire_tools::stat::track::TrackOptions;
use umpire_tools::top::TopOptions;

use crate::exit::ExitStatus;
pub use arbiter::{ArbiterBenchFlags, ArbiterPartFlag};
pub use count::{
    CollectFlags, CountCommand, CountFlags, CountOutFlags, GateFlags, GuestFlags, StoreFlags,
};
pub use host::{
    ArbiterFlag, ArbiterdFlags, HogFlags, HolderFlags, LeaseFlags, LeaseTerms, LeasesFlags,
    PardonFlags, RevokeFlags,
};
pub use perfmon::{PartFlag, PerfmonFlags};
pub use run::RunFlags;
pub use slurm::{SlurmAccountFlags, SlurmCommand, SlurmFlags, SlurmShareFlags};
pub use tools::{BudgetFlags, LifecycleFlags, LsFlags, PcrCommand, PcrFlags};

/// Runs guests with a virtual PMU on hosts whose KVM has none.
#[derive(Clone, Debug, Parser)]
#[command(name = "umpire", version, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Boot a guest kernel with a virtual PMU
    Run(Box<RunFlags>),
    /// Say what this host's KVM can do, and whether a guest with a PMU can run here
    Doctor(Output),
    /// Run a small built-in guest and show every trap, count, overflow and PMI
    Demo(DemoFlags),
    /// List and explain the events that a counter can be asked for
    Events(EventsFlags),
    /// Play a script of who wants which counter when, under each scheme of arbitration
    Arbitrate(ArbitrateFlags),
    /// Count what a program executes, exactly and the same on every machine
    Count(Box<CountFlags>),
    /// Count events of a running VM's vCPUs
    Stat(Box<StatOptions>),
    /// Print what each vCPU of a running VM counts, a line an interval, as cputrack does
    Track(Box<TrackOptions>),
    /// Sample a running VM's vCPUs into a profile
    Record(Box<RecordOptions>),
    /// Show running VMs live: rates of their vCPUs, who holds which counter, hottest symbols
    Top(Box<TopOptions>),
    /// Show running VMs: vCPUs, cores, contexts, and who holds which counter
    Ls(LsFlags),
    /// Keep the vCPUs of a running VM out of their guest until umpire resume
    Pause(LifecycleFlags),
    /// Let the vCPUs of a VM go on that was paused, or was started with --paused
    Resume(LifecycleFlags),
    /// End a running VM, as SIGTERM does
    Stop(LifecycleFlags),
    /// Show who has reserved which counter of a running VM; revoke, bar, change the rules
    Pcr(PcrFlags),
    /// Show or set how many physical counters the guests of a running VM may use
    Budget(BudgetFlags),
    /// Give leases on this host's physical counters to VMs and tools: who may use how many
    Arbiterd(Box<ArbiterdFlags>),
    /// Hold a lease on physical counters while a command runs
    Lease(Box<LeaseFlags>),
    /// Show the leases on this host's physical counters, and who waits for one
    Leases(LeasesFlags),
    /// Show who holds which physical counters, CPU by CPU
    Who(HolderFlags),
    /// Take a lease from its holder, after notice
    Revoke(RevokeFlags),
    /// Let a user have leases again whose event had counted after its lease
    Pardon(PardonFlags),
    /// Make counters of this node a resource of Slurm: lines of its files, and what differs
    Slurm(SlurmFlags),
    /// Hold counters of every CPU until Ctrl-C, to see what others make of it
    Hog(Box<HogFlags>),
    /// Show which symbols of the guest the samples of a profile are in
    Report(Box<ReportOptions>),
    /// Show at which instructions of a symbol the samples of a profile are
    Annotate(Box<AnnotateOptions>),
    /// Show what a profile has more or less of than another
    Diff(Box<DiffOptions>),
    /// Print each sample of a profile as a line
    Script(Box<ScriptOptions>),
    /// Write a manual page for each command into a folder
    Man {
        /// The folder; it is made if it is not there.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Print a script by which a shell completes commands and options
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Measure this host
    Bench {
        /// What to measure.
        #[command(subcommand)]
        what: Bench,
    },
}

/// The form of a report.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Output {
    /// Print one JSON object instead of text
    #[arg(short, long)]
    pub json: bool,
}

/// The scenarios of `umpire demo`.
#[derive(Clone, Debug, Subcommand)]
pub enum DemoScenario {
    /// Counter reservation in one guest: firmware, kernel, a rogue driver and a user program
    Pcr {
        /// The guest's PMU model; it needs four programmable counters [default: one of the
        /// host's vendor]
        #[arg(long, value_name = "MODEL[,PROPERTY=VALUE...]")]
        pmu: Option<String>,
        /// The form of the report.
        #[command(flatten)]
        output: Output,
    },
    /// An arbiter of a host, three VMs of two tenants, a tool and a hog, on simulated
    /// counters: who asks, gets, waits, is revoked and comes back
    Host {
        /// The form of the report.
        #[command(flatten)]
        output: Output,
    },
}

/// The flags of `umpire demo`.
#[derive(Clone, Debug, Default, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DemoFlags {
    /// Another scenario than the virtual PMU itself.
    #[command(subcommand)]
    pub scenario: Option<DemoScenario>,
    /// Count this event in the guest, e.g. instructions:u, r5300c0, or
    /// skl::INST_RETIRED:ANY_P; repeatable. See: umpire events
    #[arg(long = "event", value_name = "EVENT")]
    pub events: Vec<String>,
    /// What runs the guest: kvm, emu (a processor in software, which counts each instruction
    /// on any host), or auto (kvm where it can be used, else emu) [default: auto]
    #[arg(long, value_name = "auto|kvm|emu")]
    pub engine: Option<String>,
    /// The guest's PMU model, with --event [default: one that has the events]
    #[arg(long, value_name = "MODEL[,PROPERTY=VALUE...]", requires = "events")]
    pub pmu: Option<String>,
    /// Counter backends in order of preference, with --event [default: all that count truly
    /// and can be used]
    #[arg(long, value_name = "BACKEND[,...]", requires = "events")]
    pub counters: Option<String>,
    /// The form of the report.
    #[command(flatten)]
    pub output: Output,
}

/// The flags of `umpire events`.
#[derive(Clone, Debug, Default, Args)]
pub struct EventsFlags {
    /// A word in a name or description, a whole name with * and ?, or an event to explain:
    /// a name with its unit masks and modifiers, or a raw code
    pub pattern: Option<String>,
    /// Only this table of events (skl, amd64_fam17h_zen2), or the generic names for this
    /// PMU model (amd-core)
    #[arg(long, value_name = "NAME")]
    pub pmu: Option<String>,
    /// The PMU model of this VM, by the name of its umpire run --name or by its process id
    #[arg(long, value_name = "NAME|PID", conflicts_with = "pmu")]
    pub vm: Option<String>,
    /// Print the names that a code has: r5300c0, 0x5300c0, as the register holds it, or
    /// cpu/event=0xc0,umask=0/
    #[arg(long, value_name = "CODE", conflicts_with = "pattern")]
    pub decode: Option<String>,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
}

/// The flags of `umpire arbitrate`.
#[derive(Clone, Debug, Args)]
pub struct ArbitrateFlags {
    /// The script, or - for standard input
    #[arg(required_unless_present_any = ["experiment", "replay"])]
    pub script: Option<PathBuf>,
    /// Who reserves counters: single, independent, interacting, or all in turn
    #[arg(long, value_name = "SCHEME|all", default_value = "all")]
    pub scheme: String,
    /// Programmable counters of the machine, 0 to 32
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true,
          conflicts_with_all = ["experiment", "replay"],
          value_parser = clap::value_parser!(u8).range(0..=32))]
    pub counters: u8,
    /// Fixed-function counters of the machine, 0 to 32
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true,
          conflicts_with_all = ["experiment", "replay"],
          value_parser = clap::value_parser!(u8).range(0..=32))]
    pub fixed: u8,
    /// How many counters a layer may reserve, as in umpire run; one for each layer
    #[arg(long, value_name = "LAYER:KEY=N[,...]", conflicts_with = "experiment")]
    pub policy: Vec<String>,
    /// How long a layer is given to answer, or to prepare for a revocation, in
    /// milliseconds, 1 to 60000
    #[arg(long, value_name = "MS", default_value_t = 100, allow_negative_numbers = true,
          conflicts_with_all = ["experiment", "replay"],
          value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub grace: u32,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
    /// An experiment in place of a script.
    #[command(flatten)]
    pub experiment: ExperimentFlags,
}

/// The flags of an experiment, and of a replay.
#[derive(Clone, Debug, Default, Args)]
pub struct ExperimentFlags {
    /// Simulate the experiment in this TOML file (- for standard input): many vCPUs and
    /// generated demands, under every scheme and policy
    #[arg(long, value_name = "FILE", conflicts_with_all = ["script", "replay"])]
    pub experiment: Option<PathBuf>,
    /// Play the requests of the audit file of a real run, under another scheme or policy
    /// if one is given
    #[arg(long, value_name = "AUDIT", conflicts_with = "script")]
    pub replay: Option<PathBuf>,
    /// Seeds of the experiment; the intervals become narrower with more
    #[arg(long, value_name = "N", conflicts_with_all = ["script", "replay"], allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub seeds: Option<u32>,
    /// vCPUs of the experiment
    #[arg(long, value_name = "N", conflicts_with_all = ["script", "replay"], allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub vcpus: Option<u32>,
    /// Cores of the experiment
    #[arg(long, value_name = "N", conflicts_with_all = ["script", "replay"], allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub cores: Option<u32>,
    /// Runs at the same time [default: as many as the host has CPUs]
    #[arg(long, value_name = "N", conflicts_with_all = ["script", "replay"], allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Write the figures of the experiment to a CSV file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["script", "replay"])]
    pub csv: Option<PathBuf>,
    /// Write the figures of the experiment to one HTML file, with plots
    #[arg(long, value_name = "FILE", conflicts_with_all = ["script", "replay"])]
    pub html: Option<PathBuf>,
}

/// The form of a report, and which counter sources it is about.
#[derive(Clone, Debug, Default, Args)]
pub struct Measured {
    /// The form of the report.
    #[command(flatten)]
    pub output: Output,
    /// Counter backends, measured one by one [default: every one that this host has]
    #[arg(long, value_name = "LIST")]
    pub counters: Option<String>,
}

/// The measurements.
#[derive(Clone, Debug, Subcommand)]
pub enum Bench {
    /// Round trips of trapped PMU accesses against bare exits with nothing armed
    Traps {
        /// The form of the report, and the sources.
        #[command(flatten)]
        measured: Measured,
        /// How often each access is measured; the report gives percentiles
        #[arg(long, value_name = "N", default_value_t = 10_000,
              value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
        iterations: u32,
        /// How RDPMC is trapped, as in `umpire run`; a breakpoint makes every exit dearer
        /// on some KVMs, and adds a column with the bare exit under that breakpoint
        #[arg(long, value_name = "HOW", default_value = "auto",
              value_parser = ["auto", "patch", "breakpoint"])]
        rdpmc_trap: String,
    },
    /// Round trips of trapped PMU accesses beside a hostile VM and beside a quiet one
    Neighbour {
        /// The form of the report.
        #[command(flatten)]
        output: Output,
        /// How often each access is measured beside each neighbour
        #[arg(long, value_name = "N", default_value_t = 10_000,
              value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
        iterations: u32,
        /// What the hostile one does as fast as it can: leave its guest on every way out;
        /// reserve counters and give them back; have its tool load and unload a context, in
        /// another VM or on another vCPU of the subject's
        #[arg(long, value_name = "HOW", default_value = "exits",
              value_parser = ["exits", "reserving", "loading", "loading-beside"])]
        hostile: String,
    },
    /// Round trips of PMU accesses with counter reservations and without
    Pcr {
        /// The form of the report.
        #[command(flatten)]
        output: Output,
        /// How often each access is measured on each side
        #[arg(long, value_name = "N", default_value_t = 10_000,
              value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
        iterations: u32,
        /// How layers come by counters
        #[arg(long, value_name = "HOW", default_value = "independent",
              value_parser = ["single", "independent", "interacting"])]
        scheme: String,
        /// How many counters a layer may hold, as in umpire run; one for each layer
        #[arg(long, value_name = "LAYER:KEY=N[,...]")]
        policy: Vec<String>,
        /// How many counters of each vCPU the hypervisor holds while its kernel asks for one
        #[arg(long, value_name = "N", default_value_t = 0,
              value_parser = clap::value_parser!(u8).range(0..=32))]
        contention: u8,
        /// How many vCPUs' kernels ask in turn
        #[arg(long, value_name = "N", default_value_t = 1,
              value_parser = clap::value_parser!(u8).range(1..=64))]
        vcpus: u8,
    },
    /// From a counter's overflow to the first instruction of the guest's handler
    Pmi {
        /// The form of the report, and the sources.
        #[command(flatten)]
        measured: Measured,
        /// How many overflows are measured, one a millisecond
        #[arg(long, value_name = "N", default_value_t = 5_000,
              value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
        samples: u32,
    },
    /// Speed of a guest's loop with four counters, and with one of them sampling
    Slowdown {
        /// The form of the report, and the sources.
        #[command(flatten)]
        measured: Measured,
        /// How often each loop of 50 ms is run
        #[arg(long, value_name = "N", default_value_t = 100,
              value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        rounds: u32,
    },
    /// Operations and time of a vCPU switch against saving and restoring everything
    Switch {
        /// The form of the report, and the sources.
        #[command(flatten)]
        measured: Measured,
        /// How many time slices each scenario has
        #[arg(long, value_name = "N", default_value_t = 100_000,
              value_parser = clap::value_parser!(u32).range(1_000..=10_000_000))]
        slices: u32,
    },
    /// The PMU's own part with 1 to 64 vCPUs and 1 to 8 counters
    Scale {
        /// The form of the report, and the sources.
        #[command(flatten)]
        measured: Measured,
        /// How often each figure is taken; the report gives medians
        #[arg(long, value_name = "N", default_value_t = 25,
              value_parser = clap::value_parser!(u32).range(1..=100_000))]
        runs: u32,
    },
    /// Host tools: commands, samples and contexts through the control socket, and what
    /// they cost the guest
    Perfmon(PerfmonFlags),
    /// The host's arbiter: decisions, requests over the socket, revocations, restarts,
    /// memory, and what it costs a guest's accesses
    Arbiter(ArbiterBenchFlags),
    /// Speed of the processor in software: thirteen programs, the same bytes on the host's
    /// processor and, where Valgrind is installed, under Callgrind
    Emu {
        /// The form of the report.
        #[command(flatten)]
        output: Output,
        /// How long each program is, in some ten million instructions
        #[arg(long, value_name = "N", default_value_t = 10,
              value_parser = clap::value_parser!(u32).range(1..=1_000))]
        length: u32,
        /// How often each is run each way, in turns; the fastest counts
        #[arg(long, value_name = "N", default_value_t = 3,
              value_parser = clap::value_parser!(u32).range(1..=100))]
        turns: u32,
        /// Leave Callgrind out
        #[arg(long)]
        no_valgrind: bool,
        /// A Linux (bzImage or vmlinux) to boot as well: its boot, system calls, memory, and what
        /// a recording costs
        #[arg(long, value_name = "FILE")]
        kernel: Option<PathBuf>,
    },
}

impl Bench {
    /// The form of its report.
    #[must_use]
    pub fn output(&self) -> Output {
        match self {
            Self::Neighbour { output, .. }
            | Self::Pcr { output, .. }
            | Self::Emu { output, .. }
            | Self::Arbiter(ArbiterBenchFlags { output, .. }) => *output,
            Self::Traps { measured, .. }
            | Self::Pmi { measured, .. }
            | Self::Slowdown { measured, .. }
            | Self::Switch { measured, .. }
            | Self::Scale { measured, .. }
            | Self::Perfmon(PerfmonFlags { measured, .. }) => measured.output,
        }
    }
}

/// Why there is nothing to do: a text to print and the status to end with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CliExit {
    /// Help or version in full, for standard output; or one line about what was
    /// wrong, for standard error.
    pub text: String,
    /// [`ExitStatus::SUCCESS`] for help and version, else
    /// [`ExitStatus::BAD_INPUT`].
    pub status: ExitStatus,
}

/// Parses the program's arguments, its own name first.
///
/// # Errors
/// Help or the version was asked for, or the arguments cannot be used.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, CliExit> {
    let args: Vec<OsString> = args.into_iter().collect();
    let mut command = perf::free(command(), args.get(1).and_then(|word| word.to_str()));
    let parsed = command
        .try_get_matches_from_mut(&args)
        .and_then(|matches| Cli::from_arg_matches(&matches))
        .map_err(|error| exit_for(&error, &command, args.get(1..).unwrap_or_default()))?;
    match perf::below(&parsed.command, &args) {
        Some(text) => Err(CliExit {
            text,
            status: ExitStatus::BAD_INPUT,
        }),
        None => Ok(parsed),
    }
}

/// The command definition with the long helps, as the help pages show it, and with perf's names
/// of options.
pub fn command() -> clap::Command {
    perf::attach(help::attach(Cli::command()))
}

fn exit_for(error: &clap::Error, command: &clap::Command, words: &[OsString]) -> CliExit {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => CliExit {
            text: error.render().to_string(),
            status: ExitStatus::SUCCESS,
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => CliExit {
            text: match words.first().and_then(|word| word.to_str()) {
                Some("bench") => {
                    "bench: measure what? try: umpire bench traps, or neighbour, pcr, pmi, \
                     slowdown, switch, scale, emu in its place"
                }
                Some("slurm") => {
                    "slurm: do what? try: umpire slurm check, or gres, job-submit, epilog"
                }
                _ => "no command given; try: umpire demo, umpire run --help, umpire doctor",
            }
            .to_owned(),
            status: ExitStatus::BAD_INPUT,
        },
        _ => CliExit {
            text: unknown_word(error, command, words)
                .unwrap_or_else(|| help::one_line_of(&error.render().to_string())),
            // The others are the program's.
            status: if words.first().is_some_and(|word| word == "count") {
                ExitStatus::COUNT_FAILED
            } else {
                ExitStatus::BAD_INPUT
            },
        },
    }
}

/// What is said of an option or a command that is not there, if that is what is wrong; not of a
/// word too many.
fn unknown_word(
    error: &clap::Error,
    command: &clap::Command,
    words: &[OsString],
) -> Option<String> {
    let kind = match error.kind() {
        ErrorKind::UnknownArgument => ContextKind::InvalidArg,
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        _ => return None,
    };
    let ContextValue::String(word) = error.get(kind)? else {
        return None;
    };
    if word.starts_with('-') {
        return Some(unknown::explain(command, words, word));
    }
    let is_first = words.first().is_some_and(|first| *first == **word);
    let instead = perf::elsewhere(word).filter(|_| is_first)?;
    Some(format!("there is no command '{word}': {instead}"))
}

#[cfg(test)]
mod option_tests;
#[cfg(test)]
mod tests;
