//! Time between entry and exit in which the vCPU did not run, in TSC ticks:
//! it was halted, or the host ran something else on its CPU.
//!
//! Two sources know it, and both are asked rarely, for each is a system call:
//! KVM's statistics (halted, polling for the wake-up included) and the CPU time
//! of the thread. What is off the CPU and not halted was preempted.

use std::time::Duration;

use kvm_ioctls::VcpuFd;
use pmu_virt::Ticks;

use crate::error::VcpuId;
use crate::sys::{HaltStats, rdtsc, thread_cpu_time};

/// An interval this long may well be a halt or a preemption, and is asked about
/// at once.
const LONG_NS: u64 = 200_000;
/// Counted time in shorter intervals that goes by without a question. So at most
/// this much is reported late; none is lost.
const UNASKED_NS: u64 = 1_000_000;
/// Time outside of counted intervals after which a question at the entry keeps
/// apart what was off the CPU there: device emulation that waited, guest time
/// that nobody counted, other vCPUs.
const AWAY_NS: u64 = 100_000;
/// The CPU clock and the TSC cannot be read at the same instant. As much of a
/// difference in the wrong direction is kept to cancel one in the other.
const SLACK_NS: u64 = 10_000;

/// What the host knows at one instant; only differences mean something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Moment {
    /// TSC.
    tsc: u64,
    /// CPU time of the thread, in nanoseconds.
    cpu_ns: u64,
    /// Halted and off the CPU, in nanoseconds.
    waited_ns: u64,
    /// Halted on the CPU: polling for the wake-up, in nanoseconds.
    polled_ns: u64,
}

/// A source of [`Moment`]s.
trait TimeSource {
    fn now(&mut self) -> Moment;
}

/// This thread, and KVM's statistics of the vCPU.
#[derive(Debug)]
pub(crate) struct HostTime {
    stats: Option<HaltStats>,
}

impl TimeSource for HostTime {
    fn now(&mut self) -> Moment {
        let halted = self.stats.as_mut().and_then(|stats| stats.halted().ok());
        let halted = halted.unwrap_or_default();
        Moment {
            waited_ns: nanos(halted.waited),
            polled_ns: nanos(halted.polled),
            tsc: rdtsc(),
            cpu_ns: nanos(thread_cpu_time()),
        }
    }
}

/// Measures how long a vCPU did not run between entry and exit.
#[derive(Debug)]
pub(crate) struct HaltClock<S = HostTime> {
    source: S,
    tsc_khz: u32,
    /// [`LONG_NS`], [`UNASKED_NS`] and [`AWAY_NS`] in ticks.
    long: u64,
    longest_unasked: u64,
    long_away: u64,
    /// The last question; `None` before the first one of a stay on a thread.
    last: Option<Moment>,
    /// Ticks in counted intervals since then.
    unasked: u64,
    /// TSC at the end of the last counted interval, or at a later question.
    left: u64,
    /// Guest ticks since then, in intervals that were not counted.
    uncounted: u64,
    /// Negative: the CPU clock is ahead of the TSC by this much.
    surplus: i64,
    /// Ticks that were found, but not reported yet.
    owed: u64,
}

impl HaltClock {
    /// `tsc_khz`: the TSC's frequency.
    pub(crate) fn new(fd: &VcpuFd, id: VcpuId, tsc_khz: u32) -> Self {
        let stats = match HaltStats::open(fd) {
            Ok(stats) => Some(stats),
            Err(error) => {
                log::warn!(
                    "{id}: time in which KVM polls for a halted vCPU's wake-up counts as running \
                     time, because {error}"
                );
                None
            }
        };
        Self::with_source(HostTime { stats }, tsc_khz)
    }
}

#[allow(
    private_bounds,
    reason = "the run loop uses the default, tests their own"
)]
impl<S: TimeSource> HaltClock<S> {
    fn with_source(source: S, tsc_khz: u32) -> Self {
        Self {
            source,
            tsc_khz,
            long: ticks(LONG_NS, tsc_khz),
            longest_unasked: ticks(UNASKED_NS, tsc_khz),
            long_away: ticks(AWAY_NS, tsc_khz),
            last: None,
            unasked: 0,
            left: 0,
            uncounted: 0,
            surplus: 0,
            owed: 0,
        }
    }

    /// The vCPU leaves its thread at TSC `now`; another one may run it on, and
    /// with it comes another CPU clock. What it lost until now is reported after
    /// its next interval.
    pub(crate) fn leave(&mut self, now: u64, counting: bool) {
        if counting && self.last.is_some() {
            let away = now.saturating_sub(self.left);
            self.ask(if away >= self.long_away { away } else { 0 });
        }
        self.last = None;
    }

    /// The guest is about to be entered, at TSC `now`, and something counts;
    /// `begins` if nothing did in the interval before.
    #[inline]
    pub(crate) fn entering(&mut self, now: u64, begins: bool) {
        if self.last.is_none() || now.saturating_sub(self.left) >= self.long_away {
            self.enter_anew(now);
        }
        if begins {
            self.owed = 0;
        }
    }

    /// The first entry of a stay on a thread, or one after a long time outside.
    #[cold]
    fn enter_anew(&mut self, now: u64) {
        if self.last.is_none() {
            self.last = Some(self.source.now());
            self.surplus = 0;
        } else {
            self.ask(now.saturating_sub(self.left));
        }
        self.restart(now);
    }

    /// Ticks of the interval from TSC `entered` to `left` in which the vCPU did
    /// not run, and of the intervals before; never more than the interval has.
    /// 0 unless something is `counting`.
    #[inline]
    pub(crate) fn passed(&mut self, entered: u64, left: u64, counting: bool) -> u64 {
        let ticks = left.saturating_sub(entered);
        if !counting {
            self.uncounted = self.uncounted.saturating_add(ticks);
            return 0;
        }
        self.unasked = self.unasked.saturating_add(ticks);
        self.uncounted = 0;
        self.left = left;
        if ticks >= self.long || self.unasked >= self.longest_unasked {
            self.ask(0);
            self.unasked = 0;
        }
        let reported = self.owed.min(ticks);
        self.owed -= reported;
        reported
    }

    fn restart(&mut self, now: u64) {
        self.unasked = 0;
        self.uncounted = 0;
        self.left = now;
    }

    /// Finds what was lost since the last question. Time `away` from counted
    /// intervals takes its share first; what is then left was lost in them.
    #[cold]
    fn ask(&mut self, away: u64) {
        let now = self.source.now();
        let Some(last) = self.last.replace(now) else {
            return;
        };
        let passed = |now: u64, last: u64| self.ticks(now.saturating_sub(last));
        let waited = passed(now.waited_ns, last.waited_ns);
        let polled = passed(now.polled_ns, last.polled_ns);
        let on_cpu = passed(now.cpu_ns, last.cpu_ns);
        let halted = waited
            .saturating_add(polled)
            .saturating_sub(self.uncounted.min(away));
        // A halt that begins or ends between two of the reads, or the CPU time
        // of going to sleep, makes this negative by a little.
        let span = now.tsc.saturating_sub(last.tsc);
        let mut preempted = signed(span) - signed(on_cpu) - signed(waited);
        preempted -= preempted.clamp(0, signed(away));
        self.surplus = (self.surplus + preempted).max(-signed(self.ticks(SLACK_NS)));
        let preempted = u64::try_from(self.surplus).unwrap_or(0);
        self.surplus = self.surplus.min(0);
        let lost = halted.saturating_add(preempted).min(self.unasked);
        self.owed = self.owed.saturating_add(lost);
    }

    fn ticks(&self, ns: u64) -> u64 {
        ticks(ns, self.tsc_khz)
    }
}

fn ticks(ns: u64, tsc_khz: u32) -> u64 {
    Ticks::of(Duration::from_nanos(ns), tsc_khz).0
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Spans stay far below 2^62 ticks, a lifetime of any TSC.
fn signed(ticks: u64) -> i64 {
    i64::try_from(ticks).unwrap_or(i64::MAX).min(1 << 62)
}

#[cfg(test)]
mod tests;
