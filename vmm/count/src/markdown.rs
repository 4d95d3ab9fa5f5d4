//! A run as Markdown, for the summary of a job.

use std::fmt::Write;

use crate::compare::{Comparison, Verdict};
use crate::event::Chosen;
use crate::inputs::short;
use crate::number::{grouped, percent, signed};
use crate::record::{Record, short_name};
use crate::regions;
use crate::table::function_name;

/// Rows of a table that nobody reads to its end.
const MOST: usize = 10;

/// A run, and what has changed since the one before, if there is one: its name, and both side by
/// side.
#[must_use]
pub fn summary(
    record: &Record,
    title: &str,
    events: &[Chosen],
    comparison: Option<(&str, &Comparison<'_>)>,
) -> String {
    let mut text = format!("### `umpire count` of {}\n\n", code(title));
    match comparison {
        None => {
            text.push_str("| event | count |\n|---|---:|\n");
            for chosen in events {
                let count = grouped(chosen.of(&record.counts));
                put(&mut text, format_args!("| `{chosen}` | {count} |"));
            }
            marked(&mut text, record, events);
        }
        Some((before, comparison)) => compared(&mut text, before, comparison),
    }
    put(&mut text, format_args!(""));
    let digest = short(&record.digest);
    let status = record.outcome.status();
    put(
        &mut text,
        format_args!("Status {status}, digest of all inputs `{digest}`.\n"),
    );
    text
}

/// The regions of a run.
fn marked(text: &mut String, record: &Record, events: &[Chosen]) {
    let regions = regions::named(&record.counts);
    if regions.is_empty() {
        return;
    }
    text.push_str("\n| region | event | count |\n|---|---|---:|\n");
    for (name, region) in regions.iter().take(MOST) {
        let name = code(format!("{} {name}", short_name(&region.program)).trim_start());
        for chosen in events {
            let count = grouped(chosen.among(region.user, region.kernel));
            put(text, format_args!("| {name} | `{chosen}` | {count} |"));
        }
    }
    put_rest(text, regions.len());
}

/// How many are not shown, behind a table.
fn put_rest(text: &mut String, all: usize) {
    match all.saturating_sub(MOST) {
        0 => {}
        rest => put(text, format_args!("\nand {rest} more")),
    }
}

/// The regions that are not as before, and those of one run alone.
fn compared_regions(text: &mut String, comparison: &Comparison<'_>) {
    let changed = comparison.changed_regions();
    if changed.is_empty() {
        return;
    }
    text.push_str("\n| region | event | before | now | change | |\n|---|---|---:|---:|---:|---|\n");
    for region in changed.iter().take(MOST) {
        let name = code(&region.label());
        let [before, now] = region.pair.sums.map(|sum| sum.is_some());
        for one in &region.counts {
            let shown = |count, is_there| {
                if is_there {
                    grouped(count)
                } else {
                    String::new()
                }
            };
            let (was, is) = (shown(one.before, before), shown(one.now, now));
            let change = if region.is_in_both() {
                percent(one.before, one.now)
            } else {
                String::new()
            };
            let notes = [note(one.verdict).to_owned(), region.note()];
            let notes = notes.into_iter().filter(|note| !note.is_empty());
            let notes: Vec<String> = notes.collect();
            let notes = notes.join("; ");
            put(
                text,
                format_args!(
                    "| {name} | `{}` | {was} | {is} | {change} | {notes} |",
                    one.chosen
                ),
            );
        }
    }
    put_rest(text, changed.len());
}

fn note(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Within => "",
        Verdict::Shown => "not in the gate",
        Verdict::Over => "**over**",
    }
}

fn compared(text: &mut String, before: &str, comparison: &Comparison<'_>) {
    let before = code(before);
    let verdict = if comparison.fails() {
        format!("**Failed**: {}.", comparison.failure_with(code))
    } else {
        "Within the threshold.".to_owned()
    };
    put(text, format_args!("{verdict} Compared with {before}.\n"));
    text.push_str("| event | before | now | change | |\n|---|---:|---:|---:|---|\n");
    for one in &comparison.counts {
        let (was, is) = (grouped(one.before), grouped(one.now));
        let change = percent(one.before, one.now);
        let note = note(one.verdict);
        put(
            text,
            format_args!("| `{}` | {was} | {is} | {change} | {note} |", one.chosen),
        );
    }
    compared_regions(text, comparison);
    if comparison.is_unexplained() {
        put(
            text,
            format_args!("\nNo input differs, yet counts do, which must not be: please report it."),
        );
    }
    if !comparison.functions.is_empty() {
        text.push_str("\n| function | own | inclusive |\n|---|---:|---:|\n");
        for one in comparison.functions.iter().take(MOST) {
            let name = code(&function_name(one.object, one.name));
            let [own, inclusive] = [one.own, one.inclusive].map(|it| signed(it[0], it[1]));
            put(text, format_args!("| {name} | {own} | {inclusive} |"));
        }
    }
    if !comparison.inputs.is_empty() {
        text.push_str("\nInputs that differ:\n\n");
        for change in comparison.inputs.iter().take(MOST) {
            put(text, format_args!("- {}", code(&change.line())));
        }
        let rest = comparison.inputs.len().saturating_sub(MOST);
        if rest > 0 {
            put(text, format_args!("- and {rest} more"));
        }
    }
}

fn put(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{line}");
}

/// A text as code, whatever is in it: names come from programs that nobody knows. In a table a bar
/// ends a cell, also in code.
fn code(text: &str) -> String {
    let text = umpire_events::one_line(text).replace('|', "\\|");
    let longest = text.split(|letter| letter != '`').map(str::len).max();
    let fence = "`".repeat(longest.unwrap_or(0) + 1);
    let space = if text.contains('`') || text.is_empty() {
        " "
    } else {
        ""
    };
    format!("{fence}{space}{text}{space}{fence}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Gate;
    use crate::record::tests::{function, record, region, tally};

    #[test]
    fn names_in_the_verdict_are_code() {
        let (mut before, mut now) = (record(), record());
        before.counts.regions = vec![region("/bin/x", "b<int>", 1000)];
        now.counts.regions = vec![region("/bin/x", "b<int>", 1100)];
        let gate = Gate {
            events: &Gate::DEFAULT,
            threshold: "0".parse().ok(),
            kernel: false,
            regions_alone: true,
        };
        let comparison = Comparison::of(&before, &now, &gate);
        let text = summary(&now, "x", &[], Some(("base.json", &comparison)));
        let expected =
            "**Failed**: more than 0 % more: instructions:u of `x b<int>` +100 (+10.000 %).";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn a_run() {
        let mut record = record();
        record.counts.regions = vec![region("/bin/x", "a|b", 1000), region("/bin/x", "", 80)];
        let events = Chosen::list("instructions:u,loads:k").expect("events");
        let digest = short(&record.digest).to_owned();
        assert_eq!(
            summary(&record, "gzip `x`|y", &events, None),
            format!(
                "### `umpire count` of `` gzip `x`\\|y ``

| event | count |
|---|---:|
| `instructions:u` | 1,200,000 |
| `loads:k` | 31,141 |

| region | event | count |
|---|---|---:|
| `x a\\|b` | `instructions:u` | 1,000 |
| `x a\\|b` | `loads:k` | 25 |
| `x #1` | `instructions:u` | 80 |
| `x #1` | `loads:k` | 2 |

Status 0, digest of all inputs `{digest}`.

"
            )
        );
    }

    #[test]
    fn a_run_beside_another() {
        let (mut before, mut now) = (record(), record());
        before.counts.regions = vec![region("x", "a", 1000), region("x", "old", 10)];
        now.counts.regions = vec![region("x", "a", 1100)];
        now.inputs.add("extra", "1");
        now.digest = now.inputs.digest();
        now.counts.programs[1].threads[0].user = tally(1_012_000);
        now.counts.functions = Some(vec![
            function("deflate", 912_000, 992_000),
            function("longest_match", 80_000, 80_000),
        ]);
        let gate = Gate {
            events: &Gate::DEFAULT,
            threshold: "0.5".parse().ok(),
            kernel: false,
            regions_alone: false,
        };
        let comparison = Comparison::of(&before, &now, &gate);
        let digest = short(&now.digest).to_owned();
        assert_eq!(
            summary(&now, "gzip x", &[], Some(("base.json", &comparison))),
            format!(
                "### `umpire count` of `gzip x`

**Failed**: more than 0.5 % more: instructions:u +12,000 (+1.000 %), instructions:u of `x a` +100 (+10.000 %). Compared with `base.json`.

| event | before | now | change | |
|---|---:|---:|---:|---|
| `instructions:u` | 1,200,000 | 1,212,000 | +1.000 % | **over** |
| `instructions:k` | 124,567 | 124,567 | 0 % | not in the gate |

| region | event | before | now | change | |
|---|---|---:|---:|---:|---|
| `x a` | `instructions:u` | 1,000 | 1,100 | +10.000 % | **over** |
| `x a` | `instructions:k` | 100 | 110 | +10.000 % | not in the gate |
| `x old` | `instructions:u` | 10 |  |  | not in the gate; only before |
| `x old` | `instructions:k` | 1 |  |  | not in the gate; only before |

| function | own | inclusive |
|---|---:|---:|
| `deflate (gzip)` | +12,000 | +12,000 |

Inputs that differ:

- `extra: only now`

Status 0, digest of all inputs `{digest}`.

"
            )
        );
    }
}
