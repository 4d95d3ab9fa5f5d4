//! Samples as collapsed stacks, and as a flame graph.

use std::collections::BTreeMap;
use std::io::{self, Write};

use clap::ValueEnum;
use inferno::flamegraph;

use super::location::CodeLocation;
use super::names::Names;
use super::paths::{Callers, PathId, Paths};
use super::plain;
use super::programs::TaskId;
use super::record::{Filter, Record, Ring, Sample, Sink};

/// What the width of a stack stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Weight {
    /// How many samples it has
    #[default]
    Samples,
    /// How many events these stand for
    Events,
}

impl Weight {
    /// What `sample` weighs.
    pub(super) fn of(self, sample: &Sample) -> u64 {
        match self {
            Self::Samples => 1,
            Self::Events => sample.period,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Samples => "samples",
            Self::Events => "events",
        }
    }
}

/// What samples weigh together.
#[derive(Clone, Copy, Debug)]
pub struct TotalWeight(Option<u64>);

impl Default for TotalWeight {
    fn default() -> Self {
        Self(Some(0))
    }
}

impl TotalWeight {
    /// Up to here, each whole number is one of JavaScript's.
    const EXACT: u64 = 1 << 53;

    pub(super) fn add(&mut self, weight: u64) {
        self.0 = self.0.and_then(|sum| sum.checked_add(weight));
    }

    /// Nothing weighs anything.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.0 == Some(0)
    }

    /// Neither it nor any part of it is more than `most`.
    #[must_use]
    pub fn fits(self, most: u64) -> bool {
        self.0.is_some_and(|sum| sum <= most)
    }

    /// What to know of the numbers that a reader of `output` shows; none if they are exact.
    #[must_use]
    pub fn rounded(self, output: &str) -> Option<String> {
        (!self.fits(Self::EXACT)).then(|| {
            format!(
                "all samples together stand for more than 2^53 events, and {output} rounds \
                 numbers above that"
            )
        })
    }
}

/// What is below all frames of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Root {
    /// Where tasks are known: the task.
    Task(Option<TaskId>),
    /// Elsewhere: VM, vCPU and ring.
    Vcpu(u32, u32, Option<Ring>),
}

/// Samples by task or vCPU, and by callers.
#[derive(Debug)]
pub struct Stacks<'a> {
    filter: &'a Filter,
    paths: Paths<'a>,
    weight: Weight,
    stacks: BTreeMap<(Root, PathId), u64>,
    total: TotalWeight,
}

impl<'a> Stacks<'a> {
    /// No samples yet.
    #[must_use]
    pub fn new(filter: &'a Filter, names: &'a Names, weight: Weight) -> Self {
        Self {
            filter,
            paths: Paths::new(names),
            weight,
            stacks: BTreeMap::new(),
            total: TotalWeight::default(),
        }
    }

    /// There are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    /// What all stacks weigh. Unless that fits into 64 bits, their sums are wrong.
    #[must_use]
    pub fn total(&self) -> TotalWeight {
        self.total
    }

    /// `VM 1;vCPU 0;kernel;do_idle 17`, or `bash;main;do_syscall_64_[k] 17` where tasks are
    /// known: a line for each stack. What of a name would be structure is `\xNN`.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let lines = self.sums().into_iter();
        lines.map(|(stack, weight)| format!("{stack} {weight}"))
    }

    /// The stacks, and what each weighs.
    fn sums(&self) -> BTreeMap<String, u64> {
        let names = self.paths.names();
        // Threads of one name are one.
        let mut lines: BTreeMap<String, u64> = BTreeMap::new();
        for (&(root, path), &weight) in &self.stacks {
            let mut line = match root {
                Root::Task(None) => names.comm(None).to_owned(),
                Root::Task(task) => plain::folded(names.comm(task)),
                Root::Vcpu(vm, vcpu, ring) => {
                    let ring = ring.map_or("ring not sampled", Ring::name);
                    format!("VM {vm};vCPU {vcpu};{ring}")
                }
            };
            for location in self.paths.layers(path) {
                line.push(';');
                line.push_str(&frame(location, names));
                if matches!(root, Root::Task(_)) && location.is_kernel() {
                    line.push_str("_[k]");
                }
            }
            let sum = lines.entry(line).or_insert(0);
            *sum = sum.saturating_add(weight);
        }
        lines
    }

    /// Writes the lines.
    ///
    /// # Errors
    /// `out` cannot be written to.
    pub fn write_folded(&self, out: &mut dyn Write) -> io::Result<()> {
        for line in self.lines() {
            writeln!(out, "{line}")?;
        }
        out.flush()
    }

    /// A flame graph: SVG with `title` above and `note` below it. The total is not 0, and fits
    /// into 64 bits.
    ///
    /// # Errors
    /// It cannot be drawn: no sample weighs anything, say.
    pub fn flamegraph(&self, title: String, note: String) -> io::Result<String> {
        // By frames: among whole lines `f(int)` is between `f` and `f;g`, and f is drawn twice.
        let mut sums: Vec<(String, u64)> = self.sums().into_iter().collect();
        sums.sort_by(|(a, _), (b, _)| a.split(';').cmp(b.split(';')));
        let line = |(stack, weight)| plain::to_draw(&format!("{stack} {weight}"));
        let lines: Vec<String> = sums.into_iter().rev().map(line).collect();
        let mut options = flamegraph::Options::default();
        options.title = plain::visible(&title);
        options.subtitle = Some(plain::visible(&note));
        options.count_name = self.weight.name().to_owned();
        options.deterministic = true;
        // It keeps the order of lines, from the last to the first.
        options.flame_chart = true;
        let mut svg = Vec::new();
        flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg)?;
        let svg = String::from_utf8(svg).map_err(io::Error::other)?;
        Ok(plain::drawn(&svg))
    }
}

impl Sink for Stacks<'_> {
    fn take(&mut self, record: &Record) -> io::Result<()> {
        if let Record::Sample(sample) = record
            && self.filter.takes(sample)
        {
            let names = self.paths.names();
            let root = if names.has_tasks() {
                Root::Task(names.task_of(sample))
            } else {
                Root::Vcpu(sample.vm, sample.vcpu, sample.ring)
            };
            let path = self.paths.of(sample, Callers::Kept);
            let weight = self.weight.of(sample);
            self.total.add(weight);
            let sum = self.stacks.entry((root, path)).or_insert(0);
            *sum = sum.saturating_add(weight);
        }
        Ok(())
    }
}

/// What a layer is called in a line. Where code has no name of its own, the words are ours.
fn frame(location: CodeLocation, names: &Names) -> String {
    let name = location.name(names);
    match location {
        CodeLocation::Symbol(_) | CodeLocation::Program(_, Some(_)) => plain::folded(&name),
        _ => name,
    }
}
