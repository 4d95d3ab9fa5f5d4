//! Events by name: generic names, raw codes, and the tables of libpfm4.
//!
//! [`resolve()`] turns a name into a `pmu_virt::CountRequest` for one PMU model.
//! The tables come through [`NameTable`]; [`names`] is libpfm4's, loaded at run
//! time, and [`NoTables`] what there is without it. Nothing here knows KVM.
//! `docs/events.md` tells how names are written.

mod code;
mod counting;
mod entry;
mod error;
mod explain;
mod families;
mod generic;
mod libpfm;
mod list;
mod print;
mod resolve;
mod search;
mod suggest;
mod sys;
mod table;

#[cfg(test)]
mod tests;

pub use counting::{BackendUse, Use, counters_of};
pub use entry::{
    Entry, EventEntry, GenericEntry, Meaning, ModelsUse, QuantityEntry, TableEntry, UnitMask,
};
pub use error::{EventError, LibraryError};
pub use families::{family_of, models_of};
pub use libpfm::names;
pub use list::{Question, list};
pub use print::write_list;
pub use resolve::{NamedRequest, models_for, resolve};
pub use search::Pattern;
pub use table::{
    Attribute, AttributeKind, EncodeError, Encoding, NameTable, NamedEvent, NoTables, PmuTable,
    TableKind,
};

use std::io::{self, BufWriter, Write};

use crate::config::{ExitStatus, UserError};

/// `umpire events [PATTERN] [--pmu NAME]`: prints the list on standard output.
///
/// # Errors
/// There is no such table, nothing is found, or standard output cannot be
/// written to. Whoever closes it early, as `head` does, has seen enough: that is
/// no error.
pub fn run(pattern: Option<&str>, pmu: Option<&str>, json: bool) -> Result<ExitStatus, UserError> {
    let names = names();
    let question = Question {
        pattern: pattern.map(Pattern::new),
        pmu: pmu.map(str::to_owned),
    };
    let entries = list(&question, names.as_ref()).map_err(UserError::bad_input)?;
    let found = |entry: &Entry| !matches!(entry, Entry::NoTables { .. });
    if let (Some(text), false) = (pattern, entries.iter().any(found)) {
        return Err(UserError::bad_input(nothing_found(text, names.as_ref())));
    }
    let mut out = BufWriter::new(io::stdout().lock());
    match write_list(&entries, json, &mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(UserError::unwritable(error))
        }
        _ => Ok(ExitStatus::SUCCESS),
    }
}

fn nothing_found(text: &str, names: &dyn NameTable) -> String {
    let near = match list::near(text, names) {
        near if near.is_empty() => String::new(),
        near => format!(" (did you mean {}?)", families::one_of(&near)),
    };
    let library = match names.missing() {
        Some(library) => format!("; {library}"),
        None => String::new(),
    };
    format!("no event name or description has '{text}'{near}{library}")
}
