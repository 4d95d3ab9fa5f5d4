//! Why a micro-guest could not be run.

use thiserror::Error;
use vmm_control::ServerError;

use super::machine::MicroError;

use crate::cpuid::CpuidError;
use crate::emu::RoomError;
use crate::reservations::ReservationError;
use crate::vcpu::VcpuFailure;

/// A micro-guest could not be run to its end.
#[derive(Debug, Error)]
pub enum MicroRunError {
    /// It could not be made.
    #[error(transparent)]
    Machine(#[from] MicroError),
    /// A vCPU failed.
    #[error(transparent)]
    Vcpu(#[from] VcpuFailure),
    /// A vCPU's registers could not be read.
    #[error(transparent)]
    Registers(#[from] crate::kvm::VcpuError),
    /// The kick handler could not be installed.
    #[error("sigaction failed: {0}")]
    Signal(kvm_pmu::Errno),
    /// Counters of the hypervisor.
    #[error(transparent)]
    Reservations(#[from] ReservationError),
    /// The server of host tools.
    #[error(transparent)]
    Control(#[from] ServerError),
    /// The processor in software that it is to have cannot be made.
    #[error(transparent)]
    Room(#[from] RoomError),
    /// Its CPUID.
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    /// There is no such thing without KVM.
    #[error("processors in software have no {0}")]
    NotEmulated(&'static str),
    /// A vCPU's thread panicked.
    #[error("the thread of a vCPU panicked")]
    Panicked,
}
