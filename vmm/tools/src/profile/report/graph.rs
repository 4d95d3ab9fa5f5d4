//! What `-g` says: the tree of callers below each row, in the words of `perf report -g`.

use std::str::FromStr;

use thiserror::Error;

/// Which way a tree of callers goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphOrder {
    /// From callers to those whom they call.
    Caller,
    /// From the sample's place to its callers.
    Callee,
}

/// How callers are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GraphStyle {
    /// A tree, with parts of all events.
    #[default]
    Graph,
    /// A tree, with parts of the branch that a branch is on.
    Fractal,
    /// One chain below the other.
    Flat,
    /// A line for each chain, with semicolons between.
    Folded,
    /// Not at all.
    None,
}

/// What stands at a branch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GraphValue {
    /// Percent of the events.
    #[default]
    Percent,
    /// Events.
    Period,
    /// Samples.
    Count,
}

/// The value of `-g`: words in any order with commas between. What is not said is perf's
/// choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CallGraph {
    /// How callers are written.
    pub style: GraphStyle,
    /// Branches with less are left out, in percent.
    pub least_percent: Option<f64>,
    /// Most branches from one point; none for all.
    pub most: Option<usize>,
    /// Which way it goes.
    pub order: Option<GraphOrder>,
    /// What stands at a branch.
    pub value: GraphValue,
}

/// A word of `-g` that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CallGraphError {
    /// Perf has it, and nothing here is like that.
    #[error("'{0}': callers are compared by function here; leave the word out")]
    Lacking(String),
    /// It is no word of it.
    #[error(
        "'{0}' is none of graph, fractal, flat, folded, none, caller, callee, percent, period, \
         count, a percentage such as 0.5, and behind that the number of branches"
    )]
    Unknown(String),
    /// It is no percentage.
    #[error("'{0}' is no percentage: give 0 to 100")]
    Percentage(String),
}

/// How callers are shown below a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Graph {
    /// How they are written; not [`GraphStyle::None`].
    pub style: GraphStyle,
    /// Branches with less are left out, in percent.
    pub least_percent: f64,
    /// Most branches from one point.
    pub most: usize,
    /// Which way it goes.
    pub order: GraphOrder,
    /// What stands at a branch.
    pub value: GraphValue,
}

impl CallGraph {
    /// Branches with less are left out if nobody says, in percent; perf's choice.
    const LEAST: f64 = 0.5;

    /// What is shown where callers have rows of their own or not, and rows with less than
    /// `row_limit` percent are left out, if somebody said so; nothing by `none`.
    #[must_use]
    pub fn settled(self, children: bool, row_limit: Option<f64>) -> Option<Graph> {
        let usual = if children {
            GraphOrder::Caller
        } else {
            GraphOrder::Callee
        };
        let least = self.least_percent.or(row_limit);
        (self.style != GraphStyle::None).then_some(Graph {
            style: self.style,
            least_percent: least.unwrap_or(Self::LEAST),
            most: self.most.unwrap_or(usize::MAX),
            order: self.order.unwrap_or(usual),
            value: self.value,
        })
    }

    /// Takes one word in.
    fn word(&mut self, word: &str) -> Result<(), CallGraphError> {
        // As perf has it: a beginning is enough, and the first that fits counts.
        let is = |name: &str| name.starts_with(word);
        match () {
            () if is("graph") => self.style = GraphStyle::Graph,
            () if is("fractal") => self.style = GraphStyle::Fractal,
            () if is("flat") => self.style = GraphStyle::Flat,
            () if is("folded") => self.style = GraphStyle::Folded,
            () if is("none") => self.style = GraphStyle::None,
            () if is("caller") => self.order = Some(GraphOrder::Caller),
            () if is("callee") => self.order = Some(GraphOrder::Callee),
            () if is("percent") => self.value = GraphValue::Percent,
            () if is("period") => self.value = GraphValue::Period,
            () if is("count") => self.value = GraphValue::Count,
            // What it does anyway.
            () if is("function") => {}
            () if is("address") || is("srcline") || is("branch") => {
                return Err(CallGraphError::Lacking(word.to_owned()));
            }
            () => self.number(word)?,
        }
        Ok(())
    }

    /// The first number is the percentage, the second that of branches; 0 are all.
    fn number(&mut self, word: &str) -> Result<(), CallGraphError> {
        let unknown = || CallGraphError::Unknown(word.to_owned());
        if !word.starts_with(|first: char| first.is_ascii_digit() || first == '.') {
            return Err(unknown());
        }
        if self.least_percent.is_some() {
            let most: usize = word.parse().map_err(|_| unknown())?;
            self.most = Some(most).filter(|most| *most > 0);
            return Ok(());
        }
        let percent: f64 = word.parse().map_err(|_| unknown())?;
        if !(0.0..=100.0).contains(&percent) {
            return Err(CallGraphError::Percentage(word.to_owned()));
        }
        self.least_percent = Some(percent);
        Ok(())
    }
}

impl FromStr for CallGraph {
    type Err = CallGraphError;

    fn from_str(text: &str) -> Result<Self, CallGraphError> {
        let mut graph = Self::default();
        let words = text.split([',', ' ']).filter(|word| !word.is_empty());
        for word in words {
            graph.word(word)?;
        }
        Ok(graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<CallGraph, &str>) {
        let found: Result<CallGraph, _> = text.parse();
        match (found, expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{text}"),
            (Err(error), Err(part)) => {
                let error = error.to_string();
                assert!(error.contains(part), "{text}: {error}");
            }
            (found, expected) => panic!("{text}: {found:?}, not {expected:?}"),
        }
    }

    #[test]
    fn words_of_perf_are_understood_in_any_order() {
        let graph = CallGraph::default();
        check("", Ok(graph));
        check("graph", Ok(graph));
        let caller = CallGraph {
            order: Some(GraphOrder::Caller),
            ..graph
        };
        check("caller", Ok(caller));
        check("caller,function", Ok(caller));
        let half = CallGraph {
            least_percent: Some(0.5),
            ..caller
        };
        check("graph,0.5,caller", Ok(half));
        check("caller,.5", Ok(half));
        check("caller 0.5 percent", Ok(half));
        check(
            "fractal,3,7,callee,count",
            Ok(CallGraph {
                style: GraphStyle::Fractal,
                least_percent: Some(3.0),
                most: Some(7),
                order: Some(GraphOrder::Callee),
                value: GraphValue::Count,
            }),
        );
        let style = |style| CallGraph { style, ..graph };
        check("fract", Ok(style(GraphStyle::Fractal)));
        check("flat", Ok(style(GraphStyle::Flat)));
        check("folded", Ok(style(GraphStyle::Folded)));
        check("none", Ok(style(GraphStyle::None)));
        let zero = CallGraph {
            least_percent: Some(0.0),
            ..graph
        };
        check("0,0", Ok(zero));
    }

    #[test]
    fn other_words_are_named() {
        check(
            "srcline",
            Err("'srcline': callers are compared by function"),
        );
        check("caller,address", Err("'address'"));
        check("graph,branch", Err("'branch'"));
        check("tree", Err("'tree' is none of graph, fractal"));
        check("callers", Err("'callers' is none of"));
        check("0.5,many", Err("'many' is none of"));
        check("0.5,1.5", Err("'1.5' is none of"));
        check("101", Err("'101' is no percentage: give 0 to 100"));
        check("nan", Err("'nan' is none of"));
    }
}
