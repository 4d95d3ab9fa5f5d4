//! `umpire stat`: from the flags to its runs, and what they come to.

use std::io::{self, Write};

use super::Row;
use super::events::{Asked, DEFAULT, Source, asked};
use super::print::{Form, Whole, write_whole};
use super::rows::mean;
use super::run::Run;
use super::runs::Runs;
use super::session::{Job, Session};
use super::spec::EventList;
use super::trial::{Plan, Question};
use crate::cli::StatFlags;
use crate::config::{ExitStatus, UserError};
use crate::tools::targets::Target;
use crate::tools::{ToolError, Vm, Waiter, refused};

/// `umpire stat`.
///
/// # Errors
/// There is no VM, no such event, vCPU or core, or standard output cannot be
/// written to. Whoever closes it early has seen enough: that is no error.
pub fn run(flags: &StatFlags) -> Result<ExitStatus, UserError> {
    let vm = Vm::find(flags.who.control.as_deref())?;
    let list = event_list(&flags.event)?;
    let names = crate::events::names();
    let groups = asked(
        &list,
        vm.pmu.model(),
        &vm.model.virtual_pmds,
        names.as_ref(),
    )
    .map_err(UserError::bad_input)?;
    let mut number = 0..;
    let numbered = |group: &Vec<Asked>| number.by_ref().take(group.len()).collect();
    let numbers: Vec<Vec<usize>> = groups.iter().map(numbered).collect();
    let events: Vec<Asked> = groups.into_iter().flatten().collect();
    let choice = flags.who.choice();
    let targets = choice.targets(vm.model.vcpus, vm.model.cores)?;
    let question = Question {
        vm: &vm,
        events: &events,
        groups: &numbers,
        targets: &targets,
        preemptible: flags.who.preemptible,
    };
    let plan = question.plan()?;
    for note in &plan.notes {
        tell(note);
    }
    let job = Job {
        vm: &vm,
        events: &events,
        sets: &plan.schedule.sets,
        turn: flags.turn(),
        preemptible: flags.who.preemptible,
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
        flags,
    };
    measure.all()
}

/// All lists in one, or the default.
fn event_list(lists: &[EventList]) -> Result<EventList, UserError> {
    if lists.is_empty() {
        return DEFAULT.parse().map_err(UserError::bad_input);
    }
    let groups = lists.iter().flat_map(|list| list.groups.clone()).collect();
    Ok(EventList { groups })
}

/// One line for the user, where the output has no place for it.
pub(crate) fn tell(note: &str) {
    let _ = writeln!(io::stderr(), "umpire: {}", crate::config::one_line(note));
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
    pub(super) plan: &'a Plan,
    targets: &'a [Target],
    pub(super) waiter: &'a Waiter,
    pub(super) flags: &'a StatFlags,
}

impl Measure<'_> {
    /// Every run, and what they come to.
    fn all(&self) -> Result<ExitStatus, UserError> {
        let mut runs: Vec<Vec<Row>> = Vec::new();
        let mut elapsed = Runs::default();
        let mut end = End::Time;
        for _ in 0..self.flags.repeat {
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
        if self.flags.interval.is_none() && end != End::Unread {
            let rows = mean(&runs);
            let whole = Whole {
                title: &self.job.vm.title(),
                rows: &rows,
                elapsed: &elapsed,
                repeated: self.flags.repeat > 1,
            };
            read_by(write_whole(&whole, &self.form(), &mut io::stdout().lock()))?;
        }
        let cut_short = end == End::Stopped && self.flags.duration.is_some();
        Ok(match cut_short {
            true => ExitStatus::INTERRUPTED,
            false => ExitStatus::SUCCESS,
        })
    }

    pub(super) fn form(&self) -> Form {
        match &self.flags.field_separator {
            _ if self.flags.json => Form::Json,
            Some(separator) => Form::Csv(separator.clone()),
            None => Form::Table,
        }
    }

    /// Who counts what: with `-a` the vCPUs' contexts tell the quantities of the
    /// VMM, which a core does not have.
    pub(super) fn sessions(&self) -> Result<Vec<(Session, Kind)>, ToolError> {
        let vm = self.job.vm;
        let is_quantity = |event: &Asked| matches!(event.source, Source::Quantity { .. });
        let quantities = self.job.events.iter().any(is_quantity);
        let mut sessions = Vec::new();
        for target in self.targets {
            let kind = Kind {
                counters: true,
                quantities: matches!(target, Target::Vcpu(_)),
            };
            let session = Session::open(&self.job, *target, kind.quantities)
                .map_err(refused(format!("{target} cannot be measured")))?;
            sessions.push((session, kind));
        }
        let beside = self.flags.who.all_cores && quantities;
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
            let session = Session::open(&job, target, true)
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
pub(super) fn read_by(written: io::Result<()>) -> Result<bool, UserError> {
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(UserError::unwritable(error)),
    }
}
