//! The arbiter's figures for OpenMetrics: what has happened is counted as it happens, how
//! things are is looked at when somebody asks.

use std::collections::{BTreeMap, BTreeSet};

use crate::budget::{Holder, Holders};
use arbiter::{CounterSet, Nanos, PerKind};
use arbiter_host::{
    Cause, Change, CpuSet, HostArbiter, Lease, LeaseId, LeaseScope, Place, PmuId, Reason, TenantId,
};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};
use umpire_lease::{FIGURES, Figure, MOST_FIGURES, ReportIn};

/// Names and values of labels. Tenants are the policy's; no label is a client's text.
type Labels = Vec<(&'static str, String)>;
type Count = Family<Labels, Counter>;
type Level = Family<Labels, Gauge>;
type Waited = Family<Labels, Histogram, fn() -> Histogram>;

/// Most groups of CPUs of a PMU that have figures of their own.
const MOST_GROUPS: usize = 64;
/// Most leases whose holders' figures are shown one by one; those of others are in the sums of
/// their tenants.
const MOST_REPORTING: usize = 256;

/// The figures. They stand in the text in the order in which they are registered here.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    levels: Levels,
    decisions: Decisions,
    incidents: Incidents,
    open_events: Gauge,
    barred: Gauge,
    holder: Count,
    of_lease: Count,
    /// Time that ended leases were blind for, and how much of all was counted.
    ended_blind: BTreeMap<TenantId, Nanos>,
    counted_blind: BTreeMap<TenantId, Nanos>,
    reports: BTreeMap<LeaseId, Report>,
    /// How many of these are shown.
    reporting: usize,
    /// What each lease holds, as far as it was counted.
    holds: BTreeMap<LeaseId, usize>,
}

/// How things are.
#[derive(Debug)]
struct Levels {
    counters: Level,
    held: Level,
    outside: Level,
    free: Level,
    leases: Level,
    groups: Level,
    within: Level,
    waiting: Gauge,
    outsiders: Level,
    connections: Level,
    watchdog_off: Gauge,
}

/// What was decided.
#[derive(Debug)]
struct Decisions {
    calls: Count,
    events: Count,
    grants: Count,
    denials: Count,
    losses: Count,
    waited: Waited,
    blind: Family<Labels, Counter<f64>>,
}

/// What happened to the arbiter itself.
#[derive(Debug)]
struct Incidents {
    journal_errors: Counter,
    watchdog_changes: Counter,
    audit_records: Counter,
    audit_lost: Counter,
    audit_errors: Counter,
    reload_errors: Counter,
    config_stale: Gauge,
    refused_connections: Counter,
    brokered: Counter,
    reenabled: Counter,
}

/// What the holder of a lease has counted.
#[derive(Debug)]
struct Report {
    shown: bool,
    figures: BTreeMap<&'static str, u64>,
}

/// From a millisecond to a quarter of an hour.
fn waits() -> Histogram {
    Histogram::new([0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 900.0])
}

/// How many connections and descriptors there are.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InUse {
    pub(crate) varlink: usize,
    pub(crate) metrics: usize,
    pub(crate) events: usize,
    pub(crate) descriptors: usize,
}

/// A new metric, which is registered.
fn metric<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

impl Levels {
    fn register(all: &mut Registry) -> Self {
        Levels {
            counters: metric(all, "arbiter_counters", "Counters that there are"),
            held: metric(all, "arbiter_counters_held", "Counters that leases hold"),
            outside: metric(
                all,
                "arbiter_counters_outside",
                "Counters that others have, as far as it is measured",
            ),
            free: metric(all, "arbiter_counters_free", "Counters that nobody has"),
            leases: metric(all, "arbiter_leases", "Leases by their state"),
            groups: metric(
                all,
                "arbiter_groups",
                "Control groups that have leases, or wait for some, by whose these are",
            ),
            within: metric(
                all,
                "arbiter_leases_within",
                "Leases that are taken out of those of control groups, by scope",
            ),
            waiting: metric(all, "arbiter_waiting", "Requests that wait for counters"),
            outsiders: metric(
                all,
                "arbiter_outsiders",
                "Processes and others that may have counters without a lease",
            ),
            connections: metric(all, "arbiter_connections", "Connections by socket"),
            watchdog_off: metric(
                all,
                "arbiter_watchdog_off",
                "1 while the NMI watchdog is off for a lease",
            ),
        }
    }
}

impl Decisions {
    fn register(all: &mut Registry) -> Self {
        let decisions = Decisions {
            calls: metric(all, "arbiter_calls", "Calls that were answered, by method"),
            events: metric(
                all,
                "arbiter_events",
                "Decisions, by what happened to a lease",
            ),
            grants: metric(all, "arbiter_grants", "Times that a lease got counters"),
            denials: metric(all, "arbiter_denials", "Calls that were refused, by reason"),
            losses: metric(
                all,
                "arbiter_losses",
                "Times that a lease held fewer counters than before, by reason",
            ),
            waited: Family::new_with_constructor(waits as fn() -> Histogram),
            blind: Family::default(),
        };
        all.register_with_unit(
            "arbiter_waited",
            "Time from request to first grant",
            Unit::Seconds,
            decisions.waited.clone(),
        );
        all.register_with_unit(
            "arbiter_blind",
            "Counters times time that leases lacked after their first grant",
            Unit::Seconds,
            decisions.blind.clone(),
        );
        decisions
    }
}

impl Incidents {
    fn register(all: &mut Registry) -> Self {
        Incidents {
            journal_errors: metric(
                all,
                "arbiter_journal_errors",
                "Writes and syncs of the journal that failed",
            ),
            watchdog_changes: metric(
                all,
                "arbiter_watchdog_changes",
                "Times that the NMI watchdog was turned off or on",
            ),
            audit_records: metric(all, "arbiter_audit_records", "Records of the audit"),
            audit_lost: metric(
                all,
                "arbiter_audit_lost",
                "Records that could not be written to the audit",
            ),
            audit_errors: metric(
                all,
                "arbiter_audit_errors",
                "Syncs of the audit that failed",
            ),
            reload_errors: metric(
                all,
                "arbiter_reload_errors",
                "Times that the configuration could not be read again",
            ),
            config_stale: metric(
                all,
                "arbiter_config_stale",
                "1 while the rules are of before, since the file cannot be used",
            ),
            refused_connections: metric(
                all,
                "arbiter_connections_refused",
                "Connections that were closed at once: there were too many",
            ),
            brokered: metric(
                all,
                "arbiter_events_opened",
                "Perf events opened for holders",
            ),
            reenabled: metric(
                all,
                "arbiter_events_reenabled",
                "Perf events that a holder enabled again after it had lost the lease",
            ),
        }
    }
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut all = Registry::with_prefix("umpire");
        Metrics {
            levels: Levels::register(&mut all),
            decisions: Decisions::register(&mut all),
            incidents: Incidents::register(&mut all),
            open_events: metric(
                &mut all,
                "arbiter_events_open",
                "Perf events that holders have of the arbiter",
            ),
            barred: metric(
                &mut all,
                "arbiter_users_barred",
                "Users who had an event count after its lease had ended, and were not pardoned",
            ),
            holder: metric(
                &mut all,
                "holder",
                "What holders of leases report of themselves, by tenant",
            ),
            of_lease: metric(&mut all, "lease", "The same by lease, while it lasts"),
            registry: all,
            ended_blind: BTreeMap::new(),
            counted_blind: BTreeMap::new(),
            reports: BTreeMap::new(),
            reporting: 0,
            holds: BTreeMap::new(),
        }
    }

    /// The journal could not be written, or put on the disk.
    pub(crate) fn journal_failed(&self) {
        self.incidents.journal_errors.inc();
    }

    /// The NMI watchdog was turned on or off.
    pub(crate) fn watchdog_switched(&self) {
        self.incidents.watchdog_changes.inc();
    }

    /// So many records are in the audit, and so many could not be written.
    pub(crate) fn audited(&self, written: u64, lost: u64) {
        self.incidents.audit_records.inc_by(written);
        self.incidents.audit_lost.inc_by(lost);
    }

    /// The audit could not be put on the disk.
    pub(crate) fn audit_not_synced(&self) {
        self.incidents.audit_errors.inc();
    }

    /// The configuration was read again, or could not be.
    pub(crate) fn reloaded(&self, is_used: bool) {
        self.incidents.config_stale.set(i64::from(!is_used));
        if !is_used {
            self.incidents.reload_errors.inc();
        }
    }

    /// A connection was closed at once.
    pub(crate) fn connection_refused(&self) {
        self.incidents.refused_connections.inc();
    }

    /// An event was opened for a holder.
    pub(crate) fn event_opened(&self) {
        self.incidents.brokered.inc();
    }

    /// A holder has enabled an event again that it had lost.
    pub(crate) fn event_reenabled(&self) {
        self.incidents.reenabled.inc();
    }

    /// So many users are barred.
    pub(crate) fn set_barred(&self, users: usize) {
        self.barred.set(whole(users));
    }

    /// The lease is there since before a restart.
    pub(crate) fn restored(&mut self, lease: LeaseId, holds: usize) {
        self.holds.insert(lease, holds);
    }

    /// Counts a change.
    pub(crate) fn changed(&mut self, arbiter: &HostArbiter, change: &Change) {
        let what = change.what().to_string();
        self.decisions
            .events
            .get_or_create(&vec![("event", what)])
            .inc();
        let id = change.lease();
        let before = match change {
            Change::Holds { holds, .. } => self.holds.insert(id, *holds),
            Change::Ended { .. } => self.holds.remove(&id),
            _ => None,
        };
        let before = before.unwrap_or(0);
        let lost = |tenant, why: Cause| {
            let mut labels = of_tenant(arbiter, tenant);
            labels.push(("reason", why.reason().to_string()));
            self.decisions.losses.get_or_create(&labels).inc();
        };
        match change {
            Change::Holds {
                lease, holds, why, ..
            } => {
                let Some(lease) = arbiter.lease(*lease) else {
                    return;
                };
                let tenant = lease.owner.tenant;
                if *holds > before {
                    let labels = of_tenant(arbiter, tenant);
                    self.decisions.grants.get_or_create(&labels).inc();
                    if lease.generation == 1 {
                        let waited = arbiter.now().since(lease.waits_since);
                        self.decisions
                            .waited
                            .get_or_create(&labels)
                            .observe(seconds(waited));
                    }
                } else if *holds < before {
                    lost(tenant, *why);
                }
            }
            Change::Ended { lease, why } => {
                let tenant = lease.owner.tenant;
                if before > 0 {
                    lost(tenant, *why);
                }
                self.ended_blind.entry(tenant).or_default().0 += lease.blind.0;
                if let Some(report) = self.reports.remove(&lease.id) {
                    self.reporting -= usize::from(report.shown);
                    for figure in report.figures.into_keys() {
                        self.of_lease
                            .remove(&of_lease(arbiter, tenant, lease.id, figure));
                    }
                }
            }
            _ => {}
        }
    }

    /// Counts a call; of methods that there are not, all by one word.
    pub(crate) fn called(&self, method: &str) {
        let labels = vec![("method", method.to_owned())];
        self.decisions.calls.get_or_create(&labels).inc();
    }

    /// Counts a call that was refused.
    pub(crate) fn denied(&self, arbiter: &HostArbiter, tenant: Option<TenantId>, reason: &Reason) {
        let known = tenant.filter(|tenant| arbiter.policy().tenant(*tenant).is_some());
        let mut labels = known.map_or_else(
            || vec![("tenant", "none".to_owned())],
            |tenant| of_tenant(arbiter, tenant),
        );
        labels.push(("reason", reason.to_string()));
        self.decisions.denials.get_or_create(&labels).inc();
    }

    /// Takes over what the holder of a lease has counted since it began.
    ///
    /// # Errors
    /// There are too many figures, or one that is not known: those before it are taken.
    pub(crate) fn report(
        &mut self,
        arbiter: &HostArbiter,
        tenant: TenantId,
        asked: &ReportIn,
    ) -> Result<(), String> {
        if asked.figures.len() > MOST_FIGURES {
            return Err(format!("a report has {MOST_FIGURES} figures at most"));
        }
        let lease = LeaseId(asked.lease);
        for Figure { name, count } in &asked.figures {
            let Some(figure) = FIGURES.into_iter().find(|known| known == name) else {
                let known = FIGURES.join(", ");
                return Err(format!("there is no figure '{name}'; there are: {known}"));
            };
            let reporting = &mut self.reporting;
            let report = self.reports.entry(lease).or_insert_with(|| {
                let shown = *reporting < MOST_REPORTING;
                *reporting += usize::from(shown);
                let figures = BTreeMap::new();
                Report { shown, figures }
            });
            let before = report.figures.insert(figure, *count).unwrap_or(0);
            // A holder that counts from 0 again has begun anew.
            let more = count.checked_sub(before).unwrap_or(*count);
            let mut labels = of_tenant(arbiter, tenant);
            labels.push(("figure", figure.to_owned()));
            self.holder.get_or_create(&labels).inc_by(more);
            if report.shown {
                let labels = of_lease(arbiter, tenant, lease, figure);
                self.of_lease.get_or_create(&labels).inc_by(more);
            }
        }
        Ok(())
    }

    /// The text of OpenMetrics.
    pub(crate) fn render(
        &mut self,
        arbiter: &HostArbiter,
        holders: Option<&Holders>,
        takers: &[u32],
        watchdog_off: bool,
        open: InUse,
    ) -> String {
        self.look_at_counters(arbiter);
        // What has not happened yet is 0.
        for (tenant, _) in arbiter.policy().all() {
            let labels = of_tenant(arbiter, tenant);
            drop(self.decisions.grants.get_or_create(&labels));
            drop(self.decisions.waited.get_or_create(&labels));
            drop(self.decisions.blind.get_or_create(&labels));
        }
        self.look_at_leases(arbiter);
        self.look_at_outsiders(holders, takers);
        for (socket, count) in [
            ("varlink", open.varlink),
            ("metrics", open.metrics),
            ("events", open.events),
        ] {
            let labels = vec![("socket", socket.to_owned())];
            self.levels
                .connections
                .get_or_create(&labels)
                .set(whole(count));
        }
        self.open_events.set(whole(open.descriptors));
        self.levels.watchdog_off.set(i64::from(watchdog_off));
        let mut text = String::new();
        if let Err(error) = encode(&mut text, &self.registry) {
            log::error!("the metrics cannot be written: {error}");
        }
        text
    }

    fn look_at_outsiders(&self, holders: Option<&Holders>, takers: &[u32]) {
        self.levels.outsiders.clear();
        for what in ["nmi-watchdog", "process"] {
            drop(
                self.levels
                    .outsiders
                    .get_or_create(&vec![("what", what.to_owned())]),
            );
        }
        for holder in holders.iter().flat_map(|seen| &seen.found) {
            let what = match holder {
                Holder::NmiWatchdog { .. } => "nmi-watchdog",
                Holder::Process { .. } => "process",
            };
            self.levels
                .outsiders
                .get_or_create(&vec![("what", what.to_owned())])
                .inc();
        }
        let known = |pid: &u32| {
            let mut found = holders.iter().flat_map(|seen| &seen.found);
            found.any(|one| matches!(one, Holder::Process { pid: this, .. } if this == pid))
        };
        let takers = takers.iter().filter(|pid| !known(pid)).count();
        self.levels
            .outsiders
            .get_or_create(&vec![("what", "process".to_owned())])
            .inc_by(whole(takers));
    }

    fn look_at_counters(&self, arbiter: &HostArbiter) {
        for level in [
            &self.levels.counters,
            &self.levels.held,
            &self.levels.outside,
            &self.levels.free,
        ] {
            level.clear();
        }
        for (id, pmu) in (0u16..).map(PmuId).zip(arbiter.pmus()) {
            let there = PerKind::count(pmu.counters);
            let size = pmu.domains.len().div_ceil(MOST_GROUPS).max(1);
            let places: Vec<u32> = (0..u32::try_from(pmu.domains.len()).unwrap_or(0)).collect();
            for (group, cpus) in places.chunks(size).zip(pmu.domains.chunks(size)) {
                let cpus: CpuSet = cpus.iter().flat_map(CpuSet::iter).collect();
                let mut sums = [[0u64; 4]; 2];
                for &domain in group {
                    let place = Place { pmu: id, domain };
                    let leased = arbiter.leased(place);
                    let of = |fixed: bool| {
                        let out = arbiter.outside(place).iter();
                        let out = out.filter(|set| is_fixed(**set) == fixed).count() as u64;
                        let [all, held] = [there, leased]
                            .map(|kinds| {
                                if fixed {
                                    kinds.fixed
                                } else {
                                    kinds.programmable
                                }
                            })
                            .map(u64::from);
                        [all, held, out, all.saturating_sub(held + out)]
                    };
                    for (sum, fixed) in sums.iter_mut().zip([false, true]) {
                        for (sum, more) in sum.iter_mut().zip(of(fixed)) {
                            *sum += more;
                        }
                    }
                }
                for (sum, kind) in sums.iter().zip(["programmable", "fixed"]) {
                    let labels = vec![
                        ("pmu", pmu.name.clone()),
                        ("cpus", cpus.to_string()),
                        ("kind", kind.to_owned()),
                    ];
                    let levels = [
                        &self.levels.counters,
                        &self.levels.held,
                        &self.levels.outside,
                        &self.levels.free,
                    ];
                    for (level, sum) in levels.into_iter().zip(sum) {
                        let sum = i64::try_from(*sum).unwrap_or(i64::MAX);
                        level.get_or_create(&labels).set(sum);
                    }
                }
            }
        }
    }

    fn look_at_leases(&mut self, arbiter: &HostArbiter) {
        self.levels.leases.clear();
        // Nothing is decided meanwhile. Labels are texts, so they are made for each kind of leases,
        // of which there are few, and not for each lease.
        let kinds = arbiter.leases().map(|lease| {
            let standing = lease.broken.is_none().then(|| lease.standing());
            (lease.owner.tenant, standing)
        });
        for ((tenant, standing), count) in counted(kinds) {
            let mut labels = of_tenant(arbiter, tenant);
            let state = standing.map_or_else(|| "broken".to_owned(), |one| one.to_string());
            labels.push(("state", state));
            self.levels.leases.get_or_create(&labels).set(count);
        }
        let mut blind = self.ended_blind.clone();
        let mut waiting = 0;
        for lease in arbiter.leases() {
            waiting += i64::from(lease.is_waiting());
            let blind = blind.entry(lease.owner.tenant).or_default();
            blind.0 += lease.blind_until(arbiter.now()).0;
        }
        self.look_at_groups(arbiter);
        self.levels.waiting.set(waiting);
        for (tenant, all) in blind {
            let counted = self.counted_blind.entry(tenant).or_default();
            let more = Nanos(all.0.saturating_sub(counted.0));
            let labels = of_tenant(arbiter, tenant);
            self.decisions
                .blind
                .get_or_create(&labels)
                .inc_by(seconds(more));
            counted.0 += more.0;
        }
    }

    fn look_at_groups(&self, arbiter: &HostArbiter) {
        let Levels { groups, within, .. } = &self.levels;
        groups.clear();
        within.clear();
        for (tenant, _) in arbiter.policy().all() {
            let labels = of_tenant(arbiter, tenant);
            drop(groups.get_or_create(&labels));
            for scope in [LeaseScope::Cgroup, LeaseScope::Thread, LeaseScope::Part] {
                let mut labels = labels.clone();
                labels.push(("scope", scope.to_string()));
                drop(within.get_or_create(&labels));
            }
        }
        let leased = arbiter.leased_groups();
        let tenants = leased.values().flat_map(|leases| {
            let leases = leases.iter().filter_map(|id| arbiter.lease(*id));
            let tenants = leases.map(|lease| lease.owner.tenant);
            tenants.collect::<BTreeSet<TenantId>>()
        });
        for (tenant, count) in counted(tenants) {
            let labels = of_tenant(arbiter, tenant);
            groups.get_or_create(&labels).set(count);
        }
        let is_within = |lease: &&Lease| {
            let mut above = lease.terms.scope.above();
            above.any(|group| leased.contains_key(&group))
        };
        let parts = arbiter.leases().filter(is_within);
        let kinds = parts.map(|lease| (lease.owner.tenant, lease.terms.scope.word()));
        for ((tenant, scope), count) in counted(kinds) {
            let mut labels = of_tenant(arbiter, tenant);
            labels.push(("scope", scope.to_string()));
            within.get_or_create(&labels).set(count);
        }
    }
}

/// How many there are of each kind.
fn counted<K: Ord>(all: impl Iterator<Item = K>) -> BTreeMap<K, i64> {
    let mut counts = BTreeMap::new();
    for kind in all {
        *counts.entry(kind).or_default() += 1;
    }
    counts
}

fn is_fixed(set: CounterSet) -> bool {
    (set & CounterSet::from_bits(u64::from(u32::MAX))).is_empty()
}

fn whole(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn seconds(time: Nanos) -> f64 {
    std::time::Duration::from_nanos(time.0).as_secs_f64()
}

fn of_tenant(arbiter: &HostArbiter, tenant: TenantId) -> Labels {
    let name = arbiter.policy().tenant(tenant);
    vec![(
        "tenant",
        name.map(|tenant| tenant.name.clone()).unwrap_or_default(),
    )]
}

fn of_lease(
    arbiter: &HostArbiter,
    tenant: TenantId,
    lease: LeaseId,
    figure: &'static str,
) -> Labels {
    let mut labels = of_tenant(arbiter, tenant);
    labels.push(("lease", lease.0.to_string()));
    labels.push(("figure", figure.to_owned()));
    labels
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arbiter_host::{
        BootTime, Demand, Group, GroupId, Outcome, Owner, Part, Scope, Terms, ThreadId, Waits,
    };

    use super::*;
    use crate::config::{ArbiterConfig, PmuConfig};

    const TEXT: &str = "[[tenant]]\nname = \"jobs\"\nusers = [7]\n\
         [[tenant]]\nname = \"agents\"\nusers = [8]\n";

    fn arbiter() -> HostArbiter {
        let config = ArbiterConfig::parse("test".as_ref(), TEXT).expect("a configuration");
        let pmu = PmuConfig::stated(4, 0).expect("four counters");
        let config = ArbiterConfig {
            pmus: vec![pmu],
            ..config
        };
        let pmus = config.host_pmus(&(0..1).collect());
        let mut policy = config.policy;
        for tenant in &mut policy.tenants {
            tenant.most_leases = usize::MAX;
            tenant.whole_cpus = true;
        }
        HostArbiter::new(pmus, policy).expect("the policy fits")
    }

    fn group(id: u64, above: &[u64]) -> Arc<Group> {
        Arc::new(Group {
            id: GroupId(id),
            above: above.iter().copied().map(GroupId).collect(),
            path: format!("/{id}"),
        })
    }

    /// A tenant asks for so many of the four counters of CPU 0.
    fn ask(arbiter: &mut HostArbiter, tenant: u16, scope: Scope, counters: usize) {
        let owner = Owner {
            tenant: TenantId(tenant),
            uid: 7,
            pid: 1,
            label: String::new(),
            by: None,
        };
        let all = Demand {
            pmu: PmuId(0),
            counters: CounterSet::first(4, 0),
        };
        let terms = Terms {
            demands: vec![all; counters],
            at_least: counters,
            cpus: CpuSet::from_iter([0]),
            scope,
            guaranteed: true,
            priority: 0,
            preemptible: false,
            lasts: None,
            waits: Waits::Always,
        };
        let asked = arbiter.request(owner, terms, BootTime(0), &mut Vec::new());
        assert!(
            matches!(asked, Ok(Outcome::Granted { .. } | Outcome::Waits { .. })),
            "{asked:?}"
        );
    }

    #[test]
    fn leases_are_counted_by_whose_they_are_and_how_they_stand() {
        let mut arbiter = arbiter();
        let thread = ThreadId {
            number: 7,
            started: 1,
        };
        let part = |with_others| {
            Scope::Part(Box::new(Part {
                of: group(1, &[]),
                threads: vec![thread],
                with_others,
            }))
        };
        ask(&mut arbiter, 0, Scope::Group(group(1, &[])), 3);
        // Two leases of a group, one group.
        ask(&mut arbiter, 0, Scope::Group(group(2, &[])), 1);
        ask(&mut arbiter, 0, Scope::Group(group(2, &[])), 1);
        ask(&mut arbiter, 0, Scope::Group(group(3, &[1])), 1);
        ask(&mut arbiter, 1, part(false), 1);
        ask(&mut arbiter, 0, part(true), 1);
        ask(&mut arbiter, 1, Scope::Cpu, 4);
        let open = InUse::default();
        // Nothing is counted twice.
        for _ in 0..2 {
            let text = Metrics::new().render(&arbiter, None, &[], false, open);
            for line in [
                "arbiter_leases{tenant=\"jobs\",state=\"holds\"} 5",
                "arbiter_leases{tenant=\"agents\",state=\"holds\"} 1",
                "arbiter_leases{tenant=\"agents\",state=\"waits\"} 1",
                "arbiter_groups{tenant=\"jobs\"} 3",
                "arbiter_groups{tenant=\"agents\"} 0",
                "arbiter_leases_within{tenant=\"jobs\",scope=\"cgroup\"} 1",
                "arbiter_leases_within{tenant=\"jobs\",scope=\"part\"} 1",
                "arbiter_leases_within{tenant=\"jobs\",scope=\"thread\"} 0",
                "arbiter_leases_within{tenant=\"agents\",scope=\"thread\"} 1",
                "arbiter_waiting 1",
            ] {
                assert!(text.contains(&format!("umpire_{line}\n")), "{line}: {text}");
            }
        }
    }
}
