//! What counter reservations ask of the run loop beside accesses: a penalty for
//! guessing cookies, and interrupts that announce notices.

use std::time::Duration;

use pmu_virt::VcpuPmu;

use super::observe::TrapEvent;
use super::pmi;
use super::run::{Core, VcpuFailure};
use crate::kvm::KvmVcpu;
use crate::reservations::answer_questions;
use crate::sys::{nap, rdtsc};

impl Core {
    /// Until when the vCPU is kept off its core for guessing cookies.
    pub(super) fn barred_until(&self) -> Option<u64> {
        let until = self.pmu.as_ref()?.barred_until()?;
        (rdtsc() < until).then_some(until)
    }

    /// Waits until `until` or a kick, outside of `KVM_RUN`: interrupts and PMIs
    /// wait as well. The thread is this vCPU's own.
    pub(super) fn wait(&mut self, until: u64) -> Result<(), VcpuFailure> {
        let ticks = u128::from(until.saturating_sub(rdtsc()));
        let ns = ticks * 1_000_000 / u128::from(self.tsc_khz);
        let time = Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX));
        nap(time, || !self.control.stopping()).map_err(VcpuFailure::Wait)
    }

    /// Lets what is due in the reservations by `now` take place, for a vCPU that
    /// is not run.
    pub(super) fn tick(&mut self, now: u64) {
        if let Some(pmu) = &mut self.pmu {
            pmu.tick(now);
        }
    }

    /// Gives the hypervisor's answers to what it was asked, and raises the
    /// interrupts that announce notices of the reservations. A notice whose
    /// interrupt finds the local APIC off stays in the guest's queue.
    pub(super) fn forward_notices(&mut self, kvm: &KvmVcpu) -> Result<(), VcpuFailure> {
        if let Some(pmu) = &mut self.pmu {
            answer_questions(pmu);
        }
        while let Some(vector) = self.pmu.as_mut().and_then(VcpuPmu::take_notice) {
            let sent = pmi::interrupt(kvm, &self.vm, vector)?;
            self.report(kvm.id(), || TrapEvent::Notice { vector, sent });
        }
        Ok(())
    }
}
