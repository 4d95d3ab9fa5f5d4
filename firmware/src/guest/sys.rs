//! What only assembly can do: the first and the last instructions, exceptions,
//! the processor's registers, ports and the local APIC.

mod apic;
mod enter;
mod exceptions;
mod leave;
mod processor;
mod shared;
mod smm;

pub(crate) use apic::{send_init, send_start_up, with_apic};
pub(crate) use leave::enter_kernel;
pub(crate) use processor::{cpuid, exit, put_serial, rdmsr, rdrand, read_timer, relax, wrmsr};
pub(crate) use shared::Shared;
pub(crate) use smm::lay_smm;
