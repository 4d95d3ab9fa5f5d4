//! What the standard library has no safe call for: `perf_event_open`, its
//! ioctls and its shared page, the msr device's CPU, CPUID.
//!
//! This module is the only place of the crate with `unsafe` code.

mod msr;
mod pages;
mod perf;
mod perf_page;

pub(crate) use msr::{HostMsr, host_cpuid, nmi_watchdog};
pub(crate) use pages::FreshPages;
pub(crate) use perf::HostPerf;
