//! Whose turn it is, and how far it may go: what the run loop decides, as functions of its
//! state.
//!
//! All vCPUs of a machine take turns on one thread, and there is one virtual time: it goes on
//! with each tick that any of them executes. So no vCPU ever sees a time that another one has
//! seen pass already.

/// Ticks of a turn; its last instruction may take it beyond.
pub(super) const TURN: u64 = 20_000;

/// What a vCPU does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doing {
    /// It executes, or something has come that it waited for.
    Runs,
    /// It waits for an interrupt, or to be started.
    Waits,
    /// It may not run before this time; none: not before somebody says so.
    Held(Option<u64>),
}

/// Where the loop goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// With a turn of this vCPU.
    Turn(usize),
    /// Nobody runs before this time; none: for ever, as far as the machine knows.
    Idle(Option<u64>),
}

/// Who is next after `last`, of `count` vCPUs; `due` is when a device or a PMU does something
/// at the latest.
pub(super) fn next(
    last: usize,
    count: usize,
    doing: impl Fn(usize) -> Doing,
    due: Option<u64>,
) -> Next {
    let mut until = due;
    for step in 1..=count {
        let vcpu = (last + step) % count;
        match doing(vcpu) {
            Doing::Runs => return Next::Turn(vcpu),
            Doing::Held(time) => until = earliest([until, time]),
            Doing::Waits => {}
        }
    }
    Next::Idle(until)
}

/// The earliest of times.
pub(super) fn earliest<const N: usize>(times: [Option<u64>; N]) -> Option<u64> {
    times.into_iter().flatten().min()
}

/// Ticks to run for: to the end of the turn, to `due`, and no more instructions than
/// `horizon`, with which a counter may overflow. What is due and cannot be done yet does not
/// stop the guest.
pub(super) fn budget(now: u64, end: u64, due: Option<u64>, horizon: Option<u64>) -> u64 {
    let until = due.filter(|due| *due > now).map_or(end, |due| due.min(end));
    let ticks = until.saturating_sub(now);
    horizon.map_or(ticks, |horizon| ticks.min(horizon)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_take_turns() {
        use Doing::{Held, Runs, Waits};
        let check = |last, doing: &[Doing], due, expected| {
            let found = next(last, doing.len(), |vcpu| doing[vcpu], due);
            assert_eq!(found, expected, "{last} {doing:?} {due:?}");
        };
        check(0, &[Runs], None, Next::Turn(0));
        check(0, &[Runs, Runs], None, Next::Turn(1));
        check(1, &[Runs, Runs], Some(5), Next::Turn(0));
        check(0, &[Runs, Waits, Held(None)], Some(5), Next::Turn(0));
        check(1, &[Waits, Runs, Held(Some(1))], None, Next::Turn(1));
        check(0, &[Waits], None, Next::Idle(None));
        check(0, &[Waits, Held(None)], Some(9), Next::Idle(Some(9)));
        check(
            0,
            &[Held(Some(7)), Held(Some(8))],
            Some(9),
            Next::Idle(Some(7)),
        );
        check(0, &[Held(Some(7)), Waits], None, Next::Idle(Some(7)));
    }

    #[test]
    fn a_run_ends_where_something_is_to_be_done() {
        let check = |now, end, due, horizon, expected| {
            let ticks = budget(now, end, due, horizon);
            assert_eq!(ticks, expected, "{now} {end} {due:?} {horizon:?}");
        };
        check(100, 20_100, None, None, 20_000);
        check(100, 20_100, Some(30_000), None, 20_000);
        check(100, 20_100, Some(130), None, 30);
        check(100, 20_100, Some(130), Some(7), 7);
        check(100, 20_100, Some(130), Some(31), 30);
        // What is due already waits for something else.
        check(100, 20_100, Some(100), None, 20_000);
        check(100, 20_100, Some(99), Some(3), 3);
        // Nobody stands still.
        check(100, 100, None, None, 1);
        check(100, 90, Some(101), None, 1);
    }
}
