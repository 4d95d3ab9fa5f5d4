//! What is left of it all: nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::cluster::{POLICY, own, turn, until_leases};

/// Switches of the kernel that are about counters.
const SWITCHES: [&str; 3] = [
    "/proc/sys/kernel/perf_event_paranoid",
    "/proc/sys/kernel/nmi_watchdog",
    "/proc/sys/kernel/perf_event_max_sample_rate",
];

fn folders_below(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.insert(entry.path());
            folders_below(&entry.path(), found);
        }
    }
}

/// Control groups of every hierarchy that are Slurm's, or the plugin's.
fn groups() -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    folders_below(Path::new("/sys/fs/cgroup"), &mut found);
    found.retain(|path| path.to_string_lossy().contains("slurm"));
    found
}

/// The groups that the plugin has made.
pub(super) fn groups_of_steps() -> Vec<PathBuf> {
    let is_ours = |path: &PathBuf| path.to_string_lossy().contains("/umpire-slurm-");
    groups().into_iter().filter(is_ours).collect()
}

/// Processes that have this cluster's configuration.
fn processes_of(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir("/proc").expect("processes").flatten();
    let name = folder.display().to_string();
    let is_of_it = |path: &PathBuf| {
        fs::read(path.join("environ"))
            .is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(&name))
    };
    let found = entries.map(|entry| entry.path()).filter(is_of_it);
    found
        .map(|path| fs::read_to_string(path.join("cmdline")).unwrap_or_default())
        .collect()
}

fn switches() -> Vec<Option<String>> {
    SWITCHES.map(|path| fs::read_to_string(path).ok()).to_vec()
}

#[test]
fn nothing_is_left_of_jobs_and_their_cluster() {
    let name = "nothing_is_left_of_jobs_and_their_cluster";
    let turn = turn();
    let (groups_before, switches_before) = (groups(), switches());
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
    cluster.be_idle();
    until_leases(&arbiters[0], 0);
    let left = groups_of_steps();
    assert!(left.is_empty(), "{left:?}");
    let folder = cluster.folder.clone();
    drop(arbiters);
    drop(cluster);
    assert_eq!(groups(), groups_before);
    assert_eq!(switches(), switches_before);
    assert_eq!(processes_of(&folder), [""; 0]);
    assert!(!folder.exists());
}
