//! The control socket of a VMM: programs on the host count and sample the guest's
//! vCPUs and cores through it, by the perfmon2 interface.
//!
//! The server ([`Server`]) is one thread that owns the socket, the connections and
//! every context that is attached to nothing. An attached context belongs to the
//! thread that has its vCPU or core. Jobs go there through a [`JobQueue`], and
//! reports come back. No thread that runs a vCPU ever waits for the server, and the
//! server waits for nobody.
//!
//! # For a VMM
//! The crate knows neither KVM nor a scheduler. A VMM gives it what it needs through
//! four traits: [`KickThread`] makes a thread look at its jobs, [`WakeCore`] does so
//! for cores that vCPUs share, [`HaltTimes`] and [`GuestMemoryUse`] tell what the host
//! knows of a guest.
//!
//! Where `kvm-pmu` runs the vCPUs, its feature `contexts` has to be on: this crate turns on
//! `pmu-virt`'s, with which alone `kvm-pmu` does not compile.
//!
//! 1. [`ServerSetup::enable_hosting`] before a core counts anything.
//! 2. [`ServerSetup::connect`] gives each vCPU a [`ControlEndpoint`], and each core
//!    that vCPUs share a [`JobQueue`].
//! 3. [`PreparedServer::start`] serves from then on.
//! 4. A thread calls [`ControlEndpoint::run_by`] when it begins to run a vCPU. Between
//!    two entries into the guest it looks whether there are jobs, which costs one
//!    relaxed load, and does them by [`serve_vcpu`], [`serve_core`] or
//!    [`serve_inspection`].
//! 5. Every vCPU and every core ends with [`ControlEndpoint::close`] or
//!    [`close_core`], so that tools get their last counts. Then [`Server::stop`].
//!
//! `examples/one_core.rs` does all this without a guest. The protocol is described in
//! `docs/reference/perfmon-wire.md`, the server in `docs/reference/perfmon-server.md`.
//!
//! # Threat model
//! Whoever may open the socket is a client, and a client may be hostile. A guest may be
//! so too, but only counts, samples and values of its registers lead from it to here.
//!
//! | who | may | what bounds it |
//! |---|---|---|
//! | any process | open the socket | permission bits and group of the socket ([`Access`]); they hold before the socket can be connected to |
//! | a client | hold connections | [`ControlConfig::connections`]; beyond, EAGAIN and the connection is closed; a quarter of the descriptors, 512 at most, are not for connections; 128 refused ones are kept until they have read why |
//! | a client | send packets | one request of a connection at a time, 64 KiB each; a packet that is none of the protocol's ends the connection |
//! | a client | send descriptors | BIND alone takes one; all others are closed by threads of the user's own, as is the connection, which may have unread ones, so that nobody waits for a file system of the client; a user of whom more than 1024 wait (or an eighth of the open files) gets no further connection, and loses those on which it sends more |
//! | a client | leave answers unread | nobody waits: the connection ends when its socket is full |
//! | a client | make contexts | 4096 of a VM, and fewer where descriptors are short; 65,536 event sets of all contexts |
//! | a client | make sampling buffers | `cf_smpl_buf_size_max` bytes of all buffers; the files are sealed, so a tool can only read them |
//! | a client | name a context | by a handle of its own connection, which BIND gives to whoever shows the descriptor; the server recognises a descriptor by its socket cookie, which nobody can have used again |
//! | a client | load a context on any vCPU or core | admission by the core's counters and [`ControlConfig::policy`]; [`ControlConfig::contexts_per_vcpu`] contexts of each vCPU and core |
//! | a client | take counters of the host from others | where the VM has a lease on them, no context is loaded before whoever has the [`ContextLine`] lets it |
//! | a client | block a vCPU (PFM_FL_NOTIFY_BLOCK) | until its context is unloaded; that happens when its last descriptor is closed, and when the server ends in any way |
//! | a client | cause overflows | [`ControlConfig::rate`] of one context in a second; then the context is masked |
//! | a client | leave messages unread | 100 packets; then its counters are masked as by a full queue |
//! | a client | revoke reservations, bar layers, set policy and scheme (PCR) | `cf_sys_gid`, as for contexts of cores; each act is one job of its vCPU, and a record of the audit |
//! | a client | ask for LIST | all threads are asked once in 20 ms, and 200 ms is the longest wait for one |
//! | root, and the user who runs the VMM | change the limits (PFM_SET_CONFIG) | by the user that the kernel reports for the connection; never by the overflow user of a user namespace |
//! | a thread of a vCPU | send reports | one for each job, and one at its end |

#![deny(unsafe_code)]

mod budget;
mod buffer;
mod config;
mod dispatcher;
mod document;
mod job;
mod kernel;
mod lease;
mod memory_file;
mod message_queue;
mod owners;
mod pcr;
mod quantities;
mod serve;
mod server;
mod setup;
mod socket;
#[allow(unsafe_code)]
mod sys;

pub use config::{ARG_SIZES, ControlConfig};
pub use dispatcher::{JobQueue, KickThread, WakeCore};
pub use job::{CoreView, Job, Target, VcpuFigures, VcpuView, View};
pub use kernel::GuestKernel;
pub use lease::{ContextLine, ContextLoad, ContextNews, LeaseLine, WithinLine};
pub use pcr::change_share;
pub use quantities::{
    CoreQuantities, ExitKind, GuestMemoryUse, HaltTimes, Halted, OffCoreReason, Snapshot,
    VcpuQuantities,
};
pub use serve::{close_core, serve_core, serve_inspection, serve_vcpu};
pub use server::{Server, ServerError};
pub use setup::{Connected, ControlEndpoint, PreparedServer, ServerSetup};
pub use umpire_service::{Access, SocketError};
