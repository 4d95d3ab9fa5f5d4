//! The timer of a local APIC (SDM 3A, 11.5.4): one-shot, periodic, TSC deadline.

use serde::{Deserialize, Serialize};

use crate::time::Rate;

/// Bits 18:17 of its LVT entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum TimerMode {
    OneShot,
    Periodic,
    Deadline,
    /// 11b: nothing counts.
    Reserved,
}

impl TimerMode {
    pub(crate) fn of(lvt: u32) -> Self {
        match lvt >> 17 & 3 {
            0 => Self::OneShot,
            1 => Self::Periodic,
            2 => Self::Deadline,
            _ => Self::Reserved,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Armed {
    No,
    /// It reaches 0 when so many counts are complete since then.
    Counting {
        since: u64,
        zero_at: u64,
    },
    Deadline(u64),
}

/// What a timer came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expiry {
    None,
    /// Once or, of a periodic one that nobody looked at, more often.
    Expired,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ApicTimer {
    rate: Rate,
    mode: TimerMode,
    divide: u32,
    initial: u32,
    armed: Armed,
}

impl ApicTimer {
    pub(crate) fn new(rate: Rate) -> Self {
        Self {
            rate,
            mode: TimerMode::OneShot,
            divide: 0,
            initial: 0,
            armed: Armed::No,
        }
    }

    pub(crate) fn reset(&mut self) {
        self.mode = TimerMode::OneShot;
        self.divide = 0;
        self.initial = 0;
        self.armed = Armed::No;
    }

    /// The modes exclude each other: a change disarms.
    pub(crate) fn set_mode(&mut self, mode: TimerMode) {
        if mode != self.mode {
            self.mode = mode;
            self.initial = 0;
            self.armed = Armed::No;
        }
    }

    /// Initial count. In TSC deadline mode it is ignored.
    pub(crate) fn set_initial(&mut self, count: u32, now: u64) {
        if !matches!(self.mode, TimerMode::OneShot | TimerMode::Periodic) {
            return;
        }
        self.initial = count;
        self.armed = Self::counting(count, now);
    }

    fn counting(count: u32, now: u64) -> Armed {
        match count {
            0 => Armed::No,
            _ => Armed::Counting {
                since: now,
                zero_at: count.into(),
            },
        }
    }

    pub(crate) fn initial(&self) -> u32 {
        self.initial
    }

    pub(crate) fn current(&self, now: u64) -> u32 {
        match self.armed {
            Armed::Counting { since, zero_at } => {
                let left = zero_at.saturating_sub(self.counts(now.saturating_sub(since)));
                u32::try_from(left).unwrap_or(u32::MAX)
            }
            _ => 0,
        }
    }

    pub(crate) fn divide(&self) -> u32 {
        self.divide
    }

    /// What is left is counted at the new pace.
    pub(crate) fn set_divide(&mut self, register: u32, now: u64) {
        let left = self.current(now);
        self.divide = register & 0xb;
        if let Armed::Counting { .. } = self.armed {
            self.armed = Self::counting(left, now);
        }
    }

    /// How often the clock is halved: bits 3, 1 and 0 are 0 for by 2 to 6 for by 128; 7 is by 1.
    fn shift(&self) -> u32 {
        ((self.divide >> 1 & 4 | self.divide & 3) + 1) & 7
    }

    fn counts(&self, ticks: u64) -> u64 {
        self.rate.cycles(ticks) >> self.shift()
    }

    /// `IA32_TSC_DEADLINE`; 0 disarms. In another mode it is ignored.
    pub(crate) fn set_deadline(&mut self, deadline: u64) {
        if self.mode == TimerMode::Deadline {
            self.armed = match deadline {
                0 => Armed::No,
                _ => Armed::Deadline(deadline),
            };
        }
    }

    pub(crate) fn deadline(&self) -> u64 {
        match self.armed {
            Armed::Deadline(deadline) => deadline,
            _ => 0,
        }
    }

    /// When it expires next.
    pub(crate) fn next(&self) -> Option<u64> {
        match self.armed {
            Armed::No => None,
            Armed::Counting { since, zero_at } => {
                let cycles = zero_at.checked_mul(1 << self.shift())?;
                since.checked_add(self.rate.ticks(cycles)?)
            }
            Armed::Deadline(deadline) => Some(deadline),
        }
    }

    /// Goes on to `now`; what is next lies behind that.
    pub(crate) fn advance(&mut self, now: u64) -> Expiry {
        if self.next().is_none_or(|next| next > now) {
            return Expiry::None;
        }
        self.armed = match (self.mode, &self.armed) {
            (TimerMode::Periodic, &Armed::Counting { since, zero_at }) => {
                let beyond = self
                    .counts(now.saturating_sub(since))
                    .saturating_sub(zero_at);
                let period = u64::from(self.initial.max(1));
                let periods = beyond / period + 1;
                Armed::Counting {
                    since,
                    zero_at: zero_at.saturating_add(periods.saturating_mul(period)),
                }
            }
            _ => Armed::No,
        };
        Expiry::Expired
    }
}
