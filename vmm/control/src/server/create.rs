//! PFM_CREATE_CONTEXT (3.1.1).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use perfmon_abi::consts::PFM_FL_SYSTEM_WIDE;
use perfmon_abi::wire::{Call, Errno, Refusal};
use perfmon_abi::{CtxArg, Record};
use pmu_virt::perfmon::{Context, Sampler, SamplingFormat, Setup, Throttle};

use super::State;
use super::answer::{Answer, RequestId};
use super::contexts::{Attachment, ContextEntry};
use super::events::Token;
use crate::buffer::SharedBuffer;
use crate::message_queue::SocketQueue;
use crate::socket::{FileId, context_pair};

/// A sampler, and what of its buffer is handed out.
type Made = (Sampler, Option<(Arc<OwnedFd>, u64)>);

impl State {
    pub(super) fn create(
        &mut self,
        asked: RequestId,
        mut arg: CtxArg,
        format_arg: &[u8],
    ) -> Answer {
        match self.try_create(asked, &mut arg, format_arg) {
            Ok(answer) => answer,
            Err(refusal) => Answer::of_call(&Call::Create(arg, Vec::new()), Err(refusal)),
        }
    }

    fn try_create(
        &mut self,
        asked: RequestId,
        arg: &mut CtxArg,
        format_arg: &[u8],
    ) -> Result<Answer, Refusal> {
        let Some(connection) = self.connections.get(asked.connection) else {
            return Err(Errno::ECONNRESET.into());
        };
        let creator = connection.peer.clone();
        // The flags first: nothing is allocated for a context that cannot be.
        Context::new(self.machine.pmu.clone(), arg.flags, None)?;
        let format = self.format(arg, format_arg)?;
        self.limits
            .admit(&creator, arg.flags & PFM_FL_SYSTEM_WIDE != 0)?;
        if self.contexts.len() >= self.limits.contexts {
            let reason = format!(
                "there are {} contexts, and no more are made",
                self.contexts.len()
            );
            return Err(Refusal::new(Errno::ENOMEM, reason));
        }
        let made = match &format {
            Some(format) => Some(self.sampler(format, arg, format_arg)?),
            None => None,
        };
        let (sampler, buffer) =
            made.map_or((None, None), |(sampler, buffer)| (Some(sampler), buffer));
        let mut context = Context::new(self.machine.pmu.clone(), arg.flags, sampler)?;
        let khz = self.machine.tsc_khz.into();
        context.set_throttle(Throttle::per_second(self.limits.rate, khz));
        let (ours, theirs) = context_pair().map_err(no_descriptor)?;
        let file = FileId::of(theirs.as_fd()).map_err(no_descriptor)?;
        let id = self.contexts.next_id().ok_or(Errno::ENOMEM)?;
        self.events
            .add(&ours, Token::Context(id))
            .map_err(no_descriptor)?;
        let socket = Arc::new(ours);
        arg.fd = -1;
        arg.buffer_size = buffer.as_ref().map_or(0, |(_, size)| *size);
        let mut answer = Answer::done(arg.to_bytes());
        answer.fds.push(Arc::new(theirs));
        answer
            .fds
            .extend(buffer.iter().map(|(file, _)| file.clone()));
        answer.context = self
            .connections
            .get_mut(asked.connection)
            .map(|connection| connection.handles.bind(id));
        let entry = ContextEntry {
            file,
            socket: socket.clone(),
            buffer,
            creator,
            flags: arg.flags,
            format: format.map(|format| format.name().to_owned()),
            generation: context.generation(),
            sets: context.set_count(),
            place: Attachment::Detached {
                context: Box::new(context),
                queue: Box::new(SocketQueue::new(socket)),
            },
            job: None,
            waiting: VecDeque::new(),
            queued_loads: VecDeque::new(),
            zombie: false,
            told: false,
        };
        self.contexts.insert(id, entry);
        Ok(answer)
    }

    /// The format that is asked for.
    fn format(
        &self,
        arg: &CtxArg,
        format_arg: &[u8],
    ) -> Result<Option<Arc<dyn SamplingFormat>>, Refusal> {
        if arg.format == [0; 16] {
            return match format_arg.is_empty() {
                true => Ok(None),
                false => Err(Refusal::new(
                    Errno::EINVAL,
                    "there is an argument for a sampling format, and no format",
                )),
            };
        }
        let Some(format) = self.machine.formats.find(arg.format) else {
            let reason = "no sampling format with this UUID is registered";
            return Err(Refusal::new(Errno::EINVAL, reason));
        };
        if format_arg.len() != format.arg_size() {
            return Err(Refusal::new(
                Errno::EINVAL,
                format!(
                    "the argument of the sampling format {} has {} bytes, {} came",
                    format.name(),
                    format.arg_size(),
                    format_arg.len()
                ),
            ));
        }
        Ok(Some(format))
    }

    fn sampler(
        &self,
        format: &Arc<dyn SamplingFormat>,
        arg: &CtxArg,
        format_arg: &[u8],
    ) -> Result<Made, Refusal> {
        let setup = Setup {
            ctx_flags: arg.flags,
            num_pmds: u16::try_from(self.machine.pmu.pmds().len()).unwrap_or(u16::MAX),
            arg: format_arg,
        };
        format.validate(&setup)?;
        let size = format.size(&setup)?;
        if size == 0 {
            let sampler = Sampler::new(format.clone(), &setup, Box::new(Vec::new()))?;
            return Ok((sampler, None));
        }
        let (buffer, file) = SharedBuffer::new(size, &self.pool, self.limits.buffers)?;
        let sampler = Sampler::new(format.clone(), &setup, Box::new(buffer))?;
        Ok((sampler, Some((file, size as u64))))
    }
}

fn no_descriptor(error: io::Error) -> Refusal {
    Refusal::new(
        Errno::ENOMEM,
        format!("the VMM has no descriptor for a context: {error} (its limit: `ulimit -n`)"),
    )
}
