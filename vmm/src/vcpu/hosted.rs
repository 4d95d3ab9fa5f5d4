//! What host tools ask of the run loop: jobs from the desk, samples at
//! overflows, and a vCPU that waits for its tool.

use kvm_pmu::ThreadContext;
use pmu_virt::{CorePmu, VcpuPmu};

use super::observe::Reports;
use super::outcome::Runnability;
use super::run::{RunState, Vcpu, VcpuFailure};
use crate::kvm::KvmVcpu;
use crate::perfmon::{Job, Rested, Snapshot, close_vcpu, serve_vcpu};

impl RunState {
    /// Whether a tool's context keeps the vCPU off its core.
    pub(super) fn is_blocked(&self) -> bool {
        self.pmu.pmu().is_some_and(VcpuPmu::is_blocked)
    }

    /// Whether something may lie on the desk: one load, where there is a desk.
    #[inline]
    pub(super) fn has_jobs(&self) -> bool {
        self.host.as_ref().is_some_and(|host| host.tray.has_jobs())
    }

    /// The thread of `seat` runs the vCPU from now on.
    pub(super) fn comes_to(&self, seat: &ThreadContext) {
        if let Some(host) = &self.host {
            if !host.is_shared() {
                host.tray.sit_down();
            }
            host.tray.moved_to(seat.core().into());
            self.tally.comes();
        }
    }

    /// No thread runs the vCPU from now on, or it has woken meanwhile.
    pub(super) fn note_rest(&self, runnability: Runnability) {
        if self.host.is_some() {
            self.tally.goes(match runnability {
                Runnability::Runnable => Rested::Runnable,
                Runnability::Idle => Rested::Idle,
                Runnability::LockedOut { .. } | Runnability::Blocked => Rested::Held,
            });
        }
    }

    /// Does what lies on the desk, while the guest does not run.
    #[inline]
    pub(super) fn do_jobs(&mut self, kvm: &KvmVcpu, core: u16) -> Result<(), VcpuFailure> {
        match self.has_jobs() {
            true => self.do_waiting_jobs(kvm, core),
            false => Ok(()),
        }
    }

    fn do_waiting_jobs(&mut self, kvm: &KvmVcpu, core: u16) -> Result<(), VcpuFailure> {
        let (Some(host), Some(pmu)) = (&self.host, self.pmu.pmu_mut()) else {
            return Ok(());
        };
        while let Some(job) = host.tray.take() {
            serve_vcpu(job, pmu, &self.tally);
        }
        self.sample_pending(kvm, core)
    }

    /// Counters of tools that have overflowed get their samples and notices,
    /// before the guest runs on.
    #[inline]
    pub(super) fn sample_pending(&mut self, kvm: &KvmVcpu, core: u16) -> Result<(), VcpuFailure> {
        let mut reports = Reports {
            observer: &mut *self.observer,
            tally: &mut self.tally,
        };
        Ok(self.pmu.sample_pending(kvm.fd(), core, &mut reports)?)
    }
}

impl Vcpu {
    /// Whether something may lie on its desk.
    pub(crate) fn has_jobs(&self) -> bool {
        self.core.has_jobs()
    }

    /// Does what lies there, on the core that has it, while it is not run.
    pub(crate) fn do_jobs(&mut self, core: usize) -> Result<(), VcpuFailure> {
        let core = u16::try_from(core).unwrap_or(u16::MAX);
        self.core.do_jobs(&self.kvm, core)
    }

    /// Does a job for the core that it is on, number `core`.
    /// `values` are the core's.
    pub(crate) fn do_core_job(
        &mut self,
        job: Job,
        core: usize,
        values: &Snapshot,
    ) -> Result<(), VcpuFailure> {
        if let Some(pmu) = self.core.pmu.pmu_mut() {
            serve_vcpu(job, pmu, values);
        }
        // What the job has found overflowed is this vCPU's, not of who comes next.
        let core = u16::try_from(core).unwrap_or(u16::MAX);
        self.core.sample_pending(&self.kvm, core)
    }

    /// Its quantities now; asked on the thread that has it.
    pub(crate) fn quantities(&self) -> Snapshot {
        Snapshot::of(&self.core.tally)
    }

    /// `core` has it from now on.
    pub(crate) fn moves_to(&self, core: usize) {
        if let Some(host) = &self.core.host {
            host.tray.moved_to(core);
        }
    }

    /// Whether a tool's context keeps it off its core.
    pub(crate) fn is_blocked(&self) -> bool {
        self.core.is_blocked()
    }

    /// The core that it is on.
    pub(crate) fn with_core<R>(&mut self, act: impl FnOnce(&mut CorePmu) -> R) -> Option<R> {
        self.core.pmu.pmu_mut()?.with_core(act)
    }

    /// It has ended: tools get their contexts back.
    pub(crate) fn leave_desk(&mut self) {
        if let Some(host) = self.core.host.take() {
            let alone = !host.is_shared();
            close_vcpu(host.tray, self.core.pmu.pmu_mut(), alone, &self.core.tally);
        }
    }
}
