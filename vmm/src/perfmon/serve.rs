//! What a thread that runs vCPUs does with a job.

use perfmon_abi::wire::info::VcpuState;
use pmu_virt::perfmon::{ContextId, Hosted, Quantities};
use pmu_virt::{CorePmu, VcpuPmu};

use super::desk::{Done, Job, Target, Tray, Work};
use super::view::{CoreView, VcpuView, View};

/// Does a job for a vCPU, or for the core that it is on.
pub(crate) fn serve_vcpu(
    job: Job,
    (pmu, core): (&mut VcpuPmu, &mut CorePmu),
    values: &dyn Quantities,
) {
    if job.is_look() {
        let (Target::Vcpu(number) | Target::Core(number)) = job.target();
        // The vCPU's thread is its core.
        let view = View {
            cores: vec![CoreView::of(number, Some(number), Some(core))],
            vcpus: vec![VcpuView::of(number, Some(pmu), VcpuState::Running)],
        };
        return serve_look(job, view);
    }
    match job.target() {
        Target::Vcpu(_) => job.act(|id, work| on_vcpu(pmu, core, id, work, values)),
        Target::Core(_) => {
            pmu.with_core(core, |core| {
                job.act(|id, work| on_core(core, id, work, values));
            });
        }
    }
}

/// Does a job for a core on which no vCPU is.
pub(crate) fn serve_core(job: Job, core: &mut CorePmu, values: &dyn Quantities) {
    job.act(|id, work| on_core(core, id, work, values));
}

/// Says what there is.
pub(crate) fn serve_look(job: Job, view: View) {
    job.act(|_, _| Done::Seen(Box::new(view)));
}

/// A vCPU has ended, and with it its core if that was its own (`alone`).
pub(crate) fn close_vcpu(
    tray: Tray,
    (pmu, mut core): (Option<&mut VcpuPmu>, Option<&mut CorePmu>),
    alone: bool,
    values: &dyn Quantities,
) {
    let (mut own, mut of_core) = (None, None);
    if let Some(pmu) = pmu {
        own = kept(pmu.unload_context(core.as_deref_mut()), values);
        if let (true, Some(core)) = (alone, core) {
            of_core = pmu.with_core(core, |core| kept(core.unload_context(), values));
        }
    }
    tray.close(own, of_core, alone);
}

/// A core has ended.
pub(crate) fn close_core(tray: Tray, core: Option<&mut CorePmu>, values: &dyn Quantities) {
    let own = core.and_then(|core| kept(core.unload_context(), values));
    tray.close(own, None, false);
}

/// A context that was unloaded, with the quantities as of now.
fn kept(unloaded: Option<Box<Hosted>>, values: &dyn Quantities) -> Option<Box<Hosted>> {
    let mut hosted = unloaded?;
    hosted.keep_quantities(values);
    Some(hosted)
}

fn on_vcpu(
    pmu: &mut VcpuPmu,
    core: &mut CorePmu,
    id: ContextId,
    work: Work,
    values: &dyn Quantities,
) -> Done {
    // A context that has left in the meantime is not here to be called.
    let here = pmu.host_context().map(Hosted::id) == Some(id);
    let core = Some(core);
    match work {
        Work::Load(hosted, set) => Done::Loaded(pmu.load_context(core, hosted, set)),
        Work::Unload if here => Done::Unloaded(kept(pmu.unload_context(core), values)),
        Work::Unload => Done::Unloaded(None),
        Work::Call(mut call) if here => {
            let result = pmu.call_context(core, &mut call, values);
            Done::Called(call, result)
        }
        other @ (Work::Call(_) | Work::Look) => Done::Undone(other),
    }
}

fn on_core(core: &mut CorePmu, id: ContextId, work: Work, values: &dyn Quantities) -> Done {
    let here = core.host_context().map(Hosted::id) == Some(id);
    match work {
        Work::Load(hosted, set) => Done::Loaded(core.load_context(hosted, set)),
        Work::Unload if here => Done::Unloaded(kept(core.unload_context(), values)),
        Work::Unload => Done::Unloaded(None),
        Work::Call(mut call) if here => {
            let result = core.call_context(&mut call, values);
            Done::Called(call, result)
        }
        other @ (Work::Call(_) | Work::Look) => Done::Undone(other),
    }
}
