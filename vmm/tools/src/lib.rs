//! The tools for running VMs: [`stat`] counts, [`record`] samples into a
//! [`profile`], [`ls`] shows who holds what, [`pcr`] who has reserved what,
//! and changes it. [`top`] shows all of it live.
//!
//! They know a VM only by its perfmon2 interface ([`umpire_perfmon`]). Here is
//! also what they share: how they find a VM, what of it they look at, and for how
//! long.
//! `docs/guide/tools.md` describes them.

#![deny(unsafe_code)]

pub mod budget;
pub mod command;
pub mod duration;
mod error;
pub mod find;
pub mod host;
pub mod lifecycle;
pub mod ls;
pub mod numbers;
pub mod pcr;
mod private;
pub mod profile;
pub mod record;
pub mod registers;
#[cfg(test)]
mod schema;
pub mod stat;
#[allow(unsafe_code)]
mod sys;
pub mod table;
pub mod targets;
pub mod top;
mod vm;
mod wait;

pub(crate) use error::is_gone;
pub use error::{ToolError, refused};
pub use vm::Vm;
pub(crate) use wait::Waiter;

use std::io::Write;

use umpire_events::one_line;

/// How a tool that looks for some time came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// It did what was asked.
    Complete,
    /// A signal cut short the time it was given.
    CutShort,
    /// The command that it was given has ended, with this status.
    Command(u8),
}

/// One line for the user, where the output has no place for it.
fn note(notes: &mut dyn Write, text: &str) {
    // Where nobody reads notes there is nothing to be done.
    let _ = writeln!(notes, "umpire: {}", one_line(text));
}
