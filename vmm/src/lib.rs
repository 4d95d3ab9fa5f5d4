//! The Umpire VMM.

pub mod boot;
pub mod cli;
pub mod config;
pub mod cpuid;
pub mod devices;
pub mod host;
pub mod kvm;
pub mod logging;
pub mod machine;
pub mod micro;
pub mod probe;
pub mod sys;
pub mod terminal;
pub mod trap;
pub mod vcpu;
