//! Time as the types that keep an instant, a length of time and their units apart.

use core::ops::{Add, AddAssign, Mul, Sub};

/// An instant: a value of the caller's clock. On hardware that is the time stamp
/// counter of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Tsc(pub u64);

/// A length of time in ticks of the caller's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Ticks(pub u64);

impl Tsc {
    /// The instant that never comes.
    pub const NEVER: Tsc = Tsc(u64::MAX);
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

impl Add for Ticks {
    type Output = Ticks;

    /// Both together, at most [`u64::MAX`].
    #[inline]
    fn add(self, other: Ticks) -> Ticks {
        Ticks(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Ticks {
    #[inline]
    fn add_assign(&mut self, other: Ticks) {
        *self = *self + other;
    }
}

impl Mul<u64> for Ticks {
    type Output = Ticks;

    /// So many of them, at most [`u64::MAX`].
    #[inline]
    fn mul(self, times: u64) -> Ticks {
        Ticks(self.0.saturating_mul(times))
    }
}

impl Sub for Ticks {
    type Output = Ticks;

    /// What is left without `other`, at least none.
    #[inline]
    fn sub(self, other: Ticks) -> Ticks {
        Ticks(self.0.saturating_sub(other.0))
    }
}
