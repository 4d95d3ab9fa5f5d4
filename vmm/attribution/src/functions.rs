//! The functions of user code: where RIP is, who called whom, what that took.

mod book;
mod object;
mod places;
mod shadow;

use std::collections::BTreeMap;
use std::fmt::Debug;

use ahash::AHashMap;
use emu::{Entry, Event, Follow, Sight};

use self::book::{Book, Edge};
use self::places::Place;
pub(crate) use self::places::Places;
use self::shadow::{Moment, Shadow};
use crate::calls::Call;
use crate::counts::{CallEdge, Function};
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
}

impl Functions {
    pub(crate) fn new(places: Places) -> Self {
        Self {
            places,
            threads: AHashMap::new(),
            book: Book::default(),
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

    /// `parent` has made `child`, with its memory or a copy of it.
    pub(crate) fn begins(&mut self, parent: Number, child: Number, memory: u64) {
        let Some(from) = self.threads.get(&parent) else {
            return;
        };
        if from.memory != memory {
            self.places.copy(from.memory, memory);
        }
        let begun = FollowedThread {
            shadow: from.shadow.as_ref().map(Shadow::forked),
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
            ..
        }) = self.threads.remove(&thread)
        {
            shadow.ends(&mut self.book, now);
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
                thread.shadow = Some(Shadow::new(place.function, at, room));
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

    /// All functions, the costliest first, and the calls between them, by their places among
    /// these; `now` says how many instructions a thread has executed.
    pub(crate) fn counts(&self, now: impl Fn(Number) -> u64) -> (Vec<Function>, Vec<CallEdge>) {
        let mut book = self.book.clone();
        for (number, thread) in &self.threads {
            if let Some(shadow) = &thread.shadow {
                shadow.clone().ends(&mut book, now(*number));
            }
        }
        let mut all: BTreeMap<(&str, &str), Function> = BTreeMap::new();
        for (number, cost) in (0..).zip(book.costs()) {
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
        let mut edges: BTreeMap<(usize, usize), Edge> = BTreeMap::new();
        for ((caller, callee), edge) in book.edges() {
            let [caller, callee] = [caller, callee].map(|one| place[&self.places.name(one)]);
            let sum = edges.entry((caller, callee)).or_default();
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
        (functions, edges)
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
