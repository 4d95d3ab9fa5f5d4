//! The tree of callers below a row, as `perf report --stdio -g` draws it.

use std::io::{self, Write};

use ahash::AHashMap;
use serde::Serialize;

use super::Report;
use super::graph::{Graph, GraphOrder, GraphStyle, GraphValue};
use crate::profile::location::CodeLocation;
use crate::profile::names::Names;
use crate::profile::tally::{SampleRow, SampleTally, Sum, percent};

/// In front of every line.
const MARGIN: &str = "            ";

/// A location, and those that follow it.
#[derive(Debug)]
struct Node {
    location: CodeLocation,
    /// The one that it follows.
    from: usize,
    sum: Sum,
    /// Of the paths that end here.
    ends: Sum,
    next: Vec<usize>,
    /// Of all that follow it, those that are left out included.
    below: Sum,
}

/// The paths of a row.
#[derive(Debug)]
pub(super) struct Tree<'a> {
    names: &'a Names,
    /// The first is in front of all others.
    nodes: Vec<Node>,
    /// All events, of which parts are given.
    all: u128,
    graph: Graph,
}

/// A branch for programs.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Branch {
    /// Name of the symbol, or why there is none in brackets.
    symbol: String,
    /// File, or part of the kernel, that has the address.
    dso: String,
    /// Events that the samples stand for.
    events: u128,
    /// Its share of the samples, in percent.
    percent: f64,
    /// What called it, or was called by it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    then: Vec<Branch>,
}

impl Node {
    fn new(from: usize, location: CodeLocation) -> Self {
        Self {
            location,
            from,
            sum: Sum::default(),
            ends: Sum::default(),
            next: Vec::new(),
            below: Sum::default(),
        }
    }
}

impl<'a> Tree<'a> {
    pub(super) fn of(
        report: &Report<'a>,
        tally: &SampleTally,
        row: &SampleRow,
        graph: Graph,
    ) -> Self {
        let mut tree = Self {
            names: report.paths().names(),
            nodes: vec![Node::new(0, CodeLocation::Unknown(0))],
            all: report.whole(tally).events,
            graph,
        };
        let mut known: AHashMap<(usize, CodeLocation), usize> = AHashMap::new();
        for path in &row.paths {
            let inside = path.inside as usize;
            let mut locations: Vec<CodeLocation> = tally.outwards(*path, report.paths()).collect();
            match graph.order {
                // A caller's row: what is called from it on. Where the samples are there is
                // nothing below, but all of their callers.
                GraphOrder::Caller => {
                    if inside > 0 {
                        locations.truncate(inside + 1);
                    }
                    locations.reverse();
                }
                GraphOrder::Callee => {
                    locations.drain(..inside);
                }
            }
            tree.add(&locations, tally.sum(*path), &mut known);
        }
        tree.arrange();
        tree
    }

    fn add(
        &mut self,
        locations: &[CodeLocation],
        sum: Sum,
        known: &mut AHashMap<(usize, CodeLocation), usize>,
    ) {
        let mut at = 0;
        self.nodes[at].sum.add(sum);
        for location in locations {
            let nodes = &mut self.nodes;
            let next = *known.entry((at, *location)).or_insert_with(|| {
                nodes.push(Node::new(at, *location));
                let new = nodes.len() - 1;
                nodes[at].next.push(new);
                new
            });
            at = next;
            self.nodes[at].sum.add(sum);
        }
        self.nodes[at].ends.add(sum);
    }

    /// Leaves small branches out, and puts great ones first.
    fn arrange(&mut self) {
        for at in 0..self.nodes.len() {
            let mut next = std::mem::take(&mut self.nodes[at].next);
            let mut below = Sum::default();
            next.iter().for_each(|&one| below.add(self.nodes[one].sum));
            self.nodes[at].below = below;
            let whole = self.whole(at);
            next.retain(|&one| {
                percent(self.nodes[one].sum.events, whole) >= self.graph.least_percent
            });
            next.sort_by_key(|&one| {
                let node = &self.nodes[one];
                (std::cmp::Reverse(node.sum.events), node.location)
            });
            next.truncate(self.graph.most);
            self.nodes[at].next = next;
        }
    }

    /// The events of which branches behind `at` are parts.
    fn whole(&self, at: usize) -> u128 {
        match (self.graph.style, at) {
            (GraphStyle::Fractal, 0) => self.nodes[0].sum.events,
            (GraphStyle::Fractal, _) => self.nodes[at].below.events,
            _ => self.all,
        }
    }

    /// What branches from `at` have that are left out, where parts are of branches: these add
    /// up then. None where all are shown, or all are left out.
    fn rest(&self, at: usize) -> Option<Sum> {
        let (node, mut rest) = (&self.nodes[at], self.nodes[at].below);
        if self.graph.style != GraphStyle::Fractal || node.next.is_empty() {
            return None;
        }
        for one in &node.next {
            let sum = self.nodes[*one].sum;
            rest.events = rest.events.saturating_sub(sum.events);
            rest.samples = rest.samples.saturating_sub(sum.samples);
        }
        (rest.events > 0).then_some(rest)
    }

    /// What stands at something that is a part of `whole`.
    fn value(&self, sum: Sum, whole: u128) -> String {
        match self.graph.value {
            GraphValue::Percent => format!("{:.2}%", percent(sum.events, whole)),
            GraphValue::Period => sum.events.to_string(),
            GraphValue::Count => sum.samples.to_string(),
        }
    }

    /// The branches for programs.
    pub(super) fn branches(&self) -> Vec<Branch> {
        self.below(0)
    }

    fn below(&self, at: usize) -> Vec<Branch> {
        let branch = |&one: &usize| {
            let node = &self.nodes[one];
            Branch {
                symbol: node.location.symbol(self.names),
                dso: node.location.object(self.names),
                events: node.sum.events,
                percent: percent(node.sum.events, self.all),
                then: self.below(one),
            }
        };
        self.nodes[at].next.iter().map(branch).collect()
    }

    /// `at`, and those that follow it alone with all of its samples: they share a branch.
    fn straight(&self, mut at: usize) -> Vec<usize> {
        let mut row = vec![at];
        while let [only] = self.nodes[at].next.as_slice()
            && self.nodes[*only].sum.events == self.nodes[at].sum.events
        {
            at = *only;
            row.push(at);
        }
        row
    }

    fn name(&self, at: usize) -> String {
        self.nodes[at].location.name(self.names)
    }

    /// Writes it.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        match self.graph.style {
            GraphStyle::Graph | GraphStyle::Fractal => self.draw(out),
            GraphStyle::Flat => self.list(out),
            GraphStyle::Folded => self.fold(out),
            GraphStyle::None => Ok(()),
        }
    }

    /// Where the paths end, and so which there are; those with most events first.
    fn ends(&self) -> Vec<usize> {
        let is_great = |at: &usize| {
            let events = self.nodes[*at].ends.events;
            events > 0 && percent(events, self.all) >= self.graph.least_percent
        };
        let mut ends: Vec<usize> = (1..self.nodes.len()).filter(is_great).collect();
        ends.sort_by_key(|&at| {
            let node = &self.nodes[at];
            (std::cmp::Reverse(node.ends.events), node.location, at)
        });
        ends.truncate(self.graph.most);
        ends
    }

    /// The names of a path that ends at `at`.
    fn names_to(&self, at: usize) -> Vec<String> {
        let before = |at: &usize| Some(self.nodes[*at].from).filter(|from| *from != 0);
        let path = std::iter::successors(Some(at), before);
        let mut names: Vec<String> = path.map(|at| self.name(at)).collect();
        names.reverse();
        names
    }

    /// One path below the other.
    fn list(&self, out: &mut dyn Write) -> io::Result<()> {
        for at in self.ends() {
            writeln!(
                out,
                "           {}",
                self.value(self.nodes[at].ends, self.all)
            )?;
            for name in self.names_to(at) {
                writeln!(out, "                {name}")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }

    /// A line for each path.
    fn fold(&self, out: &mut dyn Write) -> io::Result<()> {
        for at in self.ends() {
            let value = self.value(self.nodes[at].ends, self.all);
            // A semicolon is between two of them.
            let names = self.names_to(at).into_iter();
            let names: Vec<String> = names.map(|name| name.replace(';', ":")).collect();
            writeln!(out, "{value} {}", names.join(";"))?;
        }
        Ok(())
    }

    fn draw(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut margin = MARGIN.to_owned();
        let trunk = self.straight(0);
        let mut root = 0;
        for (number, &at) in trunk[1..].iter().enumerate() {
            if number == 0 {
                writeln!(out, "{margin}|")?;
                writeln!(out, "{margin}---{}", self.name(at))?;
                margin.push_str("   ");
            } else {
                writeln!(out, "{margin}{}", self.name(at))?;
            }
            root = at;
        }
        self.write_branches(root, 1, 1, &margin, out)?;
        if self.nodes[0].next.is_empty() {
            Ok(())
        } else {
            writeln!(out)
        }
    }

    /// The branches below `root`; bit N of `pipes` stands for a line at depth N.
    fn write_branches(
        &self,
        root: usize,
        depth: usize,
        pipes: u128,
        margin: &str,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let whole = self.whole(root);
        let branches = self.nodes[root].next.iter().copied().map(Some);
        let branches: Vec<Option<usize>> = branches.chain(self.rest(root).map(|_| None)).collect();
        for (number, at) in branches.iter().enumerate() {
            let column = |pipes: u128, one: usize| {
                if one < 128 && pipes & (1 << one) != 0 {
                    '|'
                } else {
                    ' '
                }
            };
            // The line stays up to the last branch.
            let above: String = (0..depth)
                .map(|one| format!("{}          ", column(pipes, one)))
                .collect();
            writeln!(out, "{}", format!("{margin}{above}").trim_end())?;
            let bit = 1u128.checked_shl(u32::try_from(depth).unwrap_or(u32::MAX));
            let own = bit.map_or(0, |bit| bit >> 1);
            let inner = if number + 1 == branches.len() {
                pipes & !own
            } else {
                pipes
            };
            let straight = at.map(|at| self.straight(at)).unwrap_or_default();
            let mut names: Vec<String> = straight.iter().map(|one| self.name(*one)).collect();
            if at.is_none() {
                names.push("[...]".to_owned());
            }
            let sum = at.map_or(self.rest(root), |at| Some(self.nodes[at].sum));
            for (index, name) in names.iter().enumerate() {
                let mut line = margin.to_owned();
                for level in 0..depth {
                    line.push(column(inner, level));
                    if index == 0 && level + 1 == depth {
                        let part = self.value(sum.unwrap_or_default(), whole);
                        line.push_str(&format!("--{part}--"));
                    } else {
                        line.push_str("          ");
                    }
                }
                writeln!(out, "{line}{name}")?;
            }
            if let Some(last) = straight.last() {
                self.write_branches(*last, depth + 1, inner | bit.unwrap_or(0), margin, out)?;
            }
        }
        Ok(())
    }
}
