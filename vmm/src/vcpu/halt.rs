//! Halted time, in TSC ticks.

use crate::kvm::KvmVcpu;
use crate::sys::HaltStats;

/// An interval this long may well be a halt, and is asked about at once.
const LONG_NS: u64 = 200_000;
/// Guest time in shorter intervals that goes by without a question: reading the
/// statistics is a system call, which costs as much as half an exit on some
/// hosts. So at most this much halted time is told late; none is lost.
const UNASKED_NS: u64 = 1_000_000;

/// Tells how long a vCPU was halted between entry and exit.
#[derive(Debug)]
pub(super) struct HaltClock {
    stats: Option<HaltStats>,
    seen_ns: u64,
    /// Guest time since then, in ticks.
    unasked: u64,
    /// Halted ticks that were found, but not told yet.
    owed: u64,
    tsc_khz: u64,
}

impl HaltClock {
    /// `tsc_khz`: the TSC's frequency.
    pub(super) fn new(vcpu: &KvmVcpu, tsc_khz: u32) -> Self {
        let stats = match vcpu.halt_stats() {
            Ok(stats) => Some(stats),
            Err(error) => {
                log::warn!(
                    "{}: halted time counts as running time, because {error}",
                    vcpu.id()
                );
                None
            }
        };
        Self {
            stats,
            seen_ns: 0,
            // Whatever was halted before the first question belongs to nobody.
            unasked: u64::MAX,
            owed: 0,
            tsc_khz: tsc_khz.into(),
        }
    }

    /// Forgets what was halted until now: counting begins here.
    pub(super) fn begin(&mut self) {
        if self.ns(self.unasked) >= UNASKED_NS {
            self.ask();
        }
        self.owed = 0;
    }

    /// Halted ticks of an interval of `ticks` that ended just now, and of the
    /// ones before; never more than `ticks`. 0 unless something is `counting`.
    pub(super) fn passed(&mut self, ticks: u64, counting: bool) -> u64 {
        self.unasked = self.unasked.saturating_add(ticks);
        if !counting {
            return 0;
        }
        if self.ns(ticks) >= LONG_NS || self.ns(self.unasked) >= UNASKED_NS {
            self.owed = self.owed.saturating_add(self.ask());
        }
        let told = self.owed.min(ticks);
        self.owed -= told;
        told
    }

    /// The vCPU leaves its core while something is `counting`: what it was halted
    /// until now is told at the next interval.
    pub(super) fn leave(&mut self, counting: bool) {
        if counting {
            self.owed = self.owed.saturating_add(self.ask());
        }
    }

    /// The vCPU comes back to a core, where it was halted since [`Self::leave`]:
    /// that time belongs to no interval.
    pub(super) fn come_back(&mut self, counting: bool) {
        match counting {
            true => {
                self.ask();
            }
            false => self.unasked = u64::MAX,
        }
    }

    fn ns(&self, ticks: u64) -> u64 {
        let ns = u128::from(ticks) * 1_000_000 / u128::from(self.tsc_khz);
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    /// Ticks halted since the last question.
    fn ask(&mut self) -> u64 {
        self.unasked = 0;
        let Some(Ok(now)) = self.stats.as_mut().map(HaltStats::halted_ns) else {
            return 0;
        };
        let ns = now.wrapping_sub(self.seen_ns);
        self.seen_ns = now;
        let ticks = u128::from(ns) * u128::from(self.tsc_khz) / 1_000_000;
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }
}
