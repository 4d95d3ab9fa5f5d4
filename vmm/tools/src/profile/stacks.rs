//! Samples as collapsed stacks, and as a flame graph.

use std::collections::BTreeMap;
use std::io::{self, Write};

use inferno::flamegraph;

use super::location::CodeLocation;
use super::record::{Filter, Record, Ring, Sample, Sink};
use super::symbols::SymbolTable;

/// What the width of a stack stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weight {
    /// How many samples it has.
    #[default]
    Samples,
    /// How many events these stand for.
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

/// Samples by VM, vCPU, ring and symbol.
#[derive(Debug)]
pub struct Stacks<'a> {
    filter: &'a Filter,
    symbols: &'a SymbolTable,
    weight: Weight,
    stacks: BTreeMap<(u32, u32, Option<Ring>, CodeLocation), u64>,
}

impl<'a> Stacks<'a> {
    /// No samples yet.
    #[must_use]
    pub fn new(filter: &'a Filter, symbols: &'a SymbolTable, weight: Weight) -> Self {
        Self {
            filter,
            symbols,
            weight,
            stacks: BTreeMap::new(),
        }
    }

    /// There are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    /// `VM 1;vCPU 0;kernel;do_idle 17`, a line for each stack.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.stacks
            .iter()
            .map(|(&(vm, vcpu, ring, location), weight)| {
                let ring = ring.map_or("ring not sampled", Ring::name);
                // A semicolon would part the name in two.
                let name = location.name(self.symbols).replace(';', ":");
                format!("VM {vm};vCPU {vcpu};{ring};{name} {weight}")
            })
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
            let location = CodeLocation::of(sample, self.symbols);
            let key = (sample.vm, sample.vcpu, sample.ring, location);
            let sum = self.stacks.entry(key).or_insert(0);
            *sum = sum.saturating_add(self.weight.of(sample));
        }
        Ok(())
    }
}
