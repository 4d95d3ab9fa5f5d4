//! From the options to a server and what vCPUs and cores have of it.

use std::num::NonZeroU32;
use std::sync::Arc;

use pmu_virt::perfmon::LogicalPmu;
use pmu_virt::{CorePmu, PmuModel};

use super::config::ControlConfig;
use super::dispatcher::{JobDispatcher, JobQueue};
use super::host_side::ControlEndpoint;
use super::quantities::memory::{GuestMemoryUse, MemoryGauge, MemoryProbe};
use super::server::{Machine, Server, ServerError};

/// A server in the making.
#[derive(Debug)]
pub struct ServerSetup {
    control: ControlConfig,
    model: PmuModel,
    memory: MemoryProbe,
    gauge: Arc<MemoryGauge>,
    tsc_khz: u32,
    counters: String,
}

/// A server that knows the way to its vCPUs.
#[derive(Debug)]
pub struct PreparedServer {
    tools: ServerSetup,
    desk: JobDispatcher,
}

/// With what each vCPU, and each core that vCPUs share, has of it.
pub type Parts = (PreparedServer, Vec<ControlEndpoint>, Vec<JobQueue>);

impl ServerSetup {
    pub fn new(
        control: &ControlConfig,
        model: PmuModel,
        memory: Box<dyn GuestMemoryUse>,
        tsc_khz: u32,
    ) -> Self {
        let (memory, gauge) = MemoryProbe::new(memory);
        Self {
            control: control.clone(),
            model,
            memory,
            gauge,
            tsc_khz: tsc_khz.max(1),
            counters: String::new(),
        }
    }

    /// Lets contexts come to `cores`.
    pub fn cores<'a>(&mut self, cores: impl IntoIterator<Item = &'a mut CorePmu>) {
        let khz = NonZeroU32::new(self.tsc_khz).unwrap_or(NonZeroU32::MIN);
        for core in cores {
            core.enable_hosting(self.control.policy, khz);
            self.counters = core.backend().name().to_owned();
        }
    }

    /// Lays out the desk for `cpus` vCPUs.
    ///
    /// # Errors
    /// There is no event descriptor left.
    pub fn desk(self, cpus: u8, shared: Option<usize>) -> Result<Parts, ServerError> {
        let (desk, queues) = JobDispatcher::new(cpus.into(), shared)?;
        let side = |queue| ControlEndpoint::new(queue, self.gauge.clone(), shared.is_some());
        let sides = queues.vcpus.into_iter().map(side).collect();
        Ok((PreparedServer { tools: self, desk }, sides, queues.cores))
    }
}

impl PreparedServer {
    /// Serves from now on; `guest` is the name of what boots.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn serve(self, control: &ControlConfig, guest: String) -> Result<Server, ServerError> {
        let PreparedServer { tools, desk } = self;
        let machine = Machine {
            guest,
            counters: tools.counters,
            pmu: Arc::new(LogicalPmu::new(tools.model)),
            formats: control.formats.clone(),
            tsc_khz: tools.tsc_khz,
            desk,
            memory: Some(tools.memory),
        };
        Server::start(machine, control)
    }
}
