//! The control socket of a VMM: programs on the host count and sample the guest's
//! vCPUs and cores through it, by the perfmon2 interface.
//!
//! The server ([`Server`]) is one thread that owns the socket, the connections and
//! every context that is attached to nothing. An attached context belongs to the
//! thread that has its vCPU or core. Jobs go there through a [`JobQueue`], and
//! reports come back. No thread that runs a vCPU ever waits for the server, and the
//! server waits for nobody.
//!
//! The crate knows neither KVM nor a scheduler. A VMM gives it what it needs through
//! four traits: [`KickThread`], [`WakeCore`], [`HaltTimes`], [`GuestMemoryUse`].

#![deny(unsafe_code)]

mod buffer;
mod closer;
mod config;
mod dispatcher;
mod job;
mod message_queue;
mod quantities;
mod serve;
mod server;
mod setup;
mod socket;
#[allow(unsafe_code)]
mod sys;

pub use config::{Access, ControlConfig, DEFAULT_CONNECTIONS};
pub use dispatcher::{JobQueue, KickThread, WakeCore};
pub use job::{CoreView, Job, Target, VcpuView, View};
pub use quantities::{
    CoreQuantities, ExitKind, GuestMemoryUse, HaltTimes, Halted, OffCoreReason, Snapshot,
    VcpuQuantities,
};
pub use serve::{close_core, serve_core, serve_inspection, serve_vcpu};
pub use server::{Server, ServerError};
pub use setup::{Connected, ControlEndpoint, PreparedServer, ServerSetup};
pub use socket::SocketError;
