//! A cluster of two nodes on this machine, an arbiter for each, and Slurm's commands.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use guest_tests::umpire;
use umpire_lease::{Lease, LeaseScope};

use crate::arbiterd::fixture::{AS_NOBODY, Daemon, LONG};

/// The nodes; both are this machine.
pub(crate) const NODES: [&str; 2] = ["n1", "n2"];
/// What the cluster needs: a program of each of Debian's packages, and the header for plugins.
const NEEDED: [&str; 8] = [
    "/usr/sbin/munged",
    "/usr/sbin/mariadbd",
    "/usr/sbin/slurmdbd",
    "/usr/sbin/slurmctld",
    "/usr/sbin/slurmd",
    "/usr/bin/srun",
    "/usr/include/slurm/spank.h",
    "/usr/lib/x86_64-linux-gnu/slurm-wlm/job_submit_lua.so",
];
/// Four programmable and two fixed-function counters; root asks for the jobs of others.
pub(crate) const POLICY: &str = "arrive-ms = 2000\naudit = \"AUDIT\"\n\
     [[pmu]]\nprogrammable = 4\nfixed = 2\ncpus = \"0-1\"\n\
     [[tenant]]\nname = \"site\"\nusers = [0]\noperator = true\nfor-others = true\n\
     [[tenant]]\nname = \"jobs\"\nusers = [65534]\n";

/// A running cluster, which ends with this value, or with this process.
pub(crate) struct Cluster {
    pub(crate) folder: PathBuf,
    script: Child,
    words: Option<ChildStdin>,
    lines: BufReader<ChildStdout>,
}

/// Why there can be no cluster here.
fn missing() -> Option<String> {
    let absent = NEEDED.iter().find(|file| !Path::new(file).exists());
    if let Some(absent) = absent {
        return Some(format!("Slurm is not installed: there is no {absent}"));
    }
    if !rustix::process::geteuid().is_root() {
        return Some("a cluster of Slurm is started as root".to_owned());
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let has_groups = mounts.contains(" - cgroup2 ");
    (!has_groups).then(|| "no control groups of version 2 are mounted here".to_owned())
}

/// The plugin, built once.
pub(crate) fn plugin() -> &'static Path {
    static PLUGIN: OnceLock<PathBuf> = OnceLock::new();
    PLUGIN.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("spank");
        fs::create_dir_all(&folder).expect("a folder");
        let mut make = Command::new("make");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../arbiter/slurm/spank");
        make.arg("-C")
            .arg(source)
            .arg(format!("OUT={}", folder.display()));
        let made = make.output().expect("make");
        let said = String::from_utf8_lossy(&made.stderr).into_owned();
        assert!(made.status.success(), "{said}");
        folder.join("umpire_spank.so")
    })
}

pub(crate) fn library() -> PathBuf {
    umpire::built_beside("umpire-lease-c").join("libumpire_lease.so")
}

static SHARED: OnceLock<Mutex<Cluster>> = OnceLock::new();

/// One test at a time has a cluster, since the nodes of all have the same names on this machine. On
/// the shared one nothing runs any more of the test before.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed has left nothing that the next one minds.
    let turn = TURN.lock().unwrap_or_else(|failed| failed.into_inner());
    if let Some(cluster) = SHARED.get() {
        lock(cluster).be_idle();
    }
    turn
}

fn lock(cluster: &'static Mutex<Cluster>) -> MutexGuard<'static, Cluster> {
    cluster.lock().unwrap_or_else(|failed| failed.into_inner())
}

/// The shared cluster, for a test's turn.
pub(crate) struct InTurn {
    cluster: MutexGuard<'static, Cluster>,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for InTurn {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

impl DerefMut for InTurn {
    fn deref_mut(&mut self) -> &mut Cluster {
        &mut self.cluster
    }
}

/// The cluster that tests have one after the other. `None`: there can be none here, as was said.
pub(crate) fn shared(test: &str) -> Option<InTurn> {
    if let Some(why) = missing() {
        println!("skipped: {test}: {why}");
        return None;
    }
    let turn = turn();
    // One that has just started is idle.
    let cluster = SHARED.get_or_init(|| Mutex::new(Cluster::start("linuxproc")));
    Some(InTurn {
        cluster: lock(cluster),
        _turn: turn,
    })
}

/// A cluster of its own, in the test's turn. `None`: there can be none here, as was said.
pub(crate) fn own(_turn: &MutexGuard<'_, ()>, test: &str, tracking: &str) -> Option<Cluster> {
    if let Some(why) = missing() {
        println!("skipped: {test}: {why}");
        return None;
    }
    Some(Cluster::start(tracking))
}

/// Four ports that are free now and were given to no other cluster of this process, below those
/// that the kernel gives to whoever connects.
fn free_ports() -> Vec<String> {
    static NEXT: Mutex<u16> = Mutex::new(0);
    let mut next = NEXT.lock().unwrap_or_else(|failed| failed.into_inner());
    let first = (20_000 + (std::process::id() % 1000) as u16 * 10).max(*next);
    let free = (first..32_000).filter(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok());
    let found: Vec<u16> = free.take(4).collect();
    *next = found.last().map_or(0, |port| port + 1);
    found.iter().map(u16::to_string).collect()
}

impl Cluster {
    fn start(tracking: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder").keep();
        let open = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
        };
        open(&folder, 0o755);
        for name in ["etc", "out"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        open(&folder.join("out"), 0o777);
        let printed = |words: &[&str]| {
            let printed = Command::new(umpire::path())
                .arg("slurm")
                .args(words)
                .output();
            printed.expect("umpire starts").stdout
        };
        let rule = printed(&["job-submit"]);
        fs::write(folder.join("etc/job_submit.lua"), rule).expect("a file");
        let config = folder.join("arbiter-%n.toml").display().to_string();
        let epilog = folder.join("etc/epilog");
        fs::write(&epilog, printed(&["epilog", "--config", &config])).expect("a file");
        open(&epilog, 0o755);
        let line = format!(
            "required {} socket={}/arbiter-%n library={} cpus=cores shared=shared",
            plugin().display(),
            folder.display(),
            library().display()
        );
        let ports = free_ports();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/slurm/cluster.sh");
        let mut command = Command::new(script);
        command
            .arg(&folder)
            .arg(ports.join(","))
            .arg(line)
            .arg(tracking);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut script = command.spawn().expect("bash");
        let mut cluster = Cluster {
            words: script.stdin.take(),
            lines: BufReader::new(script.stdout.take().expect("its output")),
            script,
            folder,
        };
        cluster.until_ready();
        cluster
    }

    fn until_ready(&mut self) {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        let log = fs::read_to_string(self.folder.join("log/cluster")).unwrap_or_default();
        assert_eq!(line, "ready\n", "{log}");
    }

    /// An arbiter for each node, where the plugin and the epilog look for it.
    pub(crate) fn arbiters(&self, policy: &str) -> [Daemon; 2] {
        NODES.map(|node| {
            let folder = tempfile::tempdir().expect("a folder");
            let audit = folder.path().join("audit").display().to_string();
            let mut daemon = Daemon::in_folder(folder, &[], &policy.replace("AUDIT", &audit));
            daemon.begin();
            let config = daemon.folder.path().join("arbiter.toml");
            let names = [
                self.socket(node),
                self.folder.join(format!("arbiter-{node}.toml")),
            ];
            for (name, file) in names.iter().zip([daemon.socket(), config]) {
                let _ = fs::remove_file(name);
                symlink(file, name).expect("a link");
            }
            daemon
        })
    }

    pub(crate) fn socket(&self, node: &str) -> PathBuf {
        self.folder.join(format!("arbiter-{node}"))
    }

    /// Starts a slurmd anew that was killed.
    pub(crate) fn start_slurmd(&mut self, node: &str) {
        let words = self.words.as_mut().expect("it runs");
        writeln!(words, "slurmd {node}").expect("it listens");
        self.until_ready();
    }

    pub(crate) fn pid_of_slurmd(&self, node: &str) -> i32 {
        let file = self.folder.join(format!("slurmd-{node}.pid"));
        let text = fs::read_to_string(file).expect("it runs");
        text.trim().parse().expect("a number")
    }

    /// One of Slurm's commands, as root or as nobody, with nothing of the caller's environment.
    fn command_of(&self, before: &[&str], words: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.arg("90").args(before).args(words);
        command.env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("SLURM_CONF", self.folder.join("etc/slurm.conf"));
        command.current_dir(self.folder.join("out"));
        command.stdin(Stdio::null());
        command
    }

    /// As a user without any right.
    pub(crate) fn user(&self, words: &[&str]) -> Command {
        self.command_of(&AS_NOBODY, words)
    }

    pub(crate) fn root(&self, words: &[&str]) -> Command {
        self.command_of(&[], words)
    }

    /// What a user's command came to: its status, and all that it printed.
    pub(crate) fn said(&self, words: &[&str]) -> (Option<i32>, String) {
        said(&self.user(words).output().expect("it starts"))
    }

    /// What a command of root's prints.
    pub(crate) fn asked(&self, words: &[&str]) -> String {
        let (status, text) = said(&self.root(words).output().expect("it starts"));
        assert_eq!(status, Some(0), "{words:?}: {text}");
        text
    }

    /// Waits until no job is there, and both nodes can have one.
    pub(crate) fn be_idle(&self) {
        soon(|| {
            let jobs = self.asked(&["squeue", "-h", "-o", "%i"]);
            let nodes = self.asked(&["sinfo", "-h", "-N", "-p", "own", "-o", "%T"]);
            if jobs.trim().is_empty() && nodes.split_whitespace().eq(["idle", "idle"]) {
                Ok(())
            } else {
                Err(format!("jobs {jobs:?}, nodes {nodes:?}"))
            }
        });
    }

    /// What the accounts have of the newest job: state, exit status, and what it was given.
    pub(crate) fn account(&self, job: u32) -> String {
        self.accounts(job, 1)
    }

    /// The same of each task of an array, in lines: the accounts may hear late of the last.
    pub(crate) fn accounts(&self, job: u32, tasks: usize) -> String {
        let job = job.to_string();
        let words = [
            "sacct",
            "-n",
            "-X",
            "-P",
            "-j",
            &job,
            "-o",
            "state,exitcode,alloctres",
        ];
        let mut found = String::new();
        soon(|| {
            found = self.asked(&words).trim().to_owned();
            let goes_on = |line: &str| line.starts_with("RUNNING") || line.starts_with("PENDING");
            let is_over = found.lines().count() >= tasks && !found.lines().any(goes_on);
            is_over.then_some(()).ok_or_else(|| found.clone())
        });
        found
    }

    /// What the accounts have as its AdminComment of a job, or a task of an array: `1`, `3_2`.
    pub(crate) fn admin_comment(&self, job: &str) -> String {
        let words = ["sacct", "-n", "-X", "-P", "-j", job, "-o", "admincomment"];
        self.asked(&words).trim().to_owned()
    }

    pub(crate) fn log_of(&self, node: &str) -> String {
        fs::read_to_string(self.folder.join(format!("log/slurmd-{node}"))).unwrap_or_default()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for log in ["slurmctld", "slurmd-n1", "slurmd-n2"] {
                let text =
                    fs::read_to_string(self.folder.join("log").join(log)).unwrap_or_default();
                let from = text.len().saturating_sub(3000);
                eprintln!("{log}:\n{}", text.get(from..).unwrap_or(&text));
            }
        }
        // It ends what it has started when nobody can say anything to it any more.
        drop(self.words.take());
        let _ = self.script.wait();
    }
}

pub(crate) fn said(output: &Output) -> (Option<i32>, String) {
    let out = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    (output.status.code(), format!("{out}{errors}"))
}

/// Tries until it is well; what it says last is why it never was.
pub(crate) fn soon(mut what: impl FnMut() -> Result<(), String>) {
    let until = Instant::now() + LONG;
    while let Err(why) = what() {
        assert!(Instant::now() < until, "{why}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The leases of jobs at an arbiter.
pub(crate) fn of_jobs(daemon: &Daemon) -> Vec<Lease> {
    let mut leases = daemon.connect().leases().expect("it answers");
    leases.retain(|lease| lease.scope == LeaseScope::Cgroup);
    leases
}

/// Waits until jobs hold so many leases there.
pub(crate) fn until_leases(daemon: &Daemon, count: usize) -> Vec<Lease> {
    let mut found = Vec::new();
    soon(|| {
        found = of_jobs(daemon);
        if found.len() == count && found.iter().all(|lease| lease.holds == lease.wants) {
            Ok(())
        } else {
            Err(format!("{count} leases are expected: {found:?}"))
        }
    });
    found
}

/// The number of a job, from what its step printed.
pub(crate) fn job_of(label: &str) -> u32 {
    let number = label.trim_start_matches("slurm ").split('.').next();
    number
        .and_then(|number| number.parse().ok())
        .expect("slurm JOB.STEP")
}
