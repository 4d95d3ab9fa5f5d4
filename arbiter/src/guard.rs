//! The guard against guessing: it counts wrong cookies, and too many in a short
//! time bring a penalty.
//!
//! Firmware and kernel are locked out: their vCPU leaves its core for a while. A
//! program must not be able to stop its kernel, so the penalty for programs is that
//! the arbiter compares none of their cookies for a while. The two accounts are
//! separate: what programs guess costs the kernel nothing.

use crate::Layer;
use crate::time::{Ticks, Tsc};

/// How many wrong cookies a vCPU may present, and how long the penalties last.
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

/// A penalty with its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Penalty {
    /// The vCPU is locked out: it does not run on its core.
    LockedOut(Ticks),
    /// The arbiter compares no cookie of a program.
    Deaf(Ticks),
}

/// The wrong cookies of one vCPU, and the penalties for them.
#[derive(Clone, Copy, Debug)]
pub struct Guard {
    limits: GuardLimits,
    total: u64,
    /// Wrong cookies of firmware and kernel.
    privileged: Account,
    /// Wrong cookies of programs.
    programs: Account,
    locked_out_until: Tsc,
    deaf_until: Tsc,
}

/// The wrong cookies of some layers.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// Wrong cookies that are not forgiven yet.
    open: u32,
    /// The time up to which wrong cookies have been forgiven.
    since: Tsc,
    penalties: u32,
}

impl Guard {
    /// A guard that has seen no wrong cookie.
    pub fn new(limits: GuardLimits) -> Self {
        Guard {
            limits,
            total: 0,
            privileged: Account::default(),
            programs: Account::default(),
            locked_out_until: Tsc(0),
            deaf_until: Tsc(0),
        }
    }

    /// Counts a wrong cookie of `layer`, and returns the penalty that it brings, if
    /// any. The hypervisor's bring none: the guest is not to pay for the host's.
    pub fn wrong(&mut self, layer: Layer, now: Tsc) -> Option<Penalty> {
        self.total = self.total.saturating_add(1);
        if layer == Layer::GuestUser {
            let ticks = self.programs.wrong(&self.limits, now)?;
            self.deaf_until = now + ticks;
            return Some(Penalty::Deaf(ticks));
        }
        if !layer.is_guest() {
            return None;
        }
        let ticks = self.privileged.wrong(&self.limits, now)?;
        self.locked_out_until = now + ticks;
        Some(Penalty::LockedOut(ticks))
    }

    /// The number of wrong cookies so far. A cookie that was not compared is none of
    /// them.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The end of the lock-out of the vCPU. `None` means that it may run at `now`.
    pub fn locked_out_until(&self, now: Tsc) -> Option<Tsc> {
        Some(self.locked_out_until).filter(|until| now < *until)
    }

    /// Whether the arbiter compares no cookie of a program at `now`.
    #[inline]
    pub fn is_deaf(&self, now: Tsc) -> bool {
        now < self.deaf_until
    }
}

impl Account {
    /// Counts a wrong cookie, and returns the length of the penalty that it brings.
    fn wrong(&mut self, limits: &GuardLimits, now: Tsc) -> Option<Ticks> {
        self.forgive(limits, now);
        self.open = self.open.saturating_add(1);
        if self.open <= limits.burst {
            return None;
        }
        let doubled = 1_u64.checked_shl(self.penalties).unwrap_or(u64::MAX);
        let penalty = Ticks(limits.first_penalty.0.saturating_mul(doubled));
        self.penalties = self.penalties.saturating_add(1);
        Some(penalty.min(limits.longest_penalty))
    }

    fn forgive(&mut self, limits: &GuardLimits, now: Tsc) {
        let each = limits.forgive_after.0.max(1);
        let forgiven = (now - self.since).0 / each;
        self.since = self.since + Ticks(forgiven * each);
        let forgiven = u32::try_from(forgiven).unwrap_or(u32::MAX);
        self.open = self.open.saturating_sub(forgiven);
        // A long time without a wrong cookie is no credit for more of them.
        if self.open == 0 {
            self.since = now;
            self.penalties = 0;
        }
    }
}
