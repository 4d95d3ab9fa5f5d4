//! The Umpire VMM.

pub mod cpuid;
pub mod devices;
