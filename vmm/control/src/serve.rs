//! What a thread that runs vCPUs does with a job.

use perfmon_abi::wire::info::VcpuState;
use perfmon_abi::wire::pause::PauseInfo;
use perfmon_abi::wire::{Call, Refusal};
use pmu_virt::perfmon::{AttachedContext, ContextId, NotLoaded, Quantities};
use pmu_virt::{CorePmu, VcpuPmu};

use crate::budget;
use crate::dispatcher::JobQueue;
use crate::job::{
    Administered, Administration, CoreView, Done, Job, Target, VcpuFigures, VcpuView, View, Work,
};
use crate::pcr::{self, LONGEST_GRACE_MS};

/// Does a job for a vCPU, or for `core`, which the vCPU is on. `values` are the
/// quantities of whichever the job is about.
pub fn serve_vcpu(job: Job, pmu: &mut VcpuPmu, core: &mut CorePmu, values: &dyn Quantities) {
    if job.is_inspection() {
        let number = job.target().number();
        // The vCPU's thread is its core.
        let view = View {
            cores: vec![CoreView::of(number, Some(number), Some(core))],
            vcpus: vec![VcpuView::of(number, Some(pmu), VcpuState::Running)],
        };
        return serve_inspection(job, view);
    }
    match job.target() {
        Target::Vcpu(number) if job.is_administration() => {
            job.act(|_, work| match work {
                Work::Administer(request, what) => {
                    let done = match *what {
                        Administration::Pcr(act) => {
                            pcr::administer(number, pmu, core, &act).map(Administered::Pcr)
                        }
                        Administration::Budget(change) => {
                            budget::administer(number, pmu, core, change).map(Administered::Budget)
                        }
                        Administration::Pause(change) => {
                            let hosts = pmu.hosts_mut();
                            hosts.pause(change.unwrap_or(hosts.is_paused()));
                            Ok(Administered::Pause(PauseInfo {
                                vcpu: u32::try_from(number).unwrap_or(u32::MAX),
                                paused: hosts.is_paused(),
                            }))
                        }
                        Administration::Lease(most, grace_ms) => {
                            let grace_ms = grace_ms.min(LONGEST_GRACE_MS);
                            let done = pmu.set_lease(Some(core), most, grace_ms);
                            done.map(|()| Administered::Lease).map_err(Refusal::from)
                        }
                        Administration::Figures => {
                            Ok(Administered::Figures(VcpuFigures::of(values)))
                        }
                    };
                    Done::Administered(request, done)
                }
                other => Done::Undone(other),
            });
        }
        Target::Vcpu(_) => {
            let mut vcpu = VcpuHost(pmu, Some(core));
            job.act(|id, work| act(&mut vcpu, id, work, values));
        }
        Target::Core(_) => {
            pmu.with_core(core, |core| job.act(|id, work| act(core, id, work, values)));
        }
    }
}

/// Does a job for a core on which no vCPU is.
pub fn serve_core(job: Job, core: &mut CorePmu, values: &dyn Quantities) {
    job.act(|id, work| act(core, id, work, values));
}

/// Answers a job that asks what there is.
pub fn serve_inspection(job: Job, view: View) {
    job.act(|_, _| Done::Inspected(Box::new(view)));
}

/// The vCPU of `queue` has ended on `core`. If the vCPU's thread was its core, that
/// has ended as well (`alone`). Contexts go back to the server.
pub(crate) fn close_vcpu(
    queue: JobQueue,
    pmu: Option<&mut VcpuPmu>,
    mut core: Option<&mut CorePmu>,
    alone: bool,
    values: &dyn Quantities,
) {
    let (mut own, mut of_core) = (Vec::new(), Vec::new());
    if let Some(pmu) = pmu {
        own = unload_all(&mut VcpuHost(pmu, core.as_deref_mut()), values);
        if let (true, Some(core)) = (alone, core) {
            of_core = pmu.with_core(core, |core| unload_all(core, values));
        }
    }
    if alone {
        queue.close_with_core(own, of_core);
    } else {
        queue.close(own);
    }
}

/// The core of `queue` has ended. Its contexts go back to the server.
pub fn close_core(queue: JobQueue, core: Option<&mut CorePmu>, values: &dyn Quantities) {
    let contexts = core.map(|core| unload_all(core, values));
    queue.close(contexts.unwrap_or_default());
}

/// Takes every context off, the oldest first.
fn unload_all(host: &mut dyn Host, values: &dyn Quantities) -> Vec<AttachedContext> {
    let ids = host.contexts().into_iter();
    let unloaded = ids.filter_map(|id| host.unload(id, values));
    unloaded.map(|hosted| *hosted).collect()
}

/// What contexts are attached to, as far as jobs are concerned.
trait Host {
    fn contexts(&self) -> Vec<ContextId>;
    fn has(&self, id: ContextId) -> bool;
    fn load(&mut self, hosted: Box<AttachedContext>, set: u16) -> Result<(), NotLoaded>;
    fn unload(&mut self, id: ContextId, values: &dyn Quantities) -> Option<Box<AttachedContext>>;
    fn lease(&mut self, id: ContextId, counters: usize);
    fn call(
        &mut self,
        id: ContextId,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal>;
}

/// A vCPU, and its core if it is on one.
struct VcpuHost<'a>(&'a mut VcpuPmu, Option<&'a mut CorePmu>);

impl Host for VcpuHost<'_> {
    fn contexts(&self) -> Vec<ContextId> {
        self.0.hosts().contexts().map(AttachedContext::id).collect()
    }
    fn has(&self, id: ContextId) -> bool {
        self.0.hosts().context(id).is_some()
    }
    fn load(&mut self, hosted: Box<AttachedContext>, set: u16) -> Result<(), NotLoaded> {
        self.0.host_side(self.1.as_deref_mut()).load(hosted, set)
    }
    fn unload(&mut self, id: ContextId, values: &dyn Quantities) -> Option<Box<AttachedContext>> {
        kept(self.0.host_side(self.1.as_deref_mut()).unload(id), values)
    }
    fn lease(&mut self, id: ContextId, counters: usize) {
        self.0.host_side(self.1.as_deref_mut()).lease(id, counters);
    }
    fn call(
        &mut self,
        id: ContextId,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        self.0
            .host_side(self.1.as_deref_mut())
            .call(id, call, values)
    }
}

impl Host for CorePmu {
    fn contexts(&self) -> Vec<ContextId> {
        self.host_contexts().map(AttachedContext::id).collect()
    }
    fn has(&self, id: ContextId) -> bool {
        self.host_context(id).is_some()
    }
    fn load(&mut self, hosted: Box<AttachedContext>, set: u16) -> Result<(), NotLoaded> {
        self.load_context(hosted, set)
    }
    fn unload(&mut self, id: ContextId, values: &dyn Quantities) -> Option<Box<AttachedContext>> {
        kept(self.unload_context(id), values)
    }
    fn lease(&mut self, id: ContextId, counters: usize) {
        self.lease_context(id, counters);
    }
    fn call(
        &mut self,
        id: ContextId,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        self.call_context(id, call, values)
    }
}

/// A context that was unloaded, with the quantities as of now.
fn kept(
    unloaded: Option<Box<AttachedContext>>,
    values: &dyn Quantities,
) -> Option<Box<AttachedContext>> {
    let mut hosted = unloaded?;
    hosted.keep_quantities(values);
    Some(hosted)
}

fn act(host: &mut dyn Host, id: ContextId, work: Work, values: &dyn Quantities) -> Done {
    // A context that has left in the meantime is not here to be called.
    let here = host.has(id);
    match work {
        Work::Load(hosted, set) => Done::Loaded(host.load(hosted, set)),
        Work::Unload if here => Done::Unloaded(host.unload(id, values)),
        Work::Unload => Done::Unloaded(None),
        Work::Lease(counters) => {
            host.lease(id, counters);
            Done::Settled
        }
        Work::Call(mut call) if here => {
            let result = host.call(id, &mut call, values);
            Done::Called(call, result)
        }
        work @ (Work::Call(_) | Work::Inspect | Work::Administer(..) | Work::Ask(_)) => {
            Done::Undone(work)
        }
    }
}
