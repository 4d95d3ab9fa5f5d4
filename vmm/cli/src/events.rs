//! `umpire events`: events by name, and what counts them here.

use std::io::{self, BufWriter, Write};

use umpire_events::{
    Entry, EventError, NameTable, Pattern, Question, decode, identify, is_code, list, names,
    nothing_found, write_list,
};
use umpire_tools::Vm;
use umpire_tools::find::VmChoice;
use umpire_tools::stat::spec::EventList;
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
    let pmu = match &flags.vm {
        Some(_) => Some(model_of(flags.vm.clone())?),
        None => flags.pmu.clone(),
    };
    let entries = match &flags.decode {
        Some(code) => decode(code, pmu.as_deref(), names.as_ref(), &backends_for)
            .map_err(UserError::bad_input)?,
        None => found(flags.pattern.as_deref(), pmu, names.as_ref())?,
    };
    let mut out = BufWriter::new(io::stdout().lock());
    written(write_list(&entries, flags.json, &mut out).and_then(|()| out.flush()))?;
    Ok(ExitStatus::SUCCESS)
}

/// The PMU model of a VM.
fn model_of(vm: Option<String>) -> Result<String, UserError> {
    let vm = Vm::find(&VmChoice { control: None, vm })?;
    Ok(vm.pmu.model().to_string())
}

/// What is found for `pattern`, or what it stands for.
fn found(
    pattern: Option<&str>,
    pmu: Option<String>,
    names: &dyn NameTable,
) -> Result<Vec<Entry>, UserError> {
    let pattern = pattern.map(str::trim);
    let question = Question {
        pattern: pattern.map(Pattern::new),
        pmu,
    };
    let mut entries = list(&question, names, &backends_for).map_err(UserError::bad_input)?;
    if let Some(text) = pattern {
        let found = |entry: &Entry| !matches!(entry, Entry::NoTables { .. });
        if is_code(text) || !entries.iter().any(found) {
            let list: EventList = text.parse().map_err(UserError::bad_input)?;
            let mut meant = Vec::new();
            for name in list.groups.iter().flatten() {
                let found = identify(name, question.pmu.as_deref(), names, &backends_for);
                meant.extend(found.map_err(|error| not_found(name, error, names))?);
            }
            entries.splice(0..0, meant);
        }
    }
    Ok(entries)
}

/// What to say of a text that no description has and that names no event.
fn not_found(text: &str, error: EventError, names: &dyn NameTable) -> UserError {
    // Only a name has these signs, so the error says which part of it is wrong.
    let is_name = is_code(text) || text.contains([':', '.', '/']) && !text.contains(['*', '?']);
    let is_unknown = matches!(
        error,
        EventError::UnknownEvent { .. } | EventError::NoTables { .. } | EventError::NotAName(_)
    );
    if is_name || !is_unknown {
        UserError::bad_input(error)
    } else {
        UserError::bad_input(nothing_found(text, names))
    }
}
