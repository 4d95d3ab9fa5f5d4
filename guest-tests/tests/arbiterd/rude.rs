//! Clients that do their worst. Others do not notice.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use umpire_lease::Arbiter;

use super::fixture::{Daemon, LONG, programmable};
use super::python::python3;

fn send(stream: &mut UnixStream, message: &[u8]) {
    // The arbiter may have left already.
    let _ = stream.write_all(message);
}

/// The next reply; `None`: the connection has ended.
fn reply(stream: &mut UnixStream) -> Option<Value> {
    stream.set_read_timeout(Some(LONG)).expect("a socket");
    let mut bytes = Vec::new();
    let mut byte = [0];
    loop {
        match stream.read(&mut byte) {
            Ok(1) if byte[0] == 0 => return Some(serde_json::from_slice(&bytes).expect("JSON")),
            Ok(1) => bytes.push(byte[0]),
            _ => return None,
        }
    }
}

fn call(daemon: &Daemon, message: &Value) -> Option<Value> {
    let mut stream = UnixStream::connect(daemon.socket()).expect("it listens");
    send(&mut stream, format!("{message}\0").as_bytes());
    reply(&mut stream)
}

#[test]
fn what_is_no_call_ends_its_connection_and_nothing_else() {
    let daemon = Daemon::start();
    let mut held = daemon.acquire(&programmable(2));
    for message in [
        &b"\0"[..],
        b"{\0",
        b"[]\0",
        b"\xff\xfe\0",
        b"{\"method\":3}\0",
    ] {
        let mut stream = UnixStream::connect(daemon.socket()).expect("it listens");
        send(&mut stream, message);
        assert_eq!(reply(&mut stream), None, "{message:?}");
    }
    let mut endless = UnixStream::connect(daemon.socket()).expect("it listens");
    for _ in 0..64 {
        send(&mut endless, &[b' '; 16 * 1024]);
    }
    assert_eq!(reply(&mut endless), None);
    let event = held.next(Some(Duration::from_millis(50)));
    assert!(
        matches!(event, Ok(umpire_lease::Next::Nothing)),
        "{event:?}"
    );
    assert_eq!(daemon.connect().leases().expect("it answers").len(), 1);
}

#[test]
fn wrong_calls_are_answered_by_typed_errors() {
    let daemon = Daemon::start();
    let request = |parameters: Value| json!({ "method": "io.umpire.Arbiter.Acquire", "parameters": { "request": parameters } });
    let error = |message: &Value| {
        let reply = call(&daemon, message).expect("a reply");
        let reason = reply["parameters"]["refusal"]["reason"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        (
            reply["error"].as_str().unwrap_or_default().to_owned(),
            reason,
        )
    };
    let refused = "io.umpire.Arbiter.Refused";
    let invalid = "org.varlink.service.InvalidParameter";
    for (message, name, reason) in [
        (
            json!({ "method": "io.umpire.Arbiter.Grab" }),
            "org.varlink.service.MethodNotFound",
            "",
        ),
        (
            json!({ "method": "org.example.Ping" }),
            "org.varlink.service.InterfaceNotFound",
            "",
        ),
        (
            json!({ "method": "io.umpire.Arbiter.Acquire" }),
            invalid,
            "",
        ),
        (request(json!({ "counters": [], "colour": 1 })), invalid, ""),
        (request(json!({ "counters": [] })), refused, "wrong-number"),
        (
            request(json!({ "counters": [{ "count": 4_000_000_000_u32 }] })),
            refused,
            "wrong-request",
        ),
        (
            request(json!({ "counters": [{ "count": 5 }] })),
            refused,
            "more-than-there-is",
        ),
        (
            request(json!({ "counters": [{ "kind": "blue" }] })),
            refused,
            "wrong-request",
        ),
        (
            request(json!({ "counters": [{ "pmu": "gpu" }] })),
            refused,
            "wrong-request",
        ),
        (
            request(json!({ "counters": [{ "among": ["PMC9"] }] })),
            refused,
            "no-such-counters",
        ),
        (
            request(json!({ "counters": [{ "among": ["PMC99"] }] })),
            refused,
            "wrong-request",
        ),
        (
            request(json!({ "counters": [{}], "cpus": "0-" })),
            refused,
            "wrong-request",
        ),
        (
            request(json!({ "counters": [{}], "cpus": "" })),
            refused,
            "no-cpus",
        ),
        (
            request(json!({ "counters": [{}], "cpus": "4000" })),
            refused,
            "no-such-cpu",
        ),
        (
            request(json!({ "counters": [{}], "scope": "world" })),
            refused,
            "wrong-request",
        ),
        (
            request(json!({ "counters": [{}], "scope": "thread" })),
            refused,
            "no-threads",
        ),
        (
            request(json!({ "counters": [{}], "waits_ms": -7 })),
            refused,
            "wrong-request",
        ),
        (
            request(json!({ "counters": [{}], "lasts_ms": 0 })),
            refused,
            "wrong-request",
        ),
        (
            request(json!({ "counters": [{}], "at_least": 2 })),
            refused,
            "wrong-number",
        ),
        (
            request(json!({ "counters": [{}], "label": "a\nb" })),
            refused,
            "wrong-request",
        ),
        (
            json!({ "method": "io.umpire.Arbiter.Release", "parameters": { "lease": 99 } }),
            refused,
            "no-such-lease",
        ),
        (
            json!({ "method": "io.umpire.Arbiter.Who", "parameters": { "cpu": 4000 } }),
            refused,
            "no-such-cpu",
        ),
        (
            json!({ "method": "io.umpire.Arbiter.Watch" }),
            refused,
            "wrong-request",
        ),
    ] {
        assert_eq!(
            error(&message),
            (name.to_owned(), reason.to_owned()),
            "{message}"
        );
    }
    assert_eq!(daemon.connect().leases().expect("it answers"), []);
}

/// Ends the flood, whatever becomes of the test.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One of those who flood the arbiter.
fn flood(socket: &Path, kind: u32, stop: &AtomicBool) {
    let list = format!("{}\0", json!({ "method": "io.umpire.Arbiter.List" }));
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut stream) = UnixStream::connect(socket) else {
            continue;
        };
        stream.set_nonblocking(true).expect("a socket");
        match kind {
            // Connections that come and go.
            0 => {}
            // Calls whose answers nobody reads.
            1 => (0..2000).for_each(|_| send(&mut stream, list.as_bytes())),
            // Half a call.
            _ => send(&mut stream, &list.as_bytes()[..20]),
        }
    }
}

#[test]
fn a_flood_does_not_keep_others_from_the_arbiter() {
    let daemon = Daemon::start();
    let stop = AtomicBool::new(false);
    let granted = std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for kind in 0..3 {
            let (socket, stop) = (daemon.socket(), &stop);
            scope.spawn(move || flood(&socket, kind, stop));
        }
        // They are of one user here, whose connections are limited: so some fail.
        let begun = Instant::now();
        let mut granted = 0;
        while granted < 5 || begun.elapsed() < Duration::from_secs(2) {
            assert!(begun.elapsed() < LONG, "only {granted} were granted");
            let arbiter = Arbiter::connect(&daemon.socket());
            let held = arbiter.and_then(|arbiter| arbiter.acquire(&programmable(4)));
            granted += u32::from(held.is_ok_and(|held| held.lease().holds == 4));
        }
        granted
    });
    assert!(granted >= 5);
    // It is as it was.
    drop(daemon.acquire(&programmable(4)));
}

/// Holds 200 connections at both sockets, as a user in as many groups as there can be, and says
/// whether it has a lease, and what it is told when it asks for many threads.
const GROUPED: &str = r#"
import json, os, socket, sys, threading, time
os.setgroups(list(range(70000, 70000 + 65536)))
os.setgid(65534)
os.setuid(65534)
held = []
for path, kind in (sys.argv[1], socket.SOCK_STREAM), (sys.argv[1] + ".events", socket.SOCK_SEQPACKET):
    for _ in range(200):
        one = socket.socket(socket.AF_UNIX, kind)
        one.connect(path)
        held.append(one)
# Of the tenant whose group it is in.
def ask(client, threads):
    request = {"counters": [{"count": 1}], "scope": "thread", "threads": threads, "cpus": "0"}
    call = {"method": "io.umpire.Arbiter.Acquire", "parameters": {"request": request}}
    client.sendall(json.dumps(call).encode() + b"\0")
    answer = b""
    while not answer.endswith(b"\0"):
        answer += client.recv(1 << 16)
    return json.loads(answer[:-1])
print("refused" if "error" in ask(held[0], [os.getpid()]) else "granted", flush=True)
many = [threading.Thread(target=time.sleep, args=(600,), daemon=True) for _ in range(40)]
[one.start() for one in many]
answer = ask(held[1], [one.native_id for one in many])
print(answer["parameters"]["refusal"]["message"] if "error" in answer else "granted", flush=True)
sys.stdin.read()
os._exit(0)
"#;

/// Whoever has user and group numbers of its own (`subgid(5)`) may be in 65,536 groups: what the
/// arbiter knows of them is what its rules name, and what lists them it does not read for each.
#[test]
fn groups_of_clients_take_neither_memory_nor_time() {
    let name = "groups_of_clients_take_neither_memory_nor_time";
    if !rustix::process::geteuid().is_root() {
        println!("skipped: {name}: needs root");
        return;
    }
    let config = "[[pmu]]\nprogrammable = 4\nperf-type = 1\n\
                  [[tenant]]\nname = \"all\"\ngroups = [70007]\nopens-events = true\n";
    let daemon = Daemon::with(&[], config);
    daemon.open_to_all();
    let events = daemon.folder.path().join("socket.events");
    std::fs::set_permissions(events, std::fs::Permissions::from_mode(0o777)).expect("it is ours");
    let resident = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid()));
        let status = status.expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
        number
            .expect("its memory")
            .parse::<u64>()
            .expect("a number")
    };
    let before = resident();
    let mut command = Command::new(python3());
    command.args(["-c", GROUPED]).arg(daemon.socket());
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let mut said = [0; 8];
    let mut output = BufReader::new(child.stdout.take().expect("its output"));
    let read = output.read_exact(&mut said);
    let after = resident();
    // To look at a thread of such a process takes the kernel as long as at thousands of others.
    let mut refused = String::new();
    output.read_line(&mut refused).expect("an answer");
    drop(child.stdin.take());
    child.wait().expect("it ends");
    read.expect("it holds them all");
    assert_eq!(&said, b"granted\n");
    assert!(refused.contains("too many groups of users"), "{refused}");
    assert!(after < before + (16 << 10), "{before} KiB, then {after}");
}
