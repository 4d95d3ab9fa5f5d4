//! Halted time, in TSC ticks.

use crate::kvm::KvmVcpu;
use crate::sys::HaltStats;

/// Intervals shorter than this are not asked about: reading the statistics
/// costs three system calls, and a vCPU that halts and wakes within so short a
/// time hides at most this much.
const WORTH_ASKING_NS: u64 = 20_000;

/// Tells how long a vCPU was halted between entry and exit.
#[derive(Debug)]
pub(super) struct HaltClock {
    stats: Option<HaltStats>,
    seen_ns: u64,
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
            tsc_khz: tsc_khz.into(),
        }
    }

    /// Forgets what was halted until now: counting begins here.
    pub(super) fn begin(&mut self) {
        if let Some(Ok(now)) = self.stats.as_ref().map(HaltStats::halted_ns) {
            self.seen_ns = now;
        }
    }

    /// Halted ticks of an interval of `ticks` that ended just now.
    pub(super) fn halted(&mut self, ticks: u64) -> u64 {
        if ticks.saturating_mul(1_000_000) / self.tsc_khz < WORTH_ASKING_NS {
            return 0;
        }
        let Some(Ok(now)) = self.stats.as_ref().map(HaltStats::halted_ns) else {
            return 0;
        };
        let ns = now.wrapping_sub(self.seen_ns);
        self.seen_ns = now;
        let halted = u128::from(ns) * u128::from(self.tsc_khz) / 1_000_000;
        u64::try_from(halted).unwrap_or(u64::MAX).min(ticks)
    }
}
