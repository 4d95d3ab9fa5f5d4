//! Functions that do not cost what they cost in another run.

use std::collections::BTreeMap;
use std::io::{self, Write};

use crate::number::{grouped, signed};
use crate::record::Record;
use crate::table::function_name;

/// Rows that are printed; of what JSON has there is no limit.
const MOST: usize = 20;

/// A function whose counts are not the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionChange<'a> {
    pub object: &'a str,
    pub name: &'a str,
    /// Its own instructions, before and now.
    pub own: [u64; 2],
    /// These, and those of what it called, before and now.
    pub inclusive: [u64; 2],
    /// How often it was called, before and now.
    pub calls: [u64; 2],
}

/// The functions whose counts differ, those with the largest change of their own first. `None`
/// where one of the runs has no functions.
#[must_use]
pub fn functions<'a>(before: &'a Record, now: &'a Record) -> Option<Vec<FunctionChange<'a>>> {
    let both = [
        before.counts.functions.as_ref()?,
        now.counts.functions.as_ref()?,
    ];
    let mut all: BTreeMap<(&str, &str), FunctionChange<'a>> = BTreeMap::new();
    for (run, functions) in both.into_iter().enumerate() {
        for one in functions {
            let key = (one.object.as_str(), one.name.as_str());
            let change = all.entry(key).or_insert(FunctionChange {
                object: key.0,
                name: key.1,
                own: [0; 2],
                inclusive: [0; 2],
                calls: [0; 2],
            });
            // Two functions of one name in one object, as static ones of two files, are added.
            change.own[run] = change.own[run].saturating_add(one.own);
            change.inclusive[run] = change.inclusive[run].saturating_add(one.inclusive);
            change.calls[run] = change.calls[run].saturating_add(one.calls);
        }
    }
    let mut changes: Vec<FunctionChange<'a>> = all.into_values().collect();
    changes.retain(|one| {
        [one.own, one.inclusive, one.calls]
            .iter()
            .any(|it| it[0] != it[1])
    });
    let size = |counts: [u64; 2]| counts[0].abs_diff(counts[1]);
    changes.sort_by_key(|one| {
        let sizes = (size(one.own), size(one.inclusive), size(one.calls));
        (std::cmp::Reverse(sizes), one.object, one.name)
    });
    Some(changes)
}

/// Writes a table of changes.
///
/// # Errors
/// `out` cannot be written to.
pub fn write(changes: &[FunctionChange<'_>], out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "{:>18} {:>18}  function (change; now)",
        "own", "inclusive"
    )?;
    for one in changes.iter().take(MOST) {
        let own = signed(one.own[0], one.own[1]);
        let inclusive = signed(one.inclusive[0], one.inclusive[1]);
        let name = function_name(one.object, one.name);
        let now = [one.own, one.inclusive].map(|counts| grouped(counts[1]));
        writeln!(
            out,
            "{own:>18} {inclusive:>18}  {name}: own {}, inclusive {}",
            now[0], now[1]
        )?;
    }
    let rest = changes.len().saturating_sub(MOST);
    if rest > 0 {
        writeln!(out, "{:>38} ({rest} more, of smaller changes)", "")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::{function, record};

    #[test]
    fn changes_are_sorted_and_new_ones_are_there() {
        let (mut before, mut now) = (record(), record());
        before.counts.functions = Some(vec![
            function("main", 10, 1_000),
            function("gone", 30, 30),
            function("same", 5, 5),
            function("twice", 1, 1),
            function("twice", 2, 2),
        ]);
        now.counts.functions = Some(vec![
            function("main", 10, 1_100),
            function("new", 100, 100),
            function("same", 5, 5),
            function("twice", 3, 3),
        ]);
        // It is called once less.
        let changes = functions(&before, &now).expect("both have them");
        let rows: Vec<_> = changes.iter().map(|it| (it.name, it.own)).collect();
        assert_eq!(
            rows,
            [
                ("new", [0, 100]),
                ("gone", [30, 0]),
                ("main", [10, 10]),
                ("twice", [3, 3]),
            ]
        );
        let mut out = Vec::new();
        write(&changes, &mut out).expect("room");
        let text = String::from_utf8(out).expect("text");
        assert!(
            text.contains("+100               +100  new (gzip): own 100"),
            "{text}"
        );
        now.counts.functions = None;
        assert_eq!(functions(&before, &now), None);
    }

    #[test]
    fn few_rows_are_printed() {
        let (mut before, mut now) = (record(), record());
        before.counts.functions = Some(Vec::new());
        let many = (0..25).map(|number| function(&format!("f{number}"), number + 1, 1));
        now.counts.functions = Some(many.collect());
        let changes = functions(&before, &now).expect("both have them");
        let mut out = Vec::new();
        write(&changes, &mut out).expect("room");
        let text = String::from_utf8(out).expect("text");
        assert_eq!(text.lines().count(), 1 + MOST + 1);
        assert!(text.ends_with("(5 more, of smaller changes)\n"), "{text}");
    }
}
