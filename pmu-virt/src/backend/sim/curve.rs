//! A declared rate as a function of time, in whole numbers only.
//!
//! Time is a vCPU's own: TSC ticks in which it ran. Events are the integral of
//! the rate from 0, so those of adjoining intervals add up to those of the
//! whole, and nothing is ever rounded twice.

use pmu_model::Ring;

/// One stretch of constant rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Phase {
    /// Its length in microseconds, not 0.
    pub(super) us: u64,
    /// Events per second at CPL 0, which is events per microsecond in millionths.
    pub(super) kernel: u64,
    /// Events per second at CPL 1 to 3.
    pub(super) user: u64,
}

impl Phase {
    fn rate(&self, ring: Ring) -> u128 {
        u128::from(match ring {
            Ring::Kernel => self.kernel,
            Ring::User => self.user,
        })
    }
}

/// Phases that repeat, with noise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Curve {
    /// At least one.
    pub(super) phases: Vec<Phase>,
    /// Largest relative deviation of the rate, in millionths, below a million.
    pub(super) noise_ppm: u32,
    /// What the noise is drawn from.
    pub(super) seed: u64,
}

/// A tick in the units of time here.
const TICK: u128 = 1000;
/// Length of a stretch of even noise, in microseconds.
const NOISE_US: u64 = 100;
/// Noise at a border of two such stretches lies between this and its negative.
const NOISE_SCALE: i128 = 1 << 20;

impl Curve {
    /// Whether the ring makes a difference.
    pub(super) fn depends_on_ring(&self) -> bool {
        self.phases.iter().any(|phase| phase.kernel != phase.user)
    }

    /// Events from time 0 to `ticks`, were they all in `ring`, in units of
    /// [`unit`]. Never falls as `ticks` grows.
    pub(super) fn integral(&self, ring: Ring, ticks: u64, tsc_khz: u32) -> u128 {
        let khz = u128::from(tsc_khz);
        let time = self.warped(ticks, tsc_khz);
        let length = |phase: &Phase| u128::from(phase.us) * khz;
        let period: u128 = self.phases.iter().map(length).sum();
        let whole: u128 = self.phases.iter().map(|p| p.rate(ring) * length(p)).sum();
        let mut rest = time % period;
        let mut sum = time / period * whole;
        for phase in &self.phases {
            let part = rest.min(length(phase));
            sum += phase.rate(ring) * part;
            rest -= part;
        }
        sum
    }

    /// For how many ticks from `from` on the integral grows by the same, at least one, and by
    /// how much in each of them; without noise.
    pub(super) fn even(&self, ring: Ring, from: u64, tsc_khz: u32) -> (u64, u128) {
        let khz = u128::from(tsc_khz);
        let length = |phase: &Phase| u128::from(phase.us) * khz;
        let period: u128 = self.phases.iter().map(length).sum();
        let mut rest = u128::from(from) * TICK % period;
        for phase in &self.phases {
            if rest < length(phase) {
                let ticks = (length(phase) - rest) / TICK;
                if ticks > 0 {
                    let ticks = u64::try_from(ticks).unwrap_or(u64::MAX);
                    return (ticks, phase.rate(ring) * TICK);
                }
                break;
            }
            rest -= length(phase);
        }
        // The rate changes within the tick.
        let after = self.integral(ring, from.saturating_add(1), tsc_khz);
        (1, after - self.integral(ring, from, tsc_khz))
    }

    /// The first tick from `from` on at which `integral` has grown by
    /// `growth`; `None` if it never does.
    pub(super) fn reaches(&self, ring: Ring, from: u64, growth: u128, tsc_khz: u32) -> Option<u64> {
        let start = self.integral(ring, from, tsc_khz);
        let enough = |ticks: u64| self.integral(ring, ticks, tsc_khz) - start >= growth;
        let mut step: u64 = 1;
        let mut low = from;
        let mut high = from.checked_add(step)?;
        while !enough(high) {
            low = high;
            step = step.saturating_mul(2);
            // Past the end of time it would be reached by nobody.
            high = match high.checked_add(step) {
                Some(next) => next,
                None if high == u64::MAX => return None,
                None => u64::MAX,
            };
        }
        Some(first_enough(low, high, enough))
    }

    /// Time with noise, in thousandths of a tick: it runs faster or slower by
    /// at most `noise_ppm`, evenly within each stretch of [`NOISE_US`]. Its
    /// distance from real time is bounded, so noise does not add up.
    fn warped(&self, ticks: u64, tsc_khz: u32) -> u128 {
        let time = u128::from(ticks) * TICK;
        if self.noise_ppm == 0 {
            return time;
        }
        let stretch = u128::from(NOISE_US) * u128::from(tsc_khz);
        let (index, inside) = (time / stretch, time % stretch);
        let index = u64::try_from(index).unwrap_or(u64::MAX);
        let signed = |value: u128| i128::try_from(value).unwrap_or(i128::MAX);
        let blend = self.displacement(index) * signed(stretch - inside)
            + self.displacement(index.saturating_add(1)) * signed(inside);
        // At the largest displacements the speed differs by 2 of them over one
        // stretch, hence the 2.
        let shift = (i128::from(self.noise_ppm) * blend).div_euclid(2 * 1_000_000 * NOISE_SCALE);
        u128::try_from(signed(time) + shift).unwrap_or(0)
    }

    /// How far time is off at the start of a stretch; 0 at time 0.
    fn displacement(&self, index: u64) -> i128 {
        if index == 0 {
            return 0;
        }
        let span = 2 * NOISE_SCALE.unsigned_abs() + 1;
        let drawn = u128::from(mix(self.seed ^ mix(index))) % span;
        i128::try_from(drawn).unwrap_or(0) - NOISE_SCALE
    }
}

/// The first number above `low` that is enough, up to `high`, which is.
pub(super) fn first_enough(mut low: u64, mut high: u64, enough: impl Fn(u64) -> bool) -> u64 {
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if enough(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    high
}

/// The unit of [`Curve::integral`] in one event.
pub(super) fn unit(tsc_khz: u32) -> u128 {
    u128::from(tsc_khz) * 1_000_000
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast Splittable
/// Pseudorandom Number Generators", 2014): every bit depends on every bit.
pub(super) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KHZ: u32 = 2_000_000;

    fn curve(phases: &[(u64, u64, u64)], noise_ppm: u32) -> Curve {
        let phase = |&(us, kernel, user): &(u64, u64, u64)| Phase { us, kernel, user };
        Curve {
            phases: phases.iter().map(phase).collect(),
            noise_ppm,
            seed: 7,
        }
    }

    fn count(curve: &Curve, ring: Ring, us: u64) -> u128 {
        curve.integral(ring, us * u64::from(KHZ) / 1000, KHZ) / unit(KHZ)
    }

    #[test]
    fn counts_are_those_of_a_hand_calculation() {
        // 3 us of 10 events, then 1 us of 100: 130 in a period of 4 us.
        let two = curve(&[(3, 10_000_000, 0), (1, 100_000_000, 500_000)], 0);
        for (us, kernel, user) in [
            (0, 0, 0),
            (1, 10, 0),
            (3, 30, 0),
            (4, 130, 0),
            (5, 140, 0),
            (8, 260, 1),
            (4_000_003, 130_000_030, 500_000),
        ] {
            assert_eq!(count(&two, Ring::Kernel, us), kernel, "{us} us");
            assert_eq!(count(&two, Ring::User, us), user, "{us} us");
        }
    }

    #[test]
    fn nothing_is_ever_reached_at_rate_zero() {
        let idle = curve(&[(1, 0, 1)], 0);
        assert_eq!(idle.reaches(Ring::Kernel, 5, 1, KHZ), None);
        assert!(idle.reaches(Ring::User, 5, 1, KHZ).is_some());
    }

    #[test]
    fn a_century_does_not_overflow() {
        let fast = curve(&[(1_000_000_000, 1 << 50, 1 << 50)], 999_999);
        let _ = fast.integral(Ring::User, u64::MAX, u32::MAX);
        let _ = fast.reaches(Ring::User, u64::MAX - 1, u128::MAX, u32::MAX);
    }

    proptest! {
        #[test]
        fn noise_bends_the_rate_within_its_bound_and_never_adds_up(
            noise in 1..1_000_000u32,
            at in 0..1u64 << 40,
            ticks in 1..1u64 << 22,
        ) {
            let noisy = curve(&[(1, 1_000_000, 1_000_000)], noise);
            let plain = curve(&[(1, 1_000_000, 1_000_000)], 0);
            let grown = |curve: &Curve| {
                curve.integral(Ring::User, at + ticks, KHZ) - curve.integral(Ring::User, at, KHZ)
            };
            let (noisy_growth, expected) = (grown(&noisy), grown(&plain));
            let bound = expected * u128::from(noise) / 1_000_000 + 2 * 1_000_000;
            prop_assert!(noisy_growth.abs_diff(expected) <= bound);
            let off = noisy.integral(Ring::User, at, KHZ).abs_diff(plain.integral(Ring::User, at, KHZ));
            prop_assert!(off <= u128::from(NOISE_US) * u128::from(KHZ) * 1_000_000);
        }

        #[test]
        fn an_overflow_is_foreseen_to_the_tick(
            noise in 0..1_000_000u32,
            from in 0..1u64 << 50,
            events in 1..1u64 << 30,
        ) {
            let curve = curve(&[(20, 3_000_000, 1), (7, 0, 1), (1, 123_456_789, 1)], noise);
            let growth = u128::from(events) * unit(KHZ);
            let at = curve.reaches(Ring::Kernel, from, growth, KHZ).expect("it grows");
            let start = curve.integral(Ring::Kernel, from, KHZ);
            prop_assert!(curve.integral(Ring::Kernel, at, KHZ) - start >= growth);
            prop_assert!(curve.integral(Ring::Kernel, at - 1, KHZ) - start < growth);
        }

        #[test]
        fn an_even_stretch_grows_by_the_same_in_each_tick(
            lengths in prop::collection::vec((1..30u64, 0..200_000_000u64), 1..5),
            from in 0..1u64 << 50,
        ) {
            let phases: Vec<_> = lengths.iter().map(|(us, rate)| (*us, *rate, 1)).collect();
            let curve = curve(&phases, 0);
            let (ticks, each) = curve.even(Ring::Kernel, from, KHZ);
            let grown = |ticks: u64| {
                curve.integral(Ring::Kernel, from + ticks, KHZ)
                    - curve.integral(Ring::Kernel, from, KHZ)
            };
            prop_assert!(ticks > 0);
            prop_assert_eq!(grown(ticks), u128::from(ticks) * each);
            prop_assert_eq!(grown(ticks / 2), u128::from(ticks / 2) * each);
            // It is as long as it can be, up to the end of its phase.
            let rates: std::collections::BTreeSet<u64> = lengths.iter().map(|(_, rate)| *rate).collect();
            if rates.len() == lengths.len() && lengths.len() > 1 {
                prop_assert_ne!(grown(ticks + 2), u128::from(ticks + 2) * each);
            }
        }
    }
}
