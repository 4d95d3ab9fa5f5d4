//! Calls of clients to commands of the arbiter, and changes to replies. No I/O: what is to
//! be written and sent is taken by [`Service::take`].

mod barred;
mod broker;
mod introspect;
mod kept;
mod outsiders;
mod shown;
mod trail;
mod watchdog;

use std::collections::{BTreeMap, BTreeSet};

use arbiter::{CounterSet, Nanos};
use arbiter_host::{
    BootTime, Caller, Change, CpuSet, HostArbiter, LeaseId, Outcome, Owner, Place, Refusal,
    TenantId, Terms, ThreadId,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use umpire_budget::Holders;
use umpire_lease::{self as wire, INTERFACE};
use varlink::{Reply, Request};

use crate::audit::Record;
use crate::config::{ArbiterConfig, WATCHDOG};
use crate::convert::{self, Wrong};
use crate::journal::Entry;
use crate::metrics::Metrics;
use crate::peer::Client;
pub(crate) use barred::Taken;
pub(crate) use broker::Allowed;
use introspect::introspect;
use kept::stuck;
use shown::Viewer;

/// A connection, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConnectionId(pub(crate) u64);

/// Most bytes of a label.
const MOST_LABEL: usize = 128;
/// The longest notice of a revocation.
const MOST_GRACE: Nanos = Nanos(60_000_000_000);

/// A reply for a connection.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) to: ConnectionId,
    pub(crate) reply: Reply,
    /// It says that a lease is held, or lasts: it must not be sent unless that is in the
    /// journal.
    rests_on: Option<LeaseId>,
    /// It says that something is in the audit.
    audited: bool,
}

/// What is to be done after some calls.
#[derive(Debug, Default)]
pub(crate) struct Output {
    pub(crate) entries: Vec<Entry>,
    pub(crate) answers: Vec<Answer>,
    /// For the audit.
    pub(crate) records: Vec<Record>,
    /// Leases that may hold less than before.
    pub(crate) changed: Vec<LeaseId>,
    /// So long are the answers, about.
    bytes: usize,
}

impl Output {
    /// Adds what came after it.
    pub(crate) fn add(&mut self, more: Output) {
        self.entries.extend(more.entries);
        self.answers.extend(more.answers);
        self.records.extend(more.records);
        self.changed.extend(more.changed);
        self.bytes += more.bytes;
    }
}

/// Who hears of a lease.
#[derive(Clone, Copy, Debug)]
struct Listener {
    connection: ConnectionId,
    /// It gets a reply with each event.
    more: bool,
    /// It has no reply yet.
    waits: bool,
}

/// The arbiter, and who talks to it.
#[derive(Debug)]
pub(crate) struct Service {
    arbiter: HostArbiter,
    config: ArbiterConfig,
    listeners: BTreeMap<LeaseId, Listener>,
    /// The leases of each connection that has any.
    leases_of: BTreeMap<ConnectionId, BTreeSet<LeaseId>>,
    watchers: BTreeSet<ConnectionId>,
    changes: Vec<Change>,
    output: Output,
    /// What each lease holds by the journal.
    written: BTreeMap<LeaseId, usize>,
    /// Why the journal cannot be written.
    stuck: Option<String>,
    /// Until then nothing is granted: holders of before count on, and there is no journal.
    waits_until: BootTime,
    /// What the last look saw of outsiders.
    seen: BTreeMap<Place, Vec<CounterSet>>,
    /// What outsiders have by that, and by the look before.
    measured: BTreeMap<Place, Vec<CounterSet>>,
    bars: barred::Bars,
    /// Who has counters and no lease, as far as the kernel shows.
    holders: Option<Holders>,
    watchdog: watchdog::Claim,
    pub(crate) metrics: Metrics,
    denials: trail::Denials,
    causes: trail::Causes,
    looks: u64,
}

/// Who calls, and how.
struct Calling<'a> {
    from: ConnectionId,
    client: &'a Client,
    /// The tenants of its user.
    tenants: Vec<TenantId>,
    operator: bool,
    /// It takes more than one reply.
    more: bool,
    now: BootTime,
}

impl Calling<'_> {
    fn viewer(&self) -> Viewer {
        Viewer {
            uid: self.client.uid,
            operator: self.operator,
        }
    }
}

/// Whether a call is answered as well before what is due is done: it renews a lease, or changes
/// nobody's.
pub(crate) fn waits_for_nothing(method: &str) -> bool {
    match method.split_once(INTERFACE) {
        Some(("", method)) => {
            matches!(method, ".Renew" | ".List" | ".Who" | ".Report" | ".Audit")
        }
        _ => true,
    }
}

/// How long a value is, about.
fn length(value: &Value) -> usize {
    const SHORT: usize = 16;
    match value {
        Value::String(text) => SHORT + text.len(),
        Value::Array(all) => SHORT + all.iter().map(length).sum::<usize>(),
        Value::Object(all) => {
            let fields = all.iter().map(|(name, value)| name.len() + length(value));
            SHORT + fields.sum::<usize>()
        }
        _ => SHORT,
    }
}

/// What a call comes to at once; `None`: its reply comes later.
type Answered = Result<Option<Value>, Reply>;

impl Service {
    pub(crate) fn new(arbiter: HostArbiter, config: ArbiterConfig) -> Self {
        Service {
            arbiter,
            config,
            listeners: BTreeMap::new(),
            leases_of: BTreeMap::new(),
            watchers: BTreeSet::new(),
            changes: Vec::new(),
            output: Output::default(),
            written: BTreeMap::new(),
            stuck: None,
            waits_until: BootTime(0),
            seen: BTreeMap::new(),
            measured: BTreeMap::new(),
            bars: barred::Bars::default(),
            holders: None,
            watchdog: watchdog::Claim::default(),
            metrics: Metrics::new(),
            denials: trail::Denials::default(),
            causes: trail::Causes::default(),
            looks: 0,
        }
    }

    pub(crate) fn arbiter(&self) -> &HostArbiter {
        &self.arbiter
    }

    pub(crate) fn config(&self) -> &ArbiterConfig {
        &self.config
    }

    /// What is to be written, and then sent.
    pub(crate) fn take(&mut self) -> Output {
        std::mem::take(&mut self.output)
    }

    /// Uses another configuration from now on; PMUs stay.
    pub(crate) fn reload(&mut self, config: ArbiterConfig, now: BootTime) -> Result<(), String> {
        let config = ArbiterConfig {
            state: self.config.state.clone(),
            root: self.config.root.clone(),
            ..config
        };
        let config = config.with_watchdog().map_err(|error| error.to_string())?;
        let policy = config.policy.clone();
        self.arbiter
            .set_policy(policy, now, &mut self.changes)
            .map_err(|error| error.to_string())?;
        // The arbiter keeps ids; members follow it.
        let members = self.arbiter.policy().tenants.iter().map(|tenant| {
            let place = config
                .policy
                .tenants
                .iter()
                .position(|new| new.name == tenant.name);
            place
                .map(|place| config.members[place].clone())
                .unwrap_or_default()
        });
        let members = members.collect();
        let config = ArbiterConfig {
            members,
            pmus: std::mem::take(&mut self.config.pmus),
            perf_types: std::mem::take(&mut self.config.perf_types),
            audit: self.config.audit.take(),
            metrics: self.config.metrics.take(),
            ..config
        };
        let before = std::mem::replace(&mut self.config, config);
        self.renew_watchdog(&before, now);
        self.settle();
        Ok(())
    }

    /// These CPUs are online now.
    pub(crate) fn set_online(&mut self, online: &CpuSet, now: BootTime) {
        if self.arbiter.online() != online {
            log::info!("the CPUs that are online: {online}");
            // The watchdog is on a CPU that comes before anybody can be given counters there.
            self.arbiter.freeze();
            let changes = &mut self.changes;
            self.arbiter.set_online(online.clone(), now, changes);
            self.seen.clear();
            self.settle();
            self.follow_watchdog(now);
            if self.stuck.is_none() {
                self.arbiter.thaw(now, &mut self.changes);
                self.settle();
            }
        }
    }

    /// Does what is due.
    pub(crate) fn advance(&mut self, now: BootTime) {
        self.arbiter.advance(now, &mut self.changes);
        self.settle();
    }

    /// What is due later waits until this is told `None`.
    pub(crate) fn hold_due(&mut self, after: Option<BootTime>) {
        self.arbiter.hold_due(after);
    }

    /// A connection has ended, and with it the leases that it had.
    pub(crate) fn gone(&mut self, connection: ConnectionId, now: BootTime) {
        self.watchers.remove(&connection);
        let had = self.leases_of.remove(&connection).unwrap_or_default();
        for id in had {
            self.listeners.remove(&id);
            self.arbiter.holder_gone(id, now, &mut self.changes);
        }
        self.settle();
    }

    /// Whether a connection waits for a reply, so that its next call has to wait, too.
    pub(crate) fn is_busy(&self, connection: ConnectionId) -> bool {
        self.watchers.contains(&connection)
            || self.leases_of.get(&connection).is_some_and(|leases| {
                let mut listeners = leases.iter().filter_map(|id| self.listeners.get(id));
                listeners.any(|listener| listener.more || listener.waits)
            })
    }

    fn add_listener(&mut self, id: LeaseId, listener: Listener) {
        self.remove_listener(id);
        self.leases_of
            .entry(listener.connection)
            .or_default()
            .insert(id);
        self.listeners.insert(id, listener);
    }

    fn remove_listener(&mut self, id: LeaseId) {
        let Some(Listener { connection, .. }) = self.listeners.remove(&id) else {
            return;
        };
        if let Some(leases) = self.leases_of.get_mut(&connection) {
            leases.remove(&id);
            if leases.is_empty() {
                self.leases_of.remove(&connection);
            }
        }
    }

    /// Answers a call.
    pub(crate) fn call(
        &mut self,
        from: ConnectionId,
        client: &Client,
        request: &Request<'_>,
        now: BootTime,
    ) {
        if !waits_for_nothing(&request.method) {
            self.advance(now);
        }
        let more = request.more.unwrap_or(false);
        let quiet = request.oneway.unwrap_or(false);
        let before = self.output.answers.len();
        let parameters = request.parameters.clone().unwrap_or_else(|| json!({}));
        let mut who = trail::Who {
            tenant: None,
            uid: client.uid,
            pid: client.pid,
        };
        let answered = match request.method.split_once(INTERFACE) {
            // Whoever wants no answer cannot hold a lease, or watch.
            Some(("", ".Acquire" | ".Claim" | ".Watch")) if quiet => return,
            Some(("", method)) => {
                let method = method.strip_prefix('.').unwrap_or(method);
                let (tenants, operator) = self.config.tenants_of(client);
                who.tenant = tenants.first().copied();
                self.causes.calling = who.tenant;
                let calling = Calling {
                    from,
                    client,
                    tenants,
                    operator,
                    more: more && !quiet,
                    now,
                };
                self.metrics.called(method);
                self.method(&calling, method, parameters)
            }
            _ => introspect(&request.method, &parameters),
        };
        let answer = match answered {
            Ok(Some(parameters)) => Some(Reply::parameters(Some(parameters))),
            Ok(None) => None,
            Err(refusal) => {
                self.denied(&who, request, &refusal);
                Some(refusal)
            }
        };
        self.settle();
        self.causes.calling = None;
        if quiet {
            // Nobody reads what is said to this call.
            let answers = self.output.answers.split_off(before);
            self.output
                .answers
                .extend(answers.into_iter().filter(|answer| answer.to != from));
        } else if let Some(answer) = answer {
            self.answer(from, answer, None);
        }
    }

    /// How long the answers are that wait to be taken, about.
    pub(crate) fn waiting_bytes(&self) -> usize {
        self.output.bytes
    }

    /// Whether a client's user has no tenant, and nothing to say.
    pub(crate) fn is_stranger(&self, client: &Client) -> bool {
        let (tenants, operator) = self.config.tenants_of(client);
        tenants.is_empty() && !operator
    }

    fn answer(&mut self, to: ConnectionId, reply: Reply, rests_on: Option<LeaseId>) {
        self.output.bytes += reply.parameters.as_ref().map_or(0, length);
        self.output.answers.push(Answer {
            to,
            reply,
            rests_on,
            audited: false,
        });
    }

    fn method(&mut self, calling: &Calling<'_>, method: &str, parameters: Value) -> Answered {
        let &Calling {
            from,
            client,
            ref tenants,
            operator,
            more,
            now,
        } = calling;
        let viewer = calling.viewer();
        if let Some(id) = parameters.get("lease").and_then(Value::as_u64)
            && self.is_watchdog(LeaseId(id))
        {
            return Err(wrong(format!(
                "lease {id} is the NMI watchdog's; [watchdog] in the arbiter's configuration says \
                 who may have its counter"
            )));
        }
        // It speaks for the tenant of the lease, if that is one of its user's.
        let named = parameters.get("lease").and_then(Value::as_u64).map(LeaseId);
        let named = named
            .and_then(|id| self.arbiter.lease(id))
            .map(|lease| lease.owner.tenant);
        let named = named.filter(|tenant| tenants.contains(tenant));
        let caller = Caller {
            tenant: named
                .or(tenants.first().copied())
                .unwrap_or(TenantId(u16::MAX)),
            uid: client.uid,
            operator,
        };
        match method {
            "Acquire" => {
                let wire::AcquireIn { request } = parsed(parameters)?;
                if let Some(why) = &self.stuck {
                    return Err(stuck(why));
                }
                self.grants_from(now)?;
                self.acquire(calling, &request)
            }
            "Claim" => {
                let wire::ClaimIn { lease, generation } = parsed(parameters)?;
                let id = LeaseId(lease);
                self.not_barred(client.uid)?;
                if self.listeners.contains_key(&id) {
                    return Err(wrong(format!(
                        "lease {lease} is held by another connection, which is still there"
                    )));
                }
                let claimed = self
                    .arbiter
                    .claim(id, generation, caller, now, &mut self.changes);
                claimed.map_err(|refusal| self.refused(&refusal, viewer))?;
                self.attach(id, from, more, None, None);
                Ok(None)
            }
            "Release" => {
                let wire::ReleaseIn {
                    lease,
                    generation,
                    keep,
                } = parsed(parameters)?;
                let keep = usize::try_from(keep.unwrap_or(0)).unwrap_or(usize::MAX);
                let id = LeaseId(lease);
                let changes = &mut self.changes;
                let done = self
                    .arbiter
                    .release(id, keep, generation, caller, now, changes);
                done.map_err(|refusal| self.refused(&refusal, viewer))?;
                Ok(Some(json!({})))
            }
            "Renew" => {
                let wire::RenewIn { lease, generation } = parsed(parameters)?;
                let id = LeaseId(lease);
                let until =
                    self.arbiter
                        .renew_first(id, generation, caller, now, &mut self.changes);
                let until = until.map_err(|refusal| self.refused(&refusal, viewer))?;
                let left_ms = until.map(|until| until.since(now).0 / 1_000_000);
                self.settle();
                self.answer(from, reply(&wire::RenewOut { left_ms }, false), Some(id));
                Ok(None)
            }
            "Revoke" => {
                let wire::RevokeIn { lease, grace_ms } = parsed(parameters)?;
                let grace = grace_ms.map(|ms| Nanos(ms.saturating_mul(1_000_000)));
                let id = LeaseId(lease);
                // Only operators choose another notice than the policy's.
                let grace = grace
                    .filter(|_| operator)
                    .map(|grace| grace.min(MOST_GRACE));
                let mut at = self
                    .arbiter
                    .revoke(id, grace, caller, now, &mut self.changes);
                for &tenant in tenants.iter().skip(1) {
                    if at.is_err() {
                        let caller = Caller { tenant, ..caller };
                        at = self
                            .arbiter
                            .revoke(id, grace, caller, now, &mut self.changes);
                    }
                }
                let at = at.map_err(|refusal| self.refused(&refusal, viewer))?;
                let in_ms = at.since(now).0 / 1_000_000;
                Ok(Some(value(&wire::RevokeOut { in_ms })))
            }
            "List" => {
                let wire::NoReply {} = parsed(parameters)?;
                let leases = self.visible(tenants, viewer);
                Ok(Some(value(&wire::ListOut { leases })))
            }
            "Who" => {
                let wire::WhoIn { cpu } = parsed(parameters)?;
                let (places, outsiders) = (self.who(cpu, viewer)?, self.outsiders(cpu, viewer));
                Ok(Some(value(&wire::WhoOut { places, outsiders })))
            }
            "Explain" => {
                let wire::ExplainIn { request } = parsed(parameters)?;
                self.grants_from(now)?;
                let owner = self.owner(calling, &request)?;
                let terms = self.terms(calling, &owner, &request)?;
                let explained = explained(&self.arbiter, owner, terms, now);
                Ok(Some(value(&viewer.explained(explained))))
            }
            "Report" => self.report(caller, parameters),
            "Audit" => self.audit(calling, caller, parameters),
            "Pardon" => self.pardon(calling, parameters),
            "Watch" => {
                let wire::NoReply {} = parsed(parameters)?;
                if !more {
                    return Err(wrong("Watch has more than one reply; call it with more"));
                }
                if !operator {
                    return Err(wrong(
                        "only operators see the events of others; Acquire with more tells those \
                         of one's own lease",
                    ));
                }
                self.watchers.insert(from);
                self.answer(from, reply(&wire::WatchOut::default(), true), None);
                Ok(None)
            }
            other => Err(Reply::error(
                "org.varlink.service.MethodNotFound",
                Some(json!({ "method": format!("{INTERFACE}.{other}") })),
            )),
        }
    }

    fn owner(&self, calling: &Calling<'_>, request: &wire::Request) -> Result<Owner, Reply> {
        let Calling {
            client, tenants, ..
        } = calling;
        self.not_barred(client.uid)?;
        let policy = self.arbiter.policy();
        let tenant = match &request.tenant {
            None => tenants.first().copied(),
            Some(name) => {
                let tenant = policy.named(name).filter(|_| name != WATCHDOG);
                let tenant = tenant.filter(|tenant| calling.operator || tenants.contains(tenant));
                if tenant.is_none() {
                    let own = tenants.iter().filter_map(|id| policy.tenant(*id));
                    let own: Vec<&str> = own.map(|tenant| tenant.name.as_str()).collect();
                    return Err(wrong(format!(
                        "tenant '{name}' is not one of this user's; these are: {}",
                        if own.is_empty() {
                            "none".to_owned()
                        } else {
                            own.join(", ")
                        }
                    )));
                }
                tenant
            }
        };
        let tenant = tenant.ok_or_else(|| self.no_tenant(client))?;
        let mut label = request.label.clone().unwrap_or_default();
        if label.len() > MOST_LABEL || label.chars().any(char::is_control) {
            return Err(wrong(format!(
                "the label is of {MOST_LABEL} bytes at most, without control characters"
            )));
        }
        label.shrink_to_fit();
        Ok(Owner {
            tenant,
            uid: client.uid,
            pid: client.pid,
            label,
        })
    }

    /// The terms of a request. Its numbers of threads are those of its sender's namespace.
    fn terms(
        &mut self,
        calling: &Calling<'_>,
        owner: &Owner,
        request: &wire::Request,
    ) -> Result<Terms, Reply> {
        let Calling {
            client, operator, ..
        } = *calling;
        let looks = &mut self.looks;
        let mut threads = |numbers: &[u32]| {
            let threads = client.threads(numbers, operator, looks);
            threads.map_err(|why| why.to_string())
        };
        let (config, arbiter) = (&self.config, &self.arbiter);
        let terms = convert::terms(config, arbiter, owner.tenant, request, &mut threads);
        terms.map_err(|Wrong(what)| wrong(what))
    }

    /// How many threads were looked at for calls since this was asked last.
    pub(crate) fn take_looks(&mut self) -> u64 {
        std::mem::take(&mut self.looks)
    }

    /// Threads of leases have ended.
    pub(crate) fn threads_ended(
        &mut self,
        ended: &BTreeMap<LeaseId, BTreeSet<ThreadId>>,
        now: BootTime,
    ) {
        self.arbiter.threads_ended(ended, now, &mut self.changes);
        self.settle();
    }

    fn acquire(&mut self, calling: &Calling<'_>, request: &wire::Request) -> Answered {
        let owner = self.owner(calling, request)?;
        let terms = self.terms(calling, &owner, request)?;
        let outcome = self
            .arbiter
            .request(owner, terms, calling.now, &mut self.changes);
        let refused = |refusal| self.refused(&refusal, calling.viewer());
        let (id, waits) = match outcome.map_err(refused)? {
            Outcome::Granted { lease, .. } => (lease, None),
            Outcome::Waits { lease, behind, why } => {
                let waits = Change::Waits { lease, behind, why };
                (lease, convert::event(&self.arbiter, &waits))
            }
        };
        self.attach(id, calling.from, calling.more, Some(id), waits);
        Ok(None)
    }

    /// The lease is of this connection from now on, which is told how it is: at once, or
    /// without a stream of events when it holds something. `event`: why it does not yet.
    fn attach(
        &mut self,
        id: LeaseId,
        connection: ConnectionId,
        more: bool,
        rests_on: Option<LeaseId>,
        event: Option<wire::Event>,
    ) {
        // What led to this is in the first reply.
        self.settle();
        let Some(lease) = self.arbiter.lease(id) else {
            return;
        };
        let waits = lease.holds == 0 && !more;
        let lease = convert::lease(&self.arbiter, lease);
        let listener = Listener {
            connection,
            more,
            waits,
        };
        self.add_listener(id, listener);
        if !waits {
            let now = wire::AcquireOut { lease, event };
            self.answer(connection, reply(&now, more), rests_on);
        }
    }

    /// The client is of no tenant, as far as it is known.
    fn no_tenant(&self, client: &Client) -> Reply {
        let mut refusal = convert::refusal(&self.arbiter, &Refusal::UnknownTenant);
        if !client.unknown.is_empty() {
            refusal.message = format!("{} ({})", refusal.message, client.unknown);
        }
        error("Refused", &wire::RefusedError { refusal })
    }

    /// A refusal of the arbiter's, as `viewer` may know it.
    fn refused(&self, refusal: &Refusal, viewer: Viewer) -> Reply {
        let refusal = viewer.refusal(convert::refusal(&self.arbiter, refusal));
        error("Refused", &wire::RefusedError { refusal })
    }

    /// Turns what has changed into entries of the journal and events.
    fn settle(&mut self) {
        let changes = std::mem::take(&mut self.changes);
        self.causes.begin(&changes);
        for change in changes {
            let id = change.lease();
            if let Change::Ended { why, .. } = &change
                && self.is_watchdog(id)
            {
                self.forget_watchdog(*why);
            }
            self.output.entries.push(match self.arbiter.lease(id) {
                Some(lease) => Entry::Lease(Box::new(convert::stored(&self.arbiter, lease))),
                None => Entry::Ended(id.0),
            });
            self.metrics.changed(&self.arbiter, &change);
            if matches!(change, Change::Holds { .. } | Change::Ended { .. }) {
                self.output.changed.push(id);
            }
            let event = convert::event(&self.arbiter, &change);
            self.record_change(&change, event.as_ref());
            let Some(event) = event else {
                continue;
            };
            log::info!(
                "lease {} of '{}' ({}): {}",
                id.0,
                event.lease.label,
                event.lease.tenant,
                event.message
            );
            for watcher in self.watchers.clone() {
                let event = Some(event.clone());
                self.answer(watcher, reply(&wire::WatchOut { event }, true), None);
            }
            self.tell(id, &change, event);
        }
    }

    /// Tells the listener of a lease of an event.
    fn tell(&mut self, id: LeaseId, change: &Change, event: wire::Event) {
        let written = self.written.get(&id).copied().unwrap_or(0);
        let grows = usize::try_from(event.lease.holds).is_ok_and(|holds| holds > written);
        let grows = grows || matches!(change, Change::Renewed { .. });
        let Some(listener) = self.listeners.get_mut(&id) else {
            return;
        };
        let Listener {
            connection,
            more,
            waits,
        } = *listener;
        let ended = matches!(change, Change::Ended { .. });
        let rests_on = grows.then_some(id);
        let lease = event.lease.clone();
        if ended {
            self.remove_listener(id);
        }
        if more {
            let event = Some(event);
            let told = reply(&wire::AcquireOut { lease, event }, !ended);
            self.answer(connection, told, rests_on);
        } else if waits && ended {
            let why = refusal(event.why.unwrap_or_default(), event.message);
            self.answer(connection, why, None);
        } else if waits && lease.holds > 0 {
            if let Some(listener) = self.listeners.get_mut(&id) {
                listener.waits = false;
            }
            let granted = reply(&wire::AcquireOut { lease, event: None }, false);
            self.answer(connection, granted, rests_on);
        }
    }
}

/// What would become of a request, and what would follow for others.
///
/// # Errors
/// What is wrong with the request, in words.
pub fn explain(
    arbiter: &HostArbiter,
    config: &ArbiterConfig,
    owner: Owner,
    request: &wire::Request,
    now: BootTime,
) -> Result<wire::ExplainOut, String> {
    // Nobody has asked whose threads could be looked for.
    let mut threads = |_: &[u32]| Err("threads are not known without an arbiter".to_owned());
    let terms = convert::terms(config, arbiter, owner.tenant, request, &mut threads);
    Ok(explained(
        arbiter,
        owner,
        terms.map_err(|wrong| wrong.0)?,
        now,
    ))
}

fn explained(arbiter: &HostArbiter, owner: Owner, terms: Terms, now: BootTime) -> wire::ExplainOut {
    let mut after = arbiter.clone();
    let mut changes = Vec::new();
    let outcome = after.request(owner, terms, now, &mut changes);
    let own = after.next_id() - 1;
    let events = changes
        .iter()
        .filter(|change| outcome.is_err() || change.lease().0 != own);
    let events = events
        .filter_map(|change| convert::event(&after, change))
        .collect();
    let lease = |id| after.lease(id).map(|lease| convert::lease(&after, lease));
    match outcome {
        Ok(Outcome::Granted { lease: id, .. }) => wire::ExplainOut {
            outcome: "granted".to_owned(),
            lease: lease(id),
            why: None,
            events,
        },
        Ok(Outcome::Waits { lease: id, why, .. }) => wire::ExplainOut {
            outcome: "waits".to_owned(),
            lease: lease(id),
            why: Some(convert::refusal(&after, &why)),
            events,
        },
        Err(why) => wire::ExplainOut {
            outcome: "refused".to_owned(),
            lease: None,
            why: Some(convert::refusal(arbiter, &why)),
            events,
        },
    }
}

/// A request that makes no sense is refused.
fn wrong(what: impl Into<String>) -> Reply {
    refusal("wrong-request".to_owned(), what.into())
}

/// A refusal that no lease stands behind.
fn refusal(reason: String, message: String) -> Reply {
    let refusal = wire::Refusal {
        reason,
        message,
        held_by: Vec::new(),
    };
    error("Refused", &wire::RefusedError { refusal })
}

/// A reply, and whether others follow it.
fn reply(message: &impl Serialize, goes_on: bool) -> Reply {
    let mut reply = Reply::parameters(Some(value(message)));
    reply.continues = goes_on.then_some(true);
    reply
}

fn parsed<T: DeserializeOwned>(parameters: Value) -> Result<T, Reply> {
    serde_json::from_value(parameters).map_err(|error| invalid(&error.to_string()))
}

fn invalid(parameter: &str) -> Reply {
    Reply::error(
        "org.varlink.service.InvalidParameter",
        Some(json!({ "parameter": parameter })),
    )
}

fn error(name: &str, parameters: &impl Serialize) -> Reply {
    Reply::error(format!("{INTERFACE}.{name}"), Some(value(parameters)))
}

/// JSON of a message, which cannot fail: it has no maps with other keys than strings.
fn value(message: &impl Serialize) -> Value {
    serde_json::to_value(message).unwrap_or(Value::Null)
}
