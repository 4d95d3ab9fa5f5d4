//! The PMI of a vCPU, from the overflow until it was sent.
//!
//! The VMM lends the way to the guest's local APIC, a [`PmiLine`], and a PMI goes along it
//! as far as it may ([`Interrupts::forward`]).

use arbiter::{CounterId, CounterSet};
use pmu_model::{Ticks, Tsc};

use crate::pmi_line::{PmiForwarded, PmiLine, PmiRequest};
use crate::throttle::{PmiThrottle, ThrottleDecision};

/// What is to be done about a PMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PmiDue {
    /// None is to be sent now.
    Nothing,
    /// Counters have overflowed, and their PMI is held back by the throttle.
    Late,
    /// It is to be sent now, and [`Interrupts::sent`] to be called.
    Send(PmiRequest),
}

/// The PMI of one vCPU. Overflows that have not raised theirs are pending here and
/// nowhere else.
#[derive(Debug)]
pub struct Interrupts {
    /// Those that the VMM has not been asked to route.
    fresh: CounterSet,
    /// Those whose PMI was let through, and waits to be sent.
    routed: CounterSet,
    throttle: PmiThrottle,
}

impl Default for Interrupts {
    fn default() -> Self {
        Interrupts {
            fresh: CounterSet::EMPTY,
            routed: CounterSet::EMPTY,
            throttle: PmiThrottle::new(Ticks(0)),
        }
    }
}

impl Interrupts {
    pub(super) fn overflowed(&mut self, counter: CounterId) {
        self.fresh.insert(counter);
    }

    /// A PMI of a counter that was taken from its owner is nobody's.
    pub(super) fn clear(&mut self, counter: CounterId) {
        self.fresh.remove(counter);
        self.routed.remove(counter);
    }

    pub(super) fn reset(&mut self) {
        (self.fresh, self.routed) = (CounterSet::EMPTY, CounterSet::EMPTY);
        self.throttle.reset();
    }

    /// Counters with a PMI that was not sent.
    pub(super) fn counters(&self) -> CounterSet {
        union(self.fresh, self.routed)
    }

    pub(super) fn restore(&mut self, counters: CounterSet) {
        self.fresh = counters;
    }

    /// So much time is between two PMIs at least from now on.
    pub(super) fn set_floor(&mut self, ticks: Ticks) {
        self.throttle = PmiThrottle::new(ticks);
    }

    /// Whether there may be one to be sent.
    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.throttle.deadline().is_some() || !self.counters().is_empty()
    }

    /// Overflows whose PMI finds no other one on its way: now is the time to look whether
    /// the guest's local APIC lets one through, as hardware does at the overflow.
    #[inline]
    fn to_route(&self) -> Option<PmiRequest> {
        let counters = self.fresh;
        (!counters.is_empty() && self.routed.is_empty()).then_some(PmiRequest { counters })
    }

    /// The PMI of [`Interrupts::to_route`] was not let through, and is gone.
    fn dropped(&mut self) {
        self.fresh = CounterSet::EMPTY;
    }

    /// The PMI of [`Interrupts::due`] was sent.
    fn sent(&mut self) {
        self.routed = CounterSet::EMPTY;
    }

    /// Has a PMI that is pending at `now` go its way, as far as it may.
    ///
    /// # Errors
    /// The line's; the PMI is still pending.
    pub fn forward<L: PmiLine>(
        &mut self,
        now: Tsc,
        line: &mut L,
    ) -> Result<PmiForwarded, L::Error> {
        if let Some(request) = self.to_route()
            && !line.latch(request)?
        {
            self.dropped();
            return Ok(PmiForwarded::Dropped);
        }
        match self.due(now) {
            PmiDue::Nothing => Ok(PmiForwarded::Nothing),
            PmiDue::Late => Ok(PmiForwarded::Late),
            PmiDue::Send(request) => {
                if !line.send(request)? {
                    return Ok(PmiForwarded::Nothing);
                }
                self.sent();
                Ok(PmiForwarded::Sent)
            }
        }
    }

    /// When a PMI is due that the throttle holds back.
    #[inline]
    #[must_use]
    pub fn deadline(&self) -> Option<Tsc> {
        self.throttle.deadline()
    }

    /// PMIs that were let through and that were late, and when a late one is due.
    #[must_use]
    pub fn throttle(&self) -> &PmiThrottle {
        &self.throttle
    }

    /// What is to be done about the PMI at TSC value `now`. Overflows of several
    /// counters, or several of one, merge into one; those of counters that were
    /// cleared since are none.
    #[inline]
    fn due(&mut self, now: Tsc) -> PmiDue {
        let fresh = std::mem::take(&mut self.fresh);
        self.routed = union(self.routed, fresh);
        // A late PMI that is due takes the new overflows along.
        let due = self.throttle.due(now)
            || !fresh.is_empty() && self.throttle.request(now) == ThrottleDecision::Deliver;
        match (due, self.routed.is_empty()) {
            (true, false) => PmiDue::Send(PmiRequest {
                counters: self.routed,
            }),
            (false, _) if !fresh.is_empty() => PmiDue::Late,
            _ => PmiDue::Nothing,
        }
    }
}

fn union(one: CounterSet, other: CounterSet) -> CounterSet {
    CounterSet::from_bits(one.bits() | other.bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A local APIC that lets PMIs through and does as it is told.
    struct Line(Result<bool, ()>);

    impl PmiLine for Line {
        type Error = ();

        fn latch(&mut self, _: PmiRequest) -> Result<bool, ()> {
            Ok(true)
        }

        fn send(&mut self, _: PmiRequest) -> Result<bool, ()> {
            self.0
        }
    }

    #[test]
    fn a_pmi_that_was_not_sent_stays_pending() {
        let check = |sends, expected, is_pending| {
            let mut pmi = Interrupts::default();
            pmi.overflowed(CounterId::Programmable(0));
            assert_eq!(pmi.forward(Tsc(0), &mut Line(sends)), expected);
            assert_eq!(!pmi.counters().is_empty(), is_pending, "{expected:?}");
        };
        check(Ok(true), Ok(PmiForwarded::Sent), false);
        check(Ok(false), Ok(PmiForwarded::Nothing), true);
        check(Err(()), Err(()), true);
    }

    #[test]
    fn a_pmi_of_cleared_counters_is_none() {
        let set = |counters: &[u8]| -> CounterSet {
            let counters = counters.iter();
            counters.map(|n| CounterId::Programmable(*n)).collect()
        };
        let check = |overflowed: &[u8], cleared: &[u8], left: Option<&[u8]>| {
            let mut pmi = Interrupts {
                throttle: PmiThrottle::new(Ticks(100)),
                ..Interrupts::default()
            };
            // One has just been sent, so the next one is late.
            assert_eq!(pmi.throttle.request(Tsc(0)), ThrottleDecision::Deliver);
            pmi.restore(set(overflowed));
            assert_eq!(pmi.due(Tsc(50)), PmiDue::Late);
            for counter in set(cleared).iter() {
                pmi.clear(counter);
            }
            let expected = left.map_or(PmiDue::Nothing, |left| {
                PmiDue::Send(PmiRequest {
                    counters: set(left),
                })
            });
            assert_eq!(
                pmi.due(Tsc(100)),
                expected,
                "{overflowed:?} without {cleared:?}"
            );
        };
        check(&[1], &[1], None);
        check(&[1, 2], &[1], Some(&[2]));
        check(&[1], &[2, 3], Some(&[1]));
    }
}
