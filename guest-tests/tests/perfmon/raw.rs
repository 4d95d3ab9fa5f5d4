//! A client without manners: packets as they are.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result};
use perfmon_abi::wire::{MAX_PACKET, Reply, Request};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with,
    sockopt,
};

use crate::bed::PATIENCE;

/// A connection.
#[derive(Debug)]
pub(crate) struct Raw(OwnedFd);

/// What came back: error number, handle, reason.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) errno: i32,
    pub(crate) context: u32,
    pub(crate) reason: String,
}

impl Raw {
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let kind = SocketType::SEQPACKET;
        let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE))?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self(socket))
    }

    pub(crate) fn send(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = SendFlags::NOSIGNAL;
        sendmsg(&self.0, &[IoSlice::new(packet)], &mut control, flags)?;
        Ok(())
    }

    /// The next reply; `None` at the end of the connection.
    pub(crate) fn receive(&self) -> Result<Option<Told>> {
        let mut packet = vec![0; MAX_PACKET];
        let mut control = RecvAncillaryBuffer::new(&mut []);
        let flags = RecvFlags::empty();
        let mut slices = [IoSliceMut::new(&mut packet)];
        let got = match recvmsg(&self.0, &mut slices, &mut control, flags) {
            Ok(got) => got.bytes,
            // It was closed before it had read everything.
            Err(rustix::io::Errno::CONNRESET) => 0,
            Err(error) => return Err(error).context("a reply"),
        };
        if got == 0 {
            return Ok(None);
        }
        let reply = Reply::decode(&packet[..got])?;
        Ok(Some(Told {
            errno: reply.errno,
            context: reply.context,
            reason: reply.reason.to_owned(),
        }))
    }

    pub(crate) fn ask(&self, request: &Request<'_>, fds: &[BorrowedFd<'_>]) -> Result<Told> {
        self.send(&request.encode()?, fds)?;
        self.receive()?.context("the connection was closed")
    }
}

impl From<OwnedFd> for Raw {
    fn from(socket: OwnedFd) -> Self {
        Self(socket)
    }
}

impl AsFd for Raw {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A request without a payload.
pub(crate) fn request(command: u16, nargs: i32) -> Request<'static> {
    Request {
        command,
        id: 7,
        context: 0,
        nargs,
        payload: &[],
    }
}
