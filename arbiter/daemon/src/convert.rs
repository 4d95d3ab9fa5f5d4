//! Requests of the wire to terms, and leases to the wire and the journal.

use std::sync::Arc;

use arbiter::{CounterSet, Nanos};
use arbiter_host::{
    Asker, Change, CounterKind, CpuSet, Demand, Group, HostArbiter, Lease, LeaseId, LeaseScope,
    Part, PmuId, Refusal, Scope, Terms, ThreadId, Waits,
};
use umpire_lease as wire;

use crate::config::{ArbiterConfig, CounterName};
use crate::journal::Stored;
use crate::words;

const PROGRAMMABLE: CounterSet = CounterSet::from_bits(0xffff_ffff);
const MS: u64 = 1_000_000;
/// Most counters of a lease.
const MOST_COUNTERS: usize = 128;
/// Most threads of a lease, and most of them times its CPUs.
const MOST_THREADS: usize = 1024;
const MOST_THREADS_TIMES_CPUS: usize = 1 << 16;
/// Most bytes of a list of CPUs.
const MOST_LIST: usize = 4096;

/// What is wrong with a request before anything is decided.
pub(crate) struct Wrong(pub(crate) String);

/// What the names in a request mean. Each error is one line.
pub(crate) trait Means {
    /// The threads of these numbers, and the innermost control group with a lease in which they
    /// run.
    fn threads(&mut self, numbers: &[u32]) -> Result<(Vec<ThreadId>, Option<Arc<Group>>), String>;
    /// The process that asks, and the innermost control group with a lease in which it runs;
    /// `None`: it runs in none.
    fn own_group(&mut self) -> Result<Option<(ThreadId, Arc<Group>)>, String>;
    /// The control group of this path, which may be leased for whom the request is.
    fn group(&mut self, path: &str) -> Result<Group, String>;
}

/// The terms of a request.
pub(crate) fn terms(
    config: &ArbiterConfig,
    arbiter: &HostArbiter,
    tenant: arbiter_host::TenantId,
    request: &wire::Request,
    means: &mut dyn Means,
) -> Result<Terms, Wrong> {
    let demands = demands(config, arbiter, &request.counters)?;
    let at_least = match request.at_least {
        None => demands.len(),
        Some(number) => usize::try_from(number).unwrap_or(usize::MAX),
    };
    let scope = scope(request, means)?;
    let cpus = match request.cpus.as_deref() {
        None => usable(arbiter, tenant, &demands, &scope),
        Some(text) if text.len() > MOST_LIST => {
            return Err(Wrong(format!(
                "the list of CPUs is of {MOST_LIST} bytes at most; give ranges"
            )));
        }
        Some(text) => text
            .parse::<CpuSet>()
            .map_err(|error| Wrong(format!("cpus '{text}': {error}")))?,
    };
    let threads = scope.threads();
    if threads.len() * cpus.len() > MOST_THREADS_TIMES_CPUS {
        return Err(Wrong(format!(
            "{} threads on {} CPUs are too many for a lease; name fewer of either",
            threads.len(),
            cpus.len()
        )));
    }
    let waits = waits(request.waits_ms)?;
    if request.lasts_ms == Some(0) {
        return Err(Wrong("lasts_ms 0: give a time from 1 ms on".to_owned()));
    }
    Ok(Terms {
        demands,
        at_least,
        cpus,
        scope,
        guaranteed: request.guaranteed.unwrap_or(true),
        priority: request.priority.unwrap_or(0),
        preemptible: request.preemptible.unwrap_or(false),
        lasts: request.lasts_ms.map(|ms| Nanos(ms.saturating_mul(MS))),
        waits,
    })
}

/// One for each counter that is asked for.
fn demands(
    config: &ArbiterConfig,
    arbiter: &HostArbiter,
    asked: &[wire::Counters],
) -> Result<Vec<Demand>, Wrong> {
    let mut demands = Vec::new();
    for counters in asked {
        let demand = demand(config, arbiter, counters)?;
        let count = usize::try_from(counters.count.unwrap_or(1)).unwrap_or(usize::MAX);
        if count > MOST_COUNTERS || demands.len() + count > MOST_COUNTERS {
            return Err(Wrong(format!(
                "a lease is of {MOST_COUNTERS} counters at most"
            )));
        }
        demands.extend(std::iter::repeat_n(demand, count));
    }
    Ok(demands)
}

fn scope(request: &wire::Request, means: &mut dyn Means) -> Result<Scope, Wrong> {
    if request.scope != Some(LeaseScope::Cgroup) {
        let others = [request.for_uid, request.for_gid]
            .iter()
            .any(Option::is_some);
        if others || request.cgroup.is_some() {
            let what = "cgroup, for_uid and for_gid are for scope cgroup";
            return Err(Wrong(what.to_owned()));
        }
    }
    match (&request.scope, &request.threads) {
        (Some(LeaseScope::Cgroup), None) => {
            let path = request.cgroup.as_deref();
            let path = path.ok_or_else(|| Wrong("scope cgroup: name the cgroup".to_owned()))?;
            let group = means.group(path).map_err(Wrong)?;
            Ok(Scope::Group(Arc::new(group)))
        }
        (Some(LeaseScope::Cgroup), Some(_)) => Err(Wrong(
            "threads were named; ask with scope thread".to_owned(),
        )),
        (None, None) => Ok(own_part(means)?.unwrap_or(Scope::Cpu)),
        (Some(LeaseScope::Cpu), None) => Ok(Scope::Cpu),
        (Some(LeaseScope::Part), None) => own_part(means)?.ok_or_else(|| {
            let what = "scope part: the caller runs in no control group that has a lease";
            Wrong(what.to_owned())
        }),
        (None | Some(LeaseScope::Cpu | LeaseScope::Part), Some(_)) => Err(Wrong(
            "threads were named; ask with scope thread".to_owned(),
        )),
        (Some(LeaseScope::Thread), numbers) => {
            threads_of(numbers.as_deref().unwrap_or_default(), means)
        }
        (Some(other @ LeaseScope::Other(_)), _) => Err(Wrong(format!(
            "scope '{other}': give cpu, thread, cgroup or part"
        ))),
    }
}

fn waits(ms: Option<i64>) -> Result<Waits, Wrong> {
    match ms {
        None | Some(0) => Ok(Waits::No),
        Some(-1) => Ok(Waits::Always),
        Some(ms) => match u64::try_from(ms) {
            Ok(ms) => Ok(Waits::For(Nanos(ms.saturating_mul(MS)))),
            Err(_) => Err(Wrong(format!("waits_ms {ms}: give a time, or -1 for ever"))),
        },
    }
}

/// A part of what the caller's control group has, if that has a lease.
fn own_part(means: &mut dyn Means) -> Result<Option<Scope>, Wrong> {
    let own = means.own_group().map_err(Wrong)?;
    Ok(own.map(|(process, of)| {
        Scope::Part(Box::new(Part {
            of,
            threads: vec![process],
            with_others: true,
        }))
    }))
}

/// The threads of a request, each once, and where they are.
fn threads_of(numbers: &[u32], means: &mut dyn Means) -> Result<Scope, Wrong> {
    let mut numbers = numbers.to_vec();
    numbers.sort_unstable();
    numbers.dedup();
    if numbers.len() > MOST_THREADS {
        return Err(Wrong(format!(
            "a lease is for {MOST_THREADS} threads at most"
        )));
    }
    let (mut threads, of) = means.threads(&numbers).map_err(Wrong)?;
    threads.sort_unstable();
    Ok(match of {
        None => Scope::Thread(threads),
        Some(of) => Scope::Part(Box::new(Part {
            of,
            threads,
            with_others: false,
        })),
    })
}

/// The innermost lease out of which one is taken.
fn within<'a>(arbiter: &'a HostArbiter, scope: &Scope) -> Option<&'a Lease> {
    let leased = arbiter.leased_groups();
    let mut leases = scope.above().rev().filter_map(|group| leased.get(&group));
    arbiter.lease(*leases.next()?.first()?)
}

/// All CPUs that the tenant may use, and that have the PMUs; of those of the lease out of which it
/// is taken.
fn usable(
    arbiter: &HostArbiter,
    tenant: arbiter_host::TenantId,
    demands: &[Demand],
    scope: &Scope,
) -> CpuSet {
    let mut cpus = arbiter.online().clone();
    if let Some(above) = within(arbiter, scope) {
        cpus = cpus.and(&above.terms.cpus);
    }
    if let Some(own) = arbiter
        .policy()
        .tenant(tenant)
        .and_then(|tenant| tenant.cpus.as_ref())
    {
        cpus = cpus.and(own);
    }
    let has = |cpu: u32, demand: &Demand| arbiter.place(demand.pmu, cpu).is_some();
    cpus.iter()
        .filter(|&cpu| demands.iter().all(|demand| has(cpu, demand)))
        .collect()
}

fn demand(
    config: &ArbiterConfig,
    arbiter: &HostArbiter,
    counters: &wire::Counters,
) -> Result<Demand, Wrong> {
    let (index, pmu) = match &counters.pmu {
        None => (0, arbiter.pmus().first()),
        Some(name) => {
            let place = arbiter.pmus().iter().position(|pmu| pmu.name == *name);
            (
                place.unwrap_or(0),
                place.map(|place| &arbiter.pmus()[place]),
            )
        }
    };
    let Some(pmu) = pmu else {
        let known: Vec<&str> = arbiter.pmus().iter().map(|pmu| pmu.name.as_str()).collect();
        let name = counters.pmu.as_deref().unwrap_or("cpu");
        return Err(Wrong(format!(
            "there is no PMU '{name}'; the host has: {}",
            known.join(", ")
        )));
    };
    let set = match (&counters.kind, &counters.event, &counters.among) {
        (None, None, None) => pmu.counters & PROGRAMMABLE,
        (Some(kind), None, None) => match kind {
            CounterKind::Programmable => pmu.counters & PROGRAMMABLE,
            CounterKind::Fixed => pmu.counters & !PROGRAMMABLE,
            other @ CounterKind::Other(_) => {
                return Err(Wrong(format!("kind '{other}': give programmable or fixed")));
            }
        },
        (_, Some(event), None) => event_counters(config, pmu, event)?,
        (_, None, Some(names)) => {
            let mut set = CounterSet::EMPTY;
            for name in names {
                let CounterName(counter) = name.clone().try_into().map_err(Wrong)?;
                set.insert(counter);
            }
            set
        }
        _ => {
            return Err(Wrong(
                "give one of kind, event and among for a counter".to_owned(),
            ));
        }
    };
    if set.is_empty() {
        return Err(Wrong(format!("PMU '{}' has no such counters", pmu.name)));
    }
    let pmu = PmuId(u16::try_from(index).unwrap_or(u16::MAX));
    Ok(Demand { pmu, counters: set })
}

/// The counters that can count a named event: those of the configuration's table, or any.
fn event_counters(
    config: &ArbiterConfig,
    pmu: &arbiter_host::HostPmu,
    event: &str,
) -> Result<CounterSet, Wrong> {
    let stated = config.pmus.iter().find(|stated| stated.name == pmu.name);
    match stated.and_then(|stated| stated.events.get(event)) {
        Some(names) => Ok(names.iter().map(|name| name.0).collect()),
        None => {
            let known: Vec<&str> = stated
                .map(|stated| stated.events.keys().map(String::as_str).collect())
                .unwrap_or_default();
            Err(Wrong(format!(
                "event '{event}' is not in the table of PMU '{}' (it has: {}); ask for kind \
                 programmable, or have the operator add it below [pmu.events]",
                pmu.name,
                if known.is_empty() {
                    "none".to_owned()
                } else {
                    known.join(", ")
                }
            )))
        }
    }
}

pub(crate) fn ms(time: Nanos) -> u64 {
    time.0 / MS
}

fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// A lease for the wire.
pub(crate) fn lease(arbiter: &HostArbiter, lease: &Lease) -> wire::Lease {
    let now = arbiter.now();
    let terms = &lease.terms;
    let tenant = arbiter.policy().tenant(lease.owner.tenant);
    let is_part = matches!(&terms.scope, Scope::Part(part) if part.with_others);
    let threads = terms.scope.threads().iter().filter(|_| !is_part);
    wire::Lease {
        id: lease.id.0,
        generation: lease.generation,
        tenant: tenant.map(|tenant| tenant.name.clone()).unwrap_or_default(),
        uid: lease.owner.uid,
        pid: lease.owner.pid,
        label: lease.owner.label.clone(),
        cpus: terms.cpus.to_string(),
        scope: terms.scope.word(),
        within: within(arbiter, &terms.scope).map(|lease| lease.id.0),
        threads: threads.map(|thread| thread.number).collect(),
        guaranteed: terms.guaranteed,
        priority: terms.priority,
        preemptible: terms.preemptible,
        counters: terms
            .demands
            .iter()
            .map(|demand| words::demand(arbiter, demand))
            .collect(),
        wants: small(terms.demands.len()),
        holds: small(lease.holds),
        state: lease.standing(),
        held_ms: lease.since.map(|since| ms(now.since(since))),
        left_ms: lease.until.map(|until| ms(until.since(now))),
        leaving: lease.departure.as_ref().map(|departure| wire::Leaving {
            in_ms: ms(departure.at.since(now)),
            to: small(departure.to),
            why: words::because(departure.why),
        }),
        broken_ms: lease.broken.map(|since| ms(now.since(since))),
        blind_ms: ms(lease.blind_until(now)),
    }
}

/// The control group of a lease for the wire, if it is of one.
pub(crate) fn group(arbiter: &HostArbiter, lease: &Lease) -> Option<wire::LeasedGroup> {
    let group = lease.terms.scope.group()?;
    let tenant = |by: &Asker| {
        let tenant = arbiter.policy().tenant(by.tenant);
        tenant.map(|tenant| tenant.name.clone()).unwrap_or_default()
    };
    Some(wire::LeasedGroup {
        lease: lease.id.0,
        uid: lease.owner.uid,
        path: group.path.clone(),
        number: group.id.0,
        by_tenant: lease.owner.by.as_ref().map(tenant),
        by_uid: lease.owner.by.map(|by| by.uid),
    })
}

/// A refusal for the wire.
pub(crate) fn refusal(arbiter: &HostArbiter, refusal: &Refusal) -> wire::Refusal {
    let by: &[LeaseId] = match refusal {
        Refusal::Held { by, .. } | Refusal::GroupsBelow { by } => by,
        Refusal::BeyondGroup { above, .. } => above.as_slice(),
        Refusal::TooManyBelow { above, .. } | Refusal::TooManyThreadsBelow { above, .. } => {
            std::slice::from_ref(above)
        }
        Refusal::Behind { lease } | Refusal::Wanted { by: lease } => std::slice::from_ref(lease),
        _ => &[],
    };
    let held_by = by.iter().take(64).filter_map(|id| arbiter.lease(*id));
    wire::Refusal {
        reason: refusal.reason(),
        message: words::message(arbiter, refusal),
        held_by: held_by.map(|held| lease(arbiter, held)).collect(),
    }
}

/// An event for the wire. `None`: the lease was there and ended in the same moment.
pub(crate) fn event(arbiter: &HostArbiter, change: &Change) -> Option<wire::Event> {
    let now = match change {
        Change::Ended { lease: last, .. } => lease(arbiter, last),
        other => lease(arbiter, arbiter.lease(other.lease())?),
    };
    Some(wire::Event {
        what: change.what(),
        why: change.reason(),
        message: message(arbiter, change, &now),
        lease: now,
    })
}

/// What a lease is `now`, and why, in a sentence.
fn message(arbiter: &HostArbiter, change: &Change, now: &wire::Lease) -> String {
    match change {
        Change::Waits { behind, why, .. } => {
            format!("waits behind {behind}: {}", words::message(arbiter, why))
        }
        Change::Holds { holds, why, .. } => {
            format!("holds {holds} of {}: {}", now.wants, words::because(*why))
        }
        Change::Announced { departure, .. } => format!(
            "will hold {} in {} ms: {}",
            departure.to,
            ms(departure.at.since(arbiter.now())),
            words::because(departure.why)
        ),
        Change::Spared { .. } => "keeps what it holds".to_owned(),
        Change::Renewed { .. } => match now.left_ms {
            Some(left) => format!("ends in {left} ms"),
            None => "has no end".to_owned(),
        },
        Change::Claimed { .. } => "its holder is back".to_owned(),
        Change::Broken { .. } => {
            "is broken: somebody who has no lease uses counters that it needs; see: umpire who"
                .to_owned()
        }
        Change::Mended { lasted, .. } => format!(
            "has its counters again, after {} ms without some",
            ms(*lasted)
        ),
        Change::CpusGone { cpus, .. } => {
            format!("CPUs {cpus} went offline: events there have ended, and nothing runs there")
        }
        Change::CpusBack { cpus, .. } => {
            format!("CPUs {cpus} are online again: open the events there anew")
        }
        Change::ThreadsGone { threads, .. } => format!(
            "threads {} have ended: it is for the others alone",
            words::threads(threads)
        ),
        Change::Ended { why, .. } => format!("has ended: {}", words::because(*why)),
    }
}

/// A lease for the journal.
pub(crate) fn stored(arbiter: &HostArbiter, lease: &Lease) -> Stored {
    Stored::of(lease, arbiter)
}

/// A lease of the journal. `None`: the host or the policy has changed so that it cannot be.
pub(crate) fn recalled(arbiter: &HostArbiter, stored: &Stored) -> Option<Lease> {
    stored.recall(arbiter)
}
