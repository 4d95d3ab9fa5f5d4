//! `libcpc` for C, after the manual page `cpc_bind_event(3CPC)`: `libcpc.h`, docs/guide/libcpc.md.
//!
//! Pure: [`event`] (the structure, differences), [`processor`] (numbers of processors),
//! [`spec`] (event specifications), [`assign`] (which counter counts what), [`lwp`] (what
//! becomes of an LWP's counters, whoever counts). Two [`Bed`](lwp::Bed)s count: [`host`] for
//! vCPUs of a VM, [`linux`] for threads of this process. [`process`] chooses between them and
//! knows whose counters a call is about; `sys` has what C sees.
#![deny(unsafe_code)]

mod assign;
mod clock;
mod event;
mod failure;
#[cfg(test)]
#[path = "../../client/tests/fake/mod.rs"]
mod fake;
mod host;
mod linux;
mod lwp;
mod process;
mod processor;
mod signals;
mod spec;
#[allow(unsafe_code)]
mod sys;
