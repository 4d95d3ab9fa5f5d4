//! The Umpire VMM.

pub mod cli;
pub mod config;
pub mod cpuid;
pub mod devices;
pub mod host;
pub mod terminal;
