//! What functions cost, and who called whom.

use std::collections::BTreeMap;

use ahash::AHashMap;

/// The number of a function.
pub(crate) type FunctionId = u32;

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
}

impl Book {
    fn cost(&mut self, function: FunctionId) -> &mut Cost {
        let place = function as usize;
        if self.costs.len() <= place {
            self.costs.resize(place + 1, Cost::default());
        }
        &mut self.costs[place]
    }

    #[inline]
    pub(crate) fn executed(&mut self, function: FunctionId, instructions: u64) {
        self.cost(function).own += instructions;
    }

    #[inline]
    pub(crate) fn called(&mut self, function: FunctionId) {
        self.cost(function).calls += 1;
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
