//! The flags of `umpire count`.

use std::ffi::OsString;
use std::path::PathBuf;

use attribution::Collect;
use clap::builder::BoolishValueParser;
use clap::{Args, Subcommand};
use umpire_count::compare::Threshold;
use umpire_tools::duration::Span;

/// The flags of `umpire count`.
#[derive(Clone, Debug, Default, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct CountFlags {
    /// What to do instead of running a program.
    #[command(subcommand)]
    pub act: Option<CountCommand>,
    /// What to print, e.g. instructions:u,loads; :u is the program's part and :k the kernel's;
    /// repeatable [default: instructions, branches, loads and stores, each side apart]
    #[arg(short = 'e', long = "event", value_name = "EVENT[,...]")]
    pub events: Vec<String>,
    /// Run so often, each in a process with another cache, working folder, user name and load,
    /// and fail where counts differ
    #[arg(short = 'r', long, value_name = "N", default_value_t = 1, hide_default_value = true,
          value_parser = clap::value_parser!(u8).range(1..=20))]
    pub repeat: u8,
    /// Print the counts of each program that was executed besides
    #[arg(long)]
    pub per_program: bool,
    /// Print system calls by name, and what else the kernel did
    #[arg(long)]
    pub syscalls: bool,
    /// Count by function of the programs, and print the costliest
    #[arg(long)]
    pub functions: bool,
    /// Write functions and calls to this file, as Callgrind does, for callgrind_annotate and
    /// kcachegrind
    #[arg(long, value_name = "FILE")]
    pub callgrind: Option<PathBuf>,
    /// Write the calls that led to each function to this file, a line each, for flamegraph.pl and
    /// inferno-flamegraph: program;outer;inner 123
    #[arg(long, value_name = "FILE")]
    pub folded: Option<PathBuf>,
    /// Write the same to this file for perf report and perf script: a sample has a function's exact
    /// count as its period
    #[arg(long, value_name = "FILE")]
    pub perf_data: Option<PathBuf>,
    /// Take the options of another tool, and write its files, for harnesses that start it. All
    /// words behind callgrind are valgrind's: umpire count --as callgrind --tool=callgrind
    /// --callgrind-out-file=out.%p ./bench
    #[arg(long = "as", value_name = "callgrind", num_args = 1.., allow_hyphen_values = true,
          conflicts_with_all = ["repeat", "functions", "instr_atstart", "collect_atstart",
          "toggle_collect"])]
    pub as_tool: Vec<OsString>,
    /// Keep in the file of --save who called whom
    #[arg(long, hide = true)]
    pub keep_contexts: bool,
    /// What of a program is in functions and regions.
    #[command(flatten)]
    pub collect: CollectFlags,
    /// What a job makes of counts.
    #[command(flatten)]
    pub gate: GateFlags,
    /// What the program sees.
    #[command(flatten)]
    pub guest: GuestFlags,
    /// Where the kernel and the booted machine are kept.
    #[command(flatten)]
    pub store: StoreFlags,
    /// Where counts go.
    #[command(flatten)]
    pub out: CountOutFlags,
    /// Print umpire_regions.h, by which programs in C and C++ mark regions
    #[arg(long, conflicts_with = "command")]
    pub print_header: bool,
    /// The program and its arguments. It begins at --, or at the first word without a hyphen
    #[arg(value_name = "PROGRAM", trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

/// What a job makes of counts.
#[derive(Clone, Debug, Default, Args)]
pub struct GateFlags {
    /// Keep the counts and all inputs in this file
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Compare with the counts in this file, which --save has made: status 123 if one grew more
    /// than --threshold [default of -e: instructions]
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// How much more a count may be, in percent of that before [default: 0%]
    #[arg(long, value_name = "PERCENT", requires = "compare")]
    pub threshold: Option<Threshold>,
    /// The kernel's counts may not grow more either
    #[arg(long, requires = "compare")]
    pub gate_kernel: bool,
    /// Regions alone are in the gate: the whole program may grow
    #[arg(long, requires = "compare")]
    pub gate_regions: bool,
    /// Append a summary in Markdown to this file, as to $GITHUB_STEP_SUMMARY
    #[arg(long, value_name = "FILE")]
    pub summary: Option<PathBuf>,
}

/// What the program sees.
#[derive(Clone, Debug, Default, Args)]
pub struct GuestFlags {
    /// Set a variable of the program's environment, or hand on that of this shell, or all whose
    /// names begin so: CARGO_*; repeatable [default: PATH, HOME, LANG=C.UTF-8, TERM=dumb alone]
    #[arg(long = "env", value_name = "NAME[=VALUE]")]
    pub variables: Vec<OsString>,
    /// Variables as one process hands them to another, each with a 0 behind it
    #[arg(long, hide = true, value_name = "FILE")]
    pub env_file: Option<PathBuf>,
    /// Give the program this folder or file besides, read-only; repeatable [default: the working
    /// folder, /usr, /lib and some of /etc]
    #[arg(long, value_name = "DIR")]
    pub with: Vec<PathBuf>,
    /// Bring what the program writes back into this folder; else it is gone at the end
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// The program's output is a terminal
    #[arg(long)]
    pub tty: bool,
    /// The working folder [default: this one]
    #[arg(short = 'C', long, value_name = "DIR")]
    pub chdir: Option<PathBuf>,
    /// Memory of the machine in MiB, 128 to 65536
    #[arg(long, value_name = "MIB", default_value_t = 1024,
          value_parser = clap::value_parser!(u64).range(128..=65_536))]
    pub memory: u64,
    /// End all of it after this time, standard input and a first boot included, with status 124:
    /// 30s, 5m; with -r each run [default: never]
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<Span>,
}

/// Where the kernel and the booted machine are kept.
#[derive(Clone, Debug, Default, Args)]
pub struct StoreFlags {
    /// Fetch Debian's kernel by this machine's apt sources into the cache
    #[arg(long, conflicts_with_all = ["command", "kernel"])]
    pub fetch_kernel: bool,
    /// Another kernel: a Debian package linux-image-*-cloud-amd64*.deb, or a vmlinuz-VERSION with
    /// its config beside it [default: the one that --fetch-kernel has fetched]
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// The folder of kernel and booted machines [default: $XDG_CACHE_HOME/umpire/count]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// How much booted machines may take there, in MiB: those used longest ago go
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    pub cache_size: u64,
}

/// Where counts go.
#[derive(Clone, Debug, Default, Args)]
pub struct CountOutFlags {
    /// Print counts to this file [default: standard error]
    #[arg(short = 'o', long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Add to the file of -o instead of replacing what is there, as harnesses run many programs
    #[arg(long, requires = "output")]
    pub append: bool,
    /// Print JSON: one object per line, as perf stat -j
    #[arg(short, long)]
    pub json: bool,
    /// Write who ended it and the status to this file: program, signal, gate, timeout,
    /// interrupted or umpire
    #[arg(long, value_name = "FILE")]
    pub status_file: Option<PathBuf>,
}

/// What to do instead of running a program.
#[derive(Clone, Debug, Subcommand)]
pub enum CountCommand {
    /// Show what differs between two files of --save: inputs, counts, functions
    Diff {
        /// The counts before
        before: PathBuf,
        /// The counts now
        now: PathBuf,
        /// Print JSON: one object per line
        #[arg(short, long)]
        json: bool,
    },
}

/// What of a program is in functions and regions, as Callgrind's options of these names say.
#[derive(Clone, Debug, Default, Args)]
pub struct CollectFlags {
    /// With no, functions and regions have nothing before the program asks for it by
    /// CALLGRIND_START_INSTRUMENTATION
    #[arg(long, value_name = "yes|no", value_parser = BoolishValueParser::new())]
    pub instr_atstart: Option<bool>,
    /// With no, they have nothing before CALLGRIND_TOGGLE_COLLECT or --toggle-collect
    #[arg(long, value_name = "yes|no", value_parser = BoolishValueParser::new())]
    pub collect_atstart: Option<bool>,
    /// They have what is executed in this function (* is any text) and what that calls; repeatable
    #[arg(long, value_name = "FUNCTION")]
    pub toggle_collect: Vec<String>,
}

impl CollectFlags {
    /// What is collected.
    #[must_use]
    pub fn collect(&self) -> Collect {
        Collect {
            instrumented: self.instr_atstart.unwrap_or(true),
            // As Callgrind has it, who names functions wants these.
            collected: self
                .collect_atstart
                .unwrap_or(self.toggle_collect.is_empty()),
            toggles: self.toggle_collect.clone(),
        }
    }
}

impl CountFlags {
    /// Functions are counted.
    #[must_use]
    pub fn by_function(&self) -> bool {
        self.functions
            || self.callgrind.is_some()
            || !self.collect.toggle_collect.is_empty()
            || self.by_context()
    }

    /// Functions are counted by the calls that led to them.
    #[must_use]
    pub fn by_context(&self) -> bool {
        self.keep_contexts
            || self.folded.is_some()
            || self.perf_data.is_some()
            || !self.as_tool.is_empty()
    }
}
