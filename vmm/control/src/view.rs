//! What a thread that runs vCPUs tells of them, for LIST.

use perfmon_abi::wire::info::VcpuState;
use pmu_virt::perfmon::{ContextId, Hosted, Phase};
use pmu_virt::{CorePmu, HolderReport, VcpuPmu};

/// A loaded context.
#[derive(Clone, Copy, Debug)]
pub struct ContextView {
    pub(super) id: ContextId,
    pub(super) phase: Phase,
    pub(super) started: bool,
    pub(super) preempted: bool,
    pub(super) sets: usize,
    pub(super) active_set: u16,
    pub(super) dropped: u64,
}

impl ContextView {
    pub fn of(hosted: &Hosted) -> Self {
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
pub struct VcpuView {
    pub vcpu: usize,
    pub state: VcpuState,
    pub context: Option<ContextView>,
}

impl VcpuView {
    pub fn of(vcpu: usize, pmu: Option<&VcpuPmu>, otherwise: VcpuState) -> Self {
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
pub struct CoreView {
    pub core: usize,
    /// Who is on it.
    pub vcpu: Option<usize>,
    pub context: Option<ContextView>,
    pub holders: Vec<HolderReport>,
}

impl CoreView {
    pub fn of(core: usize, vcpu: Option<usize>, pmu: Option<&CorePmu>) -> Self {
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
    pub cores: Vec<CoreView>,
    pub vcpus: Vec<VcpuView>,
}
