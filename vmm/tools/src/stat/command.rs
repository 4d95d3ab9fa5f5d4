//! `umpire stat`: from the options to its runs and their counts.

use std::io::Write;

use perfmon_abi::consts::PFM_FL_NO_ASK;

use super::events::{Asked, DEFAULT, asked};
use super::metrics::Counts;
use super::print::{Form, Whole, write_whole};
use super::rows::mean;
use super::run::{End, Measure, Run, read_by};
use super::runs::Runs;
use super::session::Job;
use super::spec::{EventList, EventListError};
use super::trial::Question;
use super::{Row, StatOptions};
use crate::{Completion, ToolError, Vm, Waiter, note};

/// Counts, and writes the counts to `out`; what has no place there goes to `notes`, a
/// line each.
///
/// # Errors
/// There is no VM, no such event, vCPU or core, or `out` cannot be written to.
/// Whoever closes `out` early has seen enough: that is no error.
pub fn run(
    options: &StatOptions,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<Completion, ToolError> {
    let vm = Vm::find(&options.selection.vm)?;
    let list = event_list(&options.events)?;
    let names = umpire_events::names();
    let groups = asked(
        &list,
        vm.pmu.model(),
        &vm.model.virtual_pmds,
        names.as_ref(),
    )
    .map_err(ToolError::Input)?;
    let mut number = 0..;
    let numbered = |group: &Vec<Asked>| number.by_ref().take(group.len()).collect();
    let numbers: Vec<Vec<usize>> = groups.iter().map(numbered).collect();
    let events: Vec<Asked> = groups.into_iter().flatten().collect();
    if matches!(options.form, Form::MetricOnly(_)) && !follows(&events) {
        return Err(ToolError::Input(
            "--metric-only: nothing follows from these events; -M names what can be had".to_owned(),
        ));
    }
    let selection = &options.selection;
    let targets = selection.targets(vm.model.vcpus, vm.model.cores)?;
    let question = Question {
        vm: &vm,
        events: &events,
        groups: &numbers,
        targets: &targets,
        // What can be counted is found out without a word to the guest.
        flags: selection.flags() | PFM_FL_NO_ASK,
    };
    let plan = question.plan()?;
    for text in &plan.notes {
        note(notes, text);
    }
    let job = Job {
        vm: &vm,
        events: &events,
        sets: &plan.schedule.sets,
        turn: options.turn,
        flags: selection.flags(),
    };
    let waiter = Waiter::new().map_err(|error| ToolError::Host {
        what: "waiting for events".to_owned(),
        error,
    })?;
    let measure = Measure {
        job,
        plan: &plan,
        targets: &targets,
        waiter: &waiter,
        options,
    };
    all(&measure, out, notes)
}

/// Whether a number follows from some of the counts.
fn follows(events: &[Asked]) -> bool {
    let counts = Counts {
        events,
        values: &vec![None; events.len()],
        seconds: 1.0,
    };
    (0..events.len()).any(|index| counts.metric(index).is_some())
}

/// All lists in one, or the default.
fn event_list(lists: &[EventList]) -> Result<EventList, ToolError> {
    if lists.is_empty() {
        return DEFAULT
            .parse()
            .map_err(|error: EventListError| ToolError::Input(error.to_string()));
    }
    Ok(EventList {
        groups: lists.iter().flat_map(|list| list.groups.clone()).collect(),
        reads_at_samples: false,
    })
}

/// Makes every run and prints their counts.
fn all(
    measure: &Measure<'_>,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<Completion, ToolError> {
    let mut runs: Vec<Vec<Row>> = Vec::new();
    let mut elapsed = Runs::default();
    let mut end = End::Time;
    let mut completion = Completion::Complete;
    for _ in 0..measure.options.repeat {
        let mut run = Run::begin(measure)?;
        (end, completion) = run.go(out)?;
        let seconds = run.ended.duration_since(run.began).as_secs_f64();
        runs.push(run.rows(|it| &it.course.whole, seconds));
        elapsed.add(seconds);
        run.note_blind(notes);
        if end != End::Time {
            break;
        }
    }
    if end == End::Ended {
        note(notes, "the vCPUs that were measured have ended");
    }
    let sums = matches!(measure.options.form, Form::Track { .. });
    if (measure.options.interval.is_none() || sums) && end != End::Unread {
        let rows = mean(&runs);
        let whole = Whole {
            title: &measure.job.vm.title(),
            rows: &rows,
            elapsed: &elapsed,
            repeated: measure.options.repeat > 1,
        };
        read_by(write_whole(&whole, &measure.options.form, out))?;
    }
    Ok(completion)
}
