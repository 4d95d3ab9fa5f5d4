//! The time of a context, and the switches of event sets that it brings.

use pmu_model::{Nanos, Ticks, Tsc};

use super::AttachedContext;
use crate::slot_bank::SlotBank;

/// TSC ticks as nanoseconds. What a division leaves is kept for the next one,
/// so that the sum never drifts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TickClock {
    /// Of a nanosecond, in parts of `tsc_khz`.
    rest: u64,
}

/// Ticks of a TSC of one kHz in a nanosecond, inverted.
const NS_PER_MS: u128 = 1_000_000;

impl TickClock {
    /// Nanoseconds of `ticks` more.
    pub(crate) fn pass(&mut self, ticks: Ticks, tsc_khz: u32) -> Nanos {
        let khz = u128::from(tsc_khz.max(1));
        let all = u128::from(ticks.0) * NS_PER_MS + u128::from(self.rest);
        self.rest = u64::try_from(all % khz).unwrap_or(0);
        Nanos(u64::try_from(all / khz).unwrap_or(u64::MAX))
    }
}

/// Ticks that it takes for `time` to have passed.
pub(super) fn ticks(time: Nanos, tsc_khz: u32) -> Ticks {
    let ticks = (u128::from(time.0) * u128::from(tsc_khz.max(1))).div_ceil(NS_PER_MS);
    Ticks(u64::try_from(ticks).unwrap_or(u64::MAX))
}

/// Room has to last so long before a preempted context is restored: a guest's
/// driver stops its counters for a moment in each interrupt.
const RESTORE_AFTER: Nanos = Nanos(1_000_000);

/// An idle vCPU is left alone for so long at most.
const MAX_PATIENCE: Nanos = Nanos(10_000_000);

/// An interval was halted if it ran for no more than one part in so many.
const HALTED_PARTS: u64 = 16;

/// Patience after an interval in which the vCPU ran and was halted for so long.
/// A deadline is told in the vCPU's time but comes in wall time: that of a vCPU
/// which only halts would come again and again, and find nothing to do. `due`: what
/// was asked for without patience.
fn patience_after(patience: Nanos, due: Nanos, ran: Nanos, halted: Nanos) -> Nanos {
    if ran.0 > halted.0 / HALTED_PARTS {
        Nanos(0)
    } else if halted == Nanos(0) {
        patience
    } else {
        let asked = patience.max(due);
        (asked * 2).min(MAX_PATIENCE)
    }
}

impl AttachedContext {
    /// Its vCPU was entered and left.
    pub(crate) fn note_interval(&mut self, ran: Nanos, halted: Nanos) {
        let due = self.context.switch_due().unwrap_or_default();
        self.patience = patience_after(self.patience, due, ran, halted);
    }

    /// The time of ticks in which the vCPU ran.
    pub(crate) fn run_time(&mut self, ticks: Ticks, tsc_khz: u32) -> Nanos {
        self.clock.pass(ticks, tsc_khz)
    }

    /// A core's context: the guest is entered, and time until then was not idle
    /// beyond what it was told.
    pub(crate) fn core_enters(&mut self, tsc: Tsc, tsc_khz: u32) {
        let time = self.wall_time(tsc, tsc_khz);
        let time = time - std::mem::take(&mut self.idle);
        self.pass(time);
    }

    /// The same when the guest was left. True if that has brought a switch of sets.
    pub(crate) fn core_leaves(
        &mut self,
        tsc: Tsc,
        halted: Nanos,
        tsc_khz: u32,
        bank: &mut SlotBank,
    ) -> bool {
        let all = self.wall_time(tsc, tsc_khz);
        let halted = halted.min(all);
        self.advance(all - halted, halted, bank)
    }

    /// A core's context: nobody ran for so long. True as above.
    pub(crate) fn core_idles(&mut self, time: Nanos, bank: &mut SlotBank) -> bool {
        let switched = self.advance(Nanos(0), time, bank);
        self.idle += time;
        switched
    }

    /// TSC at which a core's context has something to do.
    pub(crate) fn core_due(&self, tsc_khz: u32) -> Option<Tsc> {
        let due = self.due_in(tsc_khz)?;
        Some(self.until? + due)
    }

    /// Time since it was asked last.
    fn wall_time(&mut self, tsc: Tsc, tsc_khz: u32) -> Nanos {
        let since = self.until.replace(tsc).unwrap_or(tsc);
        self.clock.pass(tsc - since, tsc_khz)
    }

    /// Time passes: some in which a vCPU ran, and some in which nothing did. The
    /// switches of sets that are due take place: true if there were any.
    pub(crate) fn advance(&mut self, ran: Nanos, idle: Nanos, bank: &mut SlotBank) -> bool {
        let all = ran + idle;
        if self.blind.is_none() && self.context.switch_due().is_some_and(|due| due <= all) {
            // Until now events were those of the set that was active.
            self.settle(bank);
        }
        self.pass(ran);
        if idle > Nanos(0) {
            self.pass_time(idle, false);
        }
        self.switch_if_due()
    }

    /// The set's time is up; not while an overflow of it waits to be handled.
    pub(super) fn switch_if_due(&mut self) -> bool {
        let due = self.blind.is_none() && self.context.switch_due() == Some(Nanos(0));
        if due {
            self.context.expire();
        }
        due
    }

    /// Time passes in which a vCPU ran, or the VMM worked for one. A switch that
    /// is due does not take place yet.
    pub(crate) fn pass(&mut self, time: Nanos) {
        if self.blind.is_some() || !self.missing.is_empty() {
            self.waited += time;
        }
        self.pass_time(time, true);
    }

    fn pass_time(&mut self, time: Nanos, counted: bool) {
        match &mut self.blind {
            Some(blind) => *blind += time,
            None => self.context.pass(time, counted),
        }
    }

    /// How long until something is due, or is to be looked at after a while in which
    /// its vCPU only halted.
    pub(crate) fn due_in(&self, tsc_khz: u32) -> Option<Ticks> {
        if self.blind.is_some() {
            return None;
        }
        let due = self.context.switch_due()?;
        Some(ticks(due.max(self.patience), tsc_khz))
    }

    /// Whether room is to be looked for again; asked once in a while.
    pub(crate) fn is_to_look_for_room(&mut self) -> bool {
        let looks =
            (self.blind.is_some() || !self.missing.is_empty()) && self.waited >= RESTORE_AFTER;
        if looks {
            self.waited = Nanos(0);
        }
        looks
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_PATIENCE, Nanos, TickClock, Ticks, patience_after, ticks};
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    #[test]
    fn patience_grows_while_nothing_but_halts_happens() {
        const MS: u64 = 1_000_000;
        const MOST: u64 = MAX_PATIENCE.0;
        // Patience and what is due; ran and halted; patience after that.
        let table = [
            ((0, MS / 10), (0, MS / 10), MS / 5),
            ((MS / 5, MS / 10), (0, MS / 5), 2 * MS / 5),
            ((MS / 5, MS / 10), (MS / 160, MS / 10), 2 * MS / 5),
            ((8 * MS, MS / 10), (0, 8 * MS), MOST),
            ((MOST, MS / 10), (0, 1), MOST),
            // It ran.
            ((MOST, MS / 10), (MS / 100, MS / 10), 0),
            ((MOST, MS / 10), (1, 0), 0),
            ((0, MS / 10), (MS / 10, 0), 0),
            // No time passed.
            ((MS, MS / 10), (0, 0), MS),
            // What is due in a long time needs none.
            ((0, 500 * MS), (0, 500 * MS), MOST),
        ];
        for ((patience, due), (run, halted), expected) in table {
            let found = patience_after(Nanos(patience), Nanos(due), Nanos(run), Nanos(halted));
            assert_eq!(found, Nanos(expected), "{patience} {due} {run} {halted}");
        }
    }

    proptest! {
        #[test]
        fn nanoseconds_never_drift(
            khz in 1u32..5_000_000,
            pieces in proptest::collection::vec(0u64..10_000_000, 0..50),
        ) {
            let mut clock = TickClock::default();
            let passed: u128 = pieces.iter().map(|p| u128::from(clock.pass(Ticks(*p), khz).0)).sum();
            let all: u128 = pieces.iter().map(|p| u128::from(*p)).sum();
            prop_assert_eq!(passed, all * 1_000_000 / u128::from(khz));
        }

        #[test]
        fn a_deadline_is_never_early(khz in 1u32..5_000_000, ns in 0u64..1_000_000_000_000) {
            let time = Nanos(ns);
            let ticks = ticks(time, khz);
            prop_assert!(TickClock::default().pass(ticks, khz) >= time);
            prop_assert!(ticks == Ticks(0) || TickClock::default().pass(ticks - Ticks(1), khz) < time);
        }
    }
}
