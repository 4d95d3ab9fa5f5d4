//! Reserved counters whose physical ones the host's kernel takes: their owners hear of it,
//! and Umpire tries to have them count again.

use arbiter::{CounterId, CounterSet};
use pmu_model::{Ticks, Tsc};

use super::{Here, VcpuPmu, index_of};

/// Reserved counters whose physical ones the host's kernel has taken.
#[derive(Debug, Default)]
pub(super) struct Taken {
    pub(super) counters: CounterSet,
    /// Those of which their owners know.
    told: CounterSet,
    /// When it is tried again to have them count, and how long that is after the last
    /// time, in milliseconds.
    again: Option<(Tsc, u32)>,
    /// How long the guest had run when that was tried last.
    tried: Option<Ticks>,
}

impl Taken {
    /// Leaves nothing of the counter's former owner.
    pub(super) fn clear(&mut self, counter: CounterId) {
        self.counters.remove(counter);
        self.told.remove(counter);
    }

    /// TSC value at which there is something to do.
    pub(super) fn due(&self) -> Option<Tsc> {
        self.again.map(|(again, _)| again)
    }
}

/// So long after a physical counter was taken it is tried again, in milliseconds, and
/// each further time after twice as long, up to the last: a try costs system calls.
const FIRST_TRY_MS: u32 = 10;
const LAST_TRY_MS: u32 = 1_000;

impl VcpuPmu {
    /// The host's kernel has taken the physical counter of this one.
    pub(super) fn note_taken(&mut self, counter: CounterId) {
        if self.guests_holding().contains(counter) {
            self.taken.counters.insert(counter);
        }
    }

    /// What a reserved counter selects cannot be counted, beside what others were promised or
    /// at all: its owner hears of it.
    #[cold]
    pub(super) fn note_unbacked(&mut self, counter: CounterId) {
        if self.unbacked.contains(counter) || !self.guests_holding().contains(counter) {
            return;
        }
        self.unbacked.insert(counter);
        if let Some(reservations) = &mut self.reservations {
            let (unit, mut context) = reservations.parts(self.left);
            unit.note_unbacked(counter, &mut context);
        }
    }

    /// A counter that was handed over as it is may have no physical one: its new owner
    /// hears of it.
    pub(super) fn tell_new_owner(&mut self, counter: CounterId) {
        self.taken.told.remove(counter);
        if self.unbacked.contains(counter) {
            self.unbacked.remove(counter);
            self.note_unbacked(counter);
        }
    }

    /// Owners hear that the host's kernel has taken a physical counter, and when it is
    /// back: that is tried again and again, as what is reserved is held.
    #[cold]
    pub(super) fn see_to_taken(&mut self, here: &mut Here<'_>) {
        let held = self.guests_holding();
        self.taken.counters = self.taken.counters & held;
        if self.taken.counters.is_empty() {
            // Their owners have given them back, or lost them.
            self.taken = Taken::default();
            return;
        }
        self.taken.told = self.taken.told & self.taken.counters;
        for counter in (self.taken.counters & !self.taken.told).iter() {
            self.tell_taken(counter, false);
        }
        self.taken.told = self.taken.counters;
        match self.taken.again {
            None => self.try_taken_again(FIRST_TRY_MS),
            Some((again, pause)) if again <= self.left && here.is_some() => {
                self.retry_taken(here);
                self.try_taken_again((pause * 2).min(LAST_TRY_MS));
            }
            Some(_) => {}
        }
    }

    /// Those that have counted since they were tried last are back, and the others are
    /// tried again.
    fn retry_taken(&mut self, here: &mut Here<'_>) {
        let has_run = self.taken.tried.is_some_and(|ran| ran < self.ran);
        for counter in self.taken.counters.iter() {
            if has_run {
                // A source need not tell by itself yet that it is still away.
                self.settle(here, counter);
            }
            let logical = &self.counters[index_of(counter)];
            let counts = logical.unavailable.is_none() && logical.is_running();
            if has_run && counts {
                self.taken.counters.remove(counter);
                self.taken.told.remove(counter);
                self.tell_taken(counter, true);
            } else if logical.times.is_enabled() && !counts {
                self.release_slot(here, counter);
                self.bring_up(here, counter);
                self.taken.tried = Some(self.ran);
            }
        }
    }

    fn try_taken_again(&mut self, pause: u32) {
        let in_time = self.reservations().map(|unit| unit.to_ticks(pause));
        let again = in_time.filter(|_| !self.taken.counters.is_empty());
        self.taken.again = again.map(|in_time| (self.left + in_time, pause));
        if self.taken.again.is_none() {
            self.taken.tried = None;
        }
    }

    fn tell_taken(&mut self, counter: CounterId, is_back: bool) {
        if let Some(reservations) = &mut self.reservations {
            let (unit, mut context) = reservations.parts(self.left);
            unit.note_taken(counter, is_back, &mut context);
        }
    }
}
