//! What the audit has of decisions: who has caused what, and who was refused. Pure.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use arbiter::Nanos;
use arbiter_host::{Cause, Change, HostArbiter, LeaseId, Reason, TenantId, What};
use serde_json::{Value, json};
use umpire_lease::{self as wire, MOST_LINE, MOST_LINES};

use super::said::Denial;
use crate::audit::Record;
use crate::convert;
use crate::journal::Stored;

/// A call that was refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refused<'a> {
    pub(super) tenant: Option<TenantId>,
    pub(super) uid: u32,
    pub(super) pid: u32,
    pub(super) method: &'a str,
    pub(super) reason: &'a Reason,
    pub(super) message: Option<&'a str>,
}

/// Refusals of this second, by user, tenant and reason: each is in the audit once, and then how
/// many more there were. Who is refused over and over cannot fill it.
#[derive(Debug, Default)]
pub(super) struct Denials {
    second: u64,
    counts: BTreeMap<(u32, Option<TenantId>, String), u64>,
}

impl Denials {
    /// What the audit is to have with this one.
    pub(super) fn add(&mut self, refused: &Refused<'_>, arbiter: &HostArbiter) -> Vec<Value> {
        let mut records = Vec::new();
        let second = arbiter.now().0 / 1_000_000_000;
        if self.second != second {
            let before = std::mem::take(&mut self.counts);
            self.second = second;
            let before = before.into_iter().filter(|(_, more)| *more > 0);
            records.extend(before.map(|((uid, tenant, why), more)| {
                json!({
                    "event": "refused-more",
                    "why": why,
                    "tenant": name_of(arbiter, tenant),
                    "uid": uid,
                    "more": more,
                })
            }));
        }
        let which = (refused.uid, refused.tenant, refused.reason.to_string());
        match self.counts.entry(which) {
            Entry::Occupied(mut more) => *more.get_mut() += 1,
            Entry::Vacant(first) => {
                first.insert(0);
                records.push(json!({
                    "event": "refused",
                    "method": refused.method,
                    "why": refused.reason,
                    "tenant": name_of(arbiter, refused.tenant),
                    "uid": refused.uid,
                    "pid": refused.pid,
                    "message": refused.message,
                }));
            }
        }
        records
    }
}

/// Who has caused the changes of a batch.
#[derive(Debug, Default)]
pub(super) struct Causes {
    /// The tenant whose call is decided.
    calling: Option<TenantId>,
    /// Whose lease has ended just now, without a call.
    left: Option<TenantId>,
    /// The leases that end in this batch: they are not there any more.
    ended: BTreeMap<LeaseId, TenantId>,
}

impl Causes {
    /// A call of this tenant is decided, or it is no more.
    pub(super) fn set_calling(&mut self, tenant: Option<TenantId>) {
        self.calling = tenant;
    }

    /// A batch begins.
    pub(super) fn begin(&mut self, changes: &[Change]) {
        let ended = changes.iter().filter_map(|change| match change {
            Change::Ended { lease, .. } => Some((lease.id, lease.owner.tenant)),
            _ => None,
        });
        (self.left, self.ended) = (None, ended.collect());
    }

    /// What a change comes to in the audit.
    pub(super) fn record(
        &mut self,
        change: &Change,
        event: Option<&wire::Event>,
        arbiter: &HostArbiter,
    ) -> Value {
        let by = self.caused_by(change, arbiter);
        let mut record = match (event, change) {
            (Some(event), _) => {
                let lease = &event.lease;
                json!({
                    "event": event.what,
                    "why": event.why,
                    "lease": lease.id,
                    "generation": lease.generation,
                    "tenant": lease.tenant,
                    "uid": lease.uid,
                    "pid": lease.pid,
                    "label": lease.label,
                    "cpus": lease.cpus,
                    "scope": lease.scope,
                    "guaranteed": lease.guaranteed,
                    "priority": lease.priority,
                    "wants": lease.wants,
                    "holds": lease.holds,
                    "blind_ms": lease.blind_ms,
                    "message": event.message,
                })
            }
            // It came and went in one moment.
            (None, change) => json!({
                "event": change.what(),
                "lease": change.lease().0,
                "tenant": name_of(arbiter, self.owner_of(change.lease(), arbiter)),
            }),
        };
        let of_lease = match change {
            Change::Ended { lease, .. } => Some(&**lease),
            _ => arbiter.lease(change.lease()),
        };
        let group = of_lease.and_then(|lease| convert::group(arbiter, lease));
        if let (Some(group), Some(record)) = (group, record.as_object_mut()) {
            record.insert("cgroup".to_owned(), group.path.into());
            if let (Some(tenant), Some(uid)) = (group.by_tenant, group.by_uid) {
                record.insert("asked_by".to_owned(), tenant.into());
                record.insert("asked_by_uid".to_owned(), uid.into());
            }
        }
        // So it can be added up for whom a lease was blind.
        if let (Some(Cause::Preempted { by }), Some(record)) = (why(change), record.as_object_mut())
        {
            record.insert("by_lease".to_owned(), by.0.into());
        }
        // Who has caused what another's lease was told has it in its share of the audit.
        if let (Some(by), Some(record)) = (name_of(arbiter, by), record.as_object_mut()) {
            record.insert("by".to_owned(), by.into());
        }
        record
    }

    /// The tenant that has caused what happened to a lease of another one.
    fn caused_by(&mut self, change: &Change, arbiter: &HostArbiter) -> Option<TenantId> {
        let own = self.owner_of(change.lease(), arbiter);
        let ended = matches!(change, Change::Ended { .. });
        let by = match why(change) {
            Some(Cause::Preempted { by }) => self.owner_of(by, arbiter).or(self.calling),
            // What one gives back is what others get.
            _ => self.calling.or(self.left),
        };
        if ended && by.is_none() {
            self.left = own;
        }
        by.filter(|by| Some(*by) != own)
    }

    /// The tenant of a lease, also of one that has just ended.
    fn owner_of(&self, id: LeaseId, arbiter: &HostArbiter) -> Option<TenantId> {
        let there = arbiter.lease(id).map(|lease| lease.owner.tenant);
        there.or(self.ended.get(&id).copied())
    }
}

/// Of a lease that has not come back after a restart: what it was for is not there any more.
pub(super) fn lost(stored: &Stored, arbiter: &HostArbiter) -> Value {
    let mut tenants = arbiter.policy().all();
    let (why, message) = if tenants.any(|(_, tenant)| tenant.name == stored.tenant) {
        let message = "it has ended: the host's PMUs are not those of before the restart";
        (Reason::NoSuchCounters, message)
    } else {
        let message = "it has ended: its tenant is not in the configuration any more";
        (Reason::UnknownTenant, message)
    };
    let mut record = json!({
        "event": What::Ended,
        "why": why,
        "lease": stored.id,
        "tenant": stored.tenant,
        "uid": stored.uid,
        "pid": stored.pid,
        "label": stored.label,
        "cpus": stored.cpus,
        // Who adds up what leases hold has to see that it has ended.
        "wants": stored.demands.len(),
        "holds": 0,
        "blind_ms": convert::ms(Nanos(stored.blind)),
        "message": message,
    });
    if let Some((tenant, uid)) = &stored.by {
        record["asked_by"] = tenant.as_str().into();
        record["asked_by_uid"] = (*uid).into();
    }
    if let Some(group) = &stored.group {
        record["cgroup"] = group.path.as_str().into();
    }
    record
}

/// Why a lease holds, or will hold, what it does.
fn why(change: &Change) -> Option<Cause> {
    match change {
        Change::Holds { why, .. } | Change::Ended { why, .. } => Some(*why),
        Change::Announced { departure, .. } => Some(departure.why),
        _ => None,
    }
}

/// The name of a tenant.
pub(super) fn name_of(arbiter: &HostArbiter, tenant: Option<TenantId>) -> Option<&str> {
    let tenant = arbiter.policy().tenant(tenant?)?;
    Some(&tenant.name)
}

/// Records of what a holder of a lease says of its VM.
///
/// # Errors
/// There are too many lines, or one is none.
pub(super) fn of_holder(
    asked: &wire::AuditIn,
    arbiter: &HostArbiter,
) -> Result<Vec<Value>, Denial> {
    let lines = &asked.lines;
    if lines.len() > MOST_LINES || lines.iter().any(|line| line.len() > MOST_LINE) {
        return Err(Denial::wrong(format!(
            "a call has {MOST_LINES} lines at most, of {MOST_LINE} bytes each; send the rest in \
             another"
        )));
    }
    let lease = arbiter.lease(LeaseId(asked.lease));
    let owner = lease.map(|lease| &lease.owner);
    let record = |(number, line): (usize, &String)| {
        let Ok(line) = serde_json::from_str::<Record>(line) else {
            return Err(Denial::wrong(format!(
                "line {number} is not one JSON object"
            )));
        };
        Ok(json!({
            "event": "vm",
            "lease": asked.lease,
            "tenant": name_of(arbiter, owner.map(|owner| owner.tenant)),
            "uid": owner.map(|owner| owner.uid),
            "label": owner.map(|owner| owner.label.as_str()),
            "line": line,
        }))
    };
    lines.iter().enumerate().map(record).collect()
}
