//! More logical counters than physical ones: timeslices, or a refusal.

use std::num::NonZeroU64;

use super::{Here, VcpuPmu};

/// What to do for a vCPU that wants more counters than its core has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Oversubscribe {
    /// The counter that finds no place is unavailable.
    #[default]
    Refuse,
    /// Counters take turns; counts are scaled to the time in which they were
    /// to count, and labelled so.
    Multiplex {
        /// Length of a timeslice in TSC ticks that the guest runs.
        timeslice: NonZeroU64,
    },
}

/// Whose timeslice it is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Multiplexer {
    answer: Oversubscribe,
    /// Ticks that the guest will have run when the timeslice is over.
    over: Option<u64>,
    /// The same, kept while the guest has stopped counters for a moment.
    due: Option<u64>,
    /// The log knows that turns are taken.
    reported: bool,
    /// The demand that is placed first.
    first: usize,
}

impl Multiplexer {
    pub(super) fn new(answer: Oversubscribe) -> Self {
        Multiplexer {
            answer,
            ..Multiplexer::default()
        }
    }

    /// Whether counters take turns at present.
    pub(super) fn is_active(&self) -> bool {
        self.over.is_some()
    }

    /// Whether counters may take turns at all.
    pub(super) fn is_allowed(&self) -> bool {
        matches!(self.answer, Oversubscribe::Multiplex { .. })
    }

    #[inline]
    pub(super) fn is_over(&self, now: u64) -> bool {
        self.over.is_some_and(|over| now >= over)
    }

    /// Ticks that are left of this timeslice.
    pub(super) fn rest(&self, now: u64) -> Option<u64> {
        self.over.map(|over| over.saturating_sub(now))
    }

    pub(super) fn end(&mut self) {
        self.over = None;
    }

    /// Takes turns from now on, if it did not. True the first time ever.
    pub(super) fn start(&mut self, now: u64) -> bool {
        if !self.is_active() {
            self.begin(now);
        }
        !std::mem::replace(&mut self.reported, true)
    }

    /// The counter that is placed first, modulo their number; none where counters
    /// may not take turns.
    pub(super) fn rotation(&self) -> Option<usize> {
        self.is_allowed().then_some(self.first)
    }

    /// Forgets whose timeslice it was.
    pub(super) fn reset(&mut self) {
        *self = Multiplexer::new(self.answer);
    }

    /// The next counters come first.
    fn advance(&mut self) {
        self.first = self.first.wrapping_add(1);
        self.over = None;
        self.due = None;
    }

    /// Counters take turns from now on. A timeslice that was cut short goes on: a
    /// guest that stops its counters again and again, as drivers do in each
    /// interrupt, would else never leave the first one.
    fn begin(&mut self, now: u64) {
        let Oversubscribe::Multiplex { timeslice } = self.answer else {
            return;
        };
        if self.due.is_some_and(|due| due <= now) {
            self.advance();
        }
        let due = *self.due.get_or_insert(now.saturating_add(timeslice.get()));
        self.over = Some(due);
    }
}

impl VcpuPmu {
    /// The next counters get the places.
    pub(super) fn next_timeslice(&mut self, here: &mut Here<'_>) {
        self.multiplexer.advance();
        self.distribute(here);
        self.refresh_needs(here.as_deref());
    }
}
