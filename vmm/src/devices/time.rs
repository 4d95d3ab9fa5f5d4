//! Where the devices get the time from.

use std::fmt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The two clocks that the platform devices read.
pub trait DeviceClock: fmt::Debug + Send {
    /// Time since the machine was made; never goes back.
    fn elapsed(&self) -> Duration;
    /// Seconds since 1970-01-01 00:00:00 UTC.
    fn unix_seconds(&self) -> u64;
}

/// The host's monotonic clock and its time of day.
#[derive(Clone, Copy, Debug)]
pub struct HostClock {
    start: Instant,
}

impl HostClock {
    /// A clock whose [`elapsed`](DeviceClock::elapsed) starts at zero now.
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
        }
    }
}

impl Default for HostClock {
    fn default() -> Self {
        Self::new()
    }
}

impl DeviceClock for HostClock {
    fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    fn unix_seconds(&self) -> u64 {
        // A host clock before 1970 is a broken host; its guest then starts at 1970.
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs())
    }
}

/// A moment in UTC, split as a real-time clock keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CalendarTime {
    pub(super) year: u64,
    /// 1 to 12.
    pub(super) month: u8,
    /// 1 to 31.
    pub(super) day: u8,
    /// 1 is Sunday, 7 is Saturday.
    pub(super) weekday: u8,
    pub(super) hour: u8,
    pub(super) minute: u8,
    pub(super) second: u8,
}

impl CalendarTime {
    pub(super) fn from_unix(seconds: u64) -> Self {
        const DAY: u64 = 86_400;
        let (mut days, clock) = (seconds / DAY, seconds % DAY);
        // 1970-01-01 was a Thursday, day 5 of a week that starts with Sunday = 1.
        let weekday = small((days + 4) % 7 + 1);

        // The Gregorian calendar repeats every 400 years; whole cycles are
        // skipped at once, so that the year loop below is bounded.
        const CYCLE_YEARS: u64 = 400;
        const CYCLE_DAYS: u64 = 146_097;
        let mut year = 1970 + days / CYCLE_DAYS * CYCLE_YEARS;
        days %= CYCLE_DAYS;
        while days >= days_in_year(year) {
            days -= days_in_year(year);
            year += 1;
        }
        let mut month = 1;
        while days >= days_in_month(year, month) {
            days -= days_in_month(year, month);
            month += 1;
        }
        Self {
            year,
            month,
            day: small(days + 1),
            weekday,
            hour: small(clock / 3600),
            minute: small(clock / 60 % 60),
            second: small(clock % 60),
        }
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_in_year(year: u64) -> u64 {
    365 + u64::from(is_leap(year))
}

fn days_in_month(year: u64, month: u8) -> u64 {
    match month {
        2 => 28 + u64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Narrows a value whose bound (at most 365) is known at the call.
fn small(value: u64) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A clock that stands still at a time that a test sets.
    #[derive(Clone, Copy, Debug, Default)]
    pub(in super::super) struct FixedTime {
        pub(in super::super) elapsed: Duration,
        pub(in super::super) unix: u64,
    }

    impl DeviceClock for FixedTime {
        fn elapsed(&self) -> Duration {
            self.elapsed
        }
        fn unix_seconds(&self) -> u64 {
            self.unix
        }
    }

    fn check(seconds: u64, expected: (u64, u8, u8, u8), clock: (u8, u8, u8)) {
        let m = CalendarTime::from_unix(seconds);
        assert_eq!((m.year, m.month, m.day, m.weekday), expected, "{seconds}");
        assert_eq!((m.hour, m.minute, m.second), clock, "{seconds}");
    }

    #[test]
    fn dates() {
        check(0, (1970, 1, 1, 5), (0, 0, 0));
        check(951_782_399, (2000, 2, 28, 2), (23, 59, 59));
        check(951_782_400, (2000, 2, 29, 3), (0, 0, 0));
        check(1_709_164_800, (2024, 2, 29, 5), (0, 0, 0));
        check(1_735_689_599, (2024, 12, 31, 3), (23, 59, 59));
        check(4_107_542_400, (2100, 3, 1, 2), (0, 0, 0));
    }

    #[test]
    fn the_end_of_time_is_a_date_too() {
        let m = CalendarTime::from_unix(u64::MAX);
        assert!((1..=12).contains(&m.month) && (1..=31).contains(&m.day));
    }
}
