//! A vCPU's side of the control socket: jobs of tools, and where it is while they ask.

use kvm_pmu::{ThreadContext, now};
use perfmon_abi::wire::info::VcpuState;
use pmu_virt::{CorePmu, VcpuPmu};
use vmm_control::{
    ControlEndpoint, CoreView, OffCoreReason, VcpuQuantities, VcpuView, View, serve_inspection,
    serve_vcpu,
};

use super::outcome::Runnability;
use crate::control::VcpuThread;
use crate::kvm::{KvmVcpu, VcpuError};

/// The server of host tools, as one vCPU knows it.
#[derive(Debug)]
pub(super) struct Hosted {
    endpoint: Option<ControlEndpoint>,
    /// It waits for its start-up IPI, as far as tools want to know.
    awaits_startup: bool,
}

impl Hosted {
    /// With the way to the server, where there is one.
    pub(super) fn new(endpoint: Option<ControlEndpoint>) -> Self {
        Self {
            endpoint,
            awaits_startup: false,
        }
    }

    /// Whether there may be jobs: one load, where there is a control socket.
    #[inline]
    pub(super) fn has_jobs(&self) -> bool {
        self.endpoint.as_ref().is_some_and(|host| host.has_jobs())
    }

    /// Whether it waited for its start-up IPI when it was looked at last.
    #[inline]
    pub(super) fn awaits_startup(&self) -> bool {
        self.awaits_startup
    }

    /// `thread` runs the vCPU from now on.
    pub(super) fn comes_to(
        &mut self,
        kvm: &KvmVcpu,
        thread: &ThreadContext,
        tally: &VcpuQuantities,
    ) -> Result<(), VcpuError> {
        let Some(host) = &self.endpoint else {
            return Ok(());
        };
        host.run_by(thread.core().into(), VcpuThread(thread.target()));
        self.note_startup(kvm, tally)
    }

    /// Whose time this thread's is: one that waits for its start-up IPI sleeps in
    /// `KVM_RUN`, and KVM's statistics do not count that as halted.
    pub(super) fn note_startup(
        &mut self,
        kvm: &KvmVcpu,
        tally: &VcpuQuantities,
    ) -> Result<(), VcpuError> {
        self.awaits_startup = kvm.awaits_startup()?;
        if self.awaits_startup {
            tally.off_thread(OffCoreReason::Idle);
        } else {
            tally.on_thread();
        }
        Ok(())
    }

    /// No thread runs the vCPU from now on, or it has woken meanwhile.
    pub(super) fn note_rest(&self, runnability: Runnability, tally: &VcpuQuantities) {
        if self.endpoint.is_some() {
            tally.off_thread(match runnability {
                Runnability::Runnable => OffCoreReason::Runnable,
                Runnability::Idle => OffCoreReason::Idle,
                Runnability::LockedOut { .. } | Runnability::Blocked => OffCoreReason::Held,
            });
        }
    }

    /// `core` has it from now on, and has not run it yet.
    pub(super) fn moves_to(&self, core: usize) {
        if let Some(host) = &self.endpoint {
            host.moved_to(core);
        }
    }

    /// Does the jobs of the control socket, while the guest does not run.
    pub(super) fn do_jobs(
        &mut self,
        kvm: &KvmVcpu,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
        tally: &VcpuQuantities,
    ) -> Result<(), VcpuError> {
        let Some(host) = &mut self.endpoint else {
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
            serve_vcpu(job, pmu, core, tally);
        }
        if stood && !pmu.hosts().is_paused() {
            note_stopped(kvm);
        }
        Ok(())
    }

    /// Passes on what the guest has answered.
    pub(super) fn hear_owners(&mut self, pmu: &mut VcpuPmu, core: Option<&mut CorePmu>) {
        if let Some(host) = &mut self.endpoint {
            host.hear_owners(pmu, core);
        }
    }

    /// The vCPU has ended: tools get their contexts back. `core` is the one that it was
    /// on, if it was on one.
    pub(super) fn close(
        &mut self,
        pmu: Option<&mut VcpuPmu>,
        core: Option<&mut CorePmu>,
        tally: &VcpuQuantities,
    ) {
        if let Some(host) = self.endpoint.take() {
            host.close(pmu, core, tally);
        }
    }
}

/// Tells a guest that reads KVM's clock that it was stopped, so that its watchdogs do
/// not take the time for a lockup. Others do not hear of it.
fn note_stopped(kvm: &KvmVcpu) {
    let _ = kvm.fd().kvmclock_ctrl();
}

/// A vCPU outside of `KVM_RUN`, which is in state `otherwise` if it was started and
/// nothing blocks it.
pub(super) fn view(
    kvm: &KvmVcpu,
    pmu: Option<&VcpuPmu>,
    otherwise: VcpuState,
) -> Result<VcpuView, VcpuError> {
    let state = if kvm.awaits_startup()? {
        VcpuState::Offline
    } else {
        otherwise
    };
    Ok(VcpuView::of(kvm.id().0.into(), pmu, state).halted(kvm.is_halted()?))
}
