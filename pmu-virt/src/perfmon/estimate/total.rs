//! One event's running total: phases that are over, and the one that is not.

use super::linear::{saturated, share};
use super::locate::Boundary;

/// What is kept of one event, whatever the length of the run.
#[derive(Clone, Debug, Default)]
pub(super) struct Total {
    /// Events of the blind time of phases that are over.
    filled: u128,
    /// Of the present phase: events and nanoseconds of its slices that are
    /// wholly in it, and its blind nanoseconds.
    counted: u128,
    active_ns: u128,
    blind_ns: u128,
}

impl Total {
    /// A slice in which the event was counted.
    pub(super) fn own(&mut self, count: u64, length_ns: u64) {
        self.counted = self.counted.saturating_add(count.into());
        self.active_ns = self.active_ns.saturating_add(length_ns.into());
    }

    /// Time in which it was not.
    pub(super) fn blind(&mut self, length_ns: u64) {
        self.blind_ns = self.blind_ns.saturating_add(length_ns.into());
    }

    /// The rate changes here. A phase that was never seen goes on into the
    /// next one.
    pub(super) fn jump(&mut self) {
        if let Some(fill) = share(self.counted, self.active_ns, self.blind_ns) {
            self.filled = self.filled.saturating_add(fill);
            (self.counted, self.active_ns, self.blind_ns) = (0, 0, 0);
        }
    }

    /// Events of all blind time; `at_rest` is the rate (events, nanoseconds) to
    /// take if the present phase has not been seen.
    pub(super) fn blind_events(&self, at_rest: (u64, u64)) -> u64 {
        let open = share(self.counted, self.active_ns, self.blind_ns);
        let open = open.or_else(|| share(at_rest.0.into(), at_rest.1.into(), self.blind_ns));
        saturated(self.filled.saturating_add(open.unwrap_or(0)))
    }
}

/// The jumps of one event that are still to come, as a walk over the slices
/// meets them.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    boundaries: std::iter::Peekable<std::slice::Iter<'a, Boundary>>,
}

impl<'a> Walk<'a> {
    /// Over slices from `start` on, in nanoseconds from the begin of the window.
    pub(super) fn new(boundaries: &'a [Boundary], start: f64) -> Self {
        let passed = boundaries.partition_point(|boundary| boundary.at < start);
        Walk {
            boundaries: boundaries[passed..].iter().peekable(),
        }
    }

    /// Takes one slice: the count if the event was counted in it.
    pub(super) fn slice(
        &mut self,
        total: &mut Total,
        (index, start, length_ns): (usize, f64, u64),
        count: Option<u64>,
    ) {
        let end = start + super::samples::float(length_ns);
        let mut blind = length_ns;
        let mut mixed = false;
        while let Some(boundary) = self.boundaries.next_if(|boundary| boundary.at < end) {
            if count.is_none() {
                let before = part(end - boundary.at, blind);
                total.blind(blind - before);
                blind = before;
            }
            mixed |= boundary.within == Some(index);
            total.jump();
        }
        match count {
            // It is of two phases, and tells the rate of neither.
            Some(_) if mixed => {}
            Some(count) => total.own(count, length_ns),
            None => total.blind(blind),
        }
    }
}

/// Nanoseconds, from 0 to `most`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast from a float saturates, and a place in time may be a nanosecond off"
)]
fn part(length: f64, most: u64) -> u64 {
    (length.round() as u64).min(most)
}
