//! Jobs that come back, contexts that come back, and contexts that go.

use std::os::fd::OwnedFd;

use perfmon_abi::LoadArg;
use perfmon_abi::wire::{Call, Errno, Refusal};
use pmu_virt::perfmon::{ContextId, Hosted};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::State;
use super::answer::{Answer, RequestId};
use super::contexts::Attachment;
use crate::dispatcher::{Done, Report, Target, Work};

impl State {
    /// Takes in what the vCPUs' threads have reported.
    pub(super) fn take_reports(&mut self) {
        while let Some(report) = self.machine.desk.report() {
            match report {
                Report::Inspect(target, view) => self.looked(target, view),
                Report::Job(id, done) => self.job_done(id, done),
                Report::Ended(target, hosted) => self.ended(target, hosted),
            }
        }
    }

    fn job_done(&mut self, id: ContextId, done: Done) {
        self.lists.outdated();
        let asked = match self.contexts.get_mut(id) {
            Some(entry) => entry.job.take().flatten(),
            None => None,
        };
        let answer = match done {
            Done::Loaded(Ok(())) => {
                if let Some(entry) = self.contexts.get_mut(id) {
                    entry.generation = entry.generation.wrapping_add(1);
                    entry.told = false;
                }
                Some(Answer::default())
            }
            Done::Loaded(Err((hosted, refusal))) => {
                self.comes_home(id, *hosted);
                Some(refusal.into())
            }
            Done::Undone(Work::Load(hosted, _)) => {
                self.comes_home(id, *hosted);
                let reason = "the vCPU or core has ended";
                Some(Refusal::new(Errno::EBUSY, reason).into())
            }
            Done::Called(call, result) => Some(Answer::of_call(&call, result)),
            Done::Unloaded(hosted) => {
                if let Some(hosted) = hosted {
                    self.comes_home(id, *hosted);
                }
                Some(Answer::default())
            }
            // It has come home in the meantime, as its vCPU has ended.
            Done::Undone(Work::Call(call)) => match asked {
                Some(asked) => self.undone(id, asked, call),
                None => None,
            },
            Done::Undone(Work::Unload) => Some(Answer::default()),
            Done::Inspected(_) | Done::Undone(Work::Inspect) => None,
        };
        if let (Some(asked), Some(answer)) = (asked, answer) {
            self.late_reply(asked, &answer);
        }
        self.go_on(id);
    }

    fn undone(&mut self, id: ContextId, asked: RequestId, call: Call) -> Option<Answer> {
        match self.contexts.get(id).map(|entry| &entry.place) {
            Some(Attachment::Detached { .. }) => self.at_home(id, asked, call),
            // The thread ended without a word.
            _ => {
                let refusal = Refusal::new(Errno::EIO, "the thread of the vCPU or core has failed");
                Some(Answer::of_call(&call, Err(refusal)))
            }
        }
    }

    /// The commands that have waited, as far as none has to wait again.
    fn go_on(&mut self, id: ContextId) {
        while let Some(entry) = self.contexts.get_mut(id)
            && entry.job.is_none()
            && let Some((asked, call)) = entry.waiting.pop_front()
        {
            if let Some(answer) = self.for_context(id, asked, call) {
                self.late_reply(asked, &answer);
            }
        }
        self.reap(id);
    }

    /// A context is attached to nothing any more.
    fn comes_home(&mut self, id: ContextId, hosted: Hosted) {
        let Some(entry) = self.contexts.get_mut(id) else {
            return;
        };
        entry.generation = hosted.context().generation();
        let before = std::mem::replace(&mut entry.place, Attachment::home(hosted));
        if let Attachment::Attached(target) = before {
            self.contexts.detach(target, id);
        }
    }

    /// A vCPU or core has ended, and gives back what it had.
    fn ended(&mut self, target: Target, hosted: Option<Box<Hosted>>) {
        self.lists.outdated();
        let Some(hosted) = hosted else { return };
        let id = hosted.id();
        log::debug!("{target} has ended, and context {} is unloaded", id.0);
        self.comes_home(id, *hosted);
        if let Some(entry) = self.contexts.get_mut(id)
            && let Attachment::Detached { context, queue } = &mut entry.place
        {
            entry.told = true;
            context.ended(&mut **queue);
        }
        self.reap(id);
    }

    /// Nobody has the descriptor of a context any more.
    pub(super) fn abandoned(&mut self, id: ContextId) {
        let Some(entry) = self.contexts.get_mut(id) else {
            return;
        };
        // Or it would be told again and again.
        self.events.remove(&entry.socket);
        entry.zombie = true;
        self.connections.forget(id);
        self.reap(id);
    }

    /// Whether a load has to wait for `other`, whose last descriptor is closed:
    /// to whoever closed it, it is gone (3.1.15), though its vCPU still has it.
    pub(super) fn queue_load(
        &mut self,
        other: ContextId,
        waiting: (ContextId, RequestId, LoadArg),
    ) -> bool {
        let Some(entry) = self.contexts.get(other) else {
            return false;
        };
        // The closing came first, and yet the server may hear of it later.
        if !entry.zombie {
            if !is_closed(&entry.socket) {
                return false;
            }
            self.abandoned(other);
        }
        let Some(entry) = self.contexts.get_mut(other) else {
            return false;
        };
        entry.queued_loads.push_back(waiting);
        true
    }

    /// A zombie leaves its vCPU, if it is on one, and is gone.
    fn reap(&mut self, id: ContextId) {
        let Some(entry) = self.contexts.get_mut(id) else {
            return;
        };
        if !entry.zombie || entry.job.is_some() {
            return;
        }
        match entry.place {
            Attachment::Attached(target) => {
                entry.job = Some(None);
                self.machine.desk.post(id, target, Work::Unload);
            }
            Attachment::Detached { .. } => {
                log::debug!("context {} is destroyed", id.0);
                let queued_loads = self.contexts.remove(id).map(|entry| entry.queued_loads);
                for (waiting, asked, arg) in queued_loads.into_iter().flatten() {
                    if let Some(answer) = self.for_context(waiting, asked, Call::Load(arg)) {
                        self.late_reply(asked, &answer);
                    }
                }
            }
        }
    }
}

/// Whether the other end of a context's socket is closed.
fn is_closed(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    let at_once = Timespec::default();
    // An interrupted look is none; the server hears of it in any case.
    poll(&mut polled, Some(&at_once)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
}
