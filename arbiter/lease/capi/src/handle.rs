//! A lease, as C has it.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use umpire_lease::{
    Arbiter, Event, Held, Lease, Next, NoReply, ReleaseIn, RenewIn, RenewOut, Request, What,
};

use crate::failure::{Failure, c_string};

/// A lease, the connection that it belongs to, and what was last said of it.
#[derive(Debug)]
pub(crate) struct Handle {
    socket: PathBuf,
    held: Held,
    ended: bool,
    message: CString,
}

impl Handle {
    pub(crate) fn acquire(socket: Option<PathBuf>, request: &Request) -> Result<Self, Failure> {
        let socket = socket.unwrap_or_else(umpire_lease::default_socket);
        Ok(Handle {
            held: Arbiter::connect(&socket)?.acquire(request)?,
            socket,
            ended: false,
            message: CString::default(),
        })
    }

    /// The next event, unless none comes within the time; without one it waits for ever.
    pub(crate) fn next(&mut self, most: Option<Duration>) -> Result<Option<Event>, Failure> {
        if self.ended {
            return Err(Failure::new(libc::ENOENT, "the lease has ended"));
        }
        match self.held.next(most)? {
            Next::Nothing => Ok(None),
            Next::Event(event) => {
                self.ended = event.what == What::Ended;
                Ok(Some(*event))
            }
        }
    }

    /// Keeps what an event says. Valid until the next.
    pub(crate) fn keep_message(&mut self, message: &str) -> &CString {
        self.message = c_string(message);
        &self.message
    }

    /// Whether it comes to hold something within the time.
    pub(crate) fn wait(&mut self, most: Option<Duration>) -> Result<bool, Failure> {
        let until = most.map(|most| Instant::now() + most);
        while self.lease().holds == 0 {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            match self.next(left)? {
                Some(event) if self.ended => {
                    return Err(Failure::new(libc::ENOENT, event.message));
                }
                Some(_) => {}
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    pub(crate) fn lease(&self) -> &Lease {
        self.held.lease()
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.held.as_fd().as_raw_fd()
    }

    /// Its own connection is for events.
    fn another(&self) -> Result<Arbiter, Failure> {
        Ok(Arbiter::connect(&self.socket)?)
    }

    pub(crate) fn renew(&self) -> Result<(), Failure> {
        let renew = RenewIn {
            lease: self.lease().id,
            generation: None,
        };
        let RenewOut { .. } = self.another()?.call("Renew", &renew)?;
        Ok(())
    }

    pub(crate) fn release(&self, keep: u32) -> Result<(), Failure> {
        let release = ReleaseIn {
            lease: self.lease().id,
            generation: None,
            keep: Some(keep),
        };
        let NoReply {} = self.another()?.call("Release", &release)?;
        Ok(())
    }

    pub(crate) fn claim(&mut self) -> Result<(), Failure> {
        let id = self.lease().id;
        self.held = self.another()?.claim(id, None)?;
        self.ended = false;
        Ok(())
    }
}
