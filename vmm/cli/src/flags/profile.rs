//! The flags of the commands that read a profile.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use umpire_tools::numbers::Numbers;
use umpire_tools::profile::script::Fields;
use umpire_tools::profile::stacks::Weight;
use umpire_tools::profile::tally::SortKeys;

/// A profile, and the part of it that is asked about.
#[derive(Clone, Debug, Args)]
pub struct ProfileFlags {
    /// The profile, or - for standard input
    #[arg(short, long, value_name = "FILE", default_value = "umpire.data")]
    pub input: PathBuf,
    /// Names of the guest's kernel: its vmlinux, its System.map, or a copy of its
    /// /proc/kallsyms
    #[arg(long, value_name = "FILE", visible_aliases = ["vmlinux", "kallsyms", "system-map"])]
    pub symbols: Option<PathBuf>,
    /// How far the kernel moved itself from the addresses in vmlinux or System.map, in
    /// hexadecimal
    #[arg(long, value_name = "HEX", requires = "symbols", allow_hyphen_values = true,
          value_parser = offset)]
    pub kaslr_offset: Option<u64>,
    /// Only this event [default: all]
    #[arg(long, value_name = "EVENT")]
    pub event: Option<String>,
    /// Only samples of these vCPUs: 0,2-3
    #[arg(long, value_name = "LIST")]
    pub vcpu: Option<Numbers>,
    /// Only samples taken on these cores: 0,2-3
    #[arg(long, value_name = "LIST")]
    pub core: Option<Numbers>,
}

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

/// The flags of `umpire report`.
#[derive(Clone, Debug, Args)]
pub struct ReportFlags {
    /// The profile.
    #[command(flatten)]
    pub profile: ProfileFlags,
    /// What samples are grouped by, a column each: symbol, vcpu, core, ring, cr3
    #[arg(short, long, value_name = "KEY[,...]", default_value = "symbol")]
    pub sort: SortKeys,
    /// Leave out rows with less than this part of the events, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0, value_parser = percent)]
    pub percent_limit: f64,
    /// Print collapsed stacks instead: VM;vCPU;ring;symbol and a number
    #[arg(long, conflicts_with = "json")]
    pub folded: bool,
    /// Write a flame graph to this file instead
    #[arg(long, value_name = "FILE.svg", conflicts_with = "json")]
    pub flamegraph: Option<PathBuf>,
    /// Write a profile for profiler.firefox.com to this file instead
    #[arg(long, value_name = "FILE.json", conflicts_with = "json")]
    pub firefox: Option<PathBuf>,
    /// What the number of a stack, and its width, stands for
    #[arg(long, value_enum, default_value_t)]
    pub weight: WeightFlag,
    /// Print one JSON object instead of text
    #[arg(short, long)]
    pub json: bool,
}

/// The flags of `umpire script`.
#[derive(Clone, Debug, Args)]
pub struct ScriptFlags {
    /// The profile.
    #[command(flatten)]
    pub profile: ProfileFlags,
    /// What a line has: vm, vcpu, core, time, period, event, set, ring, cr3, ip, sym
    #[arg(
        short = 'F',
        long,
        value_name = "FIELD[,...]",
        default_value = "vm,vcpu,core,time,period,event,ip,sym"
    )]
    pub fields: Fields,
    /// Print JSON: one object per line
    #[arg(short, long)]
    pub json: bool,
}

/// A hexadecimal number, which may be negative: then it is below by so much.
fn offset(text: &str) -> Result<u64, String> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let digits = digits.strip_prefix("0x").unwrap_or(digits);
    let plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = plain
        .then(|| u64::from_str_radix(digits, 16).ok())
        .flatten();
    match number {
        Some(number) if negative => Ok(number.wrapping_neg()),
        Some(number) => Ok(number),
        None => Err("give a hexadecimal number such as 0x1a000000".to_owned()),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    let number = text.parse().ok();
    number
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or_else(|| "give 0 to 100".to_owned())
}
