//! The first program of a guest that `umpire count` runs a program in: what it is told, and what
//! it says when that has ended.
//!
//! The guest's files come from the host over virtiofs ([`TAG`]). Its root has
//!
//! - `job`: what to run, written by [`Job::encode`] and read by [`fields`];
//! - `stdin`: what the program gets as its standard input;
//! - `out`: files that take what comes back: `stdout`, `stderr`, `status` (an [`Ending`]) and
//!   `files` (a tar archive of what the program has changed);
//! - `tree`: the files that the program sees, below an overlay that takes its writes.
//!
//! The program itself is `src/guest`, for the target `x86_64-unknown-none`. It prepares all that
//! does not depend on the job, writes [`READY`] to [`PORT`], and only then reads the job: so what
//! the machine was at that OUT can be kept and gone on with, for another job each time. When the
//! program has ended and all has been said, it writes [`DONE`], and switches the machine off.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(not(target_os = "none"))]
extern crate alloc;

mod ending;
mod job;
#[cfg(not(target_os = "none"))]
mod write;

pub use ending::{ENDING_LEN, End, Ending, NotRun, Step};
pub use job::{Field, JobError, fields};
#[cfg(not(target_os = "none"))]
pub use write::Job;

/// The name of the virtiofs device that has the guest's files.
pub const TAG: &str = "umpire";

/// An I/O port that only the first program writes to, one byte at a time.
pub const PORT: u16 = 0x7f0;
/// The guest is ready for a job.
pub const READY: u8 = 1;
/// All has been said: the machine may be dropped.
pub const DONE: u8 = 2;

/// User and group of the program, and who owns its working directory and what `--with` names.
pub const USER: u32 = 1000;
/// The name of that user and group.
pub const USER_NAME: &str = "user";
/// Its home directory.
pub const HOME: &str = "/user";
/// The guest's host name.
pub const HOST_NAME: &str = "umpire";

/// The program, a static ELF64 executable. `None` where the target `x86_64-unknown-none` was not
/// installed when this crate was built.
#[cfg(not(target_os = "none"))]
#[must_use]
pub fn image() -> Option<&'static [u8]> {
    #[cfg(count_init)]
    {
        Some(include_bytes!(env!("UMPIRE_COUNT_INIT")))
    }
    #[cfg(not(count_init))]
    {
        None
    }
}
