//! One arbiter for a host: who holds which physical counters, on which CPUs, and until
//! when.
//!
//! VMs, tools and the host's own agents ask for **leases**. A lease has an owner, the
//! counters that it asks for, the CPUs, and a scope: `cpu` for whatever runs on these
//! CPUs, `thread` for what these threads run there, `cgroup` for what runs there in a
//! control group and below it. [`HostArbiter`] grants, queues,
//! renews and revokes them. It does no I/O: the caller brings the requests, the time and
//! what it has found out about the host, and carries out what the [`Change`]s say.
//!
//! # What is promised
//!
//! - On no CPU do leases hold more counters than there are, whatever runs there:
//!   those of scope `cpu` together with those of any one thread, or control group, find a
//!   counter each, of a kind that can count what they ask for (`room`).
//! - A group below one that has a lease gets no more than that one has, and loses it with it.
//! - A request is granted whole, or as much of it as it says it can do with.
//! - Who waits is served in this order: guaranteed before best effort, then by
//!   [`Terms::priority`], the tenants' shares, and arrival. A request that does not fit is
//!   passed by others that do, until it has waited for [`HostPolicy::patience`]; then what
//!   leases give back is kept for it if they give back enough.
//! - Nothing is taken without notice: a lease that is to lose counters is told when, and
//!   why, before it does.
#![forbid(unsafe_code)]

mod admission;
mod book;
mod cpus;
mod host;
mod ids;
mod lease;
mod policy;
mod preempt;
mod queue;
mod record;
mod refusal;
mod room;
mod terms;
mod usage;
mod words;

pub use cpus::{CpuSet, CpuSetError};
pub use host::{HeldBefore, HostArbiter, Outcome};
pub use ids::{BootTime, GroupId, HostPmu, LeaseId, Place, PmuId, TenantId, ThreadId};
pub use lease::{Asker, Caller, Cause, Change, Departure, Lease, LeaseFacts, Owner};
pub use policy::{HostPolicy, HostPolicyError, Minimum, Tenant};
pub use record::{DemandRecord, GroupRecord, LeaseRecord};
pub use refusal::Refusal;
pub use terms::{Demand, Group, Part, Scope, Terms, Waits};
pub use words::{CounterKind, Fate, LeaseScope, OutsiderKind, Reason, Standing, What};
