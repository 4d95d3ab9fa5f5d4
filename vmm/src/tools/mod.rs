//! What the tools for the host share: how they find a VM, whom they look at,
//! and for how long.
//!
//! `umpire stat`, `record` and `ls` know a VM only by its perfmon2 interface
//! ([`umpire_perfmon`]). `docs/tools.md` describes them.

pub mod duration;
mod error;
pub mod registers;
pub mod targets;
mod vm;
mod wait;

pub(crate) use error::is_gone;
pub use error::{ToolError, refused};
pub use vm::Vm;
pub(crate) use vm::connect;
pub(crate) use wait::Waiter;
