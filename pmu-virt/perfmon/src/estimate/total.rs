//! One event's running total: phases that are over, and the one that is not.

use pmu_model::Nanos;

use super::linear::share;
use super::locate::Boundary;
use super::samples::float;

/// What is kept of one event, whatever the length of the run.
#[derive(Clone, Debug, Default)]
pub(super) struct Total {
    /// Events of the blind time of phases that are over.
    filled: u64,
    /// Of the present phase: events and time of the slices that are wholly in
    /// it, and its blind time.
    counted: u64,
    active: Nanos,
    blind: Nanos,
}

impl Total {
    fn own(&mut self, count: u64, length: Nanos) {
        self.counted = self.counted.saturating_add(count);
        self.active += length;
    }

    fn blind(&mut self, length: Nanos) {
        self.blind += length;
    }

    /// The rate changes here. A phase that no slice has shown goes on into the
    /// next one.
    fn jump(&mut self) {
        if let Some(fill) = share(self.counted, self.active, self.blind) {
            self.filled = self.filled.saturating_add(fill);
            (self.counted, self.active, self.blind) = (0, Nanos(0), Nanos(0));
        }
    }

    /// Events of all blind time. `overall` are the events that were counted in
    /// the whole run, and for how long: their rate serves for a present phase that
    /// no slice has shown.
    pub(super) fn blind_events(&self, overall: (u64, Nanos)) -> u64 {
        let open = share(self.counted, self.active, self.blind)
            .or_else(|| share(overall.0, overall.1, self.blind));
        self.filled.saturating_add(open.unwrap_or(0))
    }
}

/// A slice as a walk meets it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// Its index in the window.
    pub(super) slice: usize,
    /// Its begin, in nanoseconds from the begin of the window.
    pub(super) start: f64,
    pub(super) length: Nanos,
    /// The count, if the event was counted in it.
    pub(super) count: Option<u64>,
}

/// The boundaries of one event's phases that a walk over the slices has yet to
/// meet.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    boundaries: &'a [Boundary],
}

impl<'a> Walk<'a> {
    /// A walk after the sample that began at `since`. Boundaries since then are
    /// met, late if need be: a look that knew less may have missed them, and
    /// where it did not, another jump changes nothing.
    pub(super) fn new(boundaries: &'a [Boundary], since: f64) -> Self {
        let passed = boundaries.partition_point(|boundary| boundary.at < since);
        Walk {
            boundaries: &boundaries[passed..],
        }
    }

    /// Adds one slice to the total.
    pub(super) fn step(&mut self, total: &mut Total, step: &Step) {
        let end = step.start + float(step.length.0);
        let mut rest = step.length;
        let mut mixed = false;
        while let Some((boundary, later)) = self.boundaries.split_first()
            && boundary.at < end
        {
            self.boundaries = later;
            if step.count.is_none() {
                let after = nanoseconds(end - boundary.at).min(rest);
                total.blind(rest - after);
                rest = after;
            }
            mixed |= boundary.within == Some(step.slice);
            total.jump();
        }
        match step.count {
            // It is of two phases and tells the rate of neither.
            Some(_) if mixed => {}
            Some(count) => total.own(count, step.length),
            None => total.blind(rest),
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, and the caller has a limit"
)]
fn nanoseconds(length: f64) -> Nanos {
    Nanos(length.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slices of 100 ns; boundaries and whether each is within a slice that was
    /// counted; the events of the blind time.
    fn check(counts: &[Option<u64>], boundaries: &[(f64, Option<usize>)], expected: u64) {
        let boundary = |&(at, within): &(f64, Option<usize>)| Boundary { at, within };
        let boundaries: Vec<_> = boundaries.iter().map(boundary).collect();
        let mut total = Total::default();
        let mut walk = Walk::new(&boundaries, 0.0);
        let mut start = 0.0;
        for (slice, count) in counts.iter().enumerate() {
            let step = Step {
                slice,
                start,
                length: Nanos(100),
                count: *count,
            };
            walk.step(&mut total, &step);
            start += 100.0;
        }
        assert_eq!(total.blind_events((7, Nanos(100))), expected, "{counts:?}");
    }

    #[test]
    fn each_phase_is_scaled_by_its_own_rate() {
        let (own, other) = (Some(10), Some(30));
        check(&[], &[], 0);
        check(&[own, other], &[], 0);
        check(&[own, None, other, None], &[], 40);
        // A quarter of the blind slice is of the second phase.
        check(&[own, None, other, None], &[(175.0, None)], 8 + 8 + 30);
        // Both phases show blind time of 100 ns; the slice between is of both.
        let mixed = [own, None, Some(25), None, other];
        check(&mixed, &[(225.0, Some(2))], 10 + 30);
        // Nothing shows the last phase, or the first: another one's rate serves.
        check(&[own, None], &[(150.0, None)], 5 + 4);
        check(&[None, own], &[(50.0, None)], 10);
    }

    #[test]
    fn a_boundary_that_was_met_already_changes_nothing() {
        let boundaries = [Boundary {
            at: 150.0,
            within: None,
        }];
        let mut total = Total::default();
        let step = |slice: usize, count| Step {
            slice,
            start: 100.0 * slice as f64,
            length: Nanos(100),
            count,
        };
        let mut walk = Walk::new(&boundaries, 0.0);
        walk.step(&mut total, &step(0, Some(10)));
        walk.step(&mut total, &step(1, None));
        // The next look begins with the sample before it.
        let mut walk = Walk::new(&boundaries, 0.0);
        walk.step(&mut total, &step(2, None));
        walk.step(&mut total, &step(3, Some(30)));
        assert_eq!(total.blind_events((0, Nanos(0))), 5 + 15 + 30);
    }
}
