//! `-v`: which counter each event has, and what it has counted.

use std::io::Write;

use super::events::{Asked, Source};
use super::session::Job;
use super::{Row, Value, missing};
use crate::{note, registers};

/// Says where each event is counted.
pub(super) fn plan(job: &Job<'_>, notes: &mut dyn Write) {
    for (number, event) in job.events.iter().enumerate() {
        let how = match &event.source {
            Source::Quantity { pmd, .. } => format!("PMD{pmd}, which the VMM itself keeps"),
            Source::Elapsed => "the clock on the wall".to_owned(),
            Source::Nothing { why } => format!("nothing: {why}"),
            Source::Counter(_) => {
                counter(job, event, number).unwrap_or_else(|| "no counter: see above".to_owned())
            }
        };
        note(notes, &format!("{} is counted by {how}", event.name));
    }
    let sets = job.sets.len();
    if sets > 1 {
        let ms = job.turn.as_millis();
        note(notes, &format!("{sets} event sets take turns of {ms} ms"));
    }
}

/// The register that asks for the event, and its set.
fn counter(job: &Job<'_>, event: &Asked, number: usize) -> Option<String> {
    let mut sets = job.sets.iter().enumerate();
    let (set, counter) = sets.find_map(|(index, set)| {
        let place = set.iter().find(|(event, _)| *event == number)?;
        Some((index, place.1))
    })?;
    let (pmc, value) = registers::program(&job.vm.pmu, counter, event.request()?)?;
    let (pmc, pmd) = (pmc.num, pmc.pmd);
    Some(format!(
        "counter {counter}: register PMC{pmc} has {value:#x}, PMD{pmd} the count, in event set {set}"
    ))
}

/// Says what each event has counted: its count, and the nanoseconds in which it was to be
/// counted and was.
pub(super) fn counts(rows: &[Row], notes: &mut dyn Write) {
    for row in rows {
        let whose = row
            .whose
            .map_or(String::new(), |whose| format!("{whose}: "));
        let value = match row.value {
            Value::Counted(count) => count.to_string(),
            other => missing(other).unwrap_or_default().to_owned(),
        };
        let (event, enabled, running) = (&row.event, row.enabled_ns, row.running_ns);
        let how = row
            .provenance()
            .map_or(String::new(), |one| format!(", {one}"));
        note(
            notes,
            &format!("{whose}{event}: {value} {enabled} {running}{how}"),
        );
    }
}
