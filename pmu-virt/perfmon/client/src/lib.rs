//! Client of the perfmon2 interface that a running Umpire serves.
//!
//! A VM started with `umpire run --control SOCKET` offers the interface of the
//! specification (HPL-2004-200 (R.1)) to programs on its host. [`Client`] is
//! the connection, [`ContextHandle`] a context of one's own: a descriptor that
//! can be waited for, passed on and closed like any other. `docs/reference/perfmon-wire.md`
//! says what goes over the socket. Programs in C use the library of
//! `pmu-virt/perfmon/capi`, which is built on the same parts.
//!
//! ```no_run
//! use perfmon_abi::{LoadArg, PmcArg, PmdArg};
//! use umpire_perfmon::{Call, Client};
//!
//! let client = Client::connect("/run/vm1.sock")?;
//! let context = client.create(0, None, &[])?;
//! let event = PmcArg { num: 0, value: 0x4300c0, ..PmcArg::default() };
//! client.call(&context, &mut Call::WritePmcs(vec![event]))?;
//! client.call(&context, &mut Call::Load(LoadArg { pid: 0, set: 0 }))?;
//! client.call(&context, &mut Call::Start(None))?;
//! let mut read = Call::ReadPmds(vec![PmdArg::default()]);
//! client.call(&context, &mut read)?;
//! # Ok::<(), umpire_perfmon::CallError>(())
//! ```
#![deny(unsafe_code)]

pub mod c_calls;
mod client;
mod context;
mod document;
mod last;
pub mod link;
pub mod maps;
pub mod messages;
#[allow(unsafe_code)]
mod sys;
pub mod threads;
mod whole;

pub use client::{Client, ENVIRONMENT, TIMEOUT, is_of_the_end, socket_folder, socket_folders};
pub use context::{Buffer, ContextHandle, Event, Mapping, Wait};
pub use document::document;
pub use last::LastCounts;
pub use perfmon_abi::wire::{Call, Errno, Refusal as CallError, info};
pub use whole::{Count, Snapshot, WholeVm};
