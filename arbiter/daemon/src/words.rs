//! What is said of refusals and causes to people: a sentence with the next step.

use arbiter_host::{Cause, CounterKind, Demand, HostArbiter, PmuId, Refusal, ThreadId};

/// How a time is written.
fn seconds(ns: u64) -> String {
    match ns / 1_000_000 {
        ms if ms < 1000 => format!("{ms} ms"),
        ms => format!("{}.{:03} s", ms / 1000, ms % 1000),
    }
}

/// The name of a PMU.
pub(crate) fn pmu(arbiter: &HostArbiter, pmu: PmuId) -> &str {
    let pmu = arbiter.pmus().get(usize::from(pmu.0));
    pmu.map_or("unknown", |pmu| pmu.name.as_str())
}

fn leases(ids: &[arbiter_host::LeaseId]) -> String {
    few(ids.iter().map(|id| id.0.to_string()))
}

/// Some of several.
fn few(all: impl ExactSizeIterator<Item = String>) -> String {
    let more = if all.len() > 8 { " and others" } else { "" };
    let shown: Vec<String> = all.take(8).collect();
    format!("{}{more}", shown.join(", "))
}

/// The numbers of threads.
pub(crate) fn threads(threads: &[ThreadId]) -> String {
    few(threads.iter().map(|thread| thread.number.to_string()))
}

/// The sentence for a refusal.
pub(crate) fn message(arbiter: &HostArbiter, refusal: &Refusal) -> String {
    let tenant = |id| {
        let tenant = arbiter.policy().tenant(id);
        tenant.map_or("unknown", |tenant| tenant.name.as_str())
    };
    match refusal {
        Refusal::Kept { cpu, tenant: id } => format!(
            "what is free on CPU {cpu} is kept for tenant '{}'",
            tenant(*id)
        ),
        Refusal::Held { cpu, by } if by.is_empty() => {
            format!("the counters of CPU {cpu} are not free")
        }
        Refusal::Held { cpu, by } => format!(
            "the counters of CPU {cpu} are held by lease {}; wait for them (--wait), or see: \
             umpire who {cpu}",
            leases(by)
        ),
        Refusal::Outside { cpu, counters } => format!(
            "{counters} counters of CPU {cpu} are used by somebody who has no lease; see: umpire \
             who {cpu}"
        ),
        Refusal::Behind { lease } => {
            format!(
                "lease {} waits for the same counters, and comes first",
                lease.0
            )
        }
        Refusal::GroupsBelow { .. }
        | Refusal::BeyondGroup { .. }
        | Refusal::TooManyBelow { .. }
        | Refusal::TooManyThreadsBelow { .. } => of_groups(refusal),
        Refusal::NoSuchLease => {
            "there is no such lease, or it has ended; see: umpire leases".to_owned()
        }
        Refusal::Foreign { tenant } => format!("the lease is another's, of tenant '{tenant}'"),
        Refusal::WrongGeneration { now } => format!(
            "the lease has changed meanwhile: its generation is {now}; look at what it holds now"
        ),
        Refusal::Wanted { by } => format!(
            "lease {} waits for these counters, and this one may be preempted: it ends in its time",
            by.0
        ),
        Refusal::Leaving { at } => format!(
            "the lease was told to leave, and does in {}",
            seconds(at.since(arbiter.now()).0)
        ),
        Refusal::WrongNumber { .. }
        | Refusal::NoCpus
        | Refusal::NoSuchCpu { .. }
        | Refusal::NoSuchCounters { .. }
        | Refusal::NotOnCpu { .. }
        | Refusal::NotForThreads { .. }
        | Refusal::NoThreads
        | Refusal::TooManyKinds
        | Refusal::MoreThanThereIs { .. } => of_request(arbiter, refusal),
        Refusal::UnknownTenant
        | Refusal::CpuNotAllowed { .. }
        | Refusal::TooLong { .. }
        | Refusal::Priority { .. }
        | Refusal::NoGuarantees
        | Refusal::MustBePreemptible
        | Refusal::NoWholeCpus
        | Refusal::TooManyLeases { .. }
        | Refusal::QueueFull { .. }
        | Refusal::OwnQueueFull { .. }
        | Refusal::TooManySets { .. }
        | Refusal::OverMaximum { .. } => of_policy(refusal),
    }
}

/// Of a control group in another.
fn of_groups(refusal: &Refusal) -> String {
    match refusal {
        Refusal::GroupsBelow { by } => format!(
            "control groups below it have leases, or wait for them (lease {}); ask for the outer \
             one first, or give those back",
            leases(by)
        ),
        Refusal::BeyondGroup {
            cpu,
            above: Some(id),
        } => format!(
            "it would be taken out of lease {}, of a control group that it is in, which does not \
             hold so much on CPU {cpu}, or none of the counters that were named",
            id.0
        ),
        Refusal::BeyondGroup { cpu, above: None } => format!(
            "the lease of the control group that it is in is not for CPU {cpu}; ask for CPUs of that \
             one"
        ),
        Refusal::TooManyBelow { above, most } => format!(
            "the tenant may have {most} leases that are taken out of lease {}, of a control group, \
             beside those of others; give some back",
            above.0
        ),
        Refusal::TooManyThreadsBelow { above, most } => format!(
            "{most} threads of the tenant may have leases that are taken out of lease {}, of a \
             control group, beside those of others; name fewer, give some back, or ask with scope \
             part, which is for all that the caller runs in the group",
            above.0
        ),
        other => other.reason().to_string(),
    }
}

/// Of a request that nothing there is could do.
fn of_request(arbiter: &HostArbiter, refusal: &Refusal) -> String {
    match refusal {
        Refusal::WrongNumber { most } => {
            format!("a lease is of 1 to {most} counters, and at_least is from 1 to their number")
        }
        Refusal::NoCpus => "the request is for no CPU; give a list like 0,2-3".to_owned(),
        Refusal::NoSuchCpu { cpu, there } => {
            format!("CPU {cpu} does not exist or is offline; the host has {there}")
        }
        Refusal::NoSuchCounters { pmu: id, counters } => format!(
            "PMU '{}' does not have the counters {counters:?}, or they are of two kinds; see: \
             umpire who",
            pmu(arbiter, *id)
        ),
        Refusal::NotOnCpu { pmu: id, cpu } => format!(
            "PMU '{}' has no counters on CPU {cpu}; see: umpire who",
            pmu(arbiter, *id)
        ),
        Refusal::NotForThreads { pmu: id } => format!(
            "PMU '{}' counts for whole CPUs only; ask with scope cpu",
            pmu(arbiter, *id)
        ),
        Refusal::NoThreads => "the request is for threads and names none of the caller's own; \
             give their ids, or ask with scope cpu"
            .to_owned(),
        Refusal::TooManyKinds => "too many different sets of counters are asked for at a time; \
             ask for any programmable counter instead of named ones"
            .to_owned(),
        Refusal::MoreThanThereIs {
            pmu: id,
            cpu,
            asked,
            there,
        } => format!(
            "{asked} counters were asked for on CPU {cpu}, and of those that would do PMU '{}' \
             has {there}; ask for fewer",
            pmu(arbiter, *id)
        ),
        other => other.reason().to_string(),
    }
}

/// Of a request that the policy does not allow.
fn of_policy(refusal: &Refusal) -> String {
    match refusal {
        Refusal::UnknownTenant => "no tenant of the policy has this user; the operator can add \
             it to a [[tenant]]"
            .to_owned(),
        Refusal::CpuNotAllowed { cpu, allowed } => {
            format!("the policy gives this tenant no counters on CPU {cpu}; it may use {allowed}")
        }
        Refusal::TooLong { most } => format!(
            "the policy lets this tenant's leases last for {}; ask for that, and renew",
            seconds(most.0)
        ),
        Refusal::Priority { most } => {
            format!("the policy allows this tenant priorities up to {most}")
        }
        Refusal::NoGuarantees => {
            "the policy allows this tenant best effort only; ask without a guarantee".to_owned()
        }
        Refusal::MustBePreemptible => {
            "the policy allows this tenant preemptible leases only; ask for such a one".to_owned()
        }
        Refusal::NoWholeCpus => "the policy allows this tenant leases for its own threads only \
             (scope thread): scope cpu is for operators"
            .to_owned(),
        Refusal::TooManyLeases { most } => {
            format!("this tenant has its {most} leases; give one back first")
        }
        Refusal::QueueFull { most } => {
            format!("{most} requests wait already, and no more may; try again later")
        }
        Refusal::OwnQueueFull { most } => {
            format!("{most} requests of this tenant wait already, and no more may; try again later")
        }
        Refusal::TooManySets { most } => format!(
            "this tenant's leases name {most} different sets of counters already, and no more may; \
             ask for any programmable counter instead of named ones"
        ),
        Refusal::OverMaximum { cpu, most } => format!(
            "this tenant would hold more than the {most} counters of a kind that the policy \
             allows it on CPU {cpu}"
        ),
        other => other.reason().to_string(),
    }
}

/// The words for a cause.
pub(crate) fn because(cause: Cause) -> String {
    match cause {
        Cause::Granted => "it was its turn".to_owned(),
        Cause::Preempted { by } => format!("lease {} comes first", by.0),
        Cause::Revoked { by } => format!("user {by} revoked it"),
        Cause::Expired => "its time was over".to_owned(),
        Cause::Released => "its holder gave it back".to_owned(),
        Cause::HolderGone => "its holder's connection ended".to_owned(),
        Cause::ThreadsEnded => "its threads have ended".to_owned(),
        Cause::GroupEmpty => "nothing runs in its control group any more".to_owned(),
        Cause::NobodyCame => "nothing came to run in its control group in time".to_owned(),
        Cause::AboveEnded => {
            "the lease of a control group that it is in has ended, or holds less than it".to_owned()
        }
        Cause::MovedAway => "who it was for runs in another control group now".to_owned(),
        Cause::TimedOut => "it waited for as long as it said".to_owned(),
        Cause::Unclaimed => {
            "its holder did not come back after the arbiter had started anew".to_owned()
        }
        Cause::Barred => "its user has had an event count after its lease had ended".to_owned(),
    }
}

/// The name of what is asked for.
pub(crate) fn demand(arbiter: &HostArbiter, demand: &Demand) -> umpire_lease::Counters {
    let all = arbiter.pmus()[usize::from(demand.pmu.0)].counters;
    let fixed = arbiter::PerKind::count(demand.counters).fixed > 0;
    let kind = arbiter::CounterSet::from_bits(if fixed {
        u64::MAX << 32
    } else {
        u64::from(u32::MAX)
    });
    let whole = demand.counters == (all & kind);
    umpire_lease::Counters {
        pmu: Some(pmu(arbiter, demand.pmu).to_owned()),
        kind: Some(if fixed {
            CounterKind::Fixed
        } else {
            CounterKind::Programmable
        }),
        among: (!whole).then(|| demand.counters.iter().map(|one| one.to_string()).collect()),
        ..umpire_lease::Counters::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use arbiter_host::LeaseId;

    use super::*;

    /// Whether a lease may lose counters for this because of control groups: what is new is to be
    /// decided here.
    fn is_of_groups(cause: Cause) -> bool {
        match cause {
            Cause::GroupEmpty | Cause::NobodyCame | Cause::AboveEnded | Cause::MovedAway => true,
            Cause::Granted
            | Cause::Preempted { .. }
            | Cause::Revoked { .. }
            | Cause::Expired
            | Cause::Released
            | Cause::HolderGone
            | Cause::ThreadsEnded
            | Cause::TimedOut
            | Cause::Unclaimed
            | Cause::Barred => false,
        }
    }

    /// The dashboard's panel of what is lost with control groups has all reasons of these, and no
    /// others.
    #[test]
    fn the_dashboard_has_each_reason_of_control_groups() {
        let all = [
            Cause::Granted,
            Cause::Preempted { by: LeaseId(1) },
            Cause::Revoked { by: 0 },
            Cause::Expired,
            Cause::Released,
            Cause::HolderGone,
            Cause::ThreadsEnded,
            Cause::GroupEmpty,
            Cause::NobodyCame,
            Cause::AboveEnded,
            Cause::MovedAway,
            Cause::TimedOut,
            Cause::Unclaimed,
            Cause::Barred,
        ];
        let of_groups = all.into_iter().filter(|cause| is_of_groups(*cause));
        let expected: BTreeSet<String> =
            of_groups.map(|cause| cause.reason().to_string()).collect();
        let dashboard = include_str!("../../../docs/grafana-arbiter.json");
        let queries: Vec<&str> = dashboard
            .split(r#"reason=~\""#)
            .skip(1)
            .filter_map(|rest| rest.split('\\').next())
            .filter(|query| query.contains("group-empty"))
            .collect();
        let [query] = queries[..] else {
            panic!("one panel has them: {queries:?}")
        };
        let shown: BTreeSet<String> = query.split('|').map(str::to_owned).collect();
        assert_eq!(shown, expected);
    }
}
