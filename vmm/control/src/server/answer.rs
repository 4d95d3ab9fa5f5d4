//! Requests by number, and what goes back for them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use perfmon_abi::wire::{Call, Refusal, Reply, Subcode};
use serde::Serialize;

use crate::document::Document;
use crate::memory_file::MemoryFile;

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
    /// A context.
    pub(super) fd: Option<OwnedFd>,
    /// A file that goes along: whoever gets it reads it for itself.
    pub(super) file: Option<Arc<MemoryFile>>,
    /// The server needs the file no more: clients have it for a while.
    pub(super) is_files_last_use: bool,
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

    /// What `value` is in JSON, made for this answer.
    pub(super) fn json(value: &impl Serialize) -> Self {
        match Document::of(value) {
            Ok(document) => Self::last_of(&document),
            Err(refusal) => refusal.into(),
        }
    }

    /// A document that is written anew before long: who gets too many of its like loses the
    /// oldest.
    pub(super) fn last_of(document: &Document) -> Self {
        Self {
            is_files_last_use: true,
            ..Self::document(document)
        }
    }

    /// A document that others get, too.
    pub(super) fn document(document: &Document) -> Self {
        match document {
            Document::Short(text) => Self::done(text.to_vec()),
            Document::Long(file) => Self {
                file: Some(file.clone()),
                ..Self::default()
            },
        }
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
