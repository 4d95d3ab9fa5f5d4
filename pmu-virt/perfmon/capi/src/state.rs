//! The process's connection to the VM.

#[allow(unsafe_code)]
mod sys;

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use perfmon_abi::consts::PFM_FL_OVFL_NO_MSG;
use perfmon_abi::wire::info::{FormatInfo, ModelInfo};
use perfmon_abi::wire::{Bound, Errno, Extension, MAX_PACKET};
use rustix::fs::{FileType, fstat};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use serde::de::DeserializeOwned;
use umpire_perfmon::link::{ARGUMENT, Answer, Link, Packet, Question, inode};
use umpire_perfmon::{LastCounts, TIMEOUT};

use crate::bell;
use crate::failure::{Failure, accepted, failure, malformed};
use crate::sys::environment;
use crate::table::{self, Slot};
use sys::Guard;

/// Sampling formats whose arguments' sizes are kept.
const FORMATS: usize = 16;

/// What one thread at a time uses.
#[derive(Debug)]
pub(crate) struct State {
    link: Option<Link>,
    /// Counts connections: handles are valid on one of them.
    epoch: u32,
    packet: Packet,
    /// Size of the argument that a sampling format takes.
    formats: [Option<([u8; 16], usize)>; FORMATS],
    /// What a VM that has ended has left on a connection, and which this was.
    last: Option<(u32, OwnedFd)>,
    /// The host CPU that each of the VM's cores is kept on, once it was asked for.
    core_cpus: Option<Vec<u32>>,
}

pub(crate) static STATE: Guard = Guard::new(State {
    link: None,
    epoch: 0,
    packet: [0; MAX_PACKET],
    formats: [None; FORMATS],
    last: None,
    core_cpus: None,
});

impl State {
    /// Connects, unless there is a connection that works.
    pub(crate) fn ensure_link(&mut self) -> Result<(), Failure> {
        if self.link.as_ref().is_some_and(Link::is_usable) {
            return Ok(());
        }
        self.end_link();
        self.epoch = self.epoch.wrapping_add(1);
        self.formats = [None; FORMATS];
        self.core_cpus = None;
        let address = environment::socket().map_err(|reason| failure(Errno::ENOSYS, reason))?;
        let link = Link::connect(&address, TIMEOUT)?;
        STATE.note_socket(link.identity());
        self.link = Some(link);
        Ok(())
    }

    /// The connection is of no use any more; what the VM has left there is.
    fn end_link(&mut self) {
        if let Some(file) = self.link.take().and_then(Link::last_words) {
            self.last = Some((self.epoch, file));
        }
    }

    /// Where the argument of the next question lies.
    pub(crate) fn argument(&mut self, length: usize) -> &mut [u8] {
        &mut self.packet[ARGUMENT..][..length]
    }

    /// Asks the VM, and waits for the reply.
    pub(crate) fn exchange(&mut self, question: Question<'_>) -> Result<Answer<'_>, Failure> {
        let link = self.link.as_mut().ok_or_else(no_context)?;
        Ok(link.exchange(question, &mut self.packet)?)
    }

    /// What the VM tells of itself. This allocates.
    pub(crate) fn document<T: DeserializeOwned>(&mut self, what: Extension) -> Result<T, Failure> {
        let answer = self.exchange(Question::plain(what.number()))?;
        let [file, _] = answer.descriptors;
        answer.reply.result()?;
        Ok(umpire_perfmon::document(answer.reply.payload, file)?)
    }

    /// The number of the VMM's process.
    pub(crate) fn vmm(&self) -> Option<i32> {
        let server = self.link.as_ref()?.server().ok()?;
        Some(server.pid.as_raw_nonzero().get())
    }

    /// The host CPU that each core of the VM is kept on; none if they are on none.
    pub(crate) fn core_cpus(&mut self) -> Result<&[u32], Failure> {
        if self.core_cpus.is_none() {
            let model: ModelInfo = self.document(Extension::Model)?;
            self.core_cpus = Some(model.core_cpus);
        }
        Ok(self.core_cpus.as_deref().unwrap_or_default())
    }

    /// Bytes of the argument that a sampling format takes; 0 for one that the VM
    /// does not have, and will say so.
    pub(crate) fn format_argument(&mut self, uuid: [u8; 16]) -> Result<usize, Failure> {
        let mut known = self.formats.iter().flatten();
        if let Some((_, size)) = known.find(|(id, _)| *id == uuid) {
            return Ok(*size);
        }
        let formats: Vec<FormatInfo> = self.document(Extension::Formats)?;
        let sizes = formats.iter().filter_map(|format| {
            let uuid = format.uuid_bytes()?;
            Some((uuid, usize::try_from(format.arg_size).ok()?))
        });
        for (place, size) in self.formats.iter_mut().zip(sizes.clone()) {
            *place = Some(size);
        }
        let found = sizes.into_iter().find(|(id, _)| *id == uuid);
        Ok(found.map_or(0, |(_, size)| size))
    }

    /// Makes the bell of a new context ready.
    pub(crate) fn hang_bell(&mut self, context: &mut OwnedFd, handle: u32) -> Result<(), Failure> {
        let link = self.link.as_mut().ok_or_else(no_context)?;
        bell::hang(link, &mut self.packet, context, handle)
    }

    /// The bell of a context signals whom its descriptor would.
    pub(crate) fn follow_bell(&mut self, context: BorrowedFd<'_>, handle: u32) {
        if let Some(link) = &mut self.link {
            bell::follow(link, &mut self.packet, context, handle);
        }
    }

    /// What a context's VM has left as it ended, and room for a packet.
    pub(crate) fn last_counts(
        &mut self,
        open: BorrowedFd<'_>,
    ) -> Option<(LastCounts<'_>, &mut Packet)> {
        if !self.link.as_ref().is_some_and(Link::is_usable) {
            self.end_link();
        }
        let slot = table::find(open)?;
        let State { last, packet, .. } = self;
        let (epoch, file) = last.as_ref()?;
        (slot.epoch.load(SeqCst) == *epoch).then_some(())?;
        Some((LastCounts::of(file, slot.handle.load(SeqCst))?, packet))
    }

    /// The slot and handle of a context.
    pub(crate) fn context(
        &mut self,
        open: BorrowedFd<'_>,
    ) -> Result<(&'static Slot, u32), Failure> {
        self.ensure_link()?;
        if let Some(slot) = table::find(open) {
            let handle = slot.handle.load(SeqCst);
            if handle != 0 && slot.epoch.load(SeqCst) == self.epoch {
                return Ok((slot, handle));
            }
        }
        self.bind(open)
    }

    /// Asks the VM whether a descriptor is one of its contexts. Other sockets
    /// than contexts can be are not sent to it.
    pub(crate) fn bind(&mut self, open: BorrowedFd<'_>) -> Result<(&'static Slot, u32), Failure> {
        if !can_be_context(open) {
            return Err(no_context());
        }
        self.ensure_link()?;
        let question = Question {
            descriptor: Some(open),
            ..Question::plain(Extension::Bind.number())
        };
        let answer = self.exchange(question)?;
        accepted(&answer.reply)?;
        let (handle, Ok(bound)) = (
            answer.reply.context,
            Bound::from_bytes(answer.reply.payload),
        ) else {
            return Err(malformed());
        };
        let is_new = table::find(open).is_none();
        let slot = self.register(open, handle)?;
        slot.flags.store(bound.flags, SeqCst);
        slot.generation.store(bound.generation.into(), SeqCst);
        slot.buffer_size.store(bound.buffer_size, SeqCst);
        if is_new && bound.flags & PFM_FL_OVFL_NO_MSG != 0 {
            // What its owner asked for before this library knew of it.
            self.follow_bell(open, handle);
        }
        Ok((slot, handle))
    }

    /// Notes the handle of a context.
    pub(crate) fn register(
        &self,
        open: BorrowedFd<'_>,
        handle: u32,
    ) -> Result<&'static Slot, Failure> {
        let slot = match table::find(open) {
            Some(slot) => Some(slot),
            None => inode(open).and_then(|inode| table::insert(open.as_raw_fd(), inode)),
        };
        let slot = slot.ok_or_else(|| failure(Errno::EMFILE, "too many contexts"))?;
        slot.handle.store(handle, SeqCst);
        slot.epoch.store(self.epoch, SeqCst);
        Ok(slot)
    }
}

/// Whether a descriptor is a socket as contexts are.
pub(crate) fn can_be_context(open: BorrowedFd<'_>) -> bool {
    let is_socket = |mode| FileType::from_raw_mode(mode) == FileType::Socket;
    fstat(open).is_ok_and(|stat| is_socket(stat.st_mode))
        && socket_domain(open) == Ok(AddressFamily::UNIX)
        && socket_type(open) == Ok(SocketType::SEQPACKET)
}

pub(crate) fn no_context() -> Failure {
    failure(Errno::EBADF, "the descriptor is not one of a context")
}
