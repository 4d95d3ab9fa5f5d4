//! PFM_CREATE_CONTEXT (3.1.1).

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use perfmon_abi::consts::PFM_FL_SYSTEM_WIDE;
use perfmon_abi::wire::{Call, Errno, Refusal};
use perfmon_abi::{CtxArg, Record};
use pmu_virt::perfmon::{Context, ContextId, Sampler, SamplingFormat, Setup, Throttle};

use super::table::{Attachment, ContextEntry};
use super::{Contexts, is_closed};
use crate::buffer::SharedBuffer;
use crate::memory_file::MemoryFile;
use crate::message_queue::SocketQueue;
use crate::server::answer::{Answer, ConnectionId, RequestId};
use crate::server::events::Token;
use crate::server::limits::{CONTEXT_FILES, Limits};
use crate::socket::{FileId, context_pair};
use umpire_service::Peer;

/// A context that waits for its sampling buffer.
#[derive(Debug)]
pub(super) struct Creating {
    request: RequestId,
    wanted: Wanted,
    format: Arc<dyn SamplingFormat>,
}

/// What a client asks for.
#[derive(Debug)]
pub(in crate::server) struct Wanted {
    pub(in crate::server) creator: Peer,
    pub(in crate::server) arg: CtxArg,
    pub(in crate::server) format_arg: Vec<u8>,
}

/// The context, if there is one, and the answer, which lacks the handle.
pub(in crate::server) type Created = (Option<ContextId>, Answer);

impl Creating {
    pub(super) fn is_of(&self, connection: ConnectionId) -> bool {
        self.request.connection == connection
    }
}

impl Contexts {
    /// Makes a context. `None`: it waits for its buffer, and comes out of
    /// [`Contexts::buffer_made`].
    pub(in crate::server) fn create(
        &mut self,
        request: RequestId,
        limits: &Limits,
        wanted: Wanted,
    ) -> Option<Created> {
        let format = match self.admit(limits, &wanted) {
            Ok(format) => format,
            Err(refusal) => return Some(refused(&wanted, refusal)),
        };
        let Some((format, size)) = format else {
            return Some(self.make(limits, wanted, None));
        };
        if size == 0 {
            let none = Box::new(Vec::new());
            let sampler = Sampler::new(format.clone(), &self.setup(&wanted), none);
            let made = sampler.map(|sampler| (sampler, format, None));
            return Some(match made {
                Ok(made) => self.make(limits, wanted, Some(made)),
                Err(refusal) => refused(&wanted, refusal),
            });
        }
        if !self.buffers.has_room(size, limits.buffers) {
            self.abandon_closed_buffers();
        }
        self.last_buffer += 1;
        let number = self.last_buffer;
        if let Err(refusal) = self.buffers.make(number, size, limits.buffers) {
            return Some(refused(&wanted, refusal));
        }
        let creating = Creating {
            request,
            wanted,
            format,
        };
        self.creating.insert(number, creating);
        None
    }

    /// Contexts with a buffer may have been closed without the server having heard of it: their
    /// client's next request may come to be read first.
    fn abandon_closed_buffers(&mut self) {
        let closed = |(id, entry): (ContextId, &ContextEntry)| {
            let is_closed = entry.buffer.is_some() && !entry.zombie && is_closed(&entry.socket);
            is_closed.then_some(id)
        };
        let closed: Vec<ContextId> = self.table.iter().filter_map(closed).collect();
        closed.into_iter().for_each(|id| self.abandoned(id));
    }

    /// A buffer was made, or there is none: the context that waits for it, and its request.
    pub(in crate::server) fn buffer_made(
        &mut self,
        number: u64,
        made: Result<SharedBuffer, Refusal>,
        limits: &Limits,
    ) -> Option<(RequestId, Created)> {
        // If its client is gone, so is the buffer.
        let creating = self.creating.remove(&number)?;
        let Creating {
            request,
            wanted,
            format,
        } = creating;
        let sampler = made.and_then(|buffer| {
            let shared = buffer.shared();
            let sampler = Sampler::new(format.clone(), &self.setup(&wanted), Box::new(buffer))?;
            Ok((sampler, format, shared))
        });
        let created = match sampler {
            Ok(made) => self.make(limits, wanted, Some(made)),
            Err(refusal) => refused(&wanted, refusal),
        };
        Some((request, created))
    }

    /// The format of a context that may be made, and the size of its buffer.
    fn admit(&self, limits: &Limits, wanted: &Wanted) -> Result<Option<FormatAndSize>, Refusal> {
        let Wanted {
            creator,
            arg,
            format_arg,
        } = wanted;
        // Flags are checked first, so that a refused context allocates nothing.
        Context::new(self.vm.pmu.clone(), arg.flags, None)?;
        let format = self.format(arg, format_arg)?;
        limits.admit(creator, arg.flags & PFM_FL_SYSTEM_WIDE != 0)?;
        let there = self.table.len() + self.creating.len();
        // Bells have taken descriptors that further contexts would have had.
        let files = self.table.files() + CONTEXT_FILES * (self.creating.len() + 1);
        if there >= limits.contexts || files > limits.contexts * CONTEXT_FILES {
            let reason = format!("there are {there} contexts, and no more are made");
            return Err(Refusal::new(Errno::ENOMEM, reason));
        }
        let Some(format) = format else {
            return Ok(None);
        };
        let setup = self.setup(wanted);
        format.validate(&setup)?;
        let size = format.size(&setup)?;
        Ok(Some((format, size)))
    }

    fn setup<'w>(&self, wanted: &'w Wanted) -> Setup<'w> {
        Setup {
            ctx_flags: wanted.arg.flags,
            num_pmds: u16::try_from(self.vm.pmu.pmds().len()).unwrap_or(u16::MAX),
            arg: &wanted.format_arg,
        }
    }

    /// Makes a context that may be made.
    fn make(&mut self, limits: &Limits, mut wanted: Wanted, sampler: Option<Made>) -> Created {
        match self.enter(limits, &mut wanted, sampler) {
            Ok((context, answer)) => (Some(context), answer),
            Err(refusal) => refused(&wanted, refusal),
        }
    }

    fn enter(
        &mut self,
        limits: &Limits,
        wanted: &mut Wanted,
        made: Option<Made>,
    ) -> Result<(ContextId, Answer), Refusal> {
        let arg = &mut wanted.arg;
        let (sampler, format, buffer) = match made {
            Some((sampler, format, buffer)) => (Some(sampler), Some(format), buffer),
            None => (None, None, None),
        };
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
        let answer = Answer {
            fd: Some(theirs),
            file: buffer.as_ref().map(|(file, _)| file.clone()),
            ..Answer::done(arg.to_bytes())
        };
        let queue = SocketQueue::new(socket.clone());
        let entry = ContextEntry {
            file,
            socket,
            bell: queue.bell(),
            buffer,
            creator: wanted.creator.clone(),
            flags: arg.flags,
            format: format.map(|format| format.name().to_owned()),
            generation: context.generation(),
            sets: context.set_count(),
            attachment: Attachment::Detached {
                context: Box::new(context),
                queue: Box::new(queue),
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
}

/// A sampler, its format, and the file of its buffer with the buffer's size.
type Made = (
    Sampler,
    Arc<dyn SamplingFormat>,
    Option<(Arc<MemoryFile>, u64)>,
);

/// A sampling format, and the size of its buffer.
type FormatAndSize = (Arc<dyn SamplingFormat>, usize);

/// There is no context, and why.
fn refused(wanted: &Wanted, refusal: Refusal) -> Created {
    let call = Call::Create(wanted.arg, Vec::new());
    (None, Answer::of_call(&call, Err(refusal)))
}

fn no_descriptor(error: io::Error) -> Refusal {
    Refusal::new(
        Errno::ENOMEM,
        format!("the VMM has no descriptor for a context: {error} (its limit: `ulimit -n`)"),
    )
}
