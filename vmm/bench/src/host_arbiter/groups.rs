//! Leases of control groups: what they cost others who ask, in the core; and, with groups of this
//! host, how long a lease and its end take.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use arbiter_host::{HostArbiter, Scope, Terms};
use serde::Serialize;
use umpire_lease::{LeaseScope, Next, Request, What};

use super::daemon::{Daemon, acquire, asked, at_once, release, request};
use super::decisions::{time, workload};
use super::{ArbiterOptions, nanos, progress, summary, timed};
use crate::error::BenchError;
use crate::stats::{Percentiles, median};

/// How much longer a decision may take beside leases of groups.
pub(super) const TARGET_RATIO: f64 = 1.05;
/// How long a lease of a group, and its end, may take at the median.
pub(super) const TARGET: Duration = Duration::from_millis(5);
/// How often the two sides are measured, and how long each time.
const TURNS: u32 = 9;
const TIME: Duration = Duration::from_millis(20);
/// The kernel tells of changes of a group at most that often (`CGROUP_FILE_NOTIFY_MIN_INTV`), and
/// of a process that has come before that, and a tick of its clock late.
const NOTICED: Duration = Duration::from_millis(50);
/// The arbiter looks twice a second at some of the groups for which it has no descriptor: with
/// thousands of these it takes that long until it has seen all.
const PATIENCE: Duration = Duration::from_secs(60);
/// No more ends are measured of a row after that.
const LONGEST: Duration = Duration::from_secs(10);
/// Connections on which groups are leased at the same time.
const CONNECTIONS: u32 = 16;

/// What leases of control groups cost.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GroupsReport {
    /// Decisions of the core beside them.
    pub core: Vec<GroupsCoreRow>,
    /// The arbiter as a process, with groups of this host.
    pub served: Vec<GroupsRow>,
    /// Why there are none of these.
    pub not_served: Option<String>,
}

/// Requests that have nothing to do with groups, beside leases of groups and beside as many of
/// threads, in turns.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct GroupsCoreRow {
    /// Leases of as many groups, of two counters on one CPU each.
    pub groups: u32,
    /// Leases of vCPUs on both sides, of two counters on 16 CPUs each.
    pub leases: u32,
    /// CPUs in the mask of the request.
    pub cpus: u32,
    /// `cpu` or `thread`.
    pub scope: &'static str,
    /// Nanoseconds for each decision beside the leases of threads.
    pub without_ns: f64,
    /// The same beside those of groups.
    pub beside_ns: f64,
    /// The latter by the former.
    pub ratio: f64,
    /// A ratio of 1.05 or less.
    pub met: bool,
}

/// Leases of one group more beside so many.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct GroupsRow {
    /// Groups that have a lease each.
    pub groups: u32,
    /// A request for a group, and the release.
    pub lease: Percentiles,
    /// From a signal that kills all that runs in a group until its lease has ended.
    pub end: Percentiles,
    /// The medians of both are together 5 ms or less.
    pub met: bool,
}

pub(super) fn measure(options: &ArbiterOptions) -> Result<GroupsReport, BenchError> {
    let mut report = GroupsReport::default();
    for groups in counts(options) {
        progress(&format!("{groups} leases of groups in the core"));
        report.core.extend(core(options.leases, groups));
    }
    let own = match OwnGroups::make() {
        Ok(own) => own,
        Err(why) => {
            report.not_served = Some(why);
            return Ok(report);
        }
    };
    let daemon = Daemon::start(None)?;
    let mut there = 0;
    for groups in counts(options) {
        progress(&format!("{groups} leases of groups"));
        own.lease(&daemon, there, groups)?;
        there = groups;
        report.served.push(served(&daemon, &own, options, groups)?);
    }
    Ok(report)
}

fn counts(options: &ArbiterOptions) -> [u32; 3] {
    [1, options.leases / 10, options.leases]
}

fn core(leases: u32, groups: u32) -> Vec<GroupsCoreRow> {
    let mut without = workload::host(leases);
    workload::lease(&mut without, workload::thread, groups);
    let mut beside = workload::host(leases);
    workload::lease(&mut beside, workload::group, groups);
    let thread = workload::thread(groups);
    let kinds = [
        ("cpu", 1, Scope::Cpu),
        ("thread", workload::VCPU_CPUS, thread),
    ];
    let rows = kinds.into_iter().map(|(name, cpus, scope)| {
        let terms = workload::terms(7, cpus, scope);
        let [without_ns, beside_ns] = in_turns(&mut without, &mut beside, &terms);
        let ratio = beside_ns / without_ns;
        GroupsCoreRow {
            groups,
            leases,
            cpus,
            scope: name,
            without_ns,
            beside_ns,
            ratio,
            met: ratio <= TARGET_RATIO,
        }
    });
    rows.collect()
}

/// Nanoseconds for each decision on both sides: medians of turns, so that what else the machine
/// does hits both alike.
fn in_turns(without: &mut HostArbiter, beside: &mut HostArbiter, terms: &Terms) -> [f64; 2] {
    let mut times = [Vec::new(), Vec::new()];
    for turn in 0..TURNS {
        let first = turn % 2 == 0;
        for is_without in [first, !first] {
            let host = if is_without {
                &mut *without
            } else {
                &mut *beside
            };
            times[usize::from(!is_without)].push(time(host, terms, TIME));
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}

fn served(
    daemon: &Daemon,
    own: &OwnGroups,
    options: &ArbiterOptions,
    groups: u32,
) -> Result<GroupsRow, BenchError> {
    let probe = own.group("probe")?;
    let mut arbiter = daemon.connect()?;
    let (mut leases, mut ends) = (Vec::new(), Vec::new());
    let begun = Instant::now();
    for _ in 0..options.rounds.max(1) {
        leases.push(timed(|| {
            let lease = acquire(&mut arbiter, of_group(&probe, 0))?;
            release(&mut arbiter, lease)
        })?);
        if ends.is_empty() || begun.elapsed() < LONGEST {
            ends.push(end(daemon, own, &probe)?);
        }
    }
    let half = |times: &[u64]| median(&mut times.to_vec()).unwrap_or(u64::MAX);
    let both = half(&leases).saturating_add(half(&ends));
    Ok(GroupsRow {
        groups,
        lease: summary(&mut leases)?,
        end: summary(&mut ends)?,
        met: both <= nanos(TARGET),
    })
}

/// Has a process run in a group that is leased, and kills it. Returns how long after that the
/// lease had ended.
fn end(daemon: &Daemon, own: &OwnGroups, group: &str) -> Result<u64, BenchError> {
    let mut runs = own.run_in(group)?;
    let held = daemon.connect()?.acquire(&of_group(group, 0));
    let mut held = asked("Acquire", held)?;
    sleep(NOTICED);
    let begun = Instant::now();
    let done = runs.kill();
    loop {
        match asked("the end of a group", held.next(Some(PATIENCE)))? {
            Next::Event(event) if event.what == What::Ended => break,
            Next::Event(_) => {}
            Next::Nothing => {
                return Err(BenchError::Arbiter(
                    "the lease of a group did not end with what ran there".to_owned(),
                ));
            }
        }
    }
    let time = nanos(begun.elapsed());
    done.and_then(|()| runs.wait()).map_err(failed)?;
    Ok(time)
}

fn failed(error: io::Error) -> BenchError {
    BenchError::Arbiter(error.to_string())
}

/// Two counters of one CPU for whoever runs in a group.
fn of_group(path: &str, cpu: u32) -> Request {
    Request {
        scope: Some(LeaseScope::Cgroup),
        cgroup: Some(path.to_owned()),
        ..request(cpu)
    }
}

/// Control groups of this process's own, which go with it.
#[derive(Debug)]
struct OwnGroups {
    /// Where the hierarchy is.
    top: PathBuf,
    /// The group that all the others are in.
    path: String,
}

impl OwnGroups {
    /// In the group that this process is in.
    ///
    /// # Errors
    /// There can be none, and why.
    fn make() -> Result<Self, String> {
        let read =
            |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
        let top = read("/proc/self/mountinfo")?
            .lines()
            .find_map(whole_hierarchy)
            .ok_or("no hierarchy of control groups of version 2 is mounted as a whole")?;
        let here = read("/proc/self/cgroup")?;
        let here = here.lines().find_map(|line| line.strip_prefix("0::"));
        let here = here.unwrap_or("/").trim_end_matches('/');
        let path = format!("{here}/umpire-bench-{}", std::process::id());
        let own = OwnGroups { top, path };
        fs::create_dir(own.folder(&own.path))
            .map_err(|error| format!("no control group can be made ({}): {error}", own.path))?;
        Ok(own)
    }

    fn folder(&self, path: &str) -> PathBuf {
        self.top.join(path.trim_start_matches('/'))
    }

    /// A group of this name, by its path.
    fn group(&self, name: &str) -> Result<String, BenchError> {
        let path = format!("{}/{name}", self.path);
        match fs::create_dir(self.folder(&path)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(error)),
            _ => Ok(path),
        }
    }

    /// Makes the groups of these numbers, and has them leased.
    fn lease(&self, daemon: &Daemon, from: u32, to: u32) -> Result<(), BenchError> {
        let each = at_once(CONNECTIONS, |n| {
            let mut arbiter = daemon.connect()?;
            for number in (from..to).filter(|number| number % CONNECTIONS == n) {
                let group = self.group(&number.to_string())?;
                acquire(&mut arbiter, of_group(&group, number))?;
            }
            Ok(())
        });
        // No connection holds them.
        each.map(drop)
    }

    /// Starts a process that does nothing, in a group.
    fn run_in(&self, group: &str) -> Result<Child, BenchError> {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().map_err(failed)?;
        let moved = fs::write(
            self.folder(group).join("cgroup.procs"),
            child.id().to_string(),
        );
        if let Err(error) = moved {
            // Its input ends with this value.
            drop(child.stdin.take());
            child.wait().map_err(failed)?;
            return Err(failed(error));
        }
        Ok(child)
    }
}

impl Drop for OwnGroups {
    fn drop(&mut self) {
        let top = self.folder(&self.path);
        let inside = fs::read_dir(&top).into_iter().flatten().flatten();
        for entry in inside.filter(|entry| entry.path().is_dir()) {
            // One in which something runs stays, and is seen.
            let _ = fs::remove_dir(entry.path());
        }
        let _ = fs::remove_dir(top);
    }
}

/// Where a line of mountinfo (proc(5)) has all of the hierarchy.
fn whole_hierarchy(line: &str) -> Option<PathBuf> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut words = mount.split(' ').skip(3);
    let (from, at) = (words.next()?, words.next()?);
    let is_one = kind.starts_with("cgroup2 ") && from == "/";
    is_one.then(|| Path::new(at).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_hierarchy_is_found() {
        let found = |line| whole_hierarchy(line);
        let unified = "36 25 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";
        assert_eq!(found(unified), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(
            found("36 25 0:30 /jobs /groups rw - cgroup2 cgroup2 rw"),
            None
        );
        assert_eq!(
            found("36 25 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw"),
            None
        );
    }

    #[test]
    fn others_are_measured_with_groups_and_without() {
        let rows = core(20, 40);
        assert_eq!(rows.len(), 2);
        for row in rows {
            assert!(row.without_ns > 0.0 && row.beside_ns > 0.0 && row.ratio > 0.0);
        }
    }
}
