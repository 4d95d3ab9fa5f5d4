//! Perf events of a lease, opened by the arbiter: for programs that may not open them.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};

use crate::client::CallError;
use crate::wire::{EventReply, EventRequest};

/// No reply is longer.
const MOST_REPLY: usize = 64 * 1024;

/// A connection to the companion socket, `SOCKET.events`.
#[derive(Debug)]
pub struct Events {
    socket: OwnedFd,
}

impl Events {
    /// Connects to the companion of the arbiter's socket at `path`.
    ///
    /// # Errors
    /// Nobody listens there: the policy opens events for nobody.
    pub fn connect(path: &Path) -> Result<Self, CallError> {
        let mut companion = path.as_os_str().to_owned();
        companion.push(".events");
        let dial = || -> io::Result<OwnedFd> {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
            connect(&socket, &SocketAddrUnix::new(&*companion)?)?;
            Ok(socket)
        };
        match dial() {
            Ok(socket) => Ok(Events { socket }),
            Err(error) => Err(CallError::NoArbiter {
                path: companion.into(),
                error,
            }),
        }
    }

    /// A descriptor of `perf_event_open(2)`: pinned, disabled, and closed when a program is
    /// executed. A read of it has three words: the count, and the times it was enabled and
    /// counted. Who asks again for the same counter, thread and CPU gets another event, and
    /// the first one is stopped.
    ///
    /// # Errors
    /// The arbiter says no, or the connection failed.
    pub fn open(&mut self, request: &EventRequest) -> Result<OwnedFd, CallError> {
        let bytes = serde_json::to_vec(request).map_err(io::Error::from)?;
        send(&self.socket, &bytes, SendFlags::NOSIGNAL).map_err(io::Error::from)?;
        let mut bytes = vec![0; MOST_REPLY];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.socket, &mut parts, &mut ancillary, flags);
        let length = received.map_err(io::Error::from)?.bytes;
        let mut events = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut events) => events.next(),
            _ => None,
        });
        let event = events.next();
        if length == 0 {
            return Err(CallError::Ended);
        }
        drop(events);
        let reply: EventReply = serde_json::from_slice(&bytes[..length])
            .map_err(|error| CallError::Other(error.to_string()))?;
        match (reply.refused, event) {
            (Some(refused), _) => Err(CallError::Refused(Box::new(refused))),
            (None, Some(event)) => Ok(event),
            (None, None) => Err(CallError::Other("no descriptor came with the reply".into())),
        }
    }
}
