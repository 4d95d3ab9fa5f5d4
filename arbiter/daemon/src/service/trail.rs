//! What the audit has of decisions, and what holders report of themselves.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

use arbiter_host::{Caller, Cause, Change, Lease, LeaseId, TenantId};
use serde_json::{Value, json};
use umpire_lease::{self as wire, MOST_FIGURES, MOST_LINE, MOST_LINES};
use varlink::{Reply, Request};

use super::shown::Viewer;
use super::{Answered, Calling, Service, parsed, refusal, wrong};
use crate::audit::Record;
use crate::metrics::Open;
use crate::words;

/// Refusals of this second, by user and reason: each is in the audit once, and then how many
/// more there were. Who is refused over and over cannot fill it.
#[derive(Debug, Default)]
pub(super) struct Denials {
    second: u64,
    counts: BTreeMap<(u32, String), (Option<TenantId>, u64)>,
}

/// Who has caused the changes of a batch.
#[derive(Debug, Default)]
pub(super) struct Causes {
    /// The tenant whose call is decided.
    pub(super) calling: Option<TenantId>,
    /// Whose lease has ended just now, without a call.
    left: Option<TenantId>,
    /// The leases that end in this batch: they are not there any more.
    ended: BTreeMap<LeaseId, TenantId>,
}

impl Causes {
    /// A batch begins.
    pub(super) fn begin(&mut self, changes: &[Change]) {
        let ended = changes.iter().filter_map(|change| match change {
            Change::Ended { lease, .. } => Some((lease.id, lease.owner.tenant)),
            _ => None,
        });
        (self.left, self.ended) = (None, ended.collect());
    }
}

impl Service {
    /// Adds a record to the audit, if there is one.
    pub(crate) fn record(&mut self, record: &Value) {
        if self.config.audit.is_some()
            && let Some(record) = record.as_object()
        {
            self.output.records.push(record.clone());
        }
    }

    /// What a change comes to in the audit.
    pub(super) fn record_change(&mut self, change: &Change, event: Option<&wire::Event>) {
        if self.config.audit.is_none() {
            return;
        }
        let by = self.caused_by(change);
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
                "event": words::what(change),
                "lease": change.lease().0,
                "tenant": self.name_of(self.owner_of(change.lease())),
            }),
        };
        // Who has caused what another's lease was told has it in its share of the audit.
        if let (Some(by), Some(record)) = (self.name_of(by), record.as_object_mut()) {
            record.insert("by".to_owned(), by.into());
        }
        self.record(&record);
    }

    /// The tenant that has caused what happened to a lease of another one.
    fn caused_by(&mut self, change: &Change) -> Option<TenantId> {
        let own = self.owner_of(change.lease());
        let ended = matches!(change, Change::Ended { .. });
        let Causes { calling, left, .. } = self.causes;
        let why = match change {
            Change::Holds { why, .. } | Change::Ended { why, .. } => Some(*why),
            Change::Announced { departure, .. } => Some(departure.why),
            _ => None,
        };
        let by = match why {
            Some(Cause::Preempted { by }) => self.owner_of(by).or(calling),
            // What one gives back is what others get.
            _ => calling.or(left),
        };
        if ended && by.is_none() {
            self.causes.left = own;
        }
        by.filter(|by| Some(*by) != own)
    }

    /// Counts and records a call that was refused.
    pub(super) fn denied(&mut self, calling: &Who, request: &Request<'_>, reply: &Reply) {
        let parameters = reply.parameters.as_ref();
        let refusal = parameters.and_then(|parameters| parameters.get("refusal"));
        let text = |field: &str| refusal.and_then(|refusal| refusal.get(field)?.as_str());
        let error = reply.error.as_deref().unwrap_or_default();
        let error = error.rsplit('.').next().unwrap_or_default();
        let reason = match (text("reason"), error) {
            (Some(reason), _) => reason.to_owned(),
            (None, "JournalFailed") => "journal-failed".to_owned(),
            (None, "MethodNotFound") => "method-not-found".to_owned(),
            (None, _) => "invalid-parameter".to_owned(),
        };
        let method = request.method.rsplit('.').next().unwrap_or_default();
        self.count_denial(calling, method, &reason, text("message"));
    }

    pub(super) fn count_denial(
        &mut self,
        who: &Who,
        method: &str,
        reason: &str,
        message: Option<&str>,
    ) {
        self.metrics.denied(&self.arbiter, who.tenant, reason);
        let second = self.arbiter.now().0 / 1_000_000_000;
        if self.denials.second != second {
            let before = std::mem::take(&mut self.denials.counts);
            self.denials.second = second;
            let before = before.into_iter().filter(|(_, (_, more))| *more > 0);
            for ((uid, why), (tenant, more)) in before {
                let record = json!({
                    "event": "refused-more",
                    "why": why,
                    "tenant": self.name_of(tenant),
                    "uid": uid,
                    "more": more,
                });
                self.record(&record);
            }
        }
        match self.denials.counts.entry((who.uid, reason.to_owned())) {
            Entry::Occupied(mut more) => {
                more.get_mut().1 += 1;
                return;
            }
            Entry::Vacant(first) => {
                first.insert((who.tenant, 0));
            }
        }
        let record = json!({
            "event": "refused",
            "method": method,
            "why": reason,
            "tenant": self.name_of(who.tenant),
            "uid": who.uid,
            "pid": who.pid,
            "message": message,
        });
        self.record(&record);
    }

    /// The tenant of a lease, also of one that has just ended.
    fn owner_of(&self, id: LeaseId) -> Option<TenantId> {
        let there = self.arbiter.lease(id).map(|lease| lease.owner.tenant);
        there.or(self.causes.ended.get(&id).copied())
    }

    fn name_of(&self, tenant: Option<TenantId>) -> Option<&str> {
        let tenant = self.arbiter.policy().tenant(tenant?)?;
        Some(&tenant.name)
    }

    /// The lease of a call, if it is the caller's.
    fn own_lease(&self, caller: Caller, id: u64) -> Result<&Lease, Reply> {
        let id = LeaseId(id);
        let own = self.arbiter.own(id, None, caller);
        let viewer = Viewer {
            uid: caller.uid,
            operator: caller.operator,
        };
        own.map_err(|refusal| self.refused(&refusal, viewer))?;
        let lease = self.arbiter.lease(id);
        lease.ok_or_else(|| wrong("there is no such lease"))
    }

    pub(super) fn report(&mut self, caller: Caller, parameters: Value) -> Answered {
        let wire::ReportIn { lease, figures } = parsed(parameters)?;
        let owner = self.own_lease(caller, lease)?.owner.tenant;
        if figures.len() > MOST_FIGURES {
            return Err(wrong(format!(
                "a report has {MOST_FIGURES} figures at most"
            )));
        }
        for figure in figures {
            let of = (owner, LeaseId(lease));
            let taken = self
                .metrics
                .report(&self.arbiter, of, &figure.name, figure.count);
            taken.map_err(wrong)?;
        }
        Ok(Some(json!({})))
    }

    pub(super) fn audit(
        &mut self,
        calling: &Calling<'_>,
        caller: Caller,
        parameters: Value,
    ) -> Answered {
        let wire::AuditIn { lease, lines } = parsed(parameters)?;
        let owner = self.own_lease(caller, lease)?.owner.clone();
        if self.config.audit.is_none() {
            let what = "this arbiter keeps no audit; its configuration has none (audit = \"FILE\")";
            return Err(refusal("no-audit".to_owned(), what.to_owned()));
        }
        if lines.len() > MOST_LINES || lines.iter().any(|line| line.len() > MOST_LINE) {
            return Err(wrong(format!(
                "a call has {MOST_LINES} lines at most, of {MOST_LINE} bytes each; send the rest in \
                 another"
            )));
        }
        let mut records = Vec::new();
        for (number, line) in lines.iter().enumerate() {
            let Ok(line) = serde_json::from_str::<Record>(line) else {
                return Err(wrong(format!("line {number} is not one JSON object")));
            };
            let tenant = self.arbiter.policy().tenant(owner.tenant);
            records.push(json!({
                "event": "vm",
                "lease": lease,
                "tenant": tenant.map(|tenant| tenant.name.as_str()),
                "uid": owner.uid,
                "label": owner.label,
                "line": line,
            }));
        }
        records.iter().for_each(|record| self.record(record));
        self.answer(calling.from, Reply::parameters(Some(json!({}))), None);
        if let Some(answer) = self.output.answers.last_mut() {
            answer.audited = true;
        }
        Ok(None)
    }

    /// The audit could not be written: whoever relies on it is told.
    pub(crate) fn unaudited(output: &mut super::Output) {
        let what = "the arbiter cannot write its audit; see that its disk has room, and try again";
        for answer in output.answers.iter_mut().filter(|answer| answer.audited) {
            answer.reply = refusal("audit-failed".to_owned(), what.to_owned());
        }
    }

    /// The configuration was read again, or could not be.
    pub(crate) fn reloaded(&mut self, file: &Path, why: Option<&String>) {
        self.metrics.config_stale.set(i64::from(why.is_some()));
        if why.is_some() {
            self.metrics.reload_errors.inc();
        }
        let event = if why.is_some() {
            "reload-failed"
        } else {
            "reload"
        };
        // What of the path is not text is not needed to know which it is.
        let file = file.to_string_lossy();
        self.record(&json!({ "event": event, "file": file, "why": why }));
    }

    /// The NMI watchdog was turned on or off.
    pub(crate) fn watchdog_switched(&mut self, on: bool) {
        self.metrics.watchdog_changes.inc();
        self.record(&json!({ "event": if on { "watchdog-on" } else { "watchdog-off" } }));
    }

    /// The text of the metrics.
    pub(crate) fn render(&mut self, open: Open) -> String {
        let off = self.watchdog_on() == Some(false);
        let takers: Vec<u32> = self.takers().into_keys().map(|(_, pid)| pid).collect();
        let holders = self.holders.as_ref();
        self.metrics
            .render(&self.arbiter, holders, &takers, off, open)
    }
}

/// Who has called, after the call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Who {
    pub(super) tenant: Option<TenantId>,
    pub(super) uid: u32,
    pub(super) pid: u32,
}

#[cfg(test)]
#[path = "trail_tests.rs"]
mod tests;
