//! The vCPUs of a core, and who of them has its counters.

use std::collections::BTreeMap;
use std::time::Duration;

use perfmon_abi::wire::info::VcpuState;
use pmu_virt::CorePmu;
use vmm_control::{CoreQuantities, CoreView, Job, Snapshot, View, serve_core, serve_inspection};

use crate::kvm::VcpuId;
use crate::vcpu::{Runnability, ThreadContext, Vcpu, VcpuFailure};

/// The vCPUs of one core. The counters of the core are its thread's, and lent for a call.
#[derive(Debug)]
pub(super) struct Residents {
    /// The core's number.
    core: usize,
    vcpus: BTreeMap<VcpuId, Vcpu>,
    /// Who ran last, and has the counters.
    last: Option<VcpuId>,
    /// What vCPUs did here, for the virtual PMDs.
    tally: CoreQuantities,
}

impl Residents {
    /// Nobody is on `core` yet.
    pub(super) fn new(core: usize) -> Self {
        Self {
            core,
            vcpus: BTreeMap::new(),
            last: None,
            tally: CoreQuantities::default(),
        }
    }

    pub(super) fn get(&self, id: VcpuId) -> Option<&Vcpu> {
        self.vcpus.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: VcpuId) -> Option<&mut Vcpu> {
        self.vcpus.get_mut(&id)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Vcpu> {
        self.vcpus.values_mut()
    }

    /// Those of which `wanted` is true.
    pub(super) fn which(&self, wanted: impl Fn(&Vcpu) -> bool) -> Vec<VcpuId> {
        let wanted = self.vcpus.iter().filter(|(_, vcpu)| wanted(vcpu));
        wanted.map(|(id, _)| *id).collect()
    }

    /// `vcpu` comes to this core.
    pub(super) fn admit(&mut self, vcpu: Vcpu, runnability: Runnability) {
        vcpu.moves_to(self.core, runnability);
        self.tally.arrive(vcpu.id().index(), vcpu.quantities());
        self.vcpus.insert(vcpu.id(), vcpu);
    }

    /// Gives the counters to `id`, which runs next. True if somebody else had them.
    pub(super) fn switch_to(&mut self, id: VcpuId, mut core: Option<&mut CorePmu>) -> bool {
        if self.last == Some(id) {
            return false;
        }
        self.park(core.as_deref_mut());
        self.last = Some(id);
        let next = self.vcpus.get_mut(&id).and_then(Vcpu::pmu_mut);
        if let (Some(pmu), Some(core)) = (next, core) {
            pmu.attach(core);
        }
        true
    }

    /// Takes the counters back from who ran last.
    fn park(&mut self, core: Option<&mut CorePmu>) {
        let last = self.last.take().and_then(|id| self.vcpus.get_mut(&id));
        let last = last.and_then(Vcpu::pmu_mut);
        if let (Some(pmu), Some(core)) = (last, core) {
            pmu.park(core);
        }
    }

    /// Takes a vCPU and all of its counts off the core.
    pub(super) fn dismiss(&mut self, id: VcpuId, mut core: Option<&mut CorePmu>) -> Option<Vcpu> {
        // Whoever is on the core: what is taken off it has to stand still.
        let leaves = self.vcpus.contains_key(&id);
        if leaves || self.last == Some(id) {
            self.park(core.as_deref_mut());
        }
        let mut vcpu = self.vcpus.remove(&id)?;
        if let (Some(pmu), Some(core)) = (vcpu.pmu_mut(), core) {
            pmu.leave(core);
        }
        self.tally.leave(id.index(), &vcpu.quantities());
        Some(vcpu)
    }

    /// Does a job for the core, on its `thread`. A core without counters does none: the job
    /// comes back.
    ///
    /// # Errors
    /// Of the vCPU that failed in it.
    pub(super) fn serve(
        &mut self,
        job: Job,
        thread: &mut ThreadContext,
    ) -> Result<(), (VcpuId, VcpuFailure)> {
        if job.is_inspection() {
            serve_inspection(job, self.view(thread.counters())?);
            return Ok(());
        }
        let values = self.quantities();
        let last = self.last;
        if let Some((id, vcpu)) = last.and_then(|id| Some((id, self.vcpus.get_mut(&id)?))) {
            let done = vcpu.do_core_job(job, thread, &values);
            return done.map_err(|error| (id, error));
        }
        if let Some(pmu) = thread.counters_mut() {
            serve_core(job, pmu, &values);
        }
        Ok(())
    }

    /// The quantities of the core: what its vCPUs did on it, together.
    pub(super) fn quantities(&self) -> Snapshot {
        self.tally.read(|id| {
            self.vcpus
                .get(&VcpuId(u32::try_from(id).ok()?))
                .map(Vcpu::quantities)
        })
    }

    /// What there is on the core.
    fn view(&self, core: Option<&CorePmu>) -> Result<View, (VcpuId, VcpuFailure)> {
        let number = |id: VcpuId| id.index();
        let vcpu = |(id, vcpu): (&VcpuId, &Vcpu)| {
            let state = if self.last == Some(*id) {
                VcpuState::Running
            } else {
                VcpuState::Waiting
            };
            vcpu.view(state).map_err(|failure| (*id, failure))
        };
        Ok(View {
            cores: vec![CoreView::of(self.core, self.last.map(number), core)],
            vcpus: self.vcpus.iter().map(vcpu).collect::<Result<_, _>>()?,
        })
    }

    /// Accounts for `time` in which no vCPU could run.
    pub(super) fn pass_idle(&mut self, core: Option<&mut CorePmu>, time: Duration) {
        let Some(core) = core else {
            return;
        };
        match self.last.and_then(|id| self.vcpus.get_mut(&id)) {
            Some(vcpu) => vcpu.pass_idle(core, time),
            None => core.pass_idle(time),
        }
    }
}
