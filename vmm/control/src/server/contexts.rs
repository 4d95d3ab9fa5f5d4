//! Contexts: commands for them, their way to vCPUs and cores and back, and their
//! end.
//!
//! A detached context is here, and a command for it is done here. An attached one
//! belongs to a thread, and gets its commands as jobs. Answers that come later wait
//! in [`Contexts::take_answer`].

pub(super) mod asking;
mod create;
pub(super) mod table;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use perfmon_abi::LoadArg;
use perfmon_abi::consts::{PFM_FL_NO_ASK, PFM_FL_OVFL_NO_MSG, PFM_FL_SYSTEM_WIDE};
use perfmon_abi::wire::{Bound, Buffer, Call, Errno, Refusal, SystemWide};
use pmu_virt::perfmon::{AttachedContext, ContextId, GuestLimit, MAX_CONTEXTS, VirtualPmd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ServedVm;
use super::answer::{Answer, ConnectionId, RequestId};
use super::buffers::BufferKeeper;
use super::events::Events;
use crate::job::{Ask, Done, GivenUp, Target, Work};
use crate::message_queue::Bell;
use crate::quantities::NoQuantities;
use crate::socket::FileId;
use asking::{ASKED, AskingLoads, Begun, Concluded, Load};
use create::Creating;
pub(super) use create::{Created, Wanted};
use table::{Attachment, BELL_FILES, ContextEntry, ContextTable};

/// All contexts of the VM, and the way to its vCPUs.
#[derive(Debug)]
pub(super) struct Contexts {
    vm: ServedVm,
    table: ContextTable,
    events: Arc<Events>,
    buffers: BufferKeeper,
    /// Contexts that wait for their buffers, by the numbers of these.
    creating: BTreeMap<u64, Creating>,
    last_buffer: u64,
    /// Answers to requests that had to wait.
    answers: VecDeque<(RequestId, Answer)>,
    /// Loads for which the owners of counters are asked.
    asking: AskingLoads,
    /// Contexts whose last descriptor was closed since somebody asked.
    abandoned: Vec<ContextId>,
    /// How many contexts cores have got so far.
    core_loads: u64,
}

/// However the server's thread ends: nobody could unload a context that stays
/// behind, and a vCPU that is blocked for its tool would never go on.
impl Drop for Contexts {
    fn drop(&mut self) {
        self.buffers.end();
        for (id, entry) in self.table.iter() {
            if let Attachment::Attached(target) = entry.attachment {
                self.vm.dispatcher.post(id, target, Work::Unload);
            }
        }
    }
}

impl Contexts {
    pub(super) fn new(vm: ServedVm, events: Arc<Events>) -> Self {
        Self {
            buffers: BufferKeeper::new(vm.dispatcher.outbox()),
            creating: BTreeMap::new(),
            last_buffer: 0,
            vm,
            table: ContextTable::default(),
            events,
            answers: VecDeque::new(),
            asking: AskingLoads::default(),
            abandoned: Vec::new(),
            core_loads: 0,
        }
    }

    pub(super) fn vm(&self) -> &ServedVm {
        &self.vm
    }

    pub(super) fn table(&self) -> &ContextTable {
        &self.table
    }

    /// The next answer to a request that had to wait.
    pub(super) fn take_answer(&mut self) -> Option<(RequestId, Answer)> {
        self.answers.pop_front()
    }

    /// The contexts that were abandoned since the last call: handles lead to them
    /// no more.
    pub(super) fn take_abandoned(&mut self) -> Vec<ContextId> {
        std::mem::take(&mut self.abandoned)
    }

    /// A connection has ended: nobody waits for what it has requested.
    pub(super) fn forget(&mut self, connection: ConnectionId) {
        for id in self.table.forget(connection) {
            self.give_back(id);
        }
        for id in self.asking.of(connection) {
            // Nobody reads the answer.
            self.cancel_load(id);
        }
        self.creating.retain(|_, one| !one.is_of(connection));
    }

    /// SYSTEM_WIDE: who counts on cores.
    pub(super) fn system_wide(&self) -> SystemWide {
        SystemWide {
            contexts: u32::try_from(self.table.on_cores()).unwrap_or(u32::MAX),
            loads: self.core_loads,
        }
    }

    /// BIND: the context whose descriptor somebody shows. The answer lacks the
    /// handle.
    pub(super) fn bind(&self, fds: &[OwnedFd]) -> Result<(ContextId, Answer), Refusal> {
        let file = fds.first().and_then(|fd| FileId::of(fd.as_fd()).ok());
        let id = file.and_then(|file| self.table.of_file(file));
        let Some((id, entry)) = id.and_then(|id| Some((id, self.table.get(id)?))) else {
            let reason = "the descriptor is not that of a context of this VM";
            return Err(Refusal::new(Errno::EBADF, reason));
        };
        let bound = Bound {
            flags: entry.flags,
            generation: entry.generation,
            buffer_size: entry.buffer.as_ref().map_or(0, |(_, size)| *size),
        };
        Ok((id, Answer::done(bound.to_bytes())))
    }

    /// GET_BUFFER: the sampling buffer of a context.
    pub(super) fn buffer(&self, id: ContextId) -> Result<Answer, Refusal> {
        let entry = self.table.get(id).ok_or(Errno::EBADF)?;
        let Some((file, size)) = &entry.buffer else {
            let reason = "the context has no sampling buffer";
            return Err(Refusal::new(Errno::EINVAL, reason));
        };
        Ok(Answer {
            file: Some(file.clone()),
            ..Answer::done(Buffer { size: *size }.to_bytes())
        })
    }

    /// BELL: what rings for the overflows of a context with `PFM_FL_OVFL_NO_MSG` from now on,
    /// in place of empty records. Bells take no more descriptors than contexts leave of
    /// `most_files`.
    pub(super) fn bell(&self, id: ContextId, most_files: usize) -> Result<Answer, Refusal> {
        let entry = self.table.get(id).ok_or(Errno::EBADF)?;
        if entry.flags & PFM_FL_OVFL_NO_MSG == 0 {
            let reason = "a bell is for contexts with PFM_FL_OVFL_NO_MSG";
            return Err(Refusal::new(Errno::EINVAL, reason));
        }
        if entry.bell.get().is_none() {
            let is_room = self.table.files() + BELL_FILES <= most_files;
            let bell = is_room.then(Bell::new).and_then(Result::ok);
            let bell = bell.ok_or_else(|| {
                let reason = "the VMM has no descriptors for a bell; overflows are empty records";
                Refusal::new(Errno::ENOMEM, reason)
            })?;
            // This thread alone makes bells.
            let _ = entry.bell.set(bell);
        }
        let bell = entry.bell.get().map(|bell| bell.socket.try_clone());
        let bell = bell.transpose().map_err(|_| Errno::ENOMEM)?;
        Ok(Answer {
            fd: bell,
            ..Answer::default()
        })
    }

    /// What a context reads from now on, as the VM has ended.
    pub(super) fn last_counts(&mut self, id: ContextId) -> Option<Vec<u8>> {
        match &mut self.table.get_mut(id)?.attachment {
            Attachment::Detached { context, .. } => context.last_counts(),
            Attachment::Attached(_) => None,
        }
    }

    /// A command for a context. It is done here, or by the thread that has the
    /// context; then there is no answer yet.
    pub(super) fn call(&mut self, id: ContextId, request: RequestId, call: Call) -> Option<Answer> {
        if reads_memory(&call)
            && let Some(memory) = &mut self.vm.memory
        {
            memory.refresh();
        }
        let Some(entry) = self.table.get_mut(id) else {
            let reason = "the context is gone";
            let refusal = Refusal::new(Errno::EBADF, reason);
            return Some(Answer::of_call(&call, Err(refusal)));
        };
        if entry.job.is_some() {
            entry.waiting.push_back((request, call));
            return None;
        }
        let target = match &entry.attachment {
            Attachment::Detached { .. } => return self.call_detached(id, request, call),
            Attachment::Attached(target) => *target,
        };
        let work = match call {
            Call::Load(_) | Call::TryLoad(_) => {
                let reason = format!("the context is attached to {target}; unload it first");
                let refusal = Refusal::new(Errno::EBUSY, reason);
                return Some(Answer::of_call(&call, Err(refusal)));
            }
            Call::Unload => Work::Unload,
            call => Work::Call(call),
        };
        entry.job = Some(Some(request));
        self.vm.dispatcher.post(id, target, work);
        None
    }

    fn call_detached(
        &mut self,
        id: ContextId,
        request: RequestId,
        mut call: Call,
    ) -> Option<Answer> {
        let result = match &call {
            Call::Load(arg) | Call::TryLoad(arg) => {
                let waits = matches!(call, Call::Load(_));
                match self.load(id, (request, waits), *arg) {
                    Ok(()) => return None,
                    Err(refusal) => Err(refusal),
                }
            }
            // What was given up for a load that comes later goes back, too.
            Call::Unload if self.cancel_load(id) | self.give_back(id) => Ok(()),
            Call::Unload => {
                let reason = "the context is attached to nothing (3.1.8)";
                Err(Refusal::new(Errno::EBUSY, reason))
            }
            _ => {
                self.asking.forget_refusals(id);
                self.do_detached(id, &mut call)
            }
        };
        Some(Answer::of_call(&call, result))
    }

    fn do_detached(&mut self, id: ContextId, call: &mut Call) -> Result<(), Refusal> {
        if let Call::CreateEvtsets(sets) = call {
            // As if none of them were there already.
            self.table.room_for_sets(sets.len())?;
        }
        let attachment = self.table.get_mut(id).map(|entry| &mut entry.attachment);
        let Some(Attachment::Detached { context, .. }) = attachment else {
            return Err(Errno::EBADF.into());
        };
        let result = context.call(call, &NoQuantities);
        if matches!(call, Call::CreateEvtsets(_) | Call::DeleteEvtsets(_)) {
            self.table.recount_sets(id);
        }
        result
    }

    /// Sends a context on its way to a vCPU or core (3.1.7).
    fn load(
        &mut self,
        id: ContextId,
        (request, waits): (RequestId, bool),
        arg: LoadArg,
    ) -> Result<(), Refusal> {
        if waits {
            self.asking.forget_refusals(id);
        } else if let Some(refusal) = self.asking.take_refusal(id, arg) {
            return Err(refusal);
        }
        if self.asking.has(id) {
            let (errno, reason) = if waits {
                (Errno::EBUSY, "another load of the context waits")
            } else {
                (Errno::EAGAIN, ASKED)
            };
            return Err(Refusal::new(errno, reason));
        }
        let started = self.start_load(Load {
            context: id,
            request,
            arg,
            waits,
            rounds: 0,
        });
        if started.is_err() {
            self.give_back(id);
        }
        started
    }

    fn start_load(&mut self, load: Load) -> Result<(), Refusal> {
        let Load {
            context: id, arg, ..
        } = load;
        let entry = self.table.get(id).ok_or(Errno::EBADF)?;
        let Attachment::Detached { context, .. } = &entry.attachment else {
            return Err(Errno::EBUSY.into());
        };
        let target = self.target(entry.flags, arg.pid)?;
        context.prepare_load(arg.set)?;
        for other in self.table.at(target).to_vec() {
            if self.queue_load(other, load) {
                return Ok(());
            }
        }
        self.check_places(target)?;
        let entry = self.table.get_mut(id).ok_or(Errno::EBADF)?;
        match std::mem::replace(&mut entry.attachment, Attachment::Attached(target)) {
            Attachment::Detached { context, queue } => {
                entry.job = Some(Some(load.request));
                entry.load = Some(load);
                let creator = entry.creator.clone();
                let mut hosted = AttachedContext::new(id, context, queue);
                let filter = self.vm.events.tool(creator.uid, &creator.groups);
                hosted.set_filter(filter.clone());
                self.table.attach(target, id);
                let counters = hosted.counters();
                let job = self
                    .vm
                    .dispatcher
                    .job(id, target, Work::Load(hosted, arg.set));
                match &self.vm.lease_desk {
                    Some(desk) => desk.load(job, counters, &creator),
                    None => self.vm.dispatcher.forward(job),
                }
                Ok(())
            }
            attached @ Attachment::Attached(_) => {
                entry.attachment = attached;
                Err(Errno::EBUSY.into())
            }
        }
    }

    /// Refuses one more context of `target`, if it has as many as it may.
    fn check_places(&self, target: Target) -> Result<(), Refusal> {
        let (there, most) = (self.table.at(target), self.vm.contexts_per_vcpu);
        if there.len() < most {
            return Ok(());
        }
        let numbers: Vec<String> = there.iter().map(|id| id.0.to_string()).collect();
        let numbers = numbers.join(", ");
        let has = match there {
            [_] => format!("a context already: number {numbers}"),
            more => format!("{} contexts already: numbers {numbers}", more.len()),
        };
        let next = if most < MAX_CONTEXTS {
            "unload one, or run the VM with a larger --contexts-per-vcpu"
        } else {
            "unload one"
        };
        let reason = format!("{target} has {has}; {next}");
        Err(Refusal::new(Errno::EBUSY, reason))
    }

    /// The vCPU or core that a load names: by its own number, or by that of its thread
    /// (3.1.7).
    fn target(&self, flags: u32, number: i32) -> Result<Target, Refusal> {
        let dispatcher = &self.vm.dispatcher;
        let core = flags & PFM_FL_SYSTEM_WIDE != 0;
        let (count, what, of_thread) = if core {
            (
                dispatcher.cores(),
                "core",
                dispatcher.core_of_thread(number),
            )
        } else {
            (
                dispatcher.vcpus(),
                "vCPU",
                dispatcher.vcpu_of_thread(number),
            )
        };
        let own = usize::try_from(number).ok().filter(|&n| n < count);
        let Some(number) = own.or(of_thread) else {
            let reason = format!(
                "there is no {what} {number}, and no thread of that number is one; there are 0 to {}",
                count - 1
            );
            return Err(Refusal::new(Errno::ESRCH, reason));
        };
        Ok(if core {
            Target::Core(number)
        } else {
            Target::Vcpu(number)
        })
    }

    /// Has a load wait for `other`, if the last descriptor of `other` is closed: to
    /// whoever closed it, it is gone (3.1.15), though its vCPU still has it.
    fn queue_load(&mut self, other: ContextId, load: Load) -> bool {
        let Some(entry) = self.table.get(other) else {
            return false;
        };
        // The closing came first, and yet the server may hear of it later.
        if !entry.zombie {
            if !is_closed(&entry.socket) {
                return false;
            }
            self.abandoned(other);
        }
        let Some(entry) = self.table.get_mut(other) else {
            return false;
        };
        entry.queued_loads.push(load);
        true
    }

    /// A job for a context came back.
    pub(super) fn job_done(&mut self, id: ContextId, done: Done) {
        let request = match self.table.get_mut(id) {
            Some(entry) => entry.job.take().flatten(),
            None => None,
        };
        let answer = match done {
            Done::Loaded(Ok(())) => {
                if let Some(entry) = self.table.get_mut(id) {
                    entry.generation = entry.generation.wrapping_add(1);
                    entry.end_sent = false;
                    self.core_loads += u64::from(entry.flags & PFM_FL_SYSTEM_WIDE != 0);
                }
                Some(Answer::default())
            }
            Done::Loaded(Err(not)) => {
                self.detach(id, *not.hosted);
                self.not_loaded(id, not.beside, not.refusal)
                    .map(Answer::from)
            }
            Done::Undone(Work::Load(hosted, _)) => {
                self.detach(id, *hosted);
                self.give_back(id);
                let reason = "the vCPU or core has ended";
                Some(Refusal::new(Errno::EBUSY, reason).into())
            }
            Done::Called(call, result) => Some(Answer::of_call(&call, result)),
            Done::Unloaded(hosted) => {
                if let Some(hosted) = hosted {
                    self.detach(id, *hosted);
                    self.give_back(id);
                }
                Some(Answer::default())
            }
            // The context was detached in the meantime, as its vCPU has ended.
            Done::Undone(Work::Call(call)) => {
                request.and_then(|request| self.call_undone(id, request, call))
            }
            Done::Undone(Work::Unload) => Some(Answer::default()),
            Done::Inspected(_)
            | Done::Administered(..)
            | Done::Asked(_)
            | Done::Settled
            | Done::Undone(Work::Inspect | Work::Administer(..) | Work::Ask(_) | Work::Lease(_)) => {
                None
            }
        };
        if let (Some(request), Some(answer)) = (request, answer) {
            self.answers.push_back((request, answer));
        }
        let is_awaited = |entry: &ContextEntry| entry.zombie || !entry.waiting.is_empty();
        if self.table.get(id).is_some_and(is_awaited) {
            self.go_on(id);
        }
    }

    /// A load found no room. The answer to it, unless that comes later: owners of
    /// counters that would leave it room, if they kept to `beside`, are asked.
    fn not_loaded(
        &mut self,
        id: ContextId,
        beside: Option<GuestLimit>,
        refusal: Refusal,
    ) -> Option<Refusal> {
        let entry = self.table.get(id);
        let asks = |entry: &&ContextEntry| !entry.zombie && entry.flags & PFM_FL_NO_ASK == 0;
        let load = entry.filter(asks).and_then(|entry| entry.load);
        let target = entry
            .zip(load)
            .map(|(entry, load)| self.target(entry.flags, load.arg.pid));
        let (Some(load), Some(Ok(target)), Some(limit)) = (load, target, beside) else {
            self.give_back(id);
            return Some(refusal);
        };
        let answer = self.ask_owners((load, target), limit, refusal);
        if !self.asking.has(id) {
            self.give_back(id);
        }
        answer
    }

    /// A load found no room, and would if owners kept to `limit`: they are asked. The
    /// answer to it, unless it comes later.
    fn ask_owners(
        &mut self,
        (load, target): (Load, Target),
        limit: GuestLimit,
        refusal: Refusal,
    ) -> Option<Refusal> {
        let vcpus = self.vm.dispatcher.vcpus();
        match self.asking.begin(load, refusal, vcpus) {
            Begun::Spent(refusal) => return Some(refusal),
            Begun::Later => {}
            Begun::Now => {
                for vcpu in 0..vcpus {
                    // On cores of their own vCPUs never meet.
                    let is_there = self.vm.dispatcher.shares_cores() || vcpu == target.number();
                    self.ask(load.context, vcpu, Ask::KeepTo { limit, is_there });
                }
                log::debug!("context {}: owners of counters are asked", load.context.0);
            }
        }
        (!load.waits).then(|| Refusal::new(Errno::EAGAIN, ASKED))
    }

    fn ask(&self, id: ContextId, vcpu: usize, ask: Ask) {
        let work = Work::Ask(ask);
        self.vm.dispatcher.post(id, Target::Vcpu(vcpu), work);
    }

    /// A vCPU has answered, or has ended: then it keeps nothing.
    pub(super) fn owners_answered(
        &mut self,
        id: ContextId,
        target: Target,
        answer: Result<Option<GivenUp>, String>,
    ) {
        for vcpu in self.asking.answered(id, target.number(), answer) {
            self.ask(id, vcpu, Ask::NoMore);
        }
        self.conclude();
    }

    /// Goes on with the load once every vCPU has answered, and with those after it.
    fn conclude(&mut self) {
        let Some(concluded) = self.asking.conclude() else {
            return;
        };
        match concluded {
            Concluded::Again(load) => self.load_again(load),
            Concluded::Failed(id, answer) => {
                self.return_given(id);
                self.refuse(answer);
            }
        }
        while let Some(load) = self.asking.next() {
            self.load_again(load);
        }
    }

    /// Goes on with a load that has waited. A tool that does not wait for it comes again.
    fn load_again(&mut self, load: Load) {
        if !load.waits {
            return;
        }
        if let Err(refusal) = self.start_load(load) {
            self.give_back(load.context);
            self.refuse(Some((load.request, refusal)));
        }
    }

    fn refuse(&mut self, refused: Option<(RequestId, Refusal)>) {
        let answers = refused.map(|(request, refusal)| (request, refusal.into()));
        self.answers.extend(answers);
    }

    /// Nobody waits for the load of a context any more. Whether there was one.
    fn cancel_load(&mut self, id: ContextId) -> bool {
        let canceled = self.asking.cancel(id);
        self.refuse(canceled.refused);
        if canceled.before_its_turn {
            self.give_back(id);
        }
        for vcpu in canceled.in_vain {
            self.ask(id, vcpu, Ask::NoMore);
        }
        canceled.any
    }

    /// A context needs the counters no longer that owners gave up for it, and why its loads
    /// failed is of no interest. Whether there were any counters.
    fn give_back(&mut self, id: ContextId) -> bool {
        self.asking.forget_refusals(id);
        self.return_given(id)
    }

    fn return_given(&mut self, id: ContextId) -> bool {
        let given = self.asking.take_given(id);
        let any = !given.is_empty();
        for (vcpu, given) in given {
            self.ask(id, vcpu, Ask::GiveBack(given));
        }
        any
    }

    /// A command that nobody has done.
    fn call_undone(&mut self, id: ContextId, request: RequestId, call: Call) -> Option<Answer> {
        match self.table.get(id).map(|entry| &entry.attachment) {
            Some(Attachment::Detached { .. }) => self.call_detached(id, request, call),
            // The thread ended without a word.
            _ => {
                let refusal = Refusal::new(Errno::EIO, "the thread of the vCPU or core has failed");
                Some(Answer::of_call(&call, Err(refusal)))
            }
        }
    }

    /// Does the commands that have waited, as far as none has to wait again.
    fn go_on(&mut self, id: ContextId) {
        while let Some(entry) = self.table.get_mut(id)
            && entry.job.is_none()
            && let Some((request, call)) = entry.waiting.pop_front()
        {
            if let Some(answer) = self.call(id, request, call) {
                self.answers.push_back((request, answer));
            }
        }
        self.reap(id);
    }

    /// The context is attached to nothing any more.
    fn detach(&mut self, id: ContextId, hosted: AttachedContext) {
        let Some(entry) = self.table.get_mut(id) else {
            return;
        };
        entry.generation = hosted.context().generation();
        let before = std::mem::replace(&mut entry.attachment, Attachment::detached(hosted));
        if let Attachment::Attached(target) = before {
            self.table.detach(target, id);
            if let Some(desk) = &self.vm.lease_desk {
                desk.left(id);
            }
        }
    }

    /// A vCPU or core has ended, and gives back the contexts that it had.
    pub(super) fn ended(&mut self, target: Target, contexts: Vec<AttachedContext>) {
        for hosted in contexts {
            self.end_on(target, hosted);
        }
    }

    fn end_on(&mut self, target: Target, hosted: AttachedContext) {
        let id = hosted.id();
        log::debug!("{target} has ended, and context {} is unloaded", id.0);
        self.detach(id, hosted);
        self.give_back(id);
        if let Some(entry) = self.table.get_mut(id)
            && let Attachment::Detached { context, queue } = &mut entry.attachment
        {
            entry.end_sent = true;
            context.ended(&mut **queue);
        }
        self.reap(id);
    }

    /// Nobody has the descriptor of a context any more.
    pub(super) fn abandoned(&mut self, id: ContextId) {
        let Some(entry) = self.table.get_mut(id) else {
            return;
        };
        // Or the end of its socket would be reported again and again.
        self.events.remove(&entry.socket);
        entry.zombie = true;
        self.abandoned.push(id);
        self.cancel_load(id);
        self.reap(id);
    }

    /// A zombie leaves its vCPU, if it is on one, and is destroyed.
    fn reap(&mut self, id: ContextId) {
        let Some(entry) = self.table.get_mut(id) else {
            return;
        };
        if !entry.zombie || entry.job.is_some() {
            return;
        }
        if let Attachment::Attached(target) = entry.attachment {
            entry.job = Some(None);
            self.vm.dispatcher.post(id, target, Work::Unload);
            return;
        }
        log::debug!("context {} is destroyed", id.0);
        let loads = self.table.remove(id).map(|entry| entry.queued_loads);
        self.give_back(id);
        for load in loads.into_iter().flatten() {
            let call = if load.waits {
                Call::Load(load.arg)
            } else {
                Call::TryLoad(load.arg)
            };
            if let Some(answer) = self.call(load.context, load.request, call) {
                self.answers.push_back((load.request, answer));
            }
        }
    }
}

/// Whether the other end of a context's socket is closed.
fn is_closed(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    let at_once = Timespec::default();
    // If the call is interrupted, the server hears of the end later.
    poll(&mut polled, Some(&at_once)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
}

/// Whether a command needs to know what the guest's memory takes. The host is
/// asked only then.
fn reads_memory(call: &Call) -> bool {
    let memory = VirtualPmd::GuestMemory.pmd();
    matches!(call, Call::ReadPmds(pmds) if pmds.iter().any(|pmd| pmd.num == memory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use perfmon_abi::PmdArg;

    #[test]
    fn the_host_is_asked_for_memory_by_whoever_reads_it() {
        let check = |nums: &[u16], expected| {
            let pmd = |&num| PmdArg {
                num,
                ..PmdArg::default()
            };
            let pmds: Vec<PmdArg> = nums.iter().map(pmd).collect();
            assert_eq!(reads_memory(&Call::ReadPmds(pmds.clone())), expected);
            assert!(!reads_memory(&Call::WritePmds(pmds)));
        };
        let memory = VirtualPmd::GuestMemory.pmd();
        check(&[], false);
        check(&[0, memory - 1, memory + 1], false);
        check(&[0, memory], true);
    }
}
