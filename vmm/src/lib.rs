//! The Umpire VMM: boots guests on KVM and gives every vCPU a virtual PMU.
//!
//! An exit leaves `KVM_RUN` as an owned [`kvm::VmExit`]. The run loop
//! ([`vcpu::Vcpu`]) hands it to kvm-pmu, which settles the counts and answers what is
//! the PMU's; devices answer the rest.
//!
//! - vCPUs: [`kvm`] (VMs, vCPUs, exits), [`vcpu`] (run loop), [`sched`] (several vCPUs
//!   on a core), [`cores`] (which host CPUs), [`sys`] (system calls).
//! - The machine: [`boot`] (kernels, ACPI), [`cpuid`], [`devices`],
//!   [`machine`] (threads and the main loop), [`terminal`].
//! - The host: [`probe`] (what KVM does, by tiny guests), [`host`] (what files
//!   say), [`doctor`] (the verdict).
//! - [`micro`]: guests of some dozen instructions, for [`demo`], [`mod@bench`],
//!   [`probe`] and the tests.
//! - Events by name: [`events`]; firmware and its counters: [`mod@firmware`].
//! - Samples in a file, and reports of them: [`profile`]; what `umpire stat`
//!   prints: [`stat`].
//! - The command: [`cli`], [`config`], [`logging`].
//!
//! `docs/architecture.md` follows an access through the code.

pub mod arbitrate;
pub mod audit;
pub mod bench;
pub mod boot;
pub mod cli;
pub mod config;
pub mod cores;
pub mod counters;
pub mod cpuid;
pub mod demo;
pub mod devices;
pub mod doctor;
pub mod entropy;
pub mod events;
pub mod firmware;
pub mod host;
pub mod kvm;
pub mod logging;
pub mod ls;
pub mod machine;
pub mod micro;
pub mod perfmon;
pub mod probe;
pub mod profile;
pub mod record;
pub mod reservations;
pub mod sched;
pub mod stat;
pub mod sys;
pub mod terminal;
pub mod tools;
pub mod vcpu;
