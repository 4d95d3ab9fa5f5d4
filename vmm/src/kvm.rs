//! The VMM's side of KVM: the VM, its vCPUs, and what leaves the guest.

mod exit;
mod host;
mod memory;
#[allow(unsafe_code, reason = "kvm_run, memory slots and one ioctl")]
mod sys;
mod vcpu;
mod vm;

pub use exit::Answer;
pub use host::{Host, HostError, KvmFeatures};
pub use kvm_pmu::{DebugExit, InternalError, VcpuError, VcpuId, VmExit};
pub use memory::{GuestRam, MapError, SMM_ENTRY};
pub use vcpu::KvmVcpu;
pub use vm::{KvmVm, VmError, VmOptions};
