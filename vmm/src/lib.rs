//! The Umpire VMM: boots guests on KVM and gives every vCPU a virtual PMU.
//!
//! An exit leaves `KVM_RUN` as an owned [`kvm::VmExit`]. The run loop
//! ([`vcpu::Vcpu`]) hands it to kvm-pmu, which settles the counts and answers what is
//! the PMU's; devices answer the rest.
//!
//! - vCPUs: [`kvm`] (VMs, vCPUs, exits), [`vcpu`] (run loop), [`sched`] (several vCPUs
//!   on a core), [`cores`] (which host CPUs), [`sys`] (system calls).
//! - The same without KVM: [`mod@emu`]; a program in a small machine of that: [`count`],
//!   whose files come by [`virtio`].
//! - The machine: [`boot`] (kernels, ACPI), [`cpuid`], [`devices`],
//!   [`machine`] (threads and the main loop), [`terminal`].
//! - The host: [`probe`] (what KVM does, by tiny guests), [`host`] (what files
//!   say), [`doctor`] (the verdict).
//! - [`micro`]: guests of some dozen instructions, for demo, measurements,
//!   [`probe`] and the tests.
//! - Firmware and its counters: [`mod@firmware`].
//! - How a run is to be: [`config`], [`counters`], [`reservations`].
//!
//! `docs/internals/architecture.md` follows an access through the code.

#![deny(unsafe_code)]

pub mod audit;
pub mod boot;
pub mod config;
mod control;
pub mod cores;
pub mod count;
pub mod counters;
pub mod cpuid;
pub mod devices;
pub mod doctor;
pub mod emu;
pub mod entropy;
pub mod files;
pub mod firmware;
mod guest_kernel;
pub mod host;
pub mod kvm;
pub mod lease;
pub mod machine;
pub mod micro;
pub mod probe;
pub mod reservations;
pub mod sched;
pub mod sync;
#[allow(unsafe_code)]
pub mod sys;
pub mod terminal;
pub mod vcpu;
pub mod virtio;
