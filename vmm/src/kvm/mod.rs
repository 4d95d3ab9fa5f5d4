//! The only part of Umpire that knows KVM's structures.

mod exit;
mod host;
mod smm;
mod sys;
mod vcpu;
mod vm;

pub use exit::{Answer, DebugExit, InternalError, VmExit};
pub use host::{Host, HostError, KvmFeatures};
pub use smm::SMM_ENTRY;
pub use vcpu::{KvmVcpu, VcpuError, VcpuId};
pub use vm::{KvmVm, VmError, VmOptions};
