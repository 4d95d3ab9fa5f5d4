//! A vCPU's side of the control socket: jobs of tools, and where it is while they ask.

use kvm_pmu::Tsc;
use perfmon_abi::wire::info::VcpuState;
use pmu_virt::{CorePmu, VcpuPmu};
use vmm_control::{
    ControlEndpoint, CoreView, KickThread, OffCoreReason, VcpuQuantities, VcpuView, View,
    serve_inspection, serve_vcpu,
};

use super::outcome::Runnability;
use crate::kvm::{KvmVcpu, VcpuError, VcpuId};

/// What tools are told of a vCPU that stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VcpuFacts {
    pub(crate) id: VcpuId,
    /// It waits for INIT or a start-up IPI.
    pub(crate) awaits_startup: bool,
    /// It has executed HLT, and waits for an interrupt.
    pub(crate) halted: bool,
}

impl VcpuFacts {
    /// Of a vCPU outside of `KVM_RUN`.
    ///
    /// # Errors
    /// The error of `KVM_GET_MP_STATE`.
    pub(super) fn of(kvm: &KvmVcpu) -> Result<Self, VcpuError> {
        Ok(Self {
            id: kvm.id(),
            awaits_startup: kvm.awaits_startup()?,
            halted: kvm.is_halted()?,
        })
    }
}

/// The server of host tools, as one vCPU knows it.
#[derive(Debug)]
pub(crate) struct Hosted {
    endpoint: Option<ControlEndpoint>,
    /// It waits for its start-up IPI, as far as tools want to know.
    awaits_startup: bool,
}

impl Hosted {
    /// With the way to the server, where there is one.
    pub(crate) fn new(endpoint: Option<ControlEndpoint>) -> Self {
        Self {
            endpoint,
            awaits_startup: false,
        }
    }

    /// Whether there may be jobs: one load, where there is a control socket.
    #[inline]
    pub(crate) fn has_jobs(&self) -> bool {
        self.endpoint.as_ref().is_some_and(|host| host.has_jobs())
    }

    /// Whether it waited for its start-up IPI when it was looked at last.
    #[inline]
    pub(super) fn awaits_startup(&self) -> bool {
        self.awaits_startup
    }

    /// Whether there is a server.
    #[inline]
    pub(crate) fn is_served(&self) -> bool {
        self.endpoint.is_some()
    }

    /// `thread`, which is `core`'s, runs the vCPU from now on.
    pub(crate) fn comes_to(&self, core: usize, thread: impl KickThread + 'static) {
        if let Some(host) = &self.endpoint {
            host.run_by(core, thread);
        }
    }

    /// Whose time this thread's is: one that waits for its start-up IPI sleeps, which the
    /// engine's own statistics do not count as halted.
    pub(crate) fn note_startup(&mut self, awaits: bool, tally: &VcpuQuantities) {
        self.awaits_startup = awaits;
        if awaits {
            tally.off_thread(OffCoreReason::Idle);
        } else {
            tally.on_thread();
        }
    }

    /// No thread runs the vCPU from now on, or it has woken meanwhile.
    pub(crate) fn note_rest(&self, runnability: Runnability, tally: &VcpuQuantities) {
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

    /// Does the jobs of the control socket, while the guest does not run; true if one has let
    /// it go on after a pause. `facts` are asked for only where a job wants them.
    ///
    /// # Errors
    /// That of `facts`.
    pub(crate) fn do_jobs<E>(
        &mut self,
        facts: impl Fn() -> Result<VcpuFacts, E>,
        (pmu, core): (&mut VcpuPmu, &mut CorePmu),
        tally: &VcpuQuantities,
        now: impl Fn() -> Tsc,
    ) -> Result<bool, E> {
        let Some(host) = &mut self.endpoint else {
            return Ok(false);
        };
        let stood = pmu.hosts().is_paused();
        while let Some(job) = host.take() {
            if job.is_inspection() {
                // The vCPU has its core to itself.
                let facts = facts()?;
                let number = facts.id.index();
                let view = View {
                    cores: vec![CoreView::of(number, Some(number), Some(core))],
                    vcpus: vec![view(facts, Some(pmu), VcpuState::Running)],
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
        Ok(stood && !pmu.hosts().is_paused())
    }

    /// Passes on what the guest has answered.
    pub(crate) fn hear_owners(&mut self, pmu: &mut VcpuPmu, core: Option<&mut CorePmu>) {
        if let Some(host) = &mut self.endpoint {
            host.hear_owners(pmu, core);
        }
    }

    /// The vCPU has ended: tools get their contexts back. `core` is the one that it was
    /// on, if it was on one.
    pub(crate) fn close(
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

/// A vCPU that stands still, and is in state `otherwise` if it was started and nothing blocks
/// it.
pub(super) fn view(facts: VcpuFacts, pmu: Option<&VcpuPmu>, otherwise: VcpuState) -> VcpuView {
    let state = if facts.awaits_startup {
        VcpuState::Offline
    } else {
        otherwise
    };
    VcpuView::of(facts.id.index(), pmu, state).halted(facts.halted)
}
