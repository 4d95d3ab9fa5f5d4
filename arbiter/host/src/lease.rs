//! A lease: what of its terms is held, and what becomes of it.

use super::cpus::CpuSet;
use super::ids::{BootTime, LeaseId, TenantId, ThreadId};
use super::refusal::Refusal;
use super::room::Holding;
use super::terms::{Terms, Waits};
use arbiter::Nanos;

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
}

/// What a lease is told that it will lose, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The instant.
    pub at: BootTime,
    /// The number of counters that it holds from then on.
    pub to: usize,
    /// Why.
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
    /// It waited for as long as it said.
    TimedOut,
    /// The service came back, and the owner did not claim it in time.
    Unclaimed,
    /// Its user has counted on after another lease had ended.
    Barred,
}

/// A lease, or a request that waits for one: then it holds nothing yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
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
    /// When it was last renewed.
    pub(super) renewed: Option<BootTime>,
    /// Counters times time that it lacked since the first grant.
    pub blind: Nanos,
    /// Until when its owner has to come back; of a lease of before a restart.
    pub claim_by: Option<BootTime>,
    /// Up to when `blind` was added up.
    pub(super) settled: BootTime,
    /// Its place among those of the same priority and tenant.
    pub(super) arrival: u64,
    /// Whether others may still pass it.
    pub(super) patient: bool,
    /// Whether others may not pass it now.
    pub(super) blocks: bool,
    /// When something is due for it, as the arbiter has noted it.
    pub(super) due: Option<BootTime>,
}

impl Lease {
    /// A request that was made at `asked` and holds nothing. `arrival` is its place among
    /// those of the same priority and tenant. A journal keeps leases by this and the
    /// public fields.
    pub fn new(id: LeaseId, owner: Owner, terms: Terms, asked: BootTime, arrival: u64) -> Self {
        Lease {
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
            renewed: None,
            blind: Nanos(0),
            claim_by: None,
            settled: asked,
            arrival,
            patient: true,
            blocks: false,
            due: None,
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

    /// Adds up the time that it has lacked counters.
    pub(super) fn settle(&mut self, now: BootTime) {
        self.blind = self.blind_until(now);
        self.settled = now;
    }

    /// What it holds, as the room sees it.
    pub(super) fn holding(&self) -> Holding<'_> {
        Holding {
            lease: self.id,
            tenant: self.owner.tenant,
            terms: &self.terms,
            holds: self.holds,
        }
    }

    /// When something is due for it.
    pub(super) fn next_due(&self, patience: Nanos) -> Option<BootTime> {
        let departs = self.departure.as_ref().map(|departure| departure.at);
        let passed = (self.is_waiting() && self.patient).then(|| self.waits_since.after(patience));
        let times = [departs, self.until, self.claim_by, self.gives_up(), passed];
        times.into_iter().flatten().min()
    }

    /// When it waits no longer.
    pub(super) fn gives_up(&self) -> Option<BootTime> {
        match self.terms.waits {
            Waits::For(time) if self.is_waiting() && self.holds == 0 => {
                Some(self.waits_since.after(time))
            }
            _ => None,
        }
    }
}

/// What has happened to a lease. Holders are told by these, and the journal, the audit
/// and the figures are made of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It waits, with so many before it.
    Waits {
        /// The lease.
        lease: LeaseId,
        /// How many are served before it.
        behind: usize,
        /// What it waits for.
        why: Refusal,
    },
    /// It holds more or fewer counters.
    Holds {
        /// The lease.
        lease: LeaseId,
        /// The number of its demands, from the first.
        holds: usize,
        /// Its generation from now on.
        generation: u64,
        /// Why.
        why: Cause,
    },
    /// It will lose counters.
    Announced {
        /// The lease.
        lease: LeaseId,
        /// When, how many are left, and why.
        departure: Departure,
    },
    /// It will not lose them after all.
    Spared {
        /// The lease.
        lease: LeaseId,
    },
    /// It ends later than before.
    Renewed {
        /// The lease.
        lease: LeaseId,
        /// When it ends now.
        until: Option<BootTime>,
    },
    /// Its owner is there again after a restart of the service.
    Claimed {
        /// The lease.
        lease: LeaseId,
    },
    /// Somebody outside has taken counters that it needs.
    Broken {
        /// The lease.
        lease: LeaseId,
    },
    /// The counters are there again.
    Mended {
        /// The lease.
        lease: LeaseId,
        /// For how long they were not.
        lasted: Nanos,
    },
    /// CPUs of it went offline: what counted there counts nothing. It keeps its counters
    /// there for when they come back.
    CpusGone {
        /// The lease.
        lease: LeaseId,
        /// The CPUs.
        cpus: CpuSet,
    },
    /// CPUs of it came back online.
    CpusBack {
        /// The lease.
        lease: LeaseId,
        /// The CPUs.
        cpus: CpuSet,
    },
    /// Some of its threads have ended: it is for the others alone.
    ThreadsGone {
        /// The lease.
        lease: LeaseId,
        /// Those that have ended.
        threads: Vec<ThreadId>,
    },
    /// There is no such lease any more.
    Ended {
        /// The lease, as it was last.
        lease: Box<Lease>,
        /// Why.
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
