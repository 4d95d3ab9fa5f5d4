//! From a request to its answer, or to a job.

use std::os::fd::{AsFd, OwnedFd};

use perfmon_abi::LoadArg;
use perfmon_abi::consts::{PFM_FL_SYSTEM_WIDE, PFM_VERSION};
use perfmon_abi::wire::{
    Bound, Buffer, Call, Errno, Extension, Hello, MAX_PACKET, Refusal, Request,
};
use pmu_virt::perfmon::{ContextId, Hosted, VirtualPmd};

use super::State;
use super::answer::{Answer, RequestId};
use super::contexts::Attachment;
use crate::dispatcher::{Target, Work};
use crate::quantities::NoQuantities;
use crate::socket::{FileId, Packet};

/// The first number of the protocol's own commands.
const EXTENSIONS: u16 = 0x100;

impl State {
    /// The answer to a request; `None` if it comes later.
    pub(super) fn command(
        &mut self,
        asked: RequestId,
        request: &Request<'_>,
        packet: Packet,
    ) -> Option<Answer> {
        let answer = self.obey(asked, request, &packet);
        self.discard(packet.fds);
        answer
    }

    fn obey(&mut self, asked: RequestId, request: &Request<'_>, packet: &Packet) -> Option<Answer> {
        let wants = usize::from(request.command == Extension::Bind.number());
        if packet.fds.len() != wants || packet.more_fds {
            let reason = match wants {
                0 => "the command takes no descriptor; those that came are closed",
                _ => "BIND takes one descriptor, that of a context",
            };
            let errno = if wants == 0 {
                Errno::EINVAL
            } else {
                Errno::EBADF
            };
            return Some(Refusal::new(errno, reason).into());
        }
        match request.command < EXTENSIONS {
            true => self.specified(asked, request),
            false => self.extension(asked, request, &packet.fds),
        }
    }

    /// A command of the specification.
    fn specified(&mut self, asked: RequestId, request: &Request<'_>) -> Option<Answer> {
        let Request {
            command,
            nargs,
            payload,
            context,
            ..
        } = *request;
        let call = match Call::decode(command, nargs, payload, self.limits.arg_size) {
            Ok(call) => call,
            Err(refusal) => return Some(refusal.into()),
        };
        if Call::needs_context(command) {
            let connection = self.connections.get(asked.connection)?;
            return match connection.handles.get(context) {
                Ok(id) => self.for_context(id, asked, call),
                Err(refusal) => Some(Answer::of_call(&call, Err(refusal))),
            };
        }
        Some(self.without_context(asked, call))
    }

    fn without_context(&mut self, asked: RequestId, mut call: Call) -> Answer {
        let pmu = &self.machine.pmu;
        let result = match &mut call {
            Call::Create(arg, format_arg) => {
                return self.create(asked, *arg, format_arg);
            }
            Call::GetinfoPmcs(vector) => pmu.getinfo_pmcs(vector),
            Call::GetinfoPmds(vector) => pmu.getinfo_pmds(vector),
            Call::GetConfig(config) => {
                *config = self.limits.get(pmu);
                Ok(())
            }
            Call::SetConfig(config) => match self.connections.get(asked.connection) {
                Some(connection) => self.limits.set(&connection.peer, config),
                None => Err(Errno::ECONNRESET.into()),
            },
            _ => Err(Errno::EBADF.into()),
        };
        Answer::of_call(&call, result)
    }

    /// A command for a context: done here, or by the thread that has it.
    pub(super) fn for_context(
        &mut self,
        id: ContextId,
        asked: RequestId,
        call: Call,
    ) -> Option<Answer> {
        if reads_memory(&call)
            && let Some(memory) = &mut self.machine.memory
        {
            memory.refresh();
        }
        let Some(entry) = self.contexts.get_mut(id) else {
            let reason = "the context is gone";
            return Some(Answer::of_call(
                &call,
                Err(Refusal::new(Errno::EBADF, reason)),
            ));
        };
        if entry.job.is_some() {
            entry.waiting.push_back((asked, call));
            return None;
        }
        let target = match &entry.place {
            Attachment::Detached { .. } => return self.at_home(id, asked, call),
            Attachment::Attached(target) => *target,
        };
        let work = match call {
            Call::Load(_) => {
                let reason = format!("the context is attached to {target}; unload it first");
                let refusal = Refusal::new(Errno::EBUSY, reason);
                return Some(Answer::of_call(&call, Err(refusal)));
            }
            Call::Unload => Work::Unload,
            call => Work::Call(call),
        };
        entry.job = Some(Some(asked));
        self.machine.desk.post(id, target, work);
        None
    }

    /// A command for a context that is attached to nothing.
    pub(super) fn at_home(
        &mut self,
        id: ContextId,
        asked: RequestId,
        mut call: Call,
    ) -> Option<Answer> {
        let result = match &call {
            Call::Load(arg) => match self.load(id, asked, *arg) {
                Ok(()) => return None,
                Err(refusal) => Err(refusal),
            },
            Call::Unload => {
                let reason = "the context is attached to nothing (3.1.8)";
                Err(Refusal::new(Errno::EBUSY, reason))
            }
            _ => self.call_at_home(id, &mut call),
        };
        Some(Answer::of_call(&call, result))
    }

    fn call_at_home(&mut self, id: ContextId, call: &mut Call) -> Result<(), Refusal> {
        if let Call::CreateEvtsets(sets) = call {
            // As if none of them were there already.
            self.contexts.room_for_sets(sets.len())?;
        }
        let result = match self.contexts.get_mut(id).map(|entry| &mut entry.place) {
            Some(Attachment::Detached { context, queue }) => {
                context.call(call, &NoQuantities, &mut **queue)
            }
            _ => return Err(Errno::EBADF.into()),
        };
        if matches!(call, Call::CreateEvtsets(_) | Call::DeleteEvtsets(_)) {
            self.contexts.recount_sets(id);
        }
        result
    }

    /// Sends a context on its way to a vCPU or core (3.1.7).
    fn load(&mut self, id: ContextId, asked: RequestId, arg: LoadArg) -> Result<(), Refusal> {
        let Some(entry) = self.contexts.get_mut(id) else {
            return Err(Errno::EBADF.into());
        };
        let Attachment::Detached { context, .. } = &entry.place else {
            return Err(Errno::EBUSY.into());
        };
        let desk = &self.machine.desk;
        let core = entry.flags & PFM_FL_SYSTEM_WIDE != 0;
        let (count, what) = match core {
            true => (desk.cores(), "core"),
            false => (desk.vcpus(), "vCPU"),
        };
        let number = usize::try_from(arg.pid).ok().filter(|&n| n < count);
        let number = number.ok_or_else(|| {
            let reason = format!(
                "there is no {what} {}; there are 0 to {}",
                arg.pid,
                count - 1
            );
            Refusal::new(Errno::ESRCH, reason)
        })?;
        context.prepare_load(arg.set)?;
        let target = match core {
            true => Target::Core(number),
            false => Target::Vcpu(number),
        };
        if let Some(other) = self.contexts.at(target) {
            if self.queue_load(other, (id, asked, arg)) {
                return Ok(());
            }
            let reason = format!("{target} has a context already: number {}", other.0);
            return Err(Refusal::new(Errno::EBUSY, reason));
        }
        let Some(entry) = self.contexts.get_mut(id) else {
            return Err(Errno::EBADF.into());
        };
        match std::mem::replace(&mut entry.place, Attachment::Attached(target)) {
            Attachment::Detached { context, queue } => {
                entry.job = Some(Some(asked));
                let hosted = Hosted::new(id, context, queue);
                self.contexts.attach(target, id);
                self.machine
                    .desk
                    .post(id, target, Work::Load(hosted, arg.set));
                Ok(())
            }
            away @ Attachment::Attached(_) => {
                entry.place = away;
                Err(Errno::EBUSY.into())
            }
        }
    }

    /// A command of the protocol's own.
    fn extension(
        &mut self,
        asked: RequestId,
        request: &Request<'_>,
        fds: &[OwnedFd],
    ) -> Option<Answer> {
        let extension = Extension::decode(request.command, request.nargs, request.payload);
        let answer = extension.and_then(|extension| {
            Ok(Some(match extension {
                Extension::Hello => Answer::done(self.hello().to_bytes()),
                Extension::Bind => self.bind(asked, fds)?,
                Extension::Unbind => match self.connections.get_mut(asked.connection) {
                    Some(connection) => {
                        connection.handles.unbind(request.context)?;
                        Answer::default()
                    }
                    None => return Err(Errno::ECONNRESET.into()),
                },
                Extension::GetBuffer => self.get_buffer(asked, request.context)?,
                Extension::Formats => Answer::json(&self.formats()),
                Extension::List => return Ok(self.look(asked)),
                Extension::Model => Answer::json(&self.model()),
            }))
        });
        answer.unwrap_or_else(|refusal| Some(refusal.into()))
    }

    fn hello(&self) -> Hello {
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Hello {
            pid: std::process::id(),
            version: PFM_VERSION,
            max_packet: number(MAX_PACKET),
            vcpus: number(self.machine.desk.vcpus()),
            cores: number(self.machine.desk.cores()),
        }
    }

    /// Whoever shows a context's descriptor gets a name for it.
    fn bind(&mut self, asked: RequestId, fds: &[OwnedFd]) -> Result<Answer, Refusal> {
        let file = fds.first().and_then(|fd| FileId::of(fd.as_fd()).ok());
        let id = file.and_then(|file| self.contexts.of_file(file));
        let entry = id.and_then(|id| Some((id, self.contexts.get(id)?)));
        let Some((id, entry)) = entry else {
            let reason = "the descriptor is not that of a context of this VM";
            return Err(Refusal::new(Errno::EBADF, reason));
        };
        let bound = Bound {
            flags: entry.flags,
            generation: entry.generation,
            buffer_size: entry.buffer.as_ref().map_or(0, |(_, size)| *size),
        };
        let Some(connection) = self.connections.get_mut(asked.connection) else {
            return Err(Errno::ECONNRESET.into());
        };
        let mut answer = Answer::done(bound.to_bytes());
        answer.context = Some(connection.handles.bind(id));
        Ok(answer)
    }

    fn get_buffer(&self, asked: RequestId, handle: u32) -> Result<Answer, Refusal> {
        let Some(connection) = self.connections.get(asked.connection) else {
            return Err(Errno::ECONNRESET.into());
        };
        let id = connection.handles.get(handle)?;
        let entry = self.contexts.get(id).ok_or(Errno::EBADF)?;
        let Some((file, size)) = &entry.buffer else {
            let reason = "the context has no sampling buffer";
            return Err(Refusal::new(Errno::EINVAL, reason));
        };
        let mut answer = Answer::done(Buffer { size: *size }.to_bytes());
        answer.fds.push(file.clone());
        Ok(answer)
    }
}

/// Whether a command needs to know what the guest's memory takes, which is worth
/// asking the host for only then.
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
