//! The time of a context.

use pmu_model::{Nanos, Ticks, Tsc};

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
fn ticks(time: Nanos, tsc_khz: u32) -> Ticks {
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

/// The time of a context: that in which its vCPU runs, or the wall time of its core.
#[derive(Debug, Default)]
pub(super) struct ContextTime {
    clock: TickClock,
    /// Of a core's context: TSC until which it knows how time has passed; none before
    /// a vCPU runs for the first time.
    until: Option<Tsc>,
    /// Time since then that it was told of.
    idle: Nanos,
    /// It was preempted so long ago.
    blind: Option<Nanos>,
    /// Time for which there would have been room again, or in which it was not
    /// looked for.
    waited: Nanos,
    /// How late a switch may come because its vCPU only halts; 0 while it runs.
    patience: Nanos,
}

impl ContextTime {
    pub(super) fn is_blind(&self) -> bool {
        self.blind.is_some()
    }

    /// Its counters are taken.
    pub(super) fn go_blind(&mut self) {
        self.blind = Some(Nanos(0));
        self.waited = Nanos(0);
    }

    /// It has counters again: for how long it had none.
    pub(super) fn see_again(&mut self) -> Option<Nanos> {
        let blind = self.blind.take()?;
        self.waited = Nanos(0);
        Some(blind)
    }

    /// Its vCPU was entered and left. `due`: what was asked for without patience.
    pub(super) fn note_interval(&mut self, due: Nanos, ran: Nanos, halted: Nanos) {
        self.patience = patience_after(self.patience, due, ran, halted);
    }

    /// The time of ticks in which the vCPU ran.
    pub(super) fn run_time(&mut self, ticks: Ticks, tsc_khz: u32) -> Nanos {
        self.clock.pass(ticks, tsc_khz)
    }

    /// Wall time since it was asked last.
    pub(super) fn wall_time(&mut self, tsc: Tsc, tsc_khz: u32) -> Nanos {
        let since = self.until.replace(tsc).unwrap_or(tsc);
        self.clock.pass(tsc - since, tsc_khz)
    }

    /// The same without the idle time that it was told of meanwhile.
    pub(super) fn wall_time_but_idle(&mut self, tsc: Tsc, tsc_khz: u32) -> Nanos {
        self.wall_time(tsc, tsc_khz) - std::mem::take(&mut self.idle)
    }

    /// It is told of idle time before the clock is asked for it.
    pub(super) fn note_idle(&mut self, time: Nanos) {
        self.idle += time;
    }

    /// The TSC so many ticks after the time that it knows.
    pub(super) fn after(&self, ticks: Ticks) -> Option<Tsc> {
        Some(self.until? + ticks)
    }

    /// Time passes: it is the context's own, unless that is blind.
    pub(super) fn pass(&mut self, time: Nanos) -> Option<Nanos> {
        match &mut self.blind {
            Some(blind) => {
                *blind += time;
                None
            }
            None => Some(time),
        }
    }

    /// Time passes in which something waits for room.
    pub(super) fn wait(&mut self, time: Nanos) {
        self.waited += time;
    }

    /// How long until `due`, or until it is to be looked at after a while in which its vCPU
    /// only halted.
    pub(super) fn ticks_until(&self, due: Nanos, tsc_khz: u32) -> Ticks {
        ticks(due.max(self.patience), tsc_khz)
    }

    /// Whether room is to be looked for again; asked once in a while.
    pub(super) fn is_to_look_for_room(&mut self, waits: bool) -> bool {
        let looks = waits && self.waited >= RESTORE_AFTER;
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
