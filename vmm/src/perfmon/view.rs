//! What a thread that runs vCPUs tells of them, for LIST.

use perfmon_abi::wire::info::VcpuState;
use pmu_virt::perfmon::{ContextId, Hosted, Phase};
use pmu_virt::{CorePmu, HolderReport, VcpuPmu};

/// A loaded context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextView {
    pub(super) id: ContextId,
    pub(super) phase: Phase,
    pub(super) started: bool,
    pub(super) preempted: bool,
    pub(super) sets: usize,
    pub(super) active_set: u16,
    pub(super) dropped: u64,
}

impl ContextView {
    pub(crate) fn of(hosted: &Hosted) -> Self {
        let context = hosted.context();
        Self {
            id: hosted.id(),
            phase: context.phase(),
            started: context.is_started(),
            preempted: hosted.is_preempted(),
            sets: context.set_count(),
            active_set: context.active_set(),
            dropped: context.account().dropped,
        }
    }
}

/// A vCPU.
#[derive(Clone, Debug)]
pub(crate) struct VcpuView {
    pub(crate) vcpu: usize,
    pub(crate) state: VcpuState,
    pub(crate) context: Option<ContextView>,
}

impl VcpuView {
    pub(crate) fn of(vcpu: usize, pmu: Option<&VcpuPmu>, otherwise: VcpuState) -> Self {
        let blocked = pmu.is_some_and(VcpuPmu::is_blocked);
        Self {
            vcpu,
            state: if blocked {
                VcpuState::Blocked
            } else {
                otherwise
            },
            context: pmu.and_then(VcpuPmu::host_context).map(ContextView::of),
        }
    }
}

/// A core.
#[derive(Clone, Debug)]
pub(crate) struct CoreView {
    pub(crate) core: usize,
    /// Who is on it.
    pub(crate) vcpu: Option<usize>,
    pub(crate) context: Option<ContextView>,
    pub(crate) holders: Vec<HolderReport>,
}

impl CoreView {
    pub(crate) fn of(core: usize, vcpu: Option<usize>, pmu: Option<&CorePmu>) -> Self {
        let context = pmu.and_then(CorePmu::host_context);
        Self {
            core,
            vcpu,
            context: context.map(ContextView::of),
            holders: pmu.map(CorePmu::holders).unwrap_or_default(),
        }
    }
}

/// What one thread knows.
#[derive(Clone, Debug, Default)]
pub struct View {
    pub(crate) cores: Vec<CoreView>,
    pub(crate) vcpus: Vec<VcpuView>,
}
