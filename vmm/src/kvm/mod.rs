//! The only part of Umpire that knows KVM's structures.

mod exit;
mod host;
mod sys;
mod vcpu;
mod vm;

pub use exit::{Answer, DebugExit, InternalError, VmExit};
pub use host::{Host, HostError, KvmFeatures};
pub use vcpu::{KvmVcpu, VcpuError, VcpuId};
pub use vm::{KvmVm, VmError, VmOptions};
