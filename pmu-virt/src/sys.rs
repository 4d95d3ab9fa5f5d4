//! What the standard library has no safe call for.
//!
//! This module is the only place of the crate with `unsafe` code.

mod msr;

pub(crate) use msr::{HostMsr, host_cpuid, nmi_watchdog};
