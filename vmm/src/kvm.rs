//! The VMM's side of KVM: the host, and the VM with its memory.

mod host;
mod memory;
#[allow(unsafe_code, reason = "memory slots and one ioctl")]
mod sys;
mod vm;

pub use host::{Host, HostError, KvmFeatures};
pub use kvm_pmu::{Answer, DebugExit, InternalError, KvmVcpu, VcpuError, VcpuId, VmExit};
pub use memory::{GuestRam, MapError, SMM_ENTRY};
pub(crate) use sys::set_signal_mask;
pub use vm::{KvmVm, VmError, VmOptions};
