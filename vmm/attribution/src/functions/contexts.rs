//! Who called whom, from the first function of a thread on: a tree, in which a function is a node
//! for each chain of calls that led to it.

use std::collections::BTreeMap;

use ahash::AHashMap;

use crate::tree::Number;

/// The number of a function.
pub(crate) type FunctionId = u32;

/// The number of a node. It is 0 where contexts are not told apart.
pub(crate) type Node = u32;

/// Nodes that are kept, and beginnings of threads. Of a guest that calls in more ways than these, functions are beside each
/// other below their thread from then on, and at twice as many nodes in one that has no name.
const MOST: usize = 1 << 20;
/// Calls that a chain has at most. Of deeper ones the innermost is kept, behind the outer ones.
const DEEPEST: u16 = 256;
/// Dumps of all programs. What a program dumps later is added to the last one that it has.
const MOST_DUMPS: u64 = 4_096;

#[derive(Debug, Clone, Copy)]
pub(crate) struct OneNode {
    /// Of a root itself.
    pub(crate) parent: Node,
    /// Its place among the roots, at the end of its parents.
    pub(crate) root: u32,
    pub(crate) function: FunctionId,
    depth: u16,
    pub(crate) own: u64,
    pub(crate) calls: u64,
}

impl OneNode {
    pub(crate) fn is_root(&self) -> bool {
        self.depth == 0
    }
}

/// What programs have asked for and did not get, since there was too much of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LostCuts {
    /// Dumps that are in another one, or none.
    pub(crate) dumps: u64,
    /// What was to be dropped and is there.
    pub(crate) drops: u64,
}

/// How a part of a program has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cut {
    /// What was counted is to be forgotten.
    Dropped,
    /// It was dumped by this name, which may be empty.
    Dumped(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OnePart {
    /// The place of the program in the tree.
    pub(crate) program: usize,
    /// None of one that has not ended before the program did.
    pub(crate) cut: Option<Cut>,
}

/// Where a program is.
#[derive(Debug, Clone, Default)]
struct Goes {
    /// Its part; none where nothing of it has begun.
    part: Option<usize>,
    /// The beginnings of threads in that.
    roots: Vec<Node>,
    /// The part that was dropped since its last dump, to which what is dropped next is added.
    dropped: Option<usize>,
    /// Its last dump.
    dumped: Option<usize>,
}

/// All chains of calls.
#[derive(Debug, Clone, Default)]
pub(crate) struct ContextTree {
    nodes: Vec<OneNode>,
    known: AHashMap<(Node, FunctionId), Node>,
    /// The thread, and the place of the part.
    roots: Vec<(Number, usize)>,
    parts: Vec<OnePart>,
    programs: BTreeMap<usize, Goes>,
    dumps: u64,
    lost: LostCuts,
}

impl ContextTree {
    /// A caller stands in front of what it has called.
    pub(crate) fn nodes(&self) -> &[OneNode] {
        &self.nodes
    }

    /// The thread, and the place of the part.
    pub(crate) fn roots(&self) -> &[(Number, usize)] {
        &self.roots
    }

    pub(crate) fn parts(&self) -> &[OnePart] {
        &self.parts
    }

    pub(crate) fn lost(&self) -> LostCuts {
        self.lost
    }

    fn part(&mut self, program: usize) -> usize {
        let parts = &mut self.parts;
        let goes = self.programs.entry(program).or_default();
        *goes.part.get_or_insert_with(|| {
            parts.push(OnePart { program, cut: None });
            parts.len() - 1
        })
    }

    fn is_full(&self) -> bool {
        self.roots.len() >= MOST
    }

    /// Where a thread of a program begins, or goes on in another part. When there are too many,
    /// threads begin where another one of their program has.
    pub(crate) fn root(&mut self, thread: Number, program: usize) -> Node {
        let part = self.part(program);
        let goes = self.programs.entry(program).or_default();
        if let Some(shared) = goes.roots.last().filter(|_| self.roots.len() >= MOST) {
            return *shared;
        }
        let (Ok(root), Ok(node)) = (
            u32::try_from(self.roots.len()),
            Node::try_from(self.nodes.len()),
        ) else {
            return 0;
        };
        goes.roots.push(node);
        self.roots.push((thread, part));
        self.nodes.push(OneNode {
            parent: node,
            root,
            function: FunctionId::MAX,
            depth: 0,
            own: 0,
            calls: 0,
        });
        node
    }

    /// A thread that has executed nothing in the part that has just ended, where it begins at
    /// `root`, is in the next one instead: threads that sleep take no room.
    pub(crate) fn stays(&mut self, root: Node, program: usize) {
        let part = self.part(program);
        let place = self.nodes[root as usize].root as usize;
        self.roots[place].1 = part;
        self.programs.entry(program).or_default().roots.push(root);
    }

    /// The part that a program is in ends so, and another one begins, in which its threads go on.
    /// False where there is no room for that: it goes on, too.
    pub(crate) fn cut(&mut self, program: usize, how: Cut) -> bool {
        let is_full = self.is_full();
        let is_dump = matches!(how, Cut::Dumped(_));
        let goes = self.programs.entry(program).or_default();
        // Parts that are dropped after each other are one: a loop drops what it did many times.
        let into = match how {
            Cut::Dropped => goes.dropped,
            Cut::Dumped(_) => goes.dumped.filter(|_| self.dumps >= MOST_DUMPS),
        };
        if is_full {
            let lost = if is_dump {
                &mut self.lost.dumps
            } else {
                &mut self.lost.drops
            };
            *lost += 1;
            return false;
        }
        if is_dump {
            self.lost.dumps += u64::from(self.dumps >= MOST_DUMPS);
            self.dumps += 1;
        }
        let roots = std::mem::take(&mut goes.roots);
        let ended = match (into, goes.part) {
            (Some(into), _) => {
                for root in roots {
                    let place = self.nodes[root as usize].root as usize;
                    self.roots[place].1 = into;
                }
                into
            }
            (None, Some(part)) => {
                goes.part = None;
                self.parts[part].cut = Some(how);
                part
            }
            (None, None) => {
                // Nothing of it was counted.
                let cut = Some(how);
                self.parts.push(OnePart { program, cut });
                self.parts.len() - 1
            }
        };
        if is_dump {
            goes.dumped = Some(ended);
            goes.dropped = None;
        } else {
            goes.dropped = Some(ended);
        }
        true
    }

    /// `function`, where `parent` has called it.
    #[inline]
    pub(crate) fn child(&mut self, parent: Node, function: FunctionId) -> Node {
        let one = self.nodes[parent as usize];
        let parent = if one.depth < DEEPEST {
            parent
        } else {
            one.parent
        };
        match self.known.get(&(parent, function)) {
            Some(known) => *known,
            None => self.add(parent, function),
        }
    }

    #[cold]
    fn add(&mut self, parent: Node, function: FunctionId) -> Node {
        let one = self.nodes[parent as usize];
        let root = self.root_of(parent);
        let (parent, depth, function) = if self.nodes.len() < MOST {
            (parent, one.depth + 1, function)
        } else if self.nodes.len() < 2 * MOST {
            (root, 1, function)
        } else {
            (root, 1, FunctionId::MAX)
        };
        if let Some(known) = self.known.get(&(parent, function)) {
            return *known;
        }
        let Ok(node) = Node::try_from(self.nodes.len()) else {
            return root;
        };
        self.nodes.push(OneNode {
            parent,
            root: one.root,
            function,
            depth,
            own: 0,
            calls: 0,
        });
        self.known.insert((parent, function), node);
        node
    }

    fn root_of(&self, mut node: Node) -> Node {
        while !self.nodes[node as usize].is_root() {
            node = self.nodes[node as usize].parent;
        }
        node
    }

    #[inline]
    pub(crate) fn executed(&mut self, node: Node, instructions: u64) {
        self.nodes[node as usize].own += instructions;
    }

    #[inline]
    pub(crate) fn called(&mut self, node: Node) {
        self.nodes[node as usize].calls += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_one_for_each_chain() {
        let mut contexts = ContextTree::default();
        let root = contexts.root(7, 0);
        let main = contexts.child(root, 1);
        let [one, two] = [2, 3].map(|function| contexts.child(main, function));
        let [under_one, under_two] = [one, two].map(|node| contexts.child(node, 4));
        assert_ne!(under_one, under_two);
        assert_eq!(contexts.child(one, 4), under_one);
        let node = &contexts.nodes[under_one as usize];
        assert_eq!((node.parent, node.root, node.function), (one, 0, 4));
        assert_eq!(contexts.roots, [(7, 0)]);
    }

    #[test]
    fn recursion_without_end_is_bounded() {
        let mut contexts = ContextTree::default();
        let root = contexts.root(0, 0);
        let mut node = root;
        for turn in 0..10_000 {
            node = contexts.child(node, turn % 2);
        }
        assert_eq!(contexts.nodes[node as usize].function, 1);
        assert!(contexts.nodes.len() <= usize::from(DEEPEST) + 3);
    }

    #[test]
    fn chains_without_number_are_bounded() {
        let mut contexts = ContextTree::default();
        let root = contexts.root(0, 0);
        let most = u32::try_from(MOST).expect("few");
        for function in 0..2 * most + 10 {
            let outer = contexts.child(root, function);
            let inner = contexts.child(outer, 5);
            contexts.executed(inner, 1);
        }
        assert!(contexts.nodes.len() <= 2 * MOST + 1);
        let sum: u64 = contexts.nodes.iter().map(|node| node.own).sum();
        assert_eq!(sum, u64::from(2 * most + 10));
    }

    #[test]
    fn parts_are_those_of_their_programs() {
        let mut contexts = ContextTree::default();
        contexts.root(0, 0);
        contexts.root(1, 1);
        assert!(contexts.cut(0, Cut::Dumped("a".to_owned())));
        contexts.root(0, 0);
        assert!(contexts.cut(2, Cut::Dropped));
        assert_eq!(contexts.roots, [(0, 0), (1, 1), (0, 2)]);
        let cuts = contexts
            .parts
            .iter()
            .map(|part| (part.program, part.cut.is_some()));
        let expected = [(0, true), (1, false), (0, false), (2, true)];
        assert_eq!(cuts.collect::<Vec<_>>(), expected);
    }

    /// What is dropped and what each dump has, of a program that executes 10 and drops them, and
    /// 1 and dumps them.
    fn benched(turns: u64, drops: bool) -> (ContextTree, Vec<u64>, u64) {
        let mut contexts = ContextTree::default();
        let executes = |contexts: &mut ContextTree, instructions| {
            let root = contexts.root(0, 0);
            let node = contexts.child(root, 1);
            contexts.executed(node, instructions);
        };
        for turn in 0..turns {
            executes(&mut contexts, 10);
            assert!(contexts.cut(0, Cut::Dropped));
            if !drops {
                executes(&mut contexts, 1);
                assert!(contexts.cut(0, Cut::Dumped(turn.to_string())));
            }
        }
        executes(&mut contexts, 3);
        let mut sums = vec![0; contexts.parts.len()];
        for node in &contexts.nodes {
            sums[contexts.roots[node.root as usize].1] += node.own;
        }
        let (mut dumped, mut rest) = (Vec::new(), 0);
        for (part, sum) in contexts.parts.iter().zip(sums) {
            match part.cut {
                Some(Cut::Dumped(_)) => dumped.push(sum),
                Some(Cut::Dropped) => {}
                None => rest += sum,
            }
        }
        (contexts, dumped, rest)
    }

    #[test]
    fn what_is_dropped_takes_no_dumps() {
        let (contexts, dumped, rest) = benched(4096, false);
        assert_eq!((dumped, rest), (vec![1; 4096], 3));
        assert_eq!(contexts.lost(), LostCuts::default());
        let (contexts, dumped, rest) = benched(10_000, true);
        assert_eq!((dumped, rest), (vec![], 3));
        assert_eq!(contexts.parts().len(), 2);
    }

    #[test]
    fn too_many_dumps_are_told_and_what_is_dropped_stays_so() {
        let (contexts, mut dumped, rest) = benched(5000, false);
        assert_eq!((dumped.pop(), rest), (Some(1 + 5000 - 4096), 3));
        assert_eq!(dumped, vec![1; 4095]);
        assert_eq!(
            contexts.lost(),
            LostCuts {
                dumps: 904,
                drops: 0
            }
        );
    }

    #[test]
    fn programs_take_no_dumps_of_others() {
        let mut contexts = ContextTree::default();
        for program in 1..5000 {
            contexts.root(0, program);
        }
        contexts.root(0, 0);
        let before = contexts.parts.len();
        for _ in 0..6 {
            assert!(contexts.cut(0, Cut::Dumped(String::new())));
            contexts.root(0, 0);
        }
        assert_eq!(contexts.parts.len(), before + 6);
        assert_eq!(contexts.lost(), LostCuts::default());
    }

    #[test]
    fn threads_without_number_are_bounded() {
        let mut contexts = ContextTree::default();
        for _ in 0..=MOST {
            contexts.root(0, 0);
        }
        assert_eq!(contexts.nodes.len(), MOST);
        for _ in 0..3 {
            assert!(!contexts.cut(0, Cut::Dropped));
            assert!(!contexts.cut(0, Cut::Dumped(String::new())));
        }
        assert_eq!(contexts.lost(), LostCuts { dumps: 3, drops: 3 });
        // Each program has one.
        contexts.root(0, 1);
        contexts.root(0, 1);
        assert_eq!(contexts.nodes.len(), MOST + 1);
    }

    #[test]
    fn a_thread_that_sleeps_is_in_the_next_part() {
        let mut contexts = ContextTree::default();
        let [_, sleeps] = [0, 1].map(|thread| contexts.root(thread, 0));
        for _ in 0..2 {
            assert!(contexts.cut(0, Cut::Dumped(String::new())));
            contexts.root(0, 0);
            contexts.stays(sleeps, 0);
        }
        assert_eq!(contexts.roots, [(0, 0), (1, 2), (0, 1), (0, 2)]);
    }
}
