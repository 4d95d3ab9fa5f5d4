//! The calls that a thread is in: a stack beside each of its own.
//!
//! What a function executed itself is counted by where RIP is, so its sums are right whatever the
//! program does to its stack. Which calls are over is decided by RSP: a call ends when RSP is above
//! the place of its return address. So `longjmp`, exceptions and tail calls need not be known as
//! such. A program that goes to another stack (a coroutine, a signal's own stack) is recognised by
//! a return that does not fit.

use super::book::Book;
use super::contexts::{FunctionId, Node};

/// Calls of one thread that are kept at most, and in any case; of deeper recursion the outer half is
/// taken as over.
const DEPTH: usize = 1 << 16;
const SHALLOW: usize = 64;
/// Stacks of one thread that are kept.
const STACKS: usize = 64;
/// Calls that a process keeps of the one which has forked it: the innermost.
const FORKED: usize = 256;
/// Below RSP a return leads to by tricks of the same stack, at most: a program that has pushed where
/// it returns to. Further away is another stack.
const NEAR: u64 = 16 << 10;
/// A stack that was left is one that RSP may be on within this.
const REACH: u64 = 8 << 20;
/// Jumps between functions are looked back over for the function that is jumped to.
const CHAIN: usize = 64;

/// Where a thread is, by its own count of instructions, and its stack pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) now: u64,
    pub(crate) rsp: u64,
}

#[derive(Debug, Clone, Copy)]
struct Frame {
    function: FunctionId,
    /// The same, by who has called it.
    node: Node,
    /// Where it returns to; 0 of one that was not called.
    back: u64,
    /// Where that stands. A stack's first function has no end.
    sp: u64,
    /// The thread's instructions when it began.
    since: u64,
}

#[derive(Debug, Clone)]
struct Stack {
    /// At least one.
    frames: Vec<Frame>,
    /// The highest RSP that was met, and the last one.
    high: u64,
    last: u64,
    /// When it was come to last, in turns of the thread.
    used: u64,
}

impl Stack {
    fn top(&self) -> &Frame {
        // There is always the first one.
        &self.frames[self.frames.len() - 1]
    }

    /// The call that a return to `to` ends, if it is the last one.
    fn is_back(&self, rsp: u64, to: u64) -> bool {
        let top = self.top();
        top.back == to && top.sp.wrapping_add(8) == rsp
    }
}

/// The calls of a thread.
#[derive(Debug, Clone)]
pub(crate) struct Shadow {
    stacks: Vec<Stack>,
    on: usize,
    turns: u64,
    /// Where its chains of calls begin.
    root: Node,
    /// Something was counted since they did.
    awake: bool,
    /// Up to where own instructions are counted.
    since: u64,
    /// How often each function is being executed.
    active: Vec<u32>,
    /// Calls on all stacks, and how many there may be.
    kept: usize,
    room: usize,
}

impl Shadow {
    /// A thread whose chains of calls begin at `root`, and that begins in a function.
    /// `room` calls are kept of it, within bounds.
    pub(crate) fn new(
        book: &mut Book,
        (root, function): (Node, FunctionId),
        at: Moment,
        room: usize,
    ) -> Self {
        let mut shadow = Self {
            stacks: Vec::new(),
            on: 0,
            turns: 0,
            root,
            awake: false,
            since: at.now,
            active: Vec::new(),
            kept: 0,
            room: room.clamp(SHALLOW, DEPTH),
        };
        shadow.add_stack(book, function, at);
        shadow
    }

    /// The same calls in a process that was forked, which has executed nothing: the innermost of
    /// the stack that it is on. Its chains begin at `root`.
    pub(crate) fn forked(&self, book: &mut Book, root: Node) -> Self {
        let here = &self.stacks[self.on];
        let first = here.frames.len().saturating_sub(FORKED).max(1);
        let frames = here.frames[..1].iter().chain(&here.frames[first..]);
        let frames: Vec<Frame> = frames.map(|frame| Frame { since: 0, ..*frame }).collect();
        let mut copy = Self {
            stacks: Vec::new(),
            on: 0,
            turns: 0,
            root,
            awake: false,
            since: 0,
            active: Vec::new(),
            kept: frames.len(),
            room: self.room,
        };
        frames
            .iter()
            .for_each(|frame| copy.activate(frame.function));
        copy.stacks.push(Stack { frames, ..*here });
        copy.chains(book, root);
        copy
    }

    /// From now on its chains of calls begin at `root`: those that it is in go on there.
    pub(crate) fn goes_on(&mut self, book: &mut Book, now: u64, root: Node) {
        self.settle(book, now);
        self.chains(book, root);
    }

    /// Where its chains begin, if nothing was counted since they did.
    pub(crate) fn slept(&self, now: u64) -> Option<Node> {
        (!self.awake && now == self.since).then_some(self.root)
    }

    fn chains(&mut self, book: &mut Book, root: Node) {
        self.root = root;
        self.awake = false;
        for stack in &mut self.stacks {
            let mut node = root;
            for frame in &mut stack.frames {
                node = book.context(node, frame.function);
                frame.node = node;
            }
        }
    }

    /// The function that executes.
    pub(crate) fn current(&self) -> FunctionId {
        self.stacks[self.on].top().function
    }

    /// It is in one of these functions.
    pub(crate) fn is_in(&self, functions: &[FunctionId]) -> bool {
        let active = |function: &FunctionId| self.active.get(*function as usize);
        functions
            .iter()
            .any(|function| active(function).is_some_and(|times| *times > 0))
    }

    /// Counts what was executed up to now as the current function's.
    pub(crate) fn settle(&mut self, book: &mut Book, now: u64) {
        let top = self.stacks[self.on].top();
        let executes = (top.function, top.node);
        self.awake = true;
        book.executed(executes, now.saturating_sub(self.since));
        self.since = now;
    }

    /// `function` was called; RSP points to where it returns to, `back`.
    pub(crate) fn called(&mut self, book: &mut Book, at: Moment, function: FunctionId, back: u64) {
        self.settle(book, at.now);
        if at.rsp >= self.stacks[self.on].top().sp {
            // Another stack was chosen before the call.
            let caller = self.current();
            self.choose(book, caller, at);
        }
        self.unwind(book, at.now, at.rsp.saturating_add(1));
        self.push(book, at.now, (function, back, at.rsp));
        self.note(at.rsp);
    }

    /// The program has returned to `to`, in `function`.
    pub(crate) fn returned(&mut self, book: &mut Book, at: Moment, function: FunctionId, to: u64) {
        self.settle(book, at.now);
        if !self.stacks[self.on].is_back(at.rsp, to) {
            self.choose_by_return(book, function, at, to);
        }
        self.unwind(book, at.now, at.rsp);
        self.lands(book, at.now, function);
        self.note(at.rsp);
    }

    /// The program is in another function without a call or a return, at `to`.
    pub(crate) fn moved(&mut self, book: &mut Book, at: Moment, function: FunctionId, to: u64) {
        self.settle(book, at.now);
        let stack = &self.stacks[self.on];
        if at.rsp > stack.top().sp || self.stacks.len() > 1 {
            self.choose_by_return(book, function, at, to);
        }
        self.unwind(book, at.now, at.rsp);
        self.lands(book, at.now, function);
        self.note(at.rsp);
    }

    /// The kernel has called `function` for a signal; RSP points to where it returns to.
    pub(crate) fn signalled(
        &mut self,
        book: &mut Book,
        at: Moment,
        function: FunctionId,
        (back, interrupted): (u64, u64),
    ) {
        self.settle(book, at.now);
        let below = interrupted.wrapping_sub(at.rsp);
        let caller = self.current();
        if below > NEAR {
            self.choose(book, caller, at);
        }
        self.unwind(book, at.now, at.rsp.saturating_add(1));
        if self.stacks[self.on].frames.len() == 1 {
            // On a stack for signals nothing is left of the last one.
            self.lands(book, at.now, caller);
        }
        self.push(book, at.now, (function, back, at.rsp));
        self.note(at.rsp);
    }

    /// It has ended, or executes another program: all calls are over.
    pub(crate) fn ends(mut self, book: &mut Book, now: u64) {
        self.settle(book, now);
        for stack in 0..self.stacks.len() {
            self.on = stack;
            self.unwind(book, now, u64::MAX);
            let first = self.stacks[stack].frames[0];
            self.leave(book, now, first, None);
        }
    }

    // Stacks.

    fn note(&mut self, rsp: u64) {
        let stack = &mut self.stacks[self.on];
        stack.last = rsp;
        stack.high = stack.high.max(rsp.saturating_add(8));
    }

    fn go_to(&mut self, stack: usize) {
        self.turns += 1;
        self.stacks[stack].used = self.turns;
        self.on = stack;
    }

    /// A stack whose first function is `function`.
    fn add_stack(&mut self, book: &mut Book, function: FunctionId, at: Moment) {
        if self.stacks.len() >= STACKS {
            self.forget_one();
        }
        self.activate(function);
        self.kept += 1;
        self.stacks.push(Stack {
            frames: vec![Frame {
                function,
                node: book.context(self.root, function),
                back: 0,
                sp: u64::MAX,
                since: at.now,
            }],
            high: at.rsp.saturating_add(8),
            last: at.rsp,
            used: 0,
        });
        self.go_to(self.stacks.len() - 1);
    }

    /// The stack that was left longest ago is that of a coroutine that has ended, probably. What
    /// was executed in its calls is told when it is come back to, or not at all.
    fn forget_one(&mut self) {
        let oldest = (0..self.stacks.len()).filter(|stack| *stack != self.on);
        if let Some(oldest) = oldest.min_by_key(|stack| self.stacks[*stack].used) {
            let gone = self.stacks.swap_remove(oldest);
            self.kept -= gone.frames.len();
            for frame in gone.frames {
                self.deactivate(frame.function);
            }
            if self.on == self.stacks.len() {
                self.on = oldest;
            }
        }
    }

    /// The stack that RSP is on, where it does not fit the last call of this one.
    fn choose(&mut self, book: &mut Book, function: FunctionId, at: Moment) {
        let here = &self.stacks[self.on];
        if (here.top().sp..=here.high).contains(&at.rsp) {
            return;
        }
        let distance = |stack: &Stack| {
            let lowest = stack.last.saturating_sub(REACH);
            (lowest..=stack.high)
                .contains(&at.rsp)
                .then(|| stack.high - at.rsp)
        };
        let others = (0..self.stacks.len()).filter(|stack| *stack != self.on);
        let found = others.filter_map(|stack| Some((distance(&self.stacks[stack])?, stack)));
        match found.min() {
            Some((_, stack)) => self.go_to(stack),
            None => self.add_stack(book, function, at),
        }
    }

    /// The stack on which a return to `to` fits, if there is one.
    fn choose_by_return(&mut self, book: &mut Book, function: FunctionId, at: Moment, to: u64) {
        if self.stacks[self.on].is_back(at.rsp, to) {
            return;
        }
        let fits = |stack: &Stack| stack.is_back(at.rsp, to);
        if let Some(stack) = self.stacks.iter().position(fits) {
            self.go_to(stack);
            return;
        }
        let here = &self.stacks[self.on];
        let top = here.top().sp;
        // A stack's first function has no place of its own.
        let top = if top == u64::MAX { here.last } else { top };
        let below = top.saturating_sub(at.rsp);
        let inside = at.rsp <= here.high.saturating_add(NEAR) && below <= NEAR;
        if !inside {
            self.choose(book, function, at);
        }
    }

    // Frames.

    fn activate(&mut self, function: FunctionId) {
        let place = function as usize;
        if self.active.len() <= place {
            self.active.resize(place + 1, 0);
        }
        self.active[place] += 1;
    }

    /// Whether it is executed no more.
    fn deactivate(&mut self, function: FunctionId) -> bool {
        let active = &mut self.active[function as usize];
        *active = active.saturating_sub(1);
        *active == 0
    }

    fn push(&mut self, book: &mut Book, now: u64, called: (FunctionId, u64, u64)) {
        let (function, back, sp) = called;
        while self.kept >= self.room {
            // The other stacks go first, unless this one has most of the calls.
            if self.stacks.len() > 1 && self.stacks[self.on].frames.len() < self.room / 2 {
                self.forget_one();
            } else {
                self.forget_outer(book, now);
            }
        }
        self.kept += 1;
        let node = book.context(self.stacks[self.on].top().node, function);
        book.called((function, node));
        self.activate(function);
        self.stacks[self.on].frames.push(Frame {
            function,
            node,
            back,
            sp,
            since: now,
        });
    }

    /// The outer half of the calls is taken as over.
    fn forget_outer(&mut self, book: &mut Book, now: u64) {
        let frames = &mut self.stacks[self.on].frames;
        let half = (frames.len() / 2).max(2).min(frames.len());
        let outer: Vec<Frame> = frames.drain(1..half).collect();
        self.kept -= outer.len();
        let callers: Vec<FunctionId> = std::iter::once(frames[0].function)
            .chain(outer.iter().map(|frame| frame.function))
            .collect();
        for (frame, caller) in outer.into_iter().zip(callers).rev() {
            self.leave(book, now, frame, Some(caller));
        }
    }

    fn leave(&mut self, book: &mut Book, now: u64, frame: Frame, caller: Option<FunctionId>) {
        let outermost = self.deactivate(frame.function);
        let took = now.saturating_sub(frame.since);
        book.over(caller, frame.function, took, outermost);
    }

    /// Ends the calls whose return addresses are below `rsp`.
    fn unwind(&mut self, book: &mut Book, now: u64, rsp: u64) {
        while self.stacks[self.on].frames.len() > 1 && self.stacks[self.on].top().sp < rsp {
            self.pop(book, now);
        }
    }

    fn pop(&mut self, book: &mut Book, now: u64) {
        let frames = &mut self.stacks[self.on].frames;
        if let Some(frame) = frames.pop() {
            self.kept -= 1;
            let caller = frames.last().map(|caller| caller.function);
            self.leave(book, now, frame, caller);
        }
    }

    /// RIP is in `function`, on what is left of the stack.
    fn lands(&mut self, book: &mut Book, now: u64, function: FunctionId) {
        if self.current() == function {
            return;
        }
        let frames = &mut self.stacks[self.on].frames;
        if let [first] = frames.as_mut_slice() {
            // Nobody has called it, and nobody is returned to.
            let gone = *first;
            first.function = function;
            first.node = book.context(self.root, function);
            first.since = now;
            self.activate(function);
            self.leave(book, now, gone, None);
            return;
        }
        let (sp, back) = (
            self.stacks[self.on].top().sp,
            self.stacks[self.on].top().back,
        );
        // Who jumps back to where he was jumped to from has returned: parts of functions that lie
        // apart, and functions that end in each other.
        let frames = self.stacks[self.on].frames.iter().rev();
        let chain = frames.take(CHAIN).take_while(|frame| frame.sp == sp);
        let place = chain
            .map(|frame| frame.function)
            .position(|one| one == function);
        match place {
            Some(place) => (0..place).for_each(|_| self.pop(book, now)),
            None => self.push(book, now, (function, back, sp)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::functions::book::{Cost, Edge};
    use crate::functions::contexts::{Cut, OneNode};

    /// A thread that executes, calls and returns, with what it has pushed.
    struct Run {
        shadow: Shadow,
        book: Book,
        at: Moment,
        /// Return addresses, by where they are.
        pushed: Vec<(u64, u64)>,
    }

    const TOP: u64 = 0x7fff_0000;

    /// What was executed, by the names of functions from the first of a part on.
    fn chains(book: &Book) -> Vec<(usize, Vec<FunctionId>, u64)> {
        let contexts = book.contexts().expect("they were asked for");
        let executed = contexts.nodes().iter().filter(|node| node.own > 0);
        let chain = |node: &OneNode| {
            let mut names = Vec::new();
            let mut at = *node;
            while !at.is_root() {
                names.insert(0, at.function);
                at = contexts.nodes()[at.parent as usize];
            }
            let (_, part) = contexts.roots()[node.root as usize];
            (part, names, node.own)
        };
        executed.map(chain).collect()
    }

    impl Run {
        fn new(function: FunctionId) -> Self {
            let at = Moment { now: 0, rsp: TOP };
            let mut book = Book::default();
            book.by_context();
            let root = book.root(0, 0);
            Self {
                shadow: Shadow::new(&mut book, (root, function), at, DEPTH),
                book,
                at,
                pushed: Vec::new(),
            }
        }

        fn execute(&mut self, instructions: u64) -> &mut Self {
            self.at.now += instructions;
            self
        }

        fn take(&mut self, bytes: u64) -> &mut Self {
            self.at.rsp -= bytes;
            self
        }

        fn call(&mut self, function: FunctionId) -> &mut Self {
            self.take(8);
            let back = u64::from(self.shadow.current()) << 32 | self.at.now;
            self.pushed.push((self.at.rsp, back));
            self.shadow.called(&mut self.book, self.at, function, back);
            self
        }

        /// Returns from the last call to `function`.
        fn back(&mut self, function: FunctionId) -> &mut Self {
            let (sp, back) = self.pushed.pop().expect("a call");
            self.at.rsp = sp + 8;
            self.shadow
                .returned(&mut self.book, self.at, function, back);
            self
        }

        fn jump(&mut self, function: FunctionId) -> &mut Self {
            self.shadow.moved(&mut self.book, self.at, function, 0x1234);
            self
        }

        fn end(self) -> Book {
            let Self {
                shadow,
                mut book,
                at,
                ..
            } = self;
            shadow.ends(&mut book, at.now);
            book
        }
    }

    fn cost(own: u64, inclusive: u64, calls: u64) -> Cost {
        Cost {
            own,
            inclusive,
            calls,
        }
    }

    #[test]
    fn calls_are_inside_of_each_other() {
        let mut run = Run::new(0);
        run.execute(10)
            .call(1)
            .execute(5)
            .call(2)
            .execute(7)
            .back(1);
        run.execute(1).back(0).execute(2).call(2).execute(3).back(0);
        let book = run.end();
        let expected = [cost(12, 28, 0), cost(6, 13, 1), cost(10, 10, 2)];
        assert_eq!(book.costs(), expected);
        let edges: Vec<_> = book.edges().into_iter().collect();
        let edge = |calls, inclusive| Edge { calls, inclusive };
        let expected = [
            ((0, 1), edge(1, 13)),
            ((0, 2), edge(1, 3)),
            ((1, 2), edge(1, 7)),
        ];
        assert_eq!(edges, expected);
    }

    #[test]
    fn recursion_counts_once() {
        let mut run = Run::new(0);
        for _ in 0..5 {
            run.execute(1).call(1).execute(10);
        }
        for _ in 0..5 {
            run.execute(1);
            let to = if run.pushed.len() == 1 { 0 } else { 1 };
            run.back(to);
        }
        let book = run.end();
        // The first instruction is the caller's.
        assert_eq!(book.costs(), [cost(1, 60, 0), cost(59, 59, 5)]);
        assert_eq!(book.edges()[&(1, 1)].inclusive, 0);
    }

    /// One below the other, and all are left at once.
    #[test]
    fn a_long_jump_ends_the_calls_between() {
        let mut run = Run::new(0);
        run.execute(1).call(1).execute(2).take(100);
        let set = (run.at.rsp, run.pushed.len());
        run.call(2).execute(3).call(3).execute(4);
        // `__longjmp` jumps back into the function that has called `setjmp`.
        run.at.rsp = set.0;
        run.pushed.truncate(set.1);
        run.jump(1).execute(5).back(0).execute(6);
        let book = run.end();
        let expected = [cost(7, 21, 0), cost(7, 14, 1), cost(3, 7, 1), cost(4, 4, 1)];
        assert_eq!(book.costs(), expected);
    }

    #[test]
    fn a_tail_call_returns_for_both() {
        let mut run = Run::new(0);
        run.execute(1).call(1).execute(2).jump(2).execute(3);
        // And back, as cold parts of functions do.
        run.jump(1).execute(4).jump(2).execute(5).back(0).execute(6);
        let book = run.end();
        assert_eq!(
            book.costs(),
            [cost(7, 21, 0), cost(6, 14, 1), cost(8, 8, 2)]
        );
    }

    #[test]
    fn a_signal_is_a_call_out_of_the_middle() {
        let mut run = Run::new(0);
        run.execute(1).call(1).execute(2);
        let before = run.at.rsp;
        run.at.rsp -= 128 + 1000;
        let restorer = 0x4444;
        run.shadow
            .signalled(&mut run.book, run.at, 2, (restorer, before));
        run.execute(3).call(3).execute(4).back(2).execute(5);
        // The handler returns to the restorer, which returns by the kernel.
        run.at.rsp += 8;
        run.shadow.returned(&mut run.book, run.at, 4, restorer);
        run.execute(2);
        run.at.rsp = before;
        run.jump(1).execute(6).back(0);
        let book = run.end();
        let expected = [
            cost(1, 23, 0),
            cost(8, 22, 1),
            cost(8, 12, 1),
            cost(4, 4, 1),
            cost(2, 2, 1),
        ];
        assert_eq!(book.costs(), expected);
    }

    /// Two stacks, each of which goes on where it was.
    #[test]
    fn a_coroutine_has_its_own_calls() {
        const OTHER: u64 = 0x1000_0000;
        let mut run = Run::new(0);
        let mut other = Vec::new();
        let mut rsp = OTHER;
        // 1 calls 9, which goes to the other stack: 2 begins there.
        run.execute(1).call(1).execute(2).call(9).execute(1);
        std::mem::swap(&mut run.pushed, &mut other);
        std::mem::swap(&mut run.at.rsp, &mut rsp);
        run.shadow.returned(&mut run.book, run.at, 2, 0x2222);
        run.execute(10);
        for _ in 0..3 {
            // 2 calls 3, which calls 9 as well.
            run.call(3).execute(4).call(9).execute(1);
            std::mem::swap(&mut run.pushed, &mut other);
            std::mem::swap(&mut run.at.rsp, &mut rsp);
            run.back(1).execute(20).call(9).execute(1);
            std::mem::swap(&mut run.pushed, &mut other);
            std::mem::swap(&mut run.at.rsp, &mut rsp);
            run.back(3).execute(5).back(2).execute(1);
        }
        let book = run.end();
        let costs = book.costs();
        assert_eq!(
            [0, 1, 2, 3, 9].map(|one| costs[one].own),
            [1, 62, 13, 27, 7]
        );
        assert_eq!([1, 3, 9].map(|one| costs[one].calls), [1, 3, 7]);
        let edges = book.edges();
        assert_eq!((edges[&(1, 9)].calls, edges[&(3, 9)].calls), (4, 3));
        assert!(!edges.contains_key(&(9, 3)) && !edges.contains_key(&(9, 2)));
    }

    #[test]
    fn recursion_without_end_is_bounded() {
        let mut run = Run::new(0);
        let deep = 3 * DEPTH as u64;
        for _ in 0..deep {
            run.call(1).execute(1);
        }
        assert!(run.shadow.stacks[0].frames.len() <= DEPTH);
        let root = run.book.root(1, 1);
        let forked = run.shadow.forked(&mut run.book, root);
        assert_eq!(forked.kept, FORKED + 1);
        assert_eq!(forked.active[1] as usize, FORKED);
        for _ in 1..deep {
            run.back(1).execute(1);
        }
        run.back(0);
        let costs = run.end().costs().to_vec();
        assert_eq!((costs[1].own, costs[1].calls), (2 * deep - 1, deep));
    }

    #[test]
    fn chains_are_cut_where_a_part_ends() {
        let mut run = Run::new(0);
        run.execute(1).call(1).execute(10).call(2).execute(100);
        assert!(run.book.cut(0, Cut::Dropped));
        let root = run.book.root(0, 0);
        run.shadow.goes_on(&mut run.book, run.at.now, root);
        run.execute(200).back(1).execute(20).back(0).execute(2);
        run.call(2).execute(300).back(0);
        let book = run.end();
        let expected = [
            (0, vec![0], 1),
            (0, vec![0, 1], 10),
            (0, vec![0, 1, 2], 100),
            (1, vec![0], 2),
            (1, vec![0, 1], 20),
            (1, vec![0, 1, 2], 200),
            (1, vec![0, 2], 300),
        ];
        assert_eq!(chains(&book), expected);
    }

    /// What a thread may do to its stack, told or not.
    fn anything() -> impl Strategy<Value = (u8, u32, u64, u64)> {
        let rsp = prop_oneof![
            TOP - 0x1000..TOP,
            0x1000u64..0x9000,
            any::<u64>(),
            Just(u64::MAX),
            Just(0),
        ];
        (0u8..5, 0u32..6, rsp, 0u64..50)
    }

    proptest! {
        #[test]
        fn sums_are_what_was_executed(all in proptest::collection::vec(anything(), 0..200)) {
            let mut run = Run::new(0);
            for (what, function, rsp, instructions) in all {
                run.execute(instructions);
                let at = Moment { rsp, ..run.at };
                let (shadow, book) = (&mut run.shadow, &mut run.book);
                match what {
                    0 => shadow.called(book, at, function, rsp ^ 7),
                    1 => shadow.returned(book, at, function, rsp ^ 7),
                    2 => shadow.moved(book, at, function, rsp ^ 7),
                    3 => shadow.signalled(book, at, function, (rsp ^ 7, TOP)),
                    _ => {
                        let called = Moment { rsp: rsp.wrapping_sub(8), ..at };
                        shadow.called(book, called, function, 99);
                        shadow.returned(book, at, function ^ 1, 99);
                    }
                }
                prop_assert!(run.shadow.stacks.len() <= STACKS);
                let kept = run.shadow.stacks.iter().map(|stack| stack.frames.len());
                prop_assert_eq!(kept.sum::<usize>(), run.shadow.kept);
            }
            let now = run.at.now;
            let book = run.end();
            prop_assert_eq!(book.costs().iter().map(|cost| cost.own).sum::<u64>(), now);
            for cost in book.costs() {
                prop_assert!(cost.own <= now && cost.inclusive <= now);
            }
            let mut own = vec![0; book.costs().len()];
            for (_, chain, executed) in chains(&book) {
                own[*chain.last().expect("a function") as usize] += executed;
            }
            let costs = book.costs().iter().map(|cost| cost.own);
            prop_assert_eq!(own, costs.collect::<Vec<u64>>());
        }
    }
}
