//! What a vCPU of the guest does at one moment.

use std::cell::{Cell, RefCell};
use std::fmt;

use guest_exit::{GuestMemory, Paging};

use crate::build_id::{self, BuildId};
use crate::chain::Chain;
use crate::mapping::{File, Mapping, Path};
use crate::registers::{Mode, ProgramRegisters, Registers};
use crate::space::Space;
use crate::task::{Inside, ProgramMemory, Task};
use crate::unknown::Unknown;
use crate::unwind::{Entered, Unwinder};
use crate::view::KernelView;

/// Most bytes that a look reads of the kernel, and as many of a program: far more than a
/// chain of [`DEPTH`](crate::DEPTH) frames takes.
const BUDGET: usize = 1 << 20;
/// Of CR3 the address of the page tables.
const PAGE_TABLES: u64 = 0x000f_ffff_ffff_f000;
/// Most bytes of a program that are read for a build id.
const BUILD_ID_BUDGET: usize = 64 << 10;
/// Mappings of one file that are looked at for that of its start: before code there are few.
const PARTS: usize = 8;
/// Mappings that one look remembers.
const REMEMBERED: usize = 4;

/// One look at a guest that stands still, or whose vCPU does: a page is looked up once, and
/// a mapping, too. So it is of one moment: for another one there is another look.
pub struct Look<'a> {
    pub(crate) view: &'a KernelView,
    pub(crate) memory: &'a dyn GuestMemory,
    pub(crate) space: Space<'a>,
    mappings: RefCell<[Option<(ProgramMemory, Mapping)>; REMEMBERED]>,
    next: Cell<usize>,
}

impl fmt::Debug for Look<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Look")
            .field("view", self.view)
            .finish_non_exhaustive()
    }
}

impl<'a> Look<'a> {
    /// At the guest whose kernel is `view`.
    #[must_use]
    pub fn at(view: &'a KernelView, memory: &'a dyn GuestMemory) -> Self {
        Self {
            view,
            memory,
            space: Space::new(memory, view.kernel.paging, BUDGET),
            mappings: RefCell::new([None; REMEMBERED]),
            next: Cell::new(0),
        }
    }

    /// The task that runs on the kernel's processor `cpu`, whose vCPU stands at `at`. Some 20
    /// reads; nothing is allocated.
    ///
    /// # Errors
    /// What runs is not known: the kernel is in the middle of a switch, or is another one.
    pub fn task(&self, cpu: u32, at: &Registers) -> Result<Task, Unknown> {
        let kernel = &*self.view.kernel;
        let layout = kernel.tasks.as_ref().map_err(|_| Unknown::Types)?;
        let area = kernel.areas.get(cpu as usize).ok_or(Unknown::Processor)?;
        layout.current(&self.space, (cpu, *area), at)
    }

    /// The callers of `at`, into `chain`. Where the kernel runs, the program's part begins
    /// where `task` entered it, also when the kernel's part is broken. Without a task the
    /// program's part is a frame at most, unless the program runs itself and the kernel
    /// describes no tasks. At most 60 reads for each frame; nothing is
    /// allocated.
    pub fn chain(&self, task: Option<&Task>, at: &Registers, chain: &mut Chain) {
        chain.clear();
        let layout = self.view.kernel.tasks.as_ref().ok();
        let program = if at.mode == Mode::Kernel {
            let unwinder = Unwinder {
                space: &self.space,
                saved: layout.map(|layout| &layout.saved),
                stack: task.map_or(0..0, Task::kernel_stack),
                trampolines: &self.view.kernel.trampolines,
                orc: &|address| self.view.orc(address),
            };
            let walked = chain.walk_kernel(&unwinder, at);
            if task.is_some_and(|task| task.memory.is_none()) {
                return;
            }
            // In the middle of a switch the stack is the next task's already.
            let is_tasks = |at: &Entered| task.is_none_or(|task| task.has_entered(at));
            let entered = walked.entered.filter(is_tasks).map(|at| at.saved);
            let of_task = || layout?.of_program(&self.space, task.filter(|_| walked.on_stack)?);
            let saved = entered.or_else(of_task);
            saved.as_ref().map(ProgramRegisters::entered)
        } else {
            Some(ProgramRegisters::running(at))
        };
        // A program that runs itself has its own page tables, whoever its task is.
        let unnamed = layout.is_none() && at.mode != Mode::Kernel;
        let root = match task {
            Some(task) => task.memory.map(|memory| memory.root),
            None => unnamed.then_some(at.cr3 & PAGE_TABLES),
        };
        match (program, root) {
            (Some(program), Some(root)) => {
                let paging = Paging::long_mode(root, self.view.kernel.five_levels);
                chain.walk_program(&Space::new(self.memory, paging, BUDGET), &program);
            }
            (program, _) => chain.no_program(program.as_ref()),
        }
    }

    /// What `program` has mapped at `address`. At most 400 reads, mostly some 30; of four
    /// mappings none in the same look.
    ///
    /// # Errors
    /// It has nothing there, or what it has is not known.
    pub fn mapping(&self, program: ProgramMemory, address: u64) -> Result<Mapping, Unknown> {
        let known = self.mappings.borrow();
        let is_it = |(of, mapping): &&(ProgramMemory, Mapping)| {
            *of == program && (mapping.start..mapping.end).contains(&address)
        };
        if let Some((_, mapping)) = known.iter().flatten().find(is_it) {
            return Ok(*mapping);
        }
        drop(known);
        let layout = self.view.kernel.mappings.as_ref();
        let layout = layout.map_err(|_| Unknown::Types)?;
        let found = layout.find(&self.space, program, address)?;
        let next = self.next.get();
        self.mappings.borrow_mut()[next] = Some((program, found));
        self.next.set((next + 1) % REMEMBERED);
        Ok(found)
    }

    /// The GNU build id of the file that `program` has mapped as `mapping`, which may be of an
    /// earlier look; `None` where it has none, its first page is not in the program's memory,
    /// or the program has something else there now. Not for every sample: at most 64 KiB.
    #[must_use]
    pub fn build_id(&self, program: ProgramMemory, mapping: &Mapping) -> Option<BuildId> {
        let kernel = &*self.view.kernel;
        let mappings = kernel.mappings.as_ref().ok()?;
        let tasks = kernel.tasks.as_ref().ok()?;
        let find = |at| mappings.find(&self.space, program, at).ok();
        let is_there = |mapping: &Mapping| {
            self.space.forget();
            let root = tasks.root(&self.space, program.address);
            root == Ok(program.root) && find(mapping.start) == Some(*mapping)
        };
        let has_header = mapping.file.is_some() || mapping.is_vdso;
        if !has_header || !is_there(mapping) {
            return None;
        }
        let is_first =
            |found: &Mapping| found.is_of(mapping) && (found.offset == 0 || found.is_vdso);
        let before = |found: &Mapping| found.start.checked_sub(1).and_then(find);
        let parts = std::iter::successors(Some(*mapping), before);
        let parts = parts.take(PARTS).take_while(|found| found.is_of(mapping));
        // Between two of its parts others may be.
        let far = || find(mapping.start.checked_sub(mapping.offset)?);
        let first = parts.chain(std::iter::once_with(far).flatten());
        let first = first.into_iter().find(is_first)?;
        let paging = Paging::long_mode(program.root, kernel.five_levels);
        let memory = Space::new(self.memory, paging, BUILD_ID_BUDGET);
        let found = build_id::read(&memory, &first)?;
        (is_there(&first) && is_there(mapping)).then_some(found)
    }

    /// What the process of `task` is to itself where it is in a container; nothing where it is in
    /// none, has ended, or that is not known. Not for every sample: it reads the root's name, and
    /// allocates. `task` may be of an earlier look.
    #[must_use]
    pub fn inside(&self, task: &Task) -> Inside {
        let kernel = &*self.view.kernel;
        let (Ok(tasks), Ok(mappings)) = (&kernel.tasks, &kernel.mappings) else {
            return Inside::default();
        };
        let is_there = || {
            self.space.forget();
            tasks.is_there(&self.space, task)
        };
        if task.is_kernel || !is_there() {
            return Inside::default();
        }
        let root = mappings.root_of(&self.space, task.address);
        let inside = Inside {
            pid: tasks.inner_pid(&self.space, task),
            root: root.unwrap_or_default(),
        };
        // All of it is of one task.
        if is_there() {
            inside
        } else {
            Inside::default()
        }
    }

    /// The name of a file that is mapped; not for every sample, since it is as long as it is
    /// deep, and allocates. `file` may be of an earlier look.
    ///
    /// # Errors
    /// The name is not known, or the file is not there any more.
    pub fn path(&self, file: &File) -> Result<Path, Unknown> {
        let layout = self.view.kernel.mappings.as_ref();
        let layout = layout.map_err(|_| Unknown::Types)?;
        layout.path(&self.space, file)
    }
}
