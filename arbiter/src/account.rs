//! Wrong cookies of a machine that are not forgiven yet, counted for all its vCPUs
//! together: a cookie may be the same on each, and who guesses may go from one to the next.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::time::{Ticks, Tsc};

/// How many wrong cookies a machine may present, and how long the penalties last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuardLimits {
    /// Wrong cookies in a row that bring no penalty.
    pub burst: u32,
    /// The time after which one wrong cookie is forgiven.
    pub forgive_after: Ticks,
    /// The length of the first penalty. Each further one is twice as long.
    pub first_penalty: Ticks,
    /// The length that no penalty exceeds.
    pub longest_penalty: Ticks,
}

impl GuardLimits {
    /// The usual limits: 16 wrong cookies, one forgiven each 100 ms, and penalties
    /// from 10 ms to 1 s.
    pub const fn with_ticks_per_ms(ticks_per_ms: u64) -> Self {
        GuardLimits {
            burst: 16,
            forgive_after: Ticks(100 * ticks_per_ms),
            first_penalty: Ticks(10 * ticks_per_ms),
            longest_penalty: Ticks(1000 * ticks_per_ms),
        }
    }
}

/// The wrong cookies of some layers of a machine.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// The time at which all of them will be forgiven: a leaky bucket, which each fills by
    /// the time that forgiving takes.
    forgiven_at: AtomicU64,
    /// Penalties since all had been forgiven.
    penalties: AtomicU32,
    /// The end of the last penalty.
    until: AtomicU64,
}

impl Account {
    pub(crate) const fn new() -> Self {
        Account {
            forgiven_at: AtomicU64::new(0),
            penalties: AtomicU32::new(0),
            until: AtomicU64::new(0),
        }
    }

    /// Counts a wrong cookie, and returns the length of the penalty that it brings.
    pub(crate) fn wrong(&self, limits: &GuardLimits, now: Tsc) -> Option<Ticks> {
        let each = limits.forgive_after.0.max(1);
        // A long time without a wrong cookie is no credit for more of them.
        let fill = |at: u64| Some(at.max(now.0).saturating_add(each));
        let before = self
            .forgiven_at
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, fill)
            .unwrap_or_default();
        let open = before.saturating_sub(now.0).div_ceil(each);
        if open == 0 {
            self.penalties.store(0, Ordering::Release);
        }
        if open < u64::from(limits.burst) {
            return None;
        }
        let doubled = |penalties: u32| Some(penalties.saturating_add(1));
        let earlier = self
            .penalties
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, doubled)
            .unwrap_or_default();
        let doubled = 1_u64.checked_shl(earlier).unwrap_or(u64::MAX);
        let penalty = Ticks(limits.first_penalty.0.saturating_mul(doubled));
        Some(penalty.min(limits.longest_penalty))
    }

    /// A penalty of this length begins now, or behind those of others: `own` is the end of
    /// the caller's last one. Returns how long it is until its end.
    pub(crate) fn penalize(&self, penalty: Ticks, own: Tsc, now: Tsc) -> Ticks {
        let length = |until: u64| {
            let others = if until > own.0 { until } else { 0 };
            Tsc(others) - now + penalty
        };
        let later = |until: u64| Some(until.max((now + length(until)).0));
        let before = self
            .until
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, later)
            .unwrap_or_default();
        length(before)
    }

    /// The end of the last penalty.
    pub(crate) fn until(&self) -> Tsc {
        Tsc(self.until.load(Ordering::Acquire))
    }
}
