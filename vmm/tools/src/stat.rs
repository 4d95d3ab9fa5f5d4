//! `umpire stat`: counts the events of a VM, as `perf stat` does.
//!
//! - What to count: [`spec`] (lists of names), [`events`] (what they stand
//!   for), [`schedule`] (which counter, in which set).
//! - What was counted: [`reading`] (registers at two moments), [`tally`] (sums,
//!   scaled to the whole time), [`metrics`].
//! - [`mod@print`] has the three forms of the output, with the provenance of every
//!   count; they are functions of rows and settings.
//!
//! What is typed is [`StatOptions`], and of [`mod@track`] its own; where counts and notes go is
//! in `sink`. The commands to the VM are in `session`, the loop around them in `command`; `live`
//! is for `umpire top`, whose loop is another one.

mod command;
pub mod events;
mod live;
pub mod metrics;
mod options;
pub mod print;
pub mod reading;
pub mod rows;
mod run;
mod runs;
pub mod schedule;
mod session;
mod sink;
pub mod spec;
pub mod tally;
pub mod track;
mod trial;
mod verbose;
mod watch;

pub use command::run;
pub(crate) use live::LiveCounts;
pub use options::{FormOptions, StatOptions};
pub use runs::Runs;
pub use sink::SinkOptions;

use pmu_model::Provenance;

use crate::targets::Target;

/// A count, or why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// So many; the mean if there was more than one run.
    Counted(u64),
    /// The event can be counted, and was not: it found no counter.
    NotCounted,
    /// The event cannot be counted here.
    NotSupported,
}

/// What a count is a count of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unit {
    /// Its name; empty for events.
    pub name: &'static str,
    /// How many units one of the count is.
    pub scale: f64,
}

impl Unit {
    /// Events, which have no unit.
    pub const EVENTS: Self = Self {
        name: "",
        scale: 1.0,
    };
    /// Milliseconds, for counts in nanoseconds.
    pub const MSEC_OF_NS: Self = Self {
        name: "msec",
        scale: 1e-6,
    };
}

/// A number that is computed from counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// The number; one that is not finite is not printed.
    pub value: f64,
    /// What it is a number of, such as `insn per cycle`.
    pub unit: String,
    /// How many digits it has behind the point; perf gives 3 to rates and 2 to
    /// ratios and percentages.
    pub digits: u8,
}

/// A row of any of the forms.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The event as the user gave it.
    pub event: String,
    /// What the count is a count of.
    pub unit: Unit,
    /// The count.
    pub value: Value,
    /// How the count was obtained; none if there is no count.
    pub provenance: Option<Provenance>,
    /// How long the event was to be counted, in nanoseconds.
    pub enabled_ns: u64,
    /// How long it had a counter, in nanoseconds. If less, the count is scaled.
    pub running_ns: u64,
    /// The standard error of the mean in percent of it, after several runs.
    pub variance: Option<f64>,
    /// Whose count it is, where each vCPU or core has rows.
    pub whose: Option<Target>,
    /// A number computed from this count and others.
    pub metric: Option<Metric>,
}

impl Row {
    /// The part of the time in which the event had a counter, in percent. It
    /// is 0 where nothing was counted.
    #[must_use]
    pub fn percent_running(&self) -> f64 {
        match self.value {
            Value::Counted(_) if self.running_ns >= self.enabled_ns => 100.0,
            _ if self.enabled_ns == 0 => 0.0,
            #[expect(clippy::cast_precision_loss, reason = "rounded to 0.01 %")]
            _ => (self.running_ns as f64 / self.enabled_ns as f64 * 100.0).min(100.0),
        }
    }

    /// The metric, if it is a number and there is a count.
    fn metric(&self) -> Option<&Metric> {
        let counted = matches!(self.value, Value::Counted(_));
        let metric = self.metric.as_ref().filter(|_| counted);
        metric.filter(|metric| metric.value.is_finite())
    }

    /// The variance, if there is a count.
    fn variance(&self) -> Option<f64> {
        let counted = matches!(self.value, Value::Counted(_));
        self.variance.filter(|_| counted)
    }

    /// The provenance, if there is a count.
    fn provenance(&self) -> Option<Provenance> {
        let counted = matches!(self.value, Value::Counted(_));
        self.provenance.filter(|_| counted)
    }
}

/// Why there is no count, as perf writes it.
fn missing(value: Value) -> Option<&'static str> {
    match value {
        Value::Counted(_) => None,
        Value::NotCounted => Some("<not counted>"),
        Value::NotSupported => Some("<not supported>"),
    }
}

/// A count in its unit.
#[expect(clippy::cast_precision_loss, reason = "rounded to what is printed")]
fn in_unit(count: u64, unit: Unit) -> f64 {
    count as f64 * unit.scale
}

/// Seconds and nanoseconds with ten places before the point, as perf stamps
/// intervals.
fn stamp(ns: u64) -> String {
    format!("{:6}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000)
}

#[cfg(test)]
mod tests;
