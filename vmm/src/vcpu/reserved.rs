//! What counter reservations ask of the run loop: a penalty for guessing cookies,
//! answers for the hypervisor, and what the end of the firmware's phase brings.

use std::time::{Duration, Instant};

use arbiter::{Layer, SmramSource};
use kvm_pmu::{ThreadContext, Tsc, VcpuId};
use vmm_control::OffCoreReason;

use super::run::{RunState, VcpuFailure};
use crate::reservations::answer_questions;
use crate::sys::nap;

/// Nothing but a kick ends a wait of this length.
const LONG: Duration = Duration::from_secs(3600);

impl RunState {
    /// Waits until `until` or a kick, outside of `KVM_RUN`: interrupts and PMIs
    /// wait as well. The thread is this vCPU's own.
    pub(super) fn wait(
        &mut self,
        thread: &mut ThreadContext,
        until: Option<Tsc>,
    ) -> Result<(), VcpuFailure> {
        let khz = self.pmu.tsc_khz();
        // Its guest does not run, and yet a question to it may end.
        let decision = self.pmu.pmu().and_then(|pmu| pmu.claims().due());
        let until = [until, decision].into_iter().flatten().min();
        let time = until.map_or(LONG, |until| (until - kvm_pmu::now()).duration(khz));
        self.reports.tally.off_thread(OffCoreReason::Held);
        let began = Instant::now();
        let waited = nap(time, || !self.control.stopping() && !self.has_jobs());
        // The vCPU's thread is its core: nothing ran there.
        let idle = began.elapsed();
        if let (Some(pmu), Some(core)) = (self.pmu.pmu_mut(), thread.counters_mut()) {
            pmu.with_core(core, |core| core.pass_idle(idle));
        }
        self.reports.tally.on_thread();
        waited.map_err(VcpuFailure::Wait)
    }

    /// What is due takes place although the guest does not run.
    pub(super) fn tick(&mut self, thread: &mut ThreadContext) {
        self.pmu.tick(thread.counters_mut(), kvm_pmu::now());
        self.answer_questions(thread);
    }

    /// Answers what the hypervisor was asked, and passes on what it was answered.
    #[inline]
    pub(super) fn answer_questions(&mut self, thread: &mut ThreadContext) {
        if answer_questions(&mut self.pmu, thread)
            && let (Some(host), Some(pmu)) = (&mut self.host, self.pmu.pmu_mut())
        {
            host.hear_owners(pmu, thread.counters_mut());
        }
    }

    /// Once the firmware's phase is over: its code goes into SMRAM, before the guest runs
    /// on, and is what it holds what it was to hold?
    pub(super) fn look_at_firmware(&mut self, id: VcpuId) {
        let unit = self.pmu.pmu().and_then(|pmu| pmu.claims().unit());
        let Some(unit) = unit.filter(|unit| unit.phase().is_over()) else {
            return;
        };
        self.in_firmware = false;
        let held = unit.bank().held_by(Layer::Firmware);
        let source = self
            .pmu
            .pmu_mut()
            .and_then(|pmu| pmu.claims_mut().take_smram());
        if let Some(SmramSource { address, len }) = source {
            if !self.vm.fill_smram(address, len) {
                log::warn!(
                    "{id}: SMRAM stays as it is: at {address:#x} there are no {len:#x} bytes"
                );
            } else if let Some(pmu) = self.pmu.pmu_mut() {
                pmu.claims_mut().smram_filled();
            }
        }
        let expected = self.firmware.take();
        if let Some(difference) = expected.and_then(|expected| expected.compare(held)) {
            log::warn!("{id}: {difference}");
        }
    }
}
