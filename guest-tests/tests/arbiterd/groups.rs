//! Leases for control groups: trees of groups made by hand, processes that come and go in them,
//! arbiters that are killed, and names that are others' by now. Where no hierarchy of version 2
//! can be written to, that is said, and nothing is tried.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use umpire_lease::{
    Arbiter, CallError, Counters, GroupsOut, Lease, LeaseScope, NoReply, Reason, Request,
};

use super::fixture::{AS_NOBODY, Daemon, LONG};
use super::python::python3;

/// Where version 2 is mounted, whole.
fn top() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mut tops = mounts.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut words = mount.split(' ').skip(3);
        let is_whole = kind.starts_with("cgroup2 ") && words.next() == Some("/");
        words.next().filter(|_| is_whole).map(PathBuf::from)
    });
    tops.next()
}

/// A group of the test's own, with all that is made and run below it.
pub(super) struct Slice {
    pub(super) folder: PathBuf,
    path: String,
    children: Vec<Child>,
}

impl Slice {
    /// `None`: there can be none here, as was said.
    pub(super) fn new(test: &str) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = format!("/umpire-test-{}-{next}", std::process::id());
        let made = top().and_then(|top| {
            let folder = top.join(&path[1..]);
            fs::create_dir(&folder).ok().map(|()| folder)
        });
        if made.is_none() {
            println!("skipped: {test}: no control groups of version 2 can be made here");
        }
        Some(Slice {
            folder: made?,
            path,
            children: Vec::new(),
        })
    }

    fn path(&self, below: &str) -> String {
        format!("{}{below}", self.path)
    }

    pub(super) fn make(&self, below: &str) -> String {
        fs::create_dir(self.folder.join(&below[1..])).expect("a group");
        self.path(below)
    }

    pub(super) fn remove(&self, below: &str) {
        let folder = self.folder.join(&below[1..]);
        let until = Instant::now() + LONG;
        // Who has ended leaves a moment later.
        while fs::remove_dir(&folder).is_err() {
            assert!(Instant::now() < until, "{below} cannot be removed");
            pause();
        }
    }

    /// Runs a process in a group. Returns its place among those that were run.
    fn run(&mut self, below: &str) -> usize {
        self.start(below, Command::new("cat"));
        self.children.len() - 1
    }

    /// Runs a command in a group, and returns its process.
    pub(super) fn start(&mut self, below: &str, mut command: Command) -> &mut Child {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let child = child.expect("it starts");
        let procs = self.folder.join(&below[1..]).join("cgroup.procs");
        fs::write(procs, child.id().to_string()).expect("it goes there");
        self.children.push(child);
        self.last()
    }

    /// The process that was started last.
    pub(super) fn last(&mut self) -> &mut Child {
        self.children.last_mut().expect("one was started")
    }

    pub(super) fn child(&mut self, process: u32) -> &mut Child {
        let mut all = self.children.iter_mut();
        all.find(|child| child.id() == process)
            .expect("it was started")
    }

    fn process(&self, child: usize) -> u32 {
        self.children[child].id()
    }

    /// Runs a process of nobody's in a group.
    fn run_as_nobody(&mut self, below: &str) -> u32 {
        let mut command = Command::new(AS_NOBODY[0]);
        command.args(&AS_NOBODY[1..]).arg("cat");
        let process = self.start(below, command).id();
        let name = || fs::read_to_string(format!("/proc/{process}/comm"));
        let until = Instant::now() + LONG;
        while !name().is_ok_and(|name| name.trim() == "cat") {
            assert!(Instant::now() < until, "it does not start");
            pause();
        }
        process
    }

    /// Has a process run in a group from now on.
    pub(super) fn move_to(&self, below: &str, process: u32) {
        let procs = self.folder.join(&below[1..]).join("cgroup.procs");
        fs::write(procs, process.to_string()).expect("it goes there");
    }

    fn kill(&mut self, child: usize) {
        let child = &mut self.children[child];
        let _ = child.kill();
        child.wait().expect("it is ours");
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        // What they have started ends with them.
        let _ = fs::write(self.folder.join("cgroup.kill"), "1");
        (0..self.children.len()).for_each(|child| self.kill(child));
        remove_all(&self.folder);
    }
}

fn remove_all(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            remove_all(&entry.path());
        }
    }
    for _ in 0..1000 {
        if fs::remove_dir(folder).is_ok() {
            return;
        }
        pause();
    }
}

fn pause() {
    std::thread::sleep(std::time::Duration::from_millis(5));
}

const POLICY: &str = "arrive-ms = 300\naudit = \"AUDIT\"\n[[pmu]]\nprogrammable = 4\ncpus = \"0\"\n\
     [[tenant]]\nname = \"prolog\"\nusers = [0]\nwhole-cpus = true\nfor-others = true\n\
     [[tenant]]\nname = \"jobs\"\nusers = [65534]\n";

fn daemon(policy: &str) -> Daemon {
    let folder = tempfile::tempdir().expect("a folder");
    let audit = folder.path().join("audit").display().to_string();
    let mut daemon = Daemon::in_folder(folder, &[], &policy.replace("AUDIT", &audit));
    daemon.begin();
    daemon
}

fn request(cgroup: &str, count: u32) -> Request {
    Request {
        counters: vec![Counters::programmable(count)],
        scope: Some(LeaseScope::Cgroup),
        cgroup: Some(cgroup.to_owned()),
        ..Request::default()
    }
}

/// What is granted stays though the connection that asked has ended.
fn lease(daemon: &Daemon, request: &Request) -> Result<Lease, (Reason, String)> {
    let arbiter = Arbiter::connect(&daemon.socket()).expect("it answers");
    match arbiter.acquire(request) {
        Ok(held) => Ok(held.lease().clone()),
        Err(CallError::Refused(refusal)) => Err((refusal.reason, refusal.message)),
        Err(other) => panic!("{other}"),
    }
}

fn granted(daemon: &Daemon, cgroup: &str, count: u32) -> u64 {
    lease(daemon, &request(cgroup, count)).expect("a lease").id
}

fn there(daemon: &Daemon) -> Vec<u64> {
    let mut arbiter = Arbiter::connect(&daemon.socket()).expect("it answers");
    let leases = arbiter.leases().expect("leases");
    leases.iter().map(|lease| lease.id).collect()
}

fn until_there(daemon: &Daemon, expected: &[u64]) {
    let until = Instant::now() + LONG;
    while there(daemon) != expected {
        assert!(Instant::now() < until, "{:?}", there(daemon));
        pause();
    }
}

/// The second lease, once there is one.
fn second(daemon: &Daemon) -> u64 {
    let until = Instant::now() + LONG;
    loop {
        if let [_, second, ..] = there(daemon)[..] {
            return second;
        }
        assert!(Instant::now() < until, "it is not granted");
        pause();
    }
}

fn whole_cpu(count: u32) -> Request {
    Request {
        counters: vec![Counters::programmable(count)],
        ..Request::default()
    }
}

fn umpire(daemon: &Daemon, words: &[&str]) -> Output {
    let mut command = Command::new(guest_tests::umpire::path());
    command.args(words).arg("--arbiter").arg(daemon.socket());
    command.output().expect("umpire starts")
}

#[test]
fn what_a_group_holds_is_the_groups_until_nothing_runs_there() {
    let Some(mut slice) = Slice::new("what_a_group_holds_is_the_groups") else {
        return;
    };
    let mut daemon = daemon(POLICY);
    let job = slice.make("/job");
    let first = slice.run("/job");
    let words = ["lease", "--cgroup", &job, "--counters", "2"];
    let asked = umpire(&daemon, &words);
    let said = String::from_utf8_lossy(&asked.stdout).into_owned();
    assert!(asked.status.success(), "{asked:?}");
    assert!(
        said.contains("lease 1: 2 of 2") && said.contains(&job),
        "{said}"
    );
    let listed = umpire(&daemon, &["leases"]);
    assert!(String::from_utf8_lossy(&listed.stdout).contains(&job));
    let (reason, _) = lease(&daemon, &whole_cpu(3)).expect_err("two are the job's");
    assert_eq!(reason, Reason::Held);

    // Whoever is in it keeps it, over a crash of the arbiter too; nobody has to come back.
    daemon.kill();
    daemon.begin();
    let second = slice.run("/job");
    slice.kill(first);
    let mut arbiter = Arbiter::connect(&daemon.socket()).expect("it answers");
    let leases = arbiter.leases().expect("leases");
    assert_eq!(leases[0].state.to_string(), "holds");
    assert_eq!(leases[0].scope, LeaseScope::Cgroup);
    slice.kill(second);
    until_there(&daemon, &[]);
    drop(lease(&daemon, &whole_cpu(4)).expect("all are free"));
}

#[test]
fn groups_in_groups_end_in_every_order() {
    let Some(mut slice) = Slice::new("groups_in_groups_end_in_every_order") else {
        return;
    };
    let daemon = daemon(POLICY);
    let names = ["/a", "/a/b", "/a/b/c"];
    for (round, order) in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ]
    .into_iter()
    .enumerate()
    {
        let paths = names.map(|name| slice.make(name));
        let run = names.map(|name| slice.run(name));
        let first = 3 * round as u64 + 1;
        assert_eq!(granted(&daemon, &paths[0], 3), first);
        // A path from the first on has what the first has, together.
        assert_eq!(granted(&daemon, &paths[1], 2), first + 1);
        let (reason, message) = lease(&daemon, &request(&paths[2], 2)).expect_err("one is left");
        assert_eq!(reason, Reason::BeyondGroup, "{message}");
        assert_eq!(granted(&daemon, &paths[2], 1), first + 2);
        // Another group may have what these do not have while they run.
        let mut ended = [false; 3];
        for one in order {
            slice.kill(run[one]);
            ended[one] = true;
            // A group is empty once those in it are, too.
            let left: Vec<u64> = (0..3)
                .filter(|at| ended[*at..].contains(&false))
                .map(|at| first + at as u64)
                .collect();
            until_there(&daemon, &left);
        }
        names.iter().rev().for_each(|name| slice.remove(name));
    }
}

#[test]
fn who_does_not_come_in_time_has_nothing() {
    let Some(mut slice) = Slice::new("who_does_not_come_in_time_has_nothing") else {
        return;
    };
    let daemon = daemon(POLICY);
    let [late, early, gone] = ["/late", "/early", "/gone"].map(|name| slice.make(name));
    let late = granted(&daemon, &late, 1);
    let early = granted(&daemon, &early, 1);
    let gone = granted(&daemon, &gone, 1);
    slice.run("/early");
    slice.remove("/gone");
    until_there(&daemon, &[early]);
    assert_eq!(why_ended(&daemon, late), "nobody-came");
    assert_eq!(why_ended(&daemon, gone), "group-empty");
}

/// Why a lease has ended, as the audit has it.
fn why_ended(daemon: &Daemon, id: u64) -> String {
    let audit = fs::read_to_string(daemon.folder.path().join("audit")).expect("an audit");
    let is_end = |line: &&str| {
        line.contains(r#""event":"ended""#) && line.contains(&format!(r#""lease":{id},"#))
    };
    let line = audit.lines().find(is_end).expect("its end");
    let value: serde_json::Value = serde_json::from_str(line).expect("JSON");
    value["why"].as_str().expect("a word").to_owned()
}

#[test]
fn a_name_that_is_anothers_by_now_holds_nothing() {
    let Some(mut slice) = Slice::new("a_name_that_is_anothers_by_now_holds_nothing") else {
        return;
    };
    let mut daemon = daemon(POLICY);
    let job = slice.make("/job");
    let child = slice.run("/job");
    granted(&daemon, &job, 4);
    daemon.kill();
    slice.kill(child);
    slice.remove("/job");
    slice.make("/job");
    slice.run("/job");
    daemon.begin();
    until_there(&daemon, &[]);
    assert_eq!(granted(&daemon, &job, 4), 2);
}

/// Sends a request, and prints whether it was granted, or why not.
const ASK: &str = r#"
import json, socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
request = {"counters": [{"count": 1}], "scope": "cgroup", **json.loads(sys.argv[2])}
client.sendall(json.dumps({"method": "io.umpire.Arbiter.Acquire", "parameters": {"request": request}}).encode() + b"\0")
answer = b""
while not answer.endswith(b"\0"):
    answer += client.recv(65536)
answer = json.loads(answer[:-1])
if "error" in answer:
    print("refused", answer["parameters"]["refusal"]["message"])
else:
    print("granted", answer["parameters"]["lease"]["tenant"], answer["parameters"]["lease"]["uid"])
"#;

fn ask(daemon: &Daemon, before: &[&str], request: &str) -> String {
    let mut command = Command::new(before[0]);
    let command = command.args(&before[1..]).args([python3(), "-c", ASK]);
    let asked = command.arg(daemon.socket()).arg(request).output();
    let asked = asked.expect("it starts");
    let said = String::from_utf8_lossy(&asked.stdout);
    format!("{said}{}", String::from_utf8_lossy(&asked.stderr))
}

#[test]
fn what_is_no_group_of_the_callers_is_refused_and_nothing_is_held() {
    let Some(mut slice) = Slice::new("what_is_no_group_of_the_callers") else {
        return;
    };
    let daemon = daemon(POLICY);
    daemon.open_to_all();
    let job = slice.make("/job");
    for (path, why) in [
        (format!("{job}/../job"), "'.' or '..'"),
        (format!("{job}//x"), "is empty"),
        (slice.path("/nobody"), "is not there"),
        ("/".to_owned(), "scope cpu"),
        (format!("{job}/cgroup.procs"), "is not there"),
        (format!("/{}", "x/".repeat(100)), "too many others"),
        ("/".to_owned() + &"x".repeat(5000), "no control group"),
        (".".to_owned(), "scope cpu"),
    ] {
        let (reason, message) = lease(&daemon, &request(&path, 1)).expect_err(&path);
        assert_eq!(reason, Reason::WrongRequest);
        assert!(
            message.contains(why) && !message.contains('\n'),
            "{path}: {message}"
        );
    }
    // Empty, and root's; then with somebody of root's in it.
    let of_job = format!(r#"{{"cgroup": "{job}"}}"#);
    let said = ask(&daemon, &AS_NOBODY, &of_job);
    assert!(said.contains("no process of user 65534"), "{said}");
    slice.run("/job");
    let said = ask(&daemon, &AS_NOBODY, &of_job);
    assert!(said.contains("not of user 65534"), "{said}");
    // Nor does one user ask for another.
    let for_root = format!(r#"{{"cgroup": "{job}", "for_uid": 0, "for_gid": 0}}"#);
    let said = ask(&daemon, &AS_NOBODY, &for_root);
    assert!(said.contains("for-others"), "{said}");
    // More groups than anybody looks at for one lease.
    slice.make("/bomb");
    (0..300).for_each(|at| drop(slice.make(&format!("/bomb/{at}"))));
    let bomb = format!(r#"{{"cgroup": "{}"}}"#, slice.path("/bomb"));
    let said = ask(&daemon, &AS_NOBODY, &bomb);
    assert!(said.contains("too many groups"), "{said}");
    assert_eq!(there(&daemon), [0; 0]);
    drop(lease(&daemon, &whole_cpu(4)).expect("nothing is held"));
}

/// Who runs below a group of somebody else's has not that one, which others may need.
#[test]
fn a_folder_of_anothers_is_leased_by_who_runs_in_it_itself() {
    let Some(mut slice) = Slice::new("a_folder_of_anothers_is_leased_by_who_runs_in_it") else {
        return;
    };
    let daemon = daemon(POLICY);
    daemon.open_to_all();
    let [slurm, job] = ["/slurm", "/slurm/job"].map(|name| slice.make(name));
    let process = slice.run_as_nobody("/slurm/job");
    let [outer, inner] = [slurm, job].map(|path| format!(r#"{{"cgroup": "{path}"}}"#));
    let said = ask(&daemon, &AS_NOBODY, &outer);
    assert!(said.contains("no process of user 65534"), "{said}");
    assert_eq!(there(&daemon), [0; 0]);
    let said = ask(&daemon, &AS_NOBODY, &inner);
    assert!(said.starts_with("granted jobs"), "{said}");
    slice.child(process).kill().expect("it runs");
    until_there(&daemon, &[]);
    // One that was given to it (`Delegate=` of systemd) is its own.
    chown(slice.folder.join("slurm"), Some(65534), None).expect("root may");
    slice.run_as_nobody("/slurm/job");
    let said = ask(&daemon, &AS_NOBODY, &outer);
    assert!(said.starts_with("granted jobs"), "{said}");
}

/// However large a group is, the few threads with leases are none that run in it, or are.
#[test]
fn a_large_group_is_leased_beside_threads_with_leases() {
    let Some(mut slice) = Slice::new("a_large_group_is_leased_beside_threads") else {
        return;
    };
    let daemon = daemon(POLICY);
    let large = slice.make("/large");
    (0..1100).for_each(|at| drop(slice.make(&format!("/large/{at}"))));
    // Its name begins as the other one's.
    slice.make("/large-not");
    let outside = slice.run("/large-not");
    let inside = slice.run("/large/7");
    let of_thread = |child: usize| {
        let arbiter = Arbiter::connect(&daemon.socket()).expect("it answers");
        let held = arbiter.acquire(&Request {
            counters: vec![Counters::programmable(1)],
            scope: Some(LeaseScope::Thread),
            threads: Some(vec![slice.process(child)]),
            ..Request::default()
        });
        held.expect("a lease")
    };
    let held = of_thread(inside);
    let (_, said) = lease(&daemon, &request(&large, 1)).expect_err("a thread has one");
    let right = said.contains("has a lease of its own")
        && said.contains(&slice.process(inside).to_string());
    assert!(right, "{said}");
    drop(held);
    until_there(&daemon, &[]);
    let held = of_thread(outside);
    let above = granted(&daemon, &large, 1);
    assert_eq!(there(&daemon), [held.lease().id, above]);
}

/// Sends a request without a scope, and prints what came of it. Its process has no first thread
/// any more by then, or has ended, and a child of it has its connection.
const ASK_LATE: &str = r#"
import ctypes, json, os, socket, sys, threading, time
def ask(client):
    time.sleep(0.3)
    request = {"counters": [{"count": 1}]}
    client.sendall(json.dumps({"method": "io.umpire.Arbiter.Acquire", "parameters": {"request": request}}).encode() + b"\0")
    answer = b""
    while not answer.endswith(b"\0"):
        answer += client.recv(65536)
    answer = json.loads(answer[:-1])["parameters"]
    if "refusal" in answer:
        print("refused", answer["refusal"]["message"], flush=True)
    else:
        print(answer["lease"]["scope"], answer["lease"].get("within"), flush=True)
    os._exit(0)
def connected():
    client = socket.socket(socket.AF_UNIX)
    client.connect(sys.argv[1])
    return client
kind = sys.argv[2]
if kind == "thread":
    threading.Thread(target=lambda: ask(connected())).start()
    ctypes.CDLL(None).syscall(60, 0)
client = connected()
if kind == "answered":
    client.sendall(b'{"method": "io.umpire.Arbiter.List"}\0')
    client.recv(65536)
if os.fork() == 0:
    ask(client)
os._exit(0)
"#;

/// It is not outside of its group because it is hard to see where it is.
#[test]
fn who_has_no_first_thread_is_not_outside_of_its_group() {
    let Some(mut slice) = Slice::new("who_has_no_first_thread_is_not_outside") else {
        return;
    };
    let daemon = daemon(POLICY);
    let job = slice.make("/job");
    slice.run("/job");
    let above = granted(&daemon, &job, 1);
    let ask = |kind: &str| {
        let before = inside(&slice, "/job");
        let mut command = Command::new(&before[0]);
        let command = command.args(&before[1..]).args([python3(), "-c", ASK_LATE]);
        let asked = command.arg(daemon.socket()).arg(kind).output();
        let asked = asked.expect("it starts");
        let errors = String::from_utf8_lossy(&asked.stderr).into_owned();
        format!("{}{errors}", String::from_utf8_lossy(&asked.stdout))
    };
    assert_eq!(ask("thread"), format!("part {above}\n"));
    for kind in ["answered", "at once"] {
        let said = ask(kind);
        let right = said.starts_with("refused") && said.contains("has ended");
        assert!(right, "{kind}: {said}");
    }
}

/// The kernel renames no group of version 2, so a lease never has another path than it was asked
/// for by.
#[test]
fn a_group_is_not_renamed() {
    let Some(mut slice) = Slice::new("a_group_is_not_renamed") else {
        return;
    };
    let daemon = daemon(POLICY);
    let [job, _] = ["/job", "/job/inner"].map(|name| slice.make(name));
    slice.run("/job");
    let id = granted(&daemon, &job, 1);
    for (from, to) in [("job", "other"), ("job/inner", "inner")] {
        let renamed = fs::rename(slice.folder.join(from), slice.folder.join(to));
        let errno = renamed.expect_err("no group is").raw_os_error();
        // EPERM: there is none; EIO: it would be elsewhere.
        assert!(matches!(errno, Some(1 | 5)), "{from}: {errno:?}");
    }
    assert_eq!(there(&daemon), [id]);
}

#[test]
fn a_group_is_leased_for_others_by_a_right_of_its_own() {
    let Some(mut slice) = Slice::new("a_group_is_leased_for_others") else {
        return;
    };
    let daemon = daemon(POLICY);
    let job = slice.make("/job");
    let for_nobody = Request {
        for_uid: Some(65534),
        for_gid: Some(65534),
        ..request(&job, 2)
    };
    // It is empty: the job comes.
    let lease_of_job = lease(&daemon, &for_nobody).expect("a lease");
    assert_eq!(
        (lease_of_job.tenant.as_str(), lease_of_job.uid),
        ("jobs", 65534)
    );
    let mut arbiter = Arbiter::connect(&daemon.socket()).expect("it answers");
    let GroupsOut { groups } = arbiter.call("Groups", &NoReply {}).expect("groups");
    assert_eq!(groups[0].path, job);
    assert_eq!(groups[0].by_tenant.as_deref(), Some("prolog"));
    let audit = fs::read_to_string(daemon.folder.path().join("audit")).expect("an audit");
    let line = audit.lines().find(|line| line.contains(&job)).expect("it");
    for word in [
        r#""tenant":"jobs""#,
        r#""asked_by":"prolog""#,
        r#""uid":65534"#,
    ] {
        assert!(line.contains(word), "{line}");
    }
    // Whose processes are not the job's is not its group.
    slice.make("/other");
    slice.run("/other");
    let other = Request {
        cgroup: Some(slice.path("/other")),
        ..for_nobody.clone()
    };
    let (_, message) = lease(&daemon, &other).expect_err("it is root's");
    assert!(
        message.contains("not of user 65534 and group 65534"),
        "{message}"
    );
    let unknown = Request {
        for_uid: Some(4242),
        for_gid: Some(4242),
        ..request(&job, 1)
    };
    let (reason, _) = lease(&daemon, &unknown).expect_err("it has no tenant");
    assert_eq!(reason, Reason::UnknownTenant);
}

/// Who runs in a unit's group is none of those who may ask for it, which they may by its name.
/// Whose it is, and of which group; nothing of a process that has ended since.
#[test]
fn which_group_a_lease_is_for_is_shown_to_people_and_programs() {
    let Some(mut slice) = Slice::new("which_group_a_lease_is_for") else {
        return;
    };
    let daemon = daemon(POLICY);
    let job = slice.make("/job");
    let number = fs::metadata(slice.folder.join("job")).expect("it is there");
    let number = std::os::unix::fs::MetadataExt::ino(&number);
    let words = ["lease", "--cgroup", &job, "--counters", "3"];
    let for_job = ["--for-user", "65534", "--for-group", "65534"];
    let asked = umpire(&daemon, &[&words[..], &for_job].concat());
    assert!(asked.status.success(), "{asked:?}");
    let within = slice.make("/job/step");
    slice.run("/job/step");
    granted(&daemon, &within, 2);
    let printed = |words: &[&str]| {
        let output = umpire(&daemon, words);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    for text in [printed(&["leases"]), printed(&["who"])] {
        let group = format!("control group {job}, asked for by user 0 of 'prolog'");
        let line = text.lines().find(|line| line.contains(&group));
        let line = line.unwrap_or_else(|| panic!("{text}"));
        assert!(
            line.contains("user 65534") && !line.contains("process"),
            "{line}"
        );
        let inner = format!("control group {within}; out of lease 1,");
        assert!(text.contains(&inner), "{text}");
    }
    let (leases, who) = (printed(&["leases", "-j"]), printed(&["who", "-j"]));
    crate::golden::schemas::valid("leases", &leases);
    crate::golden::schemas::valid("who", &who);
    let expected = serde_json::json!({
        "lease": 1, "uid": 65534, "path": job, "number": number, "by_tenant": "prolog", "by_uid": 0
    });
    let first = leases.lines().next().unwrap_or_default();
    let first: serde_json::Value = serde_json::from_str(first).expect("JSON");
    assert_eq!(first["group"], expected);
    let who: serde_json::Value = serde_json::from_str(&who).expect("JSON");
    assert_eq!(who["groups"][0], expected);
    assert_eq!(who["groups"][1]["path"], within);
    assert_eq!(who["places"][0]["leases"][1]["within"], 1);
}

/// A path is not where the hierarchy is mounted, and an empty group is not left to wait in silence.
#[test]
fn what_was_meant_by_a_path_and_that_nobody_came_yet_is_said() {
    let Some(mut slice) = Slice::new("what_was_meant_by_a_path") else {
        return;
    };
    let daemon = daemon(POLICY);
    let job = slice.make("/job");
    for mount in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
        let (_, message) = lease(&daemon, &request(&format!("{mount}{job}"), 1))
            .expect_err("it is no group's path");
        assert!(message.contains(&format!("mounted: '{job}'")), "{message}");
    }
    for is_empty in [true, false] {
        if !is_empty {
            slice.run("/job");
        }
        let asked = umpire(&daemon, &["lease", "--cgroup", &job]);
        let said = String::from_utf8_lossy(&asked.stderr).into_owned();
        assert!(asked.status.success(), "{said}");
        assert_eq!(said.contains("arrive-ms"), is_empty, "{said}");
    }
}

/// The `umpire lease` of an example's unit, for a group of the test's own.
fn of_unit(name: &str, daemon: &Daemon, group: &str) -> Output {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/examples");
    let unit = fs::read_to_string(folder.join(name)).expect("an example");
    let mut lines = unit.lines();
    let line = lines.find_map(|line| line.strip_prefix("ExecStartPost="));
    let line = line.expect("it asks when it has started");
    let mut words = line.trim_start_matches(['-', '+']).split(' ');
    assert_eq!(words.next(), Some("/usr/bin/umpire"), "{name}");
    let mut words: Vec<&str> = words.collect();
    let path = words.iter().position(|word| *word == "--cgroup");
    words[path.expect("of a group") + 1] = group;
    umpire(daemon, &words)
}

#[test]
fn the_units_of_the_examples_lease_what_they_say() {
    let Some(mut slice) = Slice::new("the_units_of_the_examples") else {
        return;
    };
    let daemon = daemon(POLICY);
    for name in ["umpire-counters.conf", "web-shop.service"] {
        let unit = slice.make("/unit");
        let run = slice.run("/unit");
        let asked = of_unit(name, &daemon, &unit);
        let said = String::from_utf8_lossy(&asked.stdout).into_owned();
        assert!(asked.status.success(), "{asked:?}");
        assert!(said.contains("2 of 2 counters"), "{said}");
        slice.kill(run);
        until_there(&daemon, &[]);
        slice.remove("/unit");
    }
    // What sleeps in the slice of VMs keeps it, before the first of them and after the last.
    let machines = slice.make("/machine");
    slice.make("/machine/keeper");
    slice.make("/machine/vm");
    let keeper = slice.run("/machine/keeper");
    let asked = of_unit("machine-counters.service", &daemon, &machines);
    assert!(asked.status.success(), "{asked:?}");
    let all = there(&daemon);
    let words = ["lease", "--counters", "3", "--", "true"];
    let (done, said) = ended(in_group(&slice, "/machine/vm", &daemon, &words));
    let out_of = format!("out of lease {}", all[0]);
    assert!(done && said.contains(&out_of), "{said}");
    // It would have ended by now, had nobody come.
    std::thread::sleep(std::time::Duration::from_millis(700));
    until_there(&daemon, &all);
    slice.kill(keeper);
    until_there(&daemon, &[]);
}

/// In C: root's job can be named, and what is taken out of a group's lease says so.
#[test]
fn a_program_in_c_names_roots_job_and_has_parts_of_it() {
    let Some(slice) = Slice::new("a_program_in_c_names_roots_job") else {
        return;
    };
    let daemon = daemon(&format!("{POLICY}cgroups = ['/umpire-test-*']\n"));
    let job = slice.make("/job");
    let program = super::c_library::command(&daemon, "within");
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
    command.arg(slice.folder.join("job/cgroup.procs"));
    command.arg(program.get_program()).args(program.get_args());
    command.arg(&job).env("UMPIRE_ARBITER", daemon.socket());
    let output = command.output().expect("sh starts");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_rule_has_the_names_of_groups_that_are_leased() {
    let Some(mut slice) = Slice::new("a_rule_has_the_names_of_groups") else {
        return;
    };
    let rule = format!(
        "for-cgroups = ['{}']\nmaximum = {{ programmable = 2 }}\n",
        slice.path("/web-*.service")
    );
    let mut daemon = daemon(&format!("{POLICY}{rule}"));
    daemon.open_to_all();
    let web = slice.make("/web-shop.service");
    let other = slice.make("/db.service");
    let child = slice.run("/web-shop.service");
    slice.run("/db.service");
    let of = |path: &str, count: u32| {
        format!(r#"{{"cgroup": "{path}", "counters": [{{"count": {count}}}]}}"#)
    };
    for (path, count, why) in [
        (&other, 2, "not of user 65534"),
        // The limits are those of who asks.
        (&web, 3, "of a kind"),
    ] {
        let said = ask(&daemon, &AS_NOBODY, &of(path, count));
        assert!(said.starts_with("refused") && said.contains(why), "{said}");
    }
    // By a name nobody spends another tenant's counters, and nobody becomes root.
    let ours = format!(r#"{{"cgroup": "{web}", "counters": [{{"count": 1}}]"#);
    for of_whom in [
        r#""for_uid": 0, "for_gid": 0"#,
        r#""for_uid": 0, "for_gid": 0, "tenant": "prolog""#,
        r#""for_uid": 65534, "for_gid": 65534"#,
    ] {
        let said = ask(&daemon, &AS_NOBODY, &format!("{ours}, {of_whom}}}"));
        let right = said.starts_with("refused") && said.contains("leave out for_uid");
        assert!(right, "{of_whom}: {said}");
    }
    let out = format!(r#"{{"cgroup": "{web}/../db.service"}}"#);
    let said = ask(&daemon, &AS_NOBODY, &out);
    assert!(said.contains("'.' or '..'"), "{said}");
    let said = ask(&daemon, &AS_NOBODY, &of(&web, 2));
    assert!(said.starts_with("granted jobs 65534"), "{said}");
    // It is that group's, by its number: another of that name has nothing of it.
    daemon.kill();
    slice.kill(child);
    slice.remove("/web-shop.service");
    slice.make("/web-shop.service");
    slice.run("/web-shop.service");
    daemon.begin();
    until_there(&daemon, &[]);
}

/// What has a process of the caller go into a group, and run a command there.
fn inside(slice: &Slice, below: &str) -> Vec<String> {
    let procs = slice.folder.join(&below[1..]).join("cgroup.procs");
    let into = format!("echo $$ > {}; exec \"$@\"", procs.display());
    ["sh", "-c", &into, "sh"].map(str::to_owned).into()
}

fn ask_inside(daemon: &Daemon, slice: &Slice, below: &str, request: &str) -> String {
    let mut before = inside(slice, below);
    before.extend(AS_NOBODY.map(str::to_owned));
    let before: Vec<&str> = before.iter().map(String::as_str).collect();
    ask(daemon, &before, request)
}

/// What somebody else has asked for is the most that all have who run there: whoever is inside
/// gets a part of it, and nothing beside it.
#[test]
fn nobody_inside_lifts_what_a_group_was_given() {
    let Some(mut slice) = Slice::new("nobody_inside_lifts_what_a_group_was_given") else {
        return;
    };
    let daemon = daemon(POLICY);
    daemon.open_to_all();
    for (at, for_whom) in [None, Some(65534)].into_iter().enumerate() {
        let name = format!("/job{at}");
        let job = slice.make(&name);
        // Of itself it may have one, and then another: whose both are is the same.
        let own = format!(r#"{{"cgroup": "{job}"}}"#);
        let dot = r#"{"cgroup": "."}"#;
        let before = ask_inside(&daemon, &slice, &name, dot);
        assert!(before.starts_with("granted jobs"), "{before}");
        until_there(&daemon, &[]);
        let process = slice.run_as_nobody(&name);
        let asked = lease(
            &daemon,
            &Request {
                for_uid: for_whom,
                for_gid: for_whom,
                ..request(&job, 2)
            },
        );
        let above = asked.expect("a lease").id;
        for request in [&*own, dot] {
            let said = ask_inside(&daemon, &slice, &name, request);
            assert!(
                said.contains(&format!("has lease {above} already")) && said.contains("a part"),
                "{said}"
            );
        }
        assert_eq!(there(&daemon), [above]);
        let said = ask_inside(&daemon, &slice, &name, r#"{"scope": "part"}"#);
        assert!(said.starts_with("granted jobs"), "{said}");
        let more = r#"{"scope": "part", "counters": [{"count": 3}]}"#;
        let said = ask_inside(&daemon, &slice, &name, more);
        assert!(said.starts_with("refused"), "{said}");
        // Of a user's own there may be two.
        slice.child(process).kill().expect("it runs");
        until_there(&daemon, &[]);
    }
    let job = slice.make("/own");
    let two = r#"
import subprocess, sys
sys.exit(max(subprocess.call(sys.argv[1:]) for _ in range(2)))
"#;
    let mut before = inside(&slice, "/own");
    before.extend(AS_NOBODY.map(str::to_owned));
    before.extend([python3().to_owned(), "-c".to_owned(), two.to_owned()]);
    let before: Vec<&str> = before.iter().map(String::as_str).collect();
    let said = ask(&daemon, &before, &format!(r#"{{"cgroup": "{job}"}}"#));
    assert_eq!(said.matches("granted jobs").count(), 2, "{said}");
}

/// Runs a command as root of a user namespace in which user and group 65534 are 7.
const RENUMBERED: &str = r#"
import ctypes, os, sys
(waits, begins), (ready, tells) = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    done = ctypes.CDLL(None).unshare(0x10000000)
    os.write(tells, b"y" if done == 0 else b"n")
    os.read(waits, 1)
    os.execvp(sys.argv[1], sys.argv[1:])
if os.read(ready, 1) == b"n":
    print("no user namespace", flush=True)
    os.kill(child, 9)
for kind in "uid", "gid":
    with open(f"/proc/{child}/{kind}_map", "w") as file:
        file.write("0 0 1\n7 65534 1\n")
os.write(begins, b"x")
os.waitpid(child, 0)
"#;

#[test]
fn numbers_of_users_are_those_of_the_namespace_of_who_asks() {
    let name = "numbers_of_users_are_those_of_the_namespace_of_who_asks";
    let Some(slice) = Slice::new(name) else {
        return;
    };
    let daemon = daemon(POLICY);
    let job = slice.make("/job");
    let ask = |number: u32| {
        let request = format!(r#"{{"cgroup": "{job}", "for_uid": {number}, "for_gid": {number}}}"#);
        ask(&daemon, &[python3(), "-c", RENUMBERED], &request)
    };
    let said = ask(7);
    if said.contains("no user namespace") {
        println!("skipped: {name}: {said}");
        return;
    }
    assert!(said.starts_with("granted jobs 65534"), "{said}");
    // Those numbers mean nobody there, whoever has them here.
    for number in [65534, 1, u32::MAX] {
        let said = ask(number);
        assert!(said.contains("nobody whom the arbiter's knows"), "{said}");
    }
}

#[test]
fn whoever_is_in_a_namespace_names_its_own_group() {
    let Some(slice) = Slice::new("whoever_is_in_a_namespace_names_its_own_group") else {
        return;
    };
    let daemon = daemon(POLICY);
    let [job, inner] = ["/job", "/job/inner"].map(|name| slice.make(name));
    let procs = slice
        .folder
        .join("job/inner/cgroup.procs")
        .display()
        .to_string();
    let into = format!("echo $$ > {procs}; exec unshare --cgroup \"$@\"");
    let before = ["sh", "-c", &into, "sh"];
    let said = ask(&daemon, &before, r#"{"cgroup": "."}"#);
    if said.contains("unshare failed") {
        println!("skipped: whoever_is_in_a_namespace_names_its_own_group: {said}");
        return;
    }
    assert!(said.starts_with("granted"), "{said}");
    let audit = fs::read_to_string(daemon.folder.path().join("audit")).expect("an audit");
    assert!(audit.contains(&inner), "{job}: {audit}");
    until_there(&daemon, &[]);
}

/// The names of control groups are bytes: one that is no text hides no thread.
#[test]
fn a_thread_in_a_leased_group_is_found_by_names_of_any_bytes() {
    let Some(slice) = Slice::new("a_thread_in_a_leased_group_is_found") else {
        return;
    };
    let daemon = daemon(POLICY);
    let job = slice.make("/job");
    let odd = slice.folder.join(OsStr::from_bytes(b"job/B\xfcro"));
    fs::create_dir(&odd).expect("a group");
    let mut command = Command::new("cat");
    let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
    let mut child = child.expect("cat starts");
    fs::write(odd.join("cgroup.procs"), child.id().to_string()).expect("it goes there");
    let above = granted(&daemon, &job, 1);
    let of_thread = Request {
        counters: vec![Counters::programmable(1)],
        scope: Some(LeaseScope::Thread),
        threads: Some(vec![child.id()]),
        ..Request::default()
    };
    let asked = lease(&daemon, &of_thread);
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    assert_eq!(asked.expect("a part of the group's").within, Some(above));
}

#[test]
fn threads_with_leases_and_groups_do_not_mix() {
    let Some(mut slice) = Slice::new("threads_with_leases_and_groups_do_not_mix") else {
        return;
    };
    let daemon = daemon(POLICY);
    let job = slice.make("/job");
    let child = slice.run("/job");
    let of_thread = Request {
        counters: vec![Counters::programmable(1)],
        scope: Some(LeaseScope::Thread),
        threads: Some(vec![slice.children[child].id()]),
        ..Request::default()
    };
    let arbiter = Arbiter::connect(&daemon.socket()).expect("it answers");
    let held = arbiter.acquire(&of_thread).expect("a lease");
    let (_, message) = lease(&daemon, &request(&job, 1)).expect_err("a thread has one");
    assert!(message.contains("has a lease of its own"), "{message}");
    drop(held);
    until_there(&daemon, &[]);
    slice.run("/job");
    let above = granted(&daemon, &job, 1);
    // Now it is taken out of what the group has, and ends with that.
    let arbiter = Arbiter::connect(&daemon.socket()).expect("it answers");
    let held = arbiter.acquire(&of_thread).expect("a lease");
    assert_eq!(held.lease().scope, LeaseScope::Thread);
    assert_eq!(held.lease().within, Some(above));
    let more = Request {
        counters: vec![Counters::programmable(2)],
        ..of_thread.clone()
    };
    let (reason, message) = lease(&daemon, &more).expect_err("more than the group has");
    assert_eq!(reason, Reason::BeyondGroup, "{message}");
    // Who runs elsewhere counts elsewhere.
    slice.make("/other");
    slice.move_to("/other", slice.process(child));
    until_there(&daemon, &[above]);
    assert_eq!(why_ended(&daemon, held.lease().id), "moved-away");
    // The other way, too.
    let held = Arbiter::connect(&daemon.socket()).expect("it answers");
    let held = held.acquire(&of_thread).expect("a lease of its own");
    assert_eq!(held.lease().within, None);
    slice.move_to("/job", slice.process(child));
    until_there(&daemon, &[above]);
    assert_eq!(why_ended(&daemon, held.lease().id), "moved-away");
}

/// Who has more threads than may have leases there is told what to do, and that is what it does.
#[test]
fn a_program_with_many_threads_has_a_part_of_the_group() {
    let Some(mut slice) = Slice::new("a_program_with_many_threads_has_a_part") else {
        return;
    };
    let daemon = daemon(POLICY);
    let job = slice.make("/job");
    let many = "import threading\nfor _ in range(32):\n    \
                threading.Thread(target=threading.Event().wait, daemon=True).start()\n\
                threading.Event().wait()";
    let mut command = Command::new(python3());
    command.args(["-c", many]);
    let process = slice.start("/job", command).id();
    let threads = || -> Vec<u32> {
        let all = fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
        let names = all.flatten().map(|entry| entry.file_name());
        names
            .filter_map(|name| name.to_str()?.parse().ok())
            .collect()
    };
    let until = Instant::now() + LONG;
    while threads().len() < 33 {
        assert!(Instant::now() < until, "its threads do not start");
        pause();
    }
    let above = granted(&daemon, &job, 3);
    let of = |threads: Vec<u32>| Request {
        counters: vec![Counters::programmable(2)],
        scope: Some(LeaseScope::Thread),
        threads: Some(threads),
        ..Request::default()
    };
    let (reason, said) = lease(&daemon, &of(threads())).expect_err("32 may");
    assert_eq!(reason, Reason::TooManyBelow);
    assert!(said.contains("scope part"), "{said}");
    let most = threads()[..32].to_vec();
    assert_eq!(
        lease(&daemon, &of(most)).expect("as many as may").within,
        Some(above)
    );
    until_there(&daemon, &[above]);
    let words = ["lease", "--counters", "2", "--", "true"];
    let (done, said) = ended(in_group(&slice, "/job", &daemon, &words));
    assert!(done && said.contains("out of lease"), "{said}");
}

/// A command in a group, as people start one there.
fn in_group(slice: &Slice, below: &str, daemon: &Daemon, words: &[&str]) -> Child {
    let procs = slice.folder.join(&below[1..]).join("cgroup.procs");
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
    command
        .arg(procs)
        .arg(guest_tests::umpire::path())
        .args(words);
    command.env("UMPIRE_ARBITER", daemon.socket());
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().expect("sh starts")
}

fn ended(child: Child) -> (bool, String) {
    let output = child.wait_with_output().expect("it is ours");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.success(), errors)
}

/// `umpire lease` in a leased group takes its own out of that one's, without being told; so do
/// those that it starts; and all end with the outer one.
#[test]
fn a_lease_within_a_lease_is_found_by_itself() {
    let Some(mut slice) = Slice::new("a_lease_within_a_lease_is_found_by_itself") else {
        return;
    };
    let daemon = daemon(POLICY);
    let job = slice.make("/job");
    slice.make("/job/step");
    slice.run("/job");
    // Before the group has one, it is one for the whole CPU.
    let (done, said) = ended(in_group(&slice, "/job", &daemon, &["lease", "--", "true"]));
    assert!(done && !said.contains("out of lease"), "{said}");
    let above = granted(&daemon, &job, 3);
    let path = guest_tests::umpire::path().display().to_string();
    let words = [
        "lease",
        "--counters",
        "2",
        "--",
        &path,
        "lease",
        "--",
        "true",
    ];
    for group in ["/job", "/job/step"] {
        let (done, said) = ended(in_group(&slice, group, &daemon, &words));
        assert!(done, "{said}");
        let out_of = format!(", out of lease {above}, of the control group that it is in");
        assert_eq!(said.matches(&out_of).count(), 2, "{said}");
    }
    // Never more than the group has, also one in another.
    let words = [
        "lease",
        "--counters",
        "2",
        "--",
        &path,
        "lease",
        "--counters",
        "2",
        "--",
        "true",
    ];
    let (done, said) = ended(in_group(&slice, "/job", &daemon, &words));
    assert!(
        !done && said.contains(&format!("taken out of lease {above}")),
        "{said}"
    );
    let words = ["lease", "--counters", "4", "--", "true"];
    let (done, said) = ended(in_group(&slice, "/job", &daemon, &words));
    assert!(
        !done && said.contains(&format!("taken out of lease {above}")),
        "{said}"
    );
    // Who waits outside of the group is not in its way.
    until_there(&daemon, &[above]);
    let held = in_group(&slice, "/job/step", &daemon, &["lease", "--counters", "3"]);
    let inner = second(&daemon);
    let listed = daemon.out(&["leases"]);
    assert!(
        listed.contains(&format!("out of lease {above}")),
        "{listed}"
    );
    daemon.out(&["revoke", &above.to_string()]);
    until_there(&daemon, &[]);
    assert_eq!(why_ended(&daemon, inner), "above-ended");
    let (_, said) = ended(held);
    assert!(said.contains("has ended, or holds less"), "{said}");
}

/// Who moves itself out of the group loses what it had of it.
#[test]
fn who_leaves_the_group_loses_its_part() {
    let Some(mut slice) = Slice::new("who_leaves_the_group_loses_its_part") else {
        return;
    };
    let daemon = daemon(POLICY);
    let job = slice.make("/job");
    slice.make("/other");
    slice.run("/job");
    let above = granted(&daemon, &job, 2);
    let held = in_group(&slice, "/job", &daemon, &["lease"]);
    let inner = second(&daemon);
    fs::write(
        slice.folder.join("other/cgroup.procs"),
        held.id().to_string(),
    )
    .expect("it moves");
    until_there(&daemon, &[above]);
    assert_eq!(why_ended(&daemon, inner), "moved-away");
    let (_, said) = ended(held);
    assert!(said.contains("in another control group now"), "{said}");
}

/// In namespaces of its own: of control groups, of processes, of mounts.
#[test]
fn a_container_has_a_lease_for_itself_and_parts_of_it() {
    let Some(slice) = Slice::new("a_container_has_a_lease_for_itself_and_parts_of_it") else {
        return;
    };
    let daemon = daemon(POLICY);
    let [_, inner] = ["/job", "/job/inner"].map(|name| slice.make(name));
    let procs = slice.folder.join("job/inner/cgroup.procs");
    let script = "echo $$ > \"$0\" && exec unshare --cgroup --pid --fork --mount --mount-proc sh -c \
         '\"$0\" lease --cgroup . --counters 2 && \"$0\" lease -- true' \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(procs);
    command.arg(guest_tests::umpire::path());
    let asked = command.env("UMPIRE_ARBITER", daemon.socket()).output();
    let asked = asked.expect("sh starts");
    let errors = String::from_utf8_lossy(&asked.stderr).into_owned();
    if errors.contains("unshare failed") {
        println!("skipped: a_container_has_a_lease_for_itself_and_parts_of_it: {errors}");
        return;
    }
    assert!(asked.status.success(), "{errors}");
    let out = String::from_utf8_lossy(&asked.stdout).into_owned();
    assert!(out.starts_with("lease 1: 2 of 2"), "{out}");
    assert!(
        errors.contains("lease 2: 1 of 1") && errors.contains("out of lease 1"),
        "{errors}"
    );
    let audit = fs::read_to_string(daemon.folder.path().join("audit")).expect("an audit");
    assert!(audit.contains(&inner), "{audit}");
    until_there(&daemon, &[]);
}
