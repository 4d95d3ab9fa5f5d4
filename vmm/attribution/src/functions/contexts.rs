//! Who called whom, from the first function of a thread on: a tree, in which a function is a node
//! for each chain of calls that led to it.

use std::collections::BTreeMap;

use ahash::AHashMap;

use crate::tree::Number;

/// The number of a function.
pub(crate) type FunctionId = u32;

/// The number of a node. It is 0 where contexts are not told apart.
pub(crate) type Node = u32;

/// Nodes that are kept. Of a guest that calls in more ways than these, functions are beside each
/// other below their thread from then on, and at twice as many nodes in one that has no name.
const MOST: usize = 1 << 20;
/// Calls that a chain has at most. Of deeper ones the innermost is kept, behind the outer ones.
const DEEPEST: u16 = 256;
/// Parts of programs; those that are ended later belong to the last one.
const MOST_PARTS: usize = 4_096;

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

/// All chains of calls.
#[derive(Debug, Clone, Default)]
pub(crate) struct ContextTree {
    nodes: Vec<OneNode>,
    known: AHashMap<(Node, FunctionId), Node>,
    /// The thread, and the place of the part.
    roots: Vec<(Number, usize)>,
    parts: Vec<OnePart>,
    /// The part that a program is in.
    last: BTreeMap<usize, usize>,
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

    /// Where a thread of a program begins, or goes on in another part.
    pub(crate) fn root(&mut self, thread: Number, program: usize) -> Node {
        let parts = &mut self.parts;
        let part = *self.last.entry(program).or_insert_with(|| {
            parts.push(OnePart { program, cut: None });
            parts.len() - 1
        });
        let (Ok(root), Ok(node)) = (
            u32::try_from(self.roots.len()),
            Node::try_from(self.nodes.len()),
        ) else {
            return 0;
        };
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

    /// The part that a program is in ends so, and another one begins, unless there are too many.
    pub(crate) fn cut(&mut self, program: usize, how: Cut) -> bool {
        if self.parts.len() >= MOST_PARTS {
            return false;
        }
        if let Some(part) = self.last.remove(&program) {
            self.parts[part].cut = Some(how);
        } else {
            // Nothing of it was counted.
            let cut = Some(how);
            self.parts.push(OnePart { program, cut });
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
}
