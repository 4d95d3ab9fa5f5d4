//! Which descriptors are contexts.
//!
//! All of it is atomics: looking costs a program's other descriptors two loads.
//! A descriptor that was closed behind the library's back (`close_range`, a
//! close inside of libc) is noticed by the number of its socket.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

use umpire_perfmon::link::inode;
use umpire_perfmon::maps::FileId;

/// Descriptors in a chunk of the table.
const CHUNK: usize = 1024;
/// Descriptors lie below this: the kernel's default for `fs.nr_open`.
const MAX_DESCRIPTORS: usize = 1 << 20;
/// Contexts in a chunk of the table.
const SLOTS: usize = 256;
/// Contexts that a process can have.
const MAX_CONTEXTS: usize = 1 << 16;

type Chunk<T> = OnceLock<Box<[T]>>;

/// For each descriptor its context's slot and 1 more, or 0.
static DESCRIPTORS: [Chunk<AtomicU32>; MAX_DESCRIPTORS / CHUNK] =
    [const { OnceLock::new() }; MAX_DESCRIPTORS / CHUNK];
static CONTEXTS: [Chunk<Slot>; MAX_CONTEXTS / SLOTS] =
    [const { OnceLock::new() }; MAX_CONTEXTS / SLOTS];

/// In place of a socket's number: no descriptor is left, but a thread still
/// reads. The slot becomes free as that thread leaves.
const RETIRED: u64 = u64::MAX;

/// A context that this process has descriptors of.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// Number of its socket; 0: the slot is free. Or [`RETIRED`].
    inode: AtomicU64,
    descriptors: AtomicU32,
    /// `PFM_FL_*`.
    pub(crate) flags: AtomicU32,
    /// Messages of an older generation are stale.
    pub(crate) generation: AtomicU32,
    /// Its handle, and the connection on which this is valid. Used by who holds
    /// the process's state only.
    pub(crate) handle: AtomicU32,
    /// See `handle`.
    pub(crate) epoch: AtomicU32,
    /// Size of its sampling buffer in bytes; 0: it has none.
    pub(crate) buffer_size: AtomicU64,
    /// The sampling buffer's file, as far as it was mapped: device, number.
    buffer: [AtomicU64; 2],
    /// Threads that read messages. They come and go by themselves: nobody else
    /// changes it, but in a child of `fork`.
    pub(crate) readers: AtomicU32,
    /// Whether a thread removes messages that nobody is to read. The same holds.
    pub(crate) draining: AtomicU32,
}

impl Slot {
    /// The sampling buffer's file, if it was mapped.
    pub(crate) fn buffer_file(&self) -> Option<FileId> {
        let [device, inode] = [self.buffer[0].load(SeqCst), self.buffer[1].load(SeqCst)];
        let half = |bits: u64| u32::try_from(bits & 0xffff_ffff).unwrap_or(0);
        (inode != 0).then(|| FileId {
            device: (half(device >> 32), half(device)),
            inode,
        })
    }

    /// Notes the sampling buffer's file.
    pub(crate) fn set_buffer_file(&self, file: FileId) {
        let (major, minor) = file.device;
        let device = u64::from(major) << 32 | u64::from(minor);
        self.buffer[0].store(device, SeqCst);
        self.buffer[1].store(file.inode, SeqCst);
    }

    fn clear(&self) {
        let words = [&self.buffer_size, &self.buffer[0], &self.buffer[1]];
        words.iter().for_each(|word| word.store(0, SeqCst));
        let words = [&self.flags, &self.generation, &self.handle, &self.epoch];
        words.iter().for_each(|word| word.store(0, SeqCst));
    }

    /// A thread reads no more.
    pub(crate) fn left_by_reader(&self) {
        if self.readers.fetch_sub(1, SeqCst) == 1 {
            self.free_if_retired();
        }
    }

    /// No descriptor is left.
    fn retire(&self) {
        self.clear();
        self.inode.store(RETIRED, SeqCst);
        // Either this sees the last reader gone, or that one sees the mark.
        if self.readers.load(SeqCst) == 0 {
            self.free_if_retired();
        }
    }

    fn free_if_retired(&self) {
        let _ = self.inode.compare_exchange(RETIRED, 0, SeqCst, SeqCst);
    }
}

/// The place of a descriptor, if its chunk exists.
fn place(descriptor: i32) -> Option<&'static AtomicU32> {
    let index = usize::try_from(descriptor).ok()?;
    DESCRIPTORS.get(index / CHUNK)?.get()?.get(index % CHUNK)
}

fn slot(number: u32) -> Option<&'static Slot> {
    let index = usize::try_from(number.checked_sub(1)?).ok()?;
    CONTEXTS.get(index / SLOTS)?.get()?.get(index % SLOTS)
}

/// The slot that a descriptor had when it was seen last.
pub(crate) fn seen(descriptor: i32) -> Option<&'static Slot> {
    slot(place(descriptor)?.load(SeqCst))
}

/// The slot of a descriptor which still is that context.
pub(crate) fn find(descriptor: BorrowedFd<'_>) -> Option<&'static Slot> {
    let slot = seen(descriptor.as_raw_fd())?;
    if inode(descriptor) == Some(slot.inode.load(SeqCst)) {
        return Some(slot);
    }
    forget(descriptor.as_raw_fd());
    None
}

/// Notes that a descriptor is the context whose socket has this number; a slot
/// that is new is all 0. `None`: the table is full.
pub(crate) fn insert(descriptor: i32, inode: u64) -> Option<&'static Slot> {
    let known = (1..)
        .map_while(slot)
        .position(|slot| slot.inode.load(SeqCst) == inode);
    let number = match known {
        Some(index) => index + 1,
        None => claim(inode)?,
    };
    let number = u32::try_from(number).ok()?;
    put(descriptor, number).then(|| slot(number)).flatten()
}

/// Takes a free slot for a context; its number.
fn claim(inode: u64) -> Option<usize> {
    for (chunk, slots) in CONTEXTS.iter().enumerate() {
        let slots = slots.get_or_init(|| (0..SLOTS).map(|_| Slot::default()).collect());
        for (index, slot) in slots.iter().enumerate() {
            let free = slot.inode.compare_exchange(0, inode, SeqCst, SeqCst);
            if free.is_ok() {
                slot.clear();
                return Some(chunk * SLOTS + index + 1);
            }
        }
    }
    None
}

/// Lets a descriptor stand for a slot; `false` if it is too large.
fn put(descriptor: i32, number: u32) -> bool {
    let Ok(index) = usize::try_from(descriptor) else {
        return false;
    };
    let Some(chunk) = DESCRIPTORS.get(index / CHUNK) else {
        return false;
    };
    let places = chunk.get_or_init(|| (0..CHUNK).map(|_| AtomicU32::new(0)).collect());
    if let Some(slot) = slot(number) {
        slot.descriptors.fetch_add(1, SeqCst);
    }
    let before = places[index % CHUNK].swap(number, SeqCst);
    leave(before);
    true
}

/// Notes that `new` is a duplicate of `old`.
pub(crate) fn duplicate(old: i32, new: i32) {
    if let Some(place) = place(old) {
        let number = place.load(SeqCst);
        if number != 0 {
            put(new, number);
        }
    }
}

/// Notes that a descriptor is gone. Returns the sampling buffer's file that no
/// descriptor of this process stands for any more.
pub(crate) fn forget(descriptor: i32) -> Option<FileId> {
    let number = place(descriptor)?.swap(0, SeqCst);
    leave(number)
}

fn leave(number: u32) -> Option<FileId> {
    let slot = slot(number)?;
    if slot.descriptors.fetch_sub(1, SeqCst) != 1 {
        return None;
    }
    let file = slot.buffer_file();
    slot.retire();
    file
}

/// In the child of a fork: the threads that read or drained are not there.
pub(crate) fn after_fork() {
    for slot in (1..).map_while(slot) {
        slot.readers.store(0, SeqCst);
        slot.draining.store(0, SeqCst);
        slot.free_if_retired();
    }
}
