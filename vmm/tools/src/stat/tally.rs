//! What one context has counted so far, event by event.

use clap::ValueEnum;
use perfmon::Nanos;
use perfmon::estimate::{Estimate, Estimator};
use pmu_model::Provenance;

use super::reading::{Count, How, Reading, slices};

/// How counts of a part of the time become counts of the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Scale {
    /// By the phases that are found in the counts of all events
    #[default]
    Phases,
    /// By time alone, as the specification and perf do
    Linear,
}

/// What is known of an event in one context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Its count, scaled to the whole time; none if it was not counted.
    pub value: Option<u64>,
    /// How it came about.
    pub provenance: Option<Provenance>,
    /// Nanoseconds in which it was to be counted.
    pub enabled_ns: u64,
    /// Nanoseconds in which it was.
    pub running_ns: u64,
    /// Somebody else had its counter for a time that nobody reported.
    pub lost: bool,
    /// It was asked for, and nobody there knows it.
    pub unknown: bool,
}

/// Takes in a context's readings.
#[derive(Clone, Debug)]
pub struct CountTally {
    estimator: Estimator,
    /// By event.
    how: Vec<Option<How>>,
    first: Vec<Option<u64>>,
    last: Vec<Option<u64>>,
    /// Of the clock on the wall.
    enabled_ns: u64,
    /// In which a set was active, or should have been.
    monitored_ns: u64,
    blind_ns: u64,
    /// Others had the counters, and nobody reports for how long.
    unreported: bool,
}

impl CountTally {
    /// Before the first reading, of `events` events.
    #[must_use]
    pub fn new(events: usize) -> Self {
        Self {
            estimator: Estimator::new(events),
            how: vec![None; events],
            first: vec![None; events],
            last: vec![None; events],
            enabled_ns: 0,
            monitored_ns: 0,
            blind_ns: 0,
            unreported: false,
        }
    }

    /// Takes in what took place between two readings, and `elapsed_ns` of the
    /// clock on the wall; `active` as for [`slices`]. Returns the set that was
    /// active last.
    pub fn add(
        &mut self,
        before: &Reading,
        now: &Reading,
        active: usize,
        elapsed_ns: u64,
    ) -> usize {
        let mut last = active;
        for slice in slices(before, now, active) {
            self.estimator.push(Nanos(slice.ns), &slice.counts);
            self.monitored_ns = self.monitored_ns.saturating_add(slice.ns);
            last = slice.set;
        }
        for count in now.sets.iter().flat_map(|set| &set.counts) {
            self.note(count);
        }
        for count in &now.quantities {
            let was = before.quantities.iter().find(|it| it.event == count.event);
            self.note(count);
            if let Some(first) = self.first.get_mut(count.event) {
                let known = was.filter(|was| was.how == How::Known);
                *first = first.or(known.map(|was| was.value));
            }
            if let (Some(last), How::Known) = (self.last.get_mut(count.event), count.how) {
                *last = Some(count.value);
            }
        }
        self.enabled_ns = self.enabled_ns.saturating_add(elapsed_ns);
        last
    }

    /// For so many nanoseconds others had the counters.
    pub fn add_blind(&mut self, ns: u64) {
        self.estimator.push(Nanos(ns), &[]);
        self.monitored_ns = self.monitored_ns.saturating_add(ns);
        self.blind_ns = self.blind_ns.saturating_add(ns);
    }

    /// Others had the counters for a time that nobody reported.
    pub fn add_unreported(&mut self) {
        self.unreported = true;
    }

    /// Nanoseconds in which a set was active, or should have been.
    #[must_use]
    pub fn monitored_ns(&self) -> u64 {
        self.monitored_ns
    }

    /// Nanoseconds in which others had the counters.
    #[must_use]
    pub fn blind_ns(&self) -> u64 {
        self.blind_ns
    }

    fn note(&mut self, count: &Count) {
        let Some(how) = self.how.get_mut(count.event) else {
            return;
        };
        *how = match (*how, count.how) {
            (Some(How::Lost), _) => Some(How::Lost),
            (Some(How::Counted(one)), How::Counted(other)) => Some(How::Counted(one.and(other))),
            // How it is counted is known from other times.
            (Some(before), How::Never) => Some(before),
            (Some(How::Counted(one)), How::Interrupted) => Some(How::Counted(one)),
            (_, now) => Some(now),
        };
    }

    /// What is known of each event, as far as it is counted by a counter.
    #[must_use]
    pub fn counted(&self, scale: Scale) -> Vec<Counted> {
        let estimates = self.estimator.estimates();
        let each = self.how.iter().zip(estimates);
        each.map(|(how, estimate)| match estimate {
            Some(estimate) => self.one(*how, estimate, scale),
            None => Counted {
                enabled_ns: self.monitored_ns,
                lost: *how == Some(How::Lost) || self.unreported,
                ..Counted::default()
            },
        })
        .collect()
    }

    fn one(&self, how: Option<How>, estimate: Estimate, scale: Scale) -> Counted {
        let total = Counted {
            enabled_ns: estimate.total.0,
            ..Counted::default()
        };
        let lost = Counted {
            lost: true,
            ..total
        };
        let provenance = match how {
            _ if self.unreported => return lost,
            Some(How::Counted(provenance)) => provenance,
            // The VMM reported for how long: scaled like a set that took turns.
            Some(How::Interrupted) => Provenance::Scaled,
            Some(How::Lost) => return lost,
            Some(How::Never | How::Known) | None => return total,
        };
        let partly = estimate.active < estimate.total;
        Counted {
            value: Some(match scale {
                Scale::Phases => estimate.value,
                Scale::Linear => estimate.linear(),
            }),
            provenance: Some(if partly {
                provenance.and(Provenance::Scaled)
            } else {
                provenance
            }),
            running_ns: estimate.active.0,
            ..total
        }
    }

    /// What is known of a quantity of the VMM, which comes about so: how far it
    /// went, or where it is if it is a `level`.
    #[must_use]
    pub fn quantity(&self, event: usize, level: bool, how: Provenance) -> Counted {
        let at = |list: &[Option<u64>]| list.get(event).copied().flatten();
        let value = if level {
            at(&self.last)
        } else {
            at(&self.last)
                .zip(at(&self.first))
                .map(|(last, first)| last.saturating_sub(first))
        };
        Counted {
            value,
            provenance: value.map(|_| how),
            enabled_ns: self.enabled_ns,
            running_ns: if value.is_some() { self.enabled_ns } else { 0 },
            lost: false,
            unknown: value.is_none() && self.how.get(event).is_some_and(Option::is_some),
        }
    }
}

/// The sum of what several contexts know. Where one of them has not counted the
/// event in its time, the others' counts are scaled to all of the time.
#[must_use]
pub fn sum(parts: &[Counted], level: bool) -> Counted {
    let all = |of: fn(&Counted) -> u64| parts.iter().map(of).fold(0, u64::saturating_add);
    let lost = parts.iter().any(|part| part.lost);
    let known = || parts.iter().filter(|part| part.value.is_some());
    let provenance = known().filter_map(|part| part.provenance);
    let (enabled, running) = (all(|it| it.enabled_ns), all(|it| it.running_ns));
    let total = Counted {
        enabled_ns: enabled,
        lost,
        unknown: parts.iter().any(|part| part.unknown),
        ..Counted::default()
    };
    if lost || known().next().is_none() {
        return total;
    }
    let values = known().filter_map(|part| part.value);
    let counted = if level {
        values.max().unwrap_or(0)
    } else {
        values.fold(0, u64::saturating_add)
    };
    let covered = known()
        .map(|part| part.enabled_ns)
        .fold(0, u64::saturating_add);
    let partly = covered < enabled && !level;
    let scaled = perfmon::estimate::linear(counted, Nanos(covered), Nanos(enabled));
    let provenance = provenance.reduce(Provenance::and);
    Counted {
        value: Some(match (partly, scaled) {
            (true, Some(scaled)) => scaled,
            _ => counted,
        }),
        provenance: if partly {
            provenance.map(|it| it.and(Provenance::Scaled))
        } else {
            provenance
        },
        enabled_ns: enabled,
        running_ns: running,
        ..total
    }
}

#[cfg(test)]
mod tests {
    use super::super::reading::SetReading;
    use super::*;

    const HARDWARE: How = How::Counted(Provenance::Hardware);

    /// Sets with one event each, and the value of quantity 2.
    fn at(sets: &[(u64, usize, u64, How)], quantity: u64) -> Reading {
        let set = |&(active_ns, event, value, how): &(u64, usize, u64, How)| SetReading {
            active_ns,
            counts: vec![Count { event, value, how }],
        };
        Reading {
            sets: sets.iter().map(set).collect(),
            quantities: vec![Count {
                event: 2,
                value: quantity,
                how: How::Known,
            }],
            run_ns: None,
        }
    }

    fn known(value: u64, provenance: Provenance, enabled_ns: u64, running_ns: u64) -> Counted {
        Counted {
            value: Some(value),
            provenance: Some(provenance),
            enabled_ns,
            running_ns,
            ..Counted::default()
        }
    }

    #[test]
    fn one_set_is_counted_as_it_is() {
        let mut tally = CountTally::new(3);
        tally.add(
            &at(&[(5, 0, 7, HARDWARE)], 40),
            &at(&[(15, 0, 107, HARDWARE)], 50),
            0,
            30,
        );
        let counted = tally.counted(Scale::Phases);
        assert_eq!(counted[0], known(100, Provenance::Hardware, 10, 10));
        // The other has not been there at all.
        assert_eq!(counted[1].value, None);
        assert_eq!(
            tally.quantity(2, false, Provenance::Exact),
            known(10, Provenance::Exact, 30, 30)
        );
        assert_eq!(
            tally.quantity(2, true, Provenance::Derived),
            known(50, Provenance::Derived, 30, 30)
        );
        assert_eq!(tally.quantity(1, false, Provenance::Exact).value, None);
    }

    #[test]
    fn sets_that_take_turns_are_scaled() {
        let mut tally = CountTally::new(3);
        let zero = at(&[(0, 0, 0, How::Never), (0, 1, 0, How::Never)], 0);
        let first = at(&[(10, 0, 100, HARDWARE), (0, 1, 0, How::Never)], 0);
        let second = at(&[(10, 0, 100, HARDWARE), (30, 1, 60, HARDWARE)], 0);
        let active = tally.add(&zero, &first, 0, 10);
        assert_eq!(
            tally.counted(Scale::Linear)[0],
            known(100, Provenance::Hardware, 10, 10)
        );
        assert_eq!(tally.add(&first, &second, active, 30), 1);
        let counted = tally.counted(Scale::Linear);
        assert_eq!(counted[0], known(400, Provenance::Scaled, 40, 10));
        assert_eq!(counted[1], known(80, Provenance::Scaled, 40, 30));
    }

    #[test]
    fn time_without_counters_is_scaled_only_if_it_is_known() {
        let mut tally = CountTally::new(1);
        tally.add(
            &at(&[(0, 0, 0, How::Never)], 0),
            &at(&[(10, 0, 50, How::Lost)], 0),
            0,
            10,
        );
        let lost = &tally.counted(Scale::Linear)[0];
        assert_eq!((lost.value, lost.lost), (None, true));
        let mut tally = CountTally::new(1);
        tally.add(
            &at(&[(0, 0, 0, How::Never)], 0),
            &at(&[(10, 0, 50, HARDWARE)], 0),
            0,
            10,
        );
        tally.add_blind(30);
        assert_eq!(
            tally.counted(Scale::Linear)[0],
            known(200, Provenance::Scaled, 40, 10)
        );
        assert_eq!(tally.blind_ns(), 30);
        // It was lost in a time that was reported, and counted in another.
        tally.add(
            &at(&[(10, 0, 50, HARDWARE)], 0),
            &at(&[(20, 0, 100, How::Interrupted)], 0),
            0,
            10,
        );
        assert_eq!(
            tally.counted(Scale::Linear)[0],
            known(250, Provenance::Scaled, 50, 20)
        );
        tally.add_unreported();
        assert_eq!(tally.counted(Scale::Linear)[0].value, None);
        assert!(tally.counted(Scale::Linear)[0].lost);
    }

    #[test]
    fn sums_over_contexts() {
        let hardware = |value, ns| known(value, Provenance::Hardware, ns, ns);
        let check = |parts: &[Counted], expected| assert_eq!(sum(parts, false), expected);
        check(&[hardware(5, 10), hardware(7, 20)], hardware(12, 30));
        let never = Counted {
            enabled_ns: 10,
            ..Counted::default()
        };
        // Nobody looked for a quarter of the time.
        check(
            &[hardware(30, 30), never],
            known(40, Provenance::Scaled, 40, 30),
        );
        // A vCPU that did not run is no loss.
        check(&[hardware(5, 10), Counted::default()], hardware(5, 10));
        check(
            &[never, never],
            Counted {
                enabled_ns: 20,
                ..never
            },
        );
        let lost = Counted {
            lost: true,
            ..never
        };
        let sum_lost = Counted {
            enabled_ns: 20,
            ..lost
        };
        check(&[hardware(5, 10), lost], sum_lost);
        check(&[], Counted::default());
        assert_eq!(
            sum(&[hardware(5, 10), hardware(9, 10)], true).value,
            Some(9)
        );
    }
}
