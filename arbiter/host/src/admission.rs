//! Whether a command may be given at all, whoever holds what.

use arbiter::{CounterId, PerKind};

use super::cpus::CpuSet;
use super::ids::{HostPmu, PmuId};
use super::lease::{Caller, Lease};
use super::policy::{HostPolicy, HostPolicyError, Tenant};
use super::refusal::Refusal;
use super::room::whole_kinds;
use super::terms::{Demand, Scope, Terms};

/// Most counters of one lease.
const MOST_DEMANDS: usize = 128;

/// Whether a policy promises no more than there is of the first PMU.
pub(crate) fn fits_the_host(policy: &HostPolicy, pmu: &HostPmu) -> Result<(), HostPolicyError> {
    let there = PerKind::count(pmu.counters);
    for cpu in pmu.domains.iter().flat_map(CpuSet::iter) {
        let here = |tenant: &&Tenant| tenant.cpus.as_ref().is_none_or(|cpus| cpus.contains(cpu));
        for (kind, counter) in [
            ("programmable", CounterId::Programmable(0)),
            ("fixed-function", CounterId::Fixed(0)),
        ] {
            let of = |kinds: PerKind| u32::from(kinds.of(counter));
            let tenants = || policy.tenants.iter().filter(here);
            let cpus: u32 = tenants().map(|tenant| of(tenant.minimum.cpu)).sum();
            let threads = tenants().map(|tenant| of(tenant.minimum.thread)).max();
            let promised = cpus + threads.unwrap_or(0);
            if promised > of(there) {
                return Err(HostPolicyError::MoreThanThereIs {
                    kind,
                    promised,
                    there: of(there),
                    cpu,
                });
            }
        }
    }
    Ok(())
}

/// Whether a tenant may ask for a lease on these terms.
pub(crate) fn allowed(tenant: &Tenant, terms: &Terms, online: &CpuSet) -> Result<(), Refusal> {
    let count = terms.demands.len();
    if count > MOST_DEMANDS || terms.at_least == 0 || terms.at_least > count {
        return Err(Refusal::WrongNumber { most: MOST_DEMANDS });
    }
    if terms.cpus.is_empty() {
        return Err(Refusal::NoCpus);
    }
    is_online(terms, online)?;
    if let Some(allowed) = &tenant.cpus
        && let Some(cpu) = terms.cpus.first_beyond(allowed)
    {
        let allowed = allowed.clone();
        return Err(Refusal::CpuNotAllowed { cpu, allowed });
    }
    if terms.priority > tenant.priority {
        let most = tenant.priority;
        return Err(Refusal::Priority { most });
    }
    if terms.guaranteed && !tenant.guaranteed {
        return Err(Refusal::NoGuarantees);
    }
    if !terms.can_be_preempted() && !tenant.keeps {
        return Err(Refusal::MustBePreemptible);
    }
    match &terms.scope {
        Scope::Cpu if !tenant.whole_cpus => return Err(Refusal::NoWholeCpus),
        Scope::Thread(_) | Scope::Part(_) if terms.scope.threads().is_empty() => {
            return Err(Refusal::NoThreads);
        }
        _ => {}
    }
    if let Some(most) = tenant.longest
        && terms.lasts.is_none_or(|lasts| lasts > most)
    {
        return Err(Refusal::TooLong { most });
    }
    Ok(())
}

/// Nothing new is given on a CPU that is offline.
pub(crate) fn is_online(terms: &Terms, online: &CpuSet) -> Result<(), Refusal> {
    match terms.cpus.first_beyond(online) {
        Some(cpu) => Err(Refusal::NoSuchCpu {
            cpu,
            there: online.clone(),
        }),
        None => Ok(()),
    }
}

/// Whether the demands of a tenant's leases (`own`), with these, name few enough sets of
/// counters: the room counts by their unions, which are few for all tenants together.
pub(crate) fn names_few_sets<'a>(
    demands: &'a [Demand],
    own: impl Iterator<Item = &'a Demand>,
    pmus: &[HostPmu],
    most: usize,
) -> Result<(), Refusal> {
    let named = |demand: &&Demand| {
        let pmu = pmus.get(usize::from(demand.pmu.0));
        pmu.is_some_and(|pmu| !whole_kinds(pmu.counters).contains(&demand.counters))
    };
    if !demands.iter().any(|demand| named(&demand)) {
        return Ok(());
    }
    let mut sets: Vec<(PmuId, u64)> = own
        .chain(demands)
        .filter(named)
        .map(|demand| (demand.pmu, demand.counters.bits()))
        .collect();
    sets.sort_unstable();
    sets.dedup();
    let of_pmu = |pmu: PmuId| sets.iter().filter(|(other, _)| *other == pmu).count();
    if demands.iter().any(|demand| of_pmu(demand.pmu) > most) {
        return Err(Refusal::TooManySets { most });
    }
    Ok(())
}

/// Whether the lease is of the caller's user, and of the tenant for which it speaks, or was
/// asked for by these. A
/// tenant that has no members any more is told by the user alone.
pub(crate) fn is_own(lease: &Lease, by: Caller, policy: &HostPolicy) -> bool {
    let owner = &lease.owner;
    let retired = policy
        .tenant(owner.tenant)
        .is_none_or(|tenant| tenant.retired);
    by.uid == owner.uid && (retired || by.tenant == owner.tenant)
        || owner
            .by
            .is_some_and(|asker| asker.uid == by.uid && asker.tenant == by.tenant)
}

/// Whether a caller may take the lease from its owner.
pub(crate) fn may_revoke(lease: &Lease, by: Caller, policy: &HostPolicy) -> bool {
    let tenant = policy.tenant(by.tenant).filter(|own| !own.retired);
    by.operator
        || is_own(lease, by, policy)
        || tenant.is_some_and(|own| own.revokes.contains(&lease.owner.tenant))
}

pub(crate) fn foreign(lease: &Lease, policy: &HostPolicy) -> Refusal {
    let tenant = policy.tenant(lease.owner.tenant);
    Refusal::Foreign {
        tenant: tenant.map(|tenant| tenant.name.clone()).unwrap_or_default(),
    }
}
