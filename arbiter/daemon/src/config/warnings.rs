//! Rules that can never apply, or do not apply to anybody now: what is said of them to who
//! checks a configuration, and in the log.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use arbiter::{CounterSet, PerKind};
use arbiter_host::{CpuSet, Tenant};
use nix::errno::Errno;
use nix::unistd::{Gid, Group, Uid, User};
use umpire_service::unmapped_numbers;

use super::cgroups::{CgroupRule, hierarchies};
use super::{ArbiterConfig, Cpus, Members, PmuConfig};
use crate::sysfs;

/// The kernel's switch of its NMI watchdog, below the root.
const NMI_WATCHDOG: &str = "proc/sys/kernel/nmi_watchdog";
/// The kernel's PMUs, below the root.
const PMUS: &str = "sys/bus/event_source/devices";

/// What a configuration says to no effect on this host as it is now.
pub(super) fn of(config: &ArbiterConfig) -> Vec<String> {
    let mut all = config.doubts.clone();
    let there = match sysfs::present(&config.root) {
        Ok(there) => there,
        Err(error) => {
            all.push(format!(
                "the host's CPUs cannot be read, so lists of CPUs are not checked: {error}"
            ));
            (0..CpuSet::LIMIT).collect()
        }
    };
    let mounted = hierarchies(&config.root);
    for (tenant, members) in config.policy.tenants.iter().zip(&config.members) {
        let about = |what: String| format!("tenant '{}': {what}", tenant.name);
        let nobody = members.warnings(&mounted);
        all.extend(nobody.into_iter().map(about));
        all.extend(
            of_rules(config, tenant, members, &there)
                .into_iter()
                .map(about),
        );
    }
    let switch = config.root.join(NMI_WATCHDOG);
    let is_missing = matches!(fs::exists(&switch), Ok(false));
    // Where not even its folder is seen nothing is known.
    if !config.watchdog.keep && is_missing && switch.parent().is_some_and(Path::exists) {
        all.push(format!(
            "[watchdog] is of no use: this kernel has no NMI watchdog (/{NMI_WATCHDOG}); leave it out"
        ));
    }
    let types = perf_types(&config.root);
    for pmu in &config.pmus {
        all.extend(
            of_pmu(pmu, &there)
                .into_iter()
                .chain(of_perf_type(pmu, &types))
                .map(|what| format!("PMU '{}': {what}", pmu.name)),
        );
    }
    all
}

/// Limits that leave nothing, and rules that others make void.
fn of_rules(
    config: &ArbiterConfig,
    tenant: &Tenant,
    members: &Members,
    there: &CpuSet,
) -> Vec<String> {
    let all = void_rules(config, tenant, members);
    let all = all.into_iter().filter(|(is, _)| *is);
    let mut wrong: Vec<String> = all.map(|(_, what)| what.to_owned()).collect();
    if let Some(cpus) = &tenant.cpus {
        wrong.extend(of_cpus(config, cpus, there));
    }
    wrong
}

/// Each with whether it is so.
fn void_rules(
    config: &ArbiterConfig,
    tenant: &Tenant,
    members: &Members,
) -> [(bool, &'static str); 10] {
    let nothing = |kinds: PerKind| kinds == PerKind::default();
    let stated = !config.pmus.is_empty();
    let all = |is: fn(&PmuConfig) -> bool| stated && config.pmus.iter().all(is);
    let most = tenant.maximum;
    let above = |most: u8, of: fn(&PmuConfig) -> u8| {
        most != u8::MAX && stated && config.pmus.iter().all(|pmu| of(pmu) < most)
    };
    let own = config.policy.named(&tenant.name);
    [
        (
            tenant.most_leases == 0,
            "most-leases = 0 lets it have no lease; give at least 1",
        ),
        (
            tenant.most_sets == 0,
            "most-sets = 0 refuses all that names counters, or an event that only some of \
                 them count; give at least 1",
        ),
        (
            nothing(most),
            "its maximum lets it have no counter; give it at least one of a kind",
        ),
        (
            above(most.programmable, |pmu| pmu.programmable) || above(most.fixed, |pmu| pmu.fixed),
            "its maximum is more than any [[pmu]] has, and limits nothing; lower it, or leave \
                 it out",
        ),
        (
            tenant.longest.is_some_and(|longest| longest.0 == 0),
            "longest-ms = 0 lets no lease last; give at least 1",
        ),
        (
            !tenant.whole_cpus && !nothing(tenant.minimum.cpu),
            "minimum-cpu is kept for leases of scope cpu, which it may not have; give \
                 whole-cpus = true, or minimum-thread",
        ),
        (
            members.operator && !tenant.revokes.is_empty(),
            "it may revoke all leases, as an operator; leave out revokes",
        ),
        (
            own.is_some_and(|own| tenant.revokes.contains(&own)),
            "it may revoke its own leases anyway; leave its name out of revokes",
        ),
        (
            members.opens_events && all(|pmu| pmu.perf_type.is_none()),
            "opens-events is of no use while no [[pmu]] has a perf-type; give the kernel's \
                 number of it",
        ),
        (
            !tenant.whole_cpus && all(|pmu| pmu.shared.is_some()),
            "counters that CPUs share are given to leases of scope cpu alone, which it may \
                 not have; give whole-cpus = true",
        ),
    ]
}

/// CPUs that have no counters, or that there are not.
fn of_cpus(config: &ArbiterConfig, cpus: &CpuSet, there: &CpuSet) -> Vec<String> {
    let mut wrong = Vec::new();
    let of_pmus = config.pmus.iter().map(|pmu| cpus_of(pmu, there));
    let of_pmus: CpuSet = of_pmus
        .flat_map(|cpus| cpus.iter().collect::<Vec<_>>())
        .collect();
    let known: CpuSet = there.iter().chain(of_pmus.iter()).collect();
    if !config.pmus.is_empty() && !cpus.meets(&of_pmus) && cpus.meets(&known) {
        wrong.push(format!(
            "no [[pmu]] has any of its cpus {cpus}, so it gets no counter; name some of \
                 {of_pmus}"
        ));
    }
    let missing = cpus.without(&known);
    if !missing.is_empty() {
        wrong.push(format!(
            "its cpus have {missing}, which the host does not; it has {there}"
        ));
    }
    wrong
}
impl Members {
    /// Who is meant, and is not there.
    fn warnings(&self, mounted: &io::Result<Vec<PathBuf>>) -> Vec<String> {
        let mut wrong = Vec::new();
        let unmapped = unmapped_numbers();
        for &uid in &self.users {
            let found = User::from_uid(Uid::from_raw(uid)).map(|user| user.is_some());
            wrong.extend(of_number("user", uid, found, unmapped.0));
        }
        for &gid in &self.groups {
            let found = Group::from_gid(Gid::from_raw(gid)).map(|group| group.is_some());
            wrong.extend(of_number("group", gid, found, unmapped.1));
        }
        // A number may be used without a name.
        let named = self.users.len() + self.groups.len();
        let of_rules = self.cgroups.iter().map(|rule| of_cgroup(rule, mounted));
        let of_rules: Vec<Option<String>> = of_rules.collect();
        let nobody = named == 0 && !of_rules.is_empty() && of_rules.iter().all(Option::is_some);
        wrong.extend(of_rules.into_iter().flatten());
        if nobody {
            wrong.push("none of its control groups is there, so nobody can use it now".to_owned());
        }
        let asked_for = self.for_cgroups.iter();
        wrong.extend(asked_for.filter_map(|rule| of_cgroup(rule, mounted)));
        if self.for_others && mounted.as_ref().is_ok_and(Vec::is_empty) {
            wrong.push(
                "for-others is for leases of control groups, and the unified hierarchy (cgroup2) \
                 is not mounted here"
                    .to_owned(),
            );
        }
        wrong
    }
}

fn of_number(
    what: &str,
    number: u32,
    found: Result<bool, Errno>,
    shared: Option<u32>,
) -> Option<String> {
    if number == u32::MAX {
        return Some(format!(
            "{number} is no {what}'s number (it stands for none); leave it out"
        ));
    }
    if shared == Some(number) {
        return Some(format!(
            "{what} {number} stands for all that the arbiter's user namespace does not know, and is \
             given nothing; map it, or run the arbiter in the host's namespace"
        ));
    }
    match found {
        Ok(true) => None,
        Ok(false) | Err(Errno::ENOENT | Errno::ESRCH) => Some(format!(
            "no {what} of the host has the number {number} now; see that it is the one that is meant"
        )),
        Err(error) => Some(format!(
            "{what} {number} cannot be looked up: {}",
            error.desc()
        )),
    }
}

fn of_cgroup(rule: &CgroupRule, mounted: &io::Result<Vec<PathBuf>>) -> Option<String> {
    let path = rule.path();
    if let Some(why) = rule.impossible() {
        return Some(format!(
            "control group '{path}' cannot exist: {why}; {}",
            rule.hint()
        ));
    }
    let unchecked = |why: &dyn std::fmt::Display| {
        Some(format!(
            "control group '{path}' cannot be looked for: {why}"
        ))
    };
    match mounted {
        Err(error) => unchecked(&format_args!("the mounts cannot be read: {error}")),
        Ok(mounted) if mounted.is_empty() => {
            unchecked(&"the unified hierarchy (cgroup2) is not mounted here")
        }
        Ok(mounted) => match rule.is_there(mounted) {
            Ok(true) => None,
            Ok(false) => Some(format!(
                "control group '{path}' does not exist now; {}",
                rule.hint()
            )),
            Err(error) => unchecked(&error),
        },
    }
}

/// The CPUs that a PMU is of.
fn cpus_of(pmu: &PmuConfig, there: &CpuSet) -> CpuSet {
    match (&pmu.shared, &pmu.cpus) {
        (Some(shared), _) => shared.iter().flat_map(|cpus| cpus.0.iter()).collect(),
        (None, Some(Cpus(cpus))) => cpus.clone(),
        (None, None) => there.clone(),
    }
}

/// The numbers by which the kernel knows its PMUs now.
fn perf_types(root: &Path) -> io::Result<Vec<u32>> {
    let mut types = Vec::new();
    for entry in fs::read_dir(root.join(PMUS))? {
        let number = fs::read(entry?.path().join("type"));
        let number = number.ok().and_then(|bytes| {
            let text = std::str::from_utf8(&bytes).ok()?;
            text.trim().parse::<u32>().ok()
        });
        types.extend(number);
    }
    Ok(types)
}

/// No event of a number that no PMU has can be opened.
fn of_perf_type(pmu: &PmuConfig, types: &io::Result<Vec<u32>>) -> Option<String> {
    /// `PERF_TYPE_HARDWARE`, `PERF_TYPE_HW_CACHE` and `PERF_TYPE_RAW` of perf_event_open(2): the
    /// core's PMU by other numbers, which has the last in sysfs.
    const OF_CORE: [u32; 3] = [0, 3, 4];
    let number = pmu.perf_type?;
    match types {
        Err(error) => Some(format!(
            "perf-type = {number} cannot be looked for in /{PMUS}: {error}"
        )),
        Ok(types) => {
            let is_core = OF_CORE.contains(&number) && types.contains(&OF_CORE[2]);
            (!is_core && !types.contains(&number)).then(|| {
                format!(
                    "perf-type = {number}: the kernel has no PMU of that number now \
                     (/{PMUS}/*/type), so no event of it can be opened; give that of one that it has"
                )
            })
        }
    }
}

/// CPUs and counters that are not there.
fn of_pmu(pmu: &PmuConfig, there: &CpuSet) -> Vec<String> {
    let mut wrong = Vec::new();
    if pmu.cpus.is_some() && pmu.shared.is_some() {
        wrong
            .push("cpus is of no use beside shared, which names its CPUs; leave it out".to_owned());
    }
    let missing = cpus_of(pmu, there).without(there);
    if !missing.is_empty() {
        wrong.push(format!(
            "its cpus have {missing}, which the host does not; it has {there}"
        ));
    }
    let counters = CounterSet::first(pmu.programmable, pmu.fixed);
    for (event, names) in &pmu.events {
        let can: CounterSet = names.iter().map(|name| name.0).collect();
        if (can & counters).is_empty() {
            wrong.push(format!(
                "no counter of it can count event '{event}': name one of its {} programmable and {} \
                 fixed-function counters",
                pmu.programmable, pmu.fixed
            ));
        } else if !(can & !counters).is_empty() {
            wrong.push(format!(
                "event '{event}' names counters that it does not have; name some of its {} \
                 programmable and {} fixed-function counters",
                pmu.programmable, pmu.fixed
            ));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings(text: &str) -> String {
        let config = ArbiterConfig::parse("test".as_ref(), text).expect("a configuration");
        let there = CpuSet::from_iter(0..8);
        let tenant = &config.policy.tenants[0];
        of_rules(&config, tenant, &config.members[0], &there).join("; ")
    }

    #[test]
    fn a_tenant_whose_cpus_have_no_pmu_is_warned_of() {
        let tenant = "[[tenant]]\nname = \"a\"\nusers = [0]\nwhole-cpus = true\n";
        let pmu = "[[pmu]]\nprogrammable = 4\n";
        let shared = "shared = [\"0-1\", \"2-3\"]\n";
        let said = "no [[pmu]] has any of its cpus 4-7, so it gets no counter; name some of 0-3";
        for of_pmu in ["cpus = \"0-3\"\n", shared] {
            let text = format!("{pmu}{of_pmu}{tenant}cpus = \"4-7\"\n");
            assert_eq!(warnings(&text), said);
            for cpus in ["3-7", "0-3"] {
                let text = format!("{pmu}{of_pmu}{tenant}cpus = \"{cpus}\"\n");
                assert_eq!(warnings(&text), "", "{cpus}");
            }
        }
        let other = "[[pmu]]\nname = \"other\"\nprogrammable = 2\n";
        for pmus in ["", other] {
            let text = format!("{pmus}{tenant}cpus = \"4-7\"\n");
            assert_eq!(warnings(&text), "");
        }
        let text = format!("{pmu}cpus = \"0-3\"\n{other}{tenant}cpus = \"4-7\"\n");
        assert_eq!(warnings(&text), "");
        // What is not there at all is said once.
        let text = format!("{pmu}{tenant}cpus = \"8-9\"\n");
        assert_eq!(
            warnings(&text),
            "its cpus have 8-9, which the host does not; it has 0-7"
        );
        let whole = tenant.replace("true", "false");
        assert!(warnings(&format!("{pmu}{shared}{whole}")).starts_with("counters that CPUs share"));
        assert_eq!(warnings(&format!("{pmu}{shared}{other}{whole}")), "");
        let text = format!("{pmu}{shared}cpus = \"0-7\"\n{tenant}");
        let config = ArbiterConfig::parse("test".as_ref(), &text).expect("a configuration");
        let said = of_pmu(&config.pmus[0], &CpuSet::from_iter(0..8)).join("; ");
        assert!(
            said.starts_with("cpus is of no use beside shared"),
            "{said}"
        );
        let text = format!("{pmu}{tenant}most-sets = 0\n");
        assert!(warnings(&text).starts_with("most-sets = 0 refuses all"));
    }

    #[test]
    fn a_number_that_no_pmu_has_is_warned_of() {
        let root = tempfile::tempdir().expect("a folder");
        let said = |number: u32| {
            let pmu = PmuConfig {
                perf_type: Some(number),
                ..PmuConfig::stated(4, 0).expect("counters")
            };
            of_perf_type(&pmu, &perf_types(root.path())).unwrap_or_default()
        };
        assert!(said(4).contains("cannot be looked for"), "{}", said(4));
        for (name, number) in [("cpu", "4\n"), ("breakpoint", "5\n"), ("odd", "B\u{fc}\n")] {
            let folder = root.path().join(PMUS).join(name);
            fs::create_dir_all(&folder).expect("a folder");
            fs::write(folder.join("type"), number).expect("a file");
        }
        for there in [0, 3, 4, 5] {
            assert_eq!(said(there), "", "{there}");
        }
        assert!(said(99).contains("no PMU of that number"));
        fs::remove_dir_all(root.path().join(PMUS).join("cpu")).expect("it was there");
        assert!(said(0).contains("no PMU of that number"));
    }
}
