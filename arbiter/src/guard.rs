//! The guard against guessing: it counts wrong cookies, and too many in a short
//! time bring a penalty.
//!
//! Firmware and kernel are locked out: the vCPU that guesses leaves its core for a while,
//! and for longer while others are out for it, too. A program must not be able to stop its
//! kernel, so the penalty for programs is that the arbiter compares none of their cookies
//! for a while, on any vCPU. The two accounts are separate: what programs guess costs the
//! kernel nothing.

use alloc::sync::Arc;

use crate::account::GuardLimits;
use crate::time::{Ticks, Tsc};
use crate::{Layer, Phase};

/// A penalty with its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Penalty {
    /// The vCPU is locked out: it does not run on its core for so long.
    LockedOut(Ticks),
    /// The arbiter compares no cookie of a program.
    Deaf(Ticks),
}

/// The wrong cookies that one vCPU presents, and the penalties for them. All vCPUs of a
/// machine have one account of them, in its [`Phase`]: however many of them guess, they
/// are given no more guesses than one.
#[derive(Clone, Debug)]
pub struct Guard {
    limits: GuardLimits,
    total: u64,
    locked_out_until: Tsc,
    /// The latest end of its lock-outs: a later one in the account is another vCPU's.
    latest: Tsc,
    machine: Arc<Phase>,
}

impl Guard {
    /// The guard of a machine with one vCPU that has seen no wrong cookie.
    pub fn new(limits: GuardLimits) -> Self {
        Guard::of_vcpu(limits, Arc::new(Phase::new(false)))
    }

    /// The guard of one vCPU of `machine`.
    pub fn of_vcpu(limits: GuardLimits, machine: Arc<Phase>) -> Self {
        Guard {
            limits,
            total: 0,
            locked_out_until: Tsc(0),
            latest: Tsc(0),
            machine,
        }
    }

    /// Counts a wrong cookie of `layer`, and returns the penalty that it brings, if
    /// any. The hypervisor's bring none: the guest is not to pay for the host's.
    pub fn wrong(&mut self, layer: Layer, now: Tsc) -> Option<Penalty> {
        self.total = self.total.saturating_add(1);
        if layer == Layer::GuestUser {
            let ticks = self.machine.programs.wrong(&self.limits, now)?;
            self.machine.programs.penalize(ticks, Tsc::NEVER, now);
            return Some(Penalty::Deaf(ticks));
        }
        if !layer.is_guest() {
            return None;
        }
        let account = &self.machine.privileged;
        let ticks = account.wrong(&self.limits, now)?;
        let ticks = account.penalize(ticks, self.latest, now);
        self.locked_out_until = now + ticks;
        self.latest = self.latest.max(self.locked_out_until);
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
        now < self.machine.programs.until()
    }
}
