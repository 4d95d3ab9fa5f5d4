//! Why a measurement failed.

use std::time::Duration;

use thiserror::Error;
use vmm::cpuid::CpuidError;
use vmm::doctor::Refusal;
use vmm::kvm::{HostError, VcpuError};
use vmm::micro::{MicroError, MicroRunError};
use vmm_sys_util::errno;

/// The measurement failed.
#[derive(Debug, Error)]
pub enum BenchError {
    /// No guest with a virtual PMU can run on this host.
    #[error(transparent)]
    NoGuest(#[from] Refusal),
    /// The counter sources cannot be had.
    #[error("--counters: {0}")]
    Sources(String),
    /// The reservations that were asked for cannot be.
    #[error("--contention and --policy: {0}")]
    Reservations(#[from] vmm::config::PcrPlanError),
    /// The report's output takes no more.
    #[error("cannot write to standard output: {0}")]
    Output(std::io::Error),
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
    Counters(#[from] vmm::counters::CounterError),
    /// The PMU model of the measurement does not parse.
    #[error(transparent)]
    Model(#[from] pmu_virt::ModelError),
    /// The guest did something else than its code says.
    #[error("the measuring guest went astray: {0}")]
    Guest(String),
    /// The guest hung.
    #[error("the measuring guest did not finish a batch within {} s", .0.as_secs())]
    TimedOut(Duration),
    /// Two ways to switch vCPUs counted differently.
    #[error("{0}")]
    Miscount(String),
    /// A tool was refused something.
    #[error("{what}: {refusal}")]
    Refused {
        /// What it did.
        what: &'static str,
        /// Why not.
        refusal: umpire_perfmon::CallError,
    },
    /// A part took too long.
    #[error("it took longer than {0} s (--timeout)")]
    Slow(u64),
    /// The socket has to lie somewhere.
    #[error("no temporary folder for a control socket can be made: {0}")]
    Folder(std::io::Error),
    /// The client that floods the socket.
    #[error("the hostile client: {0}")]
    Client(std::io::Error),
    /// The host's arbiter, as a process.
    #[error("umpire arbiterd: {0}")]
    Arbiter(String),
    /// There is no kernel to boot.
    #[error("--kernel {}: {error}", .file.display())]
    Kernel {
        /// Its file.
        file: std::path::PathBuf,
        error: std::io::Error,
    },
    /// The programs for the processor in software.
    #[error("the programs to measure with: {0}")]
    Programs(String),
    /// Nothing was measured.
    #[error("it took no samples")]
    NoSamples,
    /// The process's own memory.
    #[error("resident memory cannot be read: {0}")]
    Memory(std::io::Error),
}

impl BenchError {
    /// A tool was refused something.
    pub(super) fn refused(what: &'static str, refusal: umpire_perfmon::CallError) -> Self {
        Self::Refused { what, refusal }
    }
}
