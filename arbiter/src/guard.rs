//! Against guessing cookies: wrong ones are counted, and too many in a short
//! time cost the vCPU its place on the core for a while.

/// How many wrong cookies a vCPU may present, and what too many cost. Times
/// are in the caller's ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuardLimits {
    /// Wrong cookies that are free of charge in a row.
    pub burst: u32,
    /// One is forgiven after this time.
    pub forgive_after: u64,
    /// The first penalty; each further one is twice as long.
    pub first_penalty: u64,
    /// The longest penalty.
    pub longest_penalty: u64,
}

impl GuardLimits {
    /// 16 wrong cookies, one forgiven each 100 ms; penalties from 10 ms to 1 s.
    pub const fn with_ticks_per_ms(ticks_per_ms: u64) -> Self {
        GuardLimits {
            burst: 16,
            forgive_after: 100 * ticks_per_ms,
            first_penalty: 10 * ticks_per_ms,
            longest_penalty: 1000 * ticks_per_ms,
        }
    }
}

/// The count of one vCPU's wrong cookies.
#[derive(Clone, Copy, Debug)]
pub struct Guard {
    limits: GuardLimits,
    total: u64,
    /// Wrong cookies that are not forgiven.
    open: u32,
    /// Up to when they have been forgiven.
    since: u64,
    penalties: u32,
    barred_until: Option<u64>,
}

impl Guard {
    /// No wrong cookie yet.
    pub const fn new(limits: GuardLimits) -> Self {
        Guard {
            limits,
            total: 0,
            open: 0,
            since: 0,
            penalties: 0,
            barred_until: None,
        }
    }

    /// A wrong cookie was presented. Returns the length of the penalty, if this
    /// one brings one.
    pub fn wrong(&mut self, now: u64) -> Option<u64> {
        self.forgive(now);
        self.total = self.total.saturating_add(1);
        self.open = self.open.saturating_add(1);
        if self.open <= self.limits.burst {
            return None;
        }
        let doubled = 1_u64.checked_shl(self.penalties).unwrap_or(u64::MAX);
        let penalty = self.limits.first_penalty.saturating_mul(doubled);
        let penalty = penalty.min(self.limits.longest_penalty);
        self.penalties = self.penalties.saturating_add(1);
        self.barred_until = Some(now.saturating_add(penalty));
        Some(penalty)
    }

    fn forgive(&mut self, now: u64) {
        let each = self.limits.forgive_after.max(1);
        let forgiven = now.saturating_sub(self.since) / each;
        self.since = self.since.saturating_add(forgiven * each);
        let forgiven = u32::try_from(forgiven).unwrap_or(u32::MAX);
        self.open = self.open.saturating_sub(forgiven);
        // Time without a wrong cookie is not saved up for the next one.
        if self.open == 0 {
            self.since = now;
            self.penalties = 0;
        }
    }

    /// Wrong cookies so far.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Until when the vCPU is kept off its core; `None` if it may run at `now`.
    pub fn barred_until(&self, now: u64) -> Option<u64> {
        self.barred_until.filter(|until| now < *until)
    }
}
