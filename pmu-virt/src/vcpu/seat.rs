//! Where a vCPU is while something is done to it.

use crate::core_pmu::CorePmu;
use crate::slot_bank::SlotBank;

/// A vCPU sits on a core, whose slots count for it, or on none: its registers change
/// then, and no counter does.
#[derive(Debug)]
pub(super) enum Seat<'a> {
    On(&'a mut CorePmu),
    /// It is on one that the caller does not lend.
    Away,
    /// It is on none.
    Off,
}

impl Seat<'_> {
    #[inline]
    pub(super) fn is_off(&self) -> bool {
        self.core().is_none()
    }

    /// Whether the vCPU has to get onto a core before it can be said what is backed there.
    #[inline]
    pub(super) fn is_nowhere(&self) -> bool {
        matches!(self, Seat::Off)
    }

    #[inline]
    pub(super) fn core(&self) -> Option<&CorePmu> {
        match self {
            Seat::On(core) => Some(core),
            Seat::Away | Seat::Off => None,
        }
    }

    #[inline]
    pub(super) fn core_mut(&mut self) -> Option<&mut CorePmu> {
        match self {
            Seat::On(core) => Some(core),
            Seat::Away | Seat::Off => None,
        }
    }

    #[inline]
    pub(super) fn bank(&mut self) -> Option<&mut SlotBank> {
        self.core_mut().map(|core| core.bank_mut())
    }
}
