//! Tiny kernels of our own, as files that `umpire run` boots, and terminals to
//! run it on.

mod code;
mod pty;

pub use code::{
    BASE, Kernel, Protocol, Routines, count_low, exit, halt_forever, print, put, spin_forever,
};
pub use pty::{Mode, Pty, send_signal};
