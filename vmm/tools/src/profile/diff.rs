//! `umpire diff`: what a profile has more or less of than another, as `perf diff` prints it.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;

use super::input::ProfileChoice;
use super::report::{Looks, Percentage, Report, below_dots, percent};
use super::tally::SortKeys;

/// What `umpire diff` compares.
#[derive(Clone, Debug, Args)]
#[command(mut_arg("input", |input| input.hide(true).conflicts_with("old")))]
pub struct DiffOptions {
    /// The profile of before
    #[arg(value_name = "OLD")]
    pub old: PathBuf,
    /// The profile of after
    #[arg(value_name = "NEW")]
    pub new: PathBuf,
    /// The names of both, and what is looked at of them; its input is neither.
    #[command(flatten)]
    pub profile: ProfileChoice,
    /// What samples are grouped by, a column each, as in umpire report [default: dso,symbol, or
    /// symbol where the guest's tasks are not known]
    #[arg(short, long, value_name = "KEY[,...]")]
    pub sort: Option<SortKeys>,
    /// Leave out rows that changed by less than this part of the events, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0, value_parser = percent)]
    pub percent_limit: f64,
    /// What percentages are parts of with --comms, --pid, --tid, --dsos, --symbol or
    /// --symbol-filter
    #[arg(long, value_enum, default_value_t)]
    pub percentage: Percentage,
}

/// The parts that rows have of an event: what a row is by its columns, and percent.
type Parts = BTreeMap<Vec<String>, f64>;

/// What is compared of a profile.
pub(super) struct Compared {
    /// By the name of the event.
    events: Vec<(String, Parts)>,
}

impl Compared {
    /// The rows of `report`, whose events are called `names` by their numbers.
    pub(super) fn of(report: &Report<'_>, names: impl Fn(u16) -> String) -> Self {
        let parts = |(number, tally)| {
            let mut parts = Parts::new();
            for (cells, percent) in report.parts(tally) {
                *parts.entry(cells).or_default() += percent;
            }
            (names(number), parts)
        };
        Self {
            events: report.events().map(parts).collect(),
        }
    }

    /// The names of its events.
    pub(super) fn names(&self) -> Vec<&str> {
        self.events.iter().map(|(name, _)| name.as_str()).collect()
    }
}

/// How rows of a comparison look.
pub(super) fn looks(keys: SortKeys, percentage: Percentage) -> Looks {
    Looks {
        keys,
        columns: Vec::new(),
        children: false,
        graph: None,
        least_percent: 0.0,
        separator: None,
        hierarchy: false,
        percentage,
    }
}

/// Writes each event that both have: rows with the part in `old`, and how much more or less
/// `new` has. Rows that changed by less than `least` percent are counted.
pub(super) fn write(
    titles: &[&str],
    (old, new): (&Compared, &Compared),
    least: f64,
    out: &mut dyn Write,
) -> io::Result<()> {
    for (name, before) in &old.events {
        let same = new.events.iter().find(|(one, _)| one == name);
        if let Some((_, after)) = same {
            writeln!(out, "# Event '{name}'\n#")?;
            write_event(titles, (before, after), least, out)?;
        }
    }
    out.flush()
}

fn write_event(
    titles: &[&str],
    (before, after): (&Parts, &Parts),
    least: f64,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut rows: Vec<(&Vec<String>, Option<f64>, Option<f64>)> = Vec::new();
    for (cells, part) in before {
        rows.push((cells, Some(*part), after.get(cells).copied()));
    }
    let only_after = after
        .iter()
        .filter(|(cells, _)| !before.contains_key(*cells));
    rows.extend(only_after.map(|(cells, part)| (cells, None, Some(*part))));
    let delta = |row: &(&Vec<String>, Option<f64>, Option<f64>)| {
        row.2.unwrap_or(0.0) - row.1.unwrap_or(0.0)
    };
    // What is printed alike is alike.
    let change =
        |row: &(&Vec<String>, Option<f64>, Option<f64>)| (delta(row).abs() * 100.0).round();
    rows.sort_by(|a, b| {
        let order = change(b).total_cmp(&change(a));
        order.then_with(|| a.0.cmp(b.0))
    });
    let shown = rows.partition_point(|row| change(row) >= least * 100.0);
    let heads = ["Baseline", "Delta Abs"].iter().chain(titles);
    let mut table = vec![
        heads
            .map(|head| (*head).to_owned())
            .collect::<Vec<String>>(),
    ];
    for row in &rows[..shown] {
        let baseline = row.1.map_or(String::new(), |part| format!("{part:.2}%"));
        let mut line = vec![baseline, format!("{:+.2}%", delta(row))];
        line.extend(row.0.iter().cloned());
        table.push(line);
    }
    for line in below_dots(table, |column| column < 2) {
        writeln!(out, "{line}")?;
    }
    match rows.len() - shown {
        0 => Ok(()),
        more => writeln!(
            out,
            "# {more} more rows changed by less than {least} % each"
        ),
    }
}
