//! The functions of user code: where RIP is, who called whom, what that took.

mod book;
mod contexts;
mod object;
mod places;
mod shadow;

use std::collections::BTreeMap;
use std::fmt::Debug;

use ahash::AHashMap;
use emu::{Entry, Event, Follow, Sight};

use self::book::{Book, Edge};
pub(crate) use self::contexts::Cut;
use self::contexts::{ContextTree, FunctionId};
pub(crate) use self::places::Places;
use self::places::{Mapped, Place};
use self::shadow::{Moment, Shadow};
use crate::calls::Call;
use crate::counts::{
    CallEdge, Context, ContextRoot, Contexts, Function, MappedFile, Part, PartEnd,
};
use crate::tree::{Doing, Number};

/// Numbers of RCX, RSP, RSI, RDI, R10.
const RCX: usize = 1;
const RSP: usize = 4;
const RSI: usize = 6;
const RDI: usize = 7;
const R10: usize = 10;

/// Calls that are kept of all threads, when each has its part.
const ROOM: usize = 1 << 20;

/// The files that programs are made of, for their symbols.
pub trait Objects: Debug + Send {
    /// The bytes of the file that the guest has at `path`; none where there is none, or it is none
    /// that may be looked at.
    fn read(&mut self, path: &str) -> Option<Vec<u8>>;
}

/// What of user code is known of a thread.
#[derive(Debug, Default)]
struct FollowedThread {
    /// None before its first instruction.
    shadow: Option<Shadow>,
    /// Of its program's `struct mm_struct`.
    memory: u64,
    /// The function that it is in.
    place: Place,
    /// RIP and RSP when it entered the kernel.
    left_at: Option<(u64, u64)>,
    /// What its system call takes out of memory: address and bytes.
    unmaps: Option<(u64, u64)>,
    /// It is in a function that switches collection over.
    inside: bool,
}

/// The thread that runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Runs {
    pub(crate) thread: Number,
    /// Its program's place in the tree.
    pub(crate) program: usize,
    /// Its instructions of user code so far that are counted by function.
    pub(crate) now: u64,
    /// Where its `struct task_struct` has its `struct mm_struct`.
    pub(crate) memory_at: u64,
    /// The processor that it runs on.
    pub(crate) processor: usize,
    /// What the kernel did last for it.
    pub(crate) doing: Doing,
}

/// The functions of all programs of a tree.
#[derive(Debug)]
pub(crate) struct Functions {
    places: Places,
    threads: AHashMap<Number, FollowedThread>,
    book: Book,
    /// What threads that have ended had mapped, where contexts are told apart.
    left: AHashMap<Number, Mapped>,
}

/// All functions, and how they called each other.
#[derive(Debug)]
pub(crate) struct FunctionCounts {
    /// The costliest first.
    pub(crate) functions: Vec<Function>,
    pub(crate) edges: Vec<CallEdge>,
    pub(crate) contexts: Option<Contexts>,
}

impl Functions {
    pub(crate) fn new(places: Places) -> Self {
        Self {
            places,
            threads: AHashMap::new(),
            book: Book::default(),
            left: AHashMap::new(),
        }
    }

    /// Also by the calls that led to each function.
    pub(crate) fn by_context(&mut self) {
        self.book.by_context();
    }

    /// The part of a program ends that `threads` are in.
    pub(crate) fn cut(
        &mut self,
        program: usize,
        threads: impl Iterator<Item = Number>,
        how: Cut,
        now: impl Fn(Number) -> u64,
    ) {
        if !self.book.cut(program, how) {
            return;
        }
        for thread in threads {
            let followed = self.threads.get_mut(&thread);
            if let Some(shadow) = followed.and_then(|followed| followed.shadow.as_mut()) {
                let now = now(thread);
                if let Some(root) = shadow.slept(now) {
                    self.book.stays(root, program);
                    continue;
                }
                let root = self.book.root(thread, program);
                shadow.goes_on(&mut self.book, now, root);
            }
        }
    }

    /// What is to be told of the thread that runs.
    pub(crate) fn follow(&self, thread: Number) -> Follow {
        match self.threads.get(&thread) {
            Some(FollowedThread {
                shadow: Some(_),
                place,
                ..
            }) => Follow {
                on: true,
                start: place.start,
                len: place.len,
            },
            _ => Follow::default(),
        }
    }

    /// `thread` has become `executes`, of another program.
    pub(crate) fn executes(&mut self, before: Option<(Number, u64)>, executes: Number) {
        if let Some((before, now)) = before {
            self.ends(before, now);
        }
        self.threads.insert(executes, FollowedThread::default());
    }

    /// `parent` has made `child` of a program, with its memory or a copy of it.
    pub(crate) fn begins(
        &mut self,
        parent: Number,
        (child, program): (Number, usize),
        memory: u64,
    ) {
        let Some(from) = self.threads.get(&parent) else {
            return;
        };
        if from.memory != memory {
            self.places.copy(from.memory, memory);
        }
        let begun = FollowedThread {
            shadow: from.shadow.as_ref().map(|shadow| {
                let root = self.book.root(child, program);
                shadow.forked(&mut self.book, root)
            }),
            memory,
            place: from.place,
            left_at: from.left_at,
            unmaps: None,
            inside: from.inside,
        };
        self.threads.insert(child, begun);
    }

    /// It executes no more user code.
    pub(crate) fn ends(&mut self, thread: Number, now: u64) {
        if let Some(FollowedThread {
            shadow: Some(shadow),
            memory,
            ..
        }) = self.threads.remove(&thread)
        {
            shadow.ends(&mut self.book, now);
            if self.book.contexts().is_some() {
                self.left.insert(thread, self.places.mapped_in(memory));
            }
        }
    }

    /// User code has entered the kernel.
    pub(crate) fn enters(&mut self, runs: Runs, entry: Entry, sight: &Sight<'_>) {
        let Some(thread) = self.threads.get_mut(&runs.thread) else {
            return;
        };
        thread.left_at = interrupted(entry, sight);
        thread.unmaps = unmaps(runs.doing, sight);
    }

    /// The kernel has left for user code.
    pub(crate) fn leaves(&mut self, runs: Runs, sight: &Sight<'_>) {
        const SIGRETURN: u32 = 15;
        let state = sight.state();
        let at = Moment {
            now: runs.now,
            rsp: state.r[RSP],
        };
        let thread = self.threads.entry(runs.thread).or_default();
        if thread.memory == 0 {
            let mut memory = [0; 8];
            if !sight.read(runs.memory_at, &mut memory) {
                return;
            }
            thread.memory = u64::from_le_bytes(memory);
            // Another program's may have been at the same address.
            self.places.forget(thread.memory);
        }
        if let Some((start, len)) = thread.unmaps.take() {
            self.places.unmapped(thread.memory, start, len);
        }
        let before = thread.left_at;
        if thread.shadow.is_some() && before == Some((state.rip, at.rsp)) {
            return;
        }
        let memory = thread.memory;
        let place = self.places.at((memory, runs.processor), state.rip, sight);
        thread.place = place;
        // A thread begins on a stack of its own.
        let begins = runs.doing == Doing::Start && before.is_some_and(|(_, rsp)| rsp != at.rsp);
        let Some(shadow) = thread.shadow.as_mut().filter(|_| !begins) else {
            let room = ROOM / self.threads.len().max(1);
            if let Some(thread) = self.threads.get_mut(&runs.thread) {
                let root = self.book.root(runs.thread, runs.program);
                let begins = (root, place.function);
                thread.shadow = Some(Shadow::new(&mut self.book, begins, at, room));
            }
            return;
        };
        let lower = before.filter(|(_, rsp)| at.rsp < *rsp);
        match lower {
            Some((_, rsp)) if runs.doing != Doing::Call(Call::Native(SIGRETURN)) => {
                let mut back = [0; 8];
                let read = sight.read(at.rsp, &mut back);
                let back = if read { u64::from_le_bytes(back) } else { 0 };
                shadow.signalled(&mut self.book, at, place.function, (back, rsp));
            }
            _ => shadow.moved(&mut self.book, at, place.function, state.rip),
        }
    }

    pub(crate) fn places(&mut self) -> &mut Places {
        &mut self.places
    }

    /// Whether the thread has come into one of the chosen functions, or out of all of them, since
    /// this was asked last.
    pub(crate) fn crosses(&mut self, thread: Number) -> bool {
        let chosen = self.places.chosen();
        if chosen.is_empty() {
            return false;
        }
        let Some(thread) = self.threads.get_mut(&thread) else {
            return false;
        };
        let shadow = thread.shadow.as_ref();
        let inside = shadow.is_some_and(|shadow| shadow.is_in(chosen));
        std::mem::replace(&mut thread.inside, inside) != inside
    }

    /// User code has called, returned, or is in another function.
    pub(crate) fn flows(&mut self, runs: Runs, event: Event, sight: &Sight<'_>) {
        let state = sight.state();
        let Some(thread) = self.threads.get_mut(&runs.thread) else {
            return;
        };
        let Some(shadow) = &mut thread.shadow else {
            return;
        };
        let at = Moment {
            now: runs.now,
            rsp: state.r[RSP],
        };
        let memory = (thread.memory, runs.processor);
        let place = self.places.at(memory, state.rip, sight);
        thread.place = place;
        let book = &mut self.book;
        match event {
            Event::Called { next } => shadow.called(book, at, place.function, next),
            Event::Returned => shadow.returned(book, at, place.function, state.rip),
            _ => shadow.moved(book, at, place.function, state.rip),
        }
    }

    /// All of them, when `now` says how many instructions a thread has executed, and `known` its
    /// program's place among those of the tree and its own among that one's threads.
    pub(crate) fn counts(
        &self,
        now: impl Fn(Number) -> u64,
        known: impl Fn(Number) -> (usize, usize),
    ) -> FunctionCounts {
        let mut book = self.book.clone();
        for (number, thread) in &self.threads {
            if let Some(shadow) = &thread.shadow {
                shadow.clone().ends(&mut book, now(*number));
            }
        }
        let mut all: BTreeMap<(&str, &str), Function> = BTreeMap::new();
        let nodes = book.contexts().map_or(&[][..], ContextTree::nodes);
        let unknown = nodes.iter().filter(|node| !node.is_root());
        // Of what had no room in the tree nothing else is known.
        let unknown = unknown.filter(|node| node.function == FunctionId::MAX);
        let unknown = unknown
            .take(1)
            .map(|node| (node.function, Default::default()));
        for (number, cost) in (0..).zip(book.costs().iter().copied()).chain(unknown) {
            let (object, name) = self.places.name(number);
            let function = all.entry((object, name)).or_insert_with(|| Function {
                object: object.to_owned(),
                name: name.to_owned(),
                ..Function::default()
            });
            function.own += cost.own;
            function.inclusive += cost.inclusive;
            function.calls += cost.calls;
        }
        let mut functions: Vec<Function> = all.into_values().collect();
        // Those that cost the same stay in the order of their names.
        functions.sort_by_key(|function| std::cmp::Reverse(function.own));
        let place: AHashMap<(&str, &str), usize> = functions
            .iter()
            .zip(0..)
            .map(|(function, place)| ((function.object.as_str(), function.name.as_str()), place))
            .collect();
        let place = |function| place[&self.places.name(function)];
        let mut edges: BTreeMap<(usize, usize), Edge> = BTreeMap::new();
        for ((caller, callee), edge) in book.edges() {
            let sum = edges.entry((place(caller), place(callee))).or_default();
            sum.calls += edge.calls;
            sum.inclusive += edge.inclusive;
        }
        let edges = edges.into_iter().map(|((caller, callee), edge)| CallEdge {
            caller,
            callee,
            calls: edge.calls,
            inclusive: edge.inclusive,
        });
        let edges = edges.collect();
        let contexts = book.contexts();
        let contexts = contexts.map(|contexts| self.contexts(contexts, place, known));
        FunctionCounts {
            functions,
            edges,
            contexts,
        }
    }

    /// As they are printed and saved; `place` is that of a function among those.
    fn contexts(
        &self,
        contexts: &ContextTree,
        place: impl Fn(FunctionId) -> usize,
        known: impl Fn(Number) -> (usize, usize),
    ) -> Contexts {
        let parts = contexts.parts().iter().map(|part| Part {
            program: part.program,
            end: match &part.cut {
                None => PartEnd::Program,
                Some(Cut::Dropped) => PartEnd::Dropped,
                Some(Cut::Dumped(name)) => PartEnd::Dumped(name.clone()),
            },
        });
        let roots = contexts.roots().iter().map(|(thread, part)| ContextRoot {
            part: *part,
            thread: known(*thread).1,
        });
        let mut nodes = Vec::new();
        // Of a root none.
        let mut places: Vec<Option<usize>> = Vec::new();
        for node in contexts.nodes() {
            let is_root = node.is_root();
            places.push((!is_root).then_some(nodes.len()));
            if !is_root {
                nodes.push(Context {
                    root: node.root as usize,
                    // One that has called comes in front of what it has called.
                    caller: places[node.parent as usize],
                    function: place(node.function),
                    offset: self.places.offset(node.function),
                    own: node.own,
                    calls: node.calls,
                });
            }
        }
        let mut mapped: BTreeMap<(usize, usize), MappedFile> = BTreeMap::new();
        for (thread, _) in contexts.roots() {
            let (program, _) = known(*thread);
            let live = || self.threads.get(thread).map(|live| live.memory);
            let all = self.left.get(thread).cloned();
            let all = all.or_else(|| Some(self.places.mapped_in(live()?)));
            for (file, range) in all.unwrap_or_default().iter() {
                let (object, build_id) = self.places.mapped_object(*file);
                mapped.entry((program, *file)).or_insert(MappedFile {
                    program,
                    object: object.to_owned(),
                    build_id,
                    start: range.start,
                    end: range.end,
                    offset: range.offset,
                });
            }
        }
        let lost = contexts.lost();
        Contexts {
            lost_dumps: lost.dumps,
            lost_drops: lost.drops,
            parts: parts.collect(),
            roots: roots.collect(),
            nodes,
            mapped: mapped.into_values().collect(),
        }
    }
}

/// RIP and RSP of the user code that has entered the kernel, where these are known.
pub(crate) fn interrupted(entry: Entry, sight: &Sight<'_>) -> Option<(u64, u64)> {
    let state = sight.state();
    let with_code = match entry {
        // RSP is the program's still.
        Entry::SystemCall => return Some((state.r[RCX], state.r[RSP])),
        Entry::SystemEnter | Entry::Other => return None,
        Entry::Exception(vector) => matches!(vector, 8 | 10..=14 | 17),
        Entry::Software(_) | Entry::Interrupt(_) => false,
    };
    let frame = state.r[RSP].wrapping_add(if with_code { 8 } else { 0 });
    let mut words = [0; 40];
    let read = sight.read(frame, &mut words);
    let word = |place: usize| {
        let bytes = words[8 * place..8 * place + 8].try_into();
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    read.then(|| (word(0), word(3)))
}

/// What a system call takes out of memory, if it does.
fn unmaps(doing: Doing, sight: &Sight<'_>) -> Option<(u64, u64)> {
    const MMAP: u32 = 9;
    const MUNMAP: u32 = 11;
    const MREMAP: u32 = 25;
    const MAP_FIXED: u64 = 0x10;
    let r = &sight.state().r;
    match doing {
        Doing::Call(Call::Native(MUNMAP | MREMAP)) => Some((r[RDI], r[RSI])),
        Doing::Call(Call::Native(MMAP)) if r[R10] & MAP_FIXED != 0 => Some((r[RDI], r[RSI])),
        _ => None,
    }
}
