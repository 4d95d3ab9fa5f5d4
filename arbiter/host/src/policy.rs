//! Who may have what: the tenants of a host.

use std::collections::BTreeSet;
use std::fmt;

use super::cpus::CpuSet;
use super::ids::TenantId;
use arbiter::{Nanos, PerKind};

/// Counters of the first PMU that are kept for a tenant on each of its CPUs, whether it
/// uses them or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Minimum {
    /// For leases of scope `cpu`: nobody else uses them at any time.
    pub cpu: PerKind,
    /// For each of its threads: leases of others' threads use them in the time in which
    /// its threads do not run.
    pub thread: PerKind,
}

/// One of those who share the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    pub name: String,
    /// How much of the counters' time it gets among those who wait, relative to others;
    /// at least 1.
    pub share: u32,
    /// What is kept for it.
    pub minimum: Minimum,
    /// The most that it holds of a PMU on a CPU at a time.
    pub maximum: PerKind,
    /// The highest priority that its leases may have.
    pub priority: u8,
    /// Whether its leases may be guaranteed.
    pub guaranteed: bool,
    /// Whether its leases may say that nobody may take their counters.
    pub keeps: bool,
    /// Whether its leases may be of scope `cpu`, which sees what others run there.
    pub whole_cpus: bool,
    /// The CPUs that its leases may be on, if not all.
    pub cpus: Option<CpuSet>,
    /// For how long at most a lease lasts without a renewal.
    pub longest: Option<Nanos>,
    /// The most leases and waiting requests that it has at a time.
    pub most_leases: usize,
    /// The most of its requests that wait at a time.
    pub most_waiting: usize,
    /// The most different sets of counters, besides all of a kind, that its leases name at a
    /// time on a PMU.
    pub most_sets: usize,
    /// Whose leases it may revoke, besides its own.
    pub revokes: BTreeSet<TenantId>,
    /// Whose leases may take counters from those of its own that can be preempted, if not
    /// everybody's.
    pub gives_way_to: Option<BTreeSet<TenantId>>,
    /// The policy does not name it any more. What it holds stays.
    pub retired: bool,
}

impl Tenant {
    /// A tenant that may have whatever there is, as far as it comes to no other's cost.
    pub fn open(name: &str) -> Self {
        Tenant {
            name: name.into(),
            share: 1,
            minimum: Minimum::default(),
            maximum: PerKind::ALL,
            priority: 0,
            guaranteed: true,
            keeps: true,
            whole_cpus: true,
            cpus: None,
            longest: None,
            most_leases: 1024,
            most_waiting: 256,
            most_sets: 64,
            revokes: BTreeSet::new(),
            gives_way_to: None,
            retired: false,
        }
    }
}

/// The rules of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPolicy {
    /// The tenants; a [`TenantId`] is a place in this list.
    pub tenants: Vec<Tenant>,
    /// How long before it loses counters a holder is told.
    pub grace: Nanos,
    /// How long others that fit may pass a request that does not.
    pub patience: Nanos,
    /// The most requests that wait at a time.
    pub most_waiting: usize,
}

impl Default for HostPolicy {
    fn default() -> Self {
        HostPolicy {
            tenants: Vec::new(),
            grace: Nanos(100_000_000),
            patience: Nanos(1_000_000_000),
            most_waiting: 1024,
        }
    }
}

/// A policy that cannot be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPolicyError {
    /// The minima of all tenants, or the maximum below a minimum.
    MoreThanThereIs {
        /// The kind of counter, for people.
        kind: &'static str,
        /// What the tenants together are promised on a CPU.
        promised: u32,
        /// What there is.
        there: u32,
        /// A CPU where that is so.
        cpu: u32,
    },
    /// A tenant's minimum is more than its maximum.
    MinimumAboveMaximum {
        /// Its name.
        tenant: String,
    },
    /// Two tenants have one name.
    Twice {
        /// The name.
        tenant: String,
    },
}

impl std::error::Error for HostPolicyError {}

impl fmt::Display for HostPolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostPolicyError::MoreThanThereIs {
                kind,
                promised,
                there,
                cpu,
            } => write!(
                f,
                "the tenants' minima promise {promised} {kind} counters on CPU {cpu}, which has \
                 {there}; lower a minimum, or limit a tenant's CPUs"
            ),
            HostPolicyError::MinimumAboveMaximum { tenant } => write!(
                f,
                "tenant '{tenant}': its minimum is more than its maximum; change one of them"
            ),
            HostPolicyError::Twice { tenant } => {
                write!(
                    f,
                    "there are two tenants named '{tenant}'; rename or merge them"
                )
            }
        }
    }
}

impl HostPolicy {
    /// The tenant of this id.
    pub fn tenant(&self, id: TenantId) -> Option<&Tenant> {
        self.tenants.get(usize::from(id.0))
    }

    /// The tenants with their ids.
    pub fn all(&self) -> impl Iterator<Item = (TenantId, &Tenant)> {
        (0u16..).map(TenantId).zip(&self.tenants)
    }

    /// The id of the tenant of this name, unless it is retired.
    pub fn named(&self, name: &str) -> Option<TenantId> {
        self.all()
            .find(|(_, tenant)| tenant.name == name && !tenant.retired)
            .map(|(id, _)| id)
    }

    /// Checks what can be checked without a host.
    ///
    /// # Errors
    /// [`HostPolicyError`] names the tenant.
    pub fn check(&self) -> Result<(), HostPolicyError> {
        for (at, tenant) in self.tenants.iter().enumerate() {
            let fits = |least: PerKind| {
                least.programmable <= tenant.maximum.programmable
                    && least.fixed <= tenant.maximum.fixed
            };
            if !fits(tenant.minimum.cpu) || !fits(tenant.minimum.thread) {
                let tenant = tenant.name.clone();
                return Err(HostPolicyError::MinimumAboveMaximum { tenant });
            }
            if self.tenants[..at]
                .iter()
                .any(|other| other.name == tenant.name)
            {
                let tenant = tenant.name.clone();
                return Err(HostPolicyError::Twice { tenant });
            }
        }
        Ok(())
    }

    /// The same rules with the ids of `before`: tenants that `before` has keep theirs,
    /// and those that are missing here are retired.
    #[must_use]
    pub fn following(&self, before: &HostPolicy) -> HostPolicy {
        let mut tenants: Vec<Tenant> = Vec::new();
        for old in &before.tenants {
            tenants.push(match self.tenants.iter().find(|new| new.name == old.name) {
                Some(new) => new.clone(),
                None => Tenant {
                    retired: true,
                    minimum: Minimum::default(),
                    ..old.clone()
                },
            });
        }
        for new in &self.tenants {
            if tenants.iter().all(|old| old.name != new.name) {
                tenants.push(new.clone());
            }
        }
        // Ids of this list become those of the new one.
        let at = |id: TenantId| {
            let name = &self.tenant(id)?.name;
            let place = tenants.iter().position(|tenant| tenant.name == *name)?;
            u16::try_from(place).ok().map(TenantId)
        };
        let moved = |ids: &BTreeSet<TenantId>| ids.iter().filter_map(|&id| at(id)).collect();
        let named = |tenant: &Tenant| self.tenants.iter().find(|new| new.name == tenant.name);
        let others: Vec<(BTreeSet<TenantId>, Option<BTreeSet<TenantId>>)> = tenants
            .iter()
            .map(|tenant| match named(tenant) {
                Some(new) => (moved(&new.revokes), new.gives_way_to.as_ref().map(moved)),
                None => (BTreeSet::new(), None),
            })
            .collect();
        for (tenant, (revokes, gives_way_to)) in tenants.iter_mut().zip(others) {
            tenant.revokes = revokes;
            tenant.gives_way_to = gives_way_to;
        }
        HostPolicy {
            tenants,
            ..self.clone()
        }
    }
}
