//! Which perf event a holder may have of its lease. The attributes follow from the lease;
//! what is counted is the only word of the holder's. Pure.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::budget::{EventSpec, Fixed, Follows, HandedEvent, Rings};
use arbiter::{CounterId, CounterSet, PerKind};
use arbiter_host::{
    BootTime, Caller, CpuSet, Demand, Group, GroupId, HostArbiter, HostPmu, Lease, LeaseId, PmuId,
    Reason, Scope, TenantId,
};
use serde_json::{Value, json};
use umpire_lease::{self as wire, EventRequest};

use super::barred::Taken;
use super::call::caller;
use super::said::Denial;
use super::trail::name_of;
use crate::config::ArbiterConfig;
use crate::groups::NoGroup;
use crate::peer::{Client, NoThread};
use crate::task::Task;

/// What of `config` a holder may choose: the event and its unit mask, edge, invert and
/// threshold, and AMD's upper bits of the event. The bit of Intel's for any thread of the
/// core is not among them.
const CHOICE: u64 = 0xffff | 1 << 18 | 1 << 23 | 0xff << 24 | 0xf << 32;
/// Fewer counts between two overflows are refused.
const LEAST_PERIOD: u64 = 1_000;

/// An event that may be opened, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Allowed {
    pub(crate) lease: LeaseId,
    /// Which of the lease's counters.
    pub(crate) counter: usize,
    /// Those of the host that it may be on.
    pub(crate) pmu: PmuId,
    pub(crate) counters: CounterSet,
    /// The control group of the lease, if it is for one.
    pub(crate) group: Option<Group>,
    pub(crate) event: HandedEvent,
}

#[cfg(test)]
impl Allowed {
    /// The first counter of a lease of whole CPUs or of threads, of four that are alike.
    pub(crate) fn of(event: HandedEvent) -> Self {
        Allowed {
            lease: LeaseId(1),
            counter: 0,
            pmu: PmuId(0),
            counters: CounterSet::first(4, 0),
            group: None,
            event,
        }
    }
}

/// A client does not get an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoEvent {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) uid: u32,
    pub(crate) pid: u32,
    pub(crate) refusal: wire::Refusal,
}

impl NoEvent {
    /// The tenant for which a client asks that names `lease`. It is found out once for a request:
    /// the lease may have ended when that is refused.
    pub(crate) fn asker(
        (config, arbiter): (&ArbiterConfig, &HostArbiter),
        client: &Client,
        lease: Option<LeaseId>,
    ) -> Option<TenantId> {
        let (caller, tenants) = caller(config, arbiter, client, lease);
        tenants.contains(&caller.tenant).then_some(caller.tenant)
    }

    /// The host says no to a request of this tenant.
    pub(crate) fn of_host(
        client: &Client,
        tenant: Option<TenantId>,
        refusal: wire::Refusal,
    ) -> Self {
        NoEvent {
            tenant,
            uid: client.uid,
            pid: client.pid,
            refusal,
        }
    }
}

/// What has become of events.
#[derive(Debug)]
pub(crate) enum Told {
    Denied(NoEvent),
    /// It was handed over.
    Handed(Having),
    /// The lease does not hold its counter any more.
    Disabled(Having),
    /// Its holder has enabled it again after it had lost it.
    Reenabled(Having),
    /// It counts after its lease has ended, and not by an oversight.
    Outlived(Having),
    /// All that is taken by then.
    Taken(Vec<Taken>, BootTime),
}

/// An event, and who has it.
#[derive(Clone, Debug)]
pub(crate) struct Having {
    pub(crate) uid: u32,
    pub(crate) pid: u32,
    pub(crate) allowed: Allowed,
}

impl Having {
    /// What the audit has of it.
    pub(super) fn record(&self, event: &str, tenant: Option<&str>) -> Value {
        let of = &self.allowed.event;
        let group = self.allowed.group.as_ref();
        let follows = match of.follows {
            Follows::Nothing => None,
            Follows::Threads => Some("threads"),
            Follows::Children => Some("children"),
        };
        let mut record = json!({
            "event": event,
            "lease": self.allowed.lease.0,
            "tenant": tenant,
            "counter": self.allowed.counter,
            "uid": self.uid,
            "pid": self.pid,
            "thread": of.thread,
            "cpu": of.cpu,
            "config": of.spec.config,
            "rings": format!("{:?}", of.rings).to_lowercase(),
            "period": of.period,
        });
        if let Some(group) = group {
            record["cgroup"] = json!(group.path);
            record["follows"] = json!(follows);
        }
        record
    }
}

/// The tenant of a lease, or of a user where that has ended.
pub(super) fn tenant_of<'a>(
    config: &ArbiterConfig,
    arbiter: &'a HostArbiter,
    lease: LeaseId,
    uid: u32,
) -> Option<&'a str> {
    let of_user = || {
        let client = Client {
            uid,
            ..Client::default()
        };
        config.tenants_of(&client).0.first().copied()
    };
    let of_lease = arbiter.lease(lease).map(|lease| lease.owner.tenant);
    name_of(arbiter, of_lease.or_else(of_user))
}

/// A thread, and whether it runs in the control group of a lease, if that is for one.
pub(super) type NamedThread = (Task, Option<Result<bool, NoGroup>>);

/// A request for an event, and what it is judged by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asking<'a> {
    pub(super) config: &'a ArbiterConfig,
    pub(super) arbiter: &'a HostArbiter,
    /// The watchdog's lease is nobody's.
    pub(super) is_watchdogs: bool,
    pub(super) caller: Caller,
    pub(super) request: &'a EventRequest,
}

impl<'a> Asking<'a> {
    /// The event that the client may have. `thread`: the one that the request's number means, if
    /// it means one, and whether it runs in the lease's group. To find it takes time: nobody has
    /// that who may have no event in any case.
    ///
    /// # Errors
    /// It may have none.
    pub(super) fn event(
        self,
        thread: impl FnOnce(Option<&Group>) -> Option<Result<NamedThread, NoThread>>,
    ) -> Result<Allowed, Denial> {
        let lease = self.lease()?;
        self.opens_events(lease)?;
        let (counter, demand) = self.demand(lease)?;
        let pmu = &self.arbiter.pmus()[usize::from(demand.pmu.0)];
        let group = lease.terms.scope.group();
        let thread = match group {
            None => {
                let found = thread(None).map(|found| found.map(|(task, _)| task));
                self.thread(lease, pmu, found)?
            }
            Some(group) => self.of_group(lease, group, thread(Some(group)))?,
        };
        self.cpu(lease, pmu, thread.is_some())?;
        let rings = self.rings(pmu)?;
        let follows = self.follows(group.is_some(), thread.is_some())?;
        let period = self.request.period;
        if group.is_some() && period.is_some() {
            return Err(Denial::wrong(
                "events of a control group count, and do not overflow: leave period out",
            ));
        }
        if period.is_some_and(|period| period < LEAST_PERIOD) {
            return Err(Denial::wrong(format!(
                "the period is {LEAST_PERIOD} counts at least"
            )));
        }
        Ok(Allowed {
            lease: lease.id,
            counter,
            pmu: demand.pmu,
            counters: demand.counters,
            group: group.map(|group| Group::clone(group)),
            event: HandedEvent {
                spec: EventSpec {
                    perf_type: self.perf_type(pmu)?,
                    config: config(demand.counters, self.request.config)?,
                    config1: 0,
                    config2: 0,
                },
                thread,
                cpu: self.request.cpu,
                rings,
                period,
                follows,
            },
        })
    }

    fn lease(self) -> Result<&'a Lease, Denial> {
        let id = LeaseId(self.request.lease);
        self.arbiter.own(id, self.request.generation, self.caller)?;
        let lease = self.arbiter.lease(id).filter(|_| !self.is_watchdogs);
        lease.ok_or_else(|| Denial::wrong("there is no such lease"))
    }

    fn opens_events(self, lease: &Lease) -> Result<(), Denial> {
        let tenant = lease.owner.tenant;
        if self.config.allows(tenant, |members| members.opens_events) {
            return Ok(());
        }
        let why = "the policy opens no events for this tenant; the operator can allow it \
                   (opens-events = true)";
        Err(wire::Refusal::of(Reason::NoEvents, why).into())
    }

    fn demand(self, lease: &'a Lease) -> Result<(usize, &'a Demand), Denial> {
        let counter = usize::try_from(self.request.counter).unwrap_or(usize::MAX);
        let demand = lease.terms.demands[..lease.holds].get(counter);
        let demand = demand.filter(|_| lease.claim_by.is_none());
        let demand = demand.ok_or_else(|| {
            let holds = lease.holds;
            Denial::wrong(format!(
                "the lease holds {holds} counters now, from 0 on, and {counter} is none of them"
            ))
        })?;
        let mut below = LeasesBelow::of(self.arbiter, &lease.terms.scope);
        if !below.leave(lease, counter, self.request.cpu) {
            let why = format!(
                "leases of control groups below the lease's have what its counter {counter} would \
                 need; those are left that they can do without, the first ones for longest"
            );
            return Err(wire::Refusal::of(Reason::Held, why).into());
        }
        Ok((counter, demand))
    }

    /// The thread in the lease's group that the event is for. `None`: it is for all that runs in
    /// the group, which may be more than its owner could look into: set-user-ID programs, and
    /// what others run there.
    fn of_group(
        self,
        lease: &Lease,
        group: &Group,
        named: Option<Result<NamedThread, NoThread>>,
    ) -> Result<Option<u32>, Denial> {
        let foreign = |why: String| Err(wire::Refusal::of(Reason::ForeignThread, why).into());
        let Some(named) = named else {
            let asked = lease.owner.by;
            let for_others = |tenant| self.config.allows(tenant, |members| members.for_others);
            let has_asked =
                asked.is_some_and(|by| by.uid == self.caller.uid && for_others(by.tenant));
            if self.caller.operator || has_asked {
                return Ok(None);
            }
            return Err(Denial::wrong(
                "events of all that runs in a control group are for operators, and for who has \
                 asked for the lease for others; name a thread that runs there",
            ));
        };
        let (task, runs) = match named {
            Ok(found) => found,
            Err(why) => return foreign(why.to_string()),
        };
        let number = task.id.number;
        match runs {
            Some(Ok(true)) => {}
            Some(Err(why)) => return foreign(why.to_string()),
            None | Some(Ok(false)) => {
                return foreign(format!(
                    "thread {number} does not run in cgroup '{}', nor below it",
                    group.path
                ));
            }
        }
        let owner = lease.owner.uid;
        if !self.caller.operator && !task.is_of(owner, None) {
            return foreign(format!(
                "thread {number} is not of user {owner} in each way (real, effective, saved), \
                 whose lease this is"
            ));
        }
        if !self.caller.operator && !task.dumpable {
            return foreign(format!(
                "nobody may look into the process of thread {number}: it runs a program with more \
                 rights than its user, or has said so itself (prctl(2), PR_SET_DUMPABLE)"
            ));
        }
        Ok(Some(number))
    }

    fn follows(self, of_group: bool, of_thread: bool) -> Result<Follows, Denial> {
        match self.request.follows.as_deref() {
            None if of_group && of_thread => Ok(Follows::Children),
            None => Ok(Follows::Nothing),
            Some(_) if !of_group || !of_thread => Err(Denial::wrong(
                "follows is for a thread of a control group's lease; leave it out",
            )),
            Some("children") => Ok(Follows::Children),
            Some("threads") => Ok(Follows::Threads),
            Some(other) => Err(Denial::wrong(format!(
                "follows '{other}': give children or threads"
            ))),
        }
    }

    fn thread(
        self,
        lease: &Lease,
        pmu: &HostPmu,
        named: Option<Result<Task, NoThread>>,
    ) -> Result<Option<u32>, Denial> {
        let scope = &lease.terms.scope;
        let thread = match named {
            None => None,
            Some(Ok(task)) => Some(task.id),
            // It is none of the lease's.
            Some(Err(NoThread::None(0))) => None,
            Some(Err(NoThread::None(_))) if *scope != Scope::Cpu => None,
            Some(Err(why)) => {
                return Err(wire::Refusal::of(Reason::ForeignThread, why.to_string()).into());
            }
        };
        match (scope, thread) {
            (Scope::Part(part), _) if part.with_others => {
                return Err(Denial::wrong(
                    "the lease is for whatever runs in a part of a control group (scope part), and \
                     has no events; ask for one of scope thread, for the threads to count",
                ));
            }
            (Scope::Thread(_) | Scope::Part(_), Some(thread))
                if scope.threads().contains(&thread) => {}
            (Scope::Thread(_) | Scope::Part(_), _) => {
                return Err(Denial::wrong(
                    "the lease is for threads: name one of them, which is the caller's own",
                ));
            }
            (Scope::Cpu, Some(_)) if pmu.for_threads => {}
            (Scope::Cpu, None) if self.caller.operator && self.request.thread.is_none() => {}
            (Scope::Cpu | Scope::Group(_), _) => {
                return Err(Denial::wrong(
                    "events of whole CPUs are for operators; name a thread of the caller's own",
                ));
            }
        }
        Ok(thread.map(|thread| thread.number))
    }

    fn cpu(self, lease: &Lease, pmu: &HostPmu, of_thread: bool) -> Result<(), Denial> {
        let cpus = &lease.terms.cpus;
        let mut all = pmu.domains.iter().flat_map(CpuSet::iter);
        let everywhere = all.all(|cpu| cpus.contains(cpu));
        match self.request.cpu {
            Some(cpu) if cpus.contains(cpu) => Ok(()),
            None if of_thread && everywhere => Ok(()),
            _ => Err(Denial::wrong(format!(
                "the lease is for CPUs {cpus}: name one, with an event for each"
            ))),
        }
    }

    fn rings(self, pmu: &HostPmu) -> Result<Rings, Denial> {
        match self.request.rings.as_deref() {
            _ if !pmu.for_threads => Ok(Rings::All),
            None | Some("user") => Ok(Rings::User),
            Some("guest") => Ok(Rings::Guest),
            Some("all") if self.caller.operator => Ok(Rings::All),
            Some("all") => Err(Denial::wrong(
                "the kernel is for operators; ask for user or guest",
            )),
            Some(other) => Err(Denial::wrong(format!(
                "rings '{other}': give user, guest or all"
            ))),
        }
    }

    fn perf_type(self, pmu: &HostPmu) -> Result<u32, Denial> {
        self.config.perf_type(&pmu.name).ok_or_else(|| {
            let why = format!(
                "PMU '{}' is stated, and the configuration does not say what the kernel calls \
                 it (perf-type)",
                pmu.name
            );
            wire::Refusal::of(Reason::NoEvents, why).into()
        })
    }
}

/// What leases below a control group need of what that one's have, found out once for many events.
#[derive(Debug)]
pub(crate) struct LeasesBelow<'a> {
    leases: Vec<&'a Lease>,
    /// Which of them are needed where each of them is, with that one.
    beside: Vec<Vec<usize>>,
    /// Which counters of a lease are left, of a kind, on a CPU or on any of the lease's.
    left: BTreeMap<(LeaseId, PmuId, bool, Option<u32>), BTreeSet<usize>>,
}

impl<'a> LeasesBelow<'a> {
    /// Those that are taken out of what a group has. Of another scope there are none.
    pub(crate) fn of(arbiter: &'a HostArbiter, scope: &Scope) -> Self {
        let all = scope
            .group()
            .map(|_| arbiter.leases())
            .into_iter()
            .flatten();
        let below = all.filter(|other| other.holds > 0 && other.terms.scope.is_below(scope));
        let leases: Vec<&Lease> = below.collect();
        let beside = leases.iter().map(|deepest| {
            let meets = |other: &Lease| {
                other.id == deepest.id || meets(&deepest.terms.scope, &other.terms.scope)
            };
            let beside = leases.iter().enumerate();
            let beside = beside.filter(|(_, other)| meets(other));
            beside.map(|(at, _)| at).collect()
        });
        LeasesBelow {
            beside: beside.collect(),
            left: BTreeMap::new(),
            leases,
        }
    }

    /// Whether they leave a counter of a lease of the group for events of that one's own, on that
    /// CPU or on any: it holds it, and those below can do with others of it. Events of a group
    /// count what runs in those below it, too, at the same time as theirs.
    pub(crate) fn leave(&mut self, lease: &Lease, counter: usize, cpu: Option<u32>) -> bool {
        let held = &lease.terms.demands[..lease.holds];
        let Some(first) = held.get(counter) else {
            return false;
        };
        let (pmu, fixed) = (first.pmu, is_fixed(first));
        let here = |cpus: &CpuSet| match cpu {
            Some(cpu) => cpus.contains(cpu),
            None => cpus.iter().any(|cpu| lease.terms.cpus.contains(cpu)),
        };
        let (leases, beside) = (&self.leases, &self.beside);
        let left = self.left.entry((lease.id, pmu, fixed, cpu));
        let left = left.or_insert_with(|| {
            let needs = |other: &usize| {
                let other = leases[*other];
                let demands = other.terms.demands[..other.holds].iter();
                demands.filter(|_| here(&other.terms.cpus))
            };
            let is_alike = |demand: &&Demand| demand.pmu == pmu && is_fixed(demand) == fixed;
            // On the way down to one of them.
            let ways: HashSet<Vec<CounterSet>> = beside
                .iter()
                .map(|beside| {
                    let alike = beside.iter().flat_map(needs).filter(is_alike);
                    alike.map(|demand| demand.counters).collect()
                })
                .collect();
            let own = held.iter().enumerate();
            let (at, own): (Vec<usize>, Vec<CounterSet>) = own
                .filter(|(_, demand)| is_alike(demand))
                .map(|(at, demand)| (at, demand.counters))
                .unzip();
            left_by(&ways, &own)
                .into_iter()
                .map(|one| at[one])
                .collect()
        });
        left.contains(&counter)
    }
}

fn is_fixed(demand: &Demand) -> bool {
    PerKind::count(demand.counters).fixed > 0
}

/// Which of a lease's own counters may count at the same time as all that is needed on any of
/// these ways, each of one kind: as many as can, the first ones before the others.
///
/// The host has room for its own *or* for what is needed, whichever is more of each set of
/// counters. So none may be left that makes both together more than that in a set: wherever one is
/// confined to, what is given up must be as much as what is needed.
fn left_by(ways: &HashSet<Vec<CounterSet>>, own: &[CounterSet]) -> Vec<usize> {
    let mut left = Vec::new();
    for at in 0..own.len() {
        left.push(at);
        let given = (0..own.len()).filter(|at| !left.contains(at));
        let given: Vec<CounterSet> = given.map(|at| own[at]).collect();
        let mut kept = left.iter().map(|at| own[*at]);
        let do_without = |kept| ways.iter().all(|way| is_made_up(kept, &given, way));
        if !kept.all(do_without) {
            left.pop();
        }
    }
    left
}

/// Whether in each set that has all of `kept` no more is needed than is given up: each that is
/// needed has one for itself that is confined to where these two are.
fn is_made_up(kept: CounterSet, given: &[CounterSet], needed: &[CounterSet]) -> bool {
    let mut taken: Vec<Option<usize>> = vec![None; given.len()];
    needed.len() <= given.len()
        && (0..needed.len()).all(|need| {
            let mut seen = vec![false; given.len()];
            takes(need, &mut taken, &mut seen, &|need, at| {
                (given[at] & !(needed[need] | kept)).is_empty()
            })
        })
}

/// One takes what it can do with and nobody has, or whose taker can do with another.
fn takes(
    need: usize,
    taken: &mut [Option<usize>],
    seen: &mut [bool],
    can_do_with: &impl Fn(usize, usize) -> bool,
) -> bool {
    (0..taken.len()).any(|at| {
        if seen[at] || !can_do_with(need, at) {
            return false;
        }
        seen[at] = true;
        let is_free = taken[at].is_none_or(|other| takes(other, taken, seen, can_do_with));
        if is_free {
            taken[at] = Some(need);
        }
        is_free
    })
}

/// The groups out of whose leases some leases are taken.
pub(crate) fn groups_above(arbiter: &HostArbiter, of: &[LeaseId]) -> BTreeSet<GroupId> {
    let leases = of.iter().filter_map(|id| arbiter.lease(*id));
    leases.flat_map(|lease| lease.terms.scope.above()).collect()
}

/// Whether the other one's counters are needed where the deepest one's are.
fn meets(deepest: &Scope, other: &Scope) -> bool {
    let same = |group: &Arc<Group>| {
        deepest
            .group()
            .is_some_and(|deepest| deepest.id == group.id)
    };
    match other {
        Scope::Cpu | Scope::Thread(_) => true,
        Scope::Group(group) => same(group) || deepest.is_below(other),
        Scope::Part(part) if part.with_others => deepest.above().any(|id| id == part.of.id),
        Scope::Part(part) => deepest
            .threads()
            .iter()
            .any(|one| part.threads.contains(one)),
    }
}

/// What the event counts: a fixed-function counter says it itself.
fn config(counters: CounterSet, chosen: Option<u64>) -> Result<u64, Denial> {
    let fixed = counters.iter().find_map(|counter| match counter {
        CounterId::Fixed(number) => Some(u32::from(number)),
        CounterId::Programmable(_) | CounterId::Ibs(_) => None,
    });
    let configs = Fixed::ALL.into_iter();
    let of = |number| configs.clone().find(|fixed| fixed.index() == number);
    match (fixed, chosen) {
        // Any of several counters: the choice is which.
        (Some(_), Some(chosen)) => {
            let mut all = counters.iter().filter_map(|counter| match counter {
                CounterId::Fixed(number) => of(u32::from(number)),
                CounterId::Programmable(_) | CounterId::Ibs(_) => None,
            });
            if all.any(|fixed| fixed.config() == chosen) {
                Ok(chosen)
            } else {
                Err(Denial::wrong(format!(
                    "config {chosen:#x} is no event of the lease's fixed-function counters"
                )))
            }
        }
        (Some(number), None) => of(number).map(Fixed::config).ok_or_else(|| {
            Denial::wrong("the event of this fixed-function counter is not known; name it")
        }),
        (None, Some(chosen)) if chosen & !CHOICE == 0 => Ok(chosen),
        (None, Some(chosen)) => Err(Denial::wrong(format!(
            "config {chosen:#x} has bits that are not the holder's to choose: {:#x} remain; only \
             event, unit mask, edge, invert and threshold are",
            chosen & CHOICE
        ))),
        (None, None) => Err(Denial::wrong("name the event: config, as the PMU has it")),
    }
}

#[cfg(test)]
mod tests {
    use arbiter_host::{Asker, Outcome, Owner, Part, Terms, ThreadId, Waits};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_a_holder_chooses() {
        let any = CounterSet::first(4, 0);
        let fixed = CounterSet::from_iter([CounterId::Fixed(1)]);
        assert_eq!(config(any, Some(0x01c4)).ok(), Some(0x01c4));
        // Any thread, interrupts, the kernel, the enable bit.
        for bit in [16, 17, 19, 20, 21, 22, 36, 63] {
            assert!(config(any, Some(0xc4 | 1 << bit)).is_err(), "bit {bit}");
        }
        assert!(config(any, None).is_err());
        assert_eq!(config(fixed, None).ok(), Some(0x3c));
        assert!(config(fixed, Some(0xc4)).is_err());
        let fixed = CounterSet::first(0, 3);
        assert_eq!(config(fixed, Some(0x300)).ok(), Some(0x300));
    }

    /// Of all that runs in a group nobody has events by its right to name it alone.
    #[test]
    fn who_asked_for_a_group_in_anothers_place_has_its_events_by_that_right() {
        const TEXT: &str = "[[tenant]]\nname = \"prolog\"\nusers = [7]\nfor-others = true\n\
             [[tenant]]\nname = \"agents\"\nusers = [7]\nfor-cgroups = ['/web']\n";
        let config = ArbiterConfig::parse(std::path::Path::new("test"), TEXT);
        let config = config.expect("a configuration");
        let pmu = HostPmu {
            name: "cpu".to_owned(),
            counters: CounterSet::first(4, 0),
            domains: vec![CpuSet::from_iter([0])],
            for_threads: true,
        };
        let mut arbiter = HostArbiter::new(vec![pmu], config.policy.clone()).expect("it fits");
        arbiter.set_online(CpuSet::from_iter([0]), BootTime(0), &mut Vec::new());
        let group = Arc::new(Group {
            id: GroupId(2),
            above: Vec::new(),
            path: "/web".to_owned(),
        });
        let demand = Demand {
            pmu: PmuId(0),
            counters: CounterSet::first(4, 0),
        };
        let terms = Terms {
            demands: vec![demand],
            at_least: 1,
            cpus: CpuSet::from_iter([0]),
            scope: Scope::Group(Arc::clone(&group)),
            guaranteed: false,
            priority: 0,
            preemptible: false,
            lasts: None,
            waits: Waits::No,
        };
        for (by, uid, operator, right) in [
            (Some((0, 7)), 7, false, true),
            (Some((0, 7)), 1000, false, false),
            (Some((1, 7)), 7, false, false),
            (Some((9, 7)), 7, false, false),
            (None, 1000, false, false),
            (None, 1000, true, true),
        ] {
            let by = by.map(|(tenant, uid)| Asker {
                tenant: TenantId(tenant),
                uid,
            });
            let owner = Owner {
                tenant: TenantId(1),
                uid: 1000,
                pid: 1,
                label: String::new(),
                by,
            };
            let mut arbiter = arbiter.clone();
            let asked = arbiter.request(owner, terms.clone(), BootTime(0), &mut Vec::new());
            let Ok(Outcome::Granted { lease, .. }) = asked else {
                panic!("{asked:?}");
            };
            let asking = Asking {
                config: &config,
                arbiter: &arbiter,
                is_watchdogs: false,
                caller: Caller {
                    tenant: TenantId(1),
                    uid,
                    operator,
                },
                request: &EventRequest::default(),
            };
            let lease = arbiter.lease(lease).expect("it was granted");
            let all = asking.of_group(lease, &group, None);
            assert_eq!(all.is_ok(), right, "{by:?} {uid} {operator}");
        }
    }

    /// Sets of one PMU's four counters, by their bits.
    fn sets(bits: &[u64]) -> Vec<CounterSet> {
        bits.iter().copied().map(CounterSet::from_bits).collect()
    }

    fn left_of(own: &[u64], ways: &[&[u64]]) -> Vec<usize> {
        left_by(&ways.iter().map(|way| sets(way)).collect(), &sets(own))
    }

    /// A lease keeps those that leases below can do without, not just so many.
    #[test]
    fn who_names_a_counter_below_takes_that_one() {
        const ANY: u64 = 15;
        let check = |own: &[u64], ways: &[&[u64]], expected: &[usize]| {
            assert_eq!(left_of(own, ways), expected, "{own:?} {ways:?}");
        };
        check(&[ANY; 4], &[], &[0, 1, 2, 3]);
        check(&[ANY; 4], &[&[ANY, ANY]], &[0, 1]);
        check(&[1, 2], &[&[1]], &[1]);
        check(&[1, 2], &[&[2]], &[0]);
        check(&[1, 2], &[&[ANY]], &[0]);
        check(&[ANY, 4], &[&[4]], &[0]);
        check(&[ANY, ANY], &[&[4]], &[0]);
        // One that is left here can do with any, so that the other can take what it names.
        check(&[1, ANY], &[&[2]], &[1]);
        // They share in time, and each way needs one of its own.
        check(&[1, 2, 4], &[&[1], &[2]], &[2]);
        check(&[1, 2, 4], &[&[1, 2]], &[2]);
        // What is needed is neither of these: the host has room for two at a time.
        check(&[1, 2], &[&[4]], &[]);
        check(&[3, 3], &[&[1], &[2]], &[0]);
        check(&[3, 3, ANY], &[&[1], &[2]], &[0, 2]);
    }

    /// How many of these are confined to a set.
    fn confined(sets: &[u64], to: u64) -> usize {
        sets.iter().filter(|set| *set & !to == 0).count()
    }

    /// Whether these fit beside what is needed on each way, in each set of counters, where the
    /// host has room for what the lease has or for what is needed.
    fn fit(own: &[u64], left: &[usize], ways: &[Vec<u64>]) -> bool {
        let kept: Vec<u64> = left.iter().map(|at| own[*at]).collect();
        (1..16).all(|set| {
            ways.iter().all(|way| {
                let needed = confined(way, set);
                confined(&kept, set) + needed <= confined(own, set).max(needed)
            })
        })
    }

    fn some(set: impl Strategy<Value = u64> + Clone) -> impl Strategy<Value = Vec<u64>> {
        proptest::collection::vec(set, 0..5)
    }

    fn any_or_one() -> impl Strategy<Value = u64> + Clone {
        prop_oneof![Just(15u64), (0u32..4).prop_map(|bit| 1 << bit)]
    }

    proptest! {
        #[test]
        fn what_is_left_fits_beside_what_is_needed(
            own in some(1u64..16),
            ways in proptest::collection::vec(some(1u64..16), 0..4),
        ) {
            let slices: Vec<&[u64]> = ways.iter().map(Vec::as_slice).collect();
            prop_assert!(fit(&own, &left_of(&own, &slices), &ways));
        }

        /// Of what people ask for, any counters and certain ones, none is withheld in vain.
        #[test]
        fn as_much_is_left_as_can_be(
            own in some(any_or_one()),
            ways in proptest::collection::vec(some(any_or_one()), 0..4),
        ) {
            let slices: Vec<&[u64]> = ways.iter().map(Vec::as_slice).collect();
            let mut expected = Vec::new();
            for at in 0..own.len() {
                expected.push(at);
                if !fit(&own, &expected, &ways) {
                    expected.pop();
                }
            }
            prop_assert_eq!(left_of(&own, &slices), expected);
        }
    }

    /// A lease has four of a kind; of those below its group some need two, one and one.
    #[test]
    fn what_groups_below_need_is_not_the_outer_ones() {
        let pmu = HostPmu {
            name: "cpu".to_owned(),
            counters: CounterSet::first(8, 2),
            domains: (0..2).map(|cpu| CpuSet::from_iter([cpu])).collect(),
            for_threads: true,
        };
        let policy = ArbiterConfig::default().policy;
        let mut arbiter = HostArbiter::new(vec![pmu], policy).expect("the policy fits");
        let group = |path: &str| {
            let numbers = path
                .split('/')
                .skip(1)
                .map(|name| name.parse().unwrap_or(0));
            let mut above: Vec<GroupId> = numbers.map(GroupId).collect();
            Group {
                id: above.pop().expect("a name"),
                above,
                path: path.to_owned(),
            }
        };
        let scope = |path: &str| match path.strip_suffix("/part") {
            None => Scope::Group(Arc::new(group(path))),
            Some(of) => Scope::Part(Box::new(Part {
                of: Arc::new(group(of)),
                threads: vec![ThreadId {
                    number: 7,
                    started: 1,
                }],
                with_others: true,
            })),
        };
        let mut lease = |path: &str, counters: &[CounterSet], cpus: &[u32]| {
            let demands = counters.iter().map(|counters| Demand {
                pmu: PmuId(0),
                counters: *counters,
            });
            let demands: Vec<Demand> = demands.collect();
            let terms = Terms {
                at_least: demands.len(),
                demands,
                cpus: cpus.iter().copied().collect(),
                scope: scope(path),
                guaranteed: true,
                priority: 0,
                preemptible: false,
                lasts: None,
                waits: Waits::No,
            };
            let owner = Owner {
                tenant: TenantId(0),
                uid: 7,
                pid: 1,
                label: String::new(),
                by: None,
            };
            let granted = arbiter.request(owner, terms, BootTime(0), &mut Vec::new());
            let Ok(Outcome::Granted { lease, .. }) = granted else {
                panic!("{path}: {granted:?}");
            };
            let outer = arbiter.lease(LeaseId(1)).expect("the first");
            let mut below = LeasesBelow::of(&arbiter, &outer.terms.scope);
            let mut left =
                |cpu| -> Vec<usize> { (0..9).filter(|at| below.leave(outer, *at, cpu)).collect() };
            // The fixed-function one is the first.
            (lease, left(None), left(Some(0)))
        };
        let any = [CounterSet::first(8, 0); 4];
        let third = [CounterSet::from_bits(4)];
        // The third of its five is for the third counter alone.
        let of_outer = [&[CounterSet::first(0, 2)], &any[..1], &third[..], &any[..2]].concat();
        let all = vec![0, 1, 2, 3, 4];
        assert_eq!(
            lease("/1", &of_outer, &[0, 1]),
            (LeaseId(1), all.clone(), all.clone())
        );
        assert_eq!(lease("/9", &any[..2], &[0, 1]).1, all, "it is beside it");
        assert_eq!(
            lease("/1/2", &any[..2], &[1]),
            (LeaseId(3), vec![0, 1, 2], all.clone())
        );
        assert_eq!(
            lease("/1/4", &third, &[1]).1,
            [0, 1, 3],
            "groups share in time"
        );
        assert_eq!(
            lease("/1/2/3", &any[..1], &[1]),
            (LeaseId(5), vec![0, 1], all.clone())
        );
        // A part is beside all of these, and is on one CPU only.
        let part = lease("/1/part", &any[..1], &[1]);
        assert_eq!(part, (LeaseId(6), vec![0], all));
        let above = groups_above(&arbiter, &[LeaseId(6)]);
        assert_eq!(above, BTreeSet::from([GroupId(1)]));
        let above = groups_above(&arbiter, &[LeaseId(2), LeaseId(5)]);
        assert_eq!(above, [1, 2].map(GroupId).into());
        // Nobody can tell for whom events of a part for all that its holder runs would be.
        let request = EventRequest::default();
        let asking = Asking {
            config: &ArbiterConfig::default(),
            arbiter: &arbiter,
            is_watchdogs: false,
            caller: Caller {
                tenant: TenantId(0),
                uid: 7,
                operator: true,
            },
            request: &request,
        };
        let part = arbiter.lease(LeaseId(6)).expect("it was granted");
        let own = Task {
            id: part.terms.scope.threads()[0],
            process: 7,
            uids: vec![7; 4],
            gids: vec![7; 4],
            inner: None,
            ended: false,
            dumpable: true,
        };
        let thread = asking.thread(part, &arbiter.pmus()[0], Some(Ok(own)));
        assert!(matches!(thread, Err(Denial::Refused(_))));
    }
}
