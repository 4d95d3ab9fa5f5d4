//! Who ran on a processor, and when.

use std::collections::VecDeque;

use crate::records::Ids;

/// Switches that are remembered of a processor: 1 MiB.
const REMEMBERED: usize = 1 << 16;

/// The threads that a processor has run.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// Since when somebody runs; nobody knows whom where there is none.
    runs: VecDeque<(u64, Option<Ids>)>,
    /// The last time of a record.
    last: u64,
    /// When records began, of which none has come yet.
    opened: Option<u64>,
}

impl History {
    /// From `time` on every switch is recorded.
    pub(crate) fn opened(&mut self, time: u64) {
        self.lost();
        self.opened = Some(time);
    }

    /// From `time` on `to` runs, and `from` did before.
    pub(crate) fn switch(&mut self, time: u64, from: Ids, to: Ids) {
        if let Some(opened) = self.opened.filter(|opened| *opened < time) {
            self.runs(opened, Some(from));
        }
        self.runs(time, Some(to));
    }

    /// From `time` on `thread` runs.
    pub(crate) fn runs(&mut self, time: u64, thread: Option<Ids>) {
        (self.last, self.opened) = (time, None);
        if self.runs.back().is_some_and(|(_, last)| *last == thread) {
            return;
        }
        if self.runs.len() >= REMEMBERED {
            self.runs.pop_front();
        }
        self.runs.push_back((time, thread));
    }

    /// Records are missing between the last one and the next. Since when.
    pub(crate) fn lost(&mut self) -> u64 {
        let since = self.last.saturating_add(1);
        self.opened = None;
        if !self.runs.is_empty() {
            self.runs(since, None);
        }
        since
    }

    /// Who ran at `time`, if it is known.
    pub(crate) fn at(&self, time: u64) -> Option<Ids> {
        let behind = self.runs.partition_point(|(since, _)| *since <= time);
        self.runs.get(behind.checked_sub(1)?)?.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(tid: u32) -> Ids {
        Ids { pid: tid, tid }
    }

    #[test]
    fn who_ran_when() {
        let mut history = History::default();
        assert_eq!(history.at(5), None);
        history.opened(0);
        history.switch(10, thread(1), thread(2));
        history.runs(11, Some(thread(2)));
        history.switch(20, thread(2), thread(0));
        history.lost();
        history.runs(40, Some(thread(3)));
        for (time, expected) in [
            (0, Some(1)),
            (9, Some(1)),
            (10, Some(2)),
            (19, Some(2)),
            (20, Some(0)),
            (21, None),
            (39, None),
            (40, Some(3)),
            (u64::MAX, Some(3)),
        ] {
            assert_eq!(history.at(time), expected.map(thread), "{time}");
        }
    }

    #[test]
    fn before_the_first_record_nobody_is_known() {
        let mut history = History::default();
        history.opened(5);
        assert_eq!(history.at(7), None);
        history.switch(10, thread(1), thread(2));
        assert_eq!(
            [4, 5, 9].map(|time| history.at(time)),
            [None, Some(thread(1)), Some(thread(1))]
        );
        // The processor goes and comes back.
        history.opened(20);
        history.switch(30, thread(3), thread(4));
        let times = [10, 11, 19, 20, 30];
        let expected = [Some(2), None, None, Some(3), Some(4)];
        assert_eq!(
            times.map(|time| history.at(time)),
            expected.map(|it| it.map(thread))
        );

        let mut history = History::default();
        history.opened(5);
        history.lost();
        history.switch(10, thread(1), thread(2));
        assert_eq!(
            history.at(9),
            None,
            "another one may have run before the loss"
        );
        assert_eq!(history.at(10), Some(thread(2)));
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let mut history = History::default();
        for time in 1..=REMEMBERED as u64 + 10 {
            let tid = u32::try_from(time).expect("small");
            history.switch(time, thread(tid - 1), thread(tid));
        }
        assert_eq!(history.runs.len(), REMEMBERED);
        assert_eq!(history.at(1), None);
    }
}
