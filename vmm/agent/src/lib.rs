//! What `umpire-agent` knows of the guest in which it runs, and how it tells the VMM.
//!
//! A VMM finds the tasks of a kernel with BTF by itself. In a guest with another kernel this
//! program runs as root. It has the kernel record, on every processor, each switch of threads
//! and each exec, mmap, comm and fork, in the order of the guest's TSC. It keeps these, and
//! answers the VMM's questions: which thread ran on a processor at a TSC, and what its program
//! has mapped. Only what samples have met goes over the port.
//!
//! The protocol is `umpire-agent-wire`. The only `unsafe` code is in `sys`.

#![deny(unsafe_code)]

mod clock;
mod guest;
mod history;
mod proc;
mod processors;
mod program;
mod records;
mod session;
#[allow(unsafe_code, reason = "the one place of the crate with unsafe code")]
mod sys;

pub use program::{AgentError, Arguments, run};
