//! Threads and processes of the guest, and what these have mapped.

use std::collections::HashMap;

use crate::records::{Change, Ids, Mapped, MappedFile};

/// Mappings of a process that are kept, with those that others have replaced since. Then it
/// begins anew with those that still stand.
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
}

#[derive(Debug, Default)]
struct Process {
    threads: u32,
    memory: u32,
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

    /// A thread is there.
    pub(crate) fn start(&mut self, ids: Ids, comm: &str, started: Started) {
        let Ids { pid, tid } = ids;
        let known = Known {
            pid,
            comm: comm.to_owned(),
            started,
        };
        if let Some(before) = self.threads.insert(tid, known) {
            self.leave(before.pid);
        }
        if !self.processes.contains_key(&pid) {
            let memory = self.memory();
            let process = Process { threads: 0, memory };
            self.processes.insert(pid, process);
        }
        if let Some(process) = self.processes.get_mut(&pid) {
            process.threads += 1;
        }
    }

    /// A process has mapped something.
    pub(crate) fn map(&mut self, pid: u32, mapping: Mapped) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        let mapped = self.mapped.entry(process.memory).or_default();
        // Of a file whose parts are mapped again.
        if at(mapped, mapping.start) == Some(&mapping) {
            return;
        }
        mapped.push(mapping);
        if mapped.len() > MAPPINGS {
            let standing = standing(&std::mem::take(mapped));
            self.mapped.remove(&process.memory);
            self.memories += 1;
            process.memory = self.memories;
            self.mapped.insert(self.memories, standing);
        }
    }

    /// Something has changed, at `time`.
    pub(crate) fn change(&mut self, time: u64, change: Change) {
        match change {
            Change::Fork { child, parent } => {
                let by = self.threads.get(&parent.tid);
                let started = Started {
                    ns: time,
                    kernel: parent.pid == KTHREADD || by.is_some_and(|by| by.started.kernel),
                };
                let comm = by.map_or_else(String::new, |by| by.comm.clone());
                self.start(child, &comm, started);
                if child.pid != parent.pid {
                    let memory = |pid| Some(self.processes.get(pid)?.memory);
                    let from = memory(&parent.pid).and_then(|memory| self.mapped.get(&memory));
                    let copy = from.map(|from| standing(from)).unwrap_or_default();
                    if let Some(memory) = memory(&child.pid) {
                        self.mapped.insert(memory, copy);
                    }
                }
            }
            Change::Exit(Ids { tid, .. }) => {
                if let Some(gone) = self.threads.remove(&tid) {
                    self.leave(gone.pid);
                }
            }
            Change::Comm { of, comm, exec } => {
                let before = self.threads.get(&of.tid);
                let started = before.map_or(
                    Started {
                        ns: time,
                        kernel: false,
                    },
                    |it| it.started,
                );
                let kernel = started.kernel && !exec;
                self.start(of, &comm, Started { kernel, ..started });
                if exec {
                    self.forget(of.pid);
                    let memory = self.memory();
                    if let Some(process) = self.processes.get_mut(&of.pid) {
                        process.memory = memory;
                    }
                }
            }
            Change::Map { pid, mapping } => self.map(pid, mapping),
        }
    }

    /// The thread, as it is now. The idle threads are always there.
    pub(crate) fn thread(&self, ids: Ids) -> Option<Thread> {
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
            self.forget(pid);
            self.processes.remove(&pid);
        }
    }

    /// What the process has mapped is gone.
    fn forget(&mut self, pid: u32) {
        if let Some(process) = self.processes.get(&pid) {
            self.mapped.remove(&process.memory);
        }
    }
}

fn at(mapped: &[Mapped], address: u64) -> Option<&Mapped> {
    let has = |one: &&Mapped| (one.start..one.start.saturating_add(one.length)).contains(&address);
    mapped.iter().rev().find(has)
}

/// Those of which others have not replaced all.
fn standing(mapped: &[Mapped]) -> Vec<Mapped> {
    let is_whole = |one: &Mapped, other: &Mapped| {
        other.start <= one.start
            && one.start.saturating_add(one.length) <= other.start.saturating_add(other.length)
    };
    let replaced = |place: usize| {
        let later = mapped[place + 1..].iter();
        later.clone().any(|other| is_whole(&mapped[place], other))
    };
    let standing = mapped
        .iter()
        .enumerate()
        .filter(|(place, _)| !replaced(*place));
    let standing: Vec<_> = standing.map(|(_, one)| one.clone()).collect();
    let most = standing.len().saturating_sub(MAPPINGS / 2);
    standing[most..].to_vec()
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
        let thread = guest.thread(ids(pid, pid)).expect("a thread");
        let all = guest.mappings(thread.memory, 0);
        all.map(|(_, file)| file.name.clone()).collect()
    }

    #[test]
    fn a_shell_starts_a_program() {
        let mut guest = Guest::default();
        guest.start(ids(10, 10), "sh", Started::default());
        guest.map(10, mapped(0x1000, "/bin/sh"));
        let child = ids(11, 11);
        guest.change(
            50,
            Change::Fork {
                child,
                parent: ids(10, 10),
            },
        );
        let forked = guest.thread(child).expect("a thread");
        assert_eq!((&*forked.comm, forked.started_ns), ("sh", 50));
        assert_eq!(names(&guest, 11), ["/bin/sh"]);
        guest.change(60, comm(child, "walk", true));
        guest.change(61, map(11, 0x1000, "/bin/walk"));
        guest.change(62, map(11, 0x1000, "/bin/walk"));
        let walks = guest.thread(child).expect("a thread");
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
        let worker = guest.thread(thread).expect("a thread");
        assert_eq!((&*worker.comm, &*worker.process), ("worker", "walk"));
        assert_eq!(worker.memory, walks.memory);
        guest.change(80, Change::Exit(child));
        assert!(guest.thread(child).is_none());
        assert!(guest.thread(thread).is_some(), "its process is still there");
        guest.change(81, Change::Exit(thread));
        assert!(guest.thread(thread).is_none() && !guest.processes.contains_key(&11));
        assert_eq!(guest.mapped.len(), 1, "{guest:?}");
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
        let thread = guest.thread(helper).expect("a thread");
        assert!(thread.kernel && thread.memory == 0);
        guest.change(6, comm(helper, "modprobe", true));
        let thread = guest.thread(helper).expect("a thread");
        assert!(!thread.kernel && thread.memory != 0, "it is a program now");
        let idle = guest.thread(ids(0, 0)).expect("always");
        assert!(idle.kernel && idle.comm == "swapper");
        assert!(
            guest.thread(ids(21, 20)).is_none(),
            "the thread of another process"
        );
    }

    #[test]
    fn mappings_that_come_and_go_are_bounded() {
        let mut guest = Guest::default();
        guest.start(ids(1, 1), "jit", Started::default());
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
