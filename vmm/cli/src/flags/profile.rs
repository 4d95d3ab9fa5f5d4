//! The flags of the commands that read a profile.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use umpire_tools::profile::report::GraphOrder;
use umpire_tools::profile::script::Fields;
use umpire_tools::profile::stacks::Weight;
use umpire_tools::profile::symbols::offset;
use umpire_tools::profile::tally::SortKeys;
use umpire_tools::profile::{ProfileChoice, SampleChoice, Syntax};

/// What the width of a stack stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum WeightFlag {
    /// How many samples it has
    #[default]
    Samples,
    /// How many events these stand for
    Events,
}

impl From<WeightFlag> for Weight {
    fn from(flag: WeightFlag) -> Self {
        match flag {
            WeightFlag::Samples => Self::Samples,
            WeightFlag::Events => Self::Events,
        }
    }
}

/// Which way a tree of callers goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GraphFlag {
    /// From callers to those whom they call
    Caller,
    /// From the sample's place to its callers
    Callee,
}

impl ReportFlags {
    /// Whether callers have rows, if it was said.
    pub(crate) fn children(&self) -> Option<bool> {
        match (self.children, self.no_children) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        }
    }

    /// The tree below each row.
    pub(crate) fn graph(&self) -> Option<GraphOrder> {
        Some(match (self.call_graph?, self.no_children) {
            (Some(GraphFlag::Caller), _) | (None, false) => GraphOrder::Caller,
            (Some(GraphFlag::Callee), _) | (None, true) => GraphOrder::Callee,
        })
    }
}

/// The flags of `umpire report`.
#[derive(Clone, Debug, Args)]
pub struct ReportFlags {
    /// The profile.
    #[command(flatten)]
    pub profile: ProfileChoice,
    /// What samples are grouped by, a column each: comm, pid, tid, dso, symbol, vcpu, core,
    /// ring, cr3 [default: comm,dso,symbol, or symbol where the guest's tasks are not known]
    #[arg(short, long, value_name = "KEY[,...]")]
    pub sort: Option<SortKeys>,
    /// Give callers rows of their own, with what is called from them [default where samples
    /// have callers]
    #[arg(long, overrides_with = "no_children")]
    pub children: bool,
    /// Give callers no rows
    #[arg(long, overrides_with = "children")]
    pub no_children: bool,
    /// Show below each row who called whom: caller from the outermost on, callee from the
    /// sample's place on [default order: caller, with --no-children callee]
    #[arg(short = 'g', long, value_name = "ORDER", value_enum, num_args = 0..=1,
          require_equals = true, conflicts_with_all = ["folded", "flamegraph", "firefox"])]
    pub call_graph: Option<Option<GraphFlag>>,
    /// Leave out rows with less than this part of the events, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0, value_parser = percent)]
    pub percent_limit: f64,
    /// Print collapsed stacks instead: process;callers;symbol and a number
    #[arg(long, conflicts_with = "json")]
    pub folded: bool,
    /// Write a flame graph to this file instead
    #[arg(long, value_name = "FILE.svg", conflicts_with = "json")]
    pub flamegraph: Option<PathBuf>,
    /// Write a profile for profiler.firefox.com to this file instead
    #[arg(long, value_name = "FILE.json", conflicts_with = "json")]
    pub firefox: Option<PathBuf>,
    /// Write a file for perf report -i FILE --kallsyms FILE.kallsyms --symfs DIR instead; the
    /// second file is written beside it
    #[arg(long, value_name = "FILE",
          conflicts_with_all = ["json", "folded", "flamegraph", "firefox", "call_graph"])]
    pub perf_data: Option<PathBuf>,
    /// Write a profile for pprof to this file instead
    #[arg(long, value_name = "FILE.pb.gz",
          conflicts_with_all = ["json", "folded", "flamegraph", "firefox", "perf_data",
                                "call_graph"])]
    pub pprof: Option<PathBuf>,
    /// What the number of a stack, and its width, stands for
    #[arg(long, value_enum, default_value_t)]
    pub weight: WeightFlag,
    /// Print one JSON object instead of text
    #[arg(short, long)]
    pub json: bool,
}

/// The flags of `umpire diff`.
#[derive(Clone, Debug, Args)]
pub struct DiffFlags {
    /// The profile of before
    #[arg(value_name = "OLD")]
    pub old: PathBuf,
    /// The profile of after
    #[arg(value_name = "NEW")]
    pub new: PathBuf,
    /// Names of the guest's kernel, of both: a copy of its /proc/kallsyms, its vmlinux or
    /// System.map
    #[arg(long, value_name = "FILE", visible_aliases = ["vmlinux", "kallsyms", "system-map"])]
    pub symbols: Option<PathBuf>,
    /// Names of the guest's programs: a folder of this host that is the guest's root; PATH=DIR
    /// is a container's, as in umpire report
    #[arg(long, value_name = "DIR")]
    pub symfs: Vec<PathBuf>,
    /// Show names of C++ and Rust as the files have them
    #[arg(long)]
    pub no_demangle: bool,
    /// Only this event [default: all that both have]
    #[arg(long, value_name = "EVENT")]
    pub event: Option<String>,
    /// What samples are grouped by, a column each, as in umpire report [default: dso,symbol, or
    /// symbol where the guest's tasks are not known]
    #[arg(short, long, value_name = "KEY[,...]")]
    pub sort: Option<SortKeys>,
    /// Leave out rows that changed by less than this part of the events, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0, value_parser = percent)]
    pub percent_limit: f64,
}

/// How instructions are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SyntaxFlag {
    /// mov %rsp,%rbp
    #[default]
    Att,
    /// mov rbp,rsp
    Intel,
}

impl From<SyntaxFlag> for Syntax {
    fn from(flag: SyntaxFlag) -> Self {
        match flag {
            SyntaxFlag::Att => Self::Att,
            SyntaxFlag::Intel => Self::Intel,
        }
    }
}

/// The flags of `umpire annotate`.
#[derive(Clone, Debug, Args)]
pub struct AnnotateFlags {
    /// The symbol, as umpire report names it [default: those with most events]
    #[arg(value_name = "SYMBOL")]
    pub symbol: Option<String>,
    /// The profile, or - for standard input
    #[arg(short, long, value_name = "FILE", default_value = "umpire.data")]
    pub input: PathBuf,
    /// Code of the guest's programs: a folder of this host that is the guest's root, or has
    /// copies of its programs and libraries; PATH=DIR is a container's, as in umpire report
    #[arg(long, value_name = "DIR")]
    pub symfs: Vec<PathBuf>,
    /// Show names of C++ and Rust as the files have them
    #[arg(long)]
    pub no_demangle: bool,
    /// Code of the guest's kernel: an uncompressed ELF file
    #[arg(long, value_name = "FILE")]
    pub vmlinux: Option<PathBuf>,
    /// Names of the guest's kernel, in place of those in the profile: a copy of its
    /// /proc/kallsyms, or its System.map
    #[arg(long, value_name = "FILE", visible_aliases = ["kallsyms", "system-map"])]
    pub symbols: Option<PathBuf>,
    /// How far the kernel moved itself from the addresses in vmlinux or System.map, in
    /// hexadecimal [default: told from the symbols that vmlinux and the profile both have]
    #[arg(long, value_name = "HEX", allow_hyphen_values = true, value_parser = offset)]
    pub kaslr_offset: Option<u64>,
    /// The samples; of one event where the profile has several.
    #[command(flatten)]
    pub samples: SampleChoice,
    /// Without SYMBOL: leave out symbols with less than this part of the events, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0, value_parser = percent)]
    pub percent_limit: f64,
    /// How instructions are written
    #[arg(short = 'M', long, value_name = "SYNTAX", value_enum, default_value_t)]
    pub disassembler_style: SyntaxFlag,
}

/// The flags of `umpire script`.
#[derive(Clone, Debug, Args)]
pub struct ScriptFlags {
    /// The profile.
    #[command(flatten)]
    pub profile: ProfileChoice,
    /// What a line has: comm, pid, tid, vm, vcpu, core, time, period, event, set, ring, cr3,
    /// ip, sym, dso, callchain [default: vm,vcpu,core,time,period,event,ip,sym,callchain, and
    /// comm,pid,tid,dso where the guest's tasks are known]
    #[arg(short = 'F', long, value_name = "FIELD[,...]")]
    pub fields: Option<Fields>,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
}

fn percent(text: &str) -> Result<f64, String> {
    let number = text.parse().ok();
    number
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or_else(|| "give 0 to 100".to_owned())
}
