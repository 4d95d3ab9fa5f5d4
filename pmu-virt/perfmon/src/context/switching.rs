//! From one event set to the next (§3.7.6, §3.7.7).

use perfmon_abi::consts::{PFM_SETFL_EXCL_IDLE, PFM_SETFL_EXPL_NEXT, PFM_SETFL_TIME_SWITCH};
use pmu_model::Nanos;

use super::reset::Period;
use super::{Context, EventSet, Phase};

impl Context {
    /// The set's time is up: the next one becomes active. Where the time of
    /// several is up, as after an idle time, they take turns; what is then left
    /// of the time goes to the last. Does nothing while monitoring is stopped or
    /// masked, and while an overflow of the active set is waiting for
    /// [`Context::overflow`], or a sample for [`Context::sampled`]: it belongs to that set.
    pub fn expire(&mut self) {
        let waits = !self.pending.is_empty() || !self.due.is_empty();
        if self.phase != Phase::Loaded || !self.started || waits {
            return;
        }
        // A chain of sets can lead into a circle. After one step for each set it
        // has, and whole rounds need not be walked any more.
        let mut rest = std::mem::take(&mut self.overdue);
        for _ in 0..self.sets.len() {
            if !self.time_is_up() {
                return;
            }
            rest = self.turn(rest);
        }
        rest = self.skip_rounds(rest);
        while self.time_is_up() {
            rest = self.turn(rest);
        }
    }

    /// The active set is active for `time`, or until its timeout; returns what is
    /// left then. `counts`: it is time that a set with PFM_SETFL_EXCL_IDLE
    /// counts as its own.
    pub(super) fn spend(&mut self, time: Nanos, counts: bool) -> Nanos {
        let Some(set) = self.sets.get_mut(&self.active) else {
            return Nanos(0);
        };
        let taken = if set.switches_by_time() {
            time.min(set.timeout_left)
        } else {
            time
        };
        set.timeout_left = set.timeout_left - taken;
        set.live(taken, counts);
        time - taken
    }

    /// The active set went on for `time` after its timeout.
    pub(super) fn overrun(&mut self, time: Nanos) {
        if let Some(set) = self.sets.get_mut(&self.active) {
            set.live(time, true);
        }
    }

    /// The set after `set`: the one that its explicit link names, else the one
    /// with the next number, after the last the first.
    pub(super) fn next_set(&self, set: u16) -> u16 {
        let explicit = self
            .sets
            .get(&set)
            .filter(|set| set.flags & PFM_SETFL_EXPL_NEXT != 0)
            .map(|set| set.next)
            .filter(|next| self.sets.contains_key(next));
        let above = || self.sets.range(set.checked_add(1)?..).next();
        let in_order = || above().or_else(|| self.sets.first_key_value());
        explicit.unwrap_or_else(|| in_order().map_or(set, |(&next, _)| next))
    }

    /// Makes the next set the active one. PMDs of it that overflowed when it was
    /// active last, and were not reset since, are now.
    pub(super) fn switch(&mut self, period: Period) {
        self.forget_due();
        self.active = self.next_set(self.active);
        let Some(set) = self.sets.get_mut(&self.active) else {
            return;
        };
        set.runs = set.runs.saturating_add(1);
        set.rearm();
        let overflowed = set.overflowed;
        self.reset(self.active, overflowed, period);
    }

    /// The next set gets what it may of `time`.
    fn turn(&mut self, time: Nanos) -> Nanos {
        self.switch(Period::Short);
        self.spend(time, self.overdue_counts)
    }

    fn time_is_up(&self) -> bool {
        self.sets
            .get(&self.active)
            .is_some_and(|set| set.switches_by_time() && set.timeout_left == Nanos(0))
    }

    /// If the sets from the active one on switch by time and lead back to it,
    /// gives each of them its share of all whole rounds that fit into `time`, and
    /// returns the rest.
    fn skip_rounds(&mut self, time: Nanos) -> Nanos {
        let start = self.active;
        let (mut round, mut at) = (Vec::new(), start);
        loop {
            match self.sets.get(&at) {
                Some(set) if set.switches_by_time() && round.len() < self.sets.len() => {
                    round.push((at, set.timeout));
                }
                _ => return time,
            }
            at = self.next_set(at);
            if at == start {
                break;
            }
        }
        let whole = round
            .iter()
            .fold(Nanos(0), |sum, &(_, timeout)| sum + timeout);
        let Some(rounds) = time.0.checked_div(whole.0) else {
            return time;
        };
        for (number, timeout) in round {
            if let Some(set) = self.sets.get_mut(&number) {
                set.runs = set.runs.saturating_add(rounds);
                set.live(timeout * rounds, self.overdue_counts);
            }
        }
        time - whole * rounds
    }
}

impl EventSet {
    /// Timeout and thresholds as they were written: the set becomes active.
    pub(super) fn rearm(&mut self) {
        self.timeout_left = self.timeout;
        for pmd in self.pmds.values_mut() {
            pmd.threshold_left = pmd.threshold;
        }
    }

    /// A timeout of 0 would be up for ever; no set is made with one.
    fn switches_by_time(&self) -> bool {
        self.flags & PFM_SETFL_TIME_SWITCH != 0 && self.timeout != Nanos(0)
    }

    fn live(&mut self, time: Nanos, counts: bool) {
        if counts || self.flags & PFM_SETFL_EXCL_IDLE == 0 {
            self.active_time += time;
        }
    }
}
