//! What functions cost, and who called whom.

use std::collections::BTreeMap;

use ahash::AHashMap;

use super::contexts::{ContextTree, Cut, FunctionId, Node};
use crate::tree::Number;

/// What a function costs, in instructions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) own: u64,
    pub(crate) inclusive: u64,
    pub(crate) calls: u64,
}

/// The calls from one function to another, and what was executed in them. Of a function that is
/// being executed already nothing is added, so that it counts once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Edge {
    pub(crate) calls: u64,
    pub(crate) inclusive: u64,
}

/// The costs of all functions.
#[derive(Debug, Clone, Default)]
pub(crate) struct Book {
    costs: Vec<Cost>,
    edges: AHashMap<(FunctionId, FunctionId), Edge>,
    /// None where these are not told apart.
    contexts: Option<ContextTree>,
}

impl Book {
    fn cost(&mut self, function: FunctionId) -> &mut Cost {
        let place = function as usize;
        if self.costs.len() <= place {
            self.costs.resize(place + 1, Cost::default());
        }
        &mut self.costs[place]
    }

    /// Contexts are told apart from now on.
    pub(crate) fn by_context(&mut self) {
        self.contexts = Some(ContextTree::default());
    }

    pub(crate) fn contexts(&self) -> Option<&ContextTree> {
        self.contexts.as_ref()
    }

    /// Where the chains of calls of a thread of a program begin.
    pub(crate) fn root(&mut self, thread: Number, program: usize) -> Node {
        let contexts = self.contexts.as_mut();
        contexts.map_or(0, |contexts| contexts.root(thread, program))
    }

    /// A thread that has executed nothing since its chains began at `root` is in the next part.
    pub(crate) fn stays(&mut self, root: Node, program: usize) {
        if let Some(contexts) = &mut self.contexts {
            contexts.stays(root, program);
        }
    }

    /// The part that a program is in ends so; whether its threads go on in another one.
    pub(crate) fn cut(&mut self, program: usize, how: Cut) -> bool {
        let contexts = self.contexts.as_mut();
        contexts.is_some_and(|contexts| contexts.cut(program, how))
    }

    /// `function`, where `parent` has called it.
    #[inline]
    pub(crate) fn context(&mut self, parent: Node, function: FunctionId) -> Node {
        match &mut self.contexts {
            Some(contexts) => contexts.child(parent, function),
            None => 0,
        }
    }

    #[inline]
    pub(crate) fn executed(&mut self, (function, node): (FunctionId, Node), instructions: u64) {
        self.cost(function).own += instructions;
        if let Some(contexts) = &mut self.contexts {
            contexts.executed(node, instructions);
        }
    }

    #[inline]
    pub(crate) fn called(&mut self, (function, node): (FunctionId, Node)) {
        self.cost(function).calls += 1;
        if let Some(contexts) = &mut self.contexts {
            contexts.called(node);
        }
    }

    /// A call is over; `outermost`: the function is not being executed any more.
    #[inline]
    pub(crate) fn over(
        &mut self,
        caller: Option<FunctionId>,
        function: FunctionId,
        instructions: u64,
        outermost: bool,
    ) {
        if outermost {
            self.cost(function).inclusive += instructions;
        }
        if let Some(caller) = caller {
            let edge = self.edges.entry((caller, function)).or_default();
            edge.calls += 1;
            edge.inclusive += if outermost { instructions } else { 0 };
        }
    }

    /// By the functions' numbers.
    pub(crate) fn costs(&self) -> &[Cost] {
        &self.costs
    }

    /// In the order of callers and callees.
    pub(crate) fn edges(&self) -> BTreeMap<(FunctionId, FunctionId), Edge> {
        self.edges.iter().map(|(key, edge)| (*key, *edge)).collect()
    }
}
