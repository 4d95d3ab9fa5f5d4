//! Leases as tables for people.

use std::collections::BTreeMap;
use std::io::{self, Write};

use umpire_lease::{
    Counters, ExplainOut, Fate, Lease, LeaseScope, LeasedGroup, Outsider, OutsiderKind, Standing,
    WhoOut,
};

use crate::table::indented;

/// A time for people.
fn time(ms: u64) -> String {
    match ms {
        0..1000 => format!("{ms}ms"),
        1000..60_000 => format!("{}.{}s", ms / 1000, ms % 1000 / 100),
        60_000..3_600_000 => format!("{}m{:02}s", ms / 60_000, ms % 60_000 / 1000),
        _ => format!("{}h{:02}m", ms / 3_600_000, ms % 3_600_000 / 60_000),
    }
}

/// Counters as few words: `2 programmable, 1 fixed (FIXED1)`.
pub(super) fn counters(counters: &[Counters]) -> String {
    let mut kinds: BTreeMap<(usize, String), usize> = BTreeMap::new();
    for (place, one) in counters.iter().enumerate() {
        let mut name = one
            .kind
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default();
        if let Some(among) = &one.among {
            name = format!("{name} ({})", among.join("|"));
        }
        if let Some(pmu) = one.pmu.as_deref().filter(|pmu| *pmu != "cpu") {
            name = format!("{name} of {pmu}");
        }
        let first = kinds.keys().find(|(_, known)| *known == name).cloned();
        *kinds.entry(first.unwrap_or((place, name))).or_default() += 1;
    }
    let each = kinds
        .into_iter()
        .map(|((_, name), count)| format!("{count} {name}"));
    each.collect::<Vec<_>>().join(", ")
}

fn name(lease: &Lease) -> String {
    match lease.label.as_str() {
        "" if lease.pid == 0 => "another user's".to_owned(),
        "" => whose(lease),
        label => label.to_owned(),
    }
}

/// The process that holds a lease; the arbiter tells it to root, to operators, and to its own user.
/// One of a control group is held by none: who asked for it has ended by now.
fn process(lease: &Lease) -> String {
    match (&lease.scope, lease.pid) {
        (LeaseScope::Cgroup, _) | (_, 0) => "-".to_owned(),
        (_, pid) => pid.to_string(),
    }
}

/// Whose it is, in a word.
fn whose(lease: &Lease) -> String {
    match (&lease.scope, lease.uid) {
        (LeaseScope::Cgroup, u32::MAX) => "user -".to_owned(),
        (LeaseScope::Cgroup, uid) => format!("user {uid}"),
        _ => format!("process {}", process(lease)),
    }
}

fn holds(lease: &Lease) -> String {
    match lease.state {
        Standing::Waits => format!("waits for {}", lease.wants),
        Standing::Short => format!("{} of {}", lease.holds, lease.wants),
        Standing::Unclaimed => format!("{}, unclaimed", lease.holds),
        _ => lease.holds.to_string(),
    }
}

fn rank(lease: &Lease) -> String {
    let firmness = match (lease.guaranteed, lease.preemptible) {
        (false, _) => "best effort",
        (true, true) => "preemptible",
        (true, false) => "guaranteed",
    };
    format!("{firmness}, {}", lease.priority)
}

/// What will become of it, and what is wrong.
fn remarks(lease: &Lease) -> String {
    let mut remarks = Vec::new();
    if let Some(leaving) = &lease.leaving {
        let left = time(leaving.in_ms);
        remarks.push(format!(
            "will hold {} in {left}: {}",
            leaving.to, leaving.why
        ));
    }
    if let Some(broken) = lease.broken_ms {
        remarks.push(format!(
            "an outsider has its counters since {}",
            time(broken)
        ));
    }
    if lease.blind_ms > 0 {
        remarks.push(format!("lacked counters for {}", time(lease.blind_ms)));
    }
    remarks.join("; ")
}

/// Out of which lease it is taken, of the control group that its holder runs in.
pub(super) fn out_of(lease: &Lease) -> String {
    let within = lease.within;
    within.map_or_else(String::new, |above| {
        format!("out of lease {above}, of the control group that it is in")
    })
}

/// Which control group it is for, and who asked, if that was not its owner.
fn of_group(group: &LeasedGroup) -> String {
    let path = &group.path;
    match (&group.by_tenant, group.by_uid) {
        (Some(tenant), Some(uid)) => {
            format!("control group {path}, asked for by user {uid} of '{tenant}'")
        }
        _ => format!("control group {path}"),
    }
}

/// All that is to be said of a lease besides its figures.
fn notes(lease: &Lease, group: Option<&LeasedGroup>) -> String {
    let parts = [
        group.map(of_group).unwrap_or_default(),
        out_of(lease),
        remarks(lease),
    ];
    let parts = parts.into_iter().filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("; ")
}

pub(super) fn leases(
    leases: &[Lease],
    groups: &BTreeMap<u64, &LeasedGroup>,
    out: &mut dyn Write,
) -> io::Result<()> {
    if leases.is_empty() {
        return writeln!(out, "nobody holds a lease");
    }
    let row = |lease: &Lease| {
        vec![
            lease.id.to_string(),
            lease.tenant.clone(),
            name(lease),
            process(lease),
            counters(&lease.counters),
            lease.cpus.clone(),
            lease.scope.to_string(),
            holds(lease),
            rank(lease),
            lease.held_ms.map(time).unwrap_or_default(),
            lease.left_ms.map_or_else(|| "-".to_owned(), time),
            notes(lease, groups.get(&lease.id).copied()),
        ]
    };
    let heads = [
        "LEASE", "TENANT", "NAME", "PID", "COUNTERS", "CPUS", "SCOPE", "HOLDS", "RANK", "SINCE",
        "UNTIL", "",
    ];
    indented(&heads, leases.iter().map(row).collect(), out)
}

pub(super) fn places(
    answer: &WhoOut,
    groups: &[LeasedGroup],
    out: &mut dyn Write,
) -> io::Result<()> {
    let groups: BTreeMap<u64, &LeasedGroup> =
        groups.iter().map(|group| (group.lease, group)).collect();
    for place in &answer.places {
        write!(
            out,
            "CPU {}, {}: {} programmable",
            place.cpus, place.pmu, place.programmable
        )?;
        if place.fixed > 0 {
            write!(out, ", {} fixed", place.fixed)?;
        }
        match place.outside {
            0 => writeln!(out)?,
            count => writeln!(out, "; {count} used by somebody who has no lease")?,
        }
        let row = |lease: &Lease| {
            let held = usize::try_from(lease.holds).unwrap_or(usize::MAX);
            let of_pmu = lease.counters.iter().take(held);
            let of_pmu = of_pmu.filter(|one| one.pmu.as_deref() == Some(&place.pmu));
            let of_pmu: Vec<Counters> = of_pmu.cloned().collect();
            vec![
                counters(&of_pmu),
                name(lease),
                lease.tenant.clone(),
                format!("lease {}", lease.id),
                whose(lease),
                match lease.scope {
                    LeaseScope::Thread => "while its threads run".to_owned(),
                    LeaseScope::Cgroup => "while its control group runs".to_owned(),
                    _ => String::new(),
                },
                lease.held_ms.map(time).unwrap_or_default(),
                lease.left_ms.map_or_else(|| "-".to_owned(), time),
                notes(lease, groups.get(&lease.id).copied()),
            ]
        };
        if place.leases.is_empty() {
            writeln!(out, "  nobody holds a lease here")?;
        } else {
            let heads = ["HELD", "BY", "TENANT", "", "", "", "SINCE", "UNTIL", ""];
            indented(&heads, place.leases.iter().map(row).collect(), out)?;
        }
    }
    let barred = |outsider: &&Outsider| outsider.what == OutsiderKind::Barred;
    for user in answer.outsiders.iter().filter(barred) {
        writeln!(out, "Barred: {}", user.name)?;
    }
    let outsiders = answer.outsiders.iter().filter(|one| !barred(one));
    if answer.places.iter().any(|place| place.outside > 0) {
        unleased(&outsiders.collect::<Vec<_>>(), out)?;
    }
    Ok(())
}

/// Who may have the counters that no lease explains.
fn unleased(outsiders: &[&Outsider], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "Who has no lease, and may use counters:")?;
    for outsider in outsiders {
        let pid = outsider
            .pid
            .map(|pid| format!(" (process {pid})"))
            .unwrap_or_default();
        let events = outsider.events.filter(|events| *events > 0);
        let events = events
            .map(|events| format!(", {events} perf events open"))
            .unwrap_or_default();
        let cpus = outsider
            .cpus
            .as_ref()
            .map(|cpus| format!(", CPUs {cpus}"))
            .unwrap_or_default();
        writeln!(out, "  {}{pid}{events}{cpus}", outsider.name)?;
    }
    if outsiders.is_empty() {
        writeln!(out, "  nobody that the kernel shows: firmware or unknown")?;
    }
    Ok(())
}

/// What would become of a request.
pub(super) fn explained(answer: &ExplainOut, out: &mut dyn Write) -> io::Result<()> {
    match (&answer.lease, &answer.outcome) {
        (Some(lease), Fate::Granted) => writeln!(
            out,
            "It would be granted: {} of {} counters ({}) on CPUs {} for tenant '{}'.",
            lease.holds,
            lease.wants,
            counters(&lease.counters),
            lease.cpus,
            lease.tenant
        )?,
        (Some(lease), _) => writeln!(out, "It would wait, for tenant '{}'.", lease.tenant)?,
        _ => writeln!(out, "It would be refused.")?,
    }
    if let Some(why) = &answer.why {
        writeln!(out, "Why: {}", why.message)?;
        if !why.held_by.is_empty() {
            leases(&why.held_by, &BTreeMap::new(), out)?;
        }
    }
    for event in &answer.events {
        let lease = &event.lease;
        let who = format!("lease {} ({}, {})", lease.id, name(lease), lease.tenant);
        writeln!(out, "What follows: {who} {}", event.message)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use umpire_lease::{CounterKind, Place};

    use super::*;

    fn lease(id: u64, scope: LeaseScope, uid: u32, label: &str) -> Lease {
        Lease {
            id,
            scope,
            uid,
            pid: if uid == u32::MAX { 0 } else { 4711 },
            label: label.to_owned(),
            ..Lease::default()
        }
    }

    /// What is printed, and by `who` and `leases` alike: lease, words that its line has, and one
    /// that it has not.
    #[test]
    fn a_groups_lease_is_its_users_and_not_the_process_that_asked() {
        let all = vec![
            lease(1, LeaseScope::Cgroup, 1000, "slurm 12.0"),
            lease(2, LeaseScope::Cpu, 1000, "perf"),
            lease(3, LeaseScope::Cgroup, u32::MAX, ""),
            lease(4, LeaseScope::Cgroup, 1000, ""),
            Lease {
                within: Some(1),
                ..lease(5, LeaseScope::Part, 1000, "step")
            },
        ];
        let group = |lease, path: &str, by: Option<u32>| LeasedGroup {
            lease,
            path: path.to_owned(),
            by_uid: by,
            by_tenant: by.map(|_| "prolog".to_owned()),
            ..LeasedGroup::default()
        };
        let groups = [
            group(1, "/slurm/job_12", Some(7)),
            group(4, "/web.service", None),
        ];
        let place = Place {
            pmu: "cpu".to_owned(),
            cpus: "0".to_owned(),
            leases: all.clone(),
            ..Place::default()
        };
        let answer = WhoOut {
            places: vec![place],
            outsiders: Vec::new(),
        };
        let (mut who, mut listed) = (Vec::new(), Vec::new());
        places(&answer, &groups, &mut who).expect("memory");
        let by_lease = groups.iter().map(|group| (group.lease, group)).collect();
        leases(&all, &by_lease, &mut listed).expect("memory");
        let [who, listed] = [who, listed].map(|out| String::from_utf8(out).expect("text"));
        let asked = "control group /slurm/job_12, asked for by user 7 of 'prolog'";
        for (number, of_both, of_who, others) in [
            (1, &["slurm 12.0", asked][..], " user 1000 ", "4711"),
            (2, &["perf", "4711"], " process 4711 ", "user"),
            (3, &["another user's"], " user - ", "4294967295"),
            (
                4,
                &[" user 1000 ", "control group /web.service"],
                "",
                "4711",
            ),
            (5, &["step", "out of lease 1,"], " process 4711 ", "asked"),
        ] {
            let in_who = format!(" lease {number} ");
            let in_list = format!("  {number} ");
            for (text, number, own) in [(&who, in_who, of_who), (&listed, in_list, "")] {
                let line = text.lines().find(|line| line.contains(&number));
                let line = line.unwrap_or_else(|| panic!("{text}"));
                assert!(of_both.iter().all(|word| line.contains(word)), "{line}");
                assert!(line.contains(own) && !line.contains(others), "{line}");
            }
        }
    }

    #[test]
    fn times_are_short() {
        for (ms, text) in [
            (7, "7ms"),
            (1999, "1.9s"),
            (61_000, "1m01s"),
            (3_660_000, "1h01m"),
        ] {
            assert_eq!(time(ms), text);
        }
    }

    #[test]
    fn counters_are_counted() {
        let one = |kind: CounterKind, among: Option<&str>| Counters {
            pmu: Some("cpu".to_owned()),
            kind: Some(kind),
            among: among.map(|name| vec![name.to_owned()]),
            ..Counters::default()
        };
        let all = [
            one(CounterKind::Programmable, None),
            one(CounterKind::Fixed, Some("FIXED1")),
            one(CounterKind::Programmable, None),
        ];
        assert_eq!(counters(&all), "2 programmable, 1 fixed (FIXED1)");
    }
}
