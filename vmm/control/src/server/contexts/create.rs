//! PFM_CREATE_CONTEXT (3.1.1).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use perfmon_abi::consts::PFM_FL_SYSTEM_WIDE;
use perfmon_abi::wire::{Errno, Refusal};
use perfmon_abi::{CtxArg, Record};
use pmu_virt::perfmon::{Context, ContextId, Sampler, SamplingFormat, Setup, Throttle};

use super::Contexts;
use super::table::{Attachment, ContextEntry};
use crate::buffer::SharedBuffer;
use crate::message_queue::SocketQueue;
use crate::server::answer::Answer;
use crate::server::events::Token;
use crate::server::limits::Limits;
use crate::socket::{FileId, context_pair};
use umpire_socket::Peer;

/// A sampler, and the file and size of its buffer.
type Made = (Sampler, Option<(Arc<OwnedFd>, u64)>);

impl Contexts {
    /// Makes a context for `creator`. The answer lacks the handle.
    pub(in crate::server) fn create(
        &mut self,
        creator: Peer,
        limits: &Limits,
        arg: &mut CtxArg,
        format_arg: &[u8],
    ) -> Result<(ContextId, Answer), Refusal> {
        // Flags are checked first, so that a refused context allocates nothing.
        Context::new(self.vm.pmu.clone(), arg.flags, None)?;
        let format = self.format(arg, format_arg)?;
        limits.admit(&creator, arg.flags & PFM_FL_SYSTEM_WIDE != 0)?;
        if self.table.len() >= limits.contexts {
            let reason = format!(
                "there are {} contexts, and no more are made",
                self.table.len()
            );
            return Err(Refusal::new(Errno::ENOMEM, reason));
        }
        let made = match &format {
            Some(format) => Some(self.sampler(format, arg, format_arg, limits.buffers)?),
            None => None,
        };
        let (sampler, buffer) =
            made.map_or((None, None), |(sampler, buffer)| (Some(sampler), buffer));
        let mut context = Context::new(self.vm.pmu.clone(), arg.flags, sampler)?;
        let khz = self.vm.tsc_khz.into();
        context.set_throttle(Throttle::per_second(limits.rate, khz));
        let (ours, theirs) = context_pair().map_err(no_descriptor)?;
        let file = FileId::of(theirs.as_fd()).map_err(no_descriptor)?;
        let id = self.table.next_id().ok_or(Errno::ENOMEM)?;
        self.events
            .add(&ours, Token::Context(id))
            .map_err(no_descriptor)?;
        let socket = Arc::new(ours);
        arg.fd = -1;
        arg.buffer_size = buffer.as_ref().map_or(0, |(_, size)| *size);
        let mut answer = Answer::done(arg.to_bytes());
        answer.fds.push(Arc::new(theirs));
        let buffer_file = buffer.iter().map(|(file, _)| file.clone());
        answer.fds.extend(buffer_file);
        let entry = ContextEntry {
            file,
            socket: socket.clone(),
            buffer,
            creator,
            flags: arg.flags,
            format: format.map(|format| format.name().to_owned()),
            generation: context.generation(),
            sets: context.set_count(),
            attachment: Attachment::Detached {
                context: Box::new(context),
                queue: Box::new(SocketQueue::new(socket)),
            },
            job: None,
            waiting: VecDeque::new(),
            queued_loads: Vec::new(),
            load: None,
            zombie: false,
            end_sent: false,
        };
        self.table.insert(id, entry);
        Ok((id, answer))
    }

    /// The sampling format that `arg` names.
    fn format(
        &self,
        arg: &CtxArg,
        format_arg: &[u8],
    ) -> Result<Option<Arc<dyn SamplingFormat>>, Refusal> {
        if arg.format == [0; 16] {
            if format_arg.is_empty() {
                return Ok(None);
            }
            let reason = "there is an argument for a sampling format, and no format";
            return Err(Refusal::new(Errno::EINVAL, reason));
        }
        let Some(format) = self.vm.formats.find(arg.format) else {
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
        most_bytes: u64,
    ) -> Result<Made, Refusal> {
        let setup = Setup {
            ctx_flags: arg.flags,
            num_pmds: u16::try_from(self.vm.pmu.pmds().len()).unwrap_or(u16::MAX),
            arg: format_arg,
        };
        format.validate(&setup)?;
        let size = format.size(&setup)?;
        if size == 0 {
            let sampler = Sampler::new(format.clone(), &setup, Box::new(Vec::new()))?;
            return Ok((sampler, None));
        }
        let (buffer, file) = SharedBuffer::new(size, &self.pool, most_bytes)?;
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
