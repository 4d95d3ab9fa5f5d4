//! A run as Markdown, for the summary of a job.

use std::fmt::Write;

use crate::compare::{Comparison, Verdict};
use crate::event::Chosen;
use crate::inputs::short;
use crate::number::{grouped, percent, signed};
use crate::record::Record;
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

fn compared(text: &mut String, before: &str, comparison: &Comparison<'_>) {
    let before = code(before);
    let verdict = if comparison.fails() {
        format!("**Failed**: {}.", comparison.failure())
    } else {
        "Within the threshold.".to_owned()
    };
    put(text, format_args!("{verdict} Compared with {before}.\n"));
    text.push_str("| event | before | now | change | |\n|---|---:|---:|---:|---|\n");
    for one in &comparison.counts {
        let (was, is) = (grouped(one.before), grouped(one.now));
        let change = percent(one.before, one.now);
        let note = match one.verdict {
            Verdict::Within => "",
            Verdict::Shown => "not in the gate",
            Verdict::Over => "**over**",
        };
        put(
            text,
            format_args!("| `{}` | {was} | {is} | {change} | {note} |", one.chosen),
        );
    }
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
    use crate::record::tests::{function, record, tally};

    #[test]
    fn a_run() {
        let record = record();
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

Status 0, digest of all inputs `{digest}`.

"
            )
        );
    }

    #[test]
    fn a_run_beside_another() {
        let (before, mut now) = (record(), record());
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
        };
        let comparison = Comparison::of(&before, &now, &gate);
        let digest = short(&now.digest).to_owned();
        assert_eq!(
            summary(&now, "gzip x", &[], Some(("base.json", &comparison))),
            format!(
                "### `umpire count` of `gzip x`

**Failed**: more than 0.5 % more: instructions:u +12,000 (+1.000 %). Compared with `base.json`.

| event | before | now | change | |
|---|---:|---:|---:|---|
| `instructions:u` | 1,200,000 | 1,212,000 | +1.000 % | **over** |
| `instructions:k` | 124,567 | 124,567 | 0 % | not in the gate |

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
