//! Numbers and names that are not what they seem: of another namespace, of a thread that has
//! ended, of bytes that are no text, of users and control groups that are not there.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use umpire_lease::{Counters, Held, LeaseScope, Next, Reason, Request, What};

use super::fixture::{AS_NOBODY, Daemon, LONG, programmable};
use super::python::python3;

/// Asks for three counters for a thread, and prints what comes of it: the second argument is
/// the thread's number, `own`, or `child`; the third its name, in hexadecimal digits.
const ASK: &str = r#"
import ctypes, json, os, socket, sys, threading, time
path, which, name = sys.argv[1:4]
number = threading.get_native_id()
if which == "child":
    number = os.fork()
    if not number:
        time.sleep(60)
elif which != "own":
    number = int(which)
ctypes.CDLL(None).prctl(15, bytes.fromhex(name) if name else b"ask", 0, 0, 0)
client = socket.socket(socket.AF_UNIX)
client.connect(path)
request = {"counters": [{"kind": "programmable", "count": 3}], "scope": "thread", "threads": [number]}
client.sendall(json.dumps({"method": "io.umpire.Arbiter.Acquire", "parameters": {"request": request}}).encode() + b"\0")
answer = b""
while not answer.endswith(b"\0"):
    answer += client.recv(65536)
answer = json.loads(answer[:-1])
if "error" in answer:
    print("refused:", answer["parameters"]["refusal"]["message"], flush=True)
else:
    print("granted:", *answer["parameters"]["lease"]["threads"], flush=True)
sys.stdin.read()
if which == "child":
    os.kill(number, 9)
"#;

/// A tenant for everybody that the tests are, and no operator but root.
fn all() -> String {
    let me = rustix::process::geteuid().as_raw();
    format!(
        "[[pmu]]\nprogrammable = 4\ncpus = \"0\"\n\
         [[tenant]]\nname = \"all\"\nusers = [0, {me}, 65534]\n"
    )
}

fn daemon() -> Daemon {
    Daemon::with(&[], &all())
}

/// Whether a program of `before` runs here, which becomes another.
fn can(name: &str, before: &[&str]) -> bool {
    let tried = Command::new(before[0])
        .args(&before[1..])
        .arg(python3())
        .args(["-c", ""])
        .output();
    let can = tried.as_ref().is_ok_and(|output| output.status.success());
    if !can {
        println!("skipped: {name}: {before:?} does not work here: {tried:?}");
    }
    can
}

/// Who asks, and the first line that it says.
struct Asking {
    child: Child,
    said: String,
}

impl Asking {
    fn new(daemon: &Daemon, before: &[&str], which: &str, name: &str) -> Self {
        use std::io::{BufRead, BufReader};
        let mut command = Command::new(before[0]);
        command
            .args(&before[1..])
            .args([python3(), "-c", ASK])
            .arg(daemon.socket());
        command
            .args([which, name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut said = String::new();
        let out = child.stdout.take().expect("a pipe");
        BufReader::new(out)
            .read_line(&mut said)
            .expect("it says something");
        Asking {
            child,
            said: said.trim_end().to_owned(),
        }
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        self.child.wait().expect("it is ours");
    }
}

const IN_NAMESPACE: [&str; 4] = ["unshare", "--pid", "--fork", "--mount-proc"];

#[test]
fn numbers_of_threads_are_those_of_the_callers_namespace() {
    let name = "numbers_of_threads_are_those_of_the_callers_namespace";
    if !can(name, &IN_NAMESPACE) {
        return;
    }
    let daemon = daemon();
    // Both are thread 1 where they are.
    let one = Asking::new(&daemon, &IN_NAMESPACE, "own", "");
    let other = Asking::new(&daemon, &IN_NAMESPACE, "own", "");
    let here = Asking::new(&daemon, &["env"], "own", "");
    for asking in [&one, &other, &here] {
        assert!(asking.said.starts_with("granted: "), "{}", asking.said);
        assert_ne!(asking.said, "granted: 1");
    }
    assert_ne!(one.said, other.said);
    assert_eq!(here.said, format!("granted: {}", here.child.id()));
    // What means nothing there is refused for that, and nobody else's thread is meant.
    for number in ["424242", &here.child.id().to_string()] {
        let asking = Asking::new(&daemon, &IN_NAMESPACE, number, "");
        assert!(
            asking.said.contains("PID namespace of its own"),
            "{}",
            asking.said
        );
        asking.end();
    }
    // A namespace below one below.
    let deeper: Vec<&str> = IN_NAMESPACE.iter().chain(&IN_NAMESPACE).copied().collect();
    let deep = Asking::new(&daemon, &deeper, "own", "");
    assert!(
        deep.said.starts_with("granted: ") && deep.said != "granted: 1",
        "{}",
        deep.said
    );
    for asking in [one, other, here, deep] {
        asking.end();
    }
    if can(name, &AS_NOBODY) {
        daemon.open_to_all();
        let nobody: Vec<&str> = IN_NAMESPACE.iter().chain(&AS_NOBODY).copied().collect();
        let asking = Asking::new(&daemon, &nobody, "own", "");
        assert!(asking.said.starts_with("granted: "), "{}", asking.said);
        asking.end();
    }
}

#[test]
fn an_arbiter_in_a_namespace_does_not_guess_who_is_outside() {
    let name = "an_arbiter_in_a_namespace_does_not_guess_who_is_outside";
    if !can(name, &IN_NAMESPACE) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut daemon = Daemon::in_folder(folder, &[], &all());
    daemon.limited("exec unshare --pid --fork --kill-child --mount-proc \"$0\" \"$@\"");
    let asking = Asking::new(&daemon, &["env"], "own", "");
    assert!(
        asking.said.starts_with("refused: ")
            && asking.said.contains("neither the arbiter's nor below"),
        "{}",
        asking.said
    );
    asking.end();
}

#[test]
fn all_users_that_a_namespace_does_not_know_are_nobody_of_it() {
    let name = "all_users_that_a_namespace_does_not_know_are_nobody_of_it";
    let mapped = ["unshare", "--user", "--map-root-user"];
    if !can(name, &mapped) || !can(name, &AS_NOBODY) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    // In the arbiter's namespace the kernel calls them all 65534.
    let nobody = "[[pmu]]\nprogrammable = 4\n[[tenant]]\nname = \"nobody\"\nusers = [65534]\n";
    let mut daemon = Daemon::in_folder(folder, &[], nobody);
    daemon.limited("exec unshare --user --map-root-user \"$0\" \"$@\"");
    daemon.open_to_all();
    for uid in ["65534", "4711"] {
        let user = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"];
        let asking = Asking::new(&daemon, &user, "own", "");
        assert!(
            asking.said.starts_with("refused: no tenant") && asking.said.contains("uid_map"),
            "{}",
            asking.said
        );
        asking.end();
    }
    assert!(
        daemon.log().contains("user namespace does not know"),
        "{}",
        daemon.log()
    );
}

#[test]
fn nothing_depends_on_how_a_thread_is_called() {
    let name = "nothing_depends_on_how_a_thread_is_called";
    if !can(name, &AS_NOBODY) {
        return;
    }
    let daemon = daemon();
    daemon.open_to_all();
    for bytes in [
        "",
        "42fc726f",
        "e38380e38392e3",
        "29205a2031",
        "0a5569643a0930",
        "ff00",
    ] {
        let asking = Asking::new(&daemon, &AS_NOBODY, "own", bytes);
        assert!(
            asking.said.starts_with("granted: "),
            "{bytes}: {}",
            asking.said
        );
        asking.end();
    }
    let asking = Asking::new(&daemon, &AS_NOBODY, "1", "42fc");
    assert!(
        asking.said.contains("thread 1 is not one of this user's"),
        "{}",
        asking.said
    );
    asking.end();
    let asking = Asking::new(&daemon, &AS_NOBODY, "4194305", "42fc");
    assert!(
        asking.said.contains("there is no thread 4194305"),
        "{}",
        asking.said
    );
    asking.end();
}

/// A thread that lasts until its input ends.
fn thread() -> Child {
    let mut command = Command::new("cat");
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    command.spawn().expect("cat starts")
}

fn end(mut child: Child) {
    drop(child.stdin.take());
    child.wait().expect("it is ours");
}

fn for_threads(threads: &[&Child]) -> Request {
    Request {
        counters: vec![Counters::programmable(3)],
        cpus: Some("0".to_owned()),
        scope: Some(LeaseScope::Thread),
        threads: Some(threads.iter().map(|thread| thread.id()).collect()),
        ..Request::default()
    }
}

fn event(held: &mut Held) -> umpire_lease::Event {
    match held.next(Some(LONG)) {
        Ok(Next::Event(event)) => *event,
        other => panic!("no event: {other:?}"),
    }
}

#[test]
fn a_lease_is_given_up_with_its_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    let audit = folder.path().join("audit");
    let config = format!(
        "audit = \"{}\"\n{}",
        audit.display(),
        all() + "whole-cpus = true\n"
    );
    let mut daemon = Daemon::in_folder(folder, &[], &config);
    daemon.begin();
    let (one, other) = (thread(), thread());
    let mut held = daemon.acquire(&for_threads(&[&one, &other]));
    let mut all = vec![one.id(), other.id()];
    all.sort_unstable();
    assert_eq!(held.lease().threads, all);
    // Beside a thread that holds three of four, a whole CPU gets one.
    assert!(daemon.connect().acquire(&programmable(2)).is_err());
    let gone = one.id();
    end(one);
    let told = event(&mut held);
    assert_eq!(told.what, What::ThreadsGone, "{told:?}");
    assert_eq!(told.lease.threads, [other.id()]);
    assert!(told.message.contains(&gone.to_string()), "{}", told.message);
    end(other);
    let told = event(&mut held);
    assert_eq!(
        (told.what, told.why),
        (What::Ended, Some(Reason::ThreadsEnded))
    );
    daemon.acquire(&programmable(4));
    let trail = fs::read_to_string(&audit).expect("an audit");
    assert!(
        trail.contains("\"threads-gone\"") && trail.contains("\"threads-ended\""),
        "{trail}"
    );
}

#[test]
fn a_lease_of_before_a_restart_ends_with_threads_that_ended_meanwhile() {
    let mut daemon = daemon();
    let (lives, also) = (thread(), thread());
    let held = [&also, &lives].map(|thread| daemon.acquire(&for_threads(&[thread])));
    let [gone, left] = [held[0].lease().id, held[1].lease().id];
    daemon.kill();
    end(also);
    daemon.begin();
    let until = Instant::now() + LONG;
    loop {
        let leases = daemon.connect().leases().expect("it answers");
        let ids: Vec<u64> = leases.iter().map(|lease| lease.id).collect();
        assert!(ids.contains(&left), "{leases:?}");
        if !ids.contains(&gone) {
            break;
        }
        assert!(Instant::now() < until, "it does not end: {leases:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    end(lives);
}

/// Runs `umpire arbiterd --check-config` on a file, below a shell's script if there is one.
fn check(config: &[u8], script: Option<&str>) -> Output {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("c.toml");
    let mut file = fs::File::create(&path).expect("a file");
    file.write_all(config).expect("a disk");
    let umpire = guest_tests::umpire::path();
    let mut command = match script {
        None => Command::new(&umpire),
        Some(script) => {
            let mut command = Command::new("unshare");
            command.args(["--mount", "sh", "-c", script]).arg(&umpire);
            command
        }
    };
    command
        .args(["arbiterd", "--check-config", "--config"])
        .arg(&path);
    command.output().expect("it starts")
}

#[test]
fn a_rule_that_cannot_apply_is_warned_of() {
    let me = rustix::process::geteuid().as_raw();
    let base = format!("[[pmu]]\nprogrammable = 4\n[[tenant]]\nname = \"a\"\nusers = [{me}]\n");
    for (text, said) in [
        (
            r#"cgroups = ["/m.slice/qemu\x2d1.scope"]"#,
            r"'/m.slice/qemu\x2d1.scope'",
        ),
        (
            r"cgroups = ['/m.slice/qemu\x2d1.scope']",
            "does not exist now",
        ),
        (
            r#"cgroups = ["/no/such/*/group"]"#,
            "'/no/such/*/group' does not exist now",
        ),
        (r#"cgroups = ["no/such"]"#, "write '/no/such'"),
        (
            r#"for-cgroups = ["/s.slice/web\x2d*.service"]"#,
            r"'/s.slice/web\x2d*.service'",
        ),
        (r#"for-cgroups = ["s.slice"]"#, "write '/s.slice'"),
        (
            r#"cgroups = ["/sys/fs/cgroup/no"]"#,
            "leave out where the hierarchy is mounted: '/no'",
        ),
        (r#"cgroups = [""]"#, "cannot exist"),
        (r#"cgroups = ["/a//b"]"#, "a name in it is empty"),
        (r#"cgroups = ["/a/../b"]"#, "'.' or '..'"),
        ("groups = [4294967295]", "is no group's number"),
        (
            "groups = [3999999999]",
            "no group of the host has the number 3999999999",
        ),
        ("cpus = \"0,8000\"", "its cpus have 8000"),
        ("most-leases = 0", "most-leases = 0"),
        ("longest-ms = 0", "longest-ms = 0"),
        (
            "maximum = { programmable = 0, fixed = 0 }",
            "lets it have no counter",
        ),
        ("maximum = { programmable = 5 }", "limits nothing"),
        (
            "minimum-cpu = { programmable = 1 }",
            "which it may not have",
        ),
        ("operator = true\nrevokes = [\"a\"]", "leave out revokes"),
        ("revokes = [\"a\"]", "its own leases anyway"),
        ("opens-events = true", "perf-type"),
        (
            "most-waiting = 9\nmost-leases = 8",
            "most-waiting = 9 is more than the 8",
        ),
    ] {
        let output = check(format!("{base}{text}\n").as_bytes(), None);
        let errors = String::from_utf8(output.stderr).expect("text");
        assert!(output.status.success(), "{text}: {errors}");
        assert!(
            errors.contains("warning") && errors.contains(said),
            "{text}: {errors}"
        );
    }
    for (text, said) in [
        ("audit-size = 1000000", "audit-size is of no use"),
        ("connections-per-user = 0", "lets nobody connect"),
        (
            "requests-per-second = 0",
            "requests-per-second is taken for 1",
        ),
        ("[classes]\nbatch = 1", "no tenant is of class 'batch'"),
        ("[watchdog]\nfor = [\"a\"]", "while keep = true"),
        ("[watchdog]\nkeep = false\nfor = []", "lets no tenant"),
        (
            "[watchdog]\nkeep = false\nfor = [\"b\"]\n[[tenant]]\nname = \"b\"\nusers = [0]\n\
             guaranteed = false",
            "tenant 'b', whose leases are never guaranteed",
        ),
        ("arrive-ms = 0", "arrive-ms = 0 ends"),
        ("claim-window-ms = 0", "gives no holder time"),
        (
            "[[pmu]]\nname = \"other\"\nprogrammable = 2\nperf-type = 4000000",
            "no PMU of that number",
        ),
        (
            "[[pmu]]\nname = \"other\"\nprogrammable = 2\nevents = { x = [\"PMC7\"] }",
            "can count event 'x'",
        ),
        (
            "[[pmu]]\nname = \"other\"\nprogrammable = 2\ncpus = \"7000\"",
            "its cpus have 7000",
        ),
    ] {
        let state = "state = \"/nonexistent/umpire\"\n";
        let output = check(format!("{state}{text}\n{base}").as_bytes(), None);
        let errors = String::from_utf8(output.stderr).expect("text");
        assert!(output.status.success(), "{text}: {errors}");
        assert!(
            errors.contains("warning") && errors.contains(said),
            "{text}: {errors}"
        );
    }
    let output = check(base.as_bytes(), None);
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
}

#[test]
fn lines_of_users_that_are_no_text_hide_nobody() {
    let name = "lines_of_users_that_are_no_text_hide_nobody";
    if !can(name, &["unshare", "--mount"]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let bind = |database: &str, lines: &[u8]| {
        let path = folder.path().join(database);
        let mut all = fs::read(Path::new("/etc").join(database)).expect("a file");
        all.extend(lines);
        fs::write(&path, all).expect("a disk");
        format!("mount --bind {} /etc/{database} && ", path.display())
    };
    let passwd = bind(
        "passwd",
        b"buero:x:4501:4501:B\xfcro S\xfcd:/:/bin/sh\nbroken\n:::\nprobe:x:4502:4502::/:/bin/sh\n",
    );
    let group = bind("group", b"caf\xe9:x:4501:\nx:y\nprobes:x:4502:caf\xe9\n");
    let script = format!("{passwd}{group}exec \"$0\" \"$@\"");
    let check = |rule: &str| {
        let text = format!("[[pmu]]\nprogrammable = 4\n[[tenant]]\nname = \"a\"\n{rule}\n");
        let output = check(text.as_bytes(), Some(&script));
        (
            output.status.code(),
            String::from_utf8(output.stderr).expect("text"),
        )
    };
    for rule in [
        "users = [\"probe\"]",
        "groups = [\"probes\"]",
        "users = [4501, \"buero\"]",
    ] {
        assert_eq!(check(rule), (Some(0), String::new()), "{rule}");
    }
    for (rule, said) in [
        (
            "users = [\"nosuch\"]",
            "the host has no user 'nosuch' (getent passwd 'nosuch')",
        ),
        ("groups = [\"nosuch\"]", "the host has no group 'nosuch'"),
    ] {
        let (status, errors) = check(rule);
        assert_eq!(status, Some(2), "{errors}");
        assert!(errors.contains(said), "{rule}: {errors}");
    }
}

/// Has a lease for its own thread, and asks at the companion socket for an event of it, and of
/// one that it does not have.
const EVENTS: &str = r#"
import json, socket, sys, threading
path = sys.argv[1]
number = threading.get_native_id()
client = socket.socket(socket.AF_UNIX)
client.connect(path)
request = {"counters": [{"count": 1}], "scope": "thread", "threads": [number], "cpus": "0"}
client.sendall(json.dumps({"method": "io.umpire.Arbiter.Acquire", "parameters": {"request": request}}).encode() + b"\0")
answer = b""
while not answer.endswith(b"\0"):
    answer += client.recv(65536)
lease = json.loads(answer[:-1])["parameters"]["lease"]["id"]
events = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
events.connect(path + ".events")
for thread in number, number + 4000:
    events.send(json.dumps({"lease": lease, "counter": 0, "thread": thread, "cpu": 0, "config": 1}).encode())
    bytes, ancillary, _, _ = events.recvmsg(65536, 1024)
    print(json.dumps(json.loads(bytes)), "descriptors:", len(ancillary))
"#;

#[test]
fn events_are_of_the_callers_own_numbers() {
    let name = "events_are_of_the_callers_own_numbers";
    if !can(name, &IN_NAMESPACE) {
        return;
    }
    let config = all().replace("programmable = 4\n", "programmable = 4\nperf-type = 1\n");
    let daemon = Daemon::with(&[], &(config + "opens-events = true\n"));
    let mut command = Command::new(IN_NAMESPACE[0]);
    command
        .args(&IN_NAMESPACE[1..])
        .args([python3(), "-c", EVENTS]);
    let output = command.arg(daemon.socket()).output().expect("it starts");
    let said = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 2, "{said}");
    if lines[0].contains("not-opened") {
        println!("skipped: {name}: {}", lines[0]);
    } else {
        assert!(lines[0].ends_with("descriptors: 1"), "{said}");
    }
    assert!(
        lines[1].contains("foreign-thread") && lines[1].contains("NSpid"),
        "{said}"
    );
}
