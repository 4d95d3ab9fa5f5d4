//! The firmware's phase of a machine.

use crate::Layer;
use core::sync::atomic::{AtomicBool, Ordering};

/// Whether the firmware still runs; shared by all vCPUs of a machine.
#[derive(Debug)]
pub struct Phase {
    over: AtomicBool,
    has_firmware: bool,
}

impl Phase {
    /// A machine that starts in its firmware, or without any.
    pub const fn new(has_firmware: bool) -> Self {
        Phase {
            over: AtomicBool::new(!has_firmware),
            has_firmware,
        }
    }

    /// Whether the machine starts in the firmware's phase.
    pub fn has_firmware(&self) -> bool {
        self.has_firmware
    }

    /// Whether the firmware's phase is over.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Ends the firmware's phase; false if it was over.
    pub fn end(&self) -> bool {
        !self.over.swap(true, Ordering::AcqRel)
    }

    /// The machine was reset: its firmware runs again.
    pub fn restart(&self) {
        self.over.store(!self.has_firmware, Ordering::Release);
    }

    /// The layer of code at CPL 0 or above, in SMM or not.
    #[inline]
    pub fn layer(&self, cpl0: bool, smm: bool) -> Layer {
        match (smm || !self.is_over(), cpl0) {
            (true, true) => Layer::Firmware,
            (false, true) => Layer::GuestKernel,
            (_, false) => Layer::GuestUser,
        }
    }
}
