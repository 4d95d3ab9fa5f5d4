//! What host tools ask of the run loop: jobs of the control socket, samples at
//! overflows, and a vCPU that waits for its tool.

use std::time::Duration;

use kvm_pmu::{ThreadContext, Tsc, now};
use perfmon_abi::wire::info::VcpuState;
use pmu_virt::{CorePmu, VcpuPmu};
use vmm_control::{
    CoreView, Job, OffCoreReason, Snapshot, VcpuView, View, serve_inspection, serve_vcpu,
};

use super::outcome::Runnability;
use super::run::{RunState, Vcpu, VcpuFailure};
use crate::control::VcpuThread;
use crate::kvm::{KvmVcpu, VcpuError};

impl RunState {
    /// Whether a tool's context keeps the vCPU off its core.
    pub(super) fn is_blocked(&self) -> bool {
        self.pmu.pmu().is_some_and(|pmu| pmu.hosts().is_blocked())
    }

    /// Whether the guest has asked for counters that another core has.
    #[inline]
    pub(super) fn waits_for_room(&self) -> bool {
        self.pmu
            .pmu()
            .is_some_and(|pmu| pmu.claims().waits_for_room())
    }

    /// Whether there may be jobs: one load, where there is a control socket.
    #[inline]
    pub(super) fn has_jobs(&self) -> bool {
        self.host.as_ref().is_some_and(|host| host.has_jobs())
    }

    /// `thread` runs the vCPU from now on.
    pub(super) fn comes_to(
        &mut self,
        kvm: &KvmVcpu,
        thread: &ThreadContext,
    ) -> Result<(), VcpuError> {
        let Some(host) = &self.host else {
            return Ok(());
        };
        host.run_by(thread.core().into(), VcpuThread(thread.target()));
        self.note_startup(kvm)
    }

    /// Whose time this thread's is: one that waits for its start-up IPI sleeps in
    /// `KVM_RUN`, and KVM's statistics do not count that as halted.
    pub(super) fn note_startup(&mut self, kvm: &KvmVcpu) -> Result<(), VcpuError> {
        self.awaits_startup = kvm.awaits_startup()?;
        if self.awaits_startup {
            self.reports.tally.off_thread(OffCoreReason::Idle);
        } else {
            self.reports.tally.on_thread();
        }
        Ok(())
    }

    /// No thread runs the vCPU from now on, or it has woken meanwhile.
    pub(super) fn note_rest(&self, runnability: Runnability) {
        if self.host.is_some() {
            self.reports.tally.off_thread(match runnability {
                Runnability::Runnable => OffCoreReason::Runnable,
                Runnability::Idle => OffCoreReason::Idle,
                Runnability::LockedOut { .. } | Runnability::Blocked => OffCoreReason::Held,
            });
        }
    }

    /// Does the jobs of the control socket, while the guest does not run.
    pub(super) fn do_jobs(
        &mut self,
        kvm: &KvmVcpu,
        thread: &mut ThreadContext,
    ) -> Result<(), VcpuFailure> {
        let pmu = (self.pmu.pmu_mut(), thread.counters_mut());
        let (Some(host), (Some(pmu), Some(core))) = (&mut self.host, pmu) else {
            return Ok(());
        };
        let stood = pmu.hosts().is_paused();
        while let Some(job) = host.take() {
            if job.is_inspection() {
                // The vCPU's thread is its core.
                let number = usize::from(kvm.id().0);
                let view = View {
                    cores: vec![CoreView::of(number, Some(number), Some(core))],
                    vcpus: vec![view(kvm, Some(pmu), VcpuState::Running)?],
                };
                serve_inspection(job, view);
                continue;
            }
            if job.is_administration() {
                // One that was not run for some time has leases that have ended.
                pmu.tick(Some(&mut *core), now());
            }
            if job.is_question() {
                host.ask_owners(job, pmu, core);
                continue;
            }
            serve_vcpu(job, pmu, core, &self.reports.tally);
        }
        if stood && !pmu.hosts().is_paused() {
            note_stopped(kvm);
        }
        if pmu.hosts().has_overflow(core) {
            self.sample_pending(kvm, thread)
        } else {
            Ok(())
        }
    }

    /// Counters of tools that have overflowed get their samples and notices,
    /// before the guest runs on.
    fn sample_pending(
        &mut self,
        kvm: &KvmVcpu,
        thread: &mut ThreadContext,
    ) -> Result<(), VcpuFailure> {
        let reports = &mut self.reports;
        Ok(self.pmu.sample_pending(kvm, thread, reports)?)
    }
}

/// Tells a guest that reads KVM's clock that it was stopped, so that its watchdogs do
/// not take the time for a lockup. Others do not hear of it.
fn note_stopped(kvm: &KvmVcpu) {
    let _ = kvm.fd().kvmclock_ctrl();
}

/// A vCPU outside of `KVM_RUN`, which is in state `otherwise` if it was started and
/// nothing blocks it.
fn view(kvm: &KvmVcpu, pmu: Option<&VcpuPmu>, otherwise: VcpuState) -> Result<VcpuView, VcpuError> {
    let state = if kvm.awaits_startup()? {
        VcpuState::Offline
    } else {
        otherwise
    };
    Ok(VcpuView::of(kvm.id().0.into(), pmu, state).halted(kvm.is_halted()?))
}

impl Vcpu {
    /// What there is of it, for tools.
    pub(crate) fn view(&self, otherwise: VcpuState) -> Result<VcpuView, VcpuFailure> {
        Ok(view(&self.kvm, self.core.pmu.pmu(), otherwise)?)
    }

    /// Whether there may be jobs for it.
    pub(crate) fn has_jobs(&self) -> bool {
        self.core.has_jobs()
    }

    /// Does its jobs on the core that has it, while it is not run.
    pub(crate) fn do_jobs(&mut self, thread: &mut ThreadContext) -> Result<(), VcpuFailure> {
        self.core.do_jobs(&self.kvm, thread)
    }

    /// Does a job for the core that it is on, that of `thread`. `values` are the
    /// core's.
    pub(crate) fn do_core_job(
        &mut self,
        job: Job,
        thread: &mut ThreadContext,
        values: &Snapshot,
    ) -> Result<(), VcpuFailure> {
        if let (Some(pmu), Some(core)) = (self.core.pmu.pmu_mut(), thread.counters_mut()) {
            serve_vcpu(job, pmu, core, values);
        }
        // What the job has found overflowed is this vCPU's, not of who comes next.
        self.core.sample_pending(&self.kvm, thread)
    }

    /// Its quantities now; asked on the thread that has it.
    pub(crate) fn quantities(&self) -> Snapshot {
        Snapshot::of(&self.core.reports.tally)
    }

    /// `core` has it from now on, and has not run it yet.
    pub(crate) fn moves_to(&self, core: usize, runnability: Runnability) {
        if let Some(host) = &self.core.host {
            host.moved_to(core);
            // One that waits for its start-up IPI may never be run.
            self.core.note_rest(runnability);
        }
    }

    /// Whether a tool's context keeps it off its core.
    pub(crate) fn is_blocked(&self) -> bool {
        self.core.is_blocked()
    }

    /// Lets take place what is due by `now` although it may not run; when the next is due.
    /// `None`: nothing is, or it may run.
    pub(crate) fn tick_held(&mut self, thread: &mut ThreadContext, now: Tsc) -> Option<Tsc> {
        let due = |core: &RunState| core.pmu.pmu().and_then(|pmu| pmu.claims().due());
        let at = due(&self.core)?;
        if !self.core.is_blocked() && self.core.pmu.locked_out_until().is_none() {
            return None;
        }
        if at > now {
            return Some(at);
        }
        self.core.tick(thread);
        due(&self.core)
    }

    /// Nothing ran on `core`, on which it is, for `time`.
    pub(crate) fn pass_idle(&mut self, core: &mut CorePmu, time: Duration) {
        if let Some(pmu) = self.core.pmu.pmu_mut() {
            pmu.with_core(core, |core| core.pass_idle(time));
        }
    }

    /// It has ended: tools get their contexts back. `core` is the one that it was
    /// on, if it was on one.
    pub(crate) fn close_endpoint(&mut self, core: Option<&mut CorePmu>) {
        if let Some(host) = self.core.host.take() {
            host.close(self.core.pmu.pmu_mut(), core, &self.core.reports.tally);
        }
    }
}
