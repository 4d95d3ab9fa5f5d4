//! Numbers that follow from several counts, as `perf stat` shows them.

use perfmon::VirtualPmd;
use pmu_model::KnownEvent;

use super::Metric;
use super::events::Asked;

/// What `umpire stat -M` takes: names, the events that the number follows from, and what it
/// is. Groups are counted at the same time, so that a ratio is of the same moments.
pub const METRICS: [(&str, &str, &str); 6] = [
    ("ipc", "{instructions,cycles}", "instructions a cycle"),
    (
        "branch-miss-ratio",
        "{branch-misses,branches}",
        "mispredicted branches in percent of all",
    ),
    (
        "cache-miss-ratio",
        "{cache-misses,cache-references}",
        "misses of the last-level cache in percent of its references (AMD: of the L2)",
    ),
    (
        "ghz",
        "cycles,vm-run-ns",
        "cycles a nanosecond of the vCPUs' time",
    ),
    (
        "exits",
        "vm-exits,vm-run-ns",
        "exits a second of the vCPUs' time",
    ),
    ("cpus", "vm-run-ns", "CPUs that the vCPUs used"),
];

/// The events of such a name.
///
/// # Errors
/// There is no such name.
pub fn events_of(metric: &str) -> Result<&'static str, String> {
    let found = METRICS.iter().find(|(name, ..)| *name == metric);
    found.map(|(_, events, _)| *events).ok_or_else(|| {
        let known: Vec<String> = METRICS
            .iter()
            .map(|(name, _, means)| format!("{name} ({means})"))
            .collect();
        format!("'{metric}' is no metric; there are {}", known.join(", "))
    })
}

/// The counts of one vCPU or core, or of all together.
#[derive(Clone, Copy, Debug)]
pub struct Counts<'a> {
    pub events: &'a [Asked],
    /// Their counts, in the same order.
    pub values: &'a [Option<u64>],
    /// Seconds that passed.
    pub seconds: f64,
}

impl Counts<'_> {
    /// The count of the first event that is so; no number if nobody has counted it.
    fn find(&self, is: impl Fn(&Asked) -> bool) -> Option<f64> {
        let each = self.events.iter().zip(self.values);
        let mut found = each.filter(|(event, _)| is(event)).map(|(_, value)| *value);
        let first = found.next()?;
        Some(
            first
                .or_else(|| found.flatten().next())
                .map_or(f64::NAN, float),
        )
    }

    fn known(&self, which: KnownEvent) -> Option<f64> {
        self.find(|event| event.plain() == Some(which))
    }

    /// Nanoseconds that vCPUs ran.
    fn run_ns(&self) -> Option<f64> {
        self.find(|event| event.is(VirtualPmd::RunTime))
    }

    /// What is said of event number `index`: not a number where a count is missing.
    #[must_use]
    pub fn metric(&self, index: usize) -> Option<Metric> {
        let event = self.events.get(index)?;
        let value = self.values.get(index)?.map_or(f64::NAN, float);
        let of = |other: KnownEvent, factor: f64| self.known(other).map(|it| value / it * factor);
        let found = match event.plain() {
            _ if event.is(VirtualPmd::RunTime) => {
                let cpus = value / 1e9 / self.seconds;
                return metric(cpus, "CPUs utilized", 3);
            }
            Some(KnownEvent::CoreCycles) => (self.run_ns().map(|ns| value / ns), "GHz", 3),
            Some(KnownEvent::Instructions) => {
                let per_cycle = of(KnownEvent::CoreCycles, 1.0);
                (per_cycle, "insn per cycle", 2)
            }
            Some(KnownEvent::MispredictedBranches) => {
                let share = of(KnownEvent::Branches, 100.0);
                (share, "% of all branches", 2)
            }
            Some(KnownEvent::LlcMisses) => {
                let share = of(KnownEvent::LlcReferences, 100.0);
                (share, "% of all cache refs", 2)
            }
            _ => (None, "", 0),
        };
        match found {
            (Some(value), unit, digits) => metric(value, unit, digits),
            _ if event.is_level() || event.unit.scale != 1.0 => None,
            _ => self.rate(value),
        }
    }

    /// So many in a second of the vCPUs' time, as perf has it.
    fn rate(&self, value: f64) -> Option<Metric> {
        let rate = value / self.run_ns()? * 1e9;
        match rate {
            rate if rate >= 1e9 => metric(rate / 1e9, "G/sec", 3),
            rate if rate >= 1e6 => metric(rate / 1e6, "M/sec", 3),
            rate if rate >= 1e3 => metric(rate / 1e3, "K/sec", 3),
            rate => metric(rate, "/sec", 3),
        }
    }
}

fn metric(value: f64, unit: &str, digits: u8) -> Option<Metric> {
    Some(Metric {
        value,
        unit: unit.to_owned(),
        digits,
    })
}

#[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::super::Unit;
    use super::super::events::Source;
    use super::*;
    use pmu_model::PmuModel;
    use umpire_events::{Extras, LibraryError, NoTables, resolve};

    /// Counts `name=value`; what the first one's metric is.
    fn check(counts: &[(&str, Option<u64>)], expected: Option<&str>) {
        let model = PmuModel::parse("intel-v2").unwrap();
        let event = |(name, _): &(&str, Option<u64>)| Asked {
            name: (*name).to_owned(),
            source: match VirtualPmd::ALL.iter().find(|it| it.name() == *name) {
                Some(which) => Source::Quantity {
                    pmd: which.pmd(),
                    level: false,
                },
                None => Source::Counter(
                    resolve(name, &model, &NoTables(LibraryError::TooLate))
                        .unwrap()
                        .request,
                ),
            },
            unit: if name.ends_with("-ns") {
                Unit::MSEC_OF_NS
            } else {
                Unit::EVENTS
            },
            said: Extras::default(),
        };
        let events: Vec<Asked> = counts.iter().map(event).collect();
        let values: Vec<Option<u64>> = counts.iter().map(|(_, value)| *value).collect();
        let counts = Counts {
            events: &events,
            values: &values,
            seconds: 2.0,
        };
        let found = counts.metric(0).filter(|it| it.value.is_finite());
        let found = found.map(|it| {
            let digits = usize::from(it.digits);
            format!("{:.digits$} {}", it.value, it.unit)
        });
        assert_eq!(found.as_deref(), expected);
    }

    #[test]
    fn numbers_of_perf() {
        let run = ("vm-run-ns", Some(1_000_000_000));
        check(&[run], Some("0.500 CPUs utilized"));
        check(&[("cycles", Some(3_000_000_000)), run], Some("3.000 GHz"));
        let cycles = ("cycles", Some(400));
        check(
            &[("instructions", Some(100)), cycles],
            Some("0.25 insn per cycle"),
        );
        // Of other rings than the cycles.
        check(&[("instructions:u", Some(100)), cycles], None);
        let branches = ("branches", Some(50));
        check(
            &[("branch-misses", Some(1)), branches],
            Some("2.00 % of all branches"),
        );
        check(&[("branches", Some(5_000_000)), run], Some("5.000 M/sec"));
        check(&[("vm-exits", Some(1500)), run], Some("1.500 K/sec"));
        check(&[("vm-exits", Some(15))], None);
        check(&[("cycles", None), run], None);
        check(&[("instructions", Some(1)), ("cycles", Some(0))], None);
        check(&[("vm-steal-ns", Some(7)), run], None);
    }
}
