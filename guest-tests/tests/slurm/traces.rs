//! What is left of it all: nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::cluster::{POLICY, job_of, own, turn, until_leases};

/// What a cluster is made of.
const PROGRAMS: [&str; 6] = [
    "munged",
    "mariadbd",
    "slurmdbd",
    "slurmctld",
    "slurmd",
    "slurmstepd",
];
/// What is set at the top of a hierarchy for all that is below it.
const SETTINGS: [&str; 4] = [
    "cgroup.subtree_control",
    "cgroup.clone_children",
    "notify_on_release",
    "release_agent",
];
/// What the kernel writes itself, at each process or under load; and what has all CPUs work when it
/// is read.
const KERNELS_OWN: [&str; 4] = [
    "kernel/ns_last_pid",
    "kernel/perf_event_max_sample_rate",
    "kernel/tainted",
    "vm/stat_refresh",
];

fn folders_below(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.insert(entry.path());
            folders_below(&entry.path(), found);
        }
    }
}

/// Where the hierarchies of control groups are mounted, of either version.
fn hierarchies() -> BTreeSet<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    let tops = mounts.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let is_one = kind.starts_with("cgroup ") || kind.starts_with("cgroup2 ");
        mount.split(' ').nth(4).filter(|_| is_one)
    });
    tops.map(PathBuf::from).collect()
}

/// Control groups of every hierarchy that are Slurm's, or the plugin's.
fn groups() -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for top in hierarchies() {
        folders_below(&top, &mut found);
    }
    found.retain(|path| path.to_string_lossy().contains("slurm"));
    found
}

/// The groups that the plugin has made.
pub(super) fn groups_of_steps() -> Vec<PathBuf> {
    let is_ours = |path: &PathBuf| path.to_string_lossy().contains("/umpire-slurm-");
    groups().into_iter().filter(is_ours).collect()
}

/// A process: its number, and its name.
type Process = (u32, String);

/// The processes of which this is true of their folder in `/proc`.
fn processes(is_it: impl Fn(&Path) -> bool) -> BTreeSet<Process> {
    let entries = fs::read_dir("/proc").expect("processes").flatten();
    let found = entries.filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        let path = entry.path();
        let name = fs::read_to_string(path.join("comm")).ok()?;
        is_it(&path).then(|| (number, name.trim().to_owned()))
    });
    found.collect()
}

/// Processes whose environment, words or folder have this folder in them.
fn processes_of(folder: &Path) -> BTreeSet<Process> {
    let name = folder.display().to_string();
    processes(|process| {
        let has_name = |file: &str| {
            fs::read(process.join(file))
                .is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(&name))
        };
        has_name("environ")
            || has_name("cmdline")
            || fs::read_link(process.join("cwd")).is_ok_and(|at| at.starts_with(folder))
    })
}

/// The kernel's numbers of the sockets that these processes have.
fn sockets_of(processes: &BTreeSet<Process>) -> BTreeSet<String> {
    let folders = processes
        .iter()
        .map(|(number, _)| format!("/proc/{number}/fd"));
    let files = folders.flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let links = files.filter_map(|file| fs::read_link(file.path()).ok());
    let numbers = links.filter_map(|link| {
        let number = link.to_str()?.strip_prefix("socket:[")?;
        Some(number.trim_end_matches(']').to_owned())
    });
    numbers.collect()
}

/// Those of all sockets that there are, with where they are.
fn sockets() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    // The column of a socket's number in each table.
    for (table, column) in [
        ("tcp", 9),
        ("tcp6", 9),
        ("udp", 9),
        ("udp6", 9),
        ("unix", 6),
    ] {
        let rows = fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default();
        for row in rows.lines().skip(1) {
            if let Some(number) = row.split_whitespace().nth(column) {
                found.insert(number.to_owned(), format!("{table}: {row}"));
            }
        }
    }
    found
}

/// Whether a file below `/proc/sys` changes without anybody who sets it. The settings of a network
/// interface come and go with it.
fn is_kernels_own(path: &Path) -> bool {
    let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
    match parts[..] {
        ["net", _, "conf" | "neigh", interface, _] => !matches!(interface, "all" | "default"),
        _ => KERNELS_OWN.map(Path::new).contains(&path),
    }
}

/// Whatever of the kernel's can be set below `/proc/sys`, and stays as it was set.
fn switches() -> BTreeMap<PathBuf, String> {
    let (mut folders, mut found) = (BTreeSet::new(), BTreeMap::new());
    let top = Path::new("/proc/sys");
    folders_below(top, &mut folders);
    folders.insert(top.to_owned());
    for folder in folders {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let can_be_set = entry
                .metadata()
                .is_ok_and(|facts| facts.is_file() && facts.permissions().mode() & 0o222 != 0);
            let path = entry.path();
            let name = path.strip_prefix(top).expect("it is below");
            if can_be_set && !is_kernels_own(name) {
                // Some can be written alone.
                let value = fs::read_to_string(&path).unwrap_or_default();
                found.insert(path, value);
            }
        }
    }
    found
}

/// What a machine is like where a cluster was, or not.
struct Machine {
    processes: BTreeSet<Process>,
    groups: BTreeSet<PathBuf>,
    settings: BTreeMap<PathBuf, String>,
    switches: BTreeMap<PathBuf, String>,
}

impl Machine {
    fn now() -> Self {
        let tops = hierarchies().into_iter();
        let settings = tops.flat_map(|top| SETTINGS.map(|name| top.join(name)));
        let settings = settings.filter_map(|path| {
            let value = fs::read_to_string(&path).ok()?;
            Some((path, value))
        });
        Machine {
            processes: processes(|process| {
                fs::read_to_string(process.join("comm"))
                    .is_ok_and(|name| PROGRAMS.contains(&name.trim()))
            }),
            groups: groups(),
            settings: settings.collect(),
            switches: switches(),
        }
    }
}

/// The sockets of a cluster, while a step runs there; what is looked for later is there now.
fn sockets_while_it_runs(folder: &Path, before: &Machine) -> BTreeSet<String> {
    let there = Machine::now();
    let new: Vec<&Process> = there.processes.difference(&before.processes).collect();
    for program in PROGRAMS {
        let is_there = new.iter().any(|process| process.1 == program);
        assert!(is_there, "{program}: {new:?}");
    }
    let is_new = |top: &&PathBuf| there.groups.iter().any(|group| group.starts_with(top));
    let tops = hierarchies();
    let used: Vec<&PathBuf> = tops.iter().filter(is_new).collect();
    // Version 1's freezer and cpuset, and version 2.
    assert!(used.len() >= 3, "{used:?}");
    let of_cluster = sockets_of(&processes_of(folder));
    let all = sockets();
    let listed = of_cluster.iter().filter(|number| all.contains_key(*number));
    assert!(listed.count() > PROGRAMS.len(), "{of_cluster:?}");
    of_cluster
}

#[test]
fn what_the_kernel_changes_itself_is_left_out() {
    for (name, is_its_own) in [
        ("kernel/tainted", true),
        ("kernel/perf_event_max_sample_rate", true),
        ("kernel/perf_event_paranoid", false),
        ("net/ipv4/conf/eth0/forwarding", true),
        ("net/ipv6/neigh/veth1/gc_stale_time", true),
        ("net/ipv4/conf/all/forwarding", false),
        ("net/ipv4/ip_forward", false),
        ("vm/stat_refresh", true),
    ] {
        assert_eq!(is_kernels_own(Path::new(name)), is_its_own, "{name}");
    }
    let found = switches();
    let has = |name: &str| found.contains_key(&Path::new("/proc/sys").join(name));
    assert!(has("kernel/core_pattern") && !has("kernel/tainted"));
}

#[test]
fn nothing_is_left_of_jobs_and_their_cluster() {
    let name = "nothing_is_left_of_jobs_and_their_cluster";
    let turn = turn();
    let before = Machine::now();
    // With Slurm's own control groups of version 1, beside ours of version 2.
    let Some(cluster) = own(&turn, name, "cgroup") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let words = [
        "srun",
        "-w",
        "n1",
        "-n",
        "2",
        "--counters=3",
        "cat",
        "/proc/self/cgroup",
    ];
    let (status, text) = cluster.said(&words);
    assert_eq!(status, Some(0), "{text}");
    assert_eq!(text.matches("0::/umpire-slurm-n1/").count(), 2, "{text}");
    assert_eq!(text.matches("/job_").count() % 2, 0, "{text}");
    assert!(text.contains("/slurm_n1/uid_65534/job_"), "{text}");
    let (status, text) = cluster.said(&["srun", "-w", "n1", "--counters=9", "true"]);
    assert_eq!(status, Some(1), "{text}");
    let (status, text) = cluster.said(&["srun", "-w", "n1", "cat", "/proc/self/cgroup"]);
    assert!(
        status == Some(0) && !text.contains("umpire-slurm"),
        "{text}"
    );
    // While a step runs all of this is there, or nothing would be found missing later.
    let words = ["srun", "-w", "n1", "--counters=2", "sleep", "600"];
    let mut job = cluster.user(&words).spawn().expect("it starts");
    let lease = until_leases(&arbiters[0], 1).remove(0);
    let of_cluster = sockets_while_it_runs(&cluster.folder, &before);
    cluster.asked(&["scancel", &job_of(&lease.label).to_string()]);
    let _ = job.wait().expect("it is ours");
    cluster.be_idle();
    until_leases(&arbiters[0], 0);
    let left = groups_of_steps();
    assert!(left.is_empty(), "{left:?}");
    let folder = cluster.folder.clone();
    drop(arbiters);
    drop(cluster);
    let after = Machine::now();
    // What the other cluster had then may be gone: it is idle, but its last step may have ended since.
    let new: Vec<_> = after.processes.difference(&before.processes).collect();
    assert!(new.is_empty(), "{new:?}");
    let new: Vec<_> = after.groups.difference(&before.groups).collect();
    assert!(new.is_empty(), "{new:?}");
    assert_eq!(after.settings, before.settings);
    assert_eq!(after.switches, before.switches);
    assert_eq!(processes_of(&folder), BTreeSet::new());
    let mut left = sockets();
    left.retain(|number, row| {
        of_cluster.contains(number) || row.contains(&folder.display().to_string())
    });
    assert!(left.is_empty(), "{left:?}");
    assert!(!folder.exists());
}
