//! The contexts that there are.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use perfmon_abi::LoadArg;
use perfmon_abi::wire::{Call, Errno, Refusal};
use pmu_virt::perfmon::{Context, ContextId, Hosted, MessageQueue};

use super::answer::RequestId;
use crate::dispatcher::Target;
use crate::socket::{FileId, Peer};

/// Event sets of all contexts of a VM.
pub(super) const MOST_SETS: usize = 1 << 16;

/// Where a context is.
#[derive(Debug)]
pub(super) enum Attachment {
    /// Attached to nothing.
    Detached {
        context: Box<Context>,
        queue: Box<dyn MessageQueue>,
    },
    /// On its way to a vCPU or core, attached to it, or on its way back.
    Attached(Target),
}

impl Attachment {
    /// That of a context that has come back.
    pub(super) fn home(hosted: Hosted) -> Self {
        let (_, context, queue) = hosted.into_parts();
        Attachment::Detached { context, queue }
    }
}

/// A context.
#[derive(Debug)]
pub(super) struct ContextEntry {
    /// The tool's end of its socket.
    pub(super) file: FileId,
    /// The server's end.
    pub(super) socket: Arc<OwnedFd>,
    /// The file of its sampling buffer, and its size.
    pub(super) buffer: Option<(Arc<OwnedFd>, u64)>,
    /// Who created it.
    pub(super) creator: Peer,
    pub(super) flags: u32,
    pub(super) format: Option<String>,
    pub(super) generation: u16,
    pub(super) place: Attachment,
    /// Its event sets; they come and go only at home (3.1.10).
    pub(super) sets: usize,
    /// A job is under way; for whom, if somebody waits for it.
    pub(super) job: Option<Option<RequestId>>,
    /// Commands that came meanwhile: no more than there are connections.
    pub(super) waiting: VecDeque<(RequestId, Call)>,
    /// Loads of other contexts, which wait until this one, a zombie, has let go.
    pub(super) queued_loads: VecDeque<(ContextId, RequestId, LoadArg)>,
    /// Nobody has its descriptor.
    pub(super) zombie: bool,
    /// PFM_MSG_END was sent.
    pub(super) told: bool,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Contexts {
    entries: BTreeMap<ContextId, ContextEntry>,
    files: HashMap<FileId, ContextId>,
    /// Who is attached, or about to be, to what.
    attached: BTreeMap<Target, ContextId>,
    last: u32,
    /// Event sets of all of them.
    sets: usize,
}

impl Contexts {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn get(&self, id: ContextId) -> Option<&ContextEntry> {
        self.entries.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: ContextId) -> Option<&mut ContextEntry> {
        self.entries.get_mut(&id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ContextId, &ContextEntry)> {
        self.entries.iter().map(|(id, entry)| (*id, entry))
    }

    /// Whether `more` event sets can be made.
    pub(super) fn room_for_sets(&self, more: usize) -> Result<(), Refusal> {
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
    pub(super) fn recount_sets(&mut self, id: ContextId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && let Attachment::Detached { context, .. } = &entry.place
        {
            let before = std::mem::replace(&mut entry.sets, context.set_count());
            self.sets = self.sets - before + entry.sets;
        }
    }

    /// The context whose descriptor this is.
    pub(super) fn of_file(&self, file: FileId) -> Option<ContextId> {
        self.files.get(&file).copied()
    }

    /// A number that no context of this machine has had; they start at 1. After
    /// four billion there is none.
    pub(super) fn next_id(&mut self) -> Option<ContextId> {
        self.last = self.last.checked_add(1)?;
        Some(ContextId(self.last))
    }

    pub(super) fn insert(&mut self, id: ContextId, entry: ContextEntry) {
        self.files.insert(entry.file, id);
        self.sets += entry.sets;
        self.entries.insert(id, entry);
    }

    pub(super) fn remove(&mut self, id: ContextId) -> Option<ContextEntry> {
        let entry = self.entries.remove(&id)?;
        self.files.remove(&entry.file);
        self.sets -= entry.sets;
        Some(entry)
    }

    /// A connection has ended: what it has asked for, and nobody has begun, is not
    /// done any more.
    pub(super) fn forget(&mut self, connection: u64) {
        for entry in self.entries.values_mut() {
            let stays = |asked: &RequestId| asked.connection != connection;
            entry.waiting.retain(|(asked, _)| stays(asked));
            entry.queued_loads.retain(|(_, asked, _)| stays(asked));
        }
    }

    /// Who is at `target`.
    pub(super) fn at(&self, target: Target) -> Option<ContextId> {
        self.attached.get(&target).copied()
    }

    pub(super) fn attach(&mut self, target: Target, id: ContextId) {
        self.attached.insert(target, id);
    }

    pub(super) fn detach(&mut self, target: Target, id: ContextId) {
        if self.at(target) == Some(id) {
            self.attached.remove(&target);
        }
    }

    /// Somebody was told of the end, and may still look at the context.
    pub(super) fn anybody_told(&self) -> bool {
        let mut entries = self.entries.values();
        entries.any(|entry| entry.told && !entry.zombie)
    }
}
