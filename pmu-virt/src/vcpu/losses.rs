//! Reserved counters without a physical one, of which their owners are to hear: those that
//! the host's kernel has taken, until they are back, and those whose events nobody counts.

use arbiter::{CounterId, CounterSet};
use pmu_model::{Ticks, Tsc};

/// Reserved counters that do not count.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// The host's kernel has taken their physical counters.
    taken: CounterSet,
    /// Those of which their owners know.
    told: CounterSet,
    /// When it is tried again to have them count, and how long that is after the last
    /// time, in milliseconds.
    again: Option<(Tsc, u32)>,
    /// How long the guest had run when that was tried last.
    tried: Option<Ticks>,
    /// Counters whose owners know that what they select cannot be counted.
    unbacked: CounterSet,
    /// Those whose owners are to be told so, in the order in which it was found.
    untold: Vec<CounterId>,
}

/// What is to be done about counters that the host's kernel has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retry {
    /// It has to be said when to try for the first time.
    Begin,
    /// It is to be tried now; when, before the next try.
    Now(u32),
    Later,
}

impl Losses {
    /// TSC value at which there is something to do.
    pub(super) fn due(&self) -> Option<Tsc> {
        self.again.map(|(again, _)| again)
    }

    /// The host's kernel has taken the physical counter of this one, which somebody holds.
    pub(super) fn note_taken(&mut self, counter: CounterId) {
        self.taken.insert(counter);
    }

    /// What this one selects, which somebody holds, cannot be counted, beside what others
    /// were promised or at all.
    #[cold]
    pub(super) fn note_unbacked(&mut self, counter: CounterId) {
        if self.unbacked.insert(counter) {
            self.untold.push(counter);
        }
    }

    /// It counts, or is to count something else.
    pub(super) fn is_backed(&mut self, counter: CounterId) {
        self.unbacked.remove(counter);
    }

    /// Leaves nothing of the counter's former owner.
    pub(super) fn clear(&mut self, counter: CounterId) {
        self.unbacked.remove(counter);
        self.taken.remove(counter);
        self.told.remove(counter);
    }

    /// A counter was handed over as it is: what was told to its former owner its new one
    /// is to hear.
    /// `is_held`: that is a layer of the guest.
    pub(super) fn hand_over(&mut self, counter: CounterId, is_held: bool) {
        self.told.remove(counter);
        if self.unbacked.contains(counter) {
            self.unbacked.remove(counter);
            if is_held {
                self.note_unbacked(counter);
            }
        }
    }

    #[inline]
    pub(super) fn has_untold(&self) -> bool {
        !self.untold.is_empty()
    }

    pub(super) fn take_untold(&mut self) -> Vec<CounterId> {
        std::mem::take(&mut self.untold)
    }

    #[inline]
    pub(super) fn taken(&self) -> CounterSet {
        self.taken
    }

    /// Those of the counters that were taken whose owners are to hear of it now. `held`:
    /// the others' owners have given them back, or lost them.
    pub(super) fn tell_taken(&mut self, held: CounterSet) -> CounterSet {
        self.taken = self.taken & held;
        if self.taken.is_empty() {
            self.forget_taken();
            return CounterSet::EMPTY;
        }
        let untold = self.taken & !self.told;
        self.told = self.taken;
        untold
    }

    fn forget_taken(&mut self) {
        *self = Losses {
            unbacked: self.unbacked,
            untold: std::mem::take(&mut self.untold),
            ..Losses::default()
        };
    }

    pub(super) fn retry(&self, now: Tsc) -> Retry {
        match self.again {
            None => Retry::Begin,
            Some((again, pause)) if again <= now => Retry::Now(pause),
            Some(_) => Retry::Later,
        }
    }

    /// It is tried again at `again`, `pause` milliseconds after the last time; never, if
    /// nothing is taken any more.
    pub(super) fn try_again(&mut self, again: Option<Tsc>, pause: u32) {
        let again = again.filter(|_| !self.taken.is_empty());
        self.again = again.map(|again| (again, pause));
        if self.again.is_none() {
            self.tried = None;
        }
    }

    /// Whether the guest has run since it was tried last.
    pub(super) fn has_run_since(&self, ran: Ticks) -> bool {
        self.tried.is_some_and(|tried| tried < ran)
    }

    pub(super) fn note_try(&mut self, ran: Ticks) {
        self.tried = Some(ran);
    }

    /// It counts again.
    pub(super) fn is_back(&mut self, counter: CounterId) {
        self.taken.remove(counter);
        self.told.remove(counter);
    }
}
