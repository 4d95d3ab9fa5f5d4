//! Sampling without an end and without a file: the samples since somebody asked last.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::command::buffer;
use super::plan::SamplingPlan;
use super::programs::AskedPrograms;
use super::samples::Clock;
use super::session::{SamplingSession, Scene};
use crate::profile::{Record, Sampling};
use crate::stat::spec::EventList;
use crate::targets::Target;
use crate::vm::NO_CYCLES;
use crate::{ToolError, Vm};

/// How long descriptions of samples are waited for, of which the next ones follow soon.
const SOON: Duration = Duration::from_millis(300);

/// Bytes that a sample takes in a buffer, at least.
const SAMPLE: u64 = 128;
/// Seconds for which a buffer lasts.
const LASTS: u64 = 4;

/// What is sampled.
#[derive(Clone, Debug)]
pub(crate) struct LiveSampling {
    /// None: what the VM can count of what is usual.
    pub(crate) event: Option<EventList>,
    /// Samples a second of a vCPU's time.
    pub(crate) hz: u64,
    /// Of its contexts, beside those of their targets.
    pub(crate) flags: u32,
}

/// Contexts that sample, one for each target that takes one.
#[derive(Debug)]
pub(crate) struct LiveSamples {
    plan: SamplingPlan,
    clock: Clock,
    flags: u32,
    buffer: u64,
    sessions: Vec<SamplingSession>,
    programs: AskedPrograms,
    event: String,
    /// What is not sampled, and why.
    notes: Vec<String>,
}

impl LiveSamples {
    /// Samples `targets` from now on. A target that cannot be sampled is left out, with a
    /// note.
    ///
    /// # Errors
    /// No such event, one that cannot be sampled on this model, or the VM fails.
    pub(crate) fn start(
        vm: &Vm,
        what: &LiveSampling,
        targets: &[Target],
    ) -> Result<Self, ToolError> {
        let names = umpire_events::names();
        let usual = || EventList {
            groups: vec![vec![vm.usual_event().to_owned()]],
            ..EventList::default()
        };
        let event = what.event.clone().unwrap_or_else(usual);
        let falls_back = what.event.is_none() && vm.usual_event() != "cycles";
        let plan = SamplingPlan::new(
            &event,
            &vm.pmu,
            &vm.model.virtual_pmds,
            names.as_ref(),
            Sampling::Frequency(what.hz),
            0,
        );
        let wanted = (what.hz * SAMPLE * LASTS).clamp(64 << 10, 1 << 20);
        let mut live = Self {
            plan: plan.map_err(ToolError::Input)?,
            clock: Clock::of(vm),
            flags: what.flags,
            buffer: buffer(wanted, targets.len(), vm)?,
            sessions: Vec::new(),
            programs: AskedPrograms::default(),
            notes: falls_back
                .then(|| NO_CYCLES.to_owned())
                .into_iter()
                .collect(),
            event: event.groups.concat().join(","),
        };
        let mut sessions = Vec::new();
        for target in targets {
            match SamplingSession::open(&live.scene(vm), *target) {
                Ok(session) => sessions.push(session),
                Err(error) if error.is_gone() => return Err(error),
                Err(error) => live.notes.push(error.to_string()),
            }
        }
        for session in &sessions {
            session.start(vm)?;
        }
        live.sessions = sessions;
        Ok(live)
    }

    fn scene<'a>(&'a self, vm: &'a Vm) -> Scene<'a> {
        Scene {
            vm,
            plan: &self.plan,
            clock: self.clock,
            flags: self.flags,
            chains: false,
            stack: 0,
            buffer: self.buffer,
        }
    }

    /// Does `each` to the sessions, and puts together what they give.
    fn all(
        &mut self,
        vm: &Vm,
        mut each: impl FnMut(&mut SamplingSession, &Scene<'_>) -> Result<Vec<Record>, ToolError>,
    ) -> Result<Vec<Record>, ToolError> {
        let mut sessions = std::mem::take(&mut self.sessions);
        let scene = self.scene(vm);
        let mut records = Vec::new();
        let mut failed = None;
        for session in &mut sessions {
            match each(session, &scene) {
                Ok(more) => records.extend(more),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        self.sessions = sessions;
        failed.map_or(Ok(records), Err)
    }

    /// The contexts' descriptors, by number.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sessions.iter().map(|session| session.fd().as_fd())
    }

    /// What is not sampled, and why; a line each.
    pub(crate) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The name of what is sampled.
    pub(crate) fn event(&self) -> &str {
        &self.event
    }

    /// Whether anything is sampled at all.
    pub(crate) fn is_any(&self) -> bool {
        !self.sessions.is_empty()
    }

    /// Takes in the messages of a context: the losses that they report, and whether nothing
    /// more will come from there.
    ///
    /// # Errors
    /// The VM fails.
    pub(crate) fn messages(
        &mut self,
        vm: &Vm,
        number: usize,
    ) -> Result<(Vec<Record>, bool), ToolError> {
        let mut at = 0..;
        let mut over = true;
        let records = self.all(vm, |session, scene| {
            if at.next() != Some(number) {
                return Ok(Vec::new());
            }
            let records = session.messages(scene)?;
            over = session.is_over();
            Ok(records)
        })?;
        Ok((records, over))
    }

    /// The samples since the last time, and the losses among them.
    ///
    /// # Errors
    /// A buffer makes no sense.
    pub(crate) fn drain(&mut self, vm: &Vm) -> Result<Vec<Record>, ToolError> {
        let records = self.all(vm, |session, scene| session.drain(scene))?;
        self.programs.take(&records);
        Ok(records)
    }

    /// Whether samples have tasks by now, or will have none.
    pub(crate) fn is_ready(&mut self, vm: &Vm) -> bool {
        self.programs.is_ready(&vm.client)
    }

    /// Whether a sample had a task.
    pub(crate) fn has_tasks(&self) -> bool {
        self.programs.has_tasks()
    }

    /// What the numbers in samples stand for, as far as the VM knows it by now, and has not
    /// said before.
    pub(crate) fn describe(&mut self, vm: &Vm) -> Vec<Record> {
        self.programs.within(&vm.client, SOON, SOON)
    }

    /// Has the VM say all of it again.
    pub(crate) fn forget_descriptions(&mut self) {
        self.programs = AskedPrograms::default();
    }

    /// Makes the periods right for the frequency; buffers have to be empty.
    ///
    /// # Errors
    /// The VM fails.
    pub(crate) fn adapt(&mut self, vm: &Vm) -> Result<(), ToolError> {
        let look = |session: &mut SamplingSession, scene: &Scene<'_>| {
            if !session.is_over() {
                session.look(scene)?;
            }
            Ok(Vec::new())
        };
        self.all(vm, look).map(drop)
    }

    /// Leaves the targets to others.
    pub(crate) fn stop(&mut self, vm: &Vm) {
        let stop = |session: &mut SamplingSession, scene: &Scene<'_>| {
            session.stop(scene);
            Ok(Vec::new())
        };
        let _ = self.all(vm, stop);
    }
}
