//! Tiny kernels of our own, as files that `umpire run` boots, and terminals to
//! run it on.

mod code;
mod elf;
mod pty;
mod sys;

pub use code::{BASE, Kernel, Protocol, Routines, exit, print, put, spin_forever};
pub use pty::{Mode, Pty};
pub use sys::send_signal;
