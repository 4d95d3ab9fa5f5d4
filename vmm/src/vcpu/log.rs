//! The trap path in the log.

use kvm_pmu::{TrapEvent, VcpuId};
use pmu_virt::{ReadOutcome, WriteOutcome};

use super::observe::Observer;

/// Writes events to the log: accesses that fault at `debug`, the rest at
/// `trace`.
#[derive(Debug, Clone, Copy, Default)]
pub struct PmuLog;

impl Observer for PmuLog {
    fn event(&mut self, vcpu: VcpuId, event: &TrapEvent) {
        match event {
            TrapEvent::MsrRead {
                msr,
                outcome: ReadOutcome::Value(value),
            } => log::trace!("{vcpu}: RDMSR {:#x} -> {value:#x}", msr.0),
            TrapEvent::MsrRead { msr, .. } => log::debug!("{vcpu}: RDMSR {:#x} -> #GP", msr.0),
            TrapEvent::MsrWrite {
                msr,
                value,
                outcome: WriteOutcome::Done,
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
            other => log::trace!("{vcpu}: {other:?}"),
        }
    }

    fn wants_events(&self) -> bool {
        log::log_enabled!(log::Level::Debug)
    }
}
