//! The messages of `io.umpire.Arbiter`. Their meaning is in the interface's description,
//! which a test compares with these.

use arbiter_host::{CounterKind, Fate, LeaseScope, OutsiderKind, Reason, Standing, What};
use serde::{Deserialize, Serialize};

/// Declares a message: each field is optional on the wire if its type is an `Option`.
macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $(
                $(#[$field_doc])*
                pub $field: $type,
            )*
        }
    )*};
}

messages! {
    /// Counters that are asked for.
    Counters {
        /// A PMU of the host; the first without one.
        #[serde(skip_serializing_if = "Option::is_none")]
        pmu: Option<String>,
        /// `programmable` or `fixed`.
        #[serde(skip_serializing_if = "Option::is_none")]
        kind: Option<CounterKind>,
        /// A name that the PMU's table knows.
        #[serde(skip_serializing_if = "Option::is_none")]
        event: Option<String>,
        /// Names of those that will do: `PMC0`, `FIXED1`.
        #[serde(skip_serializing_if = "Option::is_none")]
        among: Option<Vec<String>>,
        /// So many of them; 1 without a number.
        #[serde(skip_serializing_if = "Option::is_none")]
        count: Option<u32>,
    }
    /// What is asked for.
    Request {
        /// The first are given first and taken last.
        counters: Vec<Counters>,
        /// The fewest that are of use; all without a number.
        #[serde(skip_serializing_if = "Option::is_none")]
        at_least: Option<u32>,
        /// A list like `0,2-3`.
        #[serde(skip_serializing_if = "Option::is_none")]
        cpus: Option<String>,
        /// `cpu`, `thread`, `cgroup`, or `part`: of what the caller's control group has. Without it
        /// `part` where that has a lease, and else `cpu`.
        #[serde(skip_serializing_if = "Option::is_none")]
        scope: Option<LeaseScope>,
        /// The threads of scope `thread`, by their numbers in the caller's PID namespace.
        #[serde(skip_serializing_if = "Option::is_none")]
        threads: Option<Vec<u32>>,
        /// The control group of scope `cgroup`, as `/proc/PID/cgroup` has it on the host; without
        /// the first `/`, from the caller's own group on.
        #[serde(skip_serializing_if = "Option::is_none")]
        cgroup: Option<String>,
        /// The user whose the control group is, if not the caller's.
        #[serde(skip_serializing_if = "Option::is_none")]
        for_uid: Option<u32>,
        /// The group of that user with which it runs there.
        #[serde(skip_serializing_if = "Option::is_none")]
        for_gid: Option<u32>,
        /// Whether others wait for this lease to end; true without it.
        #[serde(skip_serializing_if = "Option::is_none")]
        guaranteed: Option<bool>,
        /// 0 without a number.
        #[serde(skip_serializing_if = "Option::is_none")]
        priority: Option<u8>,
        /// Whether leases of higher priority may take its counters; false without it.
        #[serde(skip_serializing_if = "Option::is_none")]
        preemptible: Option<bool>,
        /// How long it lasts without a renewal.
        #[serde(skip_serializing_if = "Option::is_none")]
        lasts_ms: Option<u64>,
        /// How long it waits: not at all without a number, for ever with -1.
        #[serde(skip_serializing_if = "Option::is_none")]
        waits_ms: Option<i64>,
        /// One of the caller's tenants.
        #[serde(skip_serializing_if = "Option::is_none")]
        tenant: Option<String>,
        /// A name for people.
        #[serde(skip_serializing_if = "Option::is_none")]
        label: Option<String>,
    }
    /// Why a lease will hold fewer counters, and when.
    Leaving {
        /// The time until then.
        in_ms: u64,
        /// So many counters are left.
        to: u32,
        /// Why.
        why: String,
    }
    /// A lease, or a request that waits.
    Lease {
        /// Its number.
        id: u64,
        /// Grows with every change of what it holds.
        generation: u64,
        /// Whose shares it counts for.
        tenant: String,
        /// The user who asked.
        uid: u32,
        /// The process that asked. It has ended, where the lease is a control group's.
        pid: u32,
        /// A name for people.
        label: String,
        /// The CPUs.
        cpus: String,
        /// `cpu`, `thread`, `cgroup`, or `part` for one of a control group's for what its holder
        /// runs there.
        scope: LeaseScope,
        /// The lease of a control group out of which it is taken, the innermost.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        within: Option<u64>,
        /// The threads of scope `thread` that live, by their numbers on the host.
        threads: Vec<u32>,
        /// Whether others wait for it to end.
        guaranteed: bool,
        /// Its priority.
        priority: u8,
        /// Whether leases of higher priority may take its counters.
        preemptible: bool,
        /// The counters in the order in which they are given.
        counters: Vec<Counters>,
        /// Their number.
        wants: u32,
        /// It holds the first so many.
        holds: u32,
        /// `holds`, `short`, `waits` or `unclaimed`.
        state: Standing,
        /// The time since it was first granted.
        #[serde(skip_serializing_if = "Option::is_none")]
        held_ms: Option<u64>,
        /// The time until it ends without a renewal.
        #[serde(skip_serializing_if = "Option::is_none")]
        left_ms: Option<u64>,
        /// What it will lose.
        #[serde(skip_serializing_if = "Option::is_none")]
        leaving: Option<Leaving>,
        /// For how long somebody outside has had counters that it needs.
        #[serde(skip_serializing_if = "Option::is_none")]
        broken_ms: Option<u64>,
        /// Counters times time that it lacked since it was first granted.
        blind_ms: u64,
    }
    /// What happened to a lease.
    Event {
        /// `waits`, `holds`, `leaving`, `spared`, `renewed`, `claimed`, `broken`, `mended`,
        /// `cpus-gone`, `cpus-back`, `threads-gone` or `ended`.
        what: What,
        /// As it is now.
        lease: Lease,
        /// Why, in a word.
        #[serde(skip_serializing_if = "Option::is_none")]
        why: Option<Reason>,
        /// In words.
        message: String,
    }
    /// The counters of one PMU on the CPUs that share them.
    Place {
        /// The PMU.
        pmu: String,
        /// The CPUs.
        cpus: String,
        /// Its programmable counters.
        programmable: u32,
        /// Its fixed-function counters.
        fixed: u32,
        /// What leases hold there.
        leases: Vec<Lease>,
        /// What others have, as far as it is known.
        outside: u32,
    }
    /// Why something was refused.
    Refusal {
        /// A word for programs.
        reason: Reason,
        /// What is wrong, and what to do.
        message: String,
        /// The leases that are in the way.
        held_by: Vec<Lease>,
    }
    /// Parameters of `Acquire`.
    AcquireIn {
        /// What is asked for.
        request: Request,
    }
    /// A reply of `Acquire` and `Claim`.
    AcquireOut {
        /// As it is now.
        lease: Lease,
        /// What happened to it, but for the first reply.
        #[serde(skip_serializing_if = "Option::is_none")]
        event: Option<Event>,
    }
    /// Parameters of `Claim`.
    ClaimIn {
        /// The lease.
        lease: u64,
        /// Its generation, if the caller relies on it.
        #[serde(skip_serializing_if = "Option::is_none")]
        generation: Option<u64>,
    }
    /// Parameters of `Release`.
    ReleaseIn {
        /// The lease.
        lease: u64,
        /// Its generation, if the caller relies on it.
        #[serde(skip_serializing_if = "Option::is_none")]
        generation: Option<u64>,
        /// How many counters it keeps; none without a number.
        #[serde(skip_serializing_if = "Option::is_none")]
        keep: Option<u32>,
    }
    /// Parameters of `Renew`.
    RenewIn {
        /// The lease.
        lease: u64,
        /// Its generation, if the caller relies on it.
        #[serde(skip_serializing_if = "Option::is_none")]
        generation: Option<u64>,
    }
    /// The reply of `Renew`.
    RenewOut {
        /// The time until it ends.
        #[serde(skip_serializing_if = "Option::is_none")]
        left_ms: Option<u64>,
    }
    /// Parameters of `Revoke`.
    RevokeIn {
        /// The lease.
        lease: u64,
        /// How long before its holder is told; the policy's time without a number.
        #[serde(skip_serializing_if = "Option::is_none")]
        grace_ms: Option<u64>,
    }
    /// The reply of `Revoke`.
    RevokeOut {
        /// The time until it holds nothing.
        in_ms: u64,
    }
    /// The reply of `List`.
    ListOut {
        /// The leases.
        leases: Vec<Lease>,
    }
    /// The control group of a lease.
    LeasedGroup {
        /// The lease.
        lease: u64,
        /// Whose it is.
        uid: u32,
        /// Its path when it was asked for.
        path: String,
        /// The kernel's number of it, which is that of its inode.
        number: u64,
        /// The tenant that asked, if not its own.
        #[serde(skip_serializing_if = "Option::is_none")]
        by_tenant: Option<String>,
        /// The user that asked, if not its own.
        #[serde(skip_serializing_if = "Option::is_none")]
        by_uid: Option<u32>,
    }
    /// The reply of `Groups`.
    GroupsOut {
        /// The groups.
        groups: Vec<LeasedGroup>,
    }
    /// Parameters of `Who`.
    WhoIn {
        /// A CPU; all without one.
        #[serde(skip_serializing_if = "Option::is_none")]
        cpu: Option<u32>,
    }
    /// Somebody who has counters, or may, and has no lease.
    Outsider {
        /// `nmi-watchdog`, `process`, `hidden` for those that cannot be looked at, or `barred`
        /// for a user who gets nothing any more.
        what: OutsiderKind,
        /// Its name.
        name: String,
        /// Its process.
        #[serde(skip_serializing_if = "Option::is_none")]
        pid: Option<u32>,
        /// Its user.
        #[serde(skip_serializing_if = "Option::is_none")]
        uid: Option<u32>,
        /// Descriptors of perf events that it has open.
        #[serde(skip_serializing_if = "Option::is_none")]
        events: Option<u32>,
        /// The CPUs of the watchdog, or those whose msr device it has open.
        #[serde(skip_serializing_if = "Option::is_none")]
        cpus: Option<String>,
    }
    /// The reply of `Who`.
    WhoOut {
        /// The places.
        places: Vec<Place>,
        /// Who may have what is used outside.
        outsiders: Vec<Outsider>,
    }
    /// Parameters of `Explain`.
    ExplainIn {
        /// What would be asked for.
        request: Request,
    }
    /// The reply of `Explain`.
    ExplainOut {
        /// `granted`, `waits` or `refused`.
        outcome: Fate,
        /// What would be held, or wait.
        #[serde(skip_serializing_if = "Option::is_none")]
        lease: Option<Lease>,
        /// Why not at once.
        #[serde(skip_serializing_if = "Option::is_none")]
        why: Option<Refusal>,
        /// What would follow for others.
        events: Vec<Event>,
    }
    /// A reply of `Watch`.
    WatchOut {
        /// What happened; nothing in the first reply.
        #[serde(skip_serializing_if = "Option::is_none")]
        event: Option<Event>,
    }
    /// What the holder of a lease has counted of itself.
    Figure {
        /// One of [`FIGURES`](crate::FIGURES).
        name: String,
        /// The number since it began.
        count: u64,
    }
    /// Parameters of `Report`.
    ReportIn {
        /// The lease.
        lease: u64,
        /// As they are by now.
        figures: Vec<Figure>,
    }
    /// Parameters of `Audit`.
    AuditIn {
        /// The lease.
        lease: u64,
        /// One JSON object each.
        lines: Vec<String>,
    }
    /// Parameters of `Pardon`.
    PardonIn {
        /// The user.
        uid: u32,
    }
    /// Parameters of the error `Refused`.
    RefusedError {
        /// Why.
        refusal: Refusal,
    }
    /// What is asked for at the companion socket: an event of a lease.
    EventRequest {
        /// The lease.
        lease: u64,
        /// Its generation, if the caller relies on it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        generation: Option<u64>,
        /// Which of the lease's counters, from 0.
        counter: u32,
        /// A thread of the caller's own, or one that runs in the lease's control group; without
        /// one, all that runs on `cpu`, of the group if the lease is for one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        thread: Option<u32>,
        /// A CPU of the lease; without one, all, if the lease is for all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cpu: Option<u32>,
        /// The event, as the PMU has it: event, unit mask, edge, invert and threshold. A
        /// fixed-function counter needs none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        config: Option<u64>,
        /// `user` (programs, without it), `guest` (guests of KVM) or `all` (for operators).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rings: Option<String>,
        /// It overflows after so many.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        period: Option<u64>,
        /// What of a group's thread counts along that it starts later: `children` (threads and
        /// processes, without it) or `threads` (of its own process).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        follows: Option<String>,
    }
    /// The reply at the companion socket: a descriptor comes with it, or it says why not.
    EventReply {
        /// The counter, with a descriptor.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        counter: Option<u32>,
        /// Why there is none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        refused: Option<Refusal>,
    }
    /// No parameters.
    NoReply {}
}

impl Refusal {
    /// One that no lease stands behind.
    #[must_use]
    pub fn of(reason: Reason, message: impl Into<String>) -> Self {
        Refusal {
            reason,
            message: message.into(),
            held_by: Vec::new(),
        }
    }
}

impl From<Refusal> for EventReply {
    fn from(refusal: Refusal) -> Self {
        EventReply {
            counter: None,
            refused: Some(refusal),
        }
    }
}

impl Counters {
    /// So many programmable counters of the first PMU.
    #[must_use]
    pub fn programmable(count: u32) -> Self {
        Counters {
            kind: Some(CounterKind::Programmable),
            count: Some(count),
            ..Counters::default()
        }
    }

    /// So many fixed-function counters of the first PMU.
    #[must_use]
    pub fn fixed(count: u32) -> Self {
        Counters {
            kind: Some(CounterKind::Fixed),
            count: Some(count),
            ..Counters::default()
        }
    }
}
