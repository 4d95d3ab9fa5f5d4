//! Threads and processes of the guest, and what these have mapped.

use std::collections::{BTreeMap, HashMap};

use crate::records::{Change, Ids, Mapped, MappedFile};

/// Mappings of a process that are kept, with those that are there twice. Then it begins anew
/// with what still stands.
const MAPPINGS: usize = 1 << 12;

/// The thread that starts the kernel's own.
const KTHREADD: u32 = 2;

/// A thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Thread {
    pub(crate) ids: (u32, u32),
    pub(crate) comm: String,
    /// The name of the process's first thread.
    pub(crate) process: String,
    pub(crate) started_ns: u64,
    pub(crate) kernel: bool,
    /// 0: none.
    pub(crate) memory: u32,
}

/// When and as what a thread began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Started {
    pub(crate) ns: u64,
    pub(crate) kernel: bool,
}

#[derive(Clone, Debug)]
struct Known {
    pid: u32,
    comm: String,
    started: Started,
    /// When all this began to be so, as far as is known.
    since: u64,
}

#[derive(Debug, Default)]
struct Process {
    threads: u32,
    memory: u32,
    /// When it began to have this memory, and its first thread or none.
    since: u64,
}

/// What runs in the guest.
#[derive(Debug, Default)]
pub(crate) struct Guest {
    threads: HashMap<u32, Known>,
    processes: HashMap<u32, Process>,
    /// By the numbers of memories: what was mapped, in this order.
    mapped: HashMap<u32, Vec<Mapped>>,
    /// The last number of a memory.
    memories: u32,
}

impl Guest {
    /// A guest of which nothing is known, whose memories have other numbers than those of
    /// `before`.
    pub(crate) fn after(mut self, before: &Self) -> Self {
        let shift = before.memories;
        self.memories += shift;
        for process in self.processes.values_mut() {
            process.memory += shift;
        }
        let mapped = std::mem::take(&mut self.mapped);
        self.mapped = mapped
            .into_iter()
            .map(|(memory, all)| (memory + shift, all))
            .collect();
        self
    }

    /// A thread is there, since `time` at the latest.
    pub(crate) fn start(&mut self, time: u64, ids: Ids, comm: &str, started: Started) {
        let Ids { pid, tid } = ids;
        let known = Known {
            pid,
            comm: comm.to_owned(),
            started,
            since: time,
        };
        if !self.processes.contains_key(&pid) {
            let memory = self.memory();
            let process = Process {
                threads: 0,
                memory,
                since: time,
            };
            self.processes.insert(pid, process);
        }
        // First, so that a process that already has the thread stays.
        if let Some(process) = self.processes.get_mut(&pid) {
            process.threads += 1;
        }
        if let Some(before) = self.threads.insert(tid, known) {
            self.leave(before.pid);
        }
    }

    /// A process has mapped something.
    pub(crate) fn map(&mut self, time: u64, pid: u32, mapping: Mapped) {
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        let mapped = self.mapped.entry(process.memory).or_default();
        // Of a file whose parts are mapped again.
        if at(mapped, mapping.start) == Some(&mapping) {
            return;
        }
        // Whoever knows a memory by its number may know it as it was before, or will be.
        let replaces = mapped.iter().any(|one| is_other(one, &mapping));
        mapped.push(mapping);
        if replaces || mapped.len() > MAPPINGS {
            let standing = standing(mapped);
            self.renew(if replaces { time } else { 0 }, pid, standing);
        }
    }

    /// Something has changed, at `time`.
    pub(crate) fn change(&mut self, time: u64, change: Change) {
        match change {
            Change::Fork { child, parent } => self.fork(time, child, parent),
            Change::Exit(Ids { tid, .. }) => {
                let Some(gone) = self.threads.remove(&tid) else {
                    return;
                };
                self.leave(gone.pid);
                if let Some(process) = self.processes.get_mut(&gone.pid)
                    && tid == gone.pid
                {
                    process.since = process.since.max(time);
                }
            }
            Change::Comm { of, comm, exec } => {
                let known = self.threads.get_mut(&of.tid);
                if let Some(known) = known.filter(|known| known.pid == of.pid) {
                    known.comm = comm;
                    known.started.kernel &= !exec;
                    known.since = known.since.max(time);
                } else {
                    let started = Started {
                        ns: time,
                        kernel: false,
                    };
                    self.start(time, of, &comm, started);
                }
                if exec {
                    self.keep_only(of);
                    self.renew(time, of.pid, Vec::new());
                }
            }
            Change::Map { pid, mapping } => self.map(time, pid, mapping),
        }
    }

    fn fork(&mut self, time: u64, child: Ids, parent: Ids) {
        // Whoever looked later has found it, perhaps under the name that it took then.
        let known = self.threads.get(&child.tid);
        if known.is_some_and(|known| self.has(child) && known.since > time) {
            return;
        }
        let by = self.threads.get(&parent.tid);
        let started = Started {
            ns: time,
            kernel: parent.pid == KTHREADD || by.is_some_and(|by| by.started.kernel),
        };
        let comm = by.map_or_else(String::new, |by| by.comm.clone());
        self.start(time, child, &comm, started);
        if child.pid != parent.pid {
            let from = self.processes.get(&parent.pid);
            let from = from.and_then(|process| self.mapped.get(&process.memory));
            let copy = from.map(|from| standing(from)).unwrap_or_default();
            self.keep_only(child);
            self.renew(time, child.pid, copy);
        }
    }

    /// Everything is as it was at `time`, when it had been looked for.
    pub(crate) fn settle(&mut self, time: u64) {
        for known in self.threads.values_mut() {
            known.since = known.since.min(time);
        }
        for process in self.processes.values_mut() {
            process.since = process.since.min(time);
        }
    }

    /// The thread is known.
    pub(crate) fn has(&self, ids: Ids) -> bool {
        let known = self.threads.get(&ids.tid);
        known.is_some_and(|known| known.pid == ids.pid)
    }

    /// The thread, if it is as it was at `time`. The idle threads are always there.
    pub(crate) fn thread(&self, time: u64, ids: Ids) -> Option<Thread> {
        if ids.tid == 0 {
            return Some(Thread {
                comm: "swapper".to_owned(),
                process: "swapper".to_owned(),
                kernel: true,
                ..Thread::default()
            });
        }
        let known = self
            .threads
            .get(&ids.tid)
            .filter(|known| known.pid == ids.pid)?;
        let first = self.threads.get(&known.pid);
        let kernel = known.started.kernel;
        let process = self.processes.get(&known.pid)?;
        let latest = first.unwrap_or(known).since.max(process.since);
        if time < latest.max(known.since) {
            return None;
        }
        Some(Thread {
            ids: (known.pid, ids.tid),
            comm: known.comm.clone(),
            process: first.unwrap_or(known).comm.clone(),
            started_ns: known.started.ns,
            kernel,
            memory: if kernel { 0 } else { process.memory },
        })
    }

    /// What was mapped into a memory, but for the first `skip`, and its files.
    pub(crate) fn mappings(
        &self,
        memory: u32,
        skip: usize,
    ) -> impl Iterator<Item = (&Mapped, &MappedFile)> {
        let all = self.mapped.get(&memory).into_iter().flatten();
        all.skip(skip).map(|mapped| (mapped, &mapped.file))
    }

    fn memory(&mut self) -> u32 {
        self.memories += 1;
        self.memories
    }

    /// A thread of the process is gone.
    fn leave(&mut self, pid: u32) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        process.threads = process.threads.saturating_sub(1);
        if process.threads == 0 {
            self.mapped.remove(&process.memory);
            self.processes.remove(&pid);
        }
    }

    /// The process has no other thread: one that was not its first takes the first one's number
    /// when it calls exec, and nobody says that its own is free.
    fn keep_only(&mut self, ids: Ids) {
        let process = self.processes.get_mut(&ids.pid);
        if let Some(process) = process.filter(|process| process.threads > 1) {
            process.threads = 1;
            self.threads
                .retain(|tid, known| known.pid != ids.pid || *tid == ids.tid);
        }
    }

    /// From `time` on the process has a memory with another number, and this in it.
    fn renew(&mut self, time: u64, pid: u32, mapped: Vec<Mapped>) {
        let memory = self.memory();
        if let Some(process) = self.processes.get_mut(&pid) {
            self.mapped.remove(&process.memory);
            self.mapped.insert(memory, mapped);
            process.memory = memory;
            process.since = process.since.max(time);
        }
    }
}

fn at(mapped: &[Mapped], address: u64) -> Option<&Mapped> {
    let has = |one: &&Mapped| (one.start..one.start.saturating_add(one.length)).contains(&address);
    mapped.iter().rev().find(has)
}

/// They are at one place, and not parts of one mapping.
fn is_other(one: &Mapped, other: &Mapped) -> bool {
    let end = |of: &Mapped| of.start.saturating_add(of.length);
    let base = |of: &Mapped| of.offset.wrapping_sub(of.start);
    // What is no file has no offset in /proc, but one in records.
    let is_same = one.file == other.file && (one.file.inode == 0 || base(one) == base(other));
    one.start < end(other) && other.start < end(one) && !is_same
}

/// What others have not replaced. Of too much the middle is dropped: a program and its
/// libraries come first, and what it does now last.
fn standing(mapped: &[Mapped]) -> Vec<Mapped> {
    // What later ones have: where it ends, by where it begins. These do not touch each other.
    let mut taken = BTreeMap::<u64, u64>::new();
    let mut standing = Vec::new();
    for one in mapped.iter().rev().filter(|one| one.length > 0) {
        let (start, end) = (one.start, one.start.saturating_add(one.length));
        let before = taken.range(..start).next_back();
        let from = before.filter(|(_, to)| **to >= start);
        let from = from.map_or(start, |(from, _)| *from);
        let others: Vec<_> = taken.range(from..=end).map(|(a, b)| (*a, *b)).collect();
        let (mut at, mut last) = (start, end);
        for (from, to) in others.iter().copied().chain([(end, end)]) {
            if from > at {
                standing.push(Mapped {
                    start: at,
                    length: from - at,
                    offset: one.offset.wrapping_add(at - start),
                    file: one.file.clone(),
                });
            }
            at = at.max(to);
            last = last.max(to);
            taken.remove(&from);
        }
        taken.insert(from, last);
    }
    standing.reverse();
    if standing.len() > MAPPINGS {
        standing.drain(MAPPINGS / 4..standing.len() - MAPPINGS / 4);
    }
    standing
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(pid: u32, tid: u32) -> Ids {
        Ids { pid, tid }
    }

    fn mapped(start: u64, name: &str) -> Mapped {
        Mapped {
            start,
            length: 0x1000,
            offset: 0,
            file: MappedFile {
                name: name.to_owned(),
                ..MappedFile::default()
            },
        }
    }

    fn comm(of: Ids, comm: &str, exec: bool) -> Change {
        let comm = comm.to_owned();
        Change::Comm { of, comm, exec }
    }

    fn map(pid: u32, start: u64, name: &str) -> Change {
        let mapping = mapped(start, name);
        Change::Map { pid, mapping }
    }

    fn names(guest: &Guest, pid: u32) -> Vec<String> {
        let thread = guest.thread(u64::MAX, ids(pid, pid)).expect("a thread");
        let all = guest.mappings(thread.memory, 0);
        all.map(|(_, file)| file.name.clone()).collect()
    }

    #[test]
    fn a_shell_starts_a_program() {
        let mut guest = Guest::default();
        guest.start(0, ids(10, 10), "sh", Started::default());
        guest.map(0, 10, mapped(0x1000, "/bin/sh"));
        let child = ids(11, 11);
        guest.change(
            50,
            Change::Fork {
                child,
                parent: ids(10, 10),
            },
        );
        let forked = guest.thread(u64::MAX, child).expect("a thread");
        assert_eq!((&*forked.comm, forked.started_ns), ("sh", 50));
        assert_eq!(names(&guest, 11), ["/bin/sh"]);
        guest.change(60, comm(child, "walk", true));
        guest.change(61, map(11, 0x1000, "/bin/walk"));
        guest.change(62, map(11, 0x1000, "/bin/walk"));
        let walks = guest.thread(u64::MAX, child).expect("a thread");
        assert_eq!((&*walks.comm, walks.started_ns), ("walk", 50));
        assert_ne!(walks.memory, forked.memory);
        assert_eq!(names(&guest, 11), ["/bin/walk"]);
        assert_eq!(names(&guest, 10), ["/bin/sh"]);

        let thread = ids(11, 12);
        guest.change(
            70,
            Change::Fork {
                child: thread,
                parent: child,
            },
        );
        guest.change(71, comm(thread, "worker", false));
        let worker = guest.thread(u64::MAX, thread).expect("a thread");
        assert_eq!((&*worker.comm, &*worker.process), ("worker", "walk"));
        assert_eq!(worker.memory, walks.memory);
        guest.change(80, Change::Exit(child));
        assert!(guest.thread(u64::MAX, child).is_none());
        assert!(
            guest.thread(u64::MAX, thread).is_some(),
            "its process is still there"
        );
        guest.change(81, Change::Exit(thread));
        assert!(guest.thread(u64::MAX, thread).is_none() && !guest.processes.contains_key(&11));
        assert_eq!(guest.mapped.len(), 1, "{guest:?}");
    }

    #[test]
    fn a_process_keeps_its_memory_under_another_name() {
        let mut guest = Guest::default();
        guest.start(0, ids(5, 5), "a", Started::default());
        guest.map(0, 5, mapped(0x1000, "/bin/a"));
        let before = guest.thread(10, ids(5, 5)).expect("a thread");
        guest.change(20, comm(ids(5, 5), "b", false));
        let after = guest.thread(20, ids(5, 5)).expect("a thread");
        assert_eq!((&*after.comm, after.memory), ("b", before.memory));
        assert_eq!(names(&guest, 5), ["/bin/a"]);
        assert_eq!(guest.thread(19, ids(5, 5)), None, "it had another name");
    }

    #[test]
    fn who_looked_later_knows_better_than_a_fork() {
        let mut guest = Guest::default();
        guest.start(u64::MAX, ids(5, 5), "sh", Started::default());
        guest.start(u64::MAX, ids(6, 6), "walk", Started::default());
        guest.map(u64::MAX, 6, mapped(0x1000, "/bin/walk"));
        let (child, parent) = (ids(6, 6), ids(5, 5));
        guest.change(50, Change::Fork { child, parent });
        guest.settle(60);
        assert_eq!(guest.thread(59, child), None);
        let found = guest.thread(60, child).expect("a thread");
        assert_eq!((&*found.comm, found.started_ns), ("walk", 0));
        assert_eq!(names(&guest, 6), ["/bin/walk"]);
        // And what is older is not what forks now.
        guest.change(70, Change::Fork { child, parent });
        let found = guest.thread(70, child).expect("a thread");
        assert_eq!((&*found.comm, found.started_ns), ("sh", 70));
        assert_eq!(names(&guest, 6), [""; 0]);
    }

    #[test]
    fn exec_leaves_one_thread() {
        let mut guest = Guest::default();
        for tid in 5..8 {
            guest.start(0, ids(5, tid), "a", Started::default());
        }
        guest.start(0, ids(9, 9), "other", Started::default());
        // By the second thread, which is the first one then.
        guest.change(10, Change::Exit(ids(5, 7)));
        guest.change(20, comm(ids(5, 5), "b", true));
        assert_eq!(guest.threads.len(), 2);
        assert_eq!(guest.processes[&5].threads, 1);
        guest.change(30, Change::Exit(ids(5, 5)));
        assert!(!guest.processes.contains_key(&5));
        assert_eq!(guest.mapped.len(), 0, "{guest:?}");
    }

    #[test]
    fn what_replaces_is_in_another_memory() {
        let mut guest = Guest::default();
        guest.start(0, ids(1, 1), "a", Started::default());
        let long = |name, start, length| Mapped {
            length,
            ..mapped(start, name)
        };
        guest.map(1, 1, long("/a", 0x1000, 0x5000));
        let first = guest.thread(5, ids(1, 1)).expect("a thread").memory;
        // What grows, or is told again in parts, replaces nothing.
        let part = Mapped {
            offset: 0x1000,
            ..mapped(0x2000, "/a")
        };
        guest.map(6, 1, part);
        assert_eq!(guest.thread(5, ids(1, 1)).expect("a thread").memory, first);
        guest.map(7, 1, mapped(0x3000, "/b"));
        assert_eq!(guest.thread(6, ids(1, 1)), None, "it was the other one");
        let second = guest.thread(7, ids(1, 1)).expect("a thread").memory;
        assert_ne!(second, first);
        let all = guest.mappings(second, 0);
        let mut all: Vec<_> = all
            .map(|(one, file)| (one.start, one.length, one.offset, &*file.name))
            .collect();
        all.sort_unstable();
        let expected = [
            (0x1000, 0x1000, 0, "/a"),
            (0x2000, 0x1000, 0x1000, "/a"),
            (0x3000, 0x1000, 0, "/b"),
            (0x4000, 0x2000, 0x3000, "/a"),
        ];
        assert_eq!(all, expected);
    }

    #[test]
    fn a_program_and_its_libraries_stay() {
        let mut guest = Guest::default();
        guest.start(0, ids(1, 1), "jit", Started::default());
        guest.map(0, 1, mapped(0, "/bin/program"));
        for number in 1..5 * MAPPINGS as u64 {
            guest.map(0, 1, mapped(0x2000 * number, "//anon"));
        }
        let names = names(&guest, 1);
        assert!(
            names.len() <= MAPPINGS && names[0] == "/bin/program",
            "{}",
            names[0]
        );
    }

    #[test]
    fn the_kernels_threads_have_no_memory() {
        let mut guest = Guest::default();
        let helper = ids(20, 20);
        guest.change(
            5,
            Change::Fork {
                child: helper,
                parent: ids(2, 2),
            },
        );
        let thread = guest.thread(u64::MAX, helper).expect("a thread");
        assert!(thread.kernel && thread.memory == 0);
        guest.change(6, comm(helper, "modprobe", true));
        let thread = guest.thread(u64::MAX, helper).expect("a thread");
        assert!(!thread.kernel && thread.memory != 0, "it is a program now");
        let idle = guest.thread(u64::MAX, ids(0, 0)).expect("always");
        assert!(idle.kernel && idle.comm == "swapper");
        assert!(
            guest.thread(u64::MAX, ids(21, 20)).is_none(),
            "the thread of another process"
        );
    }

    #[test]
    fn mappings_that_come_and_go_are_bounded() {
        let mut guest = Guest::default();
        guest.start(0, ids(1, 1), "jit", Started::default());
        for number in 0..3 * MAPPINGS as u64 {
            guest.change(number, map(1, 0x1000 * (number % 7), &number.to_string()));
        }
        assert!(names(&guest, 1).len() <= MAPPINGS);
        for number in 0..3 * MAPPINGS as u64 {
            guest.change(number, map(1, 0x1000 * number, "x"));
        }
        assert!(names(&guest, 1).len() <= MAPPINGS);
        assert_eq!(guest.mapped.len(), 1);
        let second = Guest::default().after(&guest);
        assert_eq!(
            second.memories, guest.memories,
            "numbers are not used again"
        );
    }

    proptest! {
        #[test]
        fn what_stands_is_what_was_written_last(
            all in proptest::collection::vec((0u64..40, 0u64..12), 0..60)
        ) {
            let mut expected = [None; 60];
            let mut mappings = Vec::new();
            for (number, (start, length)) in all.into_iter().enumerate() {
                let inode = number as u64;
                let file = MappedFile { inode, ..MappedFile::default() };
                mappings.push(Mapped { start, length, offset: 100 + start, file });
                for at in start..start + length {
                    expected[usize::try_from(at).expect("small")] = Some((inode, 100 + at));
                }
            }
            let mut found = [None; 60];
            for one in standing(&mappings) {
                prop_assert!(one.length > 0);
                for at in 0..one.length {
                    let place = usize::try_from(one.start + at).expect("small");
                    prop_assert_eq!(found[place], None, "each place is in one");
                    found[place] = Some((one.file.inode, one.offset + at));
                }
            }
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn any_changes_are_taken(
            changes in proptest::collection::vec((0..4u8, 0..5u32, 0..5u32, 0..5u32), 0..200)
        ) {
            let mut guest = Guest::default();
            for (kind, a, b, c) in changes {
                guest.change(1, match kind {
                    0 => Change::Fork { child: ids(a, b), parent: ids(b, c) },
                    1 => Change::Exit(ids(a, b)),
                    2 => comm(ids(a, b), "x", c == 0),
                    _ => map(a, u64::from(b) << 12, "y"),
                });
                let counted: u32 = guest.processes.values().map(|it| it.threads).sum();
                prop_assert_eq!(counted as usize, guest.threads.len());
                prop_assert!(guest.mapped.len() <= guest.processes.len());
            }
        }
    }
}
