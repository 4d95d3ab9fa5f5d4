//! What perf knows of the guest's tasks at each moment, and so which records it still needs.
//!
//! A profile says of each sample whose it is and what was mapped where. perf learns that from
//! records of changes in front of samples. So whatever a sample says that perf would not say is
//! written as a change: also one back, and one that ends something.

use std::collections::{BTreeMap, HashMap};

use super::format::{self, Mapped, Stamp};
use super::objects::{Object, Objects};
use crate::profile::programs::FileId;

const PAGE: u64 = 4096;

/// Whose a sample is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Who<'a> {
    pub(super) pid: u32,
    pub(super) tid: u32,
    pub(super) comm: &'a str,
    /// The name of the process's first thread.
    pub(super) process: &'a str,
    /// When the thread began.
    pub(super) started_ns: u64,
}

/// What a sample says of an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) file: FileId,
    pub(super) start: u64,
    pub(super) end: u64,
    /// Bytes from the start of the file to `start`.
    pub(super) offset: u64,
}

/// How much of a mapping a record tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    Whole,
    /// The page of an address.
    Page,
}

/// A thread as perf knows it.
#[derive(Clone, Debug)]
struct Thread {
    pid: u32,
    /// None of one that only its threads have spoken of.
    started_ns: Option<u64>,
    comm: String,
    /// Threads of a process share one, which perf gives them when it first hears of them.
    space: usize,
}

/// What is mapped, by first addresses.
type Space = BTreeMap<u64, Piece>;

#[derive(Clone, Copy, Debug)]
struct Piece {
    end: u64,
    /// None: nothing is known to be there.
    file: Option<FileId>,
    /// From an address to the offset in the file.
    delta: u64,
}

/// What perf knows of the guest's tasks.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// By their numbers, as perf has them.
    threads: HashMap<u32, Thread>,
    spaces: Vec<Space>,
}

impl Replay {
    /// Appends what perf needs to take a sample at `stamp` for one of `who`.
    pub(super) fn thread(&mut self, who: &Who<'_>, stamp: &Stamp, out: &mut Vec<u8>) {
        let first = (who.pid != who.tid).then_some(who.pid);
        if let Some(first) = first {
            self.first_thread(first, who.process, stamp, out);
        }
        let known = self.threads.get_mut(&who.tid);
        // The idle threads share number 0, and never end.
        let is_same = |known: &Thread| {
            let began = known.started_ns.is_none_or(|began| began == who.started_ns);
            known.pid == who.pid && (began || who.tid == 0)
        };
        match known {
            Some(known) if is_same(known) => {
                known.started_ns = Some(who.started_ns);
                if known.comm == who.comm {
                    return;
                }
                who.comm.clone_into(&mut known.comm);
            }
            other => {
                if let Some(ended) = other.map(|ended| ended.pid) {
                    let parent = first.unwrap_or(0);
                    format::put_exit((ended, who.tid), stamp, out);
                    format::put_fork((who.pid, who.tid), parent, stamp, out);
                }
                let space = match first {
                    Some(first) => self.threads[&first].space,
                    None => self.new_space(),
                };
                let thread = Thread {
                    pid: who.pid,
                    started_ns: Some(who.started_ns),
                    comm: who.comm.to_owned(),
                    space,
                };
                self.threads.insert(who.tid, thread);
            }
        }
        format::put_comm((who.pid, who.tid), who.comm, stamp, out);
    }

    /// The first thread of a process one of whose threads is sampled.
    fn first_thread(&mut self, pid: u32, comm: &str, stamp: &Stamp, out: &mut Vec<u8>) {
        let known = self.threads.get(&pid).map(|known| known.pid);
        if known == Some(pid) {
            return;
        }
        if let Some(other) = known {
            format::put_exit((other, pid), stamp, out);
            format::put_fork((pid, pid), 0, stamp, out);
        }
        format::put_comm((pid, pid), comm, stamp, out);
        let space = self.new_space();
        let thread = Thread {
            pid,
            started_ns: None,
            comm: comm.to_owned(),
            space,
        };
        self.threads.insert(pid, thread);
    }

    fn new_space(&mut self) -> usize {
        self.spaces.push(Space::new());
        self.spaces.len() - 1
    }

    /// Appends what perf needs to find at `address` what the sample of this thread says: none
    /// where nothing is known to be.
    pub(super) fn address(
        &mut self,
        (address, wanted, extent): (u64, Option<Wanted>, Extent),
        objects: &Objects,
        stamp: &Stamp,
        out: &mut Vec<u8>,
    ) {
        let Some(thread) = self.threads.get(&stamp.tid) else {
            return;
        };
        let space = &mut self.spaces[thread.space];
        let known = space.range(..=address).next_back();
        let known = known.filter(|(_, piece)| address < piece.end);
        let known = known.and_then(|(_, piece)| Some((piece.file?, piece.delta)));
        let delta = |one: &Wanted| one.offset.wrapping_sub(one.start);
        if known == wanted.map(|one| (one.file, delta(&one))) {
            return;
        }
        // Where a sample is outside of what it says, its page is told.
        let page = address & !(PAGE - 1);
        let (start, end) = match &wanted {
            Some(one) if extent == Extent::Whole && one.start <= address && address < one.end => {
                (one.start, one.end)
            }
            _ => (page, page.saturating_add(PAGE)),
        };
        let file = wanted.map(|one| one.file);
        let delta = wanted.map_or(0, |one| delta(&one));
        let none = Object::nothing();
        let object = file.map_or(&none, |file| objects.file(file));
        let mapped = Mapped {
            start,
            length: end - start,
            offset: start.wrapping_add(delta),
            name: &object.name,
        };
        format::put_program(&mapped, object, stamp, out);
        insert(space, start, Piece { end, file, delta });
    }
}

/// As perf does: what was there before keeps what is in front of it and behind it.
fn insert(space: &mut Space, start: u64, piece: Piece) {
    let before = space
        .range(..start)
        .next_back()
        .map(|(&at, &old)| (at, old));
    if let Some((at, old)) = before.filter(|(_, old)| old.end > start) {
        space.insert(at, Piece { end: start, ..old });
        if old.end > piece.end {
            space.insert(piece.end, old);
        }
    }
    let inside: Vec<u64> = space.range(start..piece.end).map(|(&at, _)| at).collect();
    for at in inside {
        if let Some(old) = space.remove(&at)
            && old.end > piece.end
        {
            space.insert(piece.end, old);
        }
    }
    space.insert(start, piece);
}
