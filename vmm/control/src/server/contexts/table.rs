//! The table of contexts: what the server knows of each, and which is where.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use perfmon_abi::wire::{Call, Errno, Refusal};
use pmu_virt::perfmon::{AttachedContext, Context, ContextId, MessageQueue};

use super::asking::Load;
use crate::job::Target;
use crate::memory_file::MemoryFile;
use crate::message_queue::Bell;
use crate::server::answer::{ConnectionId, RequestId};
use crate::socket::FileId;
use umpire_service::Peer;

/// Most event sets of all contexts of a VM.
pub(in crate::server) const MOST_SETS: usize = 1 << 16;

/// Descriptors of a bell in the VMM.
pub(in crate::server) const BELL_FILES: usize = 2;

/// What a context is attached to.
#[derive(Debug)]
pub(in crate::server) enum Attachment {
    /// Nothing. The server has it.
    Detached {
        context: Box<Context>,
        queue: Box<dyn MessageQueue>,
    },
    /// The context is on its way to this vCPU or core, attached to it, or on its way
    /// back.
    Attached(Target),
}

impl Attachment {
    /// Of a context that has come back.
    pub(in crate::server) fn detached(hosted: AttachedContext) -> Self {
        let (_, context, queue) = hosted.into_parts();
        Attachment::Detached { context, queue }
    }
}

/// A context.
#[derive(Debug)]
pub(in crate::server) struct ContextEntry {
    /// The tool's end of its socket.
    pub(in crate::server) file: FileId,
    /// The server's end.
    pub(in crate::server) socket: Arc<OwnedFd>,
    /// What rings for its overflows, where it has no messages for them and somebody asked.
    pub(in crate::server) bell: Arc<OnceLock<Bell>>,
    /// The file of its sampling buffer, and its size.
    pub(in crate::server) buffer: Option<(Arc<MemoryFile>, u64)>,
    /// The client that created it.
    pub(in crate::server) creator: Peer,
    pub(in crate::server) flags: u32,
    pub(in crate::server) format: Option<String>,
    pub(in crate::server) generation: u16,
    pub(in crate::server) attachment: Attachment,
    /// Its event sets. They come and go only while it is detached (3.1.10).
    pub(in crate::server) sets: usize,
    /// A job is under way, and the request that waits for it, if one does.
    pub(in crate::server) job: Option<Option<RequestId>>,
    /// Commands that came meanwhile: at most one of each connection.
    pub(in crate::server) waiting: VecDeque<(RequestId, Call)>,
    /// Loads of other contexts. They wait until this one, a zombie, is detached.
    pub(in crate::server) queued_loads: Vec<Load>,
    /// Its last load.
    pub(in crate::server) load: Option<Load>,
    /// Nobody has its descriptor any more.
    pub(in crate::server) zombie: bool,
    /// PFM_MSG_END was sent.
    pub(in crate::server) end_sent: bool,
}

/// All contexts of a VM.
#[derive(Debug, Default)]
pub(in crate::server) struct ContextTable {
    entries: BTreeMap<ContextId, ContextEntry>,
    files: HashMap<FileId, ContextId>,
    /// Which contexts are attached to what, or about to be, in order of their loads.
    attached: BTreeMap<Target, Vec<ContextId>>,
    last: u32,
    /// Event sets of all contexts.
    sets: usize,
}

impl ContextTable {
    pub(in crate::server) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Descriptors of all contexts in the VMM: socket, buffer, bell.
    pub(in crate::server) fn files(&self) -> usize {
        let of = |entry: &ContextEntry| {
            let bell = entry.bell.get().map_or(0, |_| BELL_FILES);
            1 + usize::from(entry.buffer.is_some()) + bell
        };
        self.entries.values().map(of).sum()
    }

    pub(in crate::server) fn get(&self, id: ContextId) -> Option<&ContextEntry> {
        self.entries.get(&id)
    }

    pub(in crate::server) fn get_mut(&mut self, id: ContextId) -> Option<&mut ContextEntry> {
        self.entries.get_mut(&id)
    }

    pub(in crate::server) fn iter(&self) -> impl Iterator<Item = (ContextId, &ContextEntry)> {
        self.entries.iter().map(|(id, entry)| (*id, entry))
    }

    /// Refuses `more` event sets, if all contexts would have too many.
    pub(in crate::server) fn room_for_sets(&self, more: usize) -> Result<(), Refusal> {
        if self.sets.saturating_add(more) <= MOST_SETS {
            return Ok(());
        }
        let reason = format!(
            "{more} event sets beside {} that all contexts have exceed {MOST_SETS}",
            self.sets
        );
        Err(Refusal::new(Errno::ENOMEM, reason))
    }

    /// Counts the event sets of a context again.
    pub(in crate::server) fn recount_sets(&mut self, id: ContextId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && let Attachment::Detached { context, .. } = &entry.attachment
        {
            let before = std::mem::replace(&mut entry.sets, context.set_count());
            self.sets = self.sets - before + entry.sets;
        }
    }

    /// The context that a descriptor is of.
    pub(in crate::server) fn of_file(&self, file: FileId) -> Option<ContextId> {
        self.files.get(&file).copied()
    }

    /// A number that no context of this VM has had. They start at 1. After four
    /// billion there is none.
    pub(in crate::server) fn next_id(&mut self) -> Option<ContextId> {
        self.last = self.last.checked_add(1)?;
        Some(ContextId(self.last))
    }

    pub(in crate::server) fn insert(&mut self, id: ContextId, entry: ContextEntry) {
        self.files.insert(entry.file, id);
        self.sets += entry.sets;
        self.entries.insert(id, entry);
    }

    pub(in crate::server) fn remove(&mut self, id: ContextId) -> Option<ContextEntry> {
        let entry = self.entries.remove(&id)?;
        self.files.remove(&entry.file);
        self.sets -= entry.sets;
        Some(entry)
    }

    /// A connection has ended. What it has requested, and nobody has begun, is not
    /// done any more. The contexts whose loads that were.
    pub(in crate::server) fn forget(&mut self, connection: ConnectionId) -> Vec<ContextId> {
        let mut unloaded = Vec::new();
        for entry in self.entries.values_mut() {
            let stays = |asked: &RequestId| asked.connection != connection;
            entry.waiting.retain(|(asked, _)| stays(asked));
            let goes = |load: &mut Load| !stays(&load.request);
            let gone = entry.queued_loads.extract_if(.., goes);
            unloaded.extend(gone.map(|load| load.context));
        }
        unloaded
    }

    /// The contexts that are attached to `target`, the oldest first.
    pub(in crate::server) fn at(&self, target: Target) -> &[ContextId] {
        self.attached.get(&target).map_or(&[], Vec::as_slice)
    }

    /// How many contexts are attached to cores, or about to be.
    pub(in crate::server) fn on_cores(&self) -> usize {
        let cores = self.attached.iter();
        let cores = cores.filter(|(target, _)| matches!(target, Target::Core(_)));
        cores.map(|(_, contexts)| contexts.len()).sum()
    }

    pub(in crate::server) fn attach(&mut self, target: Target, id: ContextId) {
        self.attached.entry(target).or_default().push(id);
    }

    pub(in crate::server) fn detach(&mut self, target: Target, id: ContextId) {
        if let Some(attached) = self.attached.get_mut(&target) {
            attached.retain(|one| *one != id);
        }
    }

    /// Whether some tool got PFM_MSG_END, and may still look at its context.
    pub(in crate::server) fn is_any_ended(&self) -> bool {
        let mut entries = self.entries.values();
        entries.any(|entry| entry.end_sent && !entry.zombie)
    }
}
