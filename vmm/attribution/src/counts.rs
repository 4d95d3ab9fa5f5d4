//! What was counted, as it is printed and saved.

use std::iter::Sum;
use std::ops::AddAssign;

use pmu_model::{EventClass, EventTotals};
use serde::{Deserialize, Serialize};

/// Events of any number of instructions, in one ring. What each class is, the documentation of
/// the crate `instruction-facts` says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Instructions that retired.
    pub instructions: u64,
    /// Branches, near and far, taken or not.
    pub branches: u64,
    /// Branches that were taken, near and far.
    pub taken_branches: u64,
    /// Branches that look at flags or a count.
    pub conditional_branches: u64,
    /// Branches that may change the code segment, system calls among them.
    pub far_branches: u64,
    /// Operands in memory that were read.
    pub loads: u64,
    /// Operands in memory that were written.
    pub stores: u64,
    /// Near calls.
    pub calls: u64,
    /// Near returns.
    pub returns: u64,
    /// Instructions of x87, MMX and SSE.
    pub floating_point: u64,
    /// Instructions of the x87 stack.
    pub x87: u64,
    /// Instructions of the MMX registers.
    pub mmx: u64,
    /// Instructions of the vector registers.
    pub sse: u64,
    /// String instructions, repeated or not: one each.
    pub strings: u64,
    /// Exceptions and interrupts that were delivered while this ring executed.
    pub deliveries: u64,
    /// Ticks of virtual time, which are nanoseconds at the emulator's 1 GHz.
    pub ticks: u64,
}

impl From<&EventTotals> for Events {
    fn from(totals: &EventTotals) -> Self {
        Self {
            instructions: totals.of(EventClass::Instructions),
            branches: totals.of(EventClass::Branches),
            taken_branches: totals.of(EventClass::TakenBranches),
            conditional_branches: totals.of(EventClass::ConditionalBranches),
            far_branches: totals.of(EventClass::FarBranches),
            loads: totals.of(EventClass::Loads),
            stores: totals.of(EventClass::Stores),
            calls: totals.of(EventClass::Calls),
            returns: totals.of(EventClass::Returns),
            floating_point: totals.of(EventClass::FloatingPoint),
            x87: totals.of(EventClass::X87),
            mmx: totals.of(EventClass::Mmx),
            sse: totals.of(EventClass::Sse),
            strings: totals.of(EventClass::Strings),
            deliveries: totals.deliveries(),
            ticks: totals.ticks(),
        }
    }
}

impl AddAssign for Events {
    fn add_assign(&mut self, more: Self) {
        *self = self.with(more, |one, other| one + other);
    }
}

impl Events {
    /// These without those of before.
    pub(crate) fn less(self, before: Self) -> Self {
        self.with(before, u64::saturating_sub)
    }

    /// Each of these with that of `other`.
    fn with(self, other: Self, of: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            instructions: of(self.instructions, other.instructions),
            branches: of(self.branches, other.branches),
            taken_branches: of(self.taken_branches, other.taken_branches),
            conditional_branches: of(self.conditional_branches, other.conditional_branches),
            far_branches: of(self.far_branches, other.far_branches),
            loads: of(self.loads, other.loads),
            stores: of(self.stores, other.stores),
            calls: of(self.calls, other.calls),
            returns: of(self.returns, other.returns),
            floating_point: of(self.floating_point, other.floating_point),
            x87: of(self.x87, other.x87),
            mmx: of(self.mmx, other.mmx),
            sse: of(self.sse, other.sse),
            strings: of(self.strings, other.strings),
            deliveries: of(self.deliveries, other.deliveries),
            ticks: of(self.ticks, other.ticks),
        }
    }
}

impl Sum for Events {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        let mut sum = Self::default();
        all.for_each(|one| sum += one);
        sum
    }
}

/// What a tree of processes executed, from the exec of its first program on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// By process and program, in the order in which they began. One that never executed an
    /// instruction is among them.
    pub programs: Vec<Program>,
    /// By system call, the costliest first.
    pub syscalls: Vec<Syscall>,
    /// What the kernel did for the tree beside system calls.
    pub rest: Rest,
    /// By function of user code, the costliest first; none where functions were not asked for.
    pub functions: Option<Vec<Function>>,
    /// The calls between these functions.
    #[serde(default)]
    pub edges: Vec<CallEdge>,
    /// The same by the calls that led to each of them; none where these were not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contexts: Option<Contexts>,
    /// By region that a program has marked with Valgrind's client requests, in their order.
    pub regions: Vec<Region>,
    /// Where user code has met an instruction that the processor does not have, the first ones.
    #[serde(default)]
    pub undefined: Vec<Undefined>,
}

impl Counts {
    /// What all of it did in user mode.
    #[must_use]
    pub fn user(&self) -> Events {
        self.programs.iter().map(Program::user).sum()
    }

    /// What all of it did in the kernel.
    #[must_use]
    pub fn kernel(&self) -> Events {
        self.programs.iter().map(Program::kernel).sum()
    }
}

/// A program that a process executed: one for each process and exec. A process that was forked
/// and has executed no other is one of its parent's name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// The path that was executed, as it was given: of a script that of the script.
    pub name: String,
    /// The number of the process in the guest.
    pub pid: u32,
    /// The number of the process that has forked it.
    pub parent: u32,
    /// Its threads, in the order in which they began.
    pub threads: Vec<Thread>,
}

impl Program {
    /// What its threads did in user mode.
    #[must_use]
    pub fn user(&self) -> Events {
        self.threads.iter().map(|thread| thread.user).sum()
    }

    /// What the kernel did while they ran.
    #[must_use]
    pub fn kernel(&self) -> Events {
        self.threads.iter().map(|thread| thread.kernel).sum()
    }
}

/// A thread of a program.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    /// Its number in the guest; that of the first one is its process's.
    pub tid: u32,
    /// Its name, as it was last.
    pub comm: String,
    /// In user mode.
    pub user: Events,
    /// In the kernel while it ran there: system calls, faults, and the interrupts that came.
    pub kernel: Events,
}

/// A system call.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Syscall {
    /// Its number, as RAX had it.
    pub number: u32,
    /// Its name in the table of x86-64. One of another table is named as such: `i386:4`,
    /// `x32:514`; one without a name is `syscall_` and its number.
    pub name: String,
    /// How often it was entered. One that a signal interrupted and the kernel began again was
    /// entered twice.
    pub calls: u64,
    /// Instructions of the kernel from the entry to the return, interrupts in between included,
    /// other tasks left out.
    pub instructions: u64,
}

/// Instructions of the kernel for a tree of processes that belong to no system call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rest {
    /// Exceptions of user code that were handled, page faults most of all.
    pub exceptions: u64,
    /// Instructions of the kernel for these.
    pub exception_instructions: u64,
    /// Interrupts that user code was interrupted by. Those within a system call belong to it.
    pub interrupts: u64,
    /// Instructions of the kernel for these.
    pub interrupt_instructions: u64,
    /// Instructions of the kernel before a task has first entered user mode: the end of the exec
    /// that began the tree, the start of each process and thread.
    pub start_instructions: u64,
}

/// A function of user code.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// The file that it is of; `[vdso]`, or `[unknown]` where no file is mapped.
    pub object: String,
    /// Its name as in the source. Where no symbol covers it, `[` and the offset in the file `]`.
    pub name: String,
    /// Instructions of its own.
    pub own: u64,
    /// Instructions from its entry to its return, those of the functions that it called
    /// included; where it called itself, once.
    pub inclusive: u64,
    /// How often it was called, or jumped to from another function.
    pub calls: u64,
}

/// Calls, and jumps, from one function to another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallEdge {
    /// The place of the caller among the functions.
    pub caller: usize,
    /// That of the callee.
    pub callee: usize,
    /// How often.
    pub calls: u64,
    /// Instructions from entry to return, of those calls that were in no other call of the callee.
    pub inclusive: u64,
}

/// Who called whom in user code, from the first function of each thread on. Chains of more than 256
/// calls are cut in their middle.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contexts {
    /// What of programs is apart from each other, in the order in which it began.
    pub parts: Vec<Part>,
    /// Where chains begin.
    pub roots: Vec<ContextRoot>,
    /// A function for each chain of calls that led to it, behind the one that called it.
    pub nodes: Vec<Context>,
    /// Where programs had the files that functions are of.
    pub mapped: Vec<MappedFile>,
    /// Dumps for which there was no room: they are in another one.
    #[serde(default)]
    pub lost_dumps: u64,
    /// How often counts were to be forgotten and were not.
    #[serde(default)]
    pub lost_drops: u64,
}

/// A part of a program: up to a client request that ends it, or the end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The place of the program among the programs.
    pub program: usize,
    /// How it has ended.
    pub end: PartEnd,
}

/// How a part of a program has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartEnd {
    /// With the program.
    #[default]
    Program,
    /// The program wanted its counts to be forgotten: `CALLGRIND_ZERO_STATS`.
    Dropped,
    /// The program wanted its counts by this name, which may be empty: `CALLGRIND_DUMP_STATS`.
    Dumped(String),
}

/// A thread in a part of its program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextRoot {
    /// The place of the part among the parts.
    pub part: usize,
    /// That of the thread among its program's.
    pub thread: usize,
}

/// A function, by the calls that led to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Context {
    /// The place of the root of its chain.
    pub root: usize,
    /// The place of its caller among these; none of a first function.
    pub caller: Option<usize>,
    /// The place of the function among the functions.
    pub function: usize,
    /// Where it begins in its file.
    pub offset: u64,
    /// Instructions of its own there.
    pub own: u64,
    /// How often it was called there.
    pub calls: u64,
}

/// A part of a file where a program had it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedFile {
    /// The place of the program among the programs.
    pub program: usize,
    /// The file, as [`Function::object`].
    pub object: String,
    /// Its build id in hexadecimal digits; empty without one.
    pub build_id: String,
    /// Its first address.
    pub start: u64,
    /// Behind the last one.
    pub end: u64,
    /// What is at the first address, by its place in the file.
    pub offset: u64,
}

/// An instruction that raised #UD in user code.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undefined {
    /// The program.
    pub program: String,
    /// Where the instruction is.
    pub address: u64,
    /// The function, and the file that it is of; empty where the files are not known.
    pub function: String,
    /// See [`Undefined::function`].
    pub object: String,
}

/// A part of a program that it has marked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// What it was called when it was dumped; empty without a name.
    pub name: String,
    /// The program; empty of what is of several.
    pub program: String,
    /// The process; of several, the first one.
    pub pid: u32,
    /// How many more of its name, and of programs of its program's name, are added to it: there
    /// was no room for another one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub more: u64,
    /// It is what there was no room for, of several names.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_rest: bool,
    /// In user mode.
    pub user: Events,
    /// In the kernel.
    pub kernel: Events,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde asks")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde asks")]
fn is_false(is: &bool) -> bool {
    !is
}
