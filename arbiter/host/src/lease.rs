//! A lease: what of its terms is held, and what becomes of it.

use std::collections::BTreeSet;
use std::ops::Deref;

use arbiter::Nanos;

use super::cpus::CpuSet;
use super::ids::{BootTime, LeaseId, TenantId, ThreadId};
use super::policy::HostPolicy;
use super::refusal::Refusal;
use super::terms::{Demand, Terms, Waits};

/// Who has a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Whose shares it counts for.
    pub tenant: TenantId,
    /// The user of the process that asked.
    pub uid: u32,
    /// The process that asked, as the host numbers it.
    pub pid: u32,
    /// A name for people. It authorises nothing.
    pub label: String,
    /// Who asked for it, if not its owner.
    pub by: Option<Asker>,
}

/// Who asked for a lease of somebody else's, and may give commands about it as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    pub tenant: TenantId,
    pub uid: u32,
}

/// Who gives a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The one of its user's tenants that it speaks for.
    pub tenant: TenantId,
    pub uid: u32,
    /// Whether it may do everything.
    pub operator: bool,
}

/// What a lease is told that it will lose, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The instant.
    pub at: BootTime,
    /// The number of counters that it holds from then on.
    pub to: usize,
    pub why: Cause,
}

/// Why a lease holds more or less than before, or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It was its turn.
    Granted,
    /// A lease of higher priority, or a guaranteed one, needed the counters.
    Preempted {
        /// The other lease.
        by: LeaseId,
    },
    /// Somebody who may has revoked it.
    Revoked {
        /// The user.
        by: u32,
    },
    /// Its time was over.
    Expired,
    /// Its owner gave it back.
    Released,
    /// The owner's connection has ended.
    HolderGone,
    /// The last of its threads has ended.
    ThreadsEnded,
    /// Nothing runs in its control group any more.
    GroupEmpty,
    /// Nothing came to run in its control group in time.
    NobodyCame,
    /// The lease of a control group above its own has ended, or holds less than it.
    AboveEnded,
    /// One of its threads runs in another control group with a lease by now, or in none.
    MovedAway,
    /// It waited for as long as it said.
    TimedOut,
    /// The service came back, and the owner did not claim it in time.
    Unclaimed,
    /// Its user has counted on after another lease had ended.
    Barred,
}

/// What is known of a lease, or of a request that waits for one: then it holds nothing yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseFacts {
    /// Its name.
    pub id: LeaseId,
    /// Whose it is.
    pub owner: Owner,
    /// What was asked for.
    pub terms: Terms,
    /// How many of the demands it holds, from the first.
    pub holds: usize,
    /// Grows with every change of what it holds. A command that names an older one is
    /// refused: it was given without knowing of the change.
    pub generation: u64,
    /// Since when it waits for what it does not hold; while it holds all, when it last
    /// began to wait.
    pub waits_since: BootTime,
    /// When it was first granted.
    pub since: Option<BootTime>,
    /// When it ends without a renewal.
    pub until: Option<BootTime>,
    /// What it was told that it will lose.
    pub departure: Option<Departure>,
    /// Since when somebody who holds no lease has counters that it needs.
    pub broken: Option<BootTime>,
    /// Counters times time that it lacked since the first grant.
    pub blind: Nanos,
    /// Until when its owner has to come back; of a lease of before a restart.
    pub claim_by: Option<BootTime>,
}

/// A lease. Its facts can be read as its fields; only its own methods change them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    facts: LeaseFacts,
    renewed: Option<BootTime>,
    /// Up to when `blind` was added up.
    settled: BootTime,
    /// Its place among those of the same priority and tenant.
    arrival: u64,
    /// Whether others may still pass it.
    patient: bool,
    /// Whether others may not pass it now.
    blocks: bool,
}

impl Deref for Lease {
    type Target = LeaseFacts;

    fn deref(&self) -> &LeaseFacts {
        &self.facts
    }
}

/// What a lease holds, as a room counts it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holding<'a> {
    pub(crate) lease: LeaseId,
    pub(crate) tenant: TenantId,
    pub(crate) terms: &'a Terms,
    /// So many of its demands.
    pub(crate) holds: usize,
}

impl<'a> Holding<'a> {
    pub(crate) fn demands(&self) -> &'a [Demand] {
        &self.terms.demands[..self.holds]
    }

    /// The same lease, if it held the first `holds`.
    pub(crate) fn with(self, holds: usize) -> Self {
        Holding { holds, ..self }
    }
}

/// What becomes of a lease at an instant that it has waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Due {
    Ends(Cause),
    Keeps { to: usize, why: Cause },
    LosesPatience,
}

impl Lease {
    /// A request that was made at `asked` and holds nothing. `arrival` is its place among
    /// those of the same priority and tenant.
    pub fn new(id: LeaseId, owner: Owner, terms: Terms, asked: BootTime, arrival: u64) -> Self {
        let facts = LeaseFacts {
            id,
            owner,
            terms,
            holds: 0,
            generation: 0,
            waits_since: asked,
            since: None,
            until: None,
            departure: None,
            broken: None,
            blind: Nanos(0),
            claim_by: None,
        };
        Self::kept(facts, arrival)
    }

    /// One of which these facts were kept, and its place.
    pub fn kept(facts: LeaseFacts, arrival: u64) -> Self {
        Lease {
            renewed: None,
            settled: facts.waits_since,
            arrival,
            patient: true,
            blocks: false,
            facts,
        }
    }

    /// Its place among those of the same priority and tenant that wait.
    pub fn arrival(&self) -> u64 {
        self.arrival
    }

    /// Whether it wants more than it holds.
    pub fn is_short(&self) -> bool {
        self.holds < self.terms.demands.len()
    }

    /// Whether it waits for more: it may hold some already.
    pub fn is_waiting(&self) -> bool {
        self.is_short() && self.terms.waits != Waits::No && self.claim_by.is_none()
    }

    /// The fewest demands that would be more than it holds, and of use.
    pub(crate) fn least_more(&self) -> usize {
        self.terms.at_least.max(self.holds + 1)
    }

    pub(crate) fn blocks(&self) -> bool {
        self.blocks
    }

    pub(crate) fn is_patient(&self) -> bool {
        self.patient
    }

    pub(crate) fn renewed_since(&self, instant: BootTime) -> bool {
        self.renewed.is_some_and(|renewed| renewed >= instant)
    }

    /// Counters times time that it lacked since the first grant, up to `now`.
    pub fn blind_until(&self, now: BootTime) -> Nanos {
        let lacks = match (self.since, self.broken) {
            (None, _) => 0,
            // Which of the counters an outsider has is not known.
            (_, Some(_)) => self.terms.demands.len(),
            _ => self.terms.demands.len() - self.holds,
        };
        self.blind + now.since(self.settled) * lacks as u64
    }

    /// Whether a lease of `taker`, of higher rank, may take counters of it.
    pub(crate) fn gives_way(&self, taker: TenantId, policy: &HostPolicy) -> bool {
        let tenant = policy.tenant(self.owner.tenant);
        let only = tenant.and_then(|tenant| tenant.gives_way_to.as_ref());
        self.terms.can_be_preempted() && only.is_none_or(|only| only.contains(&taker))
    }

    pub(crate) fn holding(&self) -> Holding<'_> {
        Holding {
            lease: self.id,
            tenant: self.owner.tenant,
            terms: &self.terms,
            holds: self.holds,
        }
    }

    /// When something is due for it.
    pub(crate) fn next_due(&self, patience: Nanos) -> Option<BootTime> {
        let departs = self.departure.as_ref().map(|departure| departure.at);
        let passed = (self.is_waiting() && self.patient).then(|| self.waits_since.after(patience));
        let times = [departs, self.until, self.claim_by, self.gives_up(), passed];
        times.into_iter().flatten().min()
    }

    /// When it waits no longer.
    fn gives_up(&self) -> Option<BootTime> {
        match self.terms.waits {
            Waits::For(time) if self.is_waiting() && self.holds == 0 => {
                Some(self.waits_since.after(time))
            }
            _ => None,
        }
    }

    /// What is due for it at `now`, when something is.
    pub(crate) fn due(&self, now: BootTime) -> Due {
        let is_past = |instant: Option<BootTime>| instant.is_some_and(|instant| instant <= now);
        if let Some(Departure { to, why, .. }) = self.departure.filter(|one| one.at <= now) {
            // Whoever was preempted may wait for its counters again.
            let again = self.terms.waits != Waits::No && matches!(why, Cause::Preempted { .. });
            return if to == 0 && !again {
                Due::Ends(why)
            } else {
                Due::Keeps { to, why }
            };
        }
        if is_past(self.until) {
            Due::Ends(Cause::Expired)
        } else if is_past(self.claim_by) {
            Due::Ends(Cause::Unclaimed)
        } else if is_past(self.gives_up()) {
            Due::Ends(Cause::TimedOut)
        } else {
            Due::LosesPatience
        }
    }

    /// Adds up the time that it has lacked counters.
    pub(crate) fn settle(&mut self, now: BootTime) {
        self.facts.blind = self.blind_until(now);
        self.settled = now;
    }

    /// Holds the first `to` of its demands from now on. `arrival` is its place, if it begins
    /// to wait.
    pub(crate) fn hold(&mut self, to: usize, now: BootTime, arrival: u64) {
        self.settle(now);
        if self.holds == 0 {
            self.facts.until = self.terms.lasts.map(|lasts| now.after(lasts));
        }
        if to < self.holds {
            // It waits behind those who do already.
            self.facts.waits_since = now;
            self.patient = true;
            self.arrival = arrival;
        }
        if to == 0 {
            self.facts.until = None;
        }
        self.facts.since.get_or_insert(now);
        // What was announced still comes, if it takes anything.
        self.facts.departure = self
            .departure
            .filter(|departure| departure.to < to && departure.at > now);
        self.facts.holds = to;
        self.facts.generation += 1;
    }

    /// Wants no more than the first `keep` of its demands.
    pub(crate) fn want_only(&mut self, keep: usize) {
        self.facts.terms.demands.truncate(keep);
    }

    /// Lasts for its time again. Returns until when.
    pub(crate) fn renew(&mut self, now: BootTime) -> Option<BootTime> {
        self.facts.until = self.terms.lasts.map(|lasts| now.after(lasts));
        self.renewed = Some(now);
        self.until
    }

    /// Is of before a restart: its owner has to claim it by `claim_by`. What a control group
    /// was given is the group's, whoever asked for it, also while it was preempted: nobody has to
    /// come back.
    pub(crate) fn recall(&mut self, now: BootTime, claim_by: BootTime) {
        self.settled = now;
        let is_groups = self.terms.scope.group().is_some() && self.since.is_some();
        self.facts.claim_by = (!is_groups).then_some(claim_by);
        // Its owner could not renew it while nobody was there.
        self.facts.until = self.until.map(|until| until.max(claim_by));
    }

    /// An outsider has taken counters that it needs, or has them no more: then it returns
    /// for how long it had.
    pub(crate) fn break_or_mend(&mut self, now: BootTime) -> Option<Nanos> {
        self.settle(now);
        let lasted = self.broken.map(|since| now.since(since));
        self.facts.broken = if lasted.is_some() { None } else { Some(now) };
        lasted
    }

    /// Is for the threads that have not ended. Returns those of its own that have.
    pub(crate) fn lose_threads(&mut self, ended: &BTreeSet<ThreadId>) -> Vec<ThreadId> {
        let threads = self.facts.terms.scope.threads_mut().into_iter();
        threads
            .flat_map(|all| all.extract_if(.., |thread| ended.contains(thread)))
            .collect()
    }

    /// It will lose counters; `None`: it will not, after all.
    pub(crate) fn set_departure(&mut self, departure: Option<Departure>) {
        self.facts.departure = departure;
    }

    /// How it leaves with another, that leaves so.
    pub(crate) fn departs_with(&self, other: Departure) -> Departure {
        let (at, why) = match self.departure {
            // A revocation stays one, and nobody spares its lease.
            Some(
                own @ Departure {
                    why: Cause::Revoked { .. },
                    ..
                },
            ) => (own.at.min(other.at), own.why),
            Some(own) => (own.at.min(other.at), other.why),
            None => (other.at, other.why),
        };
        Departure { at, to: 0, why }
    }

    /// Its owner is there again.
    pub(crate) fn claim(&mut self) {
        self.facts.claim_by = None;
    }

    pub(crate) fn lose_patience(&mut self) {
        self.patient = false;
    }

    pub(crate) fn set_blocks(&mut self, blocks: bool) {
        self.blocks = blocks;
    }
}

/// What has happened to a lease. Holders are told by these, and the journal, the audit
/// and the figures are made of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It waits, with so many before it.
    Waits {
        lease: LeaseId,
        /// How many are served before it.
        behind: usize,
        /// What it waits for.
        why: Refusal,
    },
    /// It holds more or fewer counters.
    Holds {
        lease: LeaseId,
        /// The number of its demands, from the first.
        holds: usize,
        /// Its generation from now on.
        generation: u64,
        why: Cause,
    },
    /// It will lose counters.
    Announced {
        lease: LeaseId,
        /// When, how many are left, and why.
        departure: Departure,
    },
    /// It will not lose them after all.
    Spared { lease: LeaseId },
    /// It ends later than before.
    Renewed {
        lease: LeaseId,
        /// When it ends now.
        until: Option<BootTime>,
    },
    /// Its owner is there again after a restart of the service.
    Claimed { lease: LeaseId },
    /// Somebody outside has taken counters that it needs.
    Broken { lease: LeaseId },
    /// The counters are there again.
    Mended {
        lease: LeaseId,
        /// For how long they were not.
        lasted: Nanos,
    },
    /// CPUs of it went offline: what counted there counts nothing. It keeps its counters
    /// there for when they come back.
    CpusGone { lease: LeaseId, cpus: CpuSet },
    /// CPUs of it came back online.
    CpusBack { lease: LeaseId, cpus: CpuSet },
    /// Some of its threads have ended: it is for the others alone.
    ThreadsGone {
        lease: LeaseId,
        /// Those that have ended.
        threads: Vec<ThreadId>,
    },
    /// There is no such lease any more.
    Ended {
        /// The lease, as it was last.
        lease: Box<Lease>,
        why: Cause,
    },
}

impl Change {
    /// The lease that it is about.
    pub fn lease(&self) -> LeaseId {
        match self {
            Change::Waits { lease, .. }
            | Change::Holds { lease, .. }
            | Change::Announced { lease, .. }
            | Change::Spared { lease }
            | Change::Renewed { lease, .. }
            | Change::Claimed { lease }
            | Change::Broken { lease }
            | Change::Mended { lease, .. }
            | Change::CpusGone { lease, .. }
            | Change::CpusBack { lease, .. }
            | Change::ThreadsGone { lease, .. } => *lease,
            Change::Ended { lease, .. } => lease.id,
        }
    }
}
