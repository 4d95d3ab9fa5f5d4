//! The Umpire VMM: boots guests on KVM and gives every vCPU a virtual PMU.
//!
//! An exit leaves `KVM_RUN` as an owned [`kvm::VmExit`]; the run loop
//! ([`vcpu::Vcpu`]) settles the counts, has the vCPU's `pmu_virt::VcpuPmu`
//! answer what concerns the PMU and the devices the rest, sends the PMI that is
//! due, and enters the guest again. This is the only crate that knows KVM; what
//! a PMU register means, `pmu-virt` knows.
//!
//! - The trap path: [`kvm`] (ioctls), [`vcpu`] (run loop), [`trap`] (decisions
//!   about RDPMC, debug registers and single steps), [`sys`] (signals, timers,
//!   TSC).
//! - The machine: [`boot`] (kernels, ACPI), [`cpuid`], [`devices`],
//!   [`machine`] (threads and the main loop), [`terminal`].
//! - The host: [`probe`] (what KVM does, by tiny guests), [`host`] (what files
//!   say), [`doctor`] (the verdict).
//! - [`micro`]: guests of some dozen instructions, for demo, measurements,
//!   [`probe`] and the tests.
//! - Firmware and its counters: [`mod@firmware`].
//! - How a run is to be: [`config`], [`counters`], [`reservations`].
//!
//! `docs/architecture.md` follows an access through the code.

pub mod audit;
pub mod boot;
pub mod config;
mod control;
pub mod cores;
pub mod counters;
pub mod cpuid;
pub mod devices;
pub mod doctor;
pub mod entropy;
pub mod files;
pub mod firmware;
pub mod host;
pub mod kvm;
pub mod machine;
pub mod micro;
pub mod probe;
pub mod reservations;
pub mod sched;
mod sync;
pub mod sys;
pub mod terminal;
pub mod vcpu;
