//! Counting without an end: what each vCPU has counted since somebody asked last.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::Row;
use super::events::{Asked, asked};
use super::rows::{Layout, Part};
use super::session::{CountingSession, Job};
use super::spec::EventList;
use super::tally::Scale;
use super::trial::{CountingPlan, Question};
use super::watch::Watched;
use crate::targets::Target;
use crate::{ToolError, Vm, is_gone};

/// How long a set has the counters where there are more events than counters. Nobody reads
/// between turns, so counts are scaled by time alone.
const TURN: Duration = Duration::from_millis(100);

/// Contexts that count, one for each target that takes one.
#[derive(Debug)]
pub(crate) struct LiveCounts {
    events: Vec<Asked>,
    plan: CountingPlan,
    watched: Vec<Watched>,
    /// What is not counted, and why.
    notes: Vec<String>,
    began: Instant,
    /// When somebody asked last.
    asked: Instant,
}

impl LiveCounts {
    /// Counts the events of `list` on `targets` from now on, by contexts with `flags`. A
    /// target that takes no context is left out, with a note.
    ///
    /// # Errors
    /// No such event, or the VM fails.
    pub(crate) fn start(
        vm: &Vm,
        list: &EventList,
        targets: &[Target],
        flags: u32,
    ) -> Result<Self, ToolError> {
        let names = umpire_events::names();
        let model = vm.pmu.model();
        let events = asked(list, model, &vm.model.virtual_pmds, names.as_ref());
        let events: Vec<Asked> = events
            .map_err(ToolError::Input)?
            .into_iter()
            .flatten()
            .collect();
        let job = Job {
            vm,
            events: &events,
            sets: &[],
            turn: TURN,
            flags,
        };
        let mut notes = Vec::new();
        let open = countable(&job, targets, &mut notes)?;
        // Each by itself: they are of no use only together.
        let groups: Vec<Vec<usize>> = (0..events.len()).map(|event| vec![event]).collect();
        let question = Question {
            vm,
            events: &events,
            groups: &groups,
            targets: &open,
            flags,
        };
        let mut plan = question.plan()?;
        notes.append(&mut plan.notes);
        let job = Job {
            sets: &plan.schedule.sets,
            ..job
        };
        let mut watched = Vec::new();
        for target in open {
            match CountingSession::open(&job, target, true) {
                Ok(session) => watched.push(Watched::begin(vm, session, events.len())?),
                // Others were faster.
                Err(refusal) => notes.push(format!("{target} is not counted: {refusal}")),
            }
        }
        for one in &watched {
            one.session().start(vm)?;
        }
        let now = Instant::now();
        Ok(Self {
            events,
            plan,
            watched,
            notes,
            began: now,
            asked: now,
        })
    }

    /// The contexts' descriptors, by number.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.watched
            .iter()
            .map(|one| one.session().handle.fd.as_fd())
    }

    /// What is not counted, and why; a line each.
    pub(crate) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Takes in the messages of a context; whether nothing more will come from there.
    ///
    /// # Errors
    /// The VM fails.
    pub(crate) fn messages(&mut self, number: usize) -> Result<bool, ToolError> {
        let Some(one) = self.watched.get_mut(number) else {
            return Ok(true);
        };
        one.messages()?;
        Ok(one.is_over())
    }

    /// Rows for each target with what it has counted since they were asked for last, and the
    /// seconds since then.
    ///
    /// # Errors
    /// The VM fails.
    pub(crate) fn rows(&mut self, vm: &Vm) -> Result<(Vec<Row>, f64), ToolError> {
        for one in self.watched.iter_mut().filter(|one| !one.is_over()) {
            one.poll(vm, self.began)?;
        }
        let now = Instant::now();
        let seconds = now.duration_since(self.asked).as_secs_f64();
        self.asked = now;
        let layout = Layout {
            events: &self.events,
            supported: &self.plan.supported,
            scale: Scale::Linear,
            apart: true,
        };
        let parts: Vec<Part<'_>> = self
            .watched
            .iter()
            .map(|one| Part {
                whose: one.session().target,
                tally: one.interval(),
                counters: true,
                quantities: true,
            })
            .collect();
        let rows = layout.rows(&parts, seconds);
        for one in &mut self.watched {
            one.next_interval();
        }
        Ok((rows, seconds))
    }

    /// Leaves the targets to others.
    pub(crate) fn stop(&self, vm: &Vm) {
        for one in self.watched.iter().filter(|one| !one.is_over()) {
            let _ = one.session().stop(vm);
            one.session().detach(vm);
        }
    }
}

/// The targets on which a session can be opened now. Why not on the others goes to `notes`.
fn countable(
    job: &Job<'_>,
    targets: &[Target],
    notes: &mut Vec<String>,
) -> Result<Vec<Target>, ToolError> {
    let mut open = Vec::new();
    for target in targets {
        match CountingSession::open(job, *target, false) {
            Ok(session) => {
                session.detach(job.vm);
                open.push(*target);
            }
            Err(refusal) if is_gone(&refusal) => {
                return Err(ToolError::refused("counting", refusal));
            }
            Err(refusal) => notes.push(format!("{target} is not counted: {refusal}")),
        }
    }
    Ok(open)
}
