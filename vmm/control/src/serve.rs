//! What a thread that runs vCPUs does with a job.

use perfmon_abi::wire::info::VcpuState;
use pmu_virt::perfmon::{ContextId, Hosted, Quantities};
use pmu_virt::{CorePmu, VcpuPmu};

use super::dispatcher::{Done, Job, JobQueue, Target, Work};
use super::view::{CoreView, VcpuView, View};

/// Does a job for a vCPU, or for the core that it is on.
pub fn serve_vcpu(job: Job, pmu: &mut VcpuPmu, values: &dyn Quantities) {
    if job.is_inspection() {
        let (Target::Vcpu(number) | Target::Core(number)) = job.target();
        // The vCPU's thread is its core.
        let view = View {
            cores: vec![CoreView::of(number, Some(number), pmu.core())],
            vcpus: vec![VcpuView::of(number, Some(pmu), VcpuState::Running)],
        };
        return serve_inspection(job, view);
    }
    match job.target() {
        Target::Vcpu(_) => job.act(|id, work| on_vcpu(pmu, id, work, values)),
        // If nobody has the core, the job comes back as it is dropped.
        Target::Core(_) => {
            pmu.with_core(|core| job.act(|id, work| on_core(core, id, work, values)));
        }
    }
}

/// Does a job for a core on which no vCPU is.
pub fn serve_core(job: Job, core: &mut CorePmu, values: &dyn Quantities) {
    job.act(|id, work| on_core(core, id, work, values));
}

/// Says what there is.
pub fn serve_inspection(job: Job, view: View) {
    job.act(|_, _| Done::Inspected(Box::new(view)));
}

/// A vCPU has ended, and with it its core if that was its own (`alone`).
pub fn close_vcpu(
    queue: JobQueue,
    pmu: Option<&mut VcpuPmu>,
    alone: bool,
    values: &dyn Quantities,
) {
    let (mut own, mut core) = (None, None);
    if let Some(pmu) = pmu {
        own = Host::unload(pmu, values);
        if alone {
            let unload = |core: &mut CorePmu| Host::unload(core, values);
            core = pmu.with_core(unload).flatten();
        }
    }
    queue.close(own, core, alone);
}

/// A core has ended.
pub fn close_core(queue: JobQueue, core: Option<&mut CorePmu>, values: &dyn Quantities) {
    let own = core.and_then(|core| Host::unload(core, values));
    queue.close(own, None, false);
}

/// The two that contexts are attached to, as far as jobs are concerned.
trait Host {
    fn hosted(&self) -> Option<ContextId>;
    fn load(&mut self, hosted: Box<Hosted>, set: u16) -> Done;
    fn unload(&mut self, values: &dyn Quantities) -> Option<Box<Hosted>>;
}

macro_rules! hosts {
    ($($host:ty),*) => {$(
        impl Host for $host {
            fn hosted(&self) -> Option<ContextId> {
                self.host_context().map(Hosted::id)
            }
            fn load(&mut self, hosted: Box<Hosted>, set: u16) -> Done {
                Done::Loaded(self.load_context(hosted, set))
            }
            fn unload(&mut self, values: &dyn Quantities) -> Option<Box<Hosted>> {
                let mut hosted = self.unload_context()?;
                hosted.keep_quantities(values);
                Some(hosted)
            }
        }
    )*};
}

hosts!(VcpuPmu, CorePmu);

/// Loads and unloads; a command is left to the caller.
fn attach_or_detach(
    host: &mut dyn Host,
    id: ContextId,
    work: Work,
    values: &dyn Quantities,
) -> Result<Done, Work> {
    // A context that has left in the meantime is not here to be called.
    let here = host.hosted() == Some(id);
    match work {
        Work::Load(hosted, set) => Ok(host.load(hosted, set)),
        Work::Unload if here => Ok(Done::Unloaded(host.unload(values))),
        Work::Unload => Ok(Done::Unloaded(None)),
        call @ Work::Call(_) if here => Err(call),
        other @ (Work::Call(_) | Work::Inspect) => Ok(Done::Undone(other)),
    }
}

fn on_vcpu(pmu: &mut VcpuPmu, id: ContextId, work: Work, values: &dyn Quantities) -> Done {
    match attach_or_detach(pmu, id, work, values) {
        Ok(done) => done,
        Err(Work::Call(mut call)) => {
            let result = pmu.call_context(&mut call, values);
            Done::Called(call, result)
        }
        Err(work) => Done::Undone(work),
    }
}

fn on_core(core: &mut CorePmu, id: ContextId, work: Work, values: &dyn Quantities) -> Done {
    match attach_or_detach(core, id, work, values) {
        Ok(done) => done,
        Err(Work::Call(mut call)) => {
            let result = core.call_context(&mut call, values);
            Done::Called(call, result)
        }
        Err(work) => Done::Undone(work),
    }
}
