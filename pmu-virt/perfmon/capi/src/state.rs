//! The process's connection to the VM.

#[allow(unsafe_code)]
mod sys;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use perfmon_abi::consts::PFM_FL_OVFL_NO_MSG;
use perfmon_abi::wire::{Bound, Errno, Extension, MAX_PACKET};
use rustix::fs::{FileType, fstat};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use umpire_perfmon::link::{Link, Packet, Question, inode};
use umpire_perfmon::{LastCounts, TIMEOUT};

use crate::bell;
use crate::failure::{Failure, failure};
use crate::sys::environment;
use crate::table::{self, Slot};
use sys::Guard;

/// Sampling formats whose arguments' sizes are kept.
const FORMATS: usize = 16;

/// What one thread at a time uses.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) link: Option<Link>,
    /// Counts connections: handles are valid on one of them.
    epoch: u32,
    pub(crate) packet: Packet,
    /// Size of the argument that a sampling format takes.
    pub(crate) formats: [Option<([u8; 16], usize)>; FORMATS],
    /// What a VM that has ended has left on a connection, and which this was.
    pub(crate) last: Option<(u32, OwnedFd)>,
    /// The host CPU that each of the VM's cores is kept on, once it was asked for.
    pub(crate) core_cpus: Option<Vec<u32>>,
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

    /// What a context's VM has left as it ended, and room for a packet.
    pub(crate) fn last_counts(
        &mut self,
        number: i32,
        open: BorrowedFd<'_>,
    ) -> Option<(LastCounts<'_>, &mut Packet)> {
        if !self.link.as_ref().is_some_and(Link::is_usable) {
            self.end_link();
        }
        let slot = table::find(number, open)?;
        let State { last, packet, .. } = self;
        let (epoch, file) = last.as_ref()?;
        (slot.epoch.load(SeqCst) == *epoch).then_some(())?;
        Some((LastCounts::of(file, slot.handle.load(SeqCst))?, packet))
    }

    /// The slot and handle of a context.
    pub(crate) fn context(
        &mut self,
        number: i32,
        open: BorrowedFd<'_>,
    ) -> Result<(&'static Slot, u32), Failure> {
        self.ensure_link()?;
        if let Some(slot) = table::find(number, open) {
            let handle = slot.handle.load(SeqCst);
            if handle != 0 && slot.epoch.load(SeqCst) == self.epoch {
                return Ok((slot, handle));
            }
        }
        self.bind(number, open)
    }

    /// Asks the VM whether a descriptor is one of its contexts. Other sockets
    /// than contexts can be are not sent to it.
    pub(crate) fn bind(
        &mut self,
        number: i32,
        open: BorrowedFd<'_>,
    ) -> Result<(&'static Slot, u32), Failure> {
        if !can_be_context(open) {
            return Err(no_context());
        }
        self.ensure_link()?;
        let question = Question {
            descriptor: Some(open),
            ..Question::plain(Extension::Bind.number())
        };
        let Some(link) = &mut self.link else {
            return Err(no_context());
        };
        let answer = link.exchange(question, &mut self.packet)?;
        if let Some(errno) = Errno::from_number(answer.reply.errno) {
            return Err(failure(errno, answer.reply.reason));
        }
        let (handle, Ok(bound)) = (
            answer.reply.context,
            Bound::from_bytes(answer.reply.payload),
        ) else {
            return Err(failure(Errno::EPROTO, "the reply is malformed"));
        };
        let is_new = table::find(number, open).is_none();
        let slot = self.register(number, open, handle)?;
        slot.flags.store(bound.flags, SeqCst);
        slot.generation.store(bound.generation.into(), SeqCst);
        slot.buffer_size.store(bound.buffer_size, SeqCst);
        if is_new && bound.flags & PFM_FL_OVFL_NO_MSG != 0 {
            // What its owner asked for before this library knew of it.
            if let Some(link) = &mut self.link {
                bell::follow(link, &mut self.packet, open, handle);
            }
        }
        Ok((slot, handle))
    }

    /// Notes the handle of a context.
    pub(crate) fn register(
        &self,
        number: i32,
        open: BorrowedFd<'_>,
        handle: u32,
    ) -> Result<&'static Slot, Failure> {
        let slot = match table::find(number, open) {
            Some(slot) => Some(slot),
            None => inode(open).and_then(|inode| table::insert(number, inode)),
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
