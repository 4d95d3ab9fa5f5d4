//! What host tools ask of a core.

use std::time::Duration;

use super::core::{CoreEnd, CoreThread};
use crate::kvm::VcpuId;
use crate::perfmon::{Job, Tray, serve_core};
use crate::vcpu::Vcpu;

impl CoreThread {
    /// Does what lies on the desk for the core and its vCPUs; `on_end` gets a
    /// vCPU that failed in it.
    pub(super) fn do_jobs(&mut self, on_end: &mut impl FnMut(CoreEnd)) {
        while let Some(job) = self.tray.as_ref().and_then(Tray::take) {
            self.do_core_job(job);
        }
        let waits = |(id, vcpu): (&VcpuId, &Vcpu)| vcpu.has_jobs().then_some(*id);
        let waiting: Vec<VcpuId> = self.vcpus.iter().filter_map(waits).collect();
        for id in waiting {
            // What a context may have is decided by the core that it is on.
            self.switch_to(id);
            let Some(vcpu) = self.vcpus.get_mut(&id) else {
                continue;
            };
            let done = vcpu.do_jobs(self.index);
            if !vcpu.is_blocked() {
                self.queue.unblock(id);
            }
            if let Err(failure) = done {
                self.end(id, Err(failure)).map(&mut *on_end);
            }
        }
    }

    fn do_core_job(&mut self, job: Job) {
        if let Some(pmu) = &mut self.pmu {
            serve_core(job, pmu);
        } else if let Some(vcpu) = self.last.and_then(|id| self.vcpus.get_mut(&id)) {
            vcpu.do_core_job(job);
        }
        // A core without counters: the job comes back.
    }

    /// No vCPU could be run for so long.
    pub(super) fn was_idle(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(pmu) = &mut self.pmu {
            pmu.pass_idle(ns);
        } else if let Some(vcpu) = self.last.and_then(|id| self.vcpus.get_mut(&id)) {
            vcpu.with_core(|core| core.pass_idle(ns));
        }
    }
}
