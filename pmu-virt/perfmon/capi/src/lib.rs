//! perfmonctl and its kin for C, served by a running Umpire.
//!
//! A program that links `libumpire_perfmon.so` and includes `perfmon.h` uses the
//! perfmon2 interface as its specification has it; the environment variable
//! `UMPIRE_PERFMON` names the VM's control socket. `docs/reference/perfmon-wire.md` says
//! which of a socket's ways the library hides, and which it cannot.
//!
//! `exports` has what C sees: the calls, and `read`, `write`, `lseek`,
//! `mmap`, `close` and the `dup`s, which pass on all that is not for a context
//! after a look into [`table`]. [`calls`] are the commands, [`encode`] finds the registers
//! for an event's name, [`sum`] adds what several contexts have counted, [`reading`] and
//! [`buffer`] are what the descriptors of contexts do. Commands and reading may be
//! done in signal handlers and after `fork`: neither allocates, and what locks
//! does so with signals blocked ([`state`]).
#![deny(unsafe_code)]

mod bell;
mod buffer;
mod calls;
mod encode;
mod exports;
mod failure;
mod reading;
mod state;
mod sum;
#[allow(unsafe_code)]
mod sys;
mod table;
