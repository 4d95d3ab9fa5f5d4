//! The arbiter is killed, or cannot write: nobody loses what was acknowledged, and no two
//! hold one counter.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use umpire_lease::{Arbiter, CallError, Held, Next, Reason, Request};

use super::fixture::{Daemon, LONG, programmable};

const CLIENTS: u32 = 16;
/// The issue asks for 200; a variable says how many.
const KILLS: u32 = 40;
const COUNTERS: u32 = 4;

/// How often the arbiter is killed: as `UMPIRE_ARBITER_KILLS` says, or else so often.
pub(crate) fn kills(otherwise: u32) -> u32 {
    let kills = std::env::var("UMPIRE_ARBITER_KILLS").ok();
    kills.map_or(otherwise, |text| {
        text.parse().expect("UMPIRE_ARBITER_KILLS")
    })
}

/// Who holds how many counters, as the clients were told.
type Told = Arc<Mutex<BTreeMap<u32, u32>>>;

/// One client: it takes leases, holds them, loses the arbiter, and claims them.
fn client(
    socket: std::path::PathBuf,
    number: u32,
    told: &Told,
    stop: &AtomicBool,
    claims: &AtomicU32,
) {
    let holds = |count: u32| {
        let mut told = told.lock().expect("no client panics");
        told.insert(number, count);
        let sum: u32 = told.values().sum();
        assert!(sum <= COUNTERS, "two hold one counter: {told:?}");
    };
    let mut turn = number;
    while !stop.load(Ordering::Relaxed) {
        turn = turn.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        let count = turn >> 16 & 1;
        let request = Request {
            waits_ms: Some(2_000),
            ..programmable(count + 1)
        };
        let Ok(arbiter) = Arbiter::connect(&socket) else {
            continue;
        };
        let Ok(mut held) = arbiter.acquire(&request) else {
            continue;
        };
        // A request that waited when the arbiter died was not granted.
        if held.wait().is_err() {
            continue;
        }
        holds(held.lease().holds);
        let until = Instant::now() + Duration::from_millis(u64::from(turn >> 20 & 127));
        while Instant::now() < until {
            match held.next(Some(until.saturating_duration_since(Instant::now()))) {
                Ok(Next::Event(event)) => panic!("nobody revokes here: {event:?}"),
                Ok(Next::Nothing) => {}
                Err(CallError::Ended | CallError::Io(_)) => {
                    held = claim(&socket, &held);
                    claims.fetch_add(1, Ordering::Relaxed);
                }
                Err(other) => panic!("{other}"),
            }
        }
        holds(0);
        drop(held);
    }
}

fn claim(socket: &std::path::Path, held: &Held) -> Held {
    let (id, generation) = (held.lease().id, Some(held.lease().generation));
    let until = Instant::now() + LONG;
    loop {
        match Arbiter::connect(socket).and_then(|arbiter| arbiter.claim(id, generation)) {
            Ok(held) => return held,
            Err(CallError::Refused(why)) => panic!("an acknowledged lease is lost: {why:?}"),
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_arbiter_that_is_killed_over_and_over_loses_no_lease() {
    let kills = kills(KILLS);
    // What was granted to nobody, as the answer was never sent, is free after this time.
    let mut daemon = Daemon::with(&["--budget", "programmable=4"], "claim-window-ms = 1500\n");
    let (told, stop, claims) = (Told::default(), AtomicBool::new(false), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (socket, told, stop, claims) = (daemon.socket(), &told, &stop, &claims);
            scope.spawn(move || client(socket, number, told, stop, claims));
        }
        for kill in 0..kills {
            std::thread::sleep(Duration::from_millis(20 + u64::from(kill * 7 % 60)));
            daemon.kill();
            daemon.begin();
        }
        std::thread::sleep(Duration::from_millis(100));
        stop.store(true, Ordering::Relaxed);
    });
    let claims = claims.load(Ordering::Relaxed);
    assert!(claims > 0, "leases were claimed {claims} times in {kills}");
    std::thread::sleep(Duration::from_millis(1600));
    let left = daemon.connect().leases().expect("it answers");
    assert!(
        left.is_empty(),
        "all were given back: {:?}",
        &left[..left.len().min(3)]
    );
}

#[test]
fn who_does_not_come_back_loses_its_lease_and_a_foreign_claim_fails() {
    let mut daemon = Daemon::with(&["--budget", "programmable=4"], "claim-window-ms = 3000\n");
    let held = daemon.acquire(&programmable(3));
    let (id, generation) = (held.lease().id, held.lease().generation);
    daemon.kill();
    daemon.begin();
    let refused = |result: Result<Held, CallError>| match result {
        Err(CallError::Refused(why)) => why.reason.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        refused(daemon.connect().claim(id, Some(generation + 1))),
        "wrong-generation"
    );
    assert_eq!(
        refused(daemon.connect().claim(id + 1, None)),
        "no-such-lease"
    );
    // Nothing that conflicts is granted meanwhile.
    assert_eq!(refused(daemon.connect().acquire(&programmable(2))), "held");
    std::thread::sleep(Duration::from_millis(3100));
    assert_eq!(refused(daemon.connect().claim(id, None)), "no-such-lease");
    let next = daemon.acquire(&programmable(2));
    assert!(next.lease().id > id);
}

#[test]
fn what_cannot_be_written_is_not_granted() {
    // A file may have 2 KiB: some leases fit, and the next does not.
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("socket");
    let mut command = Command::new("sh");
    let limited = "trap '' XFSZ; ulimit -f 4; exec \"$0\" \"$@\"";
    command
        .arg("-c")
        .arg(limited)
        .arg(guest_tests::umpire::path())
        .arg("arbiterd");
    command
        .args(["--budget", "programmable=32", "--socket"])
        .arg(&socket);
    command.arg("--state").arg(folder.path().join("state"));
    command.stderr(std::process::Stdio::null()).process_group(0);
    let mut child = command.spawn().expect("it starts");
    let until = Instant::now() + LONG;
    while Arbiter::connect(&socket).is_err() {
        assert!(Instant::now() < until, "it does not answer");
        std::thread::sleep(Duration::from_millis(5));
    }
    let connect = || Arbiter::connect(&socket).expect("it answers");
    let mut granted = Vec::new();
    let refused = loop {
        match connect().acquire(&programmable(1)) {
            Ok(held) => granted.push(held),
            Err(error) => break error,
        }
        assert!(granted.len() < 32, "it never failed");
    };
    assert!(!granted.is_empty());
    assert!(
        refused.to_string().contains("cannot write its journal"),
        "{refused}"
    );
    let listed = connect().leases().expect("it answers");
    assert_eq!(listed.len(), granted.len(), "what was refused is not held");
    child.kill().expect("it is ours");
    child.wait().expect("it is ours");
    // What was granted is in the journal.
    let mut after = Command::new(guest_tests::umpire::path());
    after
        .args(["arbiterd", "--budget", "programmable=32", "--socket"])
        .arg(&socket);
    after
        .arg("--state")
        .arg(folder.path().join("state"))
        .stderr(std::process::Stdio::null());
    let mut child = after.spawn().expect("it starts");
    for held in &granted {
        drop(claim(&socket, held));
    }
    child.kill().expect("it is ours");
    child.wait().expect("it is ours");
}

/// The next arbiter does not know what the one before it gave: it waits until holders know.
#[test]
fn without_a_journal_nothing_is_given_twice() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = "claim-window-ms = 700\n";
    let daemon = Daemon::in_folder(folder, &["--budget", "programmable=4"], config);
    let mut daemon = daemon.without_state();
    daemon.begin();
    // There was none before.
    let held = daemon.acquire(&programmable(4));
    let waits = |daemon: &Daemon| {
        let began = Instant::now();
        let refused = daemon.connect().acquire(&programmable(1));
        assert!(
            matches!(&refused, Err(CallError::Refused(why)) if why.reason == Reason::Starting),
            "{refused:?}"
        );
        loop {
            match daemon.connect().acquire(&programmable(4)) {
                Ok(held) => return held,
                Err(error) => assert!(began.elapsed() < LONG, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    daemon.kill();
    daemon.begin();
    let began = Instant::now();
    let again = waits(&daemon);
    assert!(began.elapsed() > Duration::from_millis(400));
    drop(held);
    // The same where it was ended, and leases were held.
    daemon.end();
    daemon.begin();
    let last = waits(&daemon);
    drop((again, last));
    let began = Instant::now();
    while daemon
        .connect()
        .leases()
        .is_ok_and(|leases| !leases.is_empty())
    {
        assert!(began.elapsed() < LONG, "the lease ends with its holder");
    }
    daemon.end();
    daemon.begin();
    drop(daemon.acquire(&programmable(4)));
}
