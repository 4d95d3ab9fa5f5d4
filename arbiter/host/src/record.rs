//! A lease as it is kept over a restart: names instead of numbers that another start gives
//! anew. The fields are those of journals of before, so that they can be read.

use std::sync::Arc;

use arbiter::{CounterSet, Nanos};
use serde::{Deserialize, Serialize};

use super::host::HostArbiter;
use super::ids::{BootTime, GroupId, LeaseId, PmuId, ThreadId};
use super::lease::{Asker, Cause, Departure, Lease, LeaseFacts, Owner};
use super::terms::{Demand, Group, Part, Scope, Terms, Waits};

/// One demand: a PMU's name, and the counters that will do, as bits of a counter set.
pub type DemandRecord = (String, u64);

/// A control group as a journal has it, which is of one boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRecord {
    /// [`Group::id`].
    pub id: u64,
    /// [`Group::above`].
    pub above: Vec<u64>,
    /// [`Group::path`].
    pub path: String,
}

/// A lease as a journal has it. Times are nanoseconds since the host was booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    pub id: u64,
    /// The tenant's name.
    pub tenant: String,
    /// The user that asked.
    pub uid: u32,
    /// The process that asked.
    pub pid: u32,
    /// A name for people.
    pub label: String,
    /// What was asked for.
    pub demands: Vec<DemandRecord>,
    /// The fewest of them that are of use.
    pub at_least: usize,
    /// A list of CPUs.
    pub cpus: String,
    /// Absent: it is of scope `cpu`, unless it has a group.
    pub threads: Option<Vec<u32>>,
    /// When each of them began; absent in journals of before Umpire kept that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<Vec<u64>>,
    /// Absent: it is not of scope `cgroup`, nor within such a lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupRecord>,
    /// [`Part::with_others`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub with_others: bool,
    /// The tenant and the user that asked, if not its own: [`Owner::by`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<(String, u32)>,
    /// [`Terms::guaranteed`].
    pub guaranteed: bool,
    /// [`Terms::priority`].
    pub priority: u8,
    /// [`Terms::preemptible`].
    pub preemptible: bool,
    /// [`Terms::lasts`].
    pub lasts: Option<u64>,
    /// Absent: it does not wait; 0: for ever.
    pub waits: Option<u64>,
    /// [`LeaseFacts::holds`].
    pub holds: usize,
    /// [`LeaseFacts::generation`].
    pub generation: u64,
    /// [`LeaseFacts::waits_since`].
    pub waits_since: u64,
    /// [`LeaseFacts::since`].
    pub since: Option<u64>,
    /// [`LeaseFacts::until`].
    pub until: Option<u64>,
    /// A revocation that was announced: when, what is left, and by whom, if by a user.
    pub leaving: Option<(u64, usize, Option<u32>)>,
    /// [`LeaseFacts::blind`].
    pub blind: u64,
    /// [`Lease::arrival`].
    pub arrival: u64,
}

impl LeaseRecord {
    /// The version of these fields, for the head of whatever they are written to. A field
    /// that may be absent needs no other.
    pub const VERSION: u32 = 1;

    /// What is kept of a lease of `arbiter`.
    pub fn of(lease: &Lease, arbiter: &HostArbiter) -> Self {
        let terms = &lease.terms;
        let tenant = arbiter.policy().tenant(lease.owner.tenant);
        let demand = |demand: &Demand| {
            let pmu = arbiter.pmus().get(usize::from(demand.pmu.0));
            let name = pmu.map_or("unknown", |pmu| pmu.name.as_str());
            (name.to_owned(), demand.counters.bits())
        };
        LeaseRecord {
            id: lease.id.0,
            tenant: tenant.map(|tenant| tenant.name.clone()).unwrap_or_default(),
            uid: lease.owner.uid,
            pid: lease.owner.pid,
            label: lease.owner.label.clone(),
            demands: terms.demands.iter().map(demand).collect(),
            at_least: terms.at_least,
            cpus: terms.cpus.to_string(),
            threads: of_threads(&terms.scope, |thread| thread.number),
            started: of_threads(&terms.scope, |thread| thread.started),
            group: group_of(&terms.scope).map(|group| GroupRecord {
                id: group.id.0,
                above: group.above.iter().map(|id| id.0).collect(),
                path: group.path.clone(),
            }),
            with_others: matches!(&terms.scope, Scope::Part(part) if part.with_others),
            by: lease.owner.by.map(|by| {
                let tenant = arbiter.policy().tenant(by.tenant);
                let name = tenant.map(|tenant| tenant.name.clone());
                (name.unwrap_or_default(), by.uid)
            }),
            guaranteed: terms.guaranteed,
            priority: terms.priority,
            preemptible: terms.preemptible,
            lasts: terms.lasts.map(|lasts| lasts.0),
            waits: match terms.waits {
                Waits::No => None,
                Waits::For(time) => Some(time.0.max(1)),
                Waits::Always => Some(0),
            },
            holds: lease.holds,
            generation: lease.generation,
            waits_since: lease.waits_since.0,
            since: lease.since.map(|since| since.0),
            until: lease.until.map(|until| until.0),
            leaving: lease.departure.map(|departure| {
                let by = match departure.why {
                    Cause::Revoked { by } => Some(by),
                    _ => None,
                };
                (departure.at.0, departure.to, by)
            }),
            blind: lease.blind.0,
            arrival: lease.arrival(),
        }
    }

    /// The control group, if it is a lease of one.
    pub fn group(&self) -> Option<GroupId> {
        let group = self.group.as_ref().filter(|_| self.threads.is_none());
        group.map(|group| GroupId(group.id))
    }

    /// The lease, for [`HostArbiter::restore`] of `arbiter`. `None`: the host or the policy
    /// has changed so that it cannot be.
    pub fn recall(&self, arbiter: &HostArbiter) -> Option<Lease> {
        // Also of a tenant that the policy does not name any more.
        let named = |name: &str| {
            let mut tenants = arbiter.policy().all();
            tenants
                .find(|(_, tenant)| tenant.name == *name)
                .map(|(id, _)| id)
        };
        let tenant = named(&self.tenant)?;
        let by = self.by.as_ref().and_then(|(name, uid)| {
            Some(Asker {
                tenant: named(name)?,
                uid: *uid,
            })
        });
        let owner = Owner {
            tenant,
            uid: self.uid,
            pid: self.pid,
            label: self.label.clone(),
            by,
        };
        let terms = self.terms(arbiter)?;
        if self.holds > terms.demands.len() {
            return None;
        }
        let facts = LeaseFacts {
            id: LeaseId(self.id),
            owner,
            terms,
            holds: self.holds,
            generation: self.generation,
            waits_since: BootTime(self.waits_since),
            since: self.since.map(BootTime),
            until: self.until.map(BootTime),
            // For whom it was to leave may be gone: it is told anew.
            departure: self.leaving.and_then(|(at, to, by)| {
                Some(Departure {
                    at: BootTime(at),
                    to,
                    why: Cause::Revoked { by: by? },
                })
            }),
            broken: None,
            blind: Nanos(self.blind),
            claim_by: None,
        };
        Some(Lease::kept(facts, self.arrival))
    }

    fn threads(&self, numbers: &[u32]) -> Vec<ThreadId> {
        // Of a journal that says no more, none of them is known: they have ended.
        let started = self.started.iter().flatten().copied();
        let all = numbers.iter().zip(started.chain(std::iter::repeat(0)));
        let thread = |(&number, started)| ThreadId { number, started };
        all.map(thread).collect()
    }

    fn terms(&self, arbiter: &HostArbiter) -> Option<Terms> {
        let mut demands = Vec::new();
        for (name, bits) in &self.demands {
            let place = arbiter.pmus().iter().position(|pmu| pmu.name == *name)?;
            demands.push(Demand {
                pmu: PmuId(u16::try_from(place).ok()?),
                counters: CounterSet::from_bits(*bits),
            });
        }
        Some(Terms {
            demands,
            at_least: self.at_least,
            cpus: self.cpus.parse().ok()?,
            scope: match (&self.group, &self.threads) {
                (Some(group), None) => Scope::Group(group.group()),
                (Some(group), Some(threads)) => Scope::Part(Box::new(Part {
                    of: group.group(),
                    threads: self.threads(threads),
                    with_others: self.with_others,
                })),
                (None, None) => Scope::Cpu,
                (None, Some(threads)) => Scope::Thread(self.threads(threads)),
            },
            guaranteed: self.guaranteed,
            priority: self.priority,
            preemptible: self.preemptible,
            lasts: self.lasts.map(Nanos),
            waits: match self.waits {
                None => Waits::No,
                Some(0) => Waits::Always,
                Some(time) => Waits::For(Nanos(time)),
            },
        })
    }
}

impl GroupRecord {
    fn group(&self) -> Arc<Group> {
        Arc::new(Group {
            id: GroupId(self.id),
            above: self.above.iter().copied().map(GroupId).collect(),
            path: self.path.clone(),
        })
    }
}

/// The control group of a lease, or of which it is a part.
fn group_of(scope: &Scope) -> Option<&Group> {
    match scope {
        Scope::Cpu | Scope::Thread(_) => None,
        Scope::Group(group) => Some(group),
        Scope::Part(part) => Some(&part.of),
    }
}

fn of_threads<T>(scope: &Scope, what: impl Fn(&ThreadId) -> T) -> Option<Vec<T>> {
    match scope {
        Scope::Cpu | Scope::Group(_) => None,
        Scope::Thread(_) | Scope::Part(_) => Some(scope.threads().iter().map(what).collect()),
    }
}
