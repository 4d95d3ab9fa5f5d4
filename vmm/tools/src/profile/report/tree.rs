//! The tree of callers below a row, as `perf report --stdio -g` draws it.

use std::io::{self, Write};

use ahash::AHashMap;
use serde::Serialize;

use super::{GraphOrder, Report};
use crate::profile::location::CodeLocation;
use crate::profile::names::Names;
use crate::profile::tally::{SampleRow, SampleTally, percent};

/// Branches with less than this part of all events are left out, in percent; perf's default.
const LEAST: f64 = 0.5;
/// In front of every line.
const MARGIN: &str = "            ";

/// A location, and those that follow it.
#[derive(Debug)]
struct Node {
    location: CodeLocation,
    events: u64,
    next: Vec<usize>,
}

/// The paths of a row.
#[derive(Debug)]
pub(super) struct Tree<'a> {
    names: &'a Names,
    /// The first is in front of all others.
    nodes: Vec<Node>,
    /// All events, of which parts are given.
    all: u64,
}

/// A branch for programs.
#[derive(Serialize)]
pub(super) struct Branch {
    symbol: String,
    dso: String,
    events: u64,
    percent: f64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    then: Vec<Branch>,
}

impl<'a> Tree<'a> {
    pub(super) fn of(
        report: &Report<'a>,
        tally: &SampleTally,
        row: &SampleRow,
        order: GraphOrder,
    ) -> Self {
        let root = Node {
            location: CodeLocation::Unknown(0),
            events: 0,
            next: Vec::new(),
        };
        let mut tree = Self {
            names: report.paths.names(),
            nodes: vec![root],
            all: tally.all().events,
        };
        let mut known: AHashMap<(usize, CodeLocation), usize> = AHashMap::new();
        for path in &row.paths {
            let inside = path.inside as usize;
            let mut locations: Vec<CodeLocation> = tally.outwards(*path, &report.paths).collect();
            match order {
                // With callers' rows: what is called from this row on.
                GraphOrder::Caller => {
                    if report.looks.children {
                        locations.truncate(inside + 1);
                    }
                    locations.reverse();
                }
                GraphOrder::Callee => {
                    locations.drain(..inside);
                }
            }
            tree.add(&locations, tally.sum(*path).events, &mut known);
        }
        tree.arrange();
        tree
    }

    fn add(
        &mut self,
        locations: &[CodeLocation],
        events: u64,
        known: &mut AHashMap<(usize, CodeLocation), usize>,
    ) {
        let mut at = 0;
        self.nodes[at].events = self.nodes[at].events.saturating_add(events);
        for location in locations {
            let nodes = &mut self.nodes;
            let next = *known.entry((at, *location)).or_insert_with(|| {
                nodes.push(Node {
                    location: *location,
                    events: 0,
                    next: Vec::new(),
                });
                let new = nodes.len() - 1;
                nodes[at].next.push(new);
                new
            });
            at = next;
            self.nodes[at].events = self.nodes[at].events.saturating_add(events);
        }
    }

    /// Leaves small branches out, and puts great ones first.
    fn arrange(&mut self) {
        for at in 0..self.nodes.len() {
            let mut next = std::mem::take(&mut self.nodes[at].next);
            next.retain(|&one| percent(self.nodes[one].events, self.all) >= LEAST);
            next.sort_by_key(|&one| {
                let node = &self.nodes[one];
                (std::cmp::Reverse(node.events), node.location)
            });
            self.nodes[at].next = next;
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
                events: node.events,
                percent: percent(node.events, self.all),
                then: self.below(one),
            }
        };
        self.nodes[at].next.iter().map(branch).collect()
    }

    /// `at`, and those that follow it alone with all of its samples: they share a branch.
    fn straight(&self, mut at: usize) -> Vec<usize> {
        let mut row = vec![at];
        while let [only] = self.nodes[at].next.as_slice()
            && self.nodes[*only].events == self.nodes[at].events
        {
            at = *only;
            row.push(at);
        }
        row
    }

    fn name(&self, at: usize) -> String {
        self.nodes[at].location.name(self.names)
    }

    /// Draws it.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
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
        let branches = &self.nodes[root].next;
        for (number, &at) in branches.iter().enumerate() {
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
            let straight = self.straight(at);
            for (index, &one) in straight.iter().enumerate() {
                let mut line = margin.to_owned();
                for level in 0..depth {
                    line.push(column(inner, level));
                    if index == 0 && level + 1 == depth {
                        let part = percent(self.nodes[at].events, self.all);
                        line.push_str(&format!("--{part:.2}%--"));
                    } else {
                        line.push_str("          ");
                    }
                }
                writeln!(out, "{line}{}", self.name(one))?;
            }
            let last = straight.last().copied().unwrap_or(at);
            self.write_branches(last, depth + 1, inner | bit.unwrap_or(0), margin, out)?;
        }
        Ok(())
    }
}
