//! Requests by number, and what goes back for them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use perfmon_abi::wire::{Call, Errno, MAX_PAYLOAD, Refusal, Reply, Subcode};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde::Serialize;

/// A connection: a number that is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ConnectionId(pub(super) u64);

/// What is kept of a request until its answer goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestId {
    pub(super) connection: ConnectionId,
    pub(super) command: u16,
    pub(super) id: u32,
    pub(super) context: u32,
}

impl RequestId {
    /// The packet that goes back.
    pub(super) fn packet(&self, answer: &Answer) -> Vec<u8> {
        let refusal = answer.refusal.as_ref();
        let reply = Reply {
            command: self.command,
            id: self.id,
            context: answer.context.unwrap_or(self.context),
            errno: refusal.map_or(0, |refusal| refusal.errno.number()),
            subcode: refusal.map_or(Subcode::None, |refusal| refusal.subcode),
            payload: &answer.payload,
            reason: refusal.map_or("", |refusal| &refusal.reason),
        };
        // No argument is longer than what a request may carry.
        reply.encode().unwrap_or_default()
    }
}

/// The answer to a request.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// A new handle.
    pub(super) context: Option<u32>,
    pub(super) payload: Vec<u8>,
    pub(super) fds: Vec<Arc<OwnedFd>>,
    pub(super) refusal: Option<Refusal>,
}

impl Answer {
    /// A success with this payload.
    pub(super) fn done(payload: Vec<u8>) -> Self {
        Self {
            payload,
            ..Self::default()
        }
    }

    /// A command with its argument as it is now, and its result.
    pub(super) fn of_call(call: &Call, result: Result<(), Refusal>) -> Self {
        Self {
            payload: call.encode_reply(),
            refusal: result.err(),
            ..Self::default()
        }
    }

    /// A document. One that is too long for a packet goes along as a file.
    pub(super) fn json(document: &impl Serialize) -> Self {
        let text = match serde_json::to_vec(document) {
            Ok(text) => text,
            // Only maps with odd keys cannot be written; there is none.
            Err(error) => return Refusal::new(Errno::EIO, error.to_string()).into(),
        };
        if text.len() <= MAX_PAYLOAD {
            return Self::done(text);
        }
        match file_of(&text) {
            Ok(file) => Self {
                fds: vec![Arc::new(file)],
                ..Self::default()
            },
            Err(error) => {
                let reason = format!("no memory file for the answer: {error}");
                Refusal::new(Errno::ENOMEM, reason).into()
            }
        }
    }

    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.fds.iter().map(AsFd::as_fd).collect()
    }
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        Self {
            refusal: Some(refusal),
            ..Self::default()
        }
    }
}

/// A memory file that nobody can change any more.
fn file_of(text: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("umpire-answer", flags)?;
    let mut at = 0;
    while at < text.len() {
        at += rustix::io::pwrite(&file, &text[at..], at as u64)?;
    }
    let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::WRITE | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file)
}
