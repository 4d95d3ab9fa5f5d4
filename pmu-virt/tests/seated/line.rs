//! A local APIC that does as it is told.

use std::convert::Infallible;

use pmu_virt::{PmiForwarded, PmiLine, PmiRequest, Tsc, VcpuPmu};

/// The way of PMIs to it.
#[derive(Debug)]
pub(crate) struct Line {
    is_open: bool,
    sends: bool,
    /// The PMI that it was asked about last, if it was let through.
    pub(crate) asked: Option<PmiRequest>,
    /// The last that was sent.
    pub(crate) sent: Option<PmiRequest>,
}

impl Line {
    fn new(is_open: bool, sends: bool) -> Self {
        Line {
            is_open,
            sends,
            asked: None,
            sent: None,
        }
    }

    /// It lets PMIs through, and they are sent.
    pub(crate) fn open() -> Self {
        Line::new(true, true)
    }

    /// It lets none through.
    pub(crate) fn masked() -> Self {
        Line::new(false, true)
    }

    /// It lets PMIs through, and they are not sent.
    pub(crate) fn stuck() -> Self {
        Line::new(true, false)
    }

    /// Has a PMI go its way as far as it may.
    pub(crate) fn forward(&mut self, pmu: &mut VcpuPmu, now: Tsc) -> PmiForwarded {
        let Ok(forwarded) = pmu.interrupts_mut().forward(now, self);
        forwarded
    }
}

impl PmiLine for Line {
    type Error = Infallible;

    fn latch(&mut self, request: PmiRequest) -> Result<bool, Infallible> {
        if self.is_open {
            self.asked = Some(request);
        }
        Ok(self.is_open)
    }

    fn send(&mut self, request: PmiRequest) -> Result<bool, Infallible> {
        if self.sends {
            self.sent = Some(request);
        }
        Ok(self.sends)
    }
}
