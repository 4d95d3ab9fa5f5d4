//! From what contexts have counted to rows.

use std::time::Duration;

use pmu_model::Provenance;

use super::events::{Asked, Source};
use super::metrics::Counts;
use super::runs::Runs;
use super::tally::{CountTally, Counted, Scale, sum};
use super::{Row, Value};
use crate::targets::Target;

/// What the rows are about.
#[derive(Clone, Copy, Debug)]
pub struct Layout<'a> {
    /// The events, a row each.
    pub events: &'a [Asked],
    /// By event: something counts it.
    pub supported: &'a [bool],
    /// How counts of a part of the time become counts of the whole.
    pub scale: Scale,
    /// Rows for each vCPU or core.
    pub apart: bool,
}

/// What one context has counted, and what of it is to be looked at.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    pub whose: Target,
    pub tally: &'a CountTally,
    pub counters: bool,
    /// It has quantities of the VMM.
    pub quantities: bool,
}

impl Layout<'_> {
    /// The rows, after `seconds`.
    #[must_use]
    pub fn rows(&self, parts: &[Part<'_>], seconds: f64) -> Vec<Row> {
        if !self.apart {
            return self.block(parts, None, seconds);
        }
        let each = parts.iter();
        each.flat_map(|part| self.block(&[*part], Some(part.whose), seconds))
            .collect()
    }

    /// The rows of some contexts together.
    fn block(&self, parts: &[Part<'_>], whose: Option<Target>, seconds: f64) -> Vec<Row> {
        let counted: Vec<Vec<Counted>> = parts
            .iter()
            .map(|part| part.tally.counted(self.scale))
            .collect();
        let mut rows = Vec::new();
        for (event, asked) in self.events.iter().enumerate() {
            let of = |(part, counted): (&Part<'_>, &Vec<Counted>)| match asked.source {
                Source::Quantity { level, .. } if part.quantities => {
                    Some(part.tally.quantity(event, level, asked.reported()))
                }
                Source::Counter(_) if part.counters => counted.get(event).copied(),
                Source::Elapsed => Some(elapsed(seconds)),
                _ => None,
            };
            let mut found: Vec<Counted> = parts.iter().zip(&counted).filter_map(of).collect();
            if asked.source == Source::Elapsed {
                // It passed once for all of them.
                found.truncate(1);
            }
            if found.is_empty() && whose.is_some() && !parts.is_empty() {
                // Another context counts this one.
                let elsewhere = matches!(asked.source, Source::Quantity { .. });
                let only_quantities = parts.iter().all(|part| !part.counters);
                if elsewhere || only_quantities {
                    continue;
                }
            }
            let mut counted = sum(&found, asked.is_level());
            counted.unknown |= found.is_empty();
            rows.push(self.row(event, asked, &counted, whose));
        }
        let order: Vec<usize> = rows.iter().map(|(event, _)| *event).collect();
        let mut values = vec![None; self.events.len()];
        for (event, row) in &rows {
            if let (Some(value), Value::Counted(count)) = (values.get_mut(*event), row.value) {
                *value = Some(count);
            }
        }
        let counts = Counts {
            events: self.events,
            values: &values,
            seconds,
        };
        let rows = rows.into_iter().map(|(_, row)| row);
        rows.zip(order)
            .map(|(row, event)| Row {
                metric: counts.metric(event),
                ..row
            })
            .collect()
    }

    fn row(
        &self,
        event: usize,
        asked: &Asked,
        counted: &Counted,
        whose: Option<Target>,
    ) -> (usize, Row) {
        let supported = self.supported.get(event).copied().unwrap_or(false);
        let value = match counted.value {
            _ if !supported => Value::NotSupported,
            Some(value) => Value::Counted(value),
            // The host does not know this quantity.
            None if counted.unknown && asked.request().is_none() => Value::NotSupported,
            None => Value::NotCounted,
        };
        let row = Row {
            event: asked.name.clone(),
            unit: asked.unit,
            value,
            provenance: counted.provenance,
            enabled_ns: counted.enabled_ns,
            running_ns: counted.running_ns,
            variance: None,
            whose,
            metric: None,
        };
        (event, row)
    }
}

/// The clock on the wall, which nobody else has to be asked for.
fn elapsed(seconds: f64) -> Counted {
    let ns = Duration::try_from_secs_f64(seconds).map_or(0, |it| it.as_nanos());
    let ns = u64::try_from(ns).unwrap_or(u64::MAX);
    Counted {
        value: Some(ns),
        provenance: Some(Provenance::Exact),
        enabled_ns: ns,
        running_ns: ns,
        ..Counted::default()
    }
}

/// The rows of several runs in one: means, with their errors. All runs have
/// the same rows; a run that has not counted an event does not take part in
/// that event's mean.
#[must_use]
pub fn mean(runs: &[Vec<Row>]) -> Vec<Row> {
    let Some(first) = runs.first() else {
        return Vec::new();
    };
    let row = |(index, row): (usize, &Row)| {
        let all: Vec<&Row> = runs.iter().filter_map(|rows| rows.get(index)).collect();
        let counts = all.iter().filter_map(|row| match row.value {
            Value::Counted(count) => Some((count, *row)),
            Value::NotCounted | Value::NotSupported => None,
        });
        let counted: Vec<(u64, &Row)> = counts.collect();
        let (mut values, mut metrics) = (Runs::default(), Runs::default());
        let (mut provenance, mut metric) = (None, None);
        for (count, row) in &counted {
            values.add(float(*count));
            provenance = match (provenance, row.provenance) {
                (Some(one), Some(other)) => Some(Provenance::and(one, other)),
                (one, other) => one.or(other),
            };
            // A rate may be in K/sec in one run and in M/sec in another.
            metric = metric.or_else(|| row.metric().cloned());
            let unit = metric.as_ref().map(|it| &it.unit);
            let same = row.metric().filter(|it| Some(&it.unit) == unit);
            if let Some(same) = same {
                metrics.add(same.value);
            }
        }
        let Some(middle) = values.mean() else {
            return Row {
                enabled_ns: middle_ns(all.iter().map(|row| row.enabled_ns)),
                running_ns: middle_ns(all.iter().map(|row| row.running_ns)),
                ..row.clone()
            };
        };
        if let (Some(metric), Some(middle)) = (&mut metric, metrics.mean()) {
            metric.value = middle;
        }
        Row {
            value: Value::Counted(rounded(middle)),
            provenance,
            // Of the runs that the value is of, or they would not fit each other.
            enabled_ns: middle_ns(counted.iter().map(|(_, row)| row.enabled_ns)),
            running_ns: middle_ns(counted.iter().map(|(_, row)| row.running_ns)),
            variance: values.percent(),
            metric,
            ..row.clone()
        }
    };
    first.iter().enumerate().map(row).collect()
}

/// Which means are not of all runs: `cycles of vCPU 1 was counted in 2 of 3 runs`.
#[must_use]
pub fn partly(runs: &[Vec<Row>]) -> Vec<String> {
    let first = runs.first().map(Vec::as_slice).unwrap_or_default();
    let line = |(index, row): (usize, &Row)| {
        let values = runs.iter().filter_map(|rows| rows.get(index));
        let counted = values.filter(|row| matches!(row.value, Value::Counted(_)));
        let (counted, all) = (counted.count(), runs.len());
        let whose = row.whose.map(|whose| format!(" of {whose}"));
        (0 < counted && counted < all).then(|| {
            let name = &row.event;
            let whose = whose.unwrap_or_default();
            format!("{name}{whose} was counted in {counted} of {all} runs: the mean is of those")
        })
    };
    first.iter().enumerate().filter_map(line).collect()
}

/// The mean of times.
fn middle_ns(times: impl Iterator<Item = u64>) -> u64 {
    let mut runs = Runs::default();
    times.for_each(|ns| runs.add(float(ns)));
    runs.mean().map_or(0, rounded)
}

#[expect(clippy::cast_precision_loss, reason = "a mean is no more exact")]
fn float(count: u64) -> f64 {
    count as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a mean of counts is between 0 and the largest of them"
)]
fn rounded(mean: f64) -> u64 {
    mean.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stat::Unit;
    use umpire_events::Extras;

    fn row(value: Value) -> Row {
        let counted = matches!(value, Value::Counted(_));
        Row {
            event: "e".to_owned(),
            unit: Unit::EVENTS,
            value,
            provenance: counted.then_some(Provenance::Hardware),
            enabled_ns: 10,
            running_ns: 10,
            variance: None,
            whose: None,
            metric: None,
        }
    }

    /// Rows of a vCPU's counts and another one's, as `whose name value`.
    fn check_rows(apart: bool, parts: &[(bool, bool)], expected: &[&str]) {
        use crate::stat::reading::{Count, How, Reading, SetReading};
        let asked = |name: &str, source| Asked {
            name: name.to_owned(),
            source,
            unit: Unit::EVENTS,
            said: Extras::default(),
        };
        let request = pmu_model::CountRequest::plain(
            pmu_model::EventCode::Fixed(pmu_model::FixedFunction::CoreCycles),
            true,
            true,
        );
        let level = false;
        let nothing = Source::Nothing { why: String::new() };
        let events = [
            asked("cycles", Source::Counter(request)),
            asked("exits", Source::Quantity { pmd: 64, level }),
            asked("none", nothing),
        ];
        let layout = Layout {
            events: &events,
            supported: &[true, true, false],
            scale: Scale::Linear,
            apart,
        };
        let reading = |ns: u64, (counters, quantities): (bool, bool)| {
            let count = |event, value, how| Count { event, value, how };
            let hardware = How::Counted(Provenance::Hardware);
            let set = SetReading {
                active_ns: ns,
                counts: vec![count(0, ns * 3, hardware)],
            };
            Reading {
                sets: counters.then_some(set).into_iter().collect(),
                quantities: quantities
                    .then_some(count(1, ns + 7, How::Known))
                    .into_iter()
                    .collect(),
                run_ns: None,
            }
        };
        let tallies: Vec<CountTally> = parts
            .iter()
            .map(|part| {
                let mut tally = CountTally::new(3);
                tally.add(&reading(0, *part), &reading(10, *part), 0, 20);
                tally
            })
            .collect();
        let parts: Vec<Part<'_>> = (0u32..)
            .zip(parts.iter().zip(&tallies))
            .map(|(number, ((counters, quantities), tally))| Part {
                whose: Target::Vcpu(number),
                tally,
                counters: *counters,
                quantities: *quantities,
            })
            .collect();
        let text = |row: &Row| {
            let whose = match row.whose {
                Some(Target::Vcpu(number) | Target::Core(number)) => format!("{number} "),
                None => String::new(),
            };
            let value = match row.value {
                Value::Counted(count) => count.to_string(),
                Value::NotCounted => "not counted".to_owned(),
                Value::NotSupported => "not supported".to_owned(),
            };
            format!("{whose}{} {value}", row.event)
        };
        let rows = layout.rows(&parts, 1.0);
        let found: Vec<String> = rows.iter().map(text).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn contexts_are_added_up_or_kept_apart() {
        let both = (true, true);
        let sum = ["cycles 60", "exits 20", "none not supported"];
        check_rows(false, &[both, both], &sum);
        check_rows(
            true,
            &[both, both],
            &[
                "0 cycles 30",
                "0 exits 10",
                "0 none not supported",
                "1 cycles 30",
                "1 exits 10",
                "1 none not supported",
            ],
        );
        // With -a cores count, and vCPUs have the quantities.
        let split = [(true, false), (false, true)];
        let sum = ["cycles 30", "exits 10", "none not supported"];
        check_rows(false, &split, &sum);
        check_rows(
            true,
            &split,
            &["0 cycles 30", "0 none not supported", "1 exits 10"],
        );
        // Nobody has been there.
        let nobody = [
            "cycles not counted",
            "exits not supported",
            "none not supported",
        ];
        check_rows(false, &[], &nobody);
    }

    #[test]
    fn what_was_counted_before_the_end_is_not_counted_after_it() {
        let source = Source::Quantity {
            pmd: 64,
            level: false,
        };
        let events = [Asked {
            name: "exits".to_owned(),
            source,
            said: umpire_events::Extras::default(),
            unit: Unit::EVENTS,
        }];
        let layout = Layout {
            events: &events,
            supported: &[true],
            scale: Scale::Linear,
            apart: false,
        };
        let check = |tally: &CountTally, quantities, expected| {
            let part = Part {
                whose: Target::Vcpu(0),
                tally,
                counters: true,
                quantities,
            };
            let rows = layout.rows(&[part], 1.0);
            assert_eq!(rows[0].value, expected);
        };
        // An interval in which nothing was read.
        let mut tally = CountTally::new(1);
        check(&tally, true, Value::NotCounted);
        // A context that has none, and a host that does not know it.
        check(&tally, false, Value::NotSupported);
        use crate::stat::reading::{Count, How, Reading};
        let quantities = vec![Count {
            event: 0,
            value: 0,
            how: How::Never,
        }];
        let reading = Reading {
            quantities,
            ..Reading::default()
        };
        tally.add(&reading, &reading, 0, 10);
        check(&tally, true, Value::NotSupported);
    }

    #[test]
    fn the_time_on_the_wall_is_no_sum() {
        let events = [Asked {
            name: "time".to_owned(),
            source: Source::Elapsed,
            unit: Unit::EVENTS,
            said: Extras::default(),
        }];
        let layout = Layout {
            events: &events,
            supported: &[true],
            scale: Scale::Linear,
            apart: false,
        };
        let tally = CountTally::new(1);
        let part = |number| Part {
            whose: Target::Vcpu(number),
            tally: &tally,
            counters: true,
            quantities: true,
        };
        let rows = layout.rows(&[part(0), part(1)], 0.25);
        let found: Vec<(Value, u64)> = rows.iter().map(|it| (it.value, it.enabled_ns)).collect();
        assert_eq!(found, [(Value::Counted(250_000_000), 250_000_000)]);
    }

    #[test]
    fn runs_have_a_mean() {
        let check = |values: &[Value], expected: Value, variance: Option<f64>| {
            let runs: Vec<Vec<Row>> = values.iter().map(|value| vec![row(*value)]).collect();
            let [found] = mean(&runs).try_into().unwrap();
            // Of times as of counts: not their sum.
            assert_eq!((found.enabled_ns, found.running_ns), (10, 10));
            assert_eq!(found.value, expected);
            match (found.variance, variance) {
                (Some(found), Some(expected)) => assert!((found - expected).abs() < 1e-9),
                (found, expected) => assert_eq!(found, expected),
            }
        };
        use Value::{Counted, NotCounted, NotSupported};
        check(&[Counted(7)], Counted(7), None);
        // Standard deviation 2 of three runs, mean 4.
        let error = 2.0 / 3.0f64.sqrt() / 4.0 * 100.0;
        check(
            &[Counted(2), Counted(4), Counted(6)],
            Counted(4),
            Some(error),
        );
        check(&[NotCounted, Counted(5)], Counted(5), None);
        check(&[NotCounted, NotCounted], NotCounted, None);
        check(&[NotSupported, NotSupported], NotSupported, None);
        assert_eq!(mean(&[]), []);
    }

    #[test]
    fn a_mean_and_its_times_are_of_the_same_runs() {
        let with = |value, enabled_ns, running_ns| {
            let row = Row {
                enabled_ns,
                running_ns,
                ..row(value)
            };
            vec![row]
        };
        let none = with(Value::NotCounted, 1000, 0);
        let runs = [
            none.clone(),
            with(Value::Counted(6), 40, 20),
            with(Value::Counted(8), 60, 40),
        ];
        let [found] = mean(&runs).try_into().unwrap();
        let times = (found.enabled_ns, found.running_ns);
        assert_eq!((found.value, times), (Value::Counted(7), (50, 30)));
        let [line] = partly(&runs).try_into().unwrap();
        assert!(line.contains("e was counted in 2 of 3 runs"), "{line}");
        assert!(partly(&[none.clone(), none.clone()]).is_empty());
        assert!(partly(&runs[1..]).is_empty());
        let [found] = mean(&[none, with(Value::NotCounted, 2000, 0)])
            .try_into()
            .unwrap();
        assert_eq!((found.enabled_ns, found.running_ns), (1500, 0));
    }
}
