//! Cycles instead of events: what an event select's counter mask, invert and edge make of a
//! declared rate. A cycle is a tick of the vCPU's clock, and its events are what the total in
//! whole events grows by in it (SDM vol. 3B, "Layout of `IA32_PERFEVTSELx` MSRs"; APM vol. 2,
//! section 13.2.1).

use pmu_model::{CountRequest, Ring};

use super::curve::{Curve, first_enough, unit};

/// Which cycles count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Threshold {
    /// Those with so many events at least: the counter mask, or 1 where edges of whatever
    /// happens are asked for.
    least: u8,
    /// Those with fewer, instead.
    invert: bool,
    /// Of those the ones that follow one which does not count.
    edge: bool,
}

impl Threshold {
    /// `None`: the request counts events. Without a counter mask, invert has no effect.
    pub(super) fn of(request: &CountRequest) -> Option<Self> {
        let CountRequest {
            cmask,
            invert,
            edge,
            ..
        } = *request;
        (cmask != 0 || edge).then_some(Threshold {
            least: cmask.max(1),
            invert: invert && cmask != 0,
            edge,
        })
    }
}

/// Cycles that counted, and whether the last one did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CycleTally {
    pub(super) cycles: u64,
    pub(super) last: bool,
}

/// The events of a stretch of cycles in which the rate is constant: in each of them `whole`,
/// and one more in each whose `part` completes another.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    cycles: u64,
    whole: u128,
    part: u128,
    /// What the total is beyond whole events before it.
    base: u128,
    unit: u128,
}

/// Which cycles of a stretch have enough events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Enough {
    All,
    Never,
    /// Those with one more.
    WithOneMore,
    WithoutIt,
}

impl Stretch {
    /// How many of the first `cycles` cycles have one more event.
    fn with_one_more(&self, cycles: u64) -> u64 {
        let more = (self.base + u128::from(cycles) * self.part) / self.unit;
        u64::try_from(more).unwrap_or(u64::MAX)
    }

    fn enough(&self, threshold: Threshold) -> Enough {
        let least = u128::from(threshold.least);
        let enough = if self.whole >= least {
            Enough::All
        } else if self.whole + 1 == least && self.part > 0 {
            Enough::WithOneMore
        } else {
            Enough::Never
        };
        match (enough, threshold.invert) {
            (enough, false) => enough,
            (Enough::All, true) => Enough::Never,
            (Enough::Never, true) => Enough::All,
            (Enough::WithOneMore | Enough::WithoutIt, true) => Enough::WithoutIt,
        }
    }

    /// How many of the first `cycles` cycles have enough.
    fn having(&self, enough: Enough, cycles: u64) -> u64 {
        match enough {
            Enough::All => cycles,
            Enough::Never => 0,
            Enough::WithOneMore => self.with_one_more(cycles),
            Enough::WithoutIt => cycles - self.with_one_more(cycles),
        }
    }

    /// Adds the cycles of the stretch that count.
    fn count(&self, threshold: Threshold, tally: CycleTally) -> CycleTally {
        let enough = self.enough(threshold);
        let having = |cycles| self.having(enough, cycles);
        let all = having(self.cycles);
        let last = having(self.cycles - 1) < all;
        if !threshold.edge {
            return CycleTally {
                cycles: tally.cycles.saturating_add(all),
                last,
            };
        }
        let first = having(1);
        // Cycles of the rarer kind never follow each other. So either each that has enough
        // follows one that has not, or each that has not is followed by one that has.
        let rare = match enough {
            Enough::All | Enough::Never => false,
            Enough::WithOneMore => 2 * self.part < self.unit,
            Enough::WithoutIt => 2 * self.part >= self.unit,
        };
        let within = if matches!(enough, Enough::All | Enough::Never) {
            0
        } else if rare {
            all - first
        } else {
            let before_last = self.cycles - 1;
            before_last - having(before_last)
        };
        let begins = u64::from(first == 1 && !tally.last);
        CycleTally {
            cycles: tally.cycles.saturating_add(begins + within),
            last,
        }
    }
}

/// Where cycles are counted from: a time of the vCPU, the total by then in units of
/// [`unit`], and the ring it is in from then on, `None` if that is not counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    pub(super) time: u64,
    pub(super) total: u128,
    pub(super) ring: Option<Ring>,
}

/// Cycles of a vCPU's time, of which those count that have enough events of a curve without
/// noise.
#[derive(Clone, Copy, Debug)]
pub(super) struct CountedCycles<'a> {
    pub(super) curve: &'a Curve,
    pub(super) threshold: Threshold,
    pub(super) tsc_khz: u32,
}

impl CountedCycles<'_> {
    /// Adds the cycles from `start` to `until` that count.
    pub(super) fn count(&self, start: Start, until: u64, tally: CycleTally) -> CycleTally {
        let mut tally = tally;
        let counted = |part: &Stretch, _: u64| {
            tally = part.count(self.threshold, tally);
            true
        };
        if start.time < until && !self.stretches(start, until, counted) {
            tally.last = false;
        }
        tally
    }

    /// The time at which `tally` has grown to `cycles`; `until` if it has not by then.
    pub(super) fn reaches(&self, start: Start, until: u64, tally: CycleTally, cycles: u64) -> u64 {
        let mut tally = tally;
        let mut found = until;
        self.stretches(start, until, |part, time| {
            let after = part.count(self.threshold, tally);
            if after.cycles < cycles {
                tally = after;
                return true;
            }
            let enough = |of: u64| {
                let shorter = Stretch {
                    cycles: of,
                    ..*part
                };
                shorter.count(self.threshold, tally).cycles >= cycles
            };
            found = time + first_enough(0, part.cycles, enough);
            false
        });
        found
    }

    /// Calls `visit` with each stretch of constant rate and the time of its first cycle, until
    /// it says that this is enough. False if there are none, as the ring is not counted.
    fn stretches(
        &self,
        start: Start,
        until: u64,
        mut visit: impl FnMut(&Stretch, u64) -> bool,
    ) -> bool {
        let Some(ring) = start.ring else {
            return false;
        };
        let unit = unit(self.tsc_khz);
        let (mut time, mut base) = (start.time, start.total % unit);
        while time < until {
            let (cycles, growth) = self.curve.even(ring, time, self.tsc_khz);
            let cycles = cycles.min(until - time);
            let stretch = Stretch {
                cycles,
                whole: growth / unit,
                part: growth % unit,
                base,
                unit,
            };
            if !visit(&stretch, time) {
                break;
            }
            time += cycles;
            base = (base + u128::from(cycles) * growth) % unit;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::curve::Phase;
    use super::*;
    use proptest::prelude::*;

    fn threshold() -> impl Strategy<Value = Threshold> {
        let all = (1..6u8, any::<bool>(), any::<bool>());
        all.prop_map(|(least, invert, edge)| Threshold {
            least,
            invert,
            edge,
        })
    }

    fn of(curve: &Curve, threshold: Threshold, tsc_khz: u32) -> CountedCycles<'_> {
        CountedCycles {
            curve,
            threshold,
            tsc_khz,
        }
    }

    /// Cycle by cycle, as it is defined.
    fn naive(curve: &Curve, what: Threshold, start: Start, until: u64, khz: u32) -> CycleTally {
        let mut tally = CycleTally::default();
        let grown = |time| {
            let ring = Ring::User;
            curve.integral(ring, time, khz) - curve.integral(ring, start.time, khz)
        };
        for time in start.time..until {
            let total = |time| (start.total + grown(time)) / unit(khz);
            let enough = total(time + 1) - total(time) >= u128::from(what.least);
            let counts = enough != what.invert;
            tally.cycles += u64::from(counts && !(what.edge && tally.last));
            tally.last = counts;
        }
        tally
    }

    proptest! {
        #[test]
        fn cycles_are_those_of_the_definition(
            phases in proptest::collection::vec((1..4u64, 0..9_000_000u64), 1..4),
            khz in 300..5000u32,
            what in threshold(),
            (at, length) in (0..20_000u64, 1..3000u64),
            total in 0..u64::MAX,
            half in any::<bool>(),
        ) {
            // Of one event in two cycles each is as rare as the other.
            let rate = |user: u64| if half { u64::from(khz) * 500 } else { user };
            let phases = phases.iter().map(|&(us, user)| Phase { us, kernel: 0, user: rate(user) });
            let curve = Curve { phases: phases.collect(), noise_ppm: 0, seed: 0 };
            let start = Start { time: at, total: total.into(), ring: Some(Ring::User) };
            let until = at + length;
            let expected = naive(&curve, what, start, until, khz);
            let cycles = of(&curve, what, khz);
            let found = cycles.count(start, until, CycleTally::default());
            prop_assert_eq!(found, expected);

            // In pieces it comes to the same, and it is foreseen to the cycle.
            let middle = at + length / 2;
            let first = cycles.count(start, middle, CycleTally::default());
            let grown = curve.integral(Ring::User, middle, khz) - curve.integral(Ring::User, at, khz);
            let then = Start { time: middle, total: start.total + grown, ..start };
            prop_assert_eq!(cycles.count(then, until, first), expected);
            let half = expected.cycles.div_ceil(2);
            let reached = cycles.reaches(start, until, CycleTally::default(), half);
            if half > 0 {
                prop_assert_eq!(naive(&curve, what, start, reached, khz).cycles, half);
                prop_assert!(naive(&curve, what, start, reached - 1, khz).cycles < half);
            }
        }
    }

    #[test]
    fn where_the_ring_is_not_counted_no_cycle_is() {
        let phases = vec![Phase {
            us: 1,
            kernel: 1,
            user: 1,
        }];
        let curve = Curve {
            phases,
            noise_ppm: 0,
            seed: 0,
        };
        let what = Threshold {
            least: 1,
            invert: true,
            edge: true,
        };
        let start = Start {
            time: 0,
            total: 0,
            ring: None,
        };
        let before = CycleTally {
            cycles: 7,
            last: true,
        };
        let cycles = of(&curve, what, 1000);
        let after = cycles.count(start, 1000, before);
        assert_eq!((after.cycles, after.last), (7, false));
        assert_eq!(cycles.count(start, 0, before), before);
        assert_eq!(cycles.reaches(start, 900, before, 8), 900);
    }
}
