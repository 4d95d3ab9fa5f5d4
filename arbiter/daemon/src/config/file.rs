//! The file: TOML, and what is wrong with it by line and column.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use arbiter::host::{CpuSet, HostPolicy, Minimum, Tenant, TenantId};
use arbiter::{MAX_FIXED, MAX_PROGRAMMABLE, Nanos, PerKind};
use serde::Deserialize;

use super::{ArbiterConfig, ConfigError, Cpus, Members, PmuConfig, WATCHDOG, WatchdogConfig};
use crate::audit::AuditConfig;
use crate::scrape::MetricsAddress;

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

/// A user or a group: a number, or a name that the host knows.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum Id {
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

/// Who may have the NMI watchdog's counter.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct WatchdogFile {
    #[serde(default = "yes")]
    keep: bool,
    #[serde(rename = "for")]
    only: Option<Vec<String>>,
}

fn one() -> u32 {
    1
}

fn yes() -> bool {
    true
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
            ..default
        })
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
