//! Host tools: the control socket, and the way to the vCPUs' threads.
//!
//! The server ([`Server`]) is one thread that owns the socket, the connections
//! and every context that is attached to nothing. A loaded context belongs to
//! the thread that has its vCPU or core; the [`JobDispatcher`] carries jobs there and
//! results back. No thread that runs a vCPU ever waits for the server, and the
//! server waits for nobody: `docs/perfmon-server.md`.

mod buffer;
mod closer;
mod config;
mod dispatcher;
mod host_side;
mod message_queue;
mod notifier;
mod quantities;
mod serve;
mod server;
mod setup;
mod socket;
mod sys;
mod view;

pub use config::{ControlConfig, DEFAULT_CONNECTIONS};
pub use dispatcher::{
    Done, Job, JobDispatcher, JobQueue, JobQueues, KickThread, Report, Target, WakeCore, Work,
};
pub use host_side::ControlEndpoint;
pub use quantities::{
    CoreQuantities, ExitKind, GuestMemoryUse, HaltTimes, Halted, OffCoreReason, Snapshot,
    VcpuQuantities,
};
pub use serve::{close_core, close_vcpu, serve_core, serve_inspection, serve_vcpu};
pub use server::{Machine, Server, ServerError};
pub use setup::{PreparedServer, ServerSetup};
pub use socket::{Access, SocketError};
pub use view::{ContextView, CoreView, VcpuView, View};
