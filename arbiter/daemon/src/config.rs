//! The configuration: which counters there are to give, and to whom.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use arbiter::host::{CpuSet, HostPmu, HostPolicy, HostPolicyError, Minimum, Tenant, TenantId};
use arbiter::{CounterId, CounterSet, MAX_FIXED, MAX_PROGRAMMABLE, Nanos, PerKind};
use serde::Deserialize;
use thiserror::Error;

use crate::audit::AuditConfig;
use crate::scrape::MetricsAddress;

/// What cannot be used, and what would be right. Each prints as one line.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {error}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It is not TOML, or has a key or value that is not allowed.
    #[error("{}:{line}:{column}: {message}", .path.display())]
    Malformed {
        /// The file.
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
        /// The file.
        path: PathBuf,
        /// What it promises.
        error: HostPolicyError,
    },
}

/// A PMU that the configuration states: of a host whose kernel shows none.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PmuConfig {
    /// Its name.
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

/// A user or a group: a number, or a name that the host knows.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Id {
    Number(u32),
    Name(String),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Counters {
    #[serde(default)]
    programmable: u8,
    #[serde(default)]
    fixed: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Most {
    programmable: Option<u8>,
    fixed: Option<u8>,
}

/// A priority: a number, or a class of the file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum Class {
    Number(u8),
    Name(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct TenantConfig {
    name: String,
    #[serde(default)]
    users: Vec<Id>,
    #[serde(default)]
    groups: Vec<Id>,
    #[serde(default)]
    cgroups: Vec<String>,
    #[serde(default)]
    operator: bool,
    #[serde(default = "one")]
    share: u32,
    minimum_cpu: Option<Counters>,
    minimum_thread: Option<Counters>,
    maximum: Option<Most>,
    class: Option<Class>,
    #[serde(default = "yes")]
    guaranteed: bool,
    #[serde(default = "yes")]
    keeps: bool,
    #[serde(default)]
    whole_cpus: Option<bool>,
    cpus: Option<Cpus>,
    longest_ms: Option<u64>,
    most_leases: Option<usize>,
    most_waiting: Option<usize>,
    most_sets: Option<usize>,
    #[serde(default)]
    revokes: Vec<String>,
    #[serde(default)]
    opens_events: bool,
}

/// Who may have the NMI watchdog's counter.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct WatchdogFile {
    #[serde(default = "yes")]
    keep: bool,
    #[serde(rename = "for")]
    only: Option<Vec<String>>,
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

fn one() -> u32 {
    1
}

fn yes() -> bool {
    true
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    grace_ms: Option<u64>,
    patience_ms: Option<u64>,
    claim_window_ms: Option<u64>,
    most_waiting: Option<usize>,
    connections_per_user: Option<usize>,
    requests_per_second: Option<u32>,
    state: Option<PathBuf>,
    watchdog: Option<toml::Spanned<WatchdogFile>>,
    metrics: Option<toml::Spanned<String>>,
    audit: Option<PathBuf>,
    audit_size: Option<u64>,
    audit_keep: Option<u32>,
    audit_age_hours: Option<u64>,
    #[serde(default)]
    classes: BTreeMap<String, u8>,
    #[serde(default)]
    pmu: Vec<toml::Spanned<PmuConfig>>,
    #[serde(default)]
    tenant: Vec<toml::Spanned<TenantConfig>>,
}

/// Whose tenant a client is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Members {
    pub(crate) users: Vec<u32>,
    pub(crate) groups: Vec<u32>,
    /// Paths of control groups; what is below them belongs too.
    pub(crate) cgroups: Vec<String>,
    /// Whether its users may do everything.
    pub(crate) operator: bool,
    /// Whether the arbiter opens perf events for them.
    pub(crate) opens_events: bool,
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
            connections_per_user: 256,
            requests_per_second: 20_000,
            state: None,
            watchdog: WatchdogConfig::default(),
            perf_types: BTreeMap::new(),
            metrics: None,
            audit: None,
            root: PathBuf::from("/"),
        }
    }
}

impl ArbiterConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read or used; the message has line and column.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Read {
            path: path.to_owned(),
            error,
        })?;
        Self::parse(path, &text)
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// It cannot be used; the message has line and column.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let malformed = |at: usize, message: String| {
            let before = text.get(..at).unwrap_or(text);
            let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
            ConfigError::Malformed {
                path: path.to_owned(),
                line: before.matches('\n').count() + 1,
                column: before[line_start..].chars().count() + 1,
                message,
            }
        };
        let file: File = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            malformed(at, error.message().replace('\n', " "))
        })?;
        let ms = |ms: Option<u64>, default: Nanos| {
            ms.map_or(default, |ms| Nanos(ms.saturating_mul(1_000_000)))
        };
        let default = ArbiterConfig::default();
        let mut policy = HostPolicy {
            grace: ms(file.grace_ms, default.policy.grace),
            patience: ms(file.patience_ms, default.policy.patience),
            most_waiting: file.most_waiting.unwrap_or(default.policy.most_waiting),
            tenants: Vec::new(),
        };
        let mut members = Vec::new();
        for tenant in &file.tenant {
            let at = tenant.span().start;
            if tenant.get_ref().name == WATCHDOG {
                let wrong = format!("'{WATCHDOG}' is the kernel's own name; choose another");
                return Err(malformed(at, wrong));
            }
            let rules = tenant
                .get_ref()
                .rules(&file)
                .map_err(|wrong| malformed(at, wrong))?;
            policy.tenants.push(rules);
            members.push(
                tenant
                    .get_ref()
                    .members()
                    .map_err(|wrong| malformed(at, wrong))?,
            );
        }
        if file.tenant.is_empty() {
            (policy.tenants, members) = (default.policy.tenants, default.members);
        }
        policy.check().map_err(|error| ConfigError::Policy {
            path: path.to_owned(),
            error,
        })?;
        let metrics = file.metrics.as_ref().map(|metrics| {
            let address = metrics.get_ref().parse::<MetricsAddress>();
            address.map_err(|wrong| malformed(metrics.span().start, format!("metrics: {wrong}")))
        });
        let audit = file.audit.map(|path| AuditConfig {
            path,
            size: file.audit_size.unwrap_or(16 << 20).max(4096),
            keep: file.audit_keep.unwrap_or(8).max(1),
            age_ms: file
                .audit_age_hours
                .map(|hours| hours.max(1).saturating_mul(3_600_000)),
        });
        let watchdog = match file.watchdog {
            None => WatchdogConfig::default(),
            Some(watchdog) => {
                let names = watchdog.get_ref().only.iter().flatten();
                let unknown = |name: &&String| policy.named(name).is_none();
                if let Some(name) = names.into_iter().find(unknown) {
                    let wrong = format!("[watchdog] for: there is no tenant '{name}'");
                    return Err(malformed(watchdog.span().start, wrong));
                }
                let WatchdogFile { keep, only } = watchdog.into_inner();
                WatchdogConfig {
                    stated: true,
                    keep,
                    only,
                }
            }
        };
        for (index, spanned) in file.pmu.iter().enumerate() {
            let (at, pmu) = (spanned.span().start, spanned.get_ref());
            let before = file.pmu[..index].iter().map(toml::Spanned::get_ref);
            let twice = before.into_iter().any(|other| other.name == pmu.name);
            let none = pmu.programmable == 0 && pmu.fixed == 0;
            let many = pmu.programmable > MAX_PROGRAMMABLE || pmu.fixed > MAX_FIXED;
            let shared = pmu.shared.iter().flatten();
            let mut seen = CpuSet::default();
            for cpus in shared {
                if cpus.0.meets(&seen) {
                    let name = &pmu.name;
                    let wrong =
                        format!("PMU '{name}': a CPU is in two sets of 'shared'; give each once");
                    return Err(malformed(at, wrong));
                }
                cpus.0.iter().for_each(|cpu| seen.insert(cpu));
            }
            if twice || none || many {
                let name = &pmu.name;
                let wrong = match (twice, none) {
                    (true, _) => format!("there are two PMUs named '{name}'; rename one"),
                    (_, true) => format!("PMU '{name}' has no counters; give at least one"),
                    _ => format!("PMU '{name}': at most 32 counters of each kind"),
                };
                return Err(malformed(at, wrong));
            }
        }
        Ok(ArbiterConfig {
            pmus: file
                .pmu
                .into_iter()
                .map(toml::Spanned::into_inner)
                .collect(),
            policy,
            members,
            claim_window: ms(file.claim_window_ms, default.claim_window),
            connections_per_user: file
                .connections_per_user
                .unwrap_or(default.connections_per_user),
            requests_per_second: file
                .requests_per_second
                .unwrap_or(default.requests_per_second)
                .max(1),
            state: file.state,
            watchdog,
            perf_types: BTreeMap::new(),
            metrics: metrics.transpose()?,
            audit,
            root: default.root,
        })
    }

    /// The kernel's number of a PMU.
    pub(crate) fn perf_type(&self, pmu: &str) -> Option<u32> {
        let stated = self.pmus.iter().find(|stated| stated.name == pmu);
        match stated {
            Some(stated) => stated.perf_type,
            None => self.perf_types.get(pmu).copied(),
        }
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
        let mut operator = peer.uid == 0;
        for (id, members) in (0u16..).map(TenantId).zip(&self.members) {
            if members.has(peer) {
                tenants.push(id);
                operator |= members.operator;
            }
        }
        (tenants, operator)
    }
}

impl Members {
    fn has(&self, peer: &crate::peer::Client) -> bool {
        let below = |path: &String| {
            let rest = peer
                .cgroup
                .as_deref()
                .and_then(|cgroup| cgroup.strip_prefix(path.as_str()));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || path.ends_with('/'))
        };
        self.users.contains(&peer.uid)
            || self.groups.iter().any(|group| peer.groups.contains(group))
            || self.cgroups.iter().any(below)
    }
}

impl TenantConfig {
    fn rules(&self, file: &File) -> Result<Tenant, String> {
        let priority = match &self.class {
            None => 0,
            Some(Class::Number(number)) => *number,
            Some(Class::Name(name)) => *file.classes.get(name).ok_or_else(|| {
                let known: Vec<&str> = file.classes.keys().map(String::as_str).collect();
                format!(
                    "tenant '{}': there is no class '{name}'; the table [classes] has: {}",
                    self.name,
                    if known.is_empty() {
                        "none".to_owned()
                    } else {
                        known.join(", ")
                    }
                )
            })?,
        };
        let kinds = |counters: Option<Counters>| {
            let Counters {
                programmable,
                fixed,
            } = counters.unwrap_or_default();
            PerKind {
                programmable,
                fixed,
            }
        };
        let most = |most: Option<u8>| most.unwrap_or(u8::MAX);
        let revokes = self.revokes.iter().map(|name| {
            let place = file
                .tenant
                .iter()
                .position(|tenant| tenant.get_ref().name == *name);
            let id = place
                .and_then(|place| u16::try_from(place).ok())
                .map(TenantId);
            id.ok_or_else(|| {
                format!(
                    "tenant '{}' may revoke leases of '{name}', and there is no such tenant",
                    self.name
                )
            })
        });
        if self.share == 0 {
            return Err(format!("tenant '{}': share is at least 1", self.name));
        }
        Ok(Tenant {
            name: self.name.clone(),
            share: self.share,
            minimum: Minimum {
                cpu: kinds(self.minimum_cpu),
                thread: kinds(self.minimum_thread),
            },
            maximum: PerKind {
                programmable: most(self.maximum.and_then(|maximum| maximum.programmable)),
                fixed: most(self.maximum.and_then(|maximum| maximum.fixed)),
            },
            priority,
            guaranteed: self.guaranteed,
            keeps: self.keeps,
            whole_cpus: self.whole_cpus.unwrap_or(self.operator),
            cpus: self.cpus.as_ref().map(|cpus| cpus.0.clone()),
            longest: self
                .longest_ms
                .map(|ms| Nanos(ms.saturating_mul(1_000_000))),
            most_leases: self.most_leases.unwrap_or(256),
            most_waiting: self.most_waiting.unwrap_or(256),
            most_sets: self.most_sets.unwrap_or(16),
            revokes: revokes.collect::<Result<_, _>>()?,
            gives_way_to: None,
            retired: false,
        })
    }

    fn members(&self) -> Result<Members, String> {
        let find = |ids: &[Id], file: &str, what: &str| -> Result<Vec<u32>, String> {
            let known = || crate::peer::names(Path::new(file));
            ids.iter()
                .map(|id| match id {
                    Id::Number(number) => Ok(*number),
                    Id::Name(name) => known().get(name).copied().ok_or_else(|| {
                        format!(
                            "tenant '{}': {file} has no {what} '{name}'; give its number",
                            self.name
                        )
                    }),
                })
                .collect()
        };
        if self.users.is_empty() && self.groups.is_empty() && self.cgroups.is_empty() {
            return Err(format!(
                "tenant '{}' has no users, groups or cgroups, so nobody could use it",
                self.name
            ));
        }
        Ok(Members {
            users: find(&self.users, "/etc/passwd", "user")?,
            groups: find(&self.groups, "/etc/group", "group")?,
            cgroups: self.cgroups.clone(),
            operator: self.operator,
            opens_events: self.opens_events,
        })
    }
}
