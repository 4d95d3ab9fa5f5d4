//! Names of things, PMUs, and instants.

use super::cpus::CpuSet;
use arbiter::{CounterSet, Nanos};

/// An instant: nanoseconds since the host was booted (`CLOCK_BOOTTIME`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootTime(pub u64);

impl BootTime {
    /// So much later.
    #[must_use]
    pub fn after(self, time: Nanos) -> Self {
        BootTime(self.0.saturating_add(time.0))
    }

    /// The time since `earlier`, or none if that is later.
    pub fn since(self, earlier: BootTime) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A lease, also while it waits. An id is never given twice on a host until it reboots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u64);

/// A PMU of the host, by its place in the list that the arbiter was made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PmuId(pub u16);

/// A tenant of the policy. A reload does not change the ids of tenants that it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u16);

/// A thread of the host. The kernel gives the number of one that has ended to another, so
/// when it began belongs to its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ThreadId {
    /// The kernel's id of it.
    pub number: u32,
    /// When it began, in the kernel's ticks since the boot.
    pub started: u64,
}

/// A control group (version 2) of the host: the kernel's number of it, which it gives to no
/// other one before the next boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u64);

/// A PMU of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPmu {
    /// Its name, as the kernel has it.
    pub name: String,
    /// The counters of each of its domains.
    pub counters: CounterSet,
    /// The CPUs that share one set of counters. No CPU is in two.
    pub domains: Vec<CpuSet>,
    /// Whether it can count for threads. An uncore PMU cannot.
    pub for_threads: bool,
}

/// The CPUs that share one set of counters of a PMU: one CPU for a core PMU, all CPUs of
/// a package for its uncore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub pmu: PmuId,
    /// Which of its sets of counters.
    pub domain: u32,
}
