//! Against guessing cookies: wrong ones are counted, and too many in a short
//! time have a penalty.
//!
//! Firmware and kernel pay with the vCPU's place on its core. A program must not
//! be able to take that from its kernel, so for programs the penalty is that
//! their cookies are not compared for a while. Each has an account of its own:
//! what programs guess costs the kernel nothing.

use crate::Layer;

/// How many wrong cookies a vCPU may present, and how long too many cost. Times
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

/// A penalty, and how long it lasts in the caller's ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Penalty {
    /// The vCPU is kept off its core.
    LockedOut(u64),
    /// No cookie of a program is compared.
    Deaf(u64),
}

/// The count of one vCPU's wrong cookies.
#[derive(Clone, Copy, Debug)]
pub struct Guard {
    limits: GuardLimits,
    total: u64,
    /// Of firmware and kernel.
    privileged: Account,
    /// Of programs.
    programs: Account,
    locked_out_until: u64,
    deaf_until: u64,
}

/// The wrong cookies of some layers.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// Wrong cookies that are not forgiven.
    open: u32,
    /// Up to when they have been forgiven.
    since: u64,
    penalties: u32,
}

impl Guard {
    /// No wrong cookie yet.
    pub fn new(limits: GuardLimits) -> Self {
        Guard {
            limits,
            total: 0,
            privileged: Account::default(),
            programs: Account::default(),
            locked_out_until: 0,
            deaf_until: 0,
        }
    }

    /// Code of `layer` presented a wrong cookie. Returns the penalty, if this one
    /// brings one.
    pub fn wrong(&mut self, layer: Layer, now: u64) -> Option<Penalty> {
        self.total = self.total.saturating_add(1);
        if layer == Layer::GuestUser {
            let ticks = self.programs.wrong(&self.limits, now)?;
            self.deaf_until = now.saturating_add(ticks);
            return Some(Penalty::Deaf(ticks));
        }
        let ticks = self.privileged.wrong(&self.limits, now)?;
        self.locked_out_until = now.saturating_add(ticks);
        Some(Penalty::LockedOut(ticks))
    }

    /// Wrong cookies so far; what was not compared is not among them.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Until when the vCPU is kept off its core; `None` if it may run at `now`.
    pub fn locked_out_until(&self, now: u64) -> Option<u64> {
        Some(self.locked_out_until).filter(|until| now < *until)
    }

    /// Whether no cookie of a program is compared at `now`.
    #[inline]
    pub fn is_deaf(&self, now: u64) -> bool {
        now < self.deaf_until
    }
}

impl Account {
    /// The length of the penalty, if this one brings one.
    fn wrong(&mut self, limits: &GuardLimits, now: u64) -> Option<u64> {
        self.forgive(limits, now);
        self.open = self.open.saturating_add(1);
        if self.open <= limits.burst {
            return None;
        }
        let doubled = 1_u64.checked_shl(self.penalties).unwrap_or(u64::MAX);
        let penalty = limits.first_penalty.saturating_mul(doubled);
        self.penalties = self.penalties.saturating_add(1);
        Some(penalty.min(limits.longest_penalty))
    }

    fn forgive(&mut self, limits: &GuardLimits, now: u64) {
        let each = limits.forgive_after.max(1);
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
}
