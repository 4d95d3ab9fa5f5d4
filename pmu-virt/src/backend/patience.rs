//! One exit for several overflows: how long one may wait for the next.

/// An overflow waits no longer than this part of what was counted.
const PARTS: u64 = 32;
/// At most this part of what is left of a period when it is armed.
const OF_PERIOD: u64 = 2;
/// However much was counted, in ticks: 1 ms of a TSC of 2.5 GHz.
const MOST: u64 = 2_500_000;

/// For how many ticks the overflow of one counter may wait.
///
/// Whoever samples at a fixed period has chosen the distance of the samples and not when
/// the first of them comes. The next period begins when an overflow is handled: so two
/// counters of one period, once handled together, stay together and wait no more. Where
/// periods differ, what may be spent bounds what is lost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Patience {
    /// [`PARTS`] times what may be spent.
    earned: u64,
    /// What the overflow that is armed may wait.
    granted: u64,
}

impl Patience {
    /// An overflow was armed that may wait, `after` so many events.
    pub(super) fn grant(&mut self, after: u64) {
        self.granted = (self.earned / PARTS).min(after / OF_PERIOD);
    }

    /// One was armed that may not.
    pub(super) fn deny(&mut self) {
        self.granted = 0;
    }

    /// For how long the one that is armed may wait.
    pub(super) fn ticks(self) -> u64 {
        self.granted
    }

    /// So much was counted.
    pub(super) fn earn(&mut self, events: u64) {
        self.earned = self.earned.saturating_add(events).min(MOST * PARTS);
    }

    /// An overflow has waited for so long. How late the host was is no matter of ours.
    pub(super) fn spend(&mut self, waited: u64) {
        self.earned = self.earned.saturating_sub(waited.min(self.granted) * PARTS);
        self.granted = 0;
    }
}

/// When to leave the guest, for what is due at so many ticks and may wait for so many:
/// at the last that none before it has to wait too long for. None if nothing is due.
pub(super) fn together<I: Iterator<Item = (u64, u64)>>(due: impl Fn() -> I) -> Option<u64> {
    let latest = |(ticks, patience): (u64, u64)| ticks.saturating_add(patience);
    let limit = due().map(latest).min()?;
    due()
        .map(|(ticks, _)| ticks)
        .filter(|due| *due <= limit)
        .max()
}

#[cfg(test)]
mod tests {
    use super::{MOST, PARTS, Patience, together};
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    #[test]
    fn one_exit_takes_what_nobody_waits_too_long_for() {
        type Case = (&'static [(u64, u64)], Option<u64>);
        let table: [Case; 8] = [
            (&[], None),
            (&[(100, 50)], Some(100)),
            (&[(100, 0), (101, 50)], Some(100)),
            (&[(100, 1), (101, 0)], Some(101)),
            (&[(100, 50), (150, 0), (151, 0)], Some(150)),
            (&[(160, 9), (100, 50), (120, 90), (140, 5)], Some(140)),
            (&[(100, 50), (120, 5), (140, 5)], Some(120)),
            (&[(u64::MAX, 7), (u64::MAX, 9)], Some(u64::MAX)),
        ];
        for (due, expected) in table {
            assert_eq!(together(|| due.iter().copied()), expected, "{due:?}");
        }
    }

    #[test]
    fn what_was_counted_is_spent_once() {
        let mut patience = Patience::default();
        patience.grant(1 << 20);
        assert_eq!(patience.ticks(), 0, "nothing was counted");
        patience.earn(100 * PARTS);
        patience.grant(1 << 20);
        assert_eq!(patience.ticks(), 100);
        patience.spend(60);
        assert_eq!(patience.ticks(), 0, "the next one is not armed yet");
        patience.grant(1 << 20);
        assert_eq!(patience.ticks(), 40);
        // The host was late.
        patience.spend(1_000);
        patience.grant(1 << 20);
        assert_eq!(patience.ticks(), 0);
        // Of a short period half; of a long one no more than the most.
        patience.earn(u64::MAX);
        patience.grant(10);
        assert_eq!(patience.ticks(), 5);
        patience.grant(u64::MAX);
        assert_eq!(patience.ticks(), MOST);
        patience.deny();
        assert_eq!(patience.ticks(), 0);
        patience.spend(10);
        patience.grant(u64::MAX);
        assert_eq!(patience.ticks(), MOST, "it was denied, and has not waited");
    }

    proptest! {
        #[test]
        fn none_waits_longer_than_it_may(
            due in proptest::collection::vec((1u64..10_000, 0u64..5_000), 1..9),
        ) {
            let at = together(|| due.iter().copied()).expect("something is due");
            prop_assert!(due.iter().any(|(ticks, _)| *ticks == at), "{} is for nobody", at);
            let in_time = |(ticks, patience): &(u64, u64)| at <= ticks + patience;
            prop_assert!(due.iter().all(in_time));
            let exact: Vec<_> = due.iter().map(|(ticks, _)| (*ticks, 0)).collect();
            let first = due.iter().map(|(ticks, _)| *ticks).min();
            prop_assert_eq!(together(|| exact.iter().copied()), first);
        }
    }
}
