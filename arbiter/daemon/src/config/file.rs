//! The file: TOML, and what is wrong with it by line and column.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use arbiter::{MAX_FIXED, MAX_PROGRAMMABLE, Nanos, PerKind};
use arbiter_host::{CpuSet, HostPolicy, Minimum, Tenant, TenantId};
use nix::errno::Errno;
use nix::unistd::{Group, User};
use serde::Deserialize;

use super::cgroups::CgroupRule;
use super::{ArbiterConfig, ConfigError, Cpus, Members, PmuConfig, WATCHDOG, WatchdogConfig};
use crate::audit::AuditConfig;
use crate::scrape::MetricsAddress;

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    grace_ms: Option<u64>,
    patience_ms: Option<u64>,
    claim_window_ms: Option<u64>,
    arrive_ms: Option<u64>,
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
    cgroups: Vec<toml::Spanned<String>>,
    #[serde(default)]
    operator: bool,
    #[serde(default = "one")]
    share: u32,
    minimum_cpu: Option<Counters>,
    minimum_thread: Option<Counters>,
    maximum: Option<Maximum>,
    class: Option<PriorityClass>,
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
    #[serde(default)]
    for_others: bool,
    #[serde(default)]
    for_cgroups: Vec<toml::Spanned<String>>,
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
struct Maximum {
    programmable: Option<u8>,
    fixed: Option<u8>,
}

/// A priority: a number, or a class of the file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum PriorityClass {
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

/// The fewest bytes of a file of the audit.
const LEAST_AUDIT: u64 = 4096;

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
        let file: File = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            Malformed(at, error.message().replace('\n', " ")).of(path, text)
        })?;
        let malformed = |wrong: Malformed| wrong.of(path, text);
        let default = ArbiterConfig::default();
        let (policy, members) = file.policy(text, &default).map_err(malformed)?;
        policy.check().map_err(|error| ConfigError::Policy {
            path: path.to_owned(),
            error,
        })?;
        let watchdog = file.watchdog(&policy).map_err(malformed)?;
        file.check_pmus().map_err(malformed)?;
        let metrics = file.metrics().map_err(malformed)?;
        Ok(ArbiterConfig {
            doubts: file.doubts(),
            audit: file.audit(),
            policy,
            members,
            claim_window: of_ms(file.claim_window_ms, default.claim_window),
            arrive: of_ms(file.arrive_ms, default.arrive),
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
            metrics,
            pmus: file
                .pmu
                .into_iter()
                .map(toml::Spanned::into_inner)
                .collect(),
            ..default
        })
    }
}

/// What is wrong with a file, and at which byte.
struct Malformed(usize, String);

impl Malformed {
    fn of(self, path: &Path, text: &str) -> ConfigError {
        let Malformed(at, message) = self;
        let before = text.get(..at).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        ConfigError::Malformed {
            path: path.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            message,
        }
    }
}

fn of_ms(ms: Option<u64>, default: Nanos) -> Nanos {
    ms.map_or(default, |ms| Nanos(ms.saturating_mul(1_000_000)))
}

impl File {
    /// The rules, and who is which tenant. `text`: the whole file's.
    fn policy(
        &self,
        text: &str,
        default: &ArbiterConfig,
    ) -> Result<(HostPolicy, Vec<Members>), Malformed> {
        let mut policy = HostPolicy {
            grace: of_ms(self.grace_ms, default.policy.grace),
            patience: of_ms(self.patience_ms, default.policy.patience),
            most_waiting: self.most_waiting.unwrap_or(default.policy.most_waiting),
            tenants: Vec::new(),
        };
        if self.tenant.is_empty() {
            policy.tenants.clone_from(&default.policy.tenants);
            return Ok((policy, default.members.clone()));
        }
        let mut members = Vec::new();
        for spanned in &self.tenant {
            let (at, tenant) = (spanned.span().start, spanned.get_ref());
            let wrong = |wrong| Malformed(at, wrong);
            if tenant.name == WATCHDOG {
                let why = format!("'{WATCHDOG}' is the kernel's own name; choose another");
                return Err(wrong(why));
            }
            policy.tenants.push(tenant.rules(self).map_err(wrong)?);
            members.push(tenant.members(text).map_err(wrong)?);
        }
        Ok((policy, members))
    }

    fn metrics(&self) -> Result<Option<MetricsAddress>, Malformed> {
        let metrics = self.metrics.as_ref().map(|metrics| {
            let address = metrics.get_ref().parse::<MetricsAddress>();
            address.map_err(|wrong| Malformed(metrics.span().start, format!("metrics: {wrong}")))
        });
        metrics.transpose()
    }

    fn audit(&self) -> Option<AuditConfig> {
        Some(AuditConfig {
            path: self.audit.clone()?,
            size: self.audit_size.unwrap_or(16 << 20).max(LEAST_AUDIT),
            keep: self.audit_keep.unwrap_or(8).max(1),
            age_ms: self
                .audit_age_hours
                .map(|hours| hours.max(1).saturating_mul(3_600_000)),
        })
    }

    fn watchdog(&self, policy: &HostPolicy) -> Result<WatchdogConfig, Malformed> {
        let Some(watchdog) = &self.watchdog else {
            return Ok(WatchdogConfig::default());
        };
        let WatchdogFile { keep, only } = watchdog.get_ref();
        let mut names = only.iter().flatten();
        if let Some(name) = names.find(|name| policy.named(name).is_none()) {
            let wrong = format!("[watchdog] for: there is no tenant '{name}'");
            return Err(Malformed(watchdog.span().start, wrong));
        }
        Ok(WatchdogConfig {
            stated: true,
            keep: *keep,
            only: only.clone(),
        })
    }

    fn check_pmus(&self) -> Result<(), Malformed> {
        for (index, spanned) in self.pmu.iter().enumerate() {
            let before = self.pmu[..index].iter().map(toml::Spanned::get_ref);
            let checked = check_pmu(spanned.get_ref(), before);
            checked.map_err(|wrong| Malformed(spanned.span().start, wrong))?;
        }
        Ok(())
    }

    /// What it says to no effect.
    fn doubts(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        let of_audit = [
            ("audit-size", self.audit_size.is_some()),
            ("audit-keep", self.audit_keep.is_some()),
            ("audit-age-hours", self.audit_age_hours.is_some()),
        ];
        for (key, _) in of_audit
            .iter()
            .filter(|(_, given)| *given && self.audit.is_none())
        {
            doubts.push(format!(
                "{key} is of no use without an audit: give audit = \"FILE\""
            ));
        }
        if self.audit_size.is_some_and(|size| size < LEAST_AUDIT) {
            doubts.push(format!(
                "audit-size is taken for {LEAST_AUDIT}, the least; give that, or more"
            ));
        }
        for (key, given) in [
            ("audit-keep", self.audit_keep.map(u64::from)),
            ("audit-age-hours", self.audit_age_hours),
            (
                "requests-per-second",
                self.requests_per_second.map(u64::from),
            ),
        ] {
            if given == Some(0) {
                doubts.push(format!(
                    "{key} is taken for 1, the least; give that, or more"
                ));
            }
        }
        if self.connections_per_user == Some(0) {
            doubts.push("connections-per-user = 0 lets nobody connect; give at least 1".to_owned());
        }
        doubts.extend(self.void_times());
        let tenants = self.tenant.iter().map(toml::Spanned::get_ref);
        doubts.extend(tenants.filter_map(|tenant| tenant.void_limit(self.most_waiting)));
        let classes = self.tenant.iter().map(|tenant| &tenant.get_ref().class);
        let used: Vec<&String> = classes
            .filter_map(|class| match class {
                Some(PriorityClass::Name(name)) => Some(name),
                _ => None,
            })
            .collect();
        for name in self.classes.keys().filter(|name| !used.contains(name)) {
            doubts.push(format!(
                "no tenant is of class '{name}'; give it to one (class = \"{name}\"), or leave it out"
            ));
        }
        doubts.extend(self.void_watchdog());
        doubts
    }

    /// Times that leave nothing.
    fn void_times(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        if self.arrive_ms == Some(0) {
            doubts.push(
                "arrive-ms = 0 ends each lease of a control group in which nothing runs yet; give \
                 the time in which something comes"
                    .to_owned(),
            );
        }
        if self.claim_window_ms == Some(0) && self.state.is_some() {
            doubts.push(
                "claim-window-ms = 0 gives no holder time to come back after a restart, so state \
                 is of no use; give at least 1000"
                    .to_owned(),
            );
        }
        doubts
    }

    /// What of the watchdog nobody gets.
    fn void_watchdog(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        let watchdog = self.watchdog.as_ref().map(toml::Spanned::get_ref);
        match watchdog.map(|watchdog| (watchdog.keep, watchdog.only.as_deref())) {
            Some((true, Some(_))) => doubts.push(
                "[watchdog] for is of no use while keep = true: give keep = false, or leave it out"
                    .to_owned(),
            ),
            Some((false, Some([]))) => doubts.push(
                "[watchdog] for = [] lets no tenant have the counter; name one, or give keep = true"
                    .to_owned(),
            ),
            Some((false, Some(names))) => {
                let tenants = self.tenant.iter().map(toml::Spanned::get_ref);
                let never = tenants
                    .filter(|tenant| !tenant.guaranteed && names.contains(&tenant.name))
                    .map(|tenant| {
                        format!(
                            "[watchdog] for names tenant '{}', whose leases are never guaranteed, \
                             and only such take the counter; leave it out, or its guaranteed = false",
                            tenant.name
                        )
                    });
                doubts.extend(never);
            }
            _ => {}
        }
        doubts
    }
}

/// `before`: those that the file has before this one.
fn check_pmu<'a>(
    pmu: &PmuConfig,
    mut before: impl Iterator<Item = &'a PmuConfig>,
) -> Result<(), String> {
    let name = &pmu.name;
    let mut seen = CpuSet::default();
    for Cpus(cpus) in pmu.shared.iter().flatten() {
        if cpus.meets(&seen) {
            return Err(format!(
                "PMU '{name}': a CPU is in two sets of 'shared'; give each once"
            ));
        }
        cpus.iter().for_each(|cpu| seen.insert(cpu));
    }
    if before.any(|other| other.name == *name) {
        return Err(format!("there are two PMUs named '{name}'; rename one"));
    }
    if pmu.programmable == 0 && pmu.fixed == 0 {
        return Err(format!("PMU '{name}' has no counters; give at least one"));
    }
    if pmu.programmable > MAX_PROGRAMMABLE || pmu.fixed > MAX_FIXED {
        return Err(format!("PMU '{name}': at most 32 counters of each kind"));
    }
    Ok(())
}

impl TenantConfig {
    /// A number of requests that wait which limits nothing. `of_all`: the one of all tenants.
    fn void_limit(&self, of_all: Option<usize>) -> Option<String> {
        let waiting = self.most_waiting?;
        let [what, most] = [
            ("all tenants together may have (most-waiting)", of_all),
            (
                "it may have of all its leases (most-leases)",
                self.most_leases,
            ),
        ]
        .into_iter()
        .find_map(|(what, most)| {
            Some([
                what.to_owned(),
                most.filter(|most| *most < waiting)?.to_string(),
            ])
        })?;
        Some(format!(
            "tenant '{}': most-waiting = {waiting} is more than the {most} that {what}, and limits \
             nothing; lower it, or leave it out",
            self.name
        ))
    }

    fn priority(&self, classes: &BTreeMap<String, u8>) -> Result<u8, String> {
        match &self.class {
            None => Ok(0),
            Some(PriorityClass::Number(number)) => Ok(*number),
            Some(PriorityClass::Name(name)) => classes.get(name).copied().ok_or_else(|| {
                let known: Vec<&str> = classes.keys().map(String::as_str).collect();
                format!(
                    "tenant '{}': there is no class '{name}'; the table [classes] has: {}",
                    self.name,
                    if known.is_empty() {
                        "none".to_owned()
                    } else {
                        known.join(", ")
                    }
                )
            }),
        }
    }

    fn rules(&self, file: &File) -> Result<Tenant, String> {
        let priority = self.priority(&file.classes)?;
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

    /// `text`: the whole file's.
    fn members(&self, text: &str) -> Result<Members, String> {
        if self.users.is_empty() && self.groups.is_empty() && self.cgroups.is_empty() {
            return Err(format!(
                "tenant '{}' has no users, groups or cgroups, so nobody could use it",
                self.name
            ));
        }
        let user = |name: &str| Ok(User::from_name(name)?.map(|user| user.uid.as_raw()));
        let group = |name: &str| Ok(Group::from_name(name)?.map(|group| group.gid.as_raw()));
        let rules = |paths: &[toml::Spanned<String>]| {
            let rule = |path: &toml::Spanned<String>| {
                let written = text.get(path.span()).unwrap_or_default();
                CgroupRule::new(path.get_ref(), written)
            };
            paths.iter().map(rule).collect()
        };
        Ok(Members {
            users: self.numbers(&self.users, "user", "passwd", user)?,
            groups: self.numbers(&self.groups, "group", "group", group)?,
            cgroups: rules(&self.cgroups),
            operator: self.operator,
            opens_events: self.opens_events,
            for_others: self.for_others,
            for_cgroups: rules(&self.for_cgroups),
        })
    }

    /// The numbers of users or groups, by the sources that the host is set up with
    /// (nsswitch.conf(5)).
    fn numbers(
        &self,
        ids: &[Id],
        what: &str,
        database: &str,
        find: impl Fn(&str) -> Result<Option<u32>, Errno>,
    ) -> Result<Vec<u32>, String> {
        let number = |id: &Id| match id {
            Id::Number(number) => Ok(*number),
            Id::Name(name) => match find(name) {
                Ok(Some(number)) => Ok(number),
                // getpwnam(3) and getgrnam(3): what sources say of a name that they do not have.
                Ok(None) | Err(Errno::ENOENT | Errno::ESRCH) => Err(format!(
                    "tenant '{}': the host has no {what} '{name}' (getent {database} '{name}'); \
                     give its number, or make it",
                    self.name
                )),
                Err(error) => Err(format!(
                    "tenant '{}': {what} '{name}' cannot be looked up: {}; see that /etc/{database} \
                     and the sources in /etc/nsswitch.conf can be read, or give its number",
                    self.name,
                    error.desc()
                )),
            },
        };
        ids.iter().map(number).collect()
    }
}
