//! One physical counter that counts for somebody.

use std::num::NonZeroU64;

use pmu_model::{MsrIndex, Ticks};

/// How a counter is controlled.
#[derive(Clone, Copy, Debug)]
pub(super) enum Control {
    /// By its own event select.
    Select {
        msr: MsrIndex,
        /// Its value while the guest does not run.
        outside: u64,
        /// Its value while it runs.
        inside: u64,
        /// The select of the odd counter merged into it.
        merge: Option<MsrIndex>,
    },
    /// By a field of the fixed counters' common register.
    Fixed {
        /// Bits of the field.
        field: u64,
        /// Its enable bits.
        bits: u64,
    },
}

#[derive(Debug)]
pub(super) struct MsrSlot {
    control: Control,
    value: MsrIndex,
    mask: u64,
    /// Events up to when the register held `last`.
    count: u64,
    last: u64,
    /// The count at which the armed overflow comes.
    target: Option<u64>,
    /// Events and the ticks in which they came, when last looked at.
    rate: (u64, Ticks),
    /// Ticks in which it counted since the register was last read.
    ticks: Ticks,
    /// Somebody else changed its registers.
    lost: bool,
}

/// More events in a tick than any processor has.
const MOST_PER_TICK: u64 = 16;

impl MsrSlot {
    pub(super) fn new(control: Control, value: MsrIndex, mask: u64) -> Self {
        MsrSlot {
            control,
            value,
            mask,
            count: 0,
            last: 0,
            target: None,
            rate: (0, Ticks(0)),
            ticks: Ticks(0),
            lost: false,
        }
    }

    pub(super) fn control(&self) -> &Control {
        &self.control
    }

    /// The register that counts.
    pub(super) fn register(&self) -> MsrIndex {
        self.value
    }

    /// Another counter is merged into it.
    pub(super) fn is_paired(&self) -> bool {
        matches!(self.control, Control::Select { merge: Some(_), .. })
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Makes it somebody else's; false if it was already.
    pub(super) fn lose(&mut self) -> bool {
        self.target = None;
        !std::mem::replace(&mut self.lost, true)
    }

    /// The count when the register holds `now`.
    pub(super) fn count_at(&self, now: u64) -> u64 {
        let events = now.wrapping_sub(self.last) & self.mask;
        self.count.saturating_add(events)
    }

    /// Takes in what the register holds.
    pub(super) fn fold(&mut self, now: u64) {
        let count = self.count_at(now);
        if self.ticks > Ticks(0) {
            self.rate = (count - self.count, self.ticks);
        }
        (self.count, self.last, self.ticks) = (count, now, Ticks(0));
    }

    /// Notes that it counted for `ticks`.
    pub(super) fn pass(&mut self, ticks: Ticks) {
        self.ticks += ticks;
    }

    /// Whether the register has to be read now: an overflow is armed, or it
    /// comes near to a wrap.
    pub(super) fn is_due(&self) -> bool {
        self.target.is_some() || self.ticks.0 > self.mask / (2 * MOST_PER_TICK)
    }

    /// Whether it may have wrapped more than once since it was read.
    pub(super) fn is_ambiguous(&self) -> bool {
        self.ticks.0 > self.mask / MOST_PER_TICK
    }

    pub(super) fn arm(&mut self, after: Option<NonZeroU64>) {
        self.target = after.map(|after| self.count.saturating_add(after.get()));
    }

    /// True, once, when the armed overflow has come.
    pub(super) fn take_overflow(&mut self) -> bool {
        let came = self.target.is_some_and(|target| self.count >= target);
        if came {
            self.target = None;
        }
        came
    }

    /// Ticks until the armed overflow at the last rate; `None` where nothing
    /// is armed, 0 where the rate is not known yet.
    pub(super) fn estimate(&self) -> Option<Ticks> {
        let remaining = self.target?.saturating_sub(self.count);
        let (events, Ticks(ticks)) = self.rate;
        if ticks == 0 {
            return Some(Ticks(0));
        }
        let wide = u128::from(remaining) * u128::from(ticks);
        let estimate = wide.checked_div(u128::from(events)).unwrap_or(u128::MAX);
        Some(Ticks(u64::try_from(estimate).unwrap_or(u64::MAX)))
    }
}
