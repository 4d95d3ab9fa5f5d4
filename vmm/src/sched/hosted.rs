//! Jobs of the control socket on a core, for the core and for its vCPUs.

use std::time::Duration;

use perfmon_abi::wire::info::VcpuState;
use vmm_control::{CoreView, Job, JobQueue, Snapshot, View, serve_core, serve_inspection};

use super::core::{CoreEnd, CoreThread};
use crate::kvm::VcpuId;
use crate::vcpu::{Vcpu, VcpuFailure};

impl CoreThread {
    /// Does the jobs for the core and its vCPUs; `on_end` gets a
    /// vCPU that failed in it.
    pub(super) fn do_jobs(&mut self, on_end: &mut impl FnMut(CoreEnd)) {
        while let Some(job) = self.jobs.as_ref().and_then(JobQueue::take) {
            if let Err((id, failure)) = self.do_core_job(job) {
                self.end(id, Err(failure)).map(&mut *on_end);
            }
        }
        let waits = |(id, vcpu): (&VcpuId, &Vcpu)| vcpu.has_jobs().then_some(*id);
        let waiting: Vec<VcpuId> = self.vcpus.iter().filter_map(waits).collect();
        for id in waiting {
            // What a context may have is decided by the core that it is on.
            self.switch_to(id);
            let Some(vcpu) = self.vcpus.get_mut(&id) else {
                continue;
            };
            let done = vcpu.do_jobs(&mut self.thread);
            if !vcpu.is_blocked() {
                self.queue.unblock(id);
            }
            if let Err(failure) = done {
                self.end(id, Err(failure)).map(&mut *on_end);
            }
        }
    }

    fn do_core_job(&mut self, job: Job) -> Result<(), (VcpuId, VcpuFailure)> {
        if job.is_inspection() {
            serve_inspection(job, self.view()?);
            return Ok(());
        }
        let values = self.quantities();
        let last = self.last;
        if let Some((id, vcpu)) = last.and_then(|id| Some((id, self.vcpus.get_mut(&id)?))) {
            let done = vcpu.do_core_job(job, &mut self.thread, &values);
            return done.map_err(|error| (id, error));
        }
        if let Some(pmu) = self.thread.counters_mut() {
            serve_core(job, pmu, &values);
        }
        // A core without counters: the job comes back.
        Ok(())
    }

    /// The quantities of this core: what its vCPUs did on it, together.
    pub(super) fn quantities(&self) -> Snapshot {
        self.tally.read(|id| {
            self.vcpus
                .get(&VcpuId(u8::try_from(id).ok()?))
                .map(Vcpu::quantities)
        })
    }

    /// What there is on this core.
    fn view(&self) -> Result<View, (VcpuId, VcpuFailure)> {
        let number = |id: VcpuId| usize::from(id.0);
        let pmu = self.thread.counters();
        let vcpu = |(id, vcpu): (&VcpuId, &Vcpu)| {
            let state = if self.last == Some(*id) {
                VcpuState::Running
            } else {
                VcpuState::Waiting
            };
            vcpu.view(state).map_err(|failure| (*id, failure))
        };
        Ok(View {
            cores: vec![CoreView::of(self.index, self.last.map(number), pmu)],
            vcpus: self.vcpus.iter().map(vcpu).collect::<Result<_, _>>()?,
        })
    }

    /// Accounts for `time` in which no vCPU could run.
    pub(super) fn was_idle(&mut self, time: Duration) {
        let Some(pmu) = self.thread.counters_mut() else {
            return;
        };
        match self.last.and_then(|id| self.vcpus.get_mut(&id)) {
            Some(vcpu) => vcpu.pass_idle(pmu, time),
            None => pmu.pass_idle(time),
        }
    }
}
