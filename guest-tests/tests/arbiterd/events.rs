//! Perf events that the arbiter opens for holders of leases. Software events stand in for
//! those of a PMU: the way to them is the same.

use std::fs::File;
use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use umpire_lease::{
    Arbiter, CallError, Counters, EventRequest, Events, Held, LeaseScope, Next, Reason, Request,
    What,
};

use super::fixture::{Daemon, LONG, programmable};

/// PERF_TYPE_SOFTWARE, whose event 1 is the time that a thread has run.
const TASK_CLOCK: u64 = 1;

fn policy() -> String {
    let me = rustix::process::geteuid().as_raw();
    format!(
        "grace-ms = 0\n\
         [[pmu]]\nprogrammable = 4\nperf-type = 1\n\
         [[tenant]]\nname = \"open\"\nusers = [{me}]\noperator = true\nopens-events = true\n\
         [[tenant]]\nname = \"closed\"\nusers = [{me}]\n"
    )
}

fn daemon() -> Daemon {
    Daemon::with(&[], &policy())
}

fn own_thread() -> u32 {
    u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).expect("an id")
}

/// A lease for threads of this process, on all CPUs.
fn lease(daemon: &Daemon, threads: Vec<u32>, tenant: &str) -> Held {
    daemon.acquire(&Request {
        counters: vec![Counters::programmable(2)],
        scope: Some(LeaseScope::Thread),
        threads: Some(threads),
        at_least: Some(1),
        tenant: Some(tenant.to_owned()),
        ..Request::default()
    })
}

fn request(held: &Held, counter: u32) -> EventRequest {
    EventRequest {
        lease: held.lease().id,
        counter,
        thread: Some(own_thread()),
        config: Some(TASK_CLOCK),
        ..EventRequest::default()
    }
}

pub(super) fn spend() {
    let mut sum = 0u64;
    for one in 0..3_000_000u64 {
        sum ^= std::hint::black_box(one);
    }
    std::hint::black_box(sum);
}

/// Count, time enabled, time counted.
pub(super) fn read(event: &OwnedFd) -> [u64; 3] {
    let mut bytes = [0; 24];
    let mut file = File::from(event.try_clone().expect("a descriptor"));
    file.read_exact(&mut bytes).expect("a count");
    let mut words = bytes.chunks_exact(8);
    std::array::from_fn(|_| {
        let word = words.next().expect("three words");
        u64::from_ne_bytes(word.try_into().expect("eight bytes"))
    })
}

pub(super) fn enable(event: &OwnedFd) {
    /// PERF_EVENT_IOC_ENABLE (`perf_event.h`): `_IO('$', 0)`.
    const ENABLE: libc::c_ulong = 0x2400;
    // SAFETY: the request has a number for its argument, and touches no memory of ours.
    let done = unsafe { libc::ioctl(event.as_raw_fd(), ENABLE, 0) };
    assert_eq!(done, 0, "it is an event");
}

pub(super) fn refused(result: Result<OwnedFd, CallError>) -> (String, String) {
    match result {
        Err(CallError::Refused(why)) => (why.reason.to_string(), why.message),
        other => panic!("{other:?}"),
    }
}

/// Events have a part of the descriptors, and everybody else is heard.
#[test]
fn events_do_not_take_the_descriptors_of_all() {
    const TEST: &str = "events_do_not_take_the_descriptors_of_all";
    let folder = tempfile::tempdir().expect("a folder");
    let mut daemon = Daemon::in_folder(folder, &[], &policy());
    daemon.limited("ulimit -n 256; exec \"$0\" \"$@\"");
    let held = lease(&daemon, vec![own_thread()], "open");
    let mut events = Events::connect(&daemon.socket()).expect("it listens");
    let mut all = Vec::new();
    // Each is lost to the next one, and could be enabled still.
    let why = loop {
        match events.open(&request(&held, 0)) {
            Ok(event) => all.push(event),
            Err(CallError::Refused(why)) if why.reason == Reason::NotOpened => {
                println!("skipped: {TEST}: {}", why.message);
                return;
            }
            Err(CallError::Refused(why)) => break why,
            Err(other) => panic!("{other}"),
        }
        assert!(all.len() < 256, "{}", daemon.log());
    };
    assert_eq!(why.reason.to_string(), "too-many-events", "{}", why.message);
    assert!(why.message.contains("RLIMIT_NOFILE"), "{}", why.message);
    assert!(all.len() >= 8, "{}", all.len());
    let others = [(); 32].map(|()| daemon.connect());
    daemon.out(&["who"]);
    drop(others);
}

/// The arbiter stops what is lost, and does not keep who has lost it waiting for that.
fn until_stopped(event: &OwnedFd) {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let before = read(event);
        spend();
        if read(event) == before {
            return;
        }
        assert!(Instant::now() < until, "it counts on: {before:?}");
    }
}

#[test]
fn an_event_of_a_lease_counts_until_the_lease_is_lost() {
    let daemon = daemon();
    let held = lease(&daemon, vec![own_thread()], "open");
    let mut events = Events::connect(&daemon.socket()).expect("it listens");
    let event = match events.open(&request(&held, 0)) {
        Ok(event) => event,
        Err(CallError::Refused(why)) if why.reason == Reason::NotOpened => {
            println!(
                "skipped: an_event_of_a_lease_counts_until_the_lease_is_lost: {}",
                why.message
            );
            return;
        }
        Err(other) => panic!("{other}"),
    };
    spend();
    assert_eq!(read(&event)[0], 0, "the holder starts it");
    enable(&event);
    spend();
    let [count, enabled, running] = read(&event);
    assert!(count > 0 && enabled > 0 && running == enabled);
    // A second of the same counter and thread stops the first.
    let other = events.open(&request(&held, 1)).expect("another counter");
    let again = events.open(&request(&held, 0)).expect("the same counter");
    let stopped = read(&event);
    spend();
    assert_eq!(read(&event), stopped);
    enable(&again);
    enable(&other);
    spend();
    assert!(read(&again)[0] > 0);

    // Of two counters one is given back.
    let mut arbiter = daemon.connect();
    let keep = serde_json::json!({ "lease": held.lease().id, "keep": 1 });
    let _: serde_json::Value = arbiter.call("Release", &keep).expect("it is its own");
    until_stopped(&other);
    let (before, _) = (read(&again), spend());
    assert!(read(&again)[0] > before[0]);
    assert_eq!(refused(events.open(&request(&held, 1))).0, "wrong-request");

    // All is revoked. Who starts an event again is found, and it is stopped again.
    daemon.out(&["revoke", &held.lease().id.to_string()]);
    until_stopped(&again);
    enable(&again);
    spend();
    let until = Instant::now() + Duration::from_secs(20);
    while !daemon.log().contains("enabled an event again") {
        assert!(Instant::now() < until, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    until_stopped(&again);
    // That was excused: it may have been on its way when the lease ended.
    assert!(!daemon.log().contains("is barred"), "{}", daemon.log());
    drop(lease(&daemon, vec![own_thread()], "open"));
}

/// The event of the lease's first counter. `None`: the kernel opens none here.
fn opened(daemon: &Daemon, held: &Held, test: &str) -> Option<OwnedFd> {
    let mut events = Events::connect(&daemon.socket()).expect("it listens");
    match events.open(&request(held, 0)) {
        Ok(event) => Some(event),
        Err(CallError::Refused(why)) if why.reason == Reason::NotOpened => {
            println!("skipped: {test}: {}", why.message);
            None
        }
        Err(other) => panic!("{other}"),
    }
}

fn who(daemon: &Daemon) -> serde_json::Value {
    serde_json::from_str(&daemon.out(&["who", "-j"])).expect("JSON")
}

#[test]
fn who_counts_on_after_its_lease_is_barred_until_an_operator_pardons() {
    let mut daemon = daemon();
    let held = lease(&daemon, vec![own_thread()], "open");
    let mut other = daemon.acquire(&programmable(1));
    let Some(event) = opened(&daemon, &held, "who_counts_on_after_its_lease_is_barred") else {
        return;
    };
    enable(&event);
    let me = rustix::process::geteuid().as_raw();
    let id = held.lease().id.to_string();
    daemon.out(&["revoke", &id]);
    let until = Instant::now() + LONG;
    while !daemon.log().contains("is barred") {
        assert!(Instant::now() < until, "{}", daemon.log());
        enable(&event);
        spend();
    }
    // Its other lease ends, too, and it gets none.
    loop {
        match other.next(Some(LONG)) {
            Ok(Next::Event(event)) if event.what == What::Ended => {
                assert_eq!(event.why, Some(Reason::Barred), "{}", event.message);
                break;
            }
            Ok(Next::Event(_)) => {}
            end => panic!("it was not told: {end:?}"),
        }
    }
    let refused_for = |daemon: &Daemon| {
        let refused = daemon.connect().acquire(&programmable(1));
        match refused {
            Err(CallError::Refused(why)) => why.reason.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused_for(&daemon), "barred");
    // What it has is an outsider's, and nobody is promised it.
    let shown = who(&daemon);
    let places = shown["places"].as_array().expect("some");
    assert!(places.iter().all(|place| place["outside"] == 1), "{shown}");
    let outsiders = shown["outsiders"].as_array().expect("some");
    let is_me = |one: &&serde_json::Value| one["pid"] == std::process::id();
    assert_eq!(outsiders.iter().filter(is_me).count(), 1, "{shown}");
    assert!(daemon.out(&["who"]).contains(&format!("Barred: user {me}")));
    // A crash changes nothing of it.
    daemon.kill();
    daemon.begin();
    assert_eq!(refused_for(&daemon), "barred");
    let wrong = daemon.refused(&["pardon", "4000000000"]);
    assert!(wrong.contains("is not barred"), "{wrong}");
    let out = daemon.out(&["pardon", &me.to_string()]);
    assert!(out.contains("may have leases"), "{out}");
    drop(daemon.acquire(&programmable(1)));
    daemon.kill();
    daemon.begin();
    drop(daemon.acquire(&programmable(1)));
}

/// A descriptor, and the name that a service manager is to keep it by.
pub(super) fn stored(manager: &UnixDatagram) -> (String, OwnedFd) {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let until = Instant::now() + LONG;
    while Instant::now() < until {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let read = recvmsg(
            manager,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        );
        let length = read.expect("a message").bytes;
        let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
        let Some(name) = name.filter(|_| text.contains("FDSTORE=1")) else {
            continue;
        };
        assert!(text.contains("FDPOLL=0"), "{text}");
        let event = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut events) => events.next(),
            _ => None,
        });
        return (name.to_owned(), event.expect("a descriptor"));
    }
    panic!("nothing is to be kept");
}

/// Starts an arbiter as a service manager does that has kept an event of this name.
pub(super) fn begin_stored(daemon: &mut Daemon, socket: &Path, (name, kept): (&str, OwnedFd)) {
    // sd_listen_fds(3): they begin at 3.
    let command = daemon.command();
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "exec 3<&0 </dev/null; exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args())
        .env("NOTIFY_SOCKET", socket)
        .env("LISTEN_FDS", "1")
        .env("LISTEN_FDNAMES", name);
    daemon.begin_from(shell, Stdio::from(kept));
}

/// The service manager keeps the arbiter's events while there is no arbiter: the next one
/// stops what a lease of before had that has ended, and sees who starts it again.
#[test]
fn events_survive_the_arbiter_in_the_service_managers_store() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("notify");
    let manager = UnixDatagram::bind(&socket).expect("a socket");
    let me = rustix::process::geteuid().as_raw();
    let config = format!(
        "grace-ms = 0\nclaim-window-ms = 300\n\
         [[pmu]]\nprogrammable = 4\nperf-type = 1\n\
         [[tenant]]\nname = \"open\"\nusers = [{me}]\noperator = true\nopens-events = true\n"
    );
    let mut daemon = Daemon::in_folder(folder, &[], &config);
    let mut command = daemon.command();
    command.env("NOTIFY_SOCKET", &socket);
    daemon.begin_with(command);
    let held = lease(&daemon, vec![own_thread()], "open");
    let Some(event) = opened(&daemon, &held, "events_survive_the_arbiter") else {
        return;
    };
    let (name, kept) = stored(&manager);
    enable(&event);
    daemon.kill();
    drop(held);
    let before = read(&event);
    spend();
    assert!(read(&event)[0] > before[0], "nobody is there to stop it");

    begin_stored(&mut daemon, &socket, (&name, kept));
    // Nobody claims the lease, so the event is stopped.
    let until = Instant::now() + LONG;
    loop {
        let before = read(&event);
        spend();
        if read(&event) == before {
            break;
        }
        assert!(Instant::now() < until, "it runs on: {}", daemon.log());
    }
    while !daemon.log().contains("is barred") {
        assert!(Instant::now() < until, "{}", daemon.log());
        enable(&event);
        spend();
    }
}

#[test]
fn events_follow_from_the_lease() {
    let daemon = daemon();
    let own = own_thread();
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let mut sleeps = std::process::Command::new("sleep");
    let mut other = sleeps.arg("600").spawn().expect("it starts");
    // The process is the user's, so a lease may be for it; its events are not the caller's.
    let held = lease(&daemon, vec![own, other.id()], "open");
    let mut events = Events::connect(&daemon.socket()).expect("it listens");
    let request = request(&held, 0);
    let mut says = |request: EventRequest, part: &str| {
        let (reason, message) = refused(events.open(&request));
        assert!(
            reason.contains(part) || message.contains(part),
            "{part}: {reason} {message}"
        );
    };
    let foreign = EventRequest {
        thread: Some(other.id()),
        ..request.clone()
    };
    says(foreign, "foreign-thread");
    let unnamed = EventRequest {
        thread: Some(1),
        ..request.clone()
    };
    says(unnamed, "name one of them");
    let itself = EventRequest {
        thread: Some(0),
        ..request.clone()
    };
    says(itself, "name one of them");
    let no_thread = EventRequest {
        thread: None,
        ..request.clone()
    };
    says(no_thread, "name one of them");
    let any_thread = EventRequest {
        config: Some(TASK_CLOCK | 1 << 21),
        ..request.clone()
    };
    says(any_thread, "not the holder's to choose");
    let soon = EventRequest {
        period: Some(10),
        ..request.clone()
    };
    says(soon, "the period");
    let third = EventRequest {
        counter: 2,
        ..request.clone()
    };
    says(third, "none of them");
    let stale = EventRequest {
        generation: Some(99),
        ..request.clone()
    };
    says(stale, "wrong-generation");
    let ended = EventRequest {
        lease: 99,
        ..request.clone()
    };
    says(ended, "no-such-lease");
    let cpu = EventRequest {
        cpu: Some(4_000),
        ..request.clone()
    };
    says(cpu, "name one");
    let closed = lease(&daemon, vec![own], "closed");
    let closed = EventRequest {
        lease: closed.lease().id,
        ..request.clone()
    };
    says(closed, "opens-events");
    other.kill().expect("it is ours");
    other.wait().expect("it is ours");
    drop((sender, receiver));

    // What is no request ends nothing.
    let (reason, _) = refused(events.open(&EventRequest {
        rings: Some("x".repeat(10_000)),
        ..request.clone()
    }));
    assert_eq!(reason, "wrong-request");
    let first = events.open(&request);
    assert!(first.is_ok() || refused(first).0 == "not-opened");
    // Where nobody may have events, nobody listens for it.
    let plain = Daemon::start();
    assert!(Events::connect(&plain.socket()).is_err());
    assert!(Arbiter::connect(&plain.socket()).is_ok());
}
