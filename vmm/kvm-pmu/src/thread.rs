//! What a thread lends to the vCPU that it runs, and its kick at a deadline.

use std::sync::Arc;
use std::time::Duration;

use pmu_virt::{CorePmu, Ticks, Tsc};

use crate::error::{Errno, KickError, KvmPmuError};
use crate::sys::{KickFlag, KickGuard, KickTarget, KickTimer, check_kicks};

/// What a thread lends to the vCPU that it runs: its kicks, and the counters of
/// its core. It serves one vCPU after the other, on the thread that made it.
#[derive(Debug)]
pub struct ThreadContext {
    timer: DeadlineTimer,
    target: KickTarget,
    core: u16,
    counters: Option<Box<CorePmu>>,
    /// The VMM's own deadline.
    until: Option<Tsc>,
    bound: Option<KickGuard>,
    /// When it is next looked whether kicks still come to this crate's handler; `None`: now.
    check_at: Option<Tsc>,
    check_every: Ticks,
}

/// So often a thread looks whether somebody else has installed a handler of the signal, as
/// VMMs do that install theirs with each vCPU.
const CHECK_EVERY: Duration = Duration::from_secs(1);

impl ThreadContext {
    /// Of the calling thread, whose kicks must come to this crate's handler by now; `tsc_khz`
    /// is the TSC's frequency.
    ///
    /// # Errors
    /// [`KvmPmuError::Kick`] or [`KvmPmuError::Timer`].
    pub fn new(tsc_khz: u32) -> Result<Self, KvmPmuError> {
        check_kicks()?;
        Ok(Self {
            timer: DeadlineTimer::new(tsc_khz.max(1)).map_err(KvmPmuError::Timer)?,
            target: KickTarget::current(),
            core: 0,
            counters: None,
            until: None,
            bound: None,
            check_at: None,
            check_every: Ticks::of(CHECK_EVERY, tsc_khz.max(1)),
        })
    }

    /// Of core `number`: one that vCPUs share, or the number of the one vCPU.
    #[must_use]
    pub fn of_core(mut self, number: usize) -> Self {
        self.core = u16::try_from(number).unwrap_or(u16::MAX);
        self
    }

    /// With the counters of the core, which belong to this thread from now on. A
    /// vCPU that has a PMU is run with counters only.
    #[must_use]
    pub fn with_counters(mut self, counters: Option<Box<CorePmu>>) -> Self {
        self.counters = counters;
        self
    }

    /// The counters of the core.
    #[must_use]
    pub fn counters(&self) -> Option<&CorePmu> {
        self.counters.as_deref()
    }

    /// The counters of the core, to be changed while no guest runs.
    #[must_use]
    pub fn counters_mut(&mut self) -> Option<&mut CorePmu> {
        self.counters.as_deref_mut()
    }

    /// The counters of the core, which are this thread's no more.
    #[must_use]
    pub fn into_counters(self) -> Option<Box<CorePmu>> {
        self.counters
    }

    /// The number of the core.
    #[must_use]
    pub fn core(&self) -> u16 {
        self.core
    }

    /// The thread to kick.
    #[must_use]
    pub fn target(&self) -> KickTarget {
        self.target
    }

    /// Has the thread kicked at `until` at the latest, for a reason of the VMM's
    /// own, from the next entry on; `None`: no more.
    pub fn kick_at(&mut self, until: Option<Tsc>) {
        self.until = until;
    }

    /// A kick that nobody waits for any more has perhaps come.
    pub fn forget_kick(&mut self) {
        self.timer.forget();
    }

    /// A kick has ended or prevented a `KVM_RUN` that was entered at `entered`
    /// and left at `left`.
    #[inline]
    pub(crate) fn kicked(&mut self, entered: Option<Tsc>, left: Tsc) {
        self.timer.kicked(entered, left);
    }

    /// From now on a kick ends or prevents the `KVM_RUN` of `vcpu`.
    #[inline]
    pub(crate) fn bind(&mut self, vcpu: &Arc<KickFlag>) {
        match &self.bound {
            Some(bound) if bound.is_of(vcpu) => bound.renew(),
            _ => self.bind_anew(vcpu),
        }
    }

    #[cold]
    fn bind_anew(&mut self, vcpu: &Arc<KickFlag>) {
        // The old guard goes first, for it resets what the new one sets.
        self.bound = None;
        self.bound = Some(vcpu.bind());
    }

    /// Kicks concern no vCPU from now on.
    pub(crate) fn unbind(&mut self) {
        self.bound = None;
    }

    /// Whether kicks still come to this crate's handler, if it is time for that look.
    ///
    /// # Errors
    /// [`KickError`].
    #[inline]
    pub(crate) fn check(&mut self) -> Result<(), KickError> {
        match self.check_at {
            Some(_) => Ok(()),
            None => check_kicks(),
        }
    }

    /// Makes sure that a kick comes at `deadline`, or before.
    #[inline]
    pub(crate) fn set_deadline(&mut self, now: Tsc, deadline: Option<Tsc>) {
        self.check_at = match self.check_at {
            None => Some(now + self.check_every),
            at => at.filter(|at| now < *at),
        };
        self.timer.set(now, earliest(deadline, self.until));
    }
}

/// The first of two times.
pub(crate) fn earliest<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}

/// Turns TSC deadlines into kicks of this thread.
///
/// The timer is set again when it would fire too late, or is about to fire for a
/// deadline that has moved far away, as that of a sample does at each exit: an early
/// kick costs one exit, setting the timer at every entry would cost a system call an
/// exit.
///
/// From the timer's time to the return of `KVM_RUN` it takes the host some tens of
/// microseconds. So the timer is set for as much earlier as this took at the least
/// of late. A kick that comes before its deadline nevertheless leads to another
/// entry and a timer for the rest.
#[derive(Debug)]
struct DeadlineTimer {
    timer: KickTimer,
    tsc_khz: u32,
    /// While the timer is armed.
    armed: Option<SetTimer>,
    lateness: Lateness,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SetTimer {
    /// When it fires.
    fires: Tsc,
    /// The deadline that it was set for.
    deadline: Tsc,
}

impl DeadlineTimer {
    fn new(tsc_khz: u32) -> Result<Self, Errno> {
        Ok(Self {
            timer: KickTimer::for_this_thread()?,
            tsc_khz,
            armed: None,
            lateness: Lateness::up_to(Ticks::of(LONGEST_LEAD, tsc_khz)),
        })
    }

    /// The thread was kicked, perhaps by this timer. `CLOCK_MONOTONIC` is slewed
    /// and the TSC is not, so the timer may fire before its TSC value is reached;
    /// it is not to be relied on any more.
    fn forget(&mut self) {
        self.armed = None;
    }

    /// [`DeadlineTimer::forget`], of a kick that ended what was entered and left
    /// then.
    fn kicked(&mut self, entered: Option<Tsc>, left: Tsc) {
        if let (Some(armed), Some(entered)) = (self.armed.take(), entered)
            && entered < armed.fires
            && armed.fires < left
        {
            self.lateness.note(left - armed.fires);
        }
    }

    /// Makes sure that a kick comes at `deadline`, or before.
    #[inline]
    fn set(&mut self, now: Tsc, deadline: Option<Tsc>) {
        let Some(deadline) = deadline else { return };
        // A timer whose time has passed has fired, or is about to.
        let armed = self.armed.filter(|armed| armed.fires > now);
        let serves = |armed: &SetTimer| {
            let in_vain = deadline - armed.deadline;
            armed.deadline <= deadline && (armed.fires - now) * SOON >= in_vain
        };
        if armed.as_ref().is_some_and(serves) {
            return;
        }
        self.arm(now, deadline);
    }

    #[cold]
    fn arm(&mut self, now: Tsc, deadline: Tsc) {
        let ticks = deadline - now;
        // The guest must get on, however long the host takes.
        let ticks = ticks - self.lateness.lead().min(Ticks(ticks.0 / 2));
        self.timer.arm(ticks.duration(self.tsc_khz));
        let fires = now + ticks;
        self.armed = Some(SetTimer { fires, deadline });
    }
}

/// A timer is about to fire when this times what is left is less than its deadline has
/// moved away.
const SOON: u64 = 8;
/// No timer is set earlier than its deadline by more than this.
const LONGEST_LEAD: Duration = Duration::from_micros(250);

/// How long kicks take at the least.
#[derive(Debug)]
struct Lateness {
    longest: Ticks,
    /// The least of this window of kicks, and of the one before.
    least: [Option<Ticks>; 2],
    /// Kicks in this window.
    seen: u32,
}

impl Lateness {
    /// Kicks after which an old one is forgotten: the host may have become slower.
    const WINDOW: u32 = 64;

    fn up_to(longest: Ticks) -> Self {
        Self {
            longest,
            least: [None; 2],
            seen: 0,
        }
    }

    fn note(&mut self, ticks: Ticks) {
        if self.seen == Self::WINDOW {
            self.least = [None, self.least[0]];
            self.seen = 0;
        }
        self.seen += 1;
        self.least[0] = Some(self.least[0].map_or(ticks, |least| least.min(ticks)));
    }

    /// By how much a timer can be set earlier, so that hardly a kick comes too early;
    /// not at all until a window is full.
    fn lead(&self) -> Ticks {
        let [Some(now), Some(before)] = self.least else {
            return Ticks::default();
        };
        let Ticks(least) = now.min(before);
        Ticks(least - least / 8).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One tick a millisecond, so that nothing fires during the test.
    fn timer() -> DeadlineTimer {
        DeadlineTimer::new(1).unwrap()
    }

    fn served(timer: &DeadlineTimer) -> Option<u64> {
        timer.armed.map(|armed| armed.deadline.0)
    }

    #[test]
    fn an_earlier_kick_serves_a_later_deadline() {
        let mut timer = timer();
        timer.set(Tsc(0), Some(Tsc(1 << 20)));
        timer.set(Tsc(1), Some(Tsc(1 << 21)));
        assert_eq!(served(&timer), Some(1 << 20));
        timer.set(Tsc(2), Some(Tsc(1 << 19)));
        assert_eq!(served(&timer), Some(1 << 19));
    }

    #[test]
    fn a_timer_that_would_fire_in_vain_is_put_off() {
        let mut timer = timer();
        timer.set(Tsc(0), Some(Tsc(1 << 20)));
        // An exit each 1/64 of the distance, and the same distance from each on.
        let step = 1 << 14;
        for exit in 1..57 {
            timer.set(Tsc(exit * step), Some(Tsc(exit * step + (1 << 20))));
            assert_eq!(served(&timer), Some(1 << 20), "{exit}");
        }
        timer.set(Tsc(57 * step), Some(Tsc(57 * step + (1 << 20))));
        assert_eq!(served(&timer), Some(57 * step + (1 << 20)));
        // One that stays is waited for to the end.
        let until = 57 * step + (1 << 20);
        timer.set(Tsc(until - 1), Some(Tsc(until + 1)));
        assert_eq!(served(&timer), Some(until));
    }

    #[test]
    fn a_timer_that_fired_before_its_tsc_value_is_armed_again() {
        let mut timer = timer();
        timer.set(Tsc(0), Some(Tsc(1 << 20)));
        timer.forget();
        assert_eq!(served(&timer), None);
        timer.set(Tsc((1 << 20) - 1), Some(Tsc(1 << 20)));
        assert_eq!(served(&timer), Some(1 << 20));
    }

    #[test]
    fn the_timer_is_set_earlier_by_what_kicks_take_at_the_least() {
        const DEADLINE: u64 = 1 << 20;
        let mut timer = timer();
        timer.lateness = Lateness::up_to(Ticks(1_000));
        let fires = |timer: &DeadlineTimer| timer.armed.map(|armed| armed.fires.0);
        let mut kick = |late: u64, expected: u64| {
            timer.set(Tsc(0), Some(Tsc(DEADLINE)));
            assert_eq!(fires(&timer), Some(DEADLINE - expected), "{late}");
            let fires = DEADLINE - expected;
            timer.kicked(Some(Tsc(0)), Tsc(fires + late));
        };
        for late in 0..64 {
            kick(800 + late, 0);
        }
        kick(900, 0);
        // Of this window and the one before.
        kick(900, 700);
        kick(80, 700);
        kick(900, 70);
        for _ in 0..60 {
            kick(1_600, 70);
        }
        for _ in 0..64 {
            kick(1_600, 70);
        }
        kick(1_600, 70);
        // Never earlier than the longest lead, however slow the host has become.
        kick(1_600, 1_000);
    }

    #[test]
    fn a_near_deadline_leaves_the_guest_half_of_its_time() {
        let mut timer = timer();
        timer.lateness.least = [Some(Ticks(800)); 2];
        timer.lateness.longest = Ticks(1_000);
        timer.set(Tsc(0), Some(Tsc(100)));
        let fires = Tsc(50);
        let deadline = Tsc(100);
        assert_eq!(timer.armed, Some(SetTimer { fires, deadline }));
    }

    #[test]
    fn kicks_that_were_not_this_timers_teach_nothing() {
        let mut timer = timer();
        let check = |timer: &mut DeadlineTimer, entered: Option<u64>, left| {
            timer.set(Tsc(0), Some(Tsc(1 << 20)));
            timer.kicked(entered.map(Tsc), Tsc(left));
            assert_eq!(timer.lateness.least, [None; 2]);
        };
        // Before its time; the guest was not entered; the guest was entered after it.
        check(&mut timer, Some(0), (1 << 20) - 1);
        check(&mut timer, None, (1 << 20) + 9);
        check(&mut timer, Some((1 << 20) + 1), (1 << 20) + 9);
    }
}
