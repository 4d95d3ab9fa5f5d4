//! The Umpire VMM.

pub mod cpuid;
pub mod devices;
pub mod kvm;
pub mod micro;
pub mod probe;
pub mod sys;
pub mod trap;
pub mod vcpu;
