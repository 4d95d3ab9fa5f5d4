//! Who receives what a vCPU reports: the log, the demo, tests. The run loop itself
//! prints nothing.

use std::fmt::Debug;

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_pmu::{PmiRoute, TrapEvent, TrapObserver, VcpuId};
use perfmon_abi::compact::GuestPlace;
use pmu_virt::perfmon::{Quantities, VirtualPmd, Wish};
use vmm_control::VcpuQuantities;

use crate::guest_kernel::VcpuLook;

/// Receives a vCPU's reports, on its thread.
pub trait Observer: Debug + Send {
    /// One event. Must not block: the guest waits.
    fn event(&mut self, vcpu: VcpuId, event: &TrapEvent);
    /// False: it drops every event. Asked once, before the vCPU runs.
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

/// Writes events to the log: accesses that fault at `debug`, the rest at
/// `trace`.
#[derive(Debug, Clone, Copy, Default)]
pub struct PmuLog;

impl Observer for PmuLog {
    fn event(&mut self, vcpu: VcpuId, event: &TrapEvent) {
        match event {
            TrapEvent::MsrRead {
                msr,
                outcome: pmu_virt::ReadOutcome::Value(value),
            } => log::trace!("{vcpu}: RDMSR {:#x} -> {value:#x}", msr.0),
            TrapEvent::MsrRead { msr, .. } => log::debug!("{vcpu}: RDMSR {:#x} -> #GP", msr.0),
            TrapEvent::MsrWrite {
                msr,
                value,
                outcome: pmu_virt::WriteOutcome::Done,
            } => log::trace!("{vcpu}: WRMSR {:#x} <- {value:#x}", msr.0),
            TrapEvent::MsrWrite { msr, value, .. } => {
                log::debug!("{vcpu}: WRMSR {:#x} <- {value:#x} -> #GP", msr.0);
            }
            // No value: a log is no place for a cookie.
            TrapEvent::Secret { msr, write, gp } => {
                let what = if *write { "WRMSR" } else { "RDMSR" };
                let end = if *gp { " -> #GP" } else { "" };
                log::debug!("{vcpu}: {what} {:#x} (not shown){end}", msr.0);
            }
            TrapEvent::Armed(armed) => log::debug!("{vcpu}: {armed}"),
            other => log::trace!("{vcpu}: {other:?}"),
        }
    }

    fn wants_events(&self) -> bool {
        log::log_enabled!(log::Level::Debug)
    }
}

/// Counts for host tools what the PMU reports, and passes it on.
#[derive(Debug)]
pub(crate) struct Reports {
    observer: Box<dyn Observer>,
    wants_events: bool,
    /// What host tools can ask for.
    pub(crate) tally: VcpuQuantities,
    /// Looks into the guest, where there are host tools.
    guest: Option<VcpuLook>,
}

impl Reports {
    pub(crate) fn new(
        observer: Box<dyn Observer>,
        tally: VcpuQuantities,
        guest: Option<VcpuLook>,
    ) -> Self {
        Self {
            guest,
            wants_events: observer.wants_events(),
            observer,
            tally,
        }
    }
}

impl TrapObserver for Reports {
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
        if self.wants_events {
            self.observer.event(vcpu, &event);
        }
    }

    fn look(
        &mut self,
        _: VcpuId,
        wish: Wish,
        registers: (&kvm_regs, &kvm_sregs),
        tsc: &dyn Fn() -> Option<u64>,
    ) {
        if let Some(guest) = &mut self.guest {
            guest.look(wish, registers, tsc);
        }
    }

    fn quantities(&self) -> &dyn Quantities {
        self
    }
}

impl Quantities for Reports {
    fn read(&self, which: VirtualPmd) -> Option<u64> {
        self.tally.read(which)
    }

    fn guest(&self) -> Option<&GuestPlace> {
        self.guest.as_ref().map(VcpuLook::place)
    }
}
