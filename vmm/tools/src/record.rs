//! `umpire record`: samples of a VM's vCPUs in a file, as `perf record` does.
//!
//! Each vCPU or core has a context with a sampling buffer of the compact
//! format, which never stops the guest for its reader. [`samples`] makes
//! records of what comes out of it, [`frequency`] says how far apart samples
//! are to be, `session` has the commands to the VM, `command` the loop. On their way to the
//! file records pass `tasks`, which leaves out those of other processes, `callers` and `book`,
//! which has the descriptions that a file needs; `switch` says when another one begins.
//! `live` is for `umpire top`, which keeps no file.

mod book;
mod callers;
mod command;
pub mod frequency;
mod kernel;
mod live;
mod options;
mod output;
mod place;
mod plan;
mod programs;
pub mod samples;
mod session;
mod switch;
mod tasks;

pub use command::{run, run_with};
pub(crate) use live::{LiveSamples, LiveSampling};
pub use options::{CallGraphMode, RecordOptions, SwitchOutput};
