//! Perf events that the arbiter opens for leases of control groups: of all that runs in a group,
//! and of a thread with what that starts. Software events stand in for those of a PMU.

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

use umpire_lease::{
    Arbiter, CallError, Counters, EventRequest, Events, LeaseScope, Reason, Request,
};

use super::c_library::command;
use super::events::{begin_stored, enable, read, refused, spend, stored};
use super::fixture::{AS_NOBODY, Daemon, LONG};
use super::groups::Slice;
use super::python::python3;

/// PERF_COUNT_SW_CPU_CLOCK.
const CLOCK: u64 = 0;

const POLICY: &str = "grace-ms = 0\naudit = \"AUDIT\"\n\
     [[pmu]]\nprogrammable = 4\nperf-type = 1\n\
     [[tenant]]\nname = \"root\"\nusers = [0]\noperator = true\nopens-events = true\n\
     for-others = true\n\
     [[tenant]]\nname = \"jobs\"\nusers = [65534]\nopens-events = true\n";

fn daemon() -> Daemon {
    let mut daemon = stopped();
    daemon.begin();
    daemon.open_to_all();
    let events = daemon.folder.path().join("socket.events");
    fs::set_permissions(events, fs::Permissions::from_mode(0o777)).expect("it is ours");
    daemon
}

/// One that is not started yet.
fn stopped() -> Daemon {
    let folder = tempfile::tempdir().expect("a folder");
    let audit = folder.path().join("audit").display().to_string();
    Daemon::in_folder(folder, &[], &POLICY.replace("AUDIT", &audit))
}

/// A lease of a group, and its number. The group's is what is granted, not the connection's.
fn lease(daemon: &Daemon, cgroup: &str, counters: u32, others: bool) -> u64 {
    let of_job = others.then_some(65534);
    let arbiter = Arbiter::connect(&daemon.socket()).expect("it answers");
    let held = arbiter.acquire(&Request {
        counters: vec![Counters::programmable(counters)],
        scope: Some(LeaseScope::Cgroup),
        cgroup: Some(cgroup.to_owned()),
        for_uid: of_job,
        for_gid: of_job,
        ..Request::default()
    });
    held.expect("a lease").lease().id
}

fn of_group(lease: u64, counter: u32) -> EventRequest {
    EventRequest {
        lease,
        counter,
        cpu: Some(0),
        config: Some(CLOCK),
        ..EventRequest::default()
    }
}

fn of_thread(lease: u64, thread: u32) -> EventRequest {
    EventRequest {
        lease,
        thread: Some(thread),
        config: Some(CLOCK),
        ..EventRequest::default()
    }
}

/// The event of a request. `None`: the kernel opens none here, as was said.
fn opened(daemon: &Daemon, request: &EventRequest, test: &str) -> Option<OwnedFd> {
    let mut events = Events::connect(&daemon.socket()).expect("it listens");
    match events.open(request) {
        Ok(event) => Some(event),
        Err(CallError::Refused(why)) if why.reason == Reason::NotOpened => {
            println!("skipped: {test}: {}", why.message);
            None
        }
        Err(other) => panic!("{other}"),
    }
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

/// Waits until an event counts, or does so no more.
fn until_counts(event: &OwnedFd, counts: bool, daemon: &Daemon) {
    let until = Instant::now() + LONG;
    loop {
        let before = read(event)[0];
        std::thread::sleep(Duration::from_millis(50));
        if (read(event)[0] > before) == counts {
            return;
        }
        assert!(Instant::now() < until, "{counts}: {}", daemon.log());
    }
}

/// Has the arbiter see that somebody enables an event that was lost, until that has its price.
fn until_barred(event: &OwnedFd, daemon: &Daemon) {
    let until = Instant::now() + LONG;
    while !daemon.log().contains("is barred") {
        assert!(Instant::now() < until, "{}", daemon.log());
        enable(event);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn an_event_of_a_group_counts_what_runs_there_and_nothing_else() {
    const TEST: &str = "an_event_of_a_group_counts_what_runs_there_and_nothing_else";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    let daemon = daemon();
    let job = slice.make("/job");
    slice.make("/job/step");
    slice.start("/job", Command::new("cat"));
    let id = lease(&daemon, &job, 2, false);
    let Some(event) = opened(&daemon, &of_group(id, 0), TEST) else {
        return;
    };
    enable(&event);
    // A hog outside, on the same CPU, and then somebody below the group.
    let busy = "exec taskset -c 0 sh -c 'while :; do :; done'";
    slice.start("/", shell(busy));
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(read(&event)[0], 0, "nobody has run in the group");
    slice.start("/job/step", shell(busy));
    until_counts(&event, true, &daemon);
    let [_, enabled, running] = read(&event);
    assert_eq!(enabled, running, "it is pinned");
    let audit = fs::read_to_string(daemon.folder.path().join("audit")).expect("an audit");
    let line = audit.lines().find(|line| line.contains("event-opened"));
    let line = line.expect("it was opened");
    assert!(line.contains(&format!(r#""cgroup":"{job}""#)), "{line}");

    // A CPU has to be named, and what is counted does not overflow.
    let mut events = Events::connect(&daemon.socket()).expect("it listens");
    let mut says = |request: EventRequest, part: &str| {
        let (reason, message) = refused(events.open(&request));
        assert!(message.contains(part), "{part}: {reason} {message}");
    };
    let nowhere = EventRequest {
        cpu: None,
        ..of_group(id, 0)
    };
    says(nowhere, "name one");
    let overflows = EventRequest {
        period: Some(1 << 20),
        ..of_group(id, 0)
    };
    says(overflows, "do not overflow");
    let follows = EventRequest {
        follows: Some("children".to_owned()),
        ..of_group(id, 0)
    };
    says(follows, "leave it out");
    says(of_thread(id, std::process::id()), "does not run in cgroup");

    // With the lease it is lost, and whoever starts it again is barred.
    daemon.out(&["revoke", &id.to_string()]);
    until_counts(&event, false, &daemon);
    until_barred(&event, &daemon);
}

#[test]
fn what_groups_below_have_is_not_the_outer_ones() {
    const TEST: &str = "what_groups_below_have_is_not_the_outer_ones";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    let daemon = daemon();
    let (job, step) = (slice.make("/job"), slice.make("/job/step"));
    let id = lease(&daemon, &job, 2, false);
    slice.start(
        "/job",
        shell("exec taskset -c 0 sh -c 'while :; do :; done'"),
    );
    let both = [0, 1].map(|counter| opened(&daemon, &of_group(id, counter), TEST));
    let [Some(first), Some(second)] = both else {
        return;
    };
    enable(&first);
    enable(&second);
    until_counts(&second, true, &daemon);
    let inner = lease(&daemon, &step, 1, false);
    let stopped = read(&second);
    until_counts(&first, true, &daemon);
    assert_eq!(
        read(&second),
        stopped,
        "it was stopped before the lease was told of"
    );
    let mut events = Events::connect(&daemon.socket()).expect("it listens");
    let (reason, message) = refused(events.open(&of_group(id, 1)));
    assert_eq!(reason, "held", "{message}");
    events.open(&of_group(inner, 0)).expect("it has one");
    daemon.out(&["revoke", &inner.to_string()]);
    events.open(&of_group(id, 1)).expect("it is its own again");
}

#[test]
fn what_a_process_starts_counts_along_until_its_group_is_empty() {
    const TEST: &str = "what_a_process_starts_counts_along_until_its_group_is_empty";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    let daemon = daemon();
    let job = slice.make("/job");
    let script = "read go; sh -c 'while :; do :; done' & read end";
    let child = slice.start("/job", shell(script));
    let leader = child.id();
    let id = lease(&daemon, &job, 1, false);
    let Some(event) = opened(&daemon, &of_thread(id, leader), TEST) else {
        return;
    };
    enable(&event);
    std::thread::sleep(Duration::from_millis(100));
    let before = read(&event)[0];
    say(&mut slice, b"go\n");
    until_counts(&event, true, &daemon);
    assert!(read(&event)[0] > before);
    // It ends, and what it has started runs on.
    say(&mut slice, b"end\n");
    slice.last().wait().expect("it is ours");
    until_counts(&event, true, &daemon);
    daemon.out(&["revoke", &id.to_string()]);
    until_counts(&event, false, &daemon);
    until_barred(&event, &daemon);
    // While that may be, somebody has taken a counter; with the group it is over.
    until_taken(true, &daemon);
    fs::write(slice.folder.join("job/cgroup.kill"), "1").expect("they end");
    until_taken(false, &daemon);
}

#[test]
fn who_moves_out_of_the_group_counts_no_more() {
    const TEST: &str = "who_moves_out_of_the_group_counts_no_more";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    let daemon = daemon();
    let (job, _) = (slice.make("/job"), slice.make("/other"));
    slice.start("/job", Command::new("cat"));
    let busy = slice.start("/job", shell("while :; do :; done")).id();
    let id = lease(&daemon, &job, 1, false);
    let Some(event) = opened(&daemon, &of_thread(id, busy), TEST) else {
        return;
    };
    enable(&event);
    until_counts(&event, true, &daemon);
    slice.move_to("/other", busy);
    // It is in the audit before or after it is stopped.
    let until = Instant::now() + LONG;
    loop {
        let audit = fs::read_to_string(daemon.folder.path().join("audit")).expect("an audit");
        if audit.contains("event-disabled") {
            break;
        }
        assert!(Instant::now() < until, "{audit}");
        std::thread::sleep(Duration::from_millis(10));
    }
    until_counts(&event, false, &daemon);
    let mut events = Events::connect(&daemon.socket()).expect("it listens");
    let (reason, _) = refused(events.open(&of_thread(id, busy)));
    assert_eq!(reason, "foreign-thread");
}

/// Of one counter a thread has one event: what may have been inherited is not given again.
#[test]
fn a_counter_of_a_group_counts_once_for_each_thread() {
    const TEST: &str = "a_counter_of_a_group_counts_once_for_each_thread";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    let daemon = daemon();
    let job = slice.make("/job");
    let id = lease(&daemon, &job, 2, false);
    let [first, second] = [(); 2].map(|()| slice.start("/job", Command::new("cat")).id());
    let Some(_one) = opened(&daemon, &of_thread(id, first), TEST) else {
        return;
    };
    let mut events = Events::connect(&daemon.socket()).expect("it listens");
    // It was there before.
    let mut all = vec![events.open(&of_thread(id, second)).expect("another's")];
    let later = slice.start("/job", Command::new("cat")).id();
    let (reason, message) = refused(events.open(&of_thread(id, later)));
    assert_eq!(reason, "too-many-events", "{message}");
    let other = EventRequest {
        counter: 1,
        follows: Some("threads".to_owned()),
        ..of_thread(id, first)
    };
    all.push(events.open(&other).expect("another counter"));
    let threads = EventRequest {
        thread: Some(later),
        ..other
    };
    all.push(events.open(&threads).expect("of another process"));
    // When both have ended whose it might be, it is the later one's.
    for ended in [first, second] {
        let child = slice.child(ended);
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
    }
    all.push(events.open(&of_thread(id, later)).expect("nobody else's"));
}

/// Asks for an event as a user without any right: arguments are the socket, the request, and what
/// to do with the event's descriptor.
const ASK: &str = r#"
import array, json, os, socket, sys
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect(sys.argv[1] + ".events")
peer.send(sys.argv[2].encode())
reply, rights, _, _ = peer.recvmsg(65536, socket.CMSG_SPACE(4))
reply = json.loads(reply)
if "refused" in reply and reply["refused"]:
    print(reply["refused"]["reason"], reply["refused"]["message"])
else:
    fds = array.array("i")
    fds.frombytes(rights[0][2])
    print("granted", len(os.read(fds[0], 24)))
"#;

fn ask(daemon: &Daemon, request: &EventRequest) -> String {
    let request = serde_json::to_string(request).expect("JSON");
    let mut command = Command::new(AS_NOBODY[0]);
    let command = command.args(&AS_NOBODY[1..]).args([python3(), "-c", ASK]);
    let asked = command.arg(daemon.socket()).arg(request).output();
    let asked = asked.expect("it starts");
    let said = String::from_utf8_lossy(&asked.stdout);
    format!("{said}{}", String::from_utf8_lossy(&asked.stderr))
}

fn as_nobody(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(AS_NOBODY[0]);
    command.args(&AS_NOBODY[1..]).arg(program).args(arguments);
    command
}

#[test]
fn a_job_has_events_of_its_own_processes_alone() {
    const TEST: &str = "a_job_has_events_of_its_own_processes_alone";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    let daemon = daemon();
    let (job, _) = (slice.make("/job"), slice.make("/other"));
    let id = lease(&daemon, &job, 1, true);
    // A program that runs with root's rights, and one that lets nobody look into it.
    let suid = daemon.folder.path().join("suid");
    guest_tests::umpire::copy_program("/bin/sleep".as_ref(), &suid);
    fs::set_permissions(&suid, fs::Permissions::from_mode(0o4755)).expect("it is ours");
    let suid = suid.display().to_string();
    let suid = slice.start("/job", as_nobody(&suid, &["600"])).id();
    let hides = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); time.sleep(600)";
    let hidden = slice
        .start("/job", as_nobody(python3(), &["-c", hides]))
        .id();
    let own = slice.start("/job", as_nobody("sleep", &["600"])).id();
    let roots = slice.start("/job", Command::new("cat")).id();
    let outside = slice.start("/other", as_nobody("sleep", &["600"])).id();
    // setpriv has become the program.
    let until = Instant::now() + LONG;
    for process in [suid, hidden, own, outside] {
        let name = || fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        while name().starts_with("setpriv") {
            assert!(Instant::now() < until, "{}", name());
        }
    }
    let status = format!("/proc/{hidden}/status");
    while fs::metadata(&status).expect("it runs").uid() != 0 {
        assert!(Instant::now() < until, "it lets others look");
    }
    for (thread, why) in [
        (roots, "not of user 65534"),
        (suid, "not of user 65534"),
        (hidden, "nobody may look into"),
        (outside, "does not run in cgroup"),
        (u32::MAX, "foreign-thread"),
    ] {
        let said = ask(&daemon, &of_thread(id, thread));
        assert!(said.contains(why), "{thread}: {said}");
    }
    let said = ask(&daemon, &of_group(id, 0));
    assert!(said.contains("for operators"), "{said}");
    let said = ask(&daemon, &of_thread(id, own));
    if said.starts_with("not-opened") {
        println!("skipped: {TEST}: {said}");
        return;
    }
    assert_eq!(said, "granted 24\n");
    // Who has asked for the job has all that runs there, and of its processes the same.
    let mut events = Events::connect(&daemon.socket()).expect("it listens");
    events.open(&of_group(id, 0)).expect("it is an operator");
}

#[test]
fn a_program_in_c_has_events_of_a_group() {
    const TEST: &str = "a_program_in_c_has_events_of_a_group";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    let daemon = daemon();
    let job = slice.make("/job");
    let thread = slice.start("/job", Command::new("cat")).id();
    let mut command = command(&daemon, "perf");
    let output = command.arg(&job).arg(thread.to_string()).output();
    let output = output.expect("it starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
}

/// The kernel takes a process's events away when it runs a program with other rights.
#[test]
fn a_set_user_id_program_is_not_counted() {
    const TEST: &str = "a_set_user_id_program_is_not_counted";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    let daemon = daemon();
    let program = daemon.folder.path().join("program");
    guest_tests::umpire::copy_program("/bin/sh".as_ref(), &program);
    let script = format!(
        "read go; {} -c 'while :; do :; done' & wait",
        program.display()
    );
    for (name, mode, counts) in [("/plain", 0o755, true), ("/suid", 0o4755, false)] {
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).expect("it is ours");
        let id = lease(&daemon, &slice.make(name), 1, true);
        let shell = slice.start(name, as_nobody("sh", &["-c", &script])).id();
        let until = Instant::now() + LONG;
        let comm = || fs::read_to_string(format!("/proc/{shell}/comm")).unwrap_or_default();
        while comm().starts_with("setpriv") {
            assert!(Instant::now() < until, "{}", comm());
        }
        let Some(event) = opened(&daemon, &of_thread(id, shell), TEST) else {
            return;
        };
        enable(&event);
        say(&mut slice, b"go\n");
        spend();
        std::thread::sleep(Duration::from_millis(300));
        until_counts(&event, counts, &daemon);
    }
}

/// A process that is being started while an event is stopped takes over that its parent has
/// counted: nobody has done anything.
#[test]
fn what_is_started_while_an_event_is_lost_bars_nobody() {
    const TEST: &str = "what_is_started_while_an_event_is_lost_bars_nobody";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    let daemon = daemon();
    let job = slice.make("/job");
    // The more there are, the longer takes a stop, and the more are being started meanwhile.
    let script = "read go; while :; do sleep 0.5 & done";
    let leader = slice.start("/job", shell(script)).id();
    let mut lost = Vec::new();
    for _ in 0..10 {
        let id = lease(&daemon, &job, 1, false);
        let Some(event) = opened(&daemon, &of_thread(id, leader), TEST) else {
            return;
        };
        enable(&event);
        if lost.is_empty() {
            say(&mut slice, b"go\n");
        }
        std::thread::sleep(Duration::from_millis(200));
        daemon.out(&["revoke", &id.to_string()]);
        lost.push(event);
    }
    slice.last().kill().expect("it is ours");
    // Looks come twice a second.
    std::thread::sleep(Duration::from_millis(1500));
    for event in &lost {
        until_counts(event, false, &daemon);
    }
    let log = daemon.log();
    assert!(
        !log.contains("barred") && !log.contains("enabled an event again"),
        "{log}"
    );
}

/// Whether a counter is shown that this process has taken.
fn has_taken(who: &str) -> bool {
    let taken = format!(r#""pid":{}"#, std::process::id());
    who.replace(' ', "").contains(&taken)
}

fn until_taken(is: bool, daemon: &Daemon) {
    let who = || daemon.out(&["who", "-j"]);
    let until = Instant::now() + LONG;
    while has_taken(&who()) != is {
        assert!(Instant::now() < until, "{}", who());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What somebody in the group has started.
fn other_than(leader: u32, slice: &Slice) -> u32 {
    let all = fs::read_to_string(slice.folder.join("job/cgroup.procs")).expect("the group");
    let mut all = all.lines().map(|pid| pid.parse().expect("a number"));
    all.find(|pid| *pid != leader).expect("it has started one")
}

/// Tells the last one something.
fn say(slice: &mut Slice, word: &[u8]) {
    let pipe = slice.last().stdin.as_mut().expect("a pipe");
    pipe.write_all(word).expect("it waits");
}

/// Who has moved out of the group may be on by an event that was lost, as long as it lives.
#[test]
fn what_has_moved_out_of_a_group_is_looked_at_until_it_ends() {
    const TEST: &str = "what_has_moved_out_of_a_group_is_looked_at_until_it_ends";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    let daemon = daemon();
    let (job, _) = (slice.make("/job"), slice.make("/other"));
    let script = "read go; sh -c 'while :; do :; done' & read end";
    let leader = slice.start("/job", shell(script)).id();
    let id = lease(&daemon, &job, 1, false);
    let Some(event) = opened(&daemon, &of_thread(id, leader), TEST) else {
        return;
    };
    enable(&event);
    say(&mut slice, b"go\n");
    until_counts(&event, true, &daemon);
    let child = other_than(leader, &slice);
    slice.move_to("/other", child);
    say(&mut slice, b"end\n");
    slice.last().wait().expect("it is ours");
    // The lease ends with its group.
    until_counts(&event, false, &daemon);
    until_barred(&event, &daemon);
    until_taken(true, &daemon);
    // Looks come twice a second.
    std::thread::sleep(Duration::from_millis(1500));
    let who = daemon.out(&["who", "-j"]);
    assert!(has_taken(&who), "it lives: {who}");
    fs::write(slice.folder.join("other/cgroup.kill"), "1").expect("it ends");
    until_taken(false, &daemon);
}

/// An arbiter that starts anew stops what is of a group that is gone: somebody may have moved out.
#[test]
fn an_event_of_a_group_that_is_gone_is_stopped_after_a_restart() {
    const TEST: &str = "an_event_of_a_group_that_is_gone_is_stopped_after_a_restart";
    let Some(mut slice) = Slice::new(TEST) else {
        return;
    };
    // Of the lease nothing is known either.
    let mut daemon = stopped().without_state();
    let socket = daemon.folder.path().join("notify");
    let manager = UnixDatagram::bind(&socket).expect("a socket");
    let mut command = daemon.command();
    command.env("NOTIFY_SOCKET", &socket);
    daemon.begin_with(command);
    let (job, _) = (slice.make("/job"), slice.make("/other"));
    let script = "read go; sh -c 'while :; do :; done' & read end";
    let leader = slice.start("/job", shell(script)).id();
    let id = lease(&daemon, &job, 1, false);
    let Some(event) = opened(&daemon, &of_thread(id, leader), TEST) else {
        return;
    };
    let (name, kept) = stored(&manager);
    enable(&event);
    say(&mut slice, b"go\n");
    until_counts(&event, true, &daemon);
    daemon.kill();
    let child = other_than(leader, &slice);
    slice.move_to("/other", child);
    say(&mut slice, b"end\n");
    slice.last().wait().expect("it is ours");
    slice.remove("/job");
    until_counts(&event, true, &daemon);

    begin_stored(&mut daemon, &socket, (&name, kept));
    until_counts(&event, false, &daemon);
}
