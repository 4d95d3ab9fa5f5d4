//! What counter reservations ask of the run loop beside accesses: a penalty for
//! guessing cookies, and interrupts that announce notices.

use std::time::{Duration, Instant};

use arbiter::Layer;
use pmu_virt::{CorePmu, VcpuPmu};

use super::kick::Seat;
use super::observe::TrapEvent;
use super::pmi;
use super::run::{Core, VcpuFailure};
use crate::kvm::{KvmVcpu, VcpuId};
use crate::perfmon::Rested;
use crate::reservations::answer_questions;
use crate::sys::{nap, rdtsc};

/// Nothing but a kick ends a wait of this length.
const LONG: Duration = Duration::from_secs(3600);

impl Core {
    /// Until when the vCPU is kept off its core for guessing cookies.
    pub(super) fn barred_until(&self) -> Option<u64> {
        let until = self.pmu.as_ref()?.locked_out_until()?;
        (rdtsc() < until).then_some(until)
    }

    /// Waits until `until` or a kick, outside of `KVM_RUN`: interrupts and PMIs
    /// wait as well. The thread is this vCPU's own.
    pub(super) fn wait(&mut self, seat: &mut Seat, until: Option<u64>) -> Result<(), VcpuFailure> {
        let time = until.map_or(LONG, |until| {
            let ticks = u128::from(until.saturating_sub(rdtsc()));
            let ns = ticks * 1_000_000 / u128::from(self.tsc_khz);
            Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
        });
        self.tally.goes(Rested::Held);
        let began = Instant::now();
        let waited = nap(time, || !self.control.stopping() && !self.has_jobs());
        // The vCPU's thread is its core: nothing ran there.
        let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if let (Some(pmu), Some(core)) = (&mut self.pmu, &mut seat.pmu) {
            pmu.with_core(core, |core| core.pass_idle(ns));
        }
        self.tally.comes();
        waited.map_err(VcpuFailure::Wait)
    }

    /// Once the firmware's phase is over: does it hold what it was to hold?
    pub(super) fn compare_firmware(&mut self, id: VcpuId) {
        let unit = self.pmu.as_ref().and_then(VcpuPmu::reservations);
        let Some(unit) = unit.filter(|unit| unit.phase().is_over()) else {
            return;
        };
        let held = unit.bank().held_by(Layer::Firmware);
        let expected = self.firmware.take();
        if let Some(difference) = expected.and_then(|expected| expected.compare(held)) {
            log::warn!("{id}: {difference}");
        }
    }

    /// Lets what is due in the reservations by `now` take place, for a vCPU that
    /// is not run.
    pub(super) fn tick(&mut self, core: Option<&mut CorePmu>, now: u64) {
        if let Some(pmu) = &mut self.pmu {
            pmu.tick(core, now);
        }
    }

    /// Gives the hypervisor's answers to what it was asked, and raises the
    /// interrupts that announce notices of the reservations. A notice whose
    /// interrupt finds the local APIC off stays in the guest's queue.
    pub(super) fn forward_notices(
        &mut self,
        kvm: &KvmVcpu,
        core: Option<&mut CorePmu>,
    ) -> Result<(), VcpuFailure> {
        if let Some(pmu) = &mut self.pmu {
            answer_questions(pmu, core);
        }
        while let Some(vector) = self.pmu.as_mut().and_then(VcpuPmu::take_notice) {
            let sent = pmi::interrupt(kvm, &self.vm, vector)?;
            self.report(kvm.id(), || TrapEvent::Notice { vector, sent });
        }
        Ok(())
    }
}
