//! What the agent has seen, and its answers.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::clock::{Clock, Reading};
use crate::guest::{Guest, Thread};
use crate::history::History;
use crate::records::{Change, Ids, MappedFile, Record, What};
use umpire_agent_wire::{
    self as wire, Ask, Item, LONGEST, LONGEST_COMM, LONGEST_PATH, MOMENTS, ToVmm,
};

/// How long a change waits, in ns: questions are about what was a moment ago, and as long as the
/// answer before took, 10 s at most.
const GRACE_NS: u64 = 10_000_000_000;
/// Changes that wait.
const WAITING: usize = 1 << 16;
/// Bytes of a part of an answer, but for one item. A port may need a millisecond for a byte, and
/// who says nothing whole for 3 s is taken for gone.
const PART: usize = LONGEST / 16;
/// Bytes of an answer after which no more mappings are told: the rest waits for the next
/// question. An answer that takes 10 s is none.
const MOST: usize = 1 << 13;

/// Everything that is known of the guest.
#[derive(Debug, Default)]
pub(crate) struct Session {
    clock: Clock,
    /// By APIC id.
    processors: HashMap<u32, History>,
    guest: Guest,
    /// Changes that the guest has not taken yet, by time and order.
    changes: BTreeMap<(u64, u64), Change>,
    order: u64,
    told: Told,
    /// Since when threads may have come and gone that nobody knows.
    incomplete: Option<u64>,
}

/// What the VMM knows already.
#[derive(Debug, Default)]
struct Told {
    threads: HashMap<Thread, u32>,
    files: HashMap<MappedFile, u32>,
    /// Of each memory how many mappings.
    memories: HashMap<u32, usize>,
}

impl Session {
    /// From `time` on records of this processor are taken. What happened there before is not
    /// known.
    pub(crate) fn opened(&mut self, apic_id: u32, time: u64) {
        self.lost(apic_id);
        self.processors.entry(apic_id).or_default().opened(time);
    }

    /// Records of this processor are missing since the last one.
    pub(crate) fn lost(&mut self, apic_id: u32) {
        let since = self.processors.entry(apic_id).or_default().lost();
        self.incomplete = Some(self.incomplete.map_or(since, |before| before.min(since)));
    }

    /// Takes what happened on a processor.
    pub(crate) fn take(&mut self, apic_id: u32, record: Record) {
        let Record { time, what } = record;
        let Some(history) = self.processors.get_mut(&apic_id) else {
            return;
        };
        match what {
            What::Switch { from, to } => history.switch(time, from, to),
            What::Runs(thread) => history.runs(time, Some(thread)),
            What::Lost => self.lost(apic_id),
            What::Change(change) => {
                self.order += 1;
                self.changes.insert((time, self.order), change);
            }
        }
    }

    /// Records were lost: threads may have come and gone. True once; the guest is looked at then.
    pub(crate) fn is_incomplete(&mut self) -> bool {
        self.incomplete.take().is_some()
    }

    /// Begins again with what runs in `guest`, which was looked for from `since` to `until`. All
    /// that happened up to then was taken.
    pub(crate) fn begin_again(&mut self, guest: Guest, since: u64, until: u64) {
        self.guest = guest.after(&self.guest);
        let mut changes = self.changes.split_off(&(since, 0));
        self.changes = changes.split_off(&(until, u64::MAX));
        let comms = changes.values().filter_map(|change| match change {
            Change::Comm { of, .. } => Some(of.tid),
            _ => None,
        });
        let mut renamed: HashSet<u32> = comms.collect();
        for ((time, _), change) in changes {
            match &change {
                Change::Comm { of, .. } => {
                    renamed.remove(&of.tid);
                }
                // Nobody knows the name that its parent had then.
                Change::Fork { child, parent }
                    if renamed.contains(&parent.tid) && !self.guest.has(*child) =>
                {
                    continue;
                }
                _ => {}
            }
            self.guest.change(time, change);
        }
        self.guest.settle(until);
        // Their memories are others now.
        self.told.memories.clear();
    }

    /// What the clocks show now; all that happened before was taken. Changes that no question
    /// can be about any more are done.
    pub(crate) fn now(&mut self, now: Reading) {
        self.clock.add(now);
        loop {
            let is_long = self.changes.len() > WAITING;
            let is_old = |time: u64| time.saturating_add(GRACE_NS) < now.ns;
            let first = self.changes.first_entry();
            let Some(first) = first.filter(|it| is_long || is_old(it.key().0)) else {
                break;
            };
            let ((time, _), change) = first.remove_entry();
            self.guest.change(time, change);
        }
    }

    /// The frames that answer `ask`.
    pub(crate) fn answer(&mut self, ask: &Ask) -> Vec<u8> {
        if ask.forget {
            self.told = Told::default();
        }
        let mut parts = Parts {
            sequence: ask.sequence,
            part: 0,
            items: Vec::new(),
            bytes: 0,
            frames: Vec::new(),
        };
        let (mut tsc, mut threads) = (0u64, Vec::new());
        for moment in ask.moments.iter().take(MOMENTS) {
            tsc = tsc.saturating_add(moment.tsc);
            let thread = self.thread_at(moment.apic_id, tsc);
            let number = thread.map_or(0, |thread| self.tell(thread, &mut parts));
            threads.push(number);
        }
        parts.push(Item::Threads(threads), MOMENTS * 5);
        parts.end();
        parts.frames
    }

    /// Who ran, as it was then.
    fn thread_at(&mut self, apic_id: u32, tsc: u64) -> Option<Thread> {
        let time = self.clock.at(tsc)?;
        let ids: Ids = self.processors.get(&apic_id)?.at(time)?;
        if ids.tid != 0 && self.incomplete.is_some_and(|since| since <= time) {
            return None;
        }
        while let Some(first) = self.changes.first_entry().filter(|it| it.key().0 <= time) {
            let ((time, _), change) = first.remove_entry();
            self.guest.change(time, change);
        }
        self.guest.thread(time, ids)
    }

    /// The number of a thread that the VMM knows then, with all that its process has mapped; 0 if
    /// that is too much for this answer.
    fn tell(&mut self, thread: Thread, parts: &mut Parts) -> u32 {
        let memory = thread.memory;
        let next = number_of(self.told.threads.len());
        let number = *self
            .told
            .threads
            .entry(thread)
            .or_insert_with_key(|thread| {
                let (pid, tid) = thread.ids;
                let told = wire::Thread {
                    number: next,
                    memory,
                    pid,
                    tid,
                    started_ns: thread.started_ns,
                    kernel: thread.kernel,
                    comm: short(&thread.comm, LONGEST_COMM),
                    process: short(&thread.process, LONGEST_COMM),
                };
                parts.push(
                    Item::Thread(told),
                    40 + thread.comm.len() + thread.process.len(),
                );
                next
            });
        if memory != 0 {
            let known = self.told.memories.entry(memory).or_default();
            for (mapped, file) in self.guest.mappings(memory, *known) {
                if parts.frames.len() + parts.bytes > MOST {
                    return 0;
                }
                *known += 1;
                let next = number_of(self.told.files.len());
                let files = &mut self.told.files;
                let number = *files.entry(file.clone()).or_insert_with(|| {
                    let (name, deleted) = match file.name.strip_suffix(" (deleted)") {
                        Some(name) => (name, true),
                        None => (file.name.as_str(), false),
                    };
                    let name = short(name, LONGEST_PATH);
                    let bytes = 40 + name.len();
                    let told = wire::File {
                        number: next,
                        device: file.device,
                        inode: file.inode,
                        deleted,
                        name,
                    };
                    parts.push(Item::File(told), bytes);
                    next
                });
                let told = wire::Mapping {
                    memory,
                    file: number,
                    start: mapped.start,
                    length: mapped.length,
                    offset: mapped.offset,
                };
                parts.push(Item::Mapping(told), 40);
            }
        }
        number
    }
}

/// The next number after so many.
fn number_of(count: usize) -> u32 {
    u32::try_from(count + 1).unwrap_or(u32::MAX)
}

/// `text` with at most `most` bytes; nothing of one that is longer, since a part of a path
/// names another file.
fn short(text: &str, most: usize) -> String {
    Some(text)
        .filter(|text| text.len() <= most)
        .unwrap_or_default()
        .to_owned()
}

/// An answer on its way into frames.
struct Parts {
    sequence: u32,
    part: u32,
    items: Vec<Item>,
    /// Of these items, at most.
    bytes: usize,
    frames: Vec<u8>,
}

impl Parts {
    fn push(&mut self, item: Item, bytes: usize) {
        if self.bytes + bytes > PART && !self.items.is_empty() {
            self.end();
        }
        self.bytes += bytes;
        self.items.push(item);
    }

    fn end(&mut self) {
        self.frames.extend(wire::frame(&ToVmm::Told {
            sequence: self.sequence,
            part: self.part,
            items: std::mem::take(&mut self.items),
        }));
        (self.part, self.bytes) = (self.part + 1, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::Started;
    use crate::records::Mapped;
    use umpire_agent_wire::{Frames, Moment};

    fn ids(pid: u32, tid: u32) -> Ids {
        Ids { pid, tid }
    }

    fn change(time: u64, change: Change) -> Record {
        let what = What::Change(change);
        Record { time, what }
    }

    fn comm(time: u64, of: Ids, comm: &str) -> Record {
        let comm = comm.to_owned();
        change(
            time,
            Change::Comm {
                of,
                comm,
                exec: true,
            },
        )
    }

    fn switch(time: u64, from: Ids, to: Ids) -> Record {
        let what = What::Switch { from, to };
        Record { time, what }
    }

    /// Each at a place of its own.
    fn map(time: u64, pid: u32, name: &str) -> Record {
        map_at(0x1000 * time, time, pid, name)
    }

    fn map_at(start: u64, time: u64, pid: u32, name: &str) -> Record {
        let file = MappedFile {
            name: name.to_owned(),
            ..MappedFile::default()
        };
        let mapping = Mapped {
            start,
            length: 0x1000,
            offset: 0,
            file,
        };
        change(time, Change::Map { pid, mapping })
    }

    /// The items of an answer, which is whole.
    fn items(session: &mut Session, forget: bool, moments: &[(u32, u64)]) -> Vec<Item> {
        let mut before = 0;
        let moments = moments.iter().map(|(apic_id, tsc)| {
            let moment = Moment {
                apic_id: *apic_id,
                tsc: tsc - before,
            };
            before = *tsc;
            moment
        });
        let moments = moments.collect();
        let bytes = session.answer(&Ask {
            sequence: 9,
            forget,
            moments,
        });
        let (mut all, mut parts) = (Vec::new(), 0);
        Frames::default().push(&bytes, |message| {
            let ToVmm::Told {
                sequence,
                part,
                items,
            } = message
            else {
                panic!("{message:?}");
            };
            assert_eq!((sequence, part), (9, parts));
            parts += 1;
            all.extend(items);
        });
        all
    }

    fn names(items: &[Item]) -> Vec<&str> {
        let names = items.iter().filter_map(|item| match item {
            Item::Thread(thread) => Some(thread.comm.as_str()),
            Item::File(file) => Some(file.name.as_str()),
            _ => None,
        });
        names.collect()
    }

    /// A clock of 2 GHz.
    fn session() -> Session {
        let mut guest = Guest::default();
        guest.start(0, ids(1, 1), "init", Started::default());
        let mut session = Session::default();
        session.opened(4, 0);
        session.opened(6, 0);
        assert!(session.is_incomplete());
        session.begin_again(guest, 0, 0);
        session.now(Reading { tsc: 0, ns: 0 });
        session
    }

    #[test]
    fn moments_have_the_names_of_then() {
        let mut session = session();
        session.take(4, switch(100, ids(0, 0), ids(1, 1)));
        session.take(4, comm(200, ids(1, 1), "sh"));
        session.take(4, map(210, 1, "/bin/sh"));
        session.take(4, switch(300, ids(1, 1), ids(0, 0)));
        session.now(Reading { tsc: 1000, ns: 500 });
        let moments = [(4, 100), (4, 300), (4, 500), (6, 500), (9, 500), (4, 800)];
        let found = items(&mut session, false, &moments);
        assert_eq!(names(&found), ["swapper", "init", "sh", "/bin/sh"]);
        assert_eq!(found.last(), Some(&Item::Threads(vec![1, 2, 3, 0, 0, 1])));

        // What was told is not told again, unless it was forgotten.
        let found = items(&mut session, false, &[(4, 500)]);
        assert_eq!(found, [Item::Threads(vec![3])]);
        session.take(4, map(400, 1, "/lib/x (deleted)"));
        session.now(Reading {
            tsc: 2000,
            ns: 1000,
        });
        session.take(4, switch(450, ids(0, 0), ids(1, 1)));
        let found = items(&mut session, false, &[(4, 1000)]);
        assert_eq!(names(&found), ["/lib/x"]);
        let found = items(&mut session, true, &[(4, 1000)]);
        assert_eq!(names(&found), ["sh", "/bin/sh", "/lib/x"]);
    }

    #[test]
    fn changes_do_not_wait_for_ever() {
        let mut session = session();
        for number in 0..2 * WAITING as u64 {
            session.take(4, comm(number, ids(1, 1), "x"));
        }
        session.now(Reading { tsc: 1, ns: 1 });
        assert_eq!(session.changes.len(), WAITING);
        let ns = 2 * GRACE_NS;
        session.now(Reading { tsc: 2 * ns, ns });
        assert_eq!(session.changes.len(), 0);
    }

    #[test]
    fn long_answers_come_in_parts() {
        let mut session = session();
        for number in 0..50 {
            session.take(4, map(10 + number, 1, &format!("/{number}")));
        }
        session.take(4, switch(1000, ids(0, 0), ids(1, 1)));
        session.now(Reading {
            tsc: 4000,
            ns: 2000,
        });
        let found = items(&mut session, false, &[(4, 3000)]);
        assert_eq!(found.len(), 1 + 2 * 50 + 1);
    }

    #[test]
    fn a_later_state_is_no_answer() {
        let mut session = session();
        session.take(4, switch(100, ids(0, 0), ids(1, 1)));
        session.take(4, comm(200, ids(1, 1), "sh"));
        session.now(Reading { tsc: 1000, ns: 500 });
        assert_eq!(names(&items(&mut session, false, &[(4, 500)])), ["sh"]);
        // A question that comes late.
        let found = items(&mut session, false, &[(4, 300)]);
        assert_eq!(found, [Item::Threads(vec![0])]);
    }

    #[test]
    fn moments_around_a_mapping_that_replaces_another_have_two_memories() {
        let mut session = session();
        session.take(4, switch(10, ids(0, 0), ids(1, 1)));
        session.take(4, map_at(0x1000, 20, 1, "/one"));
        session.take(4, map_at(0x1000, 200, 1, "/two"));
        session.now(Reading { tsc: 1000, ns: 500 });
        let found = items(&mut session, false, &[(4, 100), (4, 500)]);
        assert_eq!(found.last(), Some(&Item::Threads(vec![1, 2])));
        let memories: Vec<_> = found
            .iter()
            .filter_map(|item| match item {
                Item::Thread(thread) => Some(thread.memory),
                Item::Mapping(mapping) => Some(mapping.memory),
                _ => None,
            })
            .collect();
        assert_eq!(memories.len(), 4);
        assert_eq!(memories[0], memories[1]);
        assert_eq!(memories[2], memories[3]);
        assert_ne!(memories[0], memories[2]);
    }

    #[test]
    fn what_is_too_much_for_an_answer_comes_with_the_next() {
        let mut session = session();
        let count = 3000;
        for number in 0..count {
            let name = format!("/a/name/of/some/length/{number}");
            session.take(4, map_at(number * 0x1000, 10, 1, &name));
        }
        session.take(4, switch(10, ids(0, 0), ids(1, 1)));
        session.now(Reading { tsc: 1000, ns: 500 });
        let (mut told, mut questions) = (0, 0);
        loop {
            questions += 1;
            let found = items(&mut session, false, &[(4, 500)]);
            let is_mapping = |item: &&Item| matches!(item, Item::Mapping(_));
            told += found.iter().filter(is_mapping).count() as u64;
            match found.last() {
                Some(Item::Threads(threads)) if threads[..] == [1] => break,
                last => assert_eq!(last, Some(&Item::Threads(vec![0])), "not whole"),
            }
        }
        assert_eq!(told, count);
        assert!((10..40).contains(&questions), "{questions}");
    }

    #[test]
    fn nothing_is_known_from_a_loss_to_the_end_of_the_next_look() {
        let mut session = session();
        session.take(6, switch(90, ids(0, 0), ids(1, 1)));
        session.take(4, switch(100, ids(0, 0), ids(1, 1)));
        session.lost(4);
        session.take(4, switch(120, ids(1, 1), ids(0, 0)));
        session.now(Reading { tsc: 1000, ns: 500 });
        let ask = |session: &mut Session| {
            items(session, false, &[(6, 190), (4, 210), (6, 400), (4, 400)])
        };
        let found = ask(&mut session);
        assert_eq!(names(&found), ["init", "swapper"]);
        assert_eq!(found.last(), Some(&Item::Threads(vec![1, 0, 0, 2])));
        assert!(session.is_incomplete());
        let mut guest = Guest::default();
        guest.start(u64::MAX, ids(1, 1), "init", Started::default());
        session.begin_again(guest, 150, 200);
        let found = ask(&mut session);
        assert_eq!(found.last(), Some(&Item::Threads(vec![0, 0, 3, 2])));
    }

    #[test]
    fn a_fork_by_who_has_another_name_now_is_not_known() {
        let mut session = session();
        let (renamed, early, late) = (ids(1, 1), ids(7, 7), ids(8, 8));
        let fork = |time, child| {
            let parent = renamed;
            change(time, Change::Fork { child, parent })
        };
        session.take(4, fork(110, early));
        session.take(4, comm(120, renamed, "then"));
        session.take(4, fork(130, late));
        let mut guest = Guest::default();
        guest.start(u64::MAX, renamed, "then", Started::default());
        session.begin_again(guest, 100, 140);
        assert_eq!(session.guest.thread(150, early), None);
        let late = session.guest.thread(150, late);
        assert_eq!(late.map(|it| it.comm), Some("then".to_owned()));
    }

    #[test]
    fn after_a_gap_everything_is_looked_for_again() {
        let mut session = session();
        session.take(4, switch(100, ids(0, 0), ids(1, 1)));
        session.take(4, map(150, 1, "/old"));
        session.now(Reading { tsc: 400, ns: 200 });
        assert!(!session.is_incomplete());
        let old = items(&mut session, false, &[(4, 300)]);
        assert_eq!(names(&old), ["init", "/old"]);
        session.take(
            4,
            Record {
                time: 210,
                what: What::Lost,
            },
        );
        assert!(session.is_incomplete() && !session.is_incomplete());
        let mut guest = Guest::default();
        guest.start(u64::MAX, ids(1, 1), "init", Started::default());
        session.take(4, comm(310, ids(1, 1), "later"));
        session.begin_again(guest, 300, 320);
        session.now(Reading { tsc: 1000, ns: 500 });
        let found = items(&mut session, false, &[(4, 500)]);
        assert_eq!(found, [Item::Threads(vec![0])], "nobody knows");
        session.take(4, switch(350, ids(0, 0), ids(1, 1)));
        let found = items(&mut session, false, &[(4, 800)]);
        assert_eq!(names(&found), ["later"]);
    }
}
