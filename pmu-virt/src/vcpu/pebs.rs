//! PEBS: when a record of which counters is due.
//!
//! An overflow of a counter with PEBS sets no status bit and raises no PMI. It arms the
//! counter, and the next event of it makes a record (SDM vol. 3B, "Processor Event Based
//! Sampling"). Where every instruction is seen, that is the next one that causes the
//! event. Elsewhere the overflow is noticed when the guest has been stopped, some way
//! behind it: the record is of that place.
//!
//! The record is written before anything else happens to the vCPU
//! ([`VcpuPmu::pebs_due`](super::VcpuPmu::pebs_due),
//! [`VcpuPmu::take_samples`](super::VcpuPmu::take_samples)): the counter is reloaded from the
//! debug store area, and where the buffer has come to its threshold, the status says so
//! and a PMI is raised. A vCPU in SMM is the exception: its registers are the firmware's,
//! and the record waits until it has left.

use arbiter::{CounterId, CounterSet};
use pmu_model::OwnerId;

use crate::pebs::PebsSkip;

/// Overflows of one vCPU's counters with PEBS, until their records are written.
#[derive(Debug)]
pub(super) struct Pebs {
    /// Counters that have overflowed, and whose next event makes a record.
    armed: CounterSet,
    /// Counters of the record to be written now.
    due: CounterSet,
    /// Those of them whose overflow was noticed late: what they have counted since
    /// belongs to the next record.
    late: CounterSet,
    /// What is counted now was done by one instruction that was seen.
    retiring: bool,
    /// The last reason that was logged.
    told: Option<PebsSkip>,
}

impl Pebs {
    pub(super) fn new() -> Self {
        Pebs {
            armed: CounterSet::EMPTY,
            due: CounterSet::EMPTY,
            late: CounterSet::EMPTY,
            retiring: false,
            told: None,
        }
    }

    pub(super) fn reset(&mut self) {
        *self = Pebs::new();
    }

    /// What is counted from now on was done by one instruction that was seen, or was not.
    #[inline]
    pub(super) fn retire(&mut self, retiring: bool) {
        self.retiring = retiring;
    }

    /// Whether the next event of `counter` makes a record.
    #[inline]
    pub(super) fn awaits(&self, counter: CounterId, enabled: CounterSet) -> bool {
        self.armed.contains(counter) && enabled.contains(counter)
    }

    /// An overflow of `counter`, or the event that it waits for; false if the counter has
    /// no PEBS.
    #[inline]
    pub(super) fn takes_overflow(&mut self, counter: CounterId, enabled: CounterSet) -> bool {
        if !enabled.contains(counter) {
            return false;
        }
        if self.retiring && !self.armed.contains(counter) {
            self.armed.insert(counter);
            return true;
        }
        self.armed.remove(counter);
        self.due.insert(counter);
        if !self.retiring {
            self.late.insert(counter);
        }
        true
    }

    /// The counter was written or counts something else: its overflow is over.
    #[inline]
    pub(super) fn disarm(&mut self, counter: CounterId) {
        self.armed.remove(counter);
        self.due.remove(counter);
        self.late.remove(counter);
    }

    /// These counters have PEBS and no others. What waits for the end of SMM is no more,
    /// either.
    pub(super) fn keep(&mut self, enabled: CounterSet) {
        self.due = self.due & enabled;
        self.late = self.late & enabled;
    }

    /// Counters whose overflow has no record yet.
    pub(super) fn waiting(&self) -> CounterSet {
        self.armed | self.due
    }

    /// Counters of the record to be written now.
    #[inline]
    pub(super) fn due(&self) -> CounterSet {
        self.due
    }

    pub(super) fn is_late(&self, counter: CounterId) -> bool {
        self.late.contains(counter)
    }

    /// The record was written, or is left out for a reason, which is told once for each
    /// kind. The counters that it was about.
    pub(super) fn done(&mut self, owner: OwnerId, result: Result<(), PebsSkip>) -> CounterSet {
        if let Err(why) = result {
            let kind = std::mem::discriminant(&why);
            if self.told.map(|told| std::mem::discriminant(&told)) != Some(kind) {
                log::info!("{owner}: no PEBS record: {why}");
                self.told = Some(why);
            }
        }
        self.late = CounterSet::EMPTY;
        std::mem::replace(&mut self.due, CounterSet::EMPTY)
    }

    pub(super) fn restore(&mut self, armed: CounterSet) {
        self.armed = armed;
    }
}
