//! Micro-guests: a few dozen instructions on a prepared 64-bit machine.
//!
//! `umpire doctor` learns from them what this host's KVM does, `umpire demo`
//! and `umpire bench` show and measure the trap path with them, and the tests
//! state with them what the virtual PMU has to do.

mod code;
mod elf;
mod emulated;
mod error;
mod machine;
mod platform;
mod run;
mod solo;
mod threads;

pub use code::{CodeError, assemble, assemble_for};
pub use elf::ElfImage;
pub use error::MicroRunError;
pub use kvm_pmu::layout::{
    KERNEL_CODE, KERNEL_CS, KERNEL_SS, KERNEL_STACK, LAPIC, MEMORY_SIZE, SCRATCH, USER_CODE,
    USER_CS, USER_SS, USER_STACK,
};
pub use machine::{MicroError, MicroGuest, Start};
pub use platform::{PortWrite, RecordingPlatform, UNEXPECTED_VECTOR_PORT};
pub use run::{BackendFactory, MicroEngine, MicroOutcome, MicroPcr, MicroRun, VcpuOutcome};
pub use solo::{Solo, SoloParts};
