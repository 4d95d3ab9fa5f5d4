//! Wakes the server's thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

/// An event descriptor: readable from a ring until it is hushed.
#[derive(Debug)]
pub(super) struct Notifier(OwnedFd);

impl Notifier {
    pub(super) fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(eventfd(0, flags)?))
    }

    /// Never waits; a bell that was rung often enough to be full rings anyway.
    pub(super) fn notify(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(super) fn drain(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8][..]);
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
