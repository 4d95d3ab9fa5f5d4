//! The driver of what is decided: calls of clients become commands to the host's arbiter, and
//! changes become replies, entries of the journal and records of the audit. No I/O: what is to
//! be written and sent is taken by [`Service::take`].
//!
//! The values below know nothing of each other. The order in which they meet is here: a call is
//! taken apart ([`call`]), decided ([`book`]), and what has changed by it is followed
//! ([`Service::settle`]) before it is answered.

mod barred;
mod book;
mod call;
mod events;
mod introspect;
mod kept;
mod listeners;
mod means;
mod outbox;
mod outsiders;
mod said;
pub(crate) mod shown;
mod trail;
mod watchdog;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use crate::budget::Holders;
use arbiter::Nanos;
use arbiter_host::{
    BootTime, Caller, Cause, Change, CpuSet, Group, HeldBefore, HostArbiter, Lease, LeaseId,
    Outcome, Owner, Place, Reason, Refusal, Terms, ThreadId,
};
use serde_json::{Value, json};
use umpire_lease::{self as wire, EventRequest};
use varlink::Request;

use crate::config::{ArbiterConfig, WATCHDOG};
use crate::convert::{self, Means, Wrong};
use crate::groups::LateTree;
use crate::journal::{Barred, Entry, Stored};
use crate::metrics::{InUse, Metrics};
use crate::peer::Client;
use crate::probe::Seen;
pub(crate) use barred::{Taken, TakenBy};
use book::Book;
use call::Call;
pub(crate) use call::{Called, Calling, Method, owner};
pub(crate) use events::{Allowed, Having, LeasesBelow, NoEvent, Told, groups_above};
use kept::Kept;
use listeners::{Listener, Listeners, Tells};
use means::Meant;
pub(crate) use outbox::{Answer, Output};
use outsiders::{Beside, Outsiders};
pub(crate) use said::Denial;
use said::{Answered, Now, Said};
pub(crate) use shown::Viewer;
use trail::Refused;
pub(crate) use watchdog::Claim as WatchdogClaim;

/// A connection, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConnectionId(pub(crate) u64);

/// The arbiter, and who talks to it.
#[derive(Debug)]
pub(crate) struct Service {
    book: Book,
    config: ArbiterConfig,
    listeners: Listeners,
    output: Output,
    kept: Kept,
    outsiders: Outsiders,
    bars: barred::Bars,
    watchdog: watchdog::Claim,
    metrics: Metrics,
    denials: trail::Denials,
    causes: trail::Causes,
    /// How many threads were looked at for calls.
    looks: u64,
    /// Where the control groups are.
    groups: LateTree,
}

impl Service {
    pub(crate) fn new(arbiter: HostArbiter, config: ArbiterConfig) -> Self {
        Service {
            book: Book::new(arbiter),
            groups: LateTree::new(&config.root),
            config,
            listeners: Listeners::default(),
            output: Output::default(),
            kept: Kept::default(),
            outsiders: Outsiders::default(),
            bars: barred::Bars::default(),
            watchdog: watchdog::Claim::default(),
            metrics: Metrics::new(),
            denials: trail::Denials::default(),
            causes: trail::Causes::default(),
            looks: 0,
        }
    }

    pub(crate) fn arbiter(&self) -> &HostArbiter {
        self.book.arbiter()
    }

    pub(crate) fn config(&self) -> &ArbiterConfig {
        &self.config
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// What is to be written, and then sent.
    pub(crate) fn take(&mut self) -> Output {
        std::mem::take(&mut self.output)
    }

    /// How long the answers are that wait to be taken, about.
    pub(crate) fn waiting_bytes(&self) -> usize {
        self.output.bytes()
    }

    /// How many threads were looked at for calls since this was asked last.
    pub(crate) fn take_looks(&mut self) -> u64 {
        std::mem::take(&mut self.looks)
    }

    /// Adds a record to the audit, if there is one.
    fn record(&mut self, record: Value) {
        if self.config.audit.is_some()
            && let Value::Object(record) = record
        {
            self.output.record(record);
        }
    }

    // What is done in time, and when the host or the rules have changed.

    /// Uses another configuration from now on; PMUs stay.
    pub(crate) fn reload(&mut self, config: ArbiterConfig, now: BootTime) -> Result<(), String> {
        let config = ArbiterConfig {
            state: self.config.state.clone(),
            root: self.config.root.clone(),
            ..config
        };
        let config = config.with_watchdog().map_err(|error| error.to_string())?;
        self.book.set_policy(config.policy.clone(), now)?;
        // The arbiter keeps ids; members follow it.
        let members = self.arbiter().policy().tenants.iter().map(|tenant| {
            let mut named = config.policy.tenants.iter();
            let place = named.position(|new| new.name == tenant.name);
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
        if before.watchdog.keep != self.config.watchdog.keep {
            if self.kept.stuck().is_none() {
                self.claim_anew(now);
            } else {
                // When the journal can be written, it asks as the configuration says then.
                self.end_watchdog(now);
            }
        }
        self.settle();
        Ok(())
    }

    /// The configuration was read again, or could not be.
    pub(crate) fn reloaded(&mut self, file: &Path, why: Option<&String>) {
        self.metrics.reloaded(why.is_none());
        let event = if why.is_some() {
            "reload-failed"
        } else {
            "reload"
        };
        // What of the path is not text is not needed to know which it is.
        let file = file.to_string_lossy();
        self.record(json!({ "event": event, "file": file, "why": why }));
    }

    /// These CPUs are online now.
    pub(crate) fn set_online(&mut self, online: &CpuSet, now: BootTime) {
        if self.arbiter().online() != online {
            log::info!("the CPUs that are online: {online}");
            // The watchdog is on a CPU that comes before anybody can be given counters there.
            self.book.freeze();
            self.book.set_online(online, now);
            self.outsiders.look_anew();
            self.settle();
            self.follow_watchdog(now);
            if self.kept.stuck().is_none() {
                self.book.thaw(now);
                self.settle();
            }
        }
    }

    /// Does what is due.
    pub(crate) fn advance(&mut self, now: BootTime) {
        self.book.advance(now);
        self.settle();
    }

    /// What is due later waits until this is told `None`.
    pub(crate) fn hold_due(&mut self, after: Option<BootTime>) {
        self.book.hold_due(after);
    }

    /// A connection has ended, and with it the leases that it had. What a control group holds is
    /// the group's.
    pub(crate) fn gone(&mut self, connection: ConnectionId, now: BootTime) {
        for id in self.listeners.gone(connection) {
            // One that was granted is the group's, also while its counters are another's.
            let lease = self.arbiter().lease(id);
            let lease = lease.filter(|lease| lease.since.is_some());
            if lease.is_none_or(|lease| lease.terms.scope.group().is_none()) {
                self.book.gone(id, now);
            }
        }
        self.settle();
    }

    /// Leases have ended with what ran in their control groups.
    pub(crate) fn groups_ended(&mut self, ended: &BTreeMap<LeaseId, Cause>, now: BootTime) {
        for (&id, &why) in ended {
            self.book.end_now(&[id], why, now);
        }
        self.settle();
    }

    /// Threads of leases have ended.
    pub(crate) fn threads_ended(
        &mut self,
        ended: &BTreeMap<LeaseId, BTreeSet<ThreadId>>,
        now: BootTime,
    ) {
        self.book.threads_ended(ended, now);
        self.settle();
    }

    // Calls.

    /// Whether a connection waits for a reply, so that its next call has to wait, too.
    pub(crate) fn is_busy(&self, connection: ConnectionId) -> bool {
        self.listeners.is_busy(connection)
    }

    /// Answers a call.
    pub(crate) fn call(
        &mut self,
        from: ConnectionId,
        client: &Client,
        request: &Request<'_>,
        now: BootTime,
    ) {
        let called = Called::of(&request.method);
        if !called.waits_for_nothing() {
            self.advance(now);
        }
        let quiet = request.oneway.unwrap_or(false);
        if quiet && called.needs_a_listener() {
            // Whoever wants no answer cannot hold a lease, or watch.
            return;
        }
        let before = self.output.answers().len();
        let parameters = request.parameters.clone().unwrap_or_else(|| json!({}));
        let lease = call::named_lease(&parameters);
        let (caller, tenants) = call::caller(&self.config, self.arbiter(), client, lease);
        let calling = Calling {
            from,
            client,
            tenants,
            caller,
            more: request.more.unwrap_or(false) && !quiet,
            now,
        };
        let tenant = call::doer(&self.config, self.arbiter(), &calling, &parameters);
        let tenant = tenant.filter(|_| called != Called::Foreign);
        let answered = match called {
            Called::Own(method) => {
                self.causes.set_calling(tenant);
                self.metrics.called(called.word());
                self.decide(&calling, method, parameters)
            }
            Called::Foreign => introspect::introspect(&request.method, &parameters)
                .map(|said| Some(Now::from(said))),
        };
        let answered = answered.map_err(|denial| denial.in_words(self.arbiter(), calling.viewer()));
        if let Err(denial) = &answered {
            self.denied(Refused {
                tenant,
                uid: client.uid,
                pid: client.pid,
                method: request.method.rsplit('.').next().unwrap_or_default(),
                reason: &denial.reason(),
                message: denial.message(),
            });
        }
        self.settle();
        self.causes.set_calling(None);
        match answered {
            // Nobody reads what is said to this call.
            _ if quiet => self.output.silence(from, before),
            Ok(Some(now)) => self.output.answer(from, now),
            Ok(None) => {}
            Err(denial) => self.output.deny(from, &denial),
        }
    }

    /// What a call of this interface comes to. `method`: as it was called, if there is none.
    fn decide(
        &mut self,
        calling: &Calling<'_>,
        method: Result<Method, &str>,
        parameters: Value,
    ) -> Answered {
        if let Some(id) = call::named_lease(&parameters)
            && self.watchdog.is(id)
        {
            return Err(Denial::wrong(format!(
                "lease {} is the NMI watchdog's; [watchdog] in the arbiter's configuration says \
                 who may have its counter",
                id.0
            )));
        }
        let method = method
            .map_err(|name| Denial::NoMethod(format!("{}.{name}", umpire_lease::INTERFACE)))?;
        let (caller, now) = (calling.caller, calling.now);
        let said = match Call::parse(method, parameters)? {
            Call::Acquire(request) => return self.acquire(calling, &request),
            Call::Claim(asked) => return self.claim(calling, &asked),
            Call::Renew(asked) => {
                let out = self.book.renew(&asked, caller, now)?;
                return Ok(Some(Now {
                    rests_on: Some(LeaseId(asked.lease)),
                    ..Said::Renewed(out).into()
                }));
            }
            Call::Audit(asked) => return self.audit(caller, &asked),
            Call::Watch => return self.watch(calling),
            Call::Release(asked) => {
                self.book.release(&asked, caller, now)?;
                Said::Nothing
            }
            Call::Revoke(asked) => {
                let others = calling.tenants.get(1..).unwrap_or_default();
                Said::Revoked(self.book.revoke(&asked, caller, others, now)?)
            }
            Call::List => Said::Leases(wire::ListOut {
                leases: shown::visible(self.arbiter(), &calling.tenants, calling.viewer()),
            }),
            Call::Groups => Said::Groups(wire::GroupsOut {
                groups: shown::groups(self.arbiter(), &calling.tenants, calling.viewer()),
            }),
            Call::Who(wire::WhoIn { cpu }) => Said::Who(self.who(cpu, calling.viewer())?),
            Call::Explain(request) => {
                self.kept.grants_from(now)?;
                self.bars.check(calling.client.uid)?;
                let (owner, terms) = self.asked(calling, &request)?;
                let explained = shown::explained(self.arbiter(), owner, terms, now);
                Said::Explained(Box::new(calling.viewer().explained(explained)))
            }
            Call::Report(asked) => {
                let arbiter = self.book.arbiter();
                let tenant = call::own_lease(arbiter, caller, asked.lease)?.owner.tenant;
                let taken = self.metrics.report(arbiter, tenant, &asked);
                taken.map_err(Denial::wrong)?;
                Said::Nothing
            }
            Call::Pardon(wire::PardonIn { uid }) => self.pardon(calling, uid)?,
        };
        Ok(Some(said.into()))
    }

    fn acquire(&mut self, calling: &Calling<'_>, request: &wire::Request) -> Answered {
        if let Some(why) = self.kept.stuck() {
            return Err(kept::stuck(why));
        }
        self.kept.grants_from(calling.now)?;
        self.bars.check(calling.client.uid)?;
        let (owner, terms) = self.asked(calling, request)?;
        let (id, waits) = match self.book.request(owner, terms, calling.now)? {
            Outcome::Granted { lease, .. } => (lease, None),
            Outcome::Waits { lease, behind, why } => {
                let waits = Change::Waits { lease, behind, why };
                (lease, convert::event(self.arbiter(), &waits))
            }
        };
        Ok(self.attach(id, calling, Some(id), waits))
    }

    fn claim(&mut self, calling: &Calling<'_>, asked: &wire::ClaimIn) -> Answered {
        let id = LeaseId(asked.lease);
        self.bars.check(calling.client.uid)?;
        if self.listeners.get(id).is_some() {
            return Err(Denial::wrong(format!(
                "lease {} is held by another connection, which is still there",
                id.0
            )));
        }
        self.book.claim(asked, calling.caller, calling.now)?;
        Ok(self.attach(id, calling, None, None))
    }

    /// The lease is of this connection from now on, which is told how it is: at once, or
    /// without a stream of events when it holds something. `event`: why it does not yet.
    fn attach(
        &mut self,
        id: LeaseId,
        calling: &Calling<'_>,
        rests_on: Option<LeaseId>,
        event: Option<wire::Event>,
    ) -> Option<Now> {
        // What led to this is in the first reply.
        self.settle();
        let lease = self.arbiter().lease(id)?;
        let more = calling.more;
        let waits = lease.holds == 0 && !more;
        let lease = convert::lease(self.arbiter(), lease);
        let listener = Listener {
            connection: calling.from,
            more,
            waits,
        };
        self.listeners.add(id, listener);
        (!waits).then(|| Now {
            goes_on: more,
            rests_on,
            ..Said::Lease(Box::new(wire::AcquireOut { lease, event })).into()
        })
    }

    fn watch(&mut self, calling: &Calling<'_>) -> Answered {
        if !calling.more {
            let why = "Watch has more than one reply; call it with more";
            return Err(Denial::wrong(why));
        }
        if !calling.caller.operator {
            return Err(Denial::wrong(
                "only operators see the events of others; Acquire with more tells those of one's \
                 own lease",
            ));
        }
        self.listeners.watch(calling.from);
        Ok(Some(Now {
            goes_on: true,
            ..Said::Watched(Box::default()).into()
        }))
    }

    fn who(&self, cpu: Option<u32>, viewer: Viewer) -> Result<wire::WhoOut, Refusal> {
        let places = shown::who(self.arbiter(), cpu, viewer)?;
        let all = self.outsiders.all(
            Beside {
                arbiter: self.arbiter(),
                takers: &self.bars.takers(self.arbiter()),
                watchdog_has_lease: self.watchdog.has_lease(),
            },
            cpu,
        );
        let outsiders = outsiders::shown(all.into_iter().chain(self.bars.shown()), viewer);
        Ok(wire::WhoOut { places, outsiders })
    }

    fn audit(&mut self, caller: Caller, asked: &wire::AuditIn) -> Answered {
        call::own_lease(self.arbiter(), caller, asked.lease)?;
        if self.config.audit.is_none() {
            let what = "this arbiter keeps no audit; its configuration has none (audit = \"FILE\")";
            return Err(wire::Refusal::of(Reason::NoAudit, what).into());
        }
        for record in trail::of_holder(asked, self.arbiter())? {
            self.record(record);
        }
        Ok(Some(Now {
            audited: true,
            ..Said::Nothing.into()
        }))
    }

    /// An operator pardons a user who is barred.
    fn pardon(&mut self, calling: &Calling<'_>, uid: u32) -> Result<Said, Denial> {
        if !calling.caller.operator {
            let why = "only operators pardon a user who is barred";
            return Err(wire::Refusal::of(Reason::Foreign, why).into());
        }
        if let Some(why) = self.kept.stuck() {
            let why = format!("the arbiter cannot write its journal ({why})");
            return Err(Denial::JournalFailed(why));
        }
        self.bars.pardon(uid)?;
        self.metrics.set_barred(self.bars.len());
        let by = calling.client.uid;
        log::warn!("user {uid} is pardoned by user {by}");
        self.output.write(Entry::Pardoned(uid));
        self.record(json!({
            "event": "pardoned",
            "uid": uid,
            "by": by,
            "pid": calling.client.pid,
        }));
        Ok(Said::Nothing)
    }

    /// Whose a request is, and its terms. Its numbers of threads are those of its sender's
    /// namespace.
    fn asked(
        &mut self,
        calling: &Calling<'_>,
        request: &wire::Request,
    ) -> Result<(Owner, Terms), Denial> {
        let (config, arbiter) = (&self.config, self.book.arbiter());
        let (owner, job) = call::owner_or_job(config, arbiter, calling, request)?;
        self.bars.check(owner.uid)?;
        let mut means = Meant::new(calling, arbiter, job, &self.groups, &mut self.looks);
        let terms = convert::terms(config, arbiter, owner.tenant, request, &mut means);
        let terms = terms.map_err(|Wrong(what)| Denial::wrong(what))?;
        call::may_stand_beside(arbiter, job, &owner, &terms)?;
        self.looks += arbiter.cost(&terms);
        Ok((owner, terms))
    }

    /// Counts and records a call that was refused.
    fn denied(&mut self, refused: Refused<'_>) {
        let arbiter = self.book.arbiter();
        self.metrics.denied(arbiter, refused.tenant, refused.reason);
        for record in self.denials.add(&refused, arbiter) {
            self.record(record);
        }
    }

    // What has changed.

    /// Turns what has changed into entries of the journal and events.
    fn settle(&mut self) {
        let changes = self.book.take_changes();
        self.causes.begin(&changes);
        for change in changes {
            self.follow(&change);
        }
    }

    fn follow(&mut self, change: &Change) {
        let id = change.lease();
        if let Change::Ended { why, .. } = change
            && self.watchdog.is(id)
        {
            log::debug!("the watchdog's lease has ended: {why:?}");
            self.watchdog.take_lease();
        }
        let arbiter = self.book.arbiter();
        self.output.write(match arbiter.lease(id) {
            Some(lease) => Entry::Lease(Box::new(convert::stored(arbiter, lease))),
            None => Entry::Ended(id.0),
        });
        self.metrics.changed(arbiter, change);
        if let Change::Holds { .. }
        | Change::Announced { .. }
        | Change::Spared { .. }
        | Change::Ended { .. } = change
        {
            self.output.note_change(id);
        }
        let event = convert::event(arbiter, change);
        if self.config.audit.is_some() {
            let record = self.causes.record(change, event.as_ref(), arbiter);
            self.record(record);
        }
        let Some(event) = event else {
            return;
        };
        log::info!(
            "lease {} of '{}' ({}): {}",
            id.0,
            event.lease.label,
            event.lease.tenant,
            event.message
        );
        for watcher in self.listeners.watchers() {
            let event = Some(event.clone());
            let watched = Said::Watched(Box::new(wire::WatchOut { event }));
            self.output.say(watcher, watched, true);
        }
        self.tell(id, change, event);
    }

    /// Tells the listener of a lease of an event.
    fn tell(&mut self, id: LeaseId, change: &Change, event: wire::Event) {
        let written = self.kept.holds(id);
        let grows = usize::try_from(event.lease.holds).is_ok_and(|holds| holds > written);
        let grows = grows || matches!(change, Change::Renewed { .. });
        let ended = matches!(change, Change::Ended { .. });
        let Some((to, tells)) = self.listeners.tell(id, ended, event.lease.holds > 0) else {
            return;
        };
        let lease = event.lease.clone();
        let (event, goes_on) = match tells {
            Tells::Event { goes_on } => (Some(event), goes_on),
            Tells::Granted => (None, false),
            Tells::Ended => {
                let why = wire::Refusal::of(event.why.unwrap_or_default(), event.message);
                return self.output.deny(to, &Denial::Refused(why));
            }
        };
        let said = Said::Lease(Box::new(wire::AcquireOut { lease, event }));
        let now = Now {
            goes_on,
            rests_on: grows.then_some(id),
            ..said.into()
        };
        self.output.answer(to, now);
    }

    // What outlives the service.

    /// All that a journal has to say.
    pub(crate) fn all(&self) -> Vec<Entry> {
        let arbiter = self.arbiter();
        let leases = arbiter.leases();
        let leases = leases.map(|lease| Entry::Lease(Box::new(convert::stored(arbiter, lease))));
        let next = Entry::Next(arbiter.next_id());
        std::iter::once(next)
            .chain(leases)
            .chain(self.bars.entries())
            .collect()
    }

    /// Takes over what was held before a restart.
    pub(crate) fn restore(&mut self, leases: Vec<Stored>, next: u64, now: BootTime) {
        let mut before = HeldBefore {
            next,
            ..HeldBefore::default()
        };
        let mut lost = BTreeSet::new();
        for stored in &leases {
            if stored.tenant == WATCHDOG {
                // It asks anew: it may be off by now.
                self.output.write(Entry::Ended(stored.id));
                continue;
            }
            match convert::recalled(self.arbiter(), stored) {
                Some(lease) => before.leases.push(lease),
                None => {
                    lost.insert(LeaseId(stored.id));
                    before.lost.extend(stored.group());
                }
            }
        }
        // Some of them may end at once, and the journal has them still.
        self.kept.restore(before.leases.iter());
        for lease in &before.leases {
            self.metrics.restored(lease.id, lease.holds);
        }
        let window = self.config.claim_window;
        lost.extend(self.book.restore(before, window, now));
        for stored in leases.iter().filter(|one| lost.contains(&LeaseId(one.id))) {
            let record = trail::lost(stored, self.arbiter());
            log::error!(
                "lease {} of '{}': {}",
                stored.id,
                stored.label,
                record["message"]
            );
            self.output.write(Entry::Ended(stored.id));
            self.record(record);
        }
        self.settle();
        self.end_barred(now);
    }

    /// Takes over which users the journal has as barred.
    pub(crate) fn restore_bars(&mut self, bars: BTreeMap<u32, Barred>) {
        for uid in bars.keys() {
            log::warn!("user {uid} is barred since before; see: umpire pardon {uid}");
        }
        self.bars.restore(bars);
        self.metrics.set_barred(self.bars.len());
    }

    /// There may be holders of before a restart, and no journal says what they hold: nothing
    /// is granted for as long as they may take to find out.
    pub(crate) fn wait_for_holders(&mut self, now: BootTime) {
        let Nanos(window) = self.config.claim_window;
        self.kept.wait_until(now.after(Nanos(window)));
        let ms = window / 1_000_000;
        log::warn!(
            "an arbiter was here before, and there is no journal of what it gave (--state): \
             nothing is granted for {ms} ms, in which its holders find out"
        );
    }

    /// Whether somebody holds something, but for the watchdog.
    pub(crate) fn has_holders(&self) -> bool {
        let mut leases = self.arbiter().leases();
        leases.any(|lease| lease.holds > 0 && !self.watchdog.is(lease.id))
    }

    /// The entries are in the journal.
    pub(crate) fn written(&mut self, entries: &[Entry]) {
        self.kept.written(entries);
    }

    /// Why the journal cannot be written.
    pub(crate) fn stuck(&self) -> Option<&str> {
        self.kept.stuck()
    }

    /// The journal could not be written. What would hold more than the journal says is taken
    /// back, and nothing is granted until [`Service::writable`]. What has ended meanwhile is
    /// in the journal still, but nobody else has got it. Returns what may be told.
    pub(crate) fn unwritten(&mut self, mut output: Output, why: &str, now: BootTime) -> Output {
        self.kept.set_stuck(why);
        self.metrics.journal_failed();
        self.book.freeze();
        let stuck = kept::stuck(why);
        for (id, written) in self.kept.unwritten(self.book.arbiter().leases()) {
            if written > 0 {
                self.book.take_back(id, written, now);
                continue;
            }
            if let Some(listener) = self.listeners.get(id).filter(|listener| listener.waits) {
                output.deny(listener.connection, &stuck);
            }
            self.listeners.remove(id);
            self.book.gone(id, now);
        }
        // Whoever asked is told; an event that is not true is not told.
        output.retain_answers(|answer| {
            let Some(id) = answer.rests_on else {
                return true;
            };
            let listener = self.listeners.get(id);
            let is_event = listener.is_some_and(|listener| listener.connection == answer.to)
                && answer.reply.continues == Some(true);
            answer.reply = stuck.reply();
            !is_event
        });
        self.settle();
        // The journal is written anew as a whole, so these are not needed.
        self.output.forget_entries();
        output
    }

    /// The journal was written anew, with all that there is.
    pub(crate) fn writable(&mut self, entries: &[Entry], now: BootTime) {
        self.kept.written_anew(entries);
        // The watchdog is on, whether its lease was lost meanwhile or not: it comes first.
        self.follow_watchdog(now);
        self.book.thaw(now);
        self.settle();
    }

    // Who has counters without a lease.

    /// Takes over what was seen of the counters.
    pub(crate) fn see(&mut self, places: &[Seen], holders: Option<Holders>, now: BootTime) {
        self.outsiders.set_holders(holders);
        let takers = self.bars.takers(self.arbiter());
        for seen in places {
            let beside = Beside {
                arbiter: self.book.arbiter(),
                takers: &takers,
                watchdog_has_lease: self.watchdog.has_lease(),
            };
            if self.outsiders.see(seen, beside) {
                self.set_outside(seen.place, now);
            }
        }
        self.settle();
    }

    /// What outsiders have of a place: as it was measured, and at least what is taken.
    fn set_outside(&mut self, place: Place, now: BootTime) {
        let outside = self.bars.outside(place, self.outsiders.measured(place));
        if self.arbiter().outside(place) != outside {
            self.book.set_outside(place, outside, now);
        }
    }

    /// What is taken now. Nobody is promised it; then those who took it lose their leases.
    fn set_taken(&mut self, taken: Vec<Taken>, now: BootTime) {
        if let Some(moved) = self.bars.set_taken(taken, self.book.arbiter()) {
            // The audit has who is an outsider with what had been lent to it.
            let (config, arbiter) = (&self.config, self.book.arbiter());
            let tenant = |lease, uid| events::tenant_of(config, arbiter, lease, uid);
            for record in moved.records(arbiter, tenant) {
                self.record(record);
            }
            for place in moved.places {
                self.set_outside(place, now);
            }
            self.settle();
        }
        self.end_barred(now);
    }

    /// Ends what users who are barred have.
    fn end_barred(&mut self, now: BootTime) {
        let barred = |lease: &&Lease| self.bars.has(lease.owner.uid) && !self.watchdog.is(lease.id);
        let barred = self.arbiter().leases().filter(barred);
        let barred: Vec<LeaseId> = barred.map(|lease| lease.id).collect();
        if !barred.is_empty() {
            self.book.end_now(&barred, Cause::Barred, now);
            self.settle();
        }
    }

    // Events that are opened for holders.

    /// Whether a user is barred.
    pub(crate) fn is_barred(&self, uid: u32) -> bool {
        self.bars.has(uid)
    }

    /// Users that were forgiven since this was asked last.
    pub(crate) fn take_forgiven(&mut self) -> Vec<u32> {
        self.bars.take_forgiven()
    }

    /// The event that a client may have. Adds to `looks` how many threads were looked at.
    ///
    /// # Errors
    /// Why it may not.
    pub(crate) fn allow(
        &self,
        client: &Client,
        request: &EventRequest,
        looks: &mut u64,
    ) -> Result<Allowed, Box<NoEvent>> {
        let lease = LeaseId(request.lease);
        let arbiter = self.arbiter();
        let (caller, _) = call::caller(&self.config, arbiter, client, Some(lease));
        let asking = events::Asking {
            config: &self.config,
            arbiter,
            is_watchdogs: self.watchdog.is(lease),
            caller,
            request,
        };
        let thread = |group: Option<&Group>| {
            let task = client.thread(request.thread?, looks);
            let tree = &self.groups;
            Some(task.map(|task| {
                let runs = group.map(|group| means::runs_in(&task, group, tree, looks));
                (task, runs)
            }))
        };
        let allowed = self.bars.check(client.uid);
        let allowed = allowed.and_then(|()| asking.event(thread));
        allowed.map_err(|denial| {
            let tenant = NoEvent::asker((&self.config, arbiter), client, Some(lease));
            let refusal = denial.refusal(arbiter, Viewer::of(caller));
            Box::new(NoEvent::of_host(client, tenant, refusal))
        })
    }

    /// What has become of events is counted and recorded, and has its price.
    pub(crate) fn hear(&mut self, told: Told) {
        let (event, having) = match told {
            Told::Denied(no) => {
                return self.denied(Refused {
                    tenant: no.tenant,
                    uid: no.uid,
                    pid: no.pid,
                    method: "event",
                    reason: &no.refusal.reason,
                    message: Some(&no.refusal.message),
                });
            }
            Told::Taken(taken, now) => return self.set_taken(taken, now),
            Told::Outlived(having) => return self.outlived(&having),
            Told::Handed(having) => {
                self.metrics.event_opened();
                ("event-opened", having)
            }
            Told::Disabled(having) => ("event-disabled", having),
            Told::Reenabled(having) => {
                self.metrics.event_reenabled();
                // Of a user who is barred that is known, and it does not fill the log.
                let level = if self.bars.has(having.uid) {
                    log::Level::Debug
                } else {
                    log::Level::Warn
                };
                log::log!(
                    level,
                    "process {} of user {} has enabled an event again that lease {} had lost; it \
                     was disabled again",
                    having.pid,
                    having.uid,
                    having.allowed.lease.0
                );
                ("event-reenabled", having)
            }
        };
        self.record_event(event, &having);
    }

    fn record_event(&mut self, event: &str, having: &Having) {
        let (lease, arbiter) = (having.allowed.lease, self.book.arbiter());
        let tenant = events::tenant_of(&self.config, arbiter, lease, having.uid);
        let record = having.record(event, tenant);
        self.record(record);
    }

    /// An event counts after its lease has ended, and not by an oversight.
    fn outlived(&mut self, having: &Having) {
        let (uid, pid, lease) = (having.uid, having.pid, having.allowed.lease.0);
        let barred = Barred { uid, pid, lease };
        if !self.bars.add(&barred) {
            return;
        }
        log::error!(
            "user {uid} is barred: process {pid} has an event count after its lease {lease} has \
             ended; its leases end, and it gets none until: umpire pardon {uid}"
        );
        self.record_event("barred", having);
        self.output.write(Entry::Barred(barred));
        self.metrics.set_barred(self.bars.len());
    }

    // The NMI watchdog.

    /// The watchdog is for these CPUs; none: the kernel has none, or nobody wants it.
    pub(crate) fn set_watchdog(&mut self, cpus: Option<CpuSet>, now: BootTime) {
        self.watchdog.set_cpus(cpus, self.book.arbiter());
        self.follow_watchdog(now);
    }

    /// Its lease is for all of its CPUs that are online, and stays for those that went; it is
    /// for no CPU that the kernel does not watch.
    fn follow_watchdog(&mut self, now: BootTime) {
        // While the journal cannot be written nothing is given, and what it has it keeps.
        if self.kept.stuck().is_none() && self.watchdog.is_due(self.arbiter()) {
            self.claim_anew(now);
        }
    }

    /// Asks for what the watchdog has, and gives nobody else what it had before meanwhile.
    fn claim_anew(&mut self, now: BootTime) {
        self.book.freeze();
        self.end_watchdog(now);
        let keep = self.config.watchdog.keep;
        if let Some((owner, terms)) = self.watchdog.request(self.arbiter(), keep) {
            match self.book.request(owner, terms, now) {
                Ok(Outcome::Granted { lease, .. } | Outcome::Waits { lease, .. }) => {
                    self.watchdog.has(lease);
                }
                Err(refusal) => {
                    let why = crate::words::message(self.arbiter(), &refusal);
                    log::warn!("the NMI watchdog's counter is not accounted for: {why}");
                }
            }
            self.settle();
        }
        self.book.thaw(now);
        self.settle();
    }

    /// Its lease ends; it asks for another when it is looked at again.
    fn end_watchdog(&mut self, now: BootTime) {
        self.set_watchdog_stuck(false, now);
        if let Some(id) = self.watchdog.take_lease() {
            self.book.gone(id, now);
            self.settle();
        }
    }

    /// Whether the watchdog is to be on. `None`: it is nobody's affair here.
    pub(crate) fn watchdog_on(&self) -> Option<bool> {
        let lease = self.watchdog.lease(self.arbiter())?;
        // What was not written may be taken back. One that is kept is never turned off, not
        // even if it was turned on after others had its counter.
        let is_known = self.kept.stuck().is_none();
        is_known.then_some(lease.holds > 0 || self.config.watchdog.keep)
    }

    /// Whether leases hold the watchdog's counter, also while the journal cannot be written.
    pub(crate) fn needs_watchdogs_counter(&self) -> bool {
        let lease = self.watchdog.lease(self.arbiter());
        lease.is_some_and(|lease| lease.holds == 0) && !self.config.watchdog.keep
    }

    /// It should be off, and is on, since it cannot be turned: it has counters that leases
    /// need. Where counters are measured, that is seen anyway.
    pub(crate) fn set_watchdog_stuck(&mut self, stuck: bool, now: BootTime) {
        if self.config.pmus.is_empty() {
            return;
        }
        if let Some((places, outside)) = self.watchdog.set_stuck(stuck, self.book.arbiter()) {
            for place in places {
                self.book.set_outside(place, outside.clone(), now);
            }
            self.settle();
        }
    }

    /// The NMI watchdog was turned on or off.
    pub(crate) fn watchdog_switched(&mut self, on: bool) {
        self.metrics.watchdog_switched();
        self.record(json!({ "event": if on { "watchdog-on" } else { "watchdog-off" } }));
    }

    /// The text of the metrics.
    pub(crate) fn render(&mut self, open: InUse) -> String {
        let off = self.watchdog_on() == Some(false);
        let arbiter = self.book.arbiter();
        let takers = self.bars.takers(arbiter);
        let takers: Vec<u32> = takers.into_keys().map(|(_, pid)| pid).collect();
        let holders = self.outsiders.holders();
        self.metrics.render(arbiter, holders, &takers, off, open)
    }
}

/// Nobody has asked whose threads could be looked for.
struct Nothing;

impl Means for Nothing {
    fn threads(&mut self, _: &[u32]) -> Result<(Vec<ThreadId>, Option<Arc<Group>>), String> {
        Err("threads are not known without an arbiter".to_owned())
    }

    fn own_group(&mut self) -> Result<Option<(ThreadId, Arc<Group>)>, String> {
        Ok(None)
    }

    fn group(&mut self, _: &str) -> Result<Group, String> {
        Err("control groups are not known without an arbiter".to_owned())
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
    let terms = convert::terms(config, arbiter, owner.tenant, request, &mut Nothing);
    let terms = terms.map_err(|wrong| wrong.0)?;
    Ok(shown::explained(arbiter, owner, terms, now))
}

#[cfg(test)]
#[path = "service/barred_tests.rs"]
mod barred_tests;
#[cfg(test)]
#[path = "service/trail_tests.rs"]
mod trail_tests;
#[cfg(test)]
#[path = "service/watchdog_tests.rs"]
mod watchdog_tests;
