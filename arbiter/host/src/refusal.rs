//! Why a command was refused, or what a request waits for.

use super::cpus::CpuSet;
use super::ids::{BootTime, LeaseId, PmuId, TenantId};
use arbiter::{CounterSet, Nanos};

/// Why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The policy knows no such tenant, or not any more.
    UnknownTenant,
    /// Nothing was asked for, or too much for one lease, or `at_least` is not from 1 to
    /// the number of demands.
    WrongNumber {
        /// The most counters of a lease.
        most: usize,
    },
    /// There are no CPUs in the set.
    NoCpus,
    /// The host has no such CPU, or it is offline.
    NoSuchCpu {
        /// The first one.
        cpu: u32,
        /// Those that there are.
        there: CpuSet,
    },
    /// The policy does not let the tenant have counters on this CPU.
    CpuNotAllowed {
        /// The first one.
        cpu: u32,
        /// Those that it may have counters on.
        allowed: CpuSet,
    },
    /// The host has no such PMU, or the PMU no such counters, or of both kinds.
    NoSuchCounters {
        pmu: PmuId,
        /// The counters that were asked for.
        counters: CounterSet,
    },
    /// The PMU has no counters on this CPU.
    NotOnCpu { pmu: PmuId, cpu: u32 },
    /// The lease would last longer than the policy allows without a renewal, or for ever.
    TooLong {
        /// How long it may last.
        most: Nanos,
    },
    /// The PMU counts for whole CPUs only.
    NotForThreads { pmu: PmuId },
    /// The lease is for threads, and names none.
    NoThreads,
    /// Too many different sets of counters were asked for on one PMU.
    TooManyKinds,
    /// The counters are more than the CPU has, whoever holds what.
    MoreThanThereIs {
        pmu: PmuId,
        /// A CPU where they are not.
        cpu: u32,
        /// The number asked for.
        asked: u32,
        there: u32,
    },
    /// The policy allows the tenant no lease of this priority.
    Priority {
        /// The highest that it allows.
        most: u8,
    },
    /// The policy allows the tenant no guaranteed leases.
    NoGuarantees,
    /// The policy allows the tenant no leases that cannot be preempted.
    MustBePreemptible,
    /// The policy allows the tenant no leases of scope `cpu`.
    NoWholeCpus,
    /// The tenant has as many leases as it may.
    TooManyLeases { most: usize },
    /// As many requests wait as may.
    QueueFull { most: usize },
    /// As many requests of the tenant wait as may.
    OwnQueueFull { most: usize },
    /// The tenant's leases name as many different sets of counters as they may.
    TooManySets { most: usize },
    /// The tenant would hold more than its maximum.
    OverMaximum {
        /// A CPU where it would.
        cpu: u32,
        /// Its maximum of this kind.
        most: u8,
    },
    /// What is free is kept for the minimum of another tenant.
    Kept {
        /// A CPU where it is.
        cpu: u32,
        tenant: TenantId,
    },
    /// Others hold the counters.
    Held {
        /// A CPU where they do.
        cpu: u32,
        by: Vec<LeaseId>,
    },
    /// Somebody who holds no lease has the counters.
    Outside {
        /// A CPU where that is so.
        cpu: u32,
        /// How many.
        counters: u32,
    },
    /// A request before this one waits for the same counters.
    Behind {
        /// The request.
        lease: LeaseId,
    },
    /// Control groups below this one have leases, or wait for some: they were not taken out of
    /// this one's.
    GroupsBelow { by: Vec<LeaseId> },
    /// It would be more than a control group above it holds, or is for counters of which that holds
    /// none.
    BeyondGroup {
        /// A CPU where it would be.
        cpu: u32,
        /// A lease of the group above; `None`: it has none on this CPU.
        above: Option<LeaseId>,
    },
    /// The tenant has as many leases below that of a control group as it may, beside those of
    /// others.
    TooManyBelow {
        /// A lease of the group above.
        above: LeaseId,
        /// How many it may have.
        most: usize,
    },
    /// More threads of the tenant would have leases within that of a control group than may,
    /// beside those of others.
    TooManyThreadsBelow {
        /// A lease of the group.
        above: LeaseId,
        /// How many may.
        most: usize,
    },
    /// There is no such lease, or it has ended.
    NoSuchLease,
    /// It is somebody else's.
    Foreign {
        /// Their name in the policy.
        tenant: String,
    },
    /// The lease has changed since.
    WrongGeneration {
        /// Its generation now.
        now: u64,
    },
    /// Others wait for the counters, and the lease may be preempted: it ends when its
    /// time is over.
    Wanted {
        /// Who waits.
        by: LeaseId,
    },
    /// A revocation was announced.
    Leaving {
        /// When it loses its counters.
        at: BootTime,
    },
}
