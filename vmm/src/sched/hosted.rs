//! What host tools ask of a core.

use std::time::Duration;

use perfmon_abi::wire::info::VcpuState;

use super::core::{CoreEnd, CoreThread};
use crate::kvm::VcpuId;
use crate::perfmon::{CoreView, Job, Snapshot, Tray, VcpuView, View, serve_core, serve_look};
use crate::vcpu::{Vcpu, VcpuFailure};

impl CoreThread {
    /// Does what lies on the desk for the core and its vCPUs; `on_end` gets a
    /// vCPU that failed in it.
    pub(super) fn do_jobs(&mut self, on_end: &mut impl FnMut(CoreEnd)) {
        while let Some(job) = self.tray.as_ref().and_then(Tray::take) {
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
            let done = vcpu.do_jobs(&mut self.seat);
            if !vcpu.is_blocked() {
                self.queue.unblock(id);
            }
            if let Err(failure) = done {
                self.end(id, Err(failure)).map(&mut *on_end);
            }
        }
    }

    fn do_core_job(&mut self, job: Job) -> Result<(), (VcpuId, VcpuFailure)> {
        if job.is_look() {
            let view = self.view();
            serve_look(job, view);
            return Ok(());
        }
        let values = self.quantities();
        if let Some((id, vcpu)) = self
            .last
            .and_then(|id| Some((id, self.vcpus.get_mut(&id)?)))
        {
            let done = vcpu.do_core_job(job, &mut self.seat, &values);
            return done.map_err(|error| (id, error));
        }
        if let Some(pmu) = &mut self.seat.pmu {
            serve_core(job, pmu, &values);
        }
        // A core without counters: the job comes back.
        Ok(())
    }

    /// What the vCPUs of this core did on it, together.
    pub(super) fn quantities(&self) -> Snapshot {
        self.tally
            .read(|id| self.vcpus.get(&id).map(Vcpu::quantities))
    }

    /// What there is on this core.
    fn view(&self) -> View {
        let number = |id: VcpuId| usize::from(id.0);
        let pmu = self.seat.pmu.as_deref();
        let vcpu = |(id, vcpu): (&VcpuId, &Vcpu)| {
            let state = match self.last == Some(*id) {
                true => VcpuState::Running,
                false => VcpuState::Waiting,
            };
            VcpuView::of(number(*id), vcpu.pmu(), state)
        };
        View {
            cores: vec![CoreView::of(self.index, self.last.map(number), pmu)],
            vcpus: self.vcpus.iter().map(vcpu).collect(),
        }
    }

    /// No vCPU could be run for so long.
    pub(super) fn was_idle(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let Some(pmu) = &mut self.seat.pmu else {
            return;
        };
        match self.last.and_then(|id| self.vcpus.get_mut(&id)) {
            Some(vcpu) => vcpu.pass_idle(pmu, ns),
            None => pmu.pass_idle(ns),
        }
    }
}
