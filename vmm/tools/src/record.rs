//! `umpire record`: samples of a VM's vCPUs in a file, as `perf record` does.
//!
//! Each vCPU or core has a context with a sampling buffer of the compact
//! format, which never stops the guest for its reader. [`samples`] makes
//! records of what comes out of it, [`frequency`] says how far apart samples
//! are to be, `session` has the commands to the VM, `command` the loop. `live` is for
//! `umpire top`, which keeps no file.

mod callers;
mod command;
pub mod frequency;
mod kernel;
mod live;
mod output;
mod plan;
mod programs;
pub mod samples;
mod session;

pub use command::{CallGraph, Dwarf, RecordOptions, run};
pub(crate) use live::{LiveSamples, LiveSampling};
