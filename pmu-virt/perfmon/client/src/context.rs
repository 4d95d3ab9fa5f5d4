//! A context of one's own.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use perfmon_abi::wire::{Errno, Refusal};
use perfmon_abi::{Message, Record};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno as OsErrno;
use rustix::net::RecvFlags;

use crate::messages::{self, Incoming};
use crate::sys::Pages;

/// A context: its descriptor, and that of its sampling buffer if it has one.
/// The context lives until its last descriptor is closed, here and wherever it
/// was passed to.
#[derive(Debug)]
pub struct ContextHandle {
    /// The context. Can be waited for, passed on and duplicated.
    pub fd: OwnedFd,
    /// Its sampling buffer.
    pub buffer: Option<Buffer>,
    pub(crate) flags: u32,
    pub(crate) inode: u64,
    pub(crate) generation: AtomicU16,
}

/// A sampling buffer that is not mapped yet.
#[derive(Debug)]
pub struct Buffer {
    /// Its memory file.
    pub fd: OwnedFd,
    /// Its size in bytes.
    pub size: usize,
}

/// How long to wait for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// So long.
    For(Duration),
    /// Until there is one.
    Forever,
}

/// What came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Message(Message),
    /// An overflow of a context with `PFM_FL_OVFL_NO_MSG`.
    Overflow,
    /// Nothing, in the time given.
    Nothing,
    /// The VM is gone.
    Gone,
}

impl AsFd for ContextHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn refusal(error: OsErrno) -> Refusal {
    Errno::from_number(error.raw_os_error())
        .unwrap_or(Errno::EIO)
        .into()
}

impl ContextHandle {
    /// `PFM_FL_*` that it was created with.
    #[must_use]
    pub fn flags(&self) -> u32 {
        self.flags
    }

    /// Takes the next message. Messages of the time before the context was
    /// loaded last are passed over.
    ///
    /// # Errors
    /// EINTR after a signal; other errors of the system.
    pub fn read_message(&self, wait: Wait) -> Result<Event, Refusal> {
        let end = match wait {
            Wait::For(time) => Instant::now().checked_add(time),
            Wait::No | Wait::Forever => None,
        };
        loop {
            match messages::take(self.as_fd(), RecvFlags::DONTWAIT) {
                Ok(Incoming::Message(bytes)) => {
                    let message = Message::get(&bytes);
                    if !self.is_stale(message.generation) {
                        return Ok(Event::Message(message));
                    }
                }
                Ok(Incoming::Empty) => return Ok(Event::Overflow),
                Ok(Incoming::Closed) => return Ok(Event::Gone),
                Err(OsErrno::AGAIN) => {
                    if wait == Wait::No || !self.wait_until(end)? {
                        return Ok(Event::Nothing);
                    }
                }
                Err(error) => return Err(refusal(error)),
            }
        }
    }

    /// Whether something came before `end`.
    fn wait_until(&self, end: Option<Instant>) -> Result<bool, Refusal> {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled = [PollFd::new(&self.fd, PollFlags::IN)];
        let ready = poll(&mut polled, timeout.as_ref()).map_err(refusal)?;
        Ok(ready > 0)
    }

    /// Whether a message is of a time before the context was loaded last. Who
    /// shares the context may have loaded it: then the message says so first.
    fn is_stale(&self, generation: u16) -> bool {
        let current = self.generation.load(Ordering::Relaxed);
        let stale = messages::is_stale(generation, current);
        if !stale {
            self.generation.store(generation, Ordering::Relaxed);
        }
        stale
    }

    /// Maps the sampling buffer. The context lives at least as long as the mapping: with a
    /// context the VMM takes its buffer's memory away, and to read that would end the program.
    ///
    /// # Errors
    /// EINVAL: the context has none. EMFILE: no descriptor is left. Else the error of `mmap`.
    pub fn map_buffer(&self) -> Result<Mapping, Refusal> {
        let Some(buffer) = &self.buffer else {
            return Err(Refusal::new(
                Errno::EINVAL,
                "the context has no sampling buffer",
            ));
        };
        let pages = Pages::map(buffer.fd.as_fd(), buffer.size).map_err(refusal)?;
        let _context = self.fd.try_clone().map_err(|error| {
            let errno = error.raw_os_error().and_then(Errno::from_number);
            Refusal::from(errno.unwrap_or(Errno::EIO))
        })?;
        Ok(Mapping { pages, _context })
    }
}

/// A mapped sampling buffer. The VMM writes to it at any time; what is read is
/// whole in aligned words of 8 bytes, and consistent beyond these where the
/// sampling format says so (after a notification that masks, for instance).
#[derive(Debug)]
pub struct Mapping {
    // It goes before the context.
    pages: Pages,
    _context: OwnedFd,
}

impl Mapping {
    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.pages.size()
    }

    /// The aligned word at this many bytes from the beginning; `None` behind the
    /// end, or if `at` is no multiple of 8.
    #[must_use]
    pub fn word(&self, at: usize) -> Option<u64> {
        self.pages.word(at)
    }

    /// A copy of the bytes from `at` on; `None` if they are not all inside.
    #[must_use]
    pub fn copy(&self, at: usize, length: usize) -> Option<Vec<u8>> {
        let end = at.checked_add(length).filter(|&end| end <= self.size())?;
        let words = (at / 8..end.div_ceil(8)).map_while(|index| self.word(index * 8));
        let bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
        let skip = at % 8;
        bytes.get(skip..skip + length).map(<[u8]>::to_vec)
    }
}
