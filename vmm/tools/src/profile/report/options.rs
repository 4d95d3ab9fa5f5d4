//! The options of `umpire report`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{CallGraph, Column, Columns, GraphOrder, Looks};
use crate::profile::input::{Looked, ProfileChoice};
use crate::profile::stacks::Weight;
use crate::profile::tally::SortKeys;

/// What percentages are parts of where samples of some tasks or places are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Percentage {
    /// The events of all tasks and places, on the chosen vCPUs and cores at the chosen times
    #[default]
    Absolute,
    /// The events of the chosen samples
    Relative,
}

/// What `umpire report` makes of a profile.
#[derive(Clone, Debug, Args)]
pub struct ReportOptions {
    /// The profile.
    #[command(flatten)]
    pub profile: ProfileChoice,
    /// What samples are grouped by, a column each: comm, pid, tid, dso, symbol (sym), vcpu
    /// (cpu), core, ring, cr3; +KEY adds to the default [default: comm,dso,symbol, or symbol
    /// where the guest's tasks are not known]
    #[arg(short, long, value_name = "KEY[,...]")]
    pub sort: Option<SortKeys>,
    /// The columns: overhead, overhead_children, sample, period, and what --sort takes, whose
    /// columns need no --sort then; +FIELD adds to the default
    #[arg(short = 'F', long, value_name = "FIELD[,...]")]
    pub fields: Option<Columns>,
    /// Show how many samples a row has: always, unless --fields says what is shown
    #[arg(short = 'n', long)]
    pub show_nr_samples: bool,
    /// Show how many events a row stands for
    #[arg(long)]
    pub show_total_period: bool,
    /// Put this between columns instead of blanks; where it is in a name, a dot is shown
    #[arg(short = 't', long, value_name = "TEXT", value_parser = separator,
          conflicts_with_all = ["json", "hierarchy"])]
    pub field_separator: Option<String>,
    /// Print text, which it does anyway
    #[arg(long)]
    pub stdio: bool,
    /// Show before the table what the profile says of itself: when it was recorded, of which
    /// VM, by which command
    #[arg(long, conflicts_with = "json")]
    pub header: bool,
    /// Show nothing else
    #[arg(long, conflicts_with_all = ["json", "folded", "flamegraph", "firefox", "perf_data",
                                      "pprof"])]
    pub header_only: bool,
    /// Show what samples are grouped by below each other, each with its part; callers have no
    /// rows then
    #[arg(long, conflicts_with_all = ["json", "fields", "children"])]
    pub hierarchy: bool,
    /// Give callers rows of their own, with what is called from them [default where samples
    /// have callers]
    #[arg(long, overrides_with = "no_children")]
    pub children: bool,
    /// Give callers no rows
    #[arg(long, overrides_with = "children")]
    pub no_children: bool,
    /// Show below each row who called whom. Words of perf report -g: graph, fractal, flat,
    /// folded or none; caller from the outermost on, callee from the sample's place on; a
    /// percentage below which branches are left out, and behind it how many are shown; percent,
    /// period or count [default: graph,0.5,caller,percent, with --no-children callee]
    #[arg(short = 'g', long, value_name = "WORD[,...]", num_args = 0..=1,
          default_missing_value = "", overrides_with = "call_graph",
          conflicts_with_all = ["folded", "flamegraph", "firefox"])]
    pub call_graph: Option<CallGraph>,
    /// The same as -g caller
    #[arg(short = 'G', long, conflicts_with_all = ["folded", "flamegraph", "firefox"])]
    pub inverted: bool,
    /// Leave out rows with less than this part of the events, in percent; also branches of -g
    /// without a percentage [default: 0; branches 0.5]
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub percent_limit: Option<f64>,
    /// What percentages are parts of with --comms, --pid, --tid, --dsos, --symbol or
    /// --symbol-filter
    #[arg(long, value_enum, default_value_t)]
    pub percentage: Percentage,
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
          conflicts_with_all = ["json", "folded", "flamegraph", "firefox", "call_graph",
                                "inverted"])]
    pub perf_data: Option<PathBuf>,
    /// Write a profile for pprof to this file instead
    #[arg(long, value_name = "FILE.pb.gz",
          conflicts_with_all = ["json", "folded", "flamegraph", "firefox", "perf_data",
                                "call_graph", "inverted"])]
    pub pprof: Option<PathBuf>,
    /// What the number of a stack, and its width, stands for
    #[arg(long, value_enum, default_value_t)]
    pub weight: Weight,
    /// Print one JSON object instead of text
    #[arg(short, long)]
    pub json: bool,
}

impl ReportOptions {
    /// How the table of a profile looks.
    pub(in crate::profile) fn looks(&self, looked: &Looked) -> Looks {
        let children = self.has_children(looked);
        let mut numbers = vec![Column::Children, Column::Overhead, Column::Sample];
        numbers.retain(|column| children || *column != Column::Children);
        if self.show_total_period {
            numbers.push(Column::Period);
        }
        let keys = SortKeys::usual(&looked.names).or(self.sort.as_ref());
        let sorted = self.sort.is_some();
        let mut columns = Columns::settled(self.fields.as_ref(), &numbers, &keys, sorted);
        let sample = Column::Sample;
        if self.show_nr_samples && !columns.contains(&sample) {
            let behind = columns.iter().rposition(|column| column.is_number());
            columns.insert(behind.map_or(0, |at| at + 1), sample);
        }
        let keys = columns.iter().filter_map(|column| match column {
            Column::Key(key) => Some(*key),
            _ => None,
        });
        let graph = match (self.call_graph, self.inverted) {
            (None, false) => None,
            (graph, inverted) => {
                let graph = graph.unwrap_or_default();
                let order = graph.order.or(inverted.then_some(GraphOrder::Caller));
                CallGraph { order, ..graph }.settled(children, self.percent_limit)
            }
        };
        Looks {
            keys: SortKeys::from(keys.collect::<Vec<_>>()),
            children,
            graph,
            least_percent: self.percent_limit.unwrap_or(0.0),
            separator: self.field_separator.clone(),
            hierarchy: self.hierarchy,
            percentage: self.percentage,
            columns,
        }
    }

    /// Whether callers have rows: where samples have some, if nobody says, and a column would
    /// show what is theirs.
    fn has_children(&self, looked: &Looked) -> bool {
        let shown = self.fields.as_ref();
        let has = shown.is_some_and(|fields| fields.has(Column::Children));
        let hidden = !has && shown.is_some_and(Columns::is_all);
        match (self.children, self.no_children) {
            _ if self.hierarchy => false,
            (true, _) => true,
            (false, true) => has,
            (false, false) => has || looked.has_chains && !hidden,
        }
    }
}

/// What is between columns.
fn separator(text: &str) -> Result<String, String> {
    match text {
        "" => Err("give a character, such as a comma".to_owned()),
        // As shells leave it.
        "\\t" => Ok("\t".to_owned()),
        text if text.contains('.') => {
            Err("a dot stands for it in names, so it cannot have one itself".to_owned())
        }
        text if text.contains(['\n', '\r']) => Err("a line has no end within".to_owned()),
        text => Ok(text.to_owned()),
    }
}

/// A number of percent.
pub(in crate::profile) fn percent(text: &str) -> Result<f64, String> {
    let number = text.parse().ok();
    number
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or_else(|| "give 0 to 100".to_owned())
}
