//! From the options to a server, and to the endpoints of vCPUs and cores.

use std::num::NonZeroU32;
use std::sync::Arc;

use perfmon_abi::wire::info::CountableInfo;
use pmu_virt::perfmon::{LogicalPmu, Quantities};
use pmu_virt::{
    CorePmu, CountRequest, CounterBackend, CounterId, EventCode, FixedFunction, KnownEvent,
    PmuModel, VcpuPmu,
};

use crate::config::ControlConfig;
use crate::dispatcher::{JobDispatcher, JobQueue, KickThread};
use crate::job::Job;
use crate::kernel::GuestKernel;
use crate::lease::{ContextLine, LeaseDesk, LeaseLine};
use crate::owners::Owners;
use crate::quantities::{GuestMemoryUse, HaltTimes, MemoryGauge, MemoryProbe, VcpuQuantities};
use crate::serve::close_vcpu;
use crate::server::{Countable, ServedVm, Server, ServerError};

/// A server in the making.
#[derive(Debug)]
pub struct ServerSetup {
    config: ControlConfig,
    model: PmuModel,
    memory: MemoryProbe,
    kernel: Option<Arc<dyn GuestKernel>>,
    gauge: Arc<MemoryGauge>,
    tsc_khz: u32,
    virtual_time: bool,
    counters: String,
    core_cpus: Vec<u32>,
    countable: Vec<Countable>,
}

/// What `backend` counts of the events that `model` has, and how well.
fn countable(model: &PmuModel, backend: &dyn CounterBackend) -> Vec<Countable> {
    let one = |event: KnownEvent| {
        let coded = EventCode::of(model.events(), event);
        let mut fixed = model.fixed_counters().filter_map(|counter| match counter {
            CounterId::Fixed(number) => Some(EventCode::Fixed(FixedFunction::of(number)?)),
            _ => None,
        });
        let code = coded.or_else(|| fixed.find(|code| code.known() == Some(event)))?;
        let request = CountRequest::plain(code, true, true);
        let plan = backend.plan(&request).ok()?;
        let info = CountableInfo {
            event: event.to_string(),
            select: request.encode(),
            provenance: plan.provenance.to_string(),
        };
        Some((request, info))
    };
    KnownEvent::ALL.into_iter().filter_map(one).collect()
}

/// A server that can reach its vCPUs and cores, and does not serve yet.
#[derive(Debug)]
pub struct PreparedServer {
    setup: ServerSetup,
    dispatcher: JobDispatcher,
    lease_desk: Option<LeaseDesk>,
}

/// A server, and what vCPUs and cores have of it.
#[derive(Debug)]
pub struct Connected {
    pub server: PreparedServer,
    /// One for each vCPU.
    pub vcpus: Vec<ControlEndpoint>,
    /// One for each core that vCPUs share; none where they share none.
    pub cores: Vec<JobQueue>,
}

impl ServerSetup {
    /// For a VM whose vCPUs have a PMU of `model`. Its TSC counts `tsc_khz`
    /// thousand ticks a second.
    #[must_use]
    pub fn new(
        config: &ControlConfig,
        model: PmuModel,
        memory: Box<dyn GuestMemoryUse>,
        tsc_khz: u32,
    ) -> Self {
        let (memory, gauge) = MemoryProbe::new(memory);
        Self {
            config: config.clone(),
            model,
            memory,
            kernel: None,
            gauge,
            tsc_khz: tsc_khz.max(1),
            virtual_time: false,
            counters: String::new(),
            core_cpus: Vec::new(),
            countable: Vec::new(),
        }
    }

    /// Tells who can say what the guest's kernel is.
    pub fn set_kernel(&mut self, kernel: Arc<dyn GuestKernel>) {
        self.kernel = Some(kernel);
    }

    /// Tells that the VM's TSC is a clock of its own and not the host's
    /// ([`VcpuQuantities::note_virtual_time`]).
    pub fn set_virtual_time(&mut self) {
        self.virtual_time = true;
    }

    /// Tells which host CPU each core is kept on, in their order.
    pub fn set_core_cpus(&mut self, cpus: Vec<u32>) {
        self.core_cpus = cpus;
    }

    /// Lets contexts be attached to `cores`, and to vCPUs on them.
    pub fn enable_hosting<'a>(&mut self, cores: impl IntoIterator<Item = &'a mut CorePmu>) {
        let khz = NonZeroU32::new(self.tsc_khz).unwrap_or(NonZeroU32::MIN);
        for core in cores {
            core.enable_hosting(self.config.policy, khz);
            core.limit_contexts(self.config.contexts_per_vcpu);
            self.counters = core.backend().sources().join(",");
            self.countable = countable(&self.model, core.backend());
        }
    }

    /// Connects the server to `vcpus` vCPUs, which share so many cores. `None`:
    /// each vCPU has a thread of its own.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn connect(
        self,
        vcpus: usize,
        shared_cores: Option<usize>,
    ) -> Result<Connected, ServerError> {
        let (dispatcher, queues) = JobDispatcher::new(vcpus, shared_cores)?;
        let endpoint = |jobs| ControlEndpoint {
            jobs,
            owners: Owners::default(),
            gauge: self.gauge.clone(),
            shared: shared_cores.is_some(),
        };
        Ok(Connected {
            vcpus: queues.vcpus.into_iter().map(endpoint).collect(),
            cores: queues.cores,
            server: PreparedServer {
                setup: self,
                dispatcher,
                lease_desk: None,
            },
        })
    }
}

impl PreparedServer {
    /// A way to tell all vCPUs what their VM's lease on the host's counters holds. It works
    /// whether this server is started or not.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn lease_line(&self) -> Result<LeaseLine, ServerError> {
        Ok(LeaseLine::new(self.dispatcher.another()?))
    }

    /// From now on contexts of host tools are loaded only when whoever has this lets them.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn context_line(&mut self) -> Result<ContextLine, ServerError> {
        let (line, desk) = ContextLine::new(self.dispatcher.another()?);
        self.lease_desk = Some(desk);
        Ok(line)
    }

    /// Serves from now on; `guest` is the name of what boots.
    ///
    /// # Errors
    /// The socket cannot be had, or the host has no descriptor or thread left.
    pub fn start(self, guest: String) -> Result<Server, ServerError> {
        let PreparedServer {
            setup,
            dispatcher,
            lease_desk,
        } = self;
        let vm = ServedVm {
            guest,
            counters: setup.counters,
            pmu: Arc::new(LogicalPmu::new(setup.model)),
            formats: setup.config.formats.clone(),
            tsc_khz: setup.tsc_khz,
            virtual_time: setup.virtual_time,
            core_cpus: setup.core_cpus,
            contexts_per_vcpu: setup.config.contexts_per_vcpu,
            dispatcher,
            lease_desk,
            events: setup.config.events.clone(),
            memory: Some(setup.memory),
            kernel: setup.kernel,
            countable: setup.countable,
        };
        Server::start(vm, &setup.config)
    }
}

/// A vCPU's end of the way to the server.
#[derive(Debug)]
pub struct ControlEndpoint {
    jobs: JobQueue,
    owners: Owners,
    gauge: Arc<MemoryGauge>,
    /// vCPUs share cores, and the core's thread does the jobs.
    shared: bool,
}

impl ControlEndpoint {
    /// The quantities of the vCPU. Times need `halts`.
    #[must_use]
    pub fn quantities(&self, halts: Option<Box<dyn HaltTimes>>) -> VcpuQuantities {
        VcpuQuantities::new(halts, Some(self.gauge.clone()))
    }

    /// `core` has the vCPU from now on. `thread` runs it.
    pub fn run_by(&self, core: usize, thread: impl KickThread + 'static) {
        if !self.shared {
            self.jobs.bind_thread(Box::new(thread));
        }
        self.moved_to(core);
    }

    /// `core` has the vCPU from now on, and does not run it yet.
    pub fn moved_to(&self, core: usize) {
        self.jobs.moved_to(core);
    }

    /// Whether there may be a job: one relaxed load.
    #[inline]
    #[must_use]
    pub fn has_jobs(&self) -> bool {
        self.jobs.has_jobs()
    }

    /// The next job. Never waits.
    #[must_use]
    pub fn take(&self) -> Option<Job> {
        self.jobs.take()
    }

    /// Does a job that asks the owners of the vCPU's counters something
    /// ([`Job::is_question`]). `core` is the one that the vCPU is on.
    pub fn ask_owners(&mut self, job: Job, pmu: &mut VcpuPmu, core: &mut CorePmu) {
        self.owners.serve(job, pmu, core);
    }

    /// A notice came for the hypervisor: owners may have answered what they were asked.
    pub fn hear_owners(&mut self, pmu: &mut VcpuPmu, core: Option<&mut CorePmu>) {
        self.owners.hear(pmu, core);
    }

    /// The vCPU has ended. Its contexts go back to the server, and so do those of
    /// its core if no other vCPU shares it.
    pub fn close(
        self,
        pmu: Option<&mut VcpuPmu>,
        core: Option<&mut CorePmu>,
        values: &dyn Quantities,
    ) {
        close_vcpu(self.jobs, pmu, core, !self.shared, values);
    }
}
