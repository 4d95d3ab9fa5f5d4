//! The arbiter's figures for OpenMetrics: what has happened is counted as it happens, how
//! things are is looked at when somebody asks.

use std::collections::BTreeMap;

use arbiter::{CounterSet, Nanos, PerKind};
use arbiter_host::{Cause, Change, CpuSet, HostArbiter, LeaseId, Place, PmuId, TenantId};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use umpire_budget::{Holder, Holders};
use umpire_lease::FIGURES;

/// Names and values of labels. Tenants are the policy's; no label is a client's text.
type Labels = Vec<(&'static str, String)>;
type Count = Family<Labels, Counter>;
type Level = Family<Labels, Gauge>;
type Waited = Family<Labels, Histogram, fn() -> Histogram>;

/// The methods of the interface.
const METHODS: [&str; 12] = [
    "Acquire", "Claim", "Release", "Renew", "Revoke", "List", "Who", "Explain", "Report", "Audit",
    "Watch", "Pardon",
];

/// Most groups of CPUs of a PMU that have figures of their own.
const MOST_GROUPS: usize = 64;
/// Most leases whose holders' figures are shown one by one; those of others are in the sums of
/// their tenants.
const MOST_REPORTING: usize = 256;

/// The figures.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    counters: Level,
    held: Level,
    outside: Level,
    free: Level,
    leases: Level,
    waiting: Gauge,
    outsiders: Level,
    connections: Level,
    watchdog_off: Gauge,
    calls: Count,
    events: Count,
    grants: Count,
    denials: Count,
    losses: Count,
    waited: Waited,
    blind: Family<Labels, Counter<f64>>,
    pub(crate) journal_errors: Counter,
    pub(crate) watchdog_changes: Counter,
    pub(crate) audit_records: Counter,
    pub(crate) audit_lost: Counter,
    pub(crate) audit_errors: Counter,
    pub(crate) reload_errors: Counter,
    pub(crate) config_stale: Gauge,
    pub(crate) refused_connections: Counter,
    pub(crate) brokered: Counter,
    pub(crate) reenabled: Counter,
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
pub(crate) struct Open {
    pub(crate) varlink: usize,
    pub(crate) metrics: usize,
    pub(crate) events: usize,
    pub(crate) descriptors: usize,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("umpire");
        macro_rules! metric {
            ($name:literal, $help:literal) => {
                metric!($name, $help, Default::default())
            };
            ($name:literal, $help:literal, $new:expr) => {{
                let metric = $new;
                registry.register($name, $help, Clone::clone(&metric));
                metric
            }};
        }
        let counters: Level = metric!("arbiter_counters", "Counters that there are");
        let held: Level = metric!("arbiter_counters_held", "Counters that leases hold");
        let outside: Level = metric!(
            "arbiter_counters_outside",
            "Counters that others have, as far as it is measured"
        );
        let free: Level = metric!("arbiter_counters_free", "Counters that nobody has");
        let leases: Level = metric!("arbiter_leases", "Leases by their state");
        let waiting: Gauge = metric!("arbiter_waiting", "Requests that wait for counters");
        let outsiders: Level = metric!(
            "arbiter_outsiders",
            "Processes and others that may have counters without a lease"
        );
        let connections: Level = metric!("arbiter_connections", "Connections by socket");
        let watchdog_off: Gauge = metric!(
            "arbiter_watchdog_off",
            "1 while the NMI watchdog is off for a lease"
        );
        let calls: Count = metric!("arbiter_calls", "Calls that were answered, by method");
        let events: Count = metric!("arbiter_events", "Decisions, by what happened to a lease");
        let grants: Count = metric!("arbiter_grants", "Times that a lease got counters");
        let denials: Count = metric!("arbiter_denials", "Calls that were refused, by reason");
        let losses: Count = metric!(
            "arbiter_losses",
            "Times that a lease held fewer counters than before, by reason"
        );
        let waited: Waited = Family::new_with_constructor(waits as fn() -> Histogram);
        registry.register_with_unit(
            "arbiter_waited",
            "Time from request to first grant",
            Unit::Seconds,
            waited.clone(),
        );
        let blind: Family<Labels, Counter<f64>> = Family::default();
        registry.register_with_unit(
            "arbiter_blind",
            "Counters times time that leases lacked after their first grant",
            Unit::Seconds,
            blind.clone(),
        );
        let journal_errors: Counter = metric!(
            "arbiter_journal_errors",
            "Writes and syncs of the journal that failed"
        );
        let watchdog_changes: Counter = metric!(
            "arbiter_watchdog_changes",
            "Times that the NMI watchdog was turned off or on"
        );
        let audit_records: Counter = metric!("arbiter_audit_records", "Records of the audit");
        let audit_lost: Counter = metric!(
            "arbiter_audit_lost",
            "Records that could not be written to the audit"
        );
        let audit_errors: Counter =
            metric!("arbiter_audit_errors", "Syncs of the audit that failed");
        let reload_errors: Counter = metric!(
            "arbiter_reload_errors",
            "Times that the configuration could not be read again"
        );
        let config_stale: Gauge = metric!(
            "arbiter_config_stale",
            "1 while the rules are of before, since the file cannot be used"
        );
        let refused_connections: Counter = metric!(
            "arbiter_connections_refused",
            "Connections that were closed at once: there were too many"
        );
        let brokered: Counter = metric!("arbiter_events_opened", "Perf events opened for holders");
        let reenabled: Counter = metric!(
            "arbiter_events_reenabled",
            "Perf events that a holder enabled again after it had lost the lease"
        );
        let open_events: Gauge = metric!(
            "arbiter_events_open",
            "Perf events that holders have of the arbiter"
        );
        let barred: Gauge = metric!(
            "arbiter_users_barred",
            "Users who had an event count after its lease had ended, and were not pardoned"
        );
        let holder: Count = metric!(
            "holder",
            "What holders of leases report of themselves, by tenant"
        );
        let of_lease: Count = metric!("lease", "The same by lease, while it lasts");
        Metrics {
            registry,
            counters,
            held,
            outside,
            free,
            leases,
            waiting,
            outsiders,
            connections,
            watchdog_off,
            calls,
            events,
            grants,
            denials,
            losses,
            waited,
            blind,
            journal_errors,
            watchdog_changes,
            audit_records,
            audit_lost,
            audit_errors,
            reload_errors,
            config_stale,
            refused_connections,
            brokered,
            reenabled,
            open_events,
            barred,
            holder,
            of_lease,
            ended_blind: BTreeMap::new(),
            counted_blind: BTreeMap::new(),
            reports: BTreeMap::new(),
            reporting: 0,
            holds: BTreeMap::new(),
        }
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
        let what = crate::words::what(change).to_owned();
        self.events.get_or_create(&vec![("event", what)]).inc();
        let id = change.lease();
        let before = match change {
            Change::Holds { holds, .. } => self.holds.insert(id, *holds),
            Change::Ended { .. } => self.holds.remove(&id),
            _ => None,
        };
        let before = before.unwrap_or(0);
        let lost = |tenant, why: Cause| {
            let mut labels = of_tenant(arbiter, tenant);
            labels.push(("reason", crate::words::cause(why).to_owned()));
            self.losses.get_or_create(&labels).inc();
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
                    self.grants.get_or_create(&labels).inc();
                    if lease.generation == 1 {
                        let waited = arbiter.now().since(lease.waits_since);
                        self.waited.get_or_create(&labels).observe(seconds(waited));
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

    /// Counts a call.
    pub(crate) fn called(&self, method: &str) {
        let known = METHODS.into_iter().find(|known| *known == method);
        let labels = vec![("method", known.unwrap_or("other").to_owned())];
        self.calls.get_or_create(&labels).inc();
    }

    /// Counts a call that was refused.
    pub(crate) fn denied(&self, arbiter: &HostArbiter, tenant: Option<TenantId>, reason: &str) {
        let known = tenant.filter(|tenant| arbiter.policy().tenant(*tenant).is_some());
        let mut labels = known.map_or_else(
            || vec![("tenant", "none".to_owned())],
            |tenant| of_tenant(arbiter, tenant),
        );
        labels.push(("reason", reason.to_owned()));
        self.denials.get_or_create(&labels).inc();
    }

    /// Takes over what a holder has counted since it began.
    ///
    /// # Errors
    /// It is no figure that is known.
    pub(crate) fn report(
        &mut self,
        arbiter: &HostArbiter,
        (tenant, lease): (TenantId, LeaseId),
        name: &str,
        count: u64,
    ) -> Result<(), String> {
        let Some(figure) = FIGURES.into_iter().find(|known| *known == name) else {
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
        let before = report.figures.insert(figure, count).unwrap_or(0);
        // A holder that counts from 0 again has begun anew.
        let more = count.checked_sub(before).unwrap_or(count);
        let mut labels = of_tenant(arbiter, tenant);
        labels.push(("figure", figure.to_owned()));
        self.holder.get_or_create(&labels).inc_by(more);
        if report.shown {
            let labels = of_lease(arbiter, tenant, lease, figure);
            self.of_lease.get_or_create(&labels).inc_by(more);
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
        open: Open,
    ) -> String {
        self.look_at_counters(arbiter);
        // What has not happened yet is 0.
        for (tenant, _) in arbiter.policy().all() {
            let labels = of_tenant(arbiter, tenant);
            drop(self.grants.get_or_create(&labels));
            drop(self.waited.get_or_create(&labels));
            drop(self.blind.get_or_create(&labels));
        }
        self.look_at_leases(arbiter);
        self.outsiders.clear();
        for what in ["nmi-watchdog", "process"] {
            drop(
                self.outsiders
                    .get_or_create(&vec![("what", what.to_owned())]),
            );
        }
        for holder in holders.iter().flat_map(|seen| &seen.found) {
            let what = match holder {
                Holder::NmiWatchdog { .. } => "nmi-watchdog",
                Holder::Process { .. } => "process",
            };
            self.outsiders
                .get_or_create(&vec![("what", what.to_owned())])
                .inc();
        }
        let known = |pid: &u32| {
            let mut found = holders.iter().flat_map(|seen| &seen.found);
            found.any(|one| matches!(one, Holder::Process { pid: this, .. } if this == pid))
        };
        let takers = takers.iter().filter(|pid| !known(pid)).count();
        self.outsiders
            .get_or_create(&vec![("what", "process".to_owned())])
            .inc_by(whole(takers));
        for (socket, count) in [
            ("varlink", open.varlink),
            ("metrics", open.metrics),
            ("events", open.events),
        ] {
            let labels = vec![("socket", socket.to_owned())];
            self.connections.get_or_create(&labels).set(whole(count));
        }
        self.open_events.set(whole(open.descriptors));
        self.watchdog_off.set(i64::from(watchdog_off));
        let mut text = String::new();
        if let Err(error) = encode(&mut text, &self.registry) {
            log::error!("the metrics cannot be written: {error}");
        }
        text
    }

    fn look_at_counters(&self, arbiter: &HostArbiter) {
        for level in [&self.counters, &self.held, &self.outside, &self.free] {
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
                    let levels = [&self.counters, &self.held, &self.outside, &self.free];
                    for (level, sum) in levels.into_iter().zip(sum) {
                        let sum = i64::try_from(*sum).unwrap_or(i64::MAX);
                        level.get_or_create(&labels).set(sum);
                    }
                }
            }
        }
    }

    fn look_at_leases(&mut self, arbiter: &HostArbiter) {
        self.leases.clear();
        let mut blind = self.ended_blind.clone();
        let mut waiting = 0;
        for lease in arbiter.leases() {
            let tenant = lease.owner.tenant;
            waiting += i64::from(lease.is_waiting());
            let mut labels = of_tenant(arbiter, tenant);
            let state = match lease.broken {
                Some(_) => "broken",
                None => crate::convert::state(lease),
            };
            labels.push(("state", state.to_owned()));
            self.leases.get_or_create(&labels).inc();
            blind.entry(tenant).or_default().0 += lease.blind_until(arbiter.now()).0;
        }
        self.waiting.set(waiting);
        for (tenant, all) in blind {
            let counted = self.counted_blind.entry(tenant).or_default();
            let more = Nanos(all.0.saturating_sub(counted.0));
            let labels = of_tenant(arbiter, tenant);
            self.blind.get_or_create(&labels).inc_by(seconds(more));
            counted.0 += more.0;
        }
    }
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
