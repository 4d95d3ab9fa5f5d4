//! The observer that lets tasks, calls and functions meet.

use std::any::Any;

use emu::{Entry, Event, EventTotals, Follow, Observer, Ring, Sight, State};
use guest_view::{KernelView, TaskPlaces, printable};

use crate::calls::Call;
use crate::counts::{Counts, Events, Undefined};
use crate::functions::{Cut, Functions, Objects, Places, Runs, interrupted};
use crate::kernel::{Kernel, find};
use crate::regions::{Collect, Regions, Request};
use crate::tree::{Doing, Number, Task, Tree};

/// Bytes of a path that are kept, of a region's name, and of a task's.
const PATH: usize = 4096;
const NAME: usize = 256;
const COMM: usize = 16;
/// A page: a name that ends before memory does is read up to there.
const PAGE: u64 = 4096;

/// Numbers of RSI, RDI.
const RSI: usize = 6;
const RDI: usize = 7;

/// The vector of instructions that are not there, and how many of these are told of.
const UNDEFINED: u8 = 6;
const MOST_UNDEFINED: usize = 10;

/// The files of programs, where functions are not told apart.
#[derive(Debug)]
enum Files {
    None,
    /// Nothing was asked of them yet.
    Later(Box<dyn Objects>),
    Known(Box<Places>),
}

/// What a processor runs.
#[derive(Debug, Clone, Copy, Default)]
struct Running {
    /// The `struct task_struct`; none before the kernel has switched tasks on it.
    task: Option<u64>,
    /// The thread, if it is one of the tree.
    thread: Option<Number>,
}

/// Which program begins the tree that is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// The first one that a process executes which is not the kernel's first process.
    First,
    /// The first one that is executed by this path.
    Path(String),
}

/// Attributes what a machine executes to the programs of one tree of processes.
///
/// It is to be given to the machine with [`Kernel::places`], while the machine is at some point
/// before that exec; [`Attribution::taken`] gets it back.
#[derive(Debug)]
pub struct Attribution {
    kernel: TaskPlaces,
    start: Start,
    tree: Tree,
    functions: Option<Functions>,
    regions: Regions,
    files: Files,
    undefined: Vec<(Number, Undefined)>,
    processors: Vec<Running>,
    /// The processor that is told of.
    on: usize,
}

impl Attribution {
    /// For a machine that runs this kernel, of the tree that begins with `start`.
    #[must_use]
    pub fn new(kernel: Kernel, start: Start) -> Self {
        Self {
            kernel: kernel.0,
            start,
            tree: Tree::default(),
            functions: None,
            regions: Regions::default(),
            files: Files::None,
            undefined: Vec::new(),
            processors: vec![Running::default()],
            on: 0,
        }
    }

    /// Also by functions of user code: `view` is that kernel, and `objects` has the files of
    /// programs.
    #[must_use]
    pub fn with_functions(mut self, view: KernelView, objects: Box<dyn Objects>) -> Self {
        let mut places = Places::new(view, objects);
        places.choose(self.regions.at_start().toggles.clone());
        self.functions = Some(Functions::new(places));
        self
    }

    /// Functions also by the calls that led to them, which takes more memory. To be said behind
    /// [`Attribution::with_functions`].
    #[must_use]
    pub fn with_contexts(mut self) -> Self {
        if let Some(functions) = &mut self.functions {
            functions.by_context();
        }
        self
    }

    /// With the files of programs, for what is rarely asked of them: names of regions, and the
    /// functions of instructions that are not there. To be given where functions are not told
    /// apart; the kernel is looked for when it is needed.
    #[must_use]
    pub fn with_files(mut self, objects: Box<dyn Objects>) -> Self {
        self.files = Files::Later(objects);
        self
    }

    /// With what is collected in regions. To be said before [`Attribution::with_functions`].
    #[must_use]
    pub fn with_regions(mut self, collect: Collect) -> Self {
        self.regions = Regions::new(collect);
        self
    }

    /// The one that a machine was given, out of what it gave back.
    #[must_use]
    pub fn taken(observer: Box<dyn Observer>) -> Option<Box<Self>> {
        let any: Box<dyn Any> = observer;
        any.downcast().ok()
    }

    /// What was counted so far; nothing before the first program.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = self.tree.counts();
        counts.regions = self.regions.counts(&self.tree);
        counts.undefined = self.undefined.iter().map(|(_, one)| one.clone()).collect();
        if let Some(functions) = &self.functions {
            let tree = &self.tree;
            let now = |thread| clock(tree, &self.regions, thread, 0);
            let known = |thread| (tree.place_of(thread), tree.place_among(thread));
            let all = functions.counts(now, known);
            counts.functions = Some(all.functions);
            counts.edges = all.edges;
            counts.contexts = all.contexts;
        }
        counts
    }

    fn running(&mut self) -> &mut Running {
        if self.processors.len() <= self.on {
            self.processors.resize(self.on + 1, Running::default());
        }
        &mut self.processors[self.on]
    }

    /// The kernel is at one of its places.
    fn reached(&mut self, sight: &Sight<'_>) {
        let state = sight.state();
        if state.rip == self.kernel.switch {
            self.switches(sight);
        } else if state.rip == self.kernel.begin {
            self.begins(sight, state.r[RDI]);
        } else if state.rip == self.kernel.exec {
            self.executes(sight);
        } else if state.rip == self.kernel.exit
            && let Some((functions, runs)) = self.looked_at(0)
        {
            functions.ends(runs.thread, runs.now);
        }
    }

    fn begins(&mut self, sight: &Sight<'_>, address: u64) {
        let parent = self.running().thread;
        let Some(task) = self.task_at(sight, address) else {
            return;
        };
        let begun = self.tree.begins(parent, task);
        let Some((parent, child)) = parent.zip(begun) else {
            return;
        };
        self.regions.forks(&self.tree, parent, child);
        if let Some(functions) = &mut self.functions
            && parent != child
        {
            let memory = number_at(sight, address.wrapping_add(self.kernel.mm));
            let child = (child, self.tree.place_of(child));
            functions.begins(parent, child, memory.unwrap_or(0));
        }
    }

    fn switches(&mut self, sight: &Sight<'_>) {
        let [from, to] = [RDI, RSI].map(|register| sight.state().r[register]);
        if let Some(thread) = self.tree.at(from)
            && let Some(comm) = comm_at(sight, from.wrapping_add(self.kernel.comm))
        {
            self.tree.is_called(thread, comm);
        }
        let thread = self.tree.at(to);
        *self.running() = Running {
            task: Some(to),
            thread,
        };
    }

    fn executes(&mut self, sight: &Sight<'_>) {
        let Some(address) = self.running().task else {
            return;
        };
        let Some(task) = self.task_at(sight, address) else {
            return;
        };
        let name = sight.state().r[RDI].wrapping_add(self.kernel.filename);
        let name = number_at(sight, name)
            .and_then(|name| text_at(|at, to| sight.read(at, to), name, PATH));
        let name = name.unwrap_or_else(|| task.comm.clone());
        let is_root = match &self.start {
            Start::First => task.pid != 1,
            Start::Path(path) => *path == name,
        };
        if self.tree.at(address).is_none() && !(is_root && self.tree.is_empty()) {
            return;
        }
        let before = self.tree.at(address);
        let thread = self.tree.executes(task, name);
        self.running().thread = Some(thread);
        if let Some(functions) = &mut self.functions {
            let (tree, regions) = (&self.tree, &self.regions);
            let before = before.map(|before| (before, clock(tree, regions, before, 0)));
            functions.executes(before, thread);
        }
    }

    /// The functions, and the thread that runs, if it is one whose are told apart.
    fn looked_at(&mut self, untold: u64) -> Option<(&mut Functions, Runs)> {
        let running = *self.processors.get(self.on)?;
        let functions = self.functions.as_mut()?;
        let (thread, task) = running.thread.zip(running.task)?;
        let runs = Runs {
            thread,
            program: self.tree.place_of(thread),
            now: clock(&self.tree, &self.regions, thread, untold),
            memory_at: task.wrapping_add(self.kernel.mm),
            processor: self.on,
            doing: self.tree.doing(thread),
        };
        Some((functions, runs))
    }

    /// A text of the program's.
    fn named(&mut self, sight: &Sight<'_>, at: u64) -> Option<String> {
        if let Some(text) = text_at(|at, to| sight.read_as_user(at, to), at, NAME) {
            return Some(text);
        }
        let on = self.on;
        let bytes = self.places(sight)?.of_file(on, at, sight)?;
        Some(text_of(&bytes[..bytes.len().min(NAME)]))
    }

    /// Where files of programs are mapped, if these are known.
    fn places(&mut self, sight: &Sight<'_>) -> Option<&mut Places> {
        if let Some(functions) = &mut self.functions {
            return Some(functions.places());
        }
        if let Files::Later(_) = self.files
            && let Files::Later(objects) = std::mem::replace(&mut self.files, Files::None)
            && let Ok(view) = find(sight.ram().memory(), sight.state().cr3)
        {
            self.files = Files::Known(Box::new(Places::new(view, objects)));
        }
        match &mut self.files {
            Files::Known(places) => Some(places),
            Files::None | Files::Later(_) => None,
        }
    }

    /// User code has met an instruction that is not there.
    fn is_undefined(&mut self, thread: Number, sight: &Sight<'_>) {
        let Some((address, _)) = interrupted(Entry::Exception(UNDEFINED), sight) else {
            return;
        };
        let known = |(of, one): &(Number, Undefined)| *of == thread && one.address == address;
        if self.undefined.len() >= MOST_UNDEFINED || self.undefined.iter().any(known) {
            return;
        }
        let on = self.on;
        let who = self
            .places(sight)
            .and_then(|places| places.who(on, address, sight));
        let (function, object) = who.unwrap_or_default();
        let (program, _) = self.tree.program(thread);
        let program = program.to_owned();
        self.undefined.push((
            thread,
            Undefined {
                program,
                address,
                function,
                object,
            },
        ));
    }

    /// The program asks for something.
    fn is_asked(&mut self, thread: Number, request: Request) {
        let cut = match &request {
            Request::Zero => Some(Cut::Dropped),
            Request::Dump(name) => Some(Cut::Dumped(name.clone())),
            Request::Start | Request::Stop | Request::Toggle => None,
        };
        if let (Some(cut), Some(functions)) = (cut, &mut self.functions) {
            let (tree, regions) = (&self.tree, &self.regions);
            let program = tree.place_of(thread);
            let now = |thread| clock(tree, regions, thread, 0);
            functions.cut(program, tree.threads_of(program), cut, now);
        }
        let thread = (thread, Events::default());
        self.regions.asked(&self.tree, thread, request);
    }

    /// A function may switch collection over.
    fn toggles(&mut self, thread: Number, untold: impl FnOnce() -> Events) {
        let crosses = |functions: &mut Functions| functions.crosses(thread);
        if self.functions.as_mut().is_some_and(crosses) {
            let of = (thread, untold());
            self.regions.asked(&self.tree, of, Request::Toggle);
        }
    }

    fn task_at(&self, sight: &Sight<'_>, address: u64) -> Option<Task> {
        let word = |offset: u64| {
            let mut bytes = [0; 4];
            let read = sight.read(address.wrapping_add(offset), &mut bytes);
            read.then(|| u32::from_le_bytes(bytes))
        };
        Some(Task {
            address,
            tid: word(self.kernel.pid)?,
            pid: word(self.kernel.tgid)?,
            comm: comm_at(sight, address.wrapping_add(self.kernel.comm))?,
        })
    }
}

impl Observer for Attribution {
    fn comes_to(&mut self, processor: usize) {
        self.on = processor;
    }

    fn executed(&mut self, ring: Ring, done: &EventTotals) {
        if let Some(thread) = self.running().thread {
            self.tree.executed(thread, ring, done);
        }
    }

    fn event(&mut self, event: Event, sight: &Sight<'_>) {
        match event {
            Event::Reached => self.reached(sight),
            Event::Entered(entry) => {
                if let Some(thread) = self.running().thread {
                    self.tree.enters(thread, doing(entry, sight.state()));
                    if let Some((functions, runs)) = self.looked_at(0) {
                        functions.enters(runs, entry, sight);
                    }
                    if entry == Entry::Exception(UNDEFINED) {
                        self.is_undefined(thread, sight);
                    }
                }
            }
            Event::Left => {
                if let Some((functions, runs)) = self.looked_at(0) {
                    functions.leaves(runs, sight);
                    self.toggles(runs.thread, Events::default);
                }
            }
            Event::Called { .. } | Event::Returned | Event::Moved => {
                if let Some((functions, runs)) = self.looked_at(sight.untold()) {
                    functions.flows(runs, event, sight);
                    self.toggles(runs.thread, || (&sight.untold_events()).into());
                }
            }
            Event::Requested => {
                let request = Request::of(sight, |at| self.named(sight, at));
                if let Some((thread, request)) = self.running().thread.zip(request) {
                    self.is_asked(thread, request);
                }
            }
        }
    }

    fn follow(&self) -> Follow {
        let thread = self.processors.get(self.on).and_then(|on| on.thread);
        match (&self.functions, thread) {
            (Some(functions), Some(thread)) => functions.follow(thread),
            _ => Follow::default(),
        }
    }
}

/// The instructions of a thread that are counted by function: all of user code, or what is
/// collected of it.
fn clock(tree: &Tree, regions: &Regions, thread: Number, untold: u64) -> u64 {
    let user = tree.user_instructions(thread) + untold;
    if regions.at_start().is_limited() {
        regions.collected(tree, thread, user)
    } else {
        user
    }
}

/// What the kernel was entered for.
fn doing(entry: Entry, state: &State) -> Doing {
    /// The vector of i386's system calls.
    const I386: u8 = 0x80;
    match entry {
        Entry::SystemCall => Doing::Call(Call::native(state)),
        Entry::SystemEnter | Entry::Software(I386) => Doing::Call(Call::i386(state)),
        Entry::Software(_) | Entry::Exception(_) | Entry::Other => Doing::Exception,
        Entry::Interrupt(_) => Doing::Interrupt,
    }
}

/// A pointer at a linear address.
fn number_at(sight: &Sight<'_>, at: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    sight
        .read(at, &mut bytes)
        .then(|| u64::from_le_bytes(bytes))
}

/// A task's name.
fn comm_at(sight: &Sight<'_>, at: u64) -> Option<String> {
    let mut bytes = [0; COMM];
    sight.read(at, &mut bytes).then(|| text_of(&bytes))
}

/// A text that ends with a NUL, or is cut.
fn text_at(read: impl Fn(u64, &mut [u8]) -> bool, at: u64, most: usize) -> Option<String> {
    let mut bytes = Vec::new();
    while bytes.len() < most && !bytes.contains(&0) {
        let next = at.wrapping_add(bytes.len() as u64);
        let room = usize::try_from(PAGE - next % PAGE).unwrap_or(1);
        let before = bytes.len();
        bytes.resize((before + room).min(most), 0);
        if !read(next, &mut bytes[before..]) {
            return None;
        }
    }
    Some(text_of(&bytes))
}

/// What is before the first NUL, without what terminals act upon.
fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    printable(&bytes[..end.unwrap_or(bytes.len())])
}
