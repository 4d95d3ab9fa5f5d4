//! Time between entry and exit in which the vCPU did not run, in TSC ticks:
//! it was halted, or the host ran something else on its CPU.
//!
//! Two sources know it, and both are asked rarely, for each is a system call:
//! KVM's statistics (halted, polling for the wake-up included) and the CPU time
//! of the thread. What is off the CPU and not halted was preempted.

use std::time::Duration;

use pmu_virt::{Ticks, Tsc};

use crate::sys::{HaltStats, thread_cpu_time};
use crate::time;
use crate::vcpu::KvmVcpu;

/// An interval this long may well be a halt or a preemption, and is asked about
/// at once.
const LONG: Duration = Duration::from_micros(200);
/// Counted time in shorter intervals that goes by without a question. So at most
/// this much is reported late; none is lost.
const UNASKED: Duration = Duration::from_millis(1);
/// Time outside of counted intervals after which a question at the entry keeps
/// apart what was off the CPU there: device emulation that waited, guest time
/// that nobody counted, other vCPUs.
const AWAY: Duration = Duration::from_micros(100);
/// The CPU clock and the TSC cannot be read at the same instant. As much of a
/// difference in the wrong direction is kept to cancel one in the other.
const SLACK: Duration = Duration::from_micros(10);

/// What the host knows at one instant; only differences mean something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Moment {
    tsc: Tsc,
    /// CPU time of the thread.
    cpu: Duration,
    /// Halted and off the CPU.
    waited: Duration,
    /// Halted on the CPU: polling for the wake-up.
    polled: Duration,
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
            waited: halted.waited,
            polled: halted.polled,
            tsc: time::now(),
            cpu: thread_cpu_time(),
        }
    }
}

/// Measures how long a vCPU did not run between entry and exit.
#[derive(Debug)]
pub(crate) struct HaltClock<S = HostTime> {
    source: S,
    tsc_khz: u32,
    /// [`LONG`], [`UNASKED`] and [`AWAY`].
    long: Ticks,
    longest_unasked: Ticks,
    long_away: Ticks,
    /// The last question; `None` before the first one of a stay on a thread.
    last: Option<Moment>,
    /// Ticks in counted intervals since then.
    unasked: Ticks,
    /// The end of the last counted interval, or a later question.
    left: Tsc,
    /// Guest ticks since then, in intervals that were not counted.
    uncounted: Ticks,
    /// Ticks since the last question that are in no interval: the thread was off the
    /// CPU on its way into the guest.
    outside: Ticks,
    /// Negative: the CPU clock is ahead of the TSC by this much.
    surplus: i64,
    /// Ticks that were found, but not reported yet.
    owed: Ticks,
}

impl HaltClock {
    /// `tsc_khz`: the TSC's frequency.
    pub(crate) fn new(vcpu: &KvmVcpu, tsc_khz: u32) -> Self {
        let stats = match HaltStats::open(vcpu) {
            Ok(stats) => Some(stats),
            Err(error) => {
                let id = vcpu.id();
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
            long: Ticks::of(LONG, tsc_khz),
            longest_unasked: Ticks::of(UNASKED, tsc_khz),
            long_away: Ticks::of(AWAY, tsc_khz),
            last: None,
            unasked: Ticks::default(),
            left: Tsc::default(),
            uncounted: Ticks::default(),
            outside: Ticks::default(),
            surplus: 0,
            owed: Ticks::default(),
        }
    }

    /// The vCPU leaves its thread; another one may run it on, and with it comes another
    /// CPU clock. What it lost until now is reported after its next interval.
    pub(crate) fn leave(&mut self, counting: bool) {
        if counting && self.last.is_some() {
            self.ask();
        }
        self.last = None;
    }

    /// The guest is about to be entered, at `now`, and something counts;
    /// `begins` if nothing did in the interval before.
    #[inline]
    pub(crate) fn entering(&mut self, now: Tsc, begins: bool) {
        if self.last.is_none() || now - self.left >= self.long_away {
            self.enter_anew(now);
        }
        if begins {
            self.owed = Ticks::default();
        }
    }

    /// The first entry of a stay on a thread, or one after a long time outside.
    #[cold]
    fn enter_anew(&mut self, now: Tsc) {
        if self.last.is_none() {
            self.last = Some(self.source.now());
            self.surplus = 0;
        } else {
            self.ask();
        }
        self.restart(now);
    }

    /// Ticks of the interval from `entered` to `left` in which the vCPU did
    /// not run, and of the intervals before; never more than the interval has.
    /// 0 unless something is `counting`.
    #[inline]
    pub(crate) fn passed(&mut self, entered: Tsc, left: Tsc, counting: bool) -> Ticks {
        let ticks = left - entered;
        if !counting {
            self.uncounted += ticks;
            return Ticks::default();
        }
        self.outside += self.if_long(entered - self.left);
        self.unasked += ticks;
        self.uncounted = Ticks::default();
        self.left = left;
        if ticks >= self.long || self.unasked >= self.longest_unasked {
            self.ask();
            self.unasked = Ticks::default();
        }
        let reported = self.owed.min(ticks);
        self.owed = self.owed - reported;
        reported
    }

    fn restart(&mut self, now: Tsc) {
        self.unasked = Ticks::default();
        self.uncounted = Ticks::default();
        self.outside = Ticks::default();
        self.left = now;
    }

    /// Time outside of counted intervals, if it was long enough to have been spent off
    /// the CPU.
    fn if_long(&self, away: Ticks) -> Ticks {
        if away >= self.long_away {
            away
        } else {
            Ticks::default()
        }
    }

    /// Finds what was lost since the last question. Time away from counted intervals
    /// takes its share first, also that between the last one and the question itself;
    /// what is then left was lost in them.
    #[cold]
    fn ask(&mut self) {
        let now = self.source.now();
        let away = self.if_long(now.tsc - self.left) + std::mem::take(&mut self.outside);
        let Some(last) = self.last.replace(now) else {
            return;
        };
        let passed =
            |now: Duration, last: Duration| Ticks::of(now.saturating_sub(last), self.tsc_khz);
        let waited = passed(now.waited, last.waited);
        let polled = passed(now.polled, last.polled);
        let on_cpu = passed(now.cpu, last.cpu);
        let halted = waited + polled - self.uncounted.min(away);
        // A halt that begins or ends between two of the reads, or the CPU time
        // of going to sleep, makes this negative by a little.
        let span = now.tsc - last.tsc;
        let mut preempted = signed(span) - signed(on_cpu) - signed(waited);
        preempted -= preempted.clamp(0, signed(away));
        self.surplus = (self.surplus + preempted).max(-signed(Ticks::of(SLACK, self.tsc_khz)));
        let preempted = Ticks(u64::try_from(self.surplus).unwrap_or(0));
        self.surplus = self.surplus.min(0);
        self.owed += (halted + preempted).min(self.unasked);
    }
}

/// Spans stay far below 2^62 ticks, a lifetime of any TSC.
fn signed(Ticks(ticks): Ticks) -> i64 {
    i64::try_from(ticks).unwrap_or(i64::MAX).min(1 << 62)
}

#[cfg(test)]
mod tests;
