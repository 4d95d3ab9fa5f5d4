//! The command line: what can be typed, and the help that explains it.
//!
//! Only definitions and texts are here. Values are checked where the
//! configuration file is merged in ([`crate::config`]), so that a flag and a key
//! of the file get the same answer.

mod help;
mod perfmon;
mod profile;
mod tools;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::exit::ExitStatus;
pub use perfmon::{PartFlag, PerfmonFlags};
pub use profile::{ProfileFlags, ReportFlags, ScriptFlags, WeightFlag};
pub use tools::{LsFlags, RecordFlags, ScaleFlag, StatFlags, WhoFlags};

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
    /// Count events of a running VM's vCPUs
    Stat(Box<StatFlags>),
    /// Sample a running VM's vCPUs into a profile
    Record(Box<RecordFlags>),
    /// Show running VMs: vCPUs, cores, contexts, and who holds which counter
    Ls(LsFlags),
    /// Show which symbols of the guest the samples of a profile are in
    Report(Box<ReportFlags>),
    /// Print each sample of a profile as a line
    Script(Box<ScriptFlags>),
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

/// The stories of `umpire demo`.
#[derive(Clone, Debug, Subcommand)]
pub enum DemoStory {
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
}

/// The flags of `umpire demo`.
#[derive(Clone, Debug, Default, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DemoFlags {
    /// Another story than the virtual PMU itself.
    #[command(subcommand)]
    pub story: Option<DemoStory>,
    /// Count this event in the guest, e.g. instructions:u, r5300c0, or
    /// skl::INST_RETIRED:ANY_P; repeatable. See: umpire events
    #[arg(long = "event", value_name = "EVENT")]
    pub events: Vec<String>,
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
    /// A word in a name or description, or a whole name with * and ?
    pub pattern: Option<String>,
    /// Only this table of events (skl, amd64_fam17h_zen2), or the generic names for this
    /// PMU model (amd-core)
    #[arg(long, value_name = "NAME")]
    pub pmu: Option<String>,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
}

/// The flags of `umpire arbitrate`.
#[derive(Clone, Debug, Args)]
pub struct ArbitrateFlags {
    /// The script, or - for standard input
    pub script: PathBuf,
    /// Who reserves counters: single, independent, interacting, or all in turn
    #[arg(long, value_name = "SCHEME|all", default_value = "all")]
    pub scheme: String,
    /// Programmable counters of the machine, 0 to 32
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u8).range(0..=32))]
    pub counters: u8,
    /// Fixed-function counters of the machine, 0 to 32
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u8).range(0..=32))]
    pub fixed: u8,
    /// How many counters a layer may reserve, as in umpire run; one for each layer
    #[arg(long, value_name = "LAYER:KEY=N[,...]")]
    pub policy: Vec<String>,
    /// How long a layer is given to answer, or to prepare for a revocation, in
    /// milliseconds, 1 to 60000
    #[arg(long, value_name = "MS", default_value_t = 100, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub grace: u32,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
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
    /// Round trips of trapped PMU accesses against bare exits of the same kind
    Traps {
        /// The form of the report, and the sources.
        #[command(flatten)]
        measured: Measured,
        /// How often each access is measured; the report gives percentiles
        #[arg(long, value_name = "N", default_value_t = 10_000,
              value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
        iterations: u32,
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
}

impl Bench {
    /// The form of its report.
    #[must_use]
    pub fn output(&self) -> Output {
        match self {
            Self::Neighbour { output, .. } | Self::Pcr { output, .. } => *output,
            Self::Traps { measured, .. }
            | Self::Pmi { measured, .. }
            | Self::Slowdown { measured, .. }
            | Self::Switch { measured, .. }
            | Self::Scale { measured, .. }
            | Self::Perfmon(PerfmonFlags { measured, .. }) => measured.output,
        }
    }
}

/// The flags of `umpire run`. All are optional here: the configuration file may
/// hold any of them.
#[derive(Clone, Debug, Default, Args)]
pub struct RunFlags {
    /// Kernel: ELF vmlinux, bzImage, or a Multiboot v1 ELF kernel
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Kernel command line, e.g. "console=ttyS0 root=/dev/ram0"
    #[arg(long, value_name = "STR", allow_hyphen_values = true)]
    pub cmdline: Option<String>,
    /// Multiboot module and its command line; repeatable, order is kept
    #[arg(long, value_name = "FILE[,WORDS]")]
    pub module: Option<Vec<String>>,
    /// Guest memory in MiB, 16 to 1048576 [default: 512]
    #[arg(long, value_name = "MIB", allow_negative_numbers = true)]
    pub memory: Option<i64>,
    /// Number of vCPUs, 1 to 64 [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub cpus: Option<i64>,
    /// Run the vCPUs on this many threads, each a core on which they take turns, 1 to
    /// --cpus [default: a thread for each vCPU]
    #[arg(long, value_name = "M", allow_negative_numbers = true)]
    pub cores: Option<i64>,
    /// How long a vCPU runs while others wait for its core, in milliseconds, 1 to 1000;
    /// with --cores [default: 5]
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub slice: Option<i64>,
    /// Keep the threads that run vCPUs on these host CPUs, one each, in turn: 0,2-3
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    pub pin: Option<String>,
    /// Virtual PMU: a model below with its properties, auto, or none [default: auto]
    #[arg(long, value_name = "MODEL[,PROPERTY=VALUE...]")]
    pub pmu: Option<String>,
    /// Where counts come from: backends below in order of preference, separated by
    /// commas; each event goes to the first that can count it [default: auto]
    #[arg(long, value_name = "BACKEND[,...]")]
    pub counters: Option<String>,
    /// If a vCPU wants more counters than there are: multiplex (they take turns, counts
    /// are scaled and labelled) or refuse (the surplus is unavailable) [default: multiplex]
    #[arg(long, value_name = "HOW")]
    pub oversubscribe: Option<String>,
    /// CPU vendor that the guest sees: host, amd or intel [default: host]
    #[arg(long, value_name = "VENDOR")]
    pub cpu_vendor: Option<String>,
    /// Hide a CPU feature, named as in /proc/cpuinfo, and all that needs it; repeatable
    #[arg(long, value_name = "NAME")]
    pub hide_feature: Option<Vec<String>>,
    /// Unpack a compressed kernel on the host: auto (where guest kernels run slowly),
    /// always or never [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub unpack: Option<String>,
    /// Least time between two PMIs of one vCPU in microseconds, 1 to 1000000; an
    /// earlier PMI is late, never lost [default: 100]
    #[arg(long, value_name = "MICROSECONDS", allow_negative_numbers = true)]
    pub pmi_floor: Option<i64>,
    /// Counter reservations for guests: on or off [default: on]
    #[arg(long, value_name = "on|off")]
    pub pcr: Option<String>,
    /// How many counters a layer may reserve; one for each layer, see below
    #[arg(long, value_name = "LAYER:KEY=N[,...]")]
    pub policy: Option<Vec<String>>,
    /// Who reserves counters: single (the hypervisor, for all), independent (each layer,
    /// first come, first served) or interacting (layers ask each other) [default: independent]
    #[arg(long, value_name = "HOW")]
    pub scheme: Option<String>,
    /// How long a layer is given to answer, or to prepare for a revocation, in
    /// milliseconds, 1 to 60000 [default: 100]
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub grace: Option<i64>,
    /// Reserve counters for the hypervisor on every vCPU: a number of programmable ones,
    /// from the last one on, or a list as PMC3,FIXED0 [default: 0]
    #[arg(long, value_name = "N|LIST", allow_hyphen_values = true)]
    pub hypervisor_counters: Option<String>,
    /// Whether CPUID announces only the counters that are left to the kernel: auto (if
    /// any are set aside), on or off [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub cpuid_follows_grants: Option<String>,
    /// Write every decision about counters to this file, a line of JSON each
    #[arg(long, value_name = "FILE")]
    pub audit: Option<PathBuf>,
    /// Stop the guest after this many seconds (fractions allowed), with exit status 124
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub timeout: Option<f64>,
    /// Firmware that runs before the kernel and reserves counters: builtin, none, or an
    /// image of your own [default: none]
    #[arg(long, value_name = "builtin|none|FILE")]
    pub firmware: Option<PathBuf>,
    /// A counter that the firmware reserves on every vCPU; repeatable, see below
    #[arg(long, value_name = "EVENT[,WORD...]")]
    pub firmware_counter: Option<Vec<String>>,
    /// When the run ends, however it ends, write the PMU state of all vCPUs to this file
    #[arg(long, value_name = "FILE")]
    pub save_on_exit: Option<PathBuf>,
    /// Start with the PMU state in this file, which --save-on-exit wrote; same --pmu and
    /// --cpus
    #[arg(long, value_name = "FILE")]
    pub restore: Option<PathBuf>,
    /// Serve host tools (umpire stat, record, ls) on this socket, see below
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Permission bits of the socket, in octal [default: 600]
    #[arg(long, value_name = "OCTAL")]
    pub control_mode: Option<String>,
    /// Group of the socket, by number, for a --control-mode that lets a group in
    #[arg(long, value_name = "GID", allow_negative_numbers = true)]
    pub control_group: Option<i64>,
    /// How many tools may be connected at a time, 1 to 4096 [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub control_connections: Option<i64>,
    /// Who gets counters that guest and tools both want: guest-first, host-first, shares
    /// or shares:host=N, with N counters for tools [default: guest-first]
    #[arg(long, value_name = "HOW")]
    pub host_policy: Option<String>,
    /// How often a tool's context may interrupt its vCPU in a second, 1 to 10000000;
    /// one that does so more often is masked and told [default: 100000]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub sampling_rate_max: Option<i64>,
    /// TOML file with any of these options under the same names; flags win
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
    /// More log lines: once for information, twice for debugging, three times for all
    #[arg(short, long, action = ArgAction::Count)]
    pub verbose: u8,
    /// Write log lines to this file instead of standard error
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
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
    let bench = args.get(1).is_some_and(|word| word == "bench");
    command()
        .try_get_matches_from(args)
        .and_then(|matches| Cli::from_arg_matches(&matches))
        .map_err(|error| exit_for(&error, bench))
}

/// The command definition with the long helps, as the help pages show it.
pub fn command() -> clap::Command {
    help::attach(Cli::command())
}

/// `bench`: the command given is one that needs a further word.
fn exit_for(error: &clap::Error, bench: bool) -> CliExit {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => CliExit {
            text: error.render().to_string(),
            status: ExitStatus::SUCCESS,
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => CliExit {
            text: match bench {
                true => {
                    "bench: measure what? try: umpire bench traps, or neighbour, pcr, pmi, \
                     slowdown, switch, scale in its place"
                }
                false => "no command given; try: umpire demo, umpire run --help, umpire doctor",
            }
            .to_owned(),
            status: ExitStatus::BAD_INPUT,
        },
        _ => CliExit {
            text: help::one_line_of(&error.render().to_string()),
            status: ExitStatus::BAD_INPUT,
        },
    }
}

#[cfg(test)]
mod tests;
