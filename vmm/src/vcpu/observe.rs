//! What a vCPU reports. Logs, the demo and tests hang off this; the run loop
//! itself prints nothing.

use std::fmt::Debug;

use kvm_pmu::{PmiRoute, TrapEvent, TrapObserver, VcpuId};
use pmu_virt::perfmon::Quantities;
use vmm_control::VcpuQuantities;

/// Receives a vCPU's reports, on its thread.
pub trait Observer: Debug + Send {
    /// One event. Must not block: the guest waits.
    fn event(&mut self, vcpu: VcpuId, event: &TrapEvent);
    /// False: it drops every event.
    fn wants_events(&self) -> bool {
        true
    }
}

/// Drops everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn event(&mut self, _: VcpuId, _: &TrapEvent) {}
    fn wants_events(&self) -> bool {
        false
    }
}

/// Counts for host tools what the PMU reports, and passes it on.
#[derive(Debug)]
pub(super) struct Reports<'a> {
    pub(super) observer: &'a mut dyn Observer,
    pub(super) tally: &'a mut VcpuQuantities,
}

impl TrapObserver for Reports<'_> {
    fn event(&mut self, vcpu: VcpuId, event: TrapEvent) {
        match &event {
            TrapEvent::Rdpmc { .. } => self.tally.count_as_rdpmc(),
            TrapEvent::Pmi { delivery, .. } => {
                if matches!(delivery.route, PmiRoute::Nmi | PmiRoute::Fixed(_)) {
                    self.tally.count_pmi();
                }
            }
            _ => {}
        }
        if self.observer.wants_events() {
            self.observer.event(vcpu, &event);
        }
    }

    fn quantities(&self) -> &dyn Quantities {
        self.tally
    }
}
