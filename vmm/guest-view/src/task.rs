//! The task that runs on a processor of the guest.

use std::fmt;
use std::ops::{Range, RangeInclusive};

use crate::btf::{BitField, BtfError, Member};
use crate::layout::Types;
use crate::paging::tables_of;
use crate::registers::{Mode, Registers, Saved, SavedLayout};
use crate::space::Space;
use crate::symbols::SymbolTable;
use crate::text::printable;
use crate::unknown::Unknown;
use crate::unwind::Entered;

/// `PF_KTHREAD` (`include/linux/sched.h`); programs see it in `/proc/PID/stat`.
const KERNEL_THREAD: u32 = 0x0020_0000;
/// Bytes of a kernel stack, `THREAD_SIZE`: a power of two, with all debugging the most.
const STACK: RangeInclusive<u64> = 1 << 12..=1 << 18;
/// Most bytes of it that are above its first registers (`TOP_OF_KERNEL_STACK_PADDING`).
const MOST_PADDING: u64 = 16;
/// Where a processor saves registers before the kernel has found the task's stack
/// (`Documentation/arch/x86/x86_64/mm.rst`).
const CPU_ENTRY_AREA: Range<u64> = 0xffff_fe00_0000_0000..0xffff_fe80_0000_0000;

/// A task's name: 16 bytes, which may be anything.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Comm([u8; 16]);

impl Comm {
    /// The bytes before the first NUL.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let end = self.0.iter().position(|byte| *byte == 0);
        &self.0[..end.unwrap_or(self.0.len())]
    }
}

/// Without control characters.
impl fmt::Display for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&printable(self.bytes()))
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.to_string(), f)
    }
}

/// The memory of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProgramMemory {
    /// Of its `struct mm_struct`.
    pub(crate) address: u64,
    /// Guest-physical address of its page tables, as the kernel uses them.
    pub root: u64,
}

/// A thread of a program, or of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Task {
    /// Of its `struct task_struct`.
    pub address: u64,
    /// The thread's number; 0 for the idle threads of all processors.
    pub pid: u32,
    /// The process's number: that of its first thread.
    pub tgid: u32,
    /// The thread's name.
    pub comm: Comm,
    /// The name of the process's first thread.
    pub process: Comm,
    /// It is the kernel's own.
    pub is_kernel: bool,
    /// When it began, in ns since the guest started; tells numbers that were used again.
    pub started: u64,
    /// Its memory, where it has one of its own.
    pub memory: Option<ProgramMemory>,
    /// Its stack in the kernel.
    stack: u64,
    /// Where its program's registers are on it.
    saved: u64,
    /// It becomes another program: the registers may be those of the one before.
    executes: bool,
}

impl Task {
    /// Its stack in the kernel, up to and with where its program's registers begin.
    pub(crate) fn kernel_stack(&self) -> Range<u64> {
        self.stack..self.saved.wrapping_add(1)
    }

    /// These are the registers with which it entered the kernel.
    pub(crate) fn has_entered(&self, at: &Entered) -> bool {
        let by_processor = !at.guessed && CPU_ENTRY_AREA.contains(&at.address);
        !self.executes && (by_processor || at.address == self.saved)
    }
}

/// What a process in a container is to itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inside {
    /// Its number in its own PID namespace, if that is not the first one.
    pub pid: Option<u32>,
    /// What the names of its files begin at, as [`Path::root`](crate::Path::root) has it: empty
    /// where that is the root of the guest's first process, or is not known.
    pub root: String,
}

/// Where a kernel keeps the numbers of processes in PID namespaces.
#[derive(Debug)]
struct NumberLayout {
    /// Of a task.
    thread_pid: u64,
    /// Of a `struct pid`: how deep its namespace is, and a `struct upid` for each level.
    level: u64,
    numbers: u64,
    upid: u64,
    number: u64,
}

impl NumberLayout {
    /// Levels of PID namespaces (`MAX_PID_NS_LEVEL`).
    const DEEPEST: u32 = 32;

    /// A kernel that has it otherwise has no containers that are known as such.
    fn of(types: Types<'_>) -> Option<Self> {
        Some(Self {
            thread_pid: types.u64("task_struct", "thread_pid").ok()?,
            level: types.u32("pid", "level").ok()?,
            numbers: types.0.member("pid", "numbers").ok()?.offset.into(),
            upid: types.0.size_of("upid").ok()?.into(),
            number: types.u32("upid", "nr").ok()?,
        })
    }

    /// The number of the task at `address` in its own namespace; none in the first one.
    fn inner(&self, space: &Space<'_>, address: u64) -> Option<u32> {
        let pid = space.u64(address.wrapping_add(self.thread_pid)).ok()?;
        let level = space.u32(pid.wrapping_add(self.level)).ok()?;
        if !(1..=Self::DEEPEST).contains(&level) {
            return None;
        }
        let upid = self.numbers + u64::from(level) * self.upid;
        space
            .u32(pid.wrapping_add(upid).wrapping_add(self.number))
            .ok()
    }
}

/// Where a kernel keeps its tasks.
#[derive(Debug)]
pub(crate) struct TaskLayout {
    /// Of the per-CPU variables, in a processor's area.
    current: u64,
    top_of_stack: u64,
    /// Of four bytes up to 6.19 or so; 7.3 has one.
    on_cpu: Member,
    cpu: u64,
    flags: u64,
    pid: u64,
    tgid: u64,
    comm: u64,
    mm: u64,
    group_leader: u64,
    stack: u64,
    started: u64,
    numbers: Option<NumberLayout>,
    /// `in_execve`, in bits; not every kernel may have it.
    executes: Option<BitField>,
    pgd: u64,
    pub(crate) saved: SavedLayout,
}

impl TaskLayout {
    pub(crate) fn of(types: Types<'_>, symbols: &SymbolTable) -> Result<Self, BtfError> {
        const TASK: &str = "task_struct";
        let variable = |name: &str| {
            let found = symbols.address(name);
            found.ok_or_else(|| BtfError::Missing(name.to_owned()))
        };
        // 6.2 to 6.14 keep them together; 6.1 and before, and 6.15 on, do not.
        let (current, top_of_stack) = match variable("pcpu_hot") {
            Ok(hot) => {
                let at = |name| types.u64("pcpu_hot", name).map(|at| hot.wrapping_add(at));
                (at("current_task")?, at("top_of_stack")?)
            }
            Err(_) => (
                variable("current_task")?,
                variable("cpu_current_top_of_stack")?,
            ),
        };
        Ok(Self {
            executes: types.0.bit_field(TASK, "in_execve").ok(),
            current,
            top_of_stack,
            on_cpu: types.number(TASK, "on_cpu")?,
            cpu: types.u32(TASK, "thread_info.cpu")?,
            flags: types.u32(TASK, "flags")?,
            pid: types.u32(TASK, "pid")?,
            tgid: types.u32(TASK, "tgid")?,
            comm: types.at(TASK, "comm", 16)?,
            mm: types.u64(TASK, "mm")?,
            group_leader: types.u64(TASK, "group_leader")?,
            stack: types.u64(TASK, "stack")?,
            started: types.u64(TASK, "start_boottime")?,
            numbers: NumberLayout::of(types),
            pgd: types.u64("mm_struct", "pgd")?,
            saved: SavedLayout::of(types)?,
        })
    }

    /// The task that runs on processor `cpu`, whose per-CPU variables are at `area`.
    pub(crate) fn current(
        &self,
        space: &Space<'_>,
        (cpu, area): (u32, u64),
        at: &Registers,
    ) -> Result<Task, Unknown> {
        let address = space.u64(area.wrapping_add(self.current))?;
        let member = |offset: u64| address.wrapping_add(offset);
        let on_cpu = space.number(address, self.on_cpu)? == 1;
        let runs = space.u32(member(self.cpu))? == cpu && on_cpu;
        if !runs {
            return Err(Unknown::Inconsistent("tasks"));
        }
        let name = |task: u64| {
            let at = task.wrapping_add(self.comm);
            let bytes = space.array(at).ok_or(Unknown::Unmapped(at))?;
            Ok(Comm(bytes))
        };
        let (pid, tgid) = (space.u32(member(self.pid))?, space.u32(member(self.tgid))?);
        let comm = name(address)?;
        let process = if pid == tgid {
            comm
        } else {
            name(space.u64(member(self.group_leader))?)?
        };
        let memory = match space.u64(member(self.mm))? {
            0 => None,
            mm => {
                let root = self.root(space, mm)?;
                Some(ProgramMemory { address: mm, root })
            }
        };
        let top = space.u64(area.wrapping_add(self.top_of_stack))?;
        let stack = space.u64(member(self.stack))?;
        let task = Task {
            address,
            pid,
            tgid,
            comm,
            process,
            is_kernel: space.u32(member(self.flags))? & KERNEL_THREAD != 0,
            started: space.u64(member(self.started))?,
            memory,
            stack,
            saved: top.wrapping_sub(self.saved.size),
            executes: self.executes(space, address)?,
        };
        // The two variables are written one after the other when tasks are switched.
        let fits = |bytes: u64| {
            let whole = bytes.checked_next_power_of_two().unwrap_or(0);
            STACK.contains(&whole) && whole - bytes <= MOST_PADDING && stack.is_multiple_of(whole)
        };
        if !top.checked_sub(stack).is_some_and(fits) {
            return Err(Unknown::Inconsistent("stacks"));
        }
        if at.mode != Mode::Kernel && !memory.is_some_and(|memory| memory.is_loaded(at.cr3)) {
            return Err(Unknown::Inconsistent("page tables"));
        }
        Ok(task)
    }

    /// `task`, which may be of an earlier look, is still where it was.
    pub(crate) fn is_there(&self, space: &Space<'_>, task: &Task) -> bool {
        let member = |offset: u64| task.address.wrapping_add(offset);
        space.u32(member(self.pid)) == Ok(task.pid)
            && space.u64(member(self.started)) == Ok(task.started)
    }

    /// The number of the process of `task` in its own PID namespace, if that is not the first.
    pub(crate) fn inner_pid(&self, space: &Space<'_>, task: &Task) -> Option<u32> {
        let leader = task.address.wrapping_add(self.group_leader);
        self.numbers.as_ref()?.inner(space, space.u64(leader).ok()?)
    }

    /// Guest-physical address of the page tables of the `struct mm_struct` at `mm`.
    pub(crate) fn root(&self, space: &Space<'_>, mm: u64) -> Result<u64, Unknown> {
        let root = space.u64(mm.wrapping_add(self.pgd))?;
        space.physical(root).ok_or(Unknown::Unmapped(root))
    }

    fn executes(&self, space: &Space<'_>, task: u64) -> Result<bool, Unknown> {
        let Some(field) = self.executes else {
            return Ok(false);
        };
        let at = task.wrapping_add((field.offset / 8).into());
        let [byte] = space.array(at).ok_or(Unknown::Unmapped(at))?;
        Ok(byte >> (field.offset % 8) & 1 != 0)
    }

    /// The registers with which `task` entered the kernel; `None` for the kernel's own.
    pub(crate) fn of_program(&self, space: &Space<'_>, task: &Task) -> Option<Saved> {
        if task.memory.is_none() || task.executes {
            return None;
        }
        let saved = self.saved.whole(space, task.saved)?;
        (saved.mode != Mode::Kernel).then_some(saved)
    }
}

impl ProgramMemory {
    /// A program that runs with this CR3 has this memory.
    fn is_loaded(&self, cr3: u64) -> bool {
        tables_of(cr3).contains(&self.root)
    }
}
