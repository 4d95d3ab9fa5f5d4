//! A small machine that runs one program at a time, each time from the same snapshot: what
//! `umpire count` counts in.
//!
//! [`Image::boot`] boots a kernel on the processor in software until its first program says
//! that it is ready, and writes what the machine is then to a file. [`Image::run`] goes on from
//! there: memory is mapped privately from that file, so a start is a few system calls, and a run
//! changes nothing of it. Files come over virtio from whoever is asked ([`crate::virtio`]).
//!
//! One vCPU, one clock, and nothing of the host in it: what two runs do is the same to the last
//! instruction, as long as they are given the same files. The host's time only ends a run
//! ([`Limits`]).

mod console;
mod end;
mod guest;
mod image;
mod key;
mod limits;
mod machine;
mod platform;
mod run;
mod snapshot;
#[cfg(test)]
mod tests;

pub use end::{End, RunFailure};
pub use image::{BootFailure as BootError, MachineImage as Image, Plan, Progress, boot_in_parts};
pub use key::Key;
pub use limits::{LimitPatience as Patience, Limits, Met};
pub use machine::{COMMAND_LINE, MACHINE, MachineFailure};
pub use platform::Signals;
pub use run::{JobRan as Ran, Looks};
pub use snapshot::SnapshotError;
