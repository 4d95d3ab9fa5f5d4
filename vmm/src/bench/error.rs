//! Why a measurement failed.

use thiserror::Error;
use vmm_sys_util::errno;

use super::rig::PATIENCE;
use crate::cpuid::CpuidError;
use crate::kvm::{HostError, VcpuError};
use crate::micro::{MicroError, MicroRunError};

/// The measurement failed.
#[derive(Debug, Error)]
pub enum BenchError {
    /// The guest could not be made.
    #[error(transparent)]
    Machine(#[from] MicroError),
    /// The guest could not be run.
    #[error(transparent)]
    Run(#[from] MicroRunError),
    /// An ioctl failed.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// An ioctl failed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The host's processor is of no known vendor.
    #[error(transparent)]
    Vendor(#[from] CpuidError),
    /// The kick signal could not be set up.
    #[error("the kick signal cannot be set up: {0}")]
    Signal(errno::Error),
    /// Two VMs cannot run side by side.
    #[error("this needs two host CPUs, and only one may be used (see `taskset -p $$`)")]
    OneCpu,
    /// The counter source cannot be opened.
    #[error(transparent)]
    Counters(#[from] crate::counters::CounterError),
    /// The PMU model of the measurement does not parse.
    #[error(transparent)]
    Model(#[from] pmu_virt::ModelError),
    /// The guest did something else than its code says.
    #[error("the measuring guest went astray: {0}")]
    Guest(String),
    /// The guest hung.
    #[error("the measuring guest did not finish a batch within {} s", PATIENCE.as_secs())]
    TimedOut,
    /// Two ways to switch vCPUs counted differently.
    #[error("{0}")]
    Miscount(String),
}
