//! What a thread that runs vCPUs tells about them, for LIST.

use perfmon_abi::wire::info::VcpuState;
use pmu_virt::perfmon::{ContextId, Hosted, Phase};
use pmu_virt::{CorePmu, HolderReport, VcpuPmu};

/// What one thread has.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Its core; none where the core is not its own.
    pub cores: Vec<CoreView>,
    /// The vCPUs that it runs.
    pub vcpus: Vec<VcpuView>,
}

/// A vCPU.
#[derive(Clone, Debug)]
pub struct VcpuView {
    pub(crate) vcpu: usize,
    pub(crate) state: VcpuState,
    pub(crate) context: Option<ContextView>,
}

/// A core.
#[derive(Clone, Debug)]
pub struct CoreView {
    pub(crate) core: usize,
    /// The vCPU that has the counters.
    pub(crate) vcpu: Option<usize>,
    pub(crate) context: Option<ContextView>,
    pub(crate) holders: Vec<HolderReport>,
}

/// An attached context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextView {
    pub(crate) id: ContextId,
    pub(crate) phase: Phase,
    pub(crate) started: bool,
    pub(crate) preempted: bool,
    pub(crate) sets: usize,
    pub(crate) active_set: u16,
    pub(crate) dropped: u64,
}

impl ContextView {
    fn of(hosted: &Hosted) -> Self {
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

impl VcpuView {
    /// vCPU number `vcpu`. If no context blocks it, it is in state `otherwise`.
    #[must_use]
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

impl CoreView {
    /// Core number `core` with counters `pmu`, which `vcpu` has.
    #[must_use]
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
