//! A queue: its rings as a driver describes them, and the chains that it takes out of them.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

/// Chains that a queue holds at most. A driver's request is as many pieces at most, so this
/// also bounds how much it asks for at once.
pub(super) const MOST_CHAINS: u16 = 512;
/// Pieces of a chain, at most.
pub const MOST_PIECES: usize = 1024;
/// Bytes of a request, and of the room for a reply, at most: 1 MiB of data, and what is said
/// of it.
pub const MOST_BYTES: usize = (1 << 20) + (1 << 16);

/// What a driver did that no driver does. The device does nothing more until it is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Broken {
    /// A queue is of a size, or at addresses, where no queue can be.
    #[error("a queue that lies where no queue can be")]
    Rings,
    /// The driver says that there are more requests than the queue has room for.
    #[error("a queue with more requests than it has room for")]
    Heads,
    /// A chain that is circular or cut off, or whose pieces are in no possible order.
    #[error("a request whose pieces make no chain")]
    Chain,
    /// A buffer is not memory.
    #[error("a request outside of memory")]
    Memory,
    /// More bytes or pieces than a request can have.
    #[error("a request larger than any can be")]
    Size,
    /// The reply does not fit, not even one that says so.
    #[error("a request without room for its reply")]
    NoRoom,
}

/// Where a queue lies, in guest-physical addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rings {
    pub(super) size: u16,
    pub(super) descriptors: u64,
    /// The driver's area: what is available.
    pub(super) available: u64,
    /// The device's area: what is used.
    pub(super) used: u64,
}

/// What is kept of a queue that is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedQueue {
    rings: Rings,
    next_available: u16,
    next_used: u16,
}

/// A queue that is ready.
#[derive(Debug)]
pub(super) struct ReadyQueue {
    rings: Rings,
    queue: Queue,
}

/// A request: what a chain holds.
#[derive(Debug, Default)]
pub(super) struct Chain {
    head: u16,
    /// The bytes to be read.
    pub(super) request: Vec<u8>,
    /// Where the reply goes, in order.
    room: Vec<Range<u64>>,
    /// Bytes of that.
    room_bytes: usize,
}

impl ReadyQueue {
    /// The queue that lies at `rings`.
    pub(super) fn new(rings: Rings, memory: &GuestMemoryMmap) -> Result<Self, Broken> {
        let saved = SavedQueue {
            rings,
            next_available: 0,
            next_used: 0,
        };
        Self::restored(&saved, memory)
    }

    /// The one that was saved.
    pub(super) fn restored(saved: &SavedQueue, memory: &GuestMemoryMmap) -> Result<Self, Broken> {
        let rings = saved.rings;
        // Sizes that are none are refused by `try_from`, as is what is not aligned.
        let queue = Queue::try_from(QueueState {
            max_size: MOST_CHAINS,
            next_avail: saved.next_available,
            next_used: saved.next_used,
            event_idx_enabled: false,
            size: rings.size,
            ready: true,
            desc_table: rings.descriptors,
            avail_ring: rings.available,
            used_ring: rings.used,
        });
        let queue = queue.map_err(|_| Broken::Rings)?;
        let size = usize::from(rings.size);
        // 16 bytes a descriptor; of the rings 6, and 2 and 8 an entry (2.7.5, 2.7.6, 2.7.8).
        let areas = [
            (rings.descriptors, 16 * size, Permissions::Read),
            (rings.available, 6 + 2 * size, Permissions::Read),
            (rings.used, 6 + 8 * size, Permissions::Write),
        ];
        let is_memory =
            |(at, len, access)| GuestMemory::check_range(memory, GuestAddress(at), len, access);
        // A ring at 0 is the library's word for none.
        if rings.available == 0 || !areas.into_iter().all(is_memory) {
            return Err(Broken::Rings);
        }
        Ok(Self { rings, queue })
    }

    pub(super) fn save(&self) -> SavedQueue {
        SavedQueue {
            rings: self.rings,
            next_available: self.queue.next_avail(),
            next_used: self.queue.next_used(),
        }
    }

    /// The next request, if there is one.
    pub(super) fn take(&mut self, memory: &GuestMemoryMmap) -> Result<Option<Chain>, Broken> {
        let mut heads = self.queue.iter(memory).map_err(|_| Broken::Heads)?;
        let Some(pieces) = heads.next() else {
            return Ok(None);
        };
        let mut chain = Chain {
            head: pieces.head_index(),
            ..Chain::default()
        };
        let mut last: Option<Descriptor> = None;
        for (count, piece) in pieces.enumerate() {
            if count == MOST_PIECES {
                return Err(Broken::Size);
            }
            chain.add(piece, memory)?;
            last = Some(piece);
        }
        // The iterator ends without a word where a chain is circular or leads nowhere.
        match last {
            Some(last) if !last.has_next() => Ok(Some(chain)),
            _ => Err(Broken::Chain),
        }
    }

    /// Gives a request back, with a reply; whoever decodes code has to know of `written`.
    pub(super) fn give_back(
        &mut self,
        chain: &Chain,
        reply: &[u8],
        memory: &GuestMemoryMmap,
        written: &mut Vec<Range<u64>>,
    ) -> Result<(), Broken> {
        let mut rest = reply;
        for room in &chain.room {
            let len = usize::try_from(room.end - room.start).unwrap_or(usize::MAX);
            let (now, later) = rest.split_at(len.min(rest.len()));
            if now.is_empty() {
                break;
            }
            let at = GuestAddress(room.start);
            memory.write_slice(now, at).map_err(|_| Broken::Memory)?;
            written.push(room.start..room.start + now.len() as u64);
            rest = later;
        }
        let len = u32::try_from(reply.len() - rest.len()).unwrap_or(u32::MAX);
        let given = self.queue.add_used(memory, chain.head, len);
        given.map_err(|_| Broken::Chain)?;
        let used = self.rings.used;
        written.push(used..used + 6 + 8 * u64::from(self.rings.size));
        Ok(())
    }
}

impl Chain {
    /// Bytes that a reply may have.
    pub(super) fn room(&self) -> usize {
        self.room_bytes
    }

    fn add(&mut self, piece: Descriptor, memory: &GuestMemoryMmap) -> Result<(), Broken> {
        let (start, len) = (piece.addr().0, piece.len());
        let bytes = usize::try_from(len).map_err(|_| Broken::Size)?;
        if piece.is_write_only() {
            let end = start.checked_add(len.into()).ok_or(Broken::Memory)?;
            let access = Permissions::Write;
            if !GuestMemory::check_range(memory, piece.addr(), bytes, access) {
                return Err(Broken::Memory);
            }
            let room = self.room_bytes.saturating_add(bytes);
            if room > MOST_BYTES {
                return Err(Broken::Size);
            }
            self.room_bytes = room;
            self.room.push(start..end);
            return Ok(());
        }
        // What is read comes first (2.7.4.2).
        if !self.room.is_empty() {
            return Err(Broken::Chain);
        }
        let before = self.request.len();
        if before.saturating_add(bytes) > MOST_BYTES {
            return Err(Broken::Size);
        }
        self.request.resize(before + bytes, 0);
        let to = &mut self.request[before..];
        memory
            .read_slice(to, piece.addr())
            .map_err(|_| Broken::Memory)
    }
}
