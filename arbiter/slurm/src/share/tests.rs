use umpire_lease::{
    CounterKind, Counters, Lease, LeaseScope, Outsider, OutsiderKind, Place, Standing,
};

use super::{Kept, NoShare, Share, gres_lines, jobs_share};

fn counters(programmable: u32, fixed: u32) -> Vec<Counters> {
    let one = |kind| Counters {
        kind: Some(kind),
        ..Counters::default()
    };
    let mut all: Vec<Counters> = (0..programmable)
        .map(|_| one(CounterKind::Programmable))
        .collect();
    all.extend((0..fixed).map(|_| one(CounterKind::Fixed)));
    all
}

/// A lease of whole CPUs that keeps what it has.
fn firm(tenant: &str, programmable: u32, fixed: u32) -> Lease {
    Lease {
        id: 1,
        generation: 1,
        tenant: tenant.to_owned(),
        uid: 0,
        pid: 1,
        label: String::new(),
        cpus: "0".to_owned(),
        scope: LeaseScope::Cpu,
        within: None,
        threads: Vec::new(),
        guaranteed: true,
        priority: 0,
        preemptible: false,
        counters: counters(programmable, fixed),
        wants: programmable + fixed,
        holds: programmable + fixed,
        state: Standing::Holds,
        held_ms: None,
        left_ms: None,
        leaving: None,
        broken_ms: None,
        blind_ms: 0,
    }
}

fn place(cpus: &str, programmable: u32, fixed: u32, leases: Vec<Lease>) -> Place {
    Place {
        pmu: "cpu".to_owned(),
        cpus: cpus.to_owned(),
        programmable,
        fixed,
        leases,
        outside: 0,
    }
}

fn share(programmable: u32, fixed: u32) -> Share {
    Share {
        programmable,
        fixed,
    }
}

fn kept(tenant: &str, programmable: u32, fixed: u32) -> Kept {
    Kept {
        tenant: tenant.to_owned(),
        share: share(programmable, fixed),
    }
}

#[test]
fn what_others_keep_is_not_for_jobs() {
    let preemptible = Lease {
        preemptible: true,
        ..firm("monitor", 3, 1)
    };
    let best_effort = Lease {
        guaranteed: false,
        ..firm("monitor", 3, 1)
    };
    let of_a_job = Lease {
        scope: LeaseScope::Cgroup,
        ..firm("jobs", 3, 1)
    };
    for (leases, keeps, left) in [
        (vec![], vec![], share(4, 2)),
        (vec![firm("monitor", 1, 1)], vec![], share(3, 1)),
        (vec![firm("nmi-watchdog", 1, 0)], vec![], share(3, 2)),
        // Who gives way, gives way to jobs; and other jobs are what Slurm counts.
        (
            vec![preemptible, best_effort, of_a_job],
            vec![],
            share(4, 2),
        ),
        // What is kept for a tenant is kept though it holds nothing, and is what it holds.
        (vec![], vec![kept("monitor", 2, 1)], share(2, 1)),
        (
            vec![firm("monitor", 1, 0)],
            vec![kept("monitor", 2, 0)],
            share(2, 2),
        ),
        (
            vec![firm("monitor", 3, 0)],
            vec![kept("monitor", 2, 0)],
            share(1, 2),
        ),
        (
            vec![firm("agent", 1, 0)],
            vec![kept("monitor", 2, 0)],
            share(1, 2),
        ),
    ] {
        let places = [place("0", 4, 2, leases)];
        let found = jobs_share(&places, &[], None, &keeps);
        assert_eq!(found, Ok(left), "{places:?} {keeps:?}");
    }
}

#[test]
fn the_cpu_with_the_fewest_decides() {
    let outside = Place {
        outside: 2,
        ..place("2", 4, 3, vec![])
    };
    let places = [
        place("0", 4, 3, vec![firm("monitor", 0, 2)]),
        place("1", 6, 3, vec![]),
        outside,
    ];
    assert_eq!(jobs_share(&places, &[], None, &[]), Ok(share(2, 1)));
}

#[test]
fn a_watchdog_without_a_lease_has_a_counter_too() {
    let watchdog = Outsider {
        what: OutsiderKind::NmiWatchdog,
        name: "NMI watchdog".to_owned(),
        pid: None,
        uid: None,
        events: None,
        cpus: Some("0".to_owned()),
    };
    let places = [place("0", 4, 0, vec![])];
    assert_eq!(jobs_share(&places, &[watchdog], None, &[]), Ok(share(3, 0)));
}

#[test]
fn nothing_for_jobs_is_said() {
    assert_eq!(jobs_share(&[], &[], None, &[]), Err(NoShare::NoCounters));
    let places = [place("0-1", 2, 0, vec![])];
    let error =
        jobs_share(&places, &[], None, &[kept("monitor", 9, 9)]).expect_err("nothing is left");
    assert!(error.to_string().contains("CPUs 0-1"), "{error}");
    let error = jobs_share(&places, &[], Some("cpu_atom"), &[]).expect_err("there is none");
    assert!(error.to_string().ends_with("it has: cpu"), "{error}");
}

#[test]
fn lines_name_what_there_is_and_nothing_else() {
    assert_eq!(
        gres_lines("n1", share(3, 2)),
        "# gres.conf\nNodeName=n1 Name=pmc Count=3\nNodeName=n1 Name=pmcfixed Count=2\n\
         # slurm.conf; what these keys and this node have already stays in front, with a comma\n\
         GresTypes=pmc,pmcfixed\nAccountingStorageTRES=gres/pmc,gres/pmcfixed\n\
         JobSubmitPlugins=lua\nNodeName=n1 Gres=pmc:3,pmcfixed:2\n"
    );
    let text = gres_lines("n1", share(6, 0));
    assert!(
        !text.contains("pmcfixed") && text.ends_with("NodeName=n1 Gres=pmc:6\n"),
        "{text}"
    );
}
