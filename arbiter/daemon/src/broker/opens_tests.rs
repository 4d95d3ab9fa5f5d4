//! A kernel that takes long costs the one user for whom it does.

use std::time::{Duration, Instant};

use crate::broker::tests::Gate;
use crate::budget::{EventSpec, Rings};

use super::*;

const MS: u64 = 1_000_000;

/// With a kernel of the test's own.
fn opens(kernel: OpenCall) -> Opens {
    let opens = Opens::with(OpenMeans {
        opens: kernel,
        root: PathBuf::from("/"),
        closer: Closer::new(1 << 20),
        lineages: None,
    });
    opens.expect("a pipe")
}

fn asked(uid: u32, connection: u64) -> PendingEvent {
    let event = HandedEvent {
        spec: EventSpec {
            perf_type: 1,
            config: 1,
            config1: 0,
            config2: 0,
        },
        thread: Some(uid),
        cpu: None,
        rings: Rings::User,
        period: None,
        follows: Follows::Nothing,
    };
    PendingEvent {
        connection,
        client: Client {
            uid,
            ..Client::default()
        },
        request: EventRequest::default(),
        allowed: Allowed::of(event),
        tenant: None,
        before: None,
        process: None,
        of_user: uid,
        foreign: false,
        life: (1, None),
        name: None,
    }
}

/// All that finish within a moment.
fn finished(opens: &mut Opens, count: usize) -> Vec<Opened> {
    let until = Instant::now() + Duration::from_secs(20);
    let mut all = Vec::new();
    while all.len() < count {
        assert!(Instant::now() < until, "{count}: {all:?}");
        opens.hear();
        all.extend(opens.finished());
        std::thread::sleep(Duration::from_millis(1));
    }
    all
}

#[test]
fn a_slow_kernel_costs_its_user_alone() {
    static GATE: Gate = Gate::new();
    // User 7's thread is in execve.
    fn kernel(allowed: &Allowed, _: &Path) -> Result<Handed, String> {
        if allowed.event.thread == Some(7) {
            GATE.wait();
        }
        Err("no".to_owned())
    }
    let mut opens = opens(kernel);
    let begun = Instant::now();
    assert!(opens.begin(asked(7, 1), 0).is_ok());
    // Its other connection stands behind; another user does not.
    assert!(opens.begin(asked(7, 2), MS).is_ok());
    assert!(opens.begin(asked(8, 3), 2 * MS).is_ok());
    assert!(begun.elapsed() < Duration::from_secs(5), "nobody waits");
    let of_other = finished(&mut opens, 1);
    assert_eq!((of_other[0].asked.connection, of_other[0].waits), (3, true));
    assert_eq!(opens.due(), Some(1000 * MS));
    assert_eq!(opens.overdue(999 * MS), []);
    let told = opens.overdue(1000 * MS);
    assert_eq!(told.iter().map(|(id, ..)| *id).collect::<Vec<_>>(), [1, 2]);
    assert!(told[0].2.contains("in execve") && told[1].2.contains("being opened still"));
    assert_eq!((opens.due(), opens.overdue(u64::MAX)), (None, vec![]));
    let still = opens.begin(asked(7, 2), 1001 * MS);
    assert!(still.is_err_and(|why| why.contains("try again")));
    GATE.open();
    let late = finished(&mut opens, 1);
    assert_eq!((late[0].asked.connection, late[0].waits), (1, false));
    assert!(opens.begin(asked(7, 2), 2000 * MS).is_ok());
    assert!(finished(&mut opens, 1)[0].waits);
}

/// An event of a group or of a whole CPU has no thread that could be in execve.
#[test]
fn a_slow_kernel_is_said_to_be_slow_and_no_more() {
    static GATE: Gate = Gate::new();
    fn kernel(_: &Allowed, _: &Path) -> Result<Handed, String> {
        GATE.wait();
        Err("no".to_owned())
    }
    let mut opens = opens(kernel);
    let mut of_cpu = asked(7, 1);
    of_cpu.allowed.event.thread = None;
    of_cpu.allowed.event.cpu = Some(1);
    assert!(opens.begin(of_cpu, 0).is_ok());
    let told = opens.overdue(u64::MAX);
    assert!(told[0].2.contains("try again") && !told[0].2.contains("execve"));
    GATE.open();
    assert!(!finished(&mut opens, 1)[0].waits);
}

/// Two VMs of one user that ask in the same moment both get theirs.
#[test]
fn requests_of_one_user_have_their_turns() {
    let mut opens = opens(|_, _| Err("no".to_owned()));
    for connection in 1..=5 {
        assert!(opens.begin(asked(7, connection), 0).is_ok());
    }
    // One of them leaves.
    opens.leave(3);
    let mut turns = Vec::new();
    while turns.len() < 4 {
        turns.extend(
            finished(&mut opens, 1)
                .iter()
                .map(|one| one.asked.connection),
        );
        if let Some(next) = opens.next_of(7) {
            assert!(opens.begin(next, 0).is_ok());
        }
    }
    assert_eq!(turns, [1, 2, 4, 5]);
    assert!(opens.next_of(7).is_none());
}

/// While one process of a user is in execve its other processes have their events, a few at a
/// time; who stands behind what is stuck is told so.
#[test]
fn a_slow_process_costs_its_own_events_alone() {
    static GATE: Gate = Gate::new();
    // Threads below 100 are in execve.
    fn kernel(allowed: &Allowed, _: &Path) -> Result<Handed, String> {
        if allowed.event.thread < Some(100) {
            GATE.wait();
        }
        Err("no".to_owned())
    }
    let of = |connection: u64, process: u32| {
        let mut asked = asked(7, connection);
        asked.allowed.event.thread = Some(process);
        asked.process = Some(process);
        asked
    };
    let mut opens = opens(kernel);
    for (connection, process) in [(1, 1), (2, 1), (3, 100)] {
        assert!(opens.begin(of(connection, process), 0).is_ok());
    }
    let other = finished(&mut opens, 1);
    assert_eq!((other[0].asked.connection, other[0].waits), (3, true));
    assert!(opens.next_of(7).is_none(), "its process is in execve");
    // Four at a time.
    for (connection, process) in [(4, 2), (5, 3), (6, 4), (7, 101)] {
        assert!(opens.begin(of(connection, process), MS).is_ok());
    }
    assert!(opens.next_of(7).is_none());
    let told = |opens: &mut Opens, now| -> Vec<(u64, bool)> {
        let told = opens.overdue(now);
        told.iter()
            .map(|(id, _, why)| (*id, *why == STILL))
            .collect()
    };
    assert_eq!(told(&mut opens, 1000 * MS), [(1, false), (2, true)]);
    let still = opens.begin(of(2, 1), 1000 * MS);
    assert!(still.is_err_and(|why| why.contains("try again")));
    let all = [(4, false), (5, false), (6, false), (7, true)];
    assert_eq!(told(&mut opens, 1001 * MS), all);
    assert!(opens.begin(of(7, 101), 1001 * MS).is_err());
    GATE.open();
    assert!(finished(&mut opens, 4).iter().all(|one| !one.waits));
    assert!(opens.begin(of(7, 101), 1002 * MS).is_ok());
    assert!(finished(&mut opens, 1)[0].waits);
}

/// Whoever asks for the jobs of many users does not wait for one of these, and has no threads
/// without end here.
#[test]
fn slow_processes_of_one_user_cost_no_other_users_events() {
    static GATE: Gate = Gate::new();
    // Users below 100 have their processes in execve.
    fn kernel(allowed: &Allowed, _: &Path) -> Result<Handed, String> {
        if allowed.event.thread < Some(100) {
            GATE.wait();
        }
        Err("no".to_owned())
    }
    let of = |of_user: u32, connection: u64| {
        let mut asked = asked(0, connection);
        asked.of_user = of_user;
        asked.allowed.event.thread = Some(of_user);
        asked.process = Some(u32::try_from(connection).expect("it is small"));
        asked
    };
    let mut opens = opens(kernel);
    let begin = |opens: &mut Opens, asked, now| opens.begin(asked, now).is_ok();
    assert!((1..=4).all(|at| begin(&mut opens, of(7, at), 0)));
    assert!(begin(&mut opens, of(100, 5), 0));
    assert_eq!(finished(&mut opens, 1)[0].asked.connection, 5);
    // A fifth of that user waits in turn, and is told so when that is for long.
    assert!(begin(&mut opens, of(7, 6), 0));
    assert_eq!(opens.overdue(1000 * MS).len(), 5);
    assert!(!begin(&mut opens, of(7, 6), 1001 * MS));
    assert!(begin(&mut opens, of(100, 5), 1001 * MS));
    assert!(finished(&mut opens, 1)[0].waits);
    // Of others there is an end.
    for at in 5..=32 {
        let of_user = u32::try_from(at).expect("it is small") / 4 + 10;
        assert!(begin(&mut opens, of(of_user, at), 1002 * MS), "{at}");
    }
    assert_eq!(opens.overdue(2002 * MS).len(), 28);
    assert!(!begin(&mut opens, of(100, 33), 2003 * MS));
    GATE.open();
    assert!(finished(&mut opens, 32).iter().all(|one| !one.waits));
    assert!(begin(&mut opens, of(100, 33), 2004 * MS));
}
