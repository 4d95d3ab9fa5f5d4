//! `umpire stat`: from the flags to its runs, and what they come to.

use std::io::{self, Write};
use std::time::Duration;

use super::Row;
use super::events::{Asked, DEFAULT, Source, asked};
use super::print::{Form, Whole, write_whole};
use super::rows::mean;
use super::run::Run;
use super::runs::Runs;
use super::session::{CountingSession, Job};
use super::spec::{EventList, EventListError};
use super::tally::Scale;
use super::trial::{CountingPlan, Question};
use crate::targets::{Selection, Target};
use crate::{Completion, ToolError, Vm, Waiter, refused};

/// What is counted, and how it is shown.
#[derive(Clone, Debug)]
pub struct StatOptions {
    /// The VM, and what of it.
    pub selection: Selection,
    /// What to count; without any the usual events.
    pub events: Vec<EventList>,
    /// Print what was counted after each of these times.
    pub interval: Option<Duration>,
    /// Measure so many times.
    pub repeat: u32,
    /// The form of the output.
    pub form: Form,
    /// Rows for each vCPU, or for each core.
    pub apart: bool,
    /// How long a set of events has the counters.
    pub turn: Duration,
    /// How counts of a part of the time become counts of the whole.
    pub scale: Scale,
    /// How long to count; without it until it is stopped or the VM ends.
    pub duration: Option<Duration>,
}

/// `umpire stat`.
///
/// # Errors
/// There is no VM, no such event, vCPU or core, or standard output cannot be
/// written to. Whoever closes it early has seen enough: that is no error.
pub fn run(options: &StatOptions) -> Result<Completion, ToolError> {
    let vm = Vm::find(options.selection.control.as_deref())?;
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
    let selection = &options.selection;
    let targets = selection.targets(vm.model.vcpus, vm.model.cores)?;
    let question = Question {
        vm: &vm,
        events: &events,
        groups: &numbers,
        targets: &targets,
        preemptible: selection.preemptible,
    };
    let plan = question.plan()?;
    for note in &plan.notes {
        tell(note);
    }
    let job = Job {
        vm: &vm,
        events: &events,
        sets: &plan.schedule.sets,
        turn: options.turn,
        preemptible: selection.preemptible,
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
    measure.all()
}

/// All lists in one, or the default.
fn event_list(lists: &[EventList]) -> Result<EventList, ToolError> {
    if lists.is_empty() {
        return DEFAULT
            .parse()
            .map_err(|error: EventListError| ToolError::Input(error.to_string()));
    }
    let groups = lists.iter().flat_map(|list| list.groups.clone()).collect();
    Ok(EventList { groups })
}

/// One line for the user, where the output has no place for it.
pub(crate) fn tell(note: &str) {
    let _ = writeln!(io::stderr(), "umpire: {}", umpire_events::one_line(note));
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The time is over.
    Time,
    /// Ctrl-C.
    Stopped,
    /// Nobody is left to count.
    Ended,
    /// Nobody reads the output.
    Unread,
}

pub(super) struct Measure<'a> {
    pub(super) job: Job<'a>,
    pub(super) plan: &'a CountingPlan,
    targets: &'a [Target],
    pub(super) waiter: &'a Waiter,
    pub(super) options: &'a StatOptions,
}

impl Measure<'_> {
    /// Every run, and what they come to.
    fn all(&self) -> Result<Completion, ToolError> {
        let mut runs: Vec<Vec<Row>> = Vec::new();
        let mut elapsed = Runs::default();
        let mut end = End::Time;
        for _ in 0..self.options.repeat {
            let mut run = Run::begin(self)?;
            end = run.go()?;
            let seconds = run.ended.duration_since(run.began).as_secs_f64();
            runs.push(run.rows(|it| &it.course.whole, seconds));
            elapsed.add(seconds);
            run.tell_blind();
            if end != End::Time {
                break;
            }
        }
        if end == End::Ended {
            tell("the vCPUs that were measured have ended");
        }
        if self.options.interval.is_none() && end != End::Unread {
            let rows = mean(&runs);
            let whole = Whole {
                title: &self.job.vm.title(),
                rows: &rows,
                elapsed: &elapsed,
                repeated: self.options.repeat > 1,
            };
            read_by(write_whole(
                &whole,
                &self.options.form,
                &mut io::stdout().lock(),
            ))?;
        }
        let cut_short = end == End::Stopped && self.options.duration.is_some();
        Ok(if cut_short {
            Completion::CutShort
        } else {
            Completion::Complete
        })
    }

    /// Who counts what: with `-a` the vCPUs' contexts tell the quantities of the
    /// VMM, which a core does not have.
    pub(super) fn sessions(&self) -> Result<Vec<(CountingSession, Kind)>, ToolError> {
        let vm = self.job.vm;
        let is_quantity = |event: &Asked| matches!(event.source, Source::Quantity { .. });
        let quantities = self.job.events.iter().any(is_quantity);
        let mut sessions = Vec::new();
        for target in self.targets {
            let kind = Kind {
                counters: true,
                quantities: matches!(target, Target::Vcpu(_)),
            };
            let session = CountingSession::open(&self.job, *target, kind.quantities)
                .map_err(refused(format!("{target} cannot be measured")))?;
            sessions.push((session, kind));
        }
        let beside = self.options.selection.all_cores && quantities;
        for number in 0..if beside { vm.model.vcpus } else { 0 } {
            let job = Job {
                sets: &[],
                ..self.job
            };
            let kind = Kind {
                counters: false,
                quantities: true,
            };
            let target = Target::Vcpu(number);
            let session = CountingSession::open(&job, target, true)
                .map_err(refused(format!("{target} cannot tell its quantities")))?;
            sessions.push((session, kind));
        }
        Ok(sessions)
    }
}

/// What of a context is looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) counters: bool,
    pub(super) quantities: bool,
}

/// Whether anybody reads the output.
pub(super) fn read_by(written: io::Result<()>) -> Result<bool, ToolError> {
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(ToolError::Output(error)),
    }
}
