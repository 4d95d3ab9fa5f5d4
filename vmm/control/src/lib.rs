//! Host tools: the control socket, and the way to the vCPUs' threads.
//!
//! The server ([`Server`]) is one thread that owns the socket, the connections
//! and every context that is attached to nothing. A loaded context belongs to
//! the thread that has its vCPU or core; the [`Desk`] carries jobs there and
//! results back. No thread that runs a vCPU ever waits for the server, and the
//! server waits for nobody: `docs/perfmon-server.md`.

mod bell;
mod buffer;
mod clock;
mod closer;
mod config;
mod core_tally;
mod desk;
mod gauge;
mod host_side;
mod queue;
mod serve;
mod server;
mod socket;
mod sys;
mod tally;
mod tools;
mod view;

pub use clock::{HaltTimes, Halted, Rested};
pub use config::{ControlConfig, DEFAULT_CONNECTIONS};
pub use core_tally::{CoreTally, Snapshot};
pub use desk::{Desk, Done, Job, KickThread, Report, Target, Tray, Trays, WakeCore, Work};
pub use gauge::GuestMemoryUse;
pub use host_side::HostSide;
pub use serve::{close_core, close_vcpu, serve_core, serve_look, serve_vcpu};
pub use server::{Machine, Server, ServerError};
pub use socket::{Access, SocketError};
pub use tally::{ExitKind, Tally};
pub use tools::{HostTools, ReadyTools};
pub use view::{ContextView, CoreView, VcpuView, View};
