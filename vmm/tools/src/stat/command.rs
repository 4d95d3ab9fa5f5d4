//! `umpire stat`: from the options to its runs and their counts.

use std::io::Write;

use perfmon_abi::consts::PFM_FL_NO_ASK;
use pmu_model::Provenance;
use umpire_events::with_letters;

use super::events::{Asked, Source, asked};
use super::metrics::Counts;
use super::print::{Form, Whole, write_whole};
use super::rows::{mean, partly};
use super::run::{End, Measure, Run, read_by};
use super::runs::Runs;
use super::session::Job;
use super::trial::{Question, broken_up};
use super::verbose;
use super::{Row, StatOptions};
use crate::error::host;
use crate::{Completion, ToolError, Vm, Waiter, note};

/// Counts, and writes the counts where the options say.
///
/// # Errors
/// There is no VM, no such event, vCPU or core, or what is written to takes no more.
/// Whoever closes it early has seen enough: that is no error.
pub fn run(options: &StatOptions) -> Result<Completion, ToolError> {
    let form = options.look.form();
    let mut sink = options.sink.open(&form)?;
    count(options, &form, &mut sink.out, &mut sink.notes)
}

/// Counts, and writes the counts to `out`; what has no place there goes to `notes`, a
/// line each.
pub(super) fn count(
    options: &StatOptions,
    form: &Form,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<Completion, ToolError> {
    // What makes no sense makes none without a VM either.
    let until = options.until()?;
    let list = options.list()?;
    let selection = &options.selection;
    let vm = Vm::find(&selection.vm)?;
    let names = umpire_events::names();
    let mut groups = asked(
        &list,
        vm.pmu.model(),
        &vm.model.virtual_pmds,
        names.as_ref(),
    )
    .map_err(ToolError::Input)?;
    for event in groups.iter_mut().flatten() {
        in_rings(event, (options.all_user, options.all_kernel));
    }
    let groups = broken_up(groups, &list.weak, &vm.pmu);
    let mut number = 0..;
    let numbered = |group: &Vec<Asked>| number.by_ref().take(group.len()).collect();
    let numbers: Vec<Vec<usize>> = groups.iter().map(numbered).collect();
    let events: Vec<Asked> = groups.into_iter().flatten().collect();
    if matches!(form, Form::MetricOnly(_)) && !follows(&events) {
        return Err(ToolError::Input(
            "--metric-only: nothing follows from these events; -M names what can be had".to_owned(),
        ));
    }
    let targets = options.targets(vm.model.vcpus, vm.model.cores)?;
    let question = Question {
        vm: &vm,
        events: &events,
        groups: &numbers,
        targets: &targets,
        // What can be counted is found out without a word to the guest.
        flags: selection.flags() | PFM_FL_NO_ASK,
    };
    let plan = question.plan()?;
    let job = Job {
        vm: &vm,
        events: &events,
        sets: &plan.schedule.sets,
        turn: options.turn(),
        flags: selection.flags(),
    };
    let waiter = Waiter::new().map_err(host("waiting for events"))?;
    let measure = Measure {
        job,
        plan: &plan,
        targets: &targets,
        waiter: &waiter,
        options,
        until: &until,
        form,
    };
    all(&measure, out, notes)
}

/// `--all-user` and `--all-kernel`: the rings of an event that does not name its own, which
/// its name says then as if they had been given.
fn in_rings(event: &mut Asked, (user, kernel): (bool, bool)) {
    let Source::Counter(request) = &mut event.source else {
        return;
    };
    let names_them = event.said.rings || !(request.usr && request.os);
    if names_them || !(user || kernel) {
        return;
    }
    (request.usr, request.os) = (user, kernel);
    // A name that somebody gave it stays.
    if event.said.label.is_none() {
        event.name = with_letters(&event.name, if user { "u" } else { "k" });
    }
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

/// Makes every run and prints their counts.
fn all(
    measure: &Measure<'_>,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<Completion, ToolError> {
    let options = measure.options;
    let repeat = options.repeat.unwrap_or(1);
    let mut runs: Vec<Vec<Row>> = Vec::new();
    let mut elapsed = Runs::default();
    let mut said = false;
    let mut before = None;
    loop {
        let made = made(measure, out, notes, said);
        let (run, end, completion) = match (made, before) {
            (Ok(made), _) => made,
            (Err(error), Some(completion)) => {
                // What was counted before is none the less true.
                let shown = options.interval.is_none() || options.summary;
                if shown && !runs.is_empty() {
                    print(measure, &runs, &elapsed, out)?;
                    note_partly(&runs, notes);
                }
                return ended_between(error, completion, notes);
            }
            (Err(error), None) => return Err(error),
        };
        before = Some(completion);
        let seconds = run.seconds();
        runs.push(run.rows(|it| it.whole(), seconds));
        elapsed.add(seconds);
        run.note_blind(notes);
        if !said {
            note_simulated(measure, &runs, notes);
            said = true;
        }
        if options.verbose > 0 {
            run.note_counts(options.verbose > 1, seconds, notes);
        }
        let last = end != End::Time || elapsed.count() == repeat;
        if end == End::Ended {
            note(notes, "the vCPUs that were measured have ended");
        }
        // Again and again: each by itself, as there is no end to compute a mean at.
        let by_itself = repeat == 0;
        let shown = options.interval.is_none() || options.summary;
        let mut read = end != End::Unread;
        if (last || by_itself) && shown && read {
            read = print(measure, &runs, &elapsed, out)?;
            note_partly(&runs, notes);
        }
        if last || !read {
            return Ok(completion);
        }
        if by_itself {
            runs.clear();
            elapsed = Runs::default();
        }
    }
}

/// One run; what it counts is said unless it was `said`.
fn made<'a>(
    measure: &'a Measure<'a>,
    out: &mut dyn Write,
    notes: &mut dyn Write,
    said: bool,
) -> Result<(Run<'a>, End, Completion), ToolError> {
    let mut run = Run::launch(measure)?;
    if !said {
        // Now that nothing is in the way: an error is one line.
        note_plan(measure, notes);
        let takes = |event: &Asked| event.request().is_some();
        if let Some(within) = measure.job.vm.within()
            && measure.job.events.iter().any(takes)
        {
            note(notes, &within);
        }
    }
    let (end, completion) = run.go(out)?;
    Ok((run, end, completion))
}

/// How it ends where a run fails after others. A VM that lets nobody
/// count any more, as it has ended or is about to, is no failure.
fn ended_between(
    error: ToolError,
    completion: Completion,
    notes: &mut dyn Write,
) -> Result<Completion, ToolError> {
    if !matches!(error, ToolError::Refused { .. }) {
        return Err(error);
    }
    note(notes, &format!("no further run was made: {error}"));
    Ok(completion)
}

/// Which means are not of all runs.
fn note_partly(runs: &[Vec<Row>], notes: &mut dyn Write) {
    partly(runs).iter().for_each(|line| note(notes, line));
}

/// What counts, and with `-v` where.
fn note_plan(measure: &Measure<'_>, notes: &mut dyn Write) {
    for text in &measure.plan.notes {
        note(notes, text);
    }
    if measure.options.interval.is_some() && measure.job.vm.model.virtual_time {
        note(
            notes,
            "intervals and their times are the host's; the guest's time is virtual",
        );
    }
    if measure.options.verbose > 0 {
        verbose::plan(&measure.job, notes);
    }
}

/// Fields have no place to say that nobody saw the events that they have numbers of.
fn note_simulated(measure: &Measure<'_>, runs: &[Vec<Row>], notes: &mut dyn Write) {
    let silent = matches!(
        measure.form,
        Form::Csv {
            provenance: false,
            ..
        }
    );
    let rows = runs.iter().flatten().filter(|_| silent);
    let made_up = rows.filter(|row| row.provenance() == Some(Provenance::Simulated));
    let mut names: Vec<&str> = made_up.map(|row| row.event.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    if !names.is_empty() {
        let names = names.join(", ");
        note(
            notes,
            &format!("simulated, made up, by a declared rate or as ticks of virtual time: {names}"),
        );
    }
}

/// Prints what was counted altogether, and returns whether somebody reads it.
fn print(
    measure: &Measure<'_>,
    runs: &[Vec<Row>],
    elapsed: &Runs,
    out: &mut dyn Write,
) -> Result<bool, ToolError> {
    let options = measure.options;
    let whole = Whole {
        title: &measure.job.vm.title(),
        rows: &mean(runs),
        elapsed,
        virtual_time: measure.job.vm.model.virtual_time,
        repeated: options.repeat.unwrap_or(1) > 1,
        summary: options.interval.is_some() && !options.look.no_csv_summary,
    };
    read_by(write_whole(&whole, measure.form, out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_model::PmuModel;
    use umpire_events::{LibraryError, NoTables};

    /// What an event is called, and the rings that it is counted in.
    fn check(name: &str, rings: (bool, bool), expected: (&str, bool, bool)) {
        let model = PmuModel::parse("intel-v2").unwrap();
        let list = name.parse().unwrap();
        let mut found = asked(&list, &model, &[], &NoTables(LibraryError::TooLate)).unwrap();
        let mut event = found.remove(0).remove(0);
        in_rings(&mut event, rings);
        let request = event.request().unwrap();
        assert_eq!((event.name.as_str(), request.usr, request.os), expected);
    }

    #[test]
    fn rings_are_those_of_events_that_have_none() {
        let (user, kernel) = ((true, false), (false, true));
        check("cycles", (false, false), ("cycles", true, true));
        check("cycles", user, ("cycles:u", true, false));
        check("cycles", kernel, ("cycles:k", false, true));
        check("cycles:k", user, ("cycles:k", false, true));
        check("cycles:uk", user, ("cycles:uk", true, true));
        check("cycles:G", user, ("cycles:Gu", true, false));
        check("{cycles:k,loads}:u", user, ("cycles:ku", true, true));
        check("cpu/cycles/uk", kernel, ("cpu/cycles/uk", true, true));
        check("cycles:W", user, ("cycles:Wu", true, false));
        // What somebody calls it says nothing of rings.
        check("cpu/cycles,name=x:k/", user, ("x:k", true, false));
        check("cycles/name=all:u/", user, ("all:u", true, false));
        check("cycles/name=y:u/k", user, ("y:u", false, true));
        check("cpu/event=0xc0/", user, ("cpu/event=0xc0/u", true, false));
    }
}
