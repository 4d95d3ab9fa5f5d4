//! A floor under the distance between two PMIs.

use pmu_model::{Ticks, Tsc};

/// What to do with a PMI that has become due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThrottleDecision {
    /// Inject it now.
    Deliver,
    /// Keep it and inject it at this TSC value.
    Late {
        /// Earliest TSC value for it.
        at: Tsc,
    },
}

/// Keeps two PMIs at least a floor apart, so that a guest with a tiny period
/// still makes progress. A PMI that comes too early is late and counted,
/// never lost. Pure: the caller brings the time.
#[derive(Clone, Debug)]
pub struct PmiThrottle {
    floor: Ticks,
    last: Option<Tsc>,
    waiting: Option<Tsc>,
    delivered: u64,
    late: u64,
}

impl PmiThrottle {
    /// A throttle that lets a PMI through every `floor` at most; none
    /// never delays one.
    pub(crate) fn new(floor: Ticks) -> Self {
        PmiThrottle {
            floor,
            last: None,
            waiting: None,
            delivered: 0,
            late: 0,
        }
    }

    /// A PMI is due at `now`. While one is waiting, others join it.
    pub(crate) fn request(&mut self, now: Tsc) -> ThrottleDecision {
        let next = self.last.map_or(Tsc(0), |last| last + self.floor);
        let at = self.waiting.unwrap_or(next);
        if now < at {
            self.late += u64::from(self.waiting.is_none());
            self.waiting = Some(at);
            return ThrottleDecision::Late { at };
        }
        self.last = Some(now);
        self.waiting = None;
        self.delivered += 1;
        ThrottleDecision::Deliver
    }

    /// Whether a late PMI is to be injected at `now`; true once for each.
    pub(crate) fn due(&mut self, now: Tsc) -> bool {
        self.waiting.is_some_and(|at| now >= at) && self.request(now) == ThrottleDecision::Deliver
    }

    /// TSC value at which a waiting PMI comes due: a deadline for a kick.
    pub(crate) fn deadline(&self) -> Option<Tsc> {
        self.waiting
    }

    /// PMIs let through so far, late ones included.
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// PMIs that had to wait so far, one still waiting included.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// Forgets a waiting PMI and the time of the last one, as a vCPU reset does. The sums stay.
    pub(crate) fn reset(&mut self) {
        self.last = None;
        self.waiting = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_throttle_delays_and_never_loses() {
        let mut throttle = PmiThrottle::new(Ticks(100));
        assert_eq!(throttle.request(Tsc(50)), ThrottleDecision::Deliver);
        assert_eq!(
            throttle.request(Tsc(149)),
            ThrottleDecision::Late { at: Tsc(150) }
        );
        assert_eq!(
            throttle.request(Tsc(149)),
            ThrottleDecision::Late { at: Tsc(150) }
        );
        assert_eq!((throttle.late(), throttle.deadline()), (1, Some(Tsc(150))));
        assert!(!throttle.due(Tsc(149)));
        assert!(throttle.due(Tsc(160)));
        assert!(!throttle.due(Tsc(160)), "told once");
        assert_eq!(
            throttle.request(Tsc(259)),
            ThrottleDecision::Late { at: Tsc(260) }
        );
        // A request at its time takes the waiting one along.
        assert_eq!(throttle.request(Tsc(260)), ThrottleDecision::Deliver);
        assert_eq!((throttle.delivered(), throttle.late()), (3, 2));
        assert_eq!(throttle.deadline(), None);
        assert_eq!(
            throttle.request(Tsc(300)),
            ThrottleDecision::Late { at: Tsc(360) }
        );
        throttle.reset();
        assert!(!throttle.due(Tsc(400)));
        assert_eq!(throttle.request(Tsc(301)), ThrottleDecision::Deliver);
        let mut open = PmiThrottle::new(Ticks(0));
        assert!((0..5).all(|now| open.request(Tsc(now / 2)) == ThrottleDecision::Deliver));
    }
}
