//! The configuration: which counters there are to give, and to whom.

mod cgroups;
mod file;
mod warnings;

use std::collections::BTreeMap;
use std::path::PathBuf;

use arbiter::{CounterId, CounterSet, MAX_FIXED, MAX_PROGRAMMABLE, Nanos};
use arbiter_host::{CpuSet, HostPmu, HostPolicy, HostPolicyError, PmuId, Tenant, TenantId};
use serde::Deserialize;
use thiserror::Error;

use cgroups::CgroupRule;
pub use cgroups::hierarchies;
pub(crate) use cgroups::without_mount;

use crate::audit::AuditConfig;
use crate::scrape::MetricsAddress;

/// What cannot be used, and what would be right. Each prints as one line.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {error}", .path.display())]
    Read {
        path: PathBuf,
        error: std::io::Error,
    },
    /// It is not TOML, or has a key or value that is not allowed.
    #[error("{}:{line}:{column}: {message}", .path.display())]
    Malformed {
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// What is wrong.
        message: String,
    },
    /// The watchdog's old value must outlive the arbiter, and there is nowhere to keep it.
    #[error(
        "[watchdog] keep = false: the watchdog's old value has to survive a crash of the \
         arbiter; give a folder for it, with --state or state = \"DIR\""
    )]
    NoState,
    /// The policy promises more than there is, or contradicts itself.
    #[error("{}: {error}", .path.display())]
    Policy {
        path: PathBuf,
        /// What it promises.
        error: HostPolicyError,
    },
}

/// A PMU that the configuration states: of a host whose kernel shows none.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PmuConfig {
    #[serde(default = "core_name")]
    pub name: String,
    /// Its programmable counters.
    pub programmable: u8,
    /// Its fixed-function counters.
    #[serde(default)]
    pub fixed: u8,
    /// The CPUs that have it; all that are online without them.
    pub cpus: Option<Cpus>,
    /// The kernel's number of it (`type` in sysfs), by which events are opened for holders.
    pub perf_type: Option<u32>,
    /// Sets of CPUs that share one set of counters, for an uncore PMU.
    pub shared: Option<Vec<Cpus>>,
    /// Events that only some counters can count.
    #[serde(default)]
    pub events: BTreeMap<String, Vec<CounterName>>,
}

impl PmuConfig {
    /// A core PMU with so many counters; `None`: none, or more than there can be.
    #[must_use]
    pub fn stated(programmable: u8, fixed: u8) -> Option<Self> {
        let some = programmable > 0 || fixed > 0;
        let few = programmable <= MAX_PROGRAMMABLE && fixed <= MAX_FIXED;
        (some && few).then(|| PmuConfig {
            name: core_name(),
            programmable,
            fixed,
            cpus: None,
            perf_type: None,
            shared: None,
            events: BTreeMap::new(),
        })
    }
}

fn core_name() -> String {
    "cpu".to_owned()
}

/// A list of CPUs in the file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Cpus(pub CpuSet);

impl TryFrom<String> for Cpus {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let cpus: CpuSet = text.parse().map_err(|error| format!("{error}"))?;
        if cpus.is_empty() {
            return Err("the list has no CPU; give a list like 0,2-3".to_owned());
        }
        Ok(Cpus(cpus))
    }
}

/// A counter in the file: `PMC0`, `FIXED1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct CounterName(pub CounterId);

impl TryFrom<String> for CounterName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no counter; give a name like PMC0 or FIXED1");
        let (make, digits, most): (fn(u8) -> CounterId, _, _) =
            match (text.strip_prefix("PMC"), text.strip_prefix("FIXED")) {
                (Some(digits), _) => (CounterId::Programmable, digits, MAX_PROGRAMMABLE),
                (_, Some(digits)) => (CounterId::Fixed, digits, MAX_FIXED),
                _ => return Err(wrong()),
            };
        let number = digits.parse().ok().filter(|number| *number < most);
        number.map(make).map(CounterName).ok_or_else(wrong)
    }
}

/// What becomes of the NMI watchdog's counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WatchdogConfig {
    /// The file says so. Otherwise a watchdog is left alone where counters are stated.
    pub(crate) stated: bool,
    /// Nobody else gets it.
    pub(crate) keep: bool,
    /// Whose guaranteed leases may have it, if not everybody's.
    pub(crate) only: Option<Vec<String>>,
}

impl Default for WatchdogConfig {
    fn default() -> Self {
        WatchdogConfig {
            stated: false,
            keep: true,
            only: None,
        }
    }
}

/// The tenant that the watchdog is.
pub(crate) const WATCHDOG: &str = "nmi-watchdog";

/// Whose tenant a client is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Members {
    pub(crate) users: Vec<u32>,
    pub(crate) groups: Vec<u32>,
    /// Control groups; what is below them belongs too.
    pub(crate) cgroups: Vec<CgroupRule>,
    /// Whether its users may do everything.
    pub(crate) operator: bool,
    /// Whether the arbiter opens perf events for them.
    pub(crate) opens_events: bool,
    /// Whether its users may ask for leases of control groups that are others'.
    pub(crate) for_others: bool,
    /// Control groups, with those below them, of which they may whoever runs there.
    pub(crate) for_cgroups: Vec<CgroupRule>,
}

/// What the service needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArbiterConfig {
    /// The PMUs that are stated.
    pub pmus: Vec<PmuConfig>,
    /// The rules.
    pub policy: HostPolicy,
    /// Who is which tenant, by its place in the policy.
    pub(crate) members: Vec<Members>,
    /// How long holders have to come back after a restart.
    pub claim_window: Nanos,
    /// How long a control group that has a lease may be empty before something runs in it.
    pub arrive: Nanos,
    /// Most connections of a user.
    pub connections_per_user: usize,
    /// Most calls of a user in a second; what is more waits.
    pub requests_per_second: u32,
    /// The folder of the journal; without one leases do not survive the service.
    pub state: Option<PathBuf>,
    /// What becomes of the NMI watchdog's counter.
    pub(crate) watchdog: WatchdogConfig,
    /// The kernel's numbers of the PMUs that it shows, by name.
    pub(crate) perf_types: BTreeMap<String, u32>,
    /// Where metrics are served.
    pub metrics: Option<MetricsAddress>,
    /// Where the audit goes.
    pub audit: Option<AuditConfig>,
    /// The kernel's files are below this folder: `/`, but for tests.
    pub root: PathBuf,
    /// What the file says to no effect, whatever the host is.
    pub(crate) doubts: Vec<String>,
}

impl Default for ArbiterConfig {
    /// One tenant, of the user who runs the service.
    fn default() -> Self {
        let me = rustix::process::geteuid().as_raw();
        ArbiterConfig {
            pmus: Vec::new(),
            policy: HostPolicy {
                tenants: vec![Tenant {
                    priority: u8::MAX,
                    ..Tenant::open("default")
                }],
                ..HostPolicy::default()
            },
            members: vec![Members {
                users: vec![me],
                operator: true,
                ..Members::default()
            }],
            claim_window: Nanos(10_000_000_000),
            arrive: Nanos(10_000_000_000),
            connections_per_user: 256,
            requests_per_second: 20_000,
            state: None,
            watchdog: WatchdogConfig::default(),
            perf_types: BTreeMap::new(),
            metrics: None,
            audit: None,
            root: PathBuf::from("/"),
            doubts: Vec::new(),
        }
    }
}

impl ArbiterConfig {
    /// The kernel's number of a PMU.
    pub(crate) fn perf_type(&self, pmu: &str) -> Option<u32> {
        let stated = self.pmus.iter().find(|stated| stated.name == pmu);
        match stated {
            Some(stated) => stated.perf_type,
            None => self.perf_types.get(pmu).copied(),
        }
    }

    /// The one of `pmus` that the kernel calls by this number.
    pub(crate) fn pmu_of(&self, pmus: &[HostPmu], perf_type: u32) -> Option<PmuId> {
        let pmus = (0u16..).map(PmuId).zip(pmus);
        let mut same = pmus.filter(|(_, pmu)| self.perf_type(&pmu.name) == Some(perf_type));
        same.next().map(|(id, _)| id)
    }

    /// What it says to no effect on this host as it is now, one sentence each, with what to do.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        warnings::of(self)
    }

    /// What of it differs from `before`, and does not count before the next start.
    pub(crate) fn counts_later(&self, before: &Self) -> String {
        let changed = [
            ("[[pmu]]", self.pmus != before.pmus),
            ("state", self.state != before.state),
            ("metrics", self.metrics != before.metrics),
            ("audit", self.audit != before.audit),
            (
                "requests-per-second",
                self.requests_per_second != before.requests_per_second,
            ),
            (
                "opens-events (whether any tenant has it)",
                self.opens_events() != before.opens_events(),
            ),
        ];
        let names: Vec<&str> = changed
            .iter()
            .filter(|one| one.1)
            .map(|one| one.0)
            .collect();
        names.join(", ")
    }

    /// Adds the watchdog to the tenants.
    ///
    /// # Errors
    /// It is to be given back, and there is no folder for its old value.
    pub fn with_watchdog(mut self) -> Result<Self, ConfigError> {
        if !self.watchdog.keep && self.state.is_none() {
            return Err(ConfigError::NoState);
        }
        let names = self.watchdog.only.as_ref();
        let ids = |names: &Vec<String>| {
            let ids = names.iter().filter_map(|name| self.policy.named(name));
            ids.collect()
        };
        let gives_way_to = names.map(ids);
        self.policy.tenants.push(Tenant {
            priority: u8::MAX,
            gives_way_to,
            ..Tenant::open(WATCHDOG)
        });
        self.members.push(Members::default());
        Ok(self)
    }

    /// The PMUs for the arbiter, with `online` CPUs.
    #[must_use]
    pub fn host_pmus(&self, online: &CpuSet) -> Vec<HostPmu> {
        let stated = self.pmus.iter().map(|pmu| {
            let cpus = pmu.cpus.as_ref().map_or(online, |cpus| &cpus.0);
            let (domains, for_threads) = match &pmu.shared {
                Some(shared) => (shared.iter().map(|cpus| cpus.0.clone()).collect(), false),
                None => (
                    cpus.iter().map(|cpu| CpuSet::from_iter([cpu])).collect(),
                    true,
                ),
            };
            HostPmu {
                name: pmu.name.clone(),
                counters: CounterSet::first(pmu.programmable, pmu.fixed),
                domains,
                for_threads,
            }
        });
        stated.collect()
    }

    /// The tenants of a client, and whether one of them is an operator.
    pub(crate) fn tenants_of(&self, peer: &crate::peer::Client) -> (Vec<TenantId>, bool) {
        let mut tenants = Vec::new();
        if !peer.has_user() {
            // Who it is cannot be told from others.
            return (tenants, false);
        }
        let mut operator = peer.uid == 0;
        for (id, members) in (0u16..).map(TenantId).zip(&self.members) {
            if members.has(peer) {
                tenants.push(id);
                operator |= members.operator;
            }
        }
        (tenants, operator)
    }

    /// Whether a tenant has a right. One that is not in the policy has none.
    pub(crate) fn allows(&self, tenant: TenantId, right: impl Fn(&Members) -> bool) -> bool {
        let members = self.members.get(usize::from(tenant.0));
        members.is_some_and(right)
    }

    /// Whether a tenant may have events opened.
    pub(crate) fn opens_events(&self) -> bool {
        let mut members = self.members.iter();
        members.any(|members| members.opens_events)
    }

    /// The groups of users that tenants are of.
    pub(crate) fn named_groups(&self) -> impl Iterator<Item = u32> {
        let members = self.members.iter();
        members.flat_map(|members| members.groups.iter().copied())
    }

    /// Whether a client's user has no tenant, and nothing to say.
    pub(crate) fn is_stranger(&self, client: &crate::peer::Client) -> bool {
        let (tenants, operator) = self.tenants_of(client);
        tenants.is_empty() && !operator
    }
}

impl Members {
    /// Whether its users may ask for the control group of this path, whoever runs there.
    pub(crate) fn may_ask_for(&self, path: &str) -> bool {
        let mut rules = self.for_cgroups.iter();
        rules.any(|rule| rule.covers(path.as_bytes()))
    }

    fn has(&self, peer: &crate::peer::Client) -> bool {
        let path = peer.cgroup.as_deref();
        let below = |rule: &CgroupRule| path.is_some_and(|path| rule.covers(path));
        self.users.contains(&peer.uid)
            || self.groups.iter().any(|group| peer.groups.contains(group))
            || self.cgroups.iter().any(below)
    }
}
