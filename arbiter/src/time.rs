//! Time as the types that keep an instant, a length of time and their units apart.

use core::ops::{Add, AddAssign, Mul, Sub};
use core::time::Duration;

/// An instant: a value of the caller's clock. On hardware that is the time stamp
/// counter of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Tsc(pub u64);

/// A length of time in ticks of the caller's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Ticks(pub u64);

/// A length of time in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Nanos(pub u64);

impl Tsc {
    /// The instant that never comes.
    pub const NEVER: Tsc = Tsc(u64::MAX);
}

impl Ticks {
    /// So much time on a clock of `khz`.
    #[must_use]
    pub fn of(time: Duration, khz: u32) -> Self {
        let ticks = time.as_nanos().saturating_mul(khz.into()) / 1_000_000;
        Ticks(u64::try_from(ticks).unwrap_or(u64::MAX))
    }

    /// As much time, of a clock of `khz`, which is not 0; in whole nanoseconds.
    #[must_use]
    pub fn duration(self, khz: u32) -> Duration {
        let ns = u128::from(self.0) * 1_000_000 / u128::from(khz);
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

impl Add<Ticks> for Tsc {
    type Output = Tsc;

    /// The instant so much later, at most [`Tsc::NEVER`].
    #[inline]
    fn add(self, later: Ticks) -> Tsc {
        Tsc(self.0.saturating_add(later.0))
    }
}

impl Sub for Tsc {
    type Output = Ticks;

    /// The time since `earlier`, or none if that is later.
    #[inline]
    fn sub(self, earlier: Tsc) -> Ticks {
        Ticks(self.0.saturating_sub(earlier.0))
    }
}

impl From<Duration> for Nanos {
    /// As much time, at most [`u64::MAX`].
    #[inline]
    fn from(time: Duration) -> Self {
        Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Arithmetic of lengths of time, which stays within their limits.
macro_rules! lengths {
    ($($length:ident)*) => {$(
        impl Add for $length {
            type Output = $length;

            /// Both together, at most [`u64::MAX`].
            #[inline]
            fn add(self, other: $length) -> $length {
                $length(self.0.saturating_add(other.0))
            }
        }

        impl AddAssign for $length {
            #[inline]
            fn add_assign(&mut self, other: $length) {
                *self = *self + other;
            }
        }

        impl Mul<u64> for $length {
            type Output = $length;

            /// So many of them, at most [`u64::MAX`].
            #[inline]
            fn mul(self, times: u64) -> $length {
                $length(self.0.saturating_mul(times))
            }
        }

        impl Sub for $length {
            type Output = $length;

            /// What is left without `other`, at least none.
            #[inline]
            fn sub(self, other: $length) -> $length {
                $length(self.0.saturating_sub(other.0))
            }
        }
    )*};
}

lengths! { Ticks Nanos }

/// The earlier of two instants that may not come.
#[cfg(feature = "alloc")]
pub(crate) fn earliest(a: Option<Tsc>, b: Option<Tsc>) -> Option<Tsc> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}

/// The pace of the caller's clock.
#[cfg(feature = "alloc")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    ticks_per_ms: u64,
}

#[cfg(feature = "alloc")]
impl Clock {
    /// 0 counts as 1.
    pub(crate) fn new(ticks_per_ms: u64) -> Self {
        Clock {
            ticks_per_ms: ticks_per_ms.max(1),
        }
    }

    pub(crate) fn to_ticks(self, ms: u32) -> Ticks {
        Ticks(u64::from(ms).saturating_mul(self.ticks_per_ms))
    }

    /// Rounded up.
    pub(crate) fn to_ms(self, ticks: Ticks) -> u32 {
        u32::try_from(ticks.0.div_ceil(self.ticks_per_ms)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_and_durations() {
        let second = Duration::from_secs(1);
        assert_eq!(Ticks::of(second, 2_596_076), Ticks(2_596_076_000));
        assert_eq!(Ticks(2_596_076_000).duration(2_596_076), second);
        assert_eq!(Ticks::of(Duration::from_nanos(1), 999_999), Ticks(0));
        assert_eq!(Ticks::of(Duration::MAX, u32::MAX), Ticks(u64::MAX));
        let longest = Duration::from_nanos(u64::MAX);
        assert_eq!(Ticks(u64::MAX).duration(1), longest);
    }

    #[test]
    fn nanoseconds_end_at_their_limits() {
        const MOST: Nanos = Nanos(u64::MAX);
        assert_eq!(Nanos::from(Duration::from_micros(7)), Nanos(7_000));
        assert_eq!(Nanos::from(Duration::MAX), MOST);
        let mut time = MOST - Nanos(1) + Nanos(2);
        assert_eq!(time, MOST);
        time += Nanos(1);
        assert_eq!(time, MOST);
        assert_eq!(Nanos(3) * 2 - Nanos(7), Nanos(0));
        assert_eq!(MOST * 2, MOST);
    }
}
