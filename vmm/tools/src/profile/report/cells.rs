//! What a row has in the column of a key.

use super::Report;
use crate::profile::names::WordId;
use crate::profile::record::Ring;
use crate::profile::tally::{SampleRow, SortKey};

/// The text below the key's title.
pub(super) fn cell(key: SortKey, row: &SampleRow, report: &Report<'_>) -> String {
    const NOT_SAMPLED: &str = "not sampled";
    let names = report.paths().names();
    let key_of = &row.key;
    let word = |word| names.text(word).to_owned();
    let task = |task: Option<(u32, WordId)>| match task {
        Some((id, name)) => format!("{id}:{}", names.text(name)),
        None => "[unknown]".to_owned(),
    };
    let text = match key {
        SortKey::Comm => key_of.comm.map(word),
        SortKey::Pid => key_of.pid.map(task),
        SortKey::Tid => key_of.tid.map(task),
        SortKey::Dso => key_of.dso.map(word),
        SortKey::Symbol => key_of.location.map(|location| {
            // What it is in has a column already.
            let name = if report.looks().keys.has(SortKey::Dso) {
                location.symbol(names)
            } else {
                location.name(names)
            };
            match (names.has_tasks(), location.is_kernel()) {
                (false, _) => name,
                (true, true) => format!("[k] {name}"),
                (true, false) => format!("[.] {name}"),
            }
        }),
        SortKey::Vcpu => key_of.vcpu.map(|(vm, vcpu)| format!("{vm}/{vcpu}")),
        SortKey::Core => key_of.core.map(|core| core.to_string()),
        SortKey::Ring => key_of
            .ring
            .map(|ring| ring.map_or(NOT_SAMPLED, Ring::name).to_owned()),
        SortKey::Cr3 => key_of
            .cr3
            .map(|cr3| cr3.map_or(NOT_SAMPLED.to_owned(), |cr3| format!("{cr3:#x}"))),
    };
    text.unwrap_or_default()
}
