//! `umpire events`: events by name, and what counts them here.

use std::io::{self, BufWriter, Write};

use umpire_events::{Entry, Pattern, Question, list, names, nothing_found, write_list};
use vmm::counters::backends_for;

use crate::exit::{ExitStatus, UserError, written};
use crate::flags::EventsFlags;

/// Prints the list on standard output.
///
/// # Errors
/// There is no such table, nothing is found, or standard output cannot be
/// written to. Whoever closes it early, as `head` does, has seen enough: that is
/// no error.
pub fn run(flags: &EventsFlags) -> Result<ExitStatus, UserError> {
    let names = names();
    let question = Question {
        pattern: flags.pattern.as_deref().map(Pattern::new),
        pmu: flags.pmu.clone(),
    };
    let entries = list(&question, names.as_ref(), &backends_for).map_err(UserError::bad_input)?;
    let found = |entry: &Entry| !matches!(entry, Entry::NoTables { .. });
    if let (Some(text), false) = (&flags.pattern, entries.iter().any(found)) {
        return Err(UserError::bad_input(nothing_found(text, names.as_ref())));
    }
    let mut out = BufWriter::new(io::stdout().lock());
    written(write_list(&entries, flags.json, &mut out).and_then(|()| out.flush()))?;
    Ok(ExitStatus::SUCCESS)
}
