//! Samples as collapsed stacks, and as a flame graph.

use std::collections::BTreeMap;
use std::io::{self, Write};

use clap::ValueEnum;
use inferno::flamegraph;

use super::names::Names;
use super::paths::{Callers, PathId, Paths};
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
        }
    }

    /// There are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    /// `VM 1;vCPU 0;kernel;do_idle 17`, or `bash;main;do_syscall_64_[k] 17` where tasks are
    /// known: a line for each stack.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let names = self.paths.names();
        // Threads of one name are one.
        let mut lines: BTreeMap<String, u64> = BTreeMap::new();
        for (&(root, path), &weight) in &self.stacks {
            let mut line = match root {
                Root::Task(task) => plain(names.comm(task)),
                Root::Vcpu(vm, vcpu, ring) => {
                    let ring = ring.map_or("ring not sampled", Ring::name);
                    format!("VM {vm};vCPU {vcpu};{ring}")
                }
            };
            for location in self.paths.layers(path) {
                line.push(';');
                line.push_str(&plain(&location.name(names)));
                if matches!(root, Root::Task(_)) && location.is_kernel() {
                    line.push_str("_[k]");
                }
            }
            let sum = lines.entry(line).or_insert(0);
            *sum = sum.saturating_add(weight);
        }
        lines
            .into_iter()
            .map(|(line, weight)| format!("{line} {weight}"))
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

    /// Writes a flame graph: SVG with `title` above and `note` below it. There
    /// is at least one sample.
    ///
    /// # Errors
    /// `out` cannot be written to.
    pub fn write_flamegraph(
        &self,
        title: String,
        note: String,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let lines: Vec<String> = self.lines().collect();
        let mut options = flamegraph::Options::default();
        options.title = title;
        options.subtitle = Some(note);
        options.count_name = self.weight.name().to_owned();
        options.deterministic = true;
        flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut *out)?;
        out.flush()
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
            let sum = self.stacks.entry((root, path)).or_insert(0);
            *sum = sum.saturating_add(self.weight.of(sample));
        }
        Ok(())
    }
}

/// A semicolon would part a name in two.
fn plain(name: &str) -> String {
    name.replace(';', ":")
}
