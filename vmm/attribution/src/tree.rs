//! The tree of processes that is counted: which task is which thread of which program, and what
//! each has executed.

use std::collections::BTreeMap;
use std::sync::Arc;

use pmu_model::{EventClass, EventTotals, Ring};

use crate::calls::{Call, Calls};
use crate::counts::{Counts, Program, Rest, Thread};

/// Threads that are told apart. A guest that makes more of them is counted all the same: those
/// are part of the thread that has made them.
const MOST: usize = 100_000;

/// The number of a thread of the tree, in the order of their beginnings. A thread that executes
/// another program is another one.
pub(crate) type Number = usize;

/// What the kernel does for a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    /// It begins: no user code has run yet.
    Start,
    Call(Call),
    Exception,
    Interrupt,
}

/// A thread as the kernel has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Task {
    /// Of its `struct task_struct`.
    pub(crate) address: u64,
    pub(crate) tid: u32,
    pub(crate) pid: u32,
    pub(crate) comm: String,
}

#[derive(Debug)]
struct OneThread {
    program: usize,
    /// Among those of its program.
    place: usize,
    tid: u32,
    comm: String,
    user: EventTotals,
    kernel: EventTotals,
    doing: Doing,
}

#[derive(Debug)]
struct OneProgram {
    /// A forked process has that of its parent.
    name: Arc<str>,
    pid: u32,
    parent: u32,
    threads: Vec<Number>,
}

/// The tree.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    programs: Vec<OneProgram>,
    threads: Vec<OneThread>,
    /// Threads that may run, by their `struct task_struct`.
    tasks: BTreeMap<u64, Number>,
    calls: Calls,
    rest: Rest,
}

impl Tree {
    /// Its first program has not begun.
    pub(crate) fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    /// The thread whose `struct task_struct` is at `address`; none of another tree.
    pub(crate) fn at(&self, address: u64) -> Option<Number> {
        self.tasks.get(&address).copied()
    }

    /// A task that has become the program `name`: of the tree already, or its root.
    pub(crate) fn executes(&mut self, task: Task, name: String) -> Number {
        let before = self.at(task.address);
        let full = self.threads.len() >= MOST;
        if let Some(before) = before.filter(|_| full) {
            return before;
        }
        let parent = before.map_or(0, |before| self.program_of(before).parent);
        let doing = before.map_or(Doing::Start, |before| self.threads[before].doing);
        self.programs.push(OneProgram {
            name: name.into(),
            pid: task.pid,
            parent,
            threads: Vec::new(),
        });
        self.add(task, self.programs.len() - 1, doing)
    }

    /// `parent` has made a task; of a thread of no tree nothing comes.
    pub(crate) fn begins(&mut self, parent: Option<Number>, task: Task) -> Option<Number> {
        // A thread that has ended has left its place to it.
        let known = self.tasks.remove(&task.address);
        let parent = parent?;
        if let Some(known) = known.filter(|known| self.is_told_again(*known, &task)) {
            self.tasks.insert(task.address, known);
            return Some(known);
        }
        if self.threads.len() >= MOST {
            self.tasks.insert(task.address, parent);
            return Some(parent);
        }
        let program = self.threads[parent].program;
        let process = self.program_of(parent).pid;
        if process == task.pid {
            return Some(self.add(task, program, Doing::Start));
        }
        self.programs.push(OneProgram {
            name: self.programs[program].name.clone(),
            pid: task.pid,
            parent: process,
            threads: Vec::new(),
        });
        Some(self.add(task, self.programs.len() - 1, Doing::Start))
    }

    /// The kernel's instruction that begins it has faulted, and is there again.
    fn is_told_again(&self, known: Number, task: &Task) -> bool {
        let thread = &self.threads[known];
        thread.tid == task.tid
            && thread.doing == Doing::Start
            && thread.kernel == EventTotals::default()
    }

    fn add(&mut self, task: Task, program: usize, doing: Doing) -> Number {
        let number = self.threads.len();
        let of_program = &mut self.programs[program].threads;
        let place = of_program.len();
        of_program.push(number);
        self.threads.push(OneThread {
            program,
            place,
            tid: task.tid,
            comm: task.comm,
            user: EventTotals::default(),
            kernel: EventTotals::default(),
            doing,
        });
        self.tasks.insert(task.address, number);
        number
    }

    fn program_of(&self, thread: Number) -> &OneProgram {
        &self.programs[self.threads[thread].program]
    }

    /// Its program's place among those of the tree.
    pub(crate) fn place_of(&self, thread: Number) -> usize {
        self.threads[thread].program
    }

    /// The threads of the program at a place.
    pub(crate) fn threads_of(&self, program: usize) -> impl Iterator<Item = Number> {
        self.programs[program].threads.iter().copied()
    }

    /// Its place among those of its program.
    pub(crate) fn place_among(&self, thread: Number) -> usize {
        self.threads[thread].place
    }

    /// The path of its program, and the number of its process.
    pub(crate) fn program(&self, thread: Number) -> (&str, u32) {
        let program = self.program_of(thread);
        (&program.name, program.pid)
    }

    /// What it has executed: in the kernel, and in user mode.
    pub(crate) fn totals(&self, thread: Number) -> [EventTotals; 2] {
        [self.threads[thread].kernel, self.threads[thread].user]
    }

    /// Its instructions in user mode.
    pub(crate) fn user_instructions(&self, thread: Number) -> u64 {
        self.threads[thread].user.of(EventClass::Instructions)
    }

    pub(crate) fn is_called(&mut self, thread: Number, comm: String) {
        self.threads[thread].comm = comm;
    }

    pub(crate) fn executed(&mut self, thread: Number, ring: Ring, done: &EventTotals) {
        let thread = &mut self.threads[thread];
        if ring == Ring::User {
            thread.user += *done;
            return;
        }
        thread.kernel += *done;
        let instructions = done.of(EventClass::Instructions);
        match thread.doing {
            Doing::Call(call) => self.calls.took(call, instructions),
            Doing::Exception => self.rest.exception_instructions += instructions,
            Doing::Interrupt => self.rest.interrupt_instructions += instructions,
            Doing::Start => self.rest.start_instructions += instructions,
        }
    }

    /// Its user code has entered the kernel.
    pub(crate) fn enters(&mut self, thread: Number, doing: Doing) {
        match doing {
            Doing::Call(call) => self.calls.entered(call),
            Doing::Exception => self.rest.exceptions += 1,
            Doing::Interrupt => self.rest.interrupts += 1,
            Doing::Start => {}
        }
        self.threads[thread].doing = doing;
    }

    /// What the kernel does for it, or did last.
    pub(crate) fn doing(&self, thread: Number) -> Doing {
        self.threads[thread].doing
    }

    /// All of it, without functions and regions.
    pub(crate) fn counts(&self) -> Counts {
        let mut programs: Vec<Program> = self
            .programs
            .iter()
            .map(|program| Program {
                name: program.name.as_ref().to_owned(),
                pid: program.pid,
                parent: program.parent,
                threads: Vec::new(),
            })
            .collect();
        for thread in &self.threads {
            programs[thread.program].threads.push(Thread {
                tid: thread.tid,
                comm: thread.comm.clone(),
                user: (&thread.user).into(),
                kernel: (&thread.kernel).into(),
            });
        }
        Counts {
            programs,
            syscalls: self.calls.counts(),
            rest: self.rest,
            functions: None,
            edges: Vec::new(),
            contexts: None,
            regions: Vec::new(),
            undefined: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(address: u64, tid: u32, pid: u32) -> Task {
        Task {
            address,
            tid,
            pid,
            comm: format!("task{tid}"),
        }
    }

    fn instructions(count: u64) -> EventTotals {
        EventTotals::default().with(EventClass::Instructions, count)
    }

    const READ: Call = Call::Native(0);

    #[test]
    fn threads_processes_and_programs_are_told_apart() {
        let mut tree = Tree::default();
        let shell = tree.executes(task(0x100, 10, 10), "/bin/sh".to_owned());
        tree.executed(shell, Ring::User, &instructions(5));
        // A fork, which runs before it becomes another program.
        let child = tree
            .begins(Some(shell), task(0x200, 11, 11))
            .expect("of the tree");
        tree.executed(child, Ring::User, &instructions(7));
        let sort = tree.executes(task(0x200, 11, 11), "/usr/bin/sort".to_owned());
        assert_eq!(tree.at(0x200), Some(sort));
        let thread = tree
            .begins(Some(sort), task(0x300, 12, 11))
            .expect("of the tree");
        tree.executed(thread, Ring::User, &instructions(100));
        // One of another tree's.
        assert_eq!(tree.begins(None, task(0x400, 13, 13)), None);
        assert_eq!(tree.at(0x400), None);

        let counts = tree.counts();
        let seen: Vec<_> = counts
            .programs
            .iter()
            .map(|program| {
                let threads = program.threads.iter();
                let threads = threads.map(|thread| (thread.tid, thread.user.instructions));
                let threads: Vec<(u32, u64)> = threads.collect();
                (program.name.as_str(), program.pid, program.parent, threads)
            })
            .collect();
        let expected = [
            ("/bin/sh", 10, 0, vec![(10, 5)]),
            ("/bin/sh", 11, 10, vec![(11, 7)]),
            ("/usr/bin/sort", 11, 10, vec![(11, 0), (12, 100)]),
        ];
        assert_eq!(seen, expected);
        assert_eq!(counts.user().instructions, 112);
    }

    #[test]
    fn a_place_that_another_task_has_taken_is_no_longer_the_trees() {
        let mut tree = Tree::default();
        let first = tree.executes(task(0x100, 10, 10), "a".to_owned());
        let child = tree.begins(Some(first), task(0x200, 11, 11));
        assert_eq!(tree.at(0x200), child);
        // The child has ended, and the kernel has made a thread of its own.
        assert_eq!(tree.begins(None, task(0x200, 12, 12)), None);
        assert_eq!(tree.at(0x200), None);
    }

    #[test]
    fn what_is_told_twice_is_one() {
        let mut tree = Tree::default();
        let first = tree.executes(task(0x100, 10, 10), "a".to_owned());
        let child = tree.begins(Some(first), task(0x200, 11, 11));
        assert_eq!(tree.begins(Some(first), task(0x200, 11, 11)), child);
        assert_eq!(tree.counts().programs.len(), 2);
    }

    #[test]
    fn the_kernels_work_is_that_of_calls_and_the_rest() {
        let mut tree = Tree::default();
        let one = tree.executes(task(0x100, 10, 10), "a".to_owned());
        tree.executed(one, Ring::Kernel, &instructions(40));
        for (doing, count) in [
            (Doing::Call(READ), 100),
            (Doing::Exception, 30),
            (Doing::Call(READ), 11),
            (Doing::Interrupt, 7),
            (Doing::Call(Call::I386(4)), 9),
        ] {
            tree.enters(one, doing);
            tree.executed(one, Ring::Kernel, &instructions(count));
        }
        let counts = tree.counts();
        let calls: Vec<(&str, u64, u64)> = counts
            .syscalls
            .iter()
            .map(|call| (call.name.as_str(), call.calls, call.instructions))
            .collect();
        assert_eq!(calls, [("read", 2, 111), ("i386:4", 1, 9)]);
        let rest = Rest {
            exceptions: 1,
            exception_instructions: 30,
            interrupts: 1,
            interrupt_instructions: 7,
            start_instructions: 40,
        };
        assert_eq!(counts.rest, rest);
        assert_eq!(counts.kernel().instructions, 197);
    }

    #[test]
    fn a_guest_that_forks_for_ever_is_counted() {
        let mut tree = Tree::default();
        let mut last = tree.executes(task(0, 1, 1), "a".to_owned());
        for n in 1..=u32::try_from(MOST).expect("few") + 50 {
            let made = tree.begins(Some(last), task(u64::from(n), n + 1, n + 1));
            last = made.expect("of the tree");
            tree.executed(last, Ring::User, &instructions(1));
        }
        let counts = tree.counts();
        assert_eq!(counts.programs.len(), MOST);
        assert_eq!(counts.user().instructions, MOST as u64 + 50);
    }
}
