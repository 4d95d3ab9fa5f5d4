//! What is due, and who is served before it is done.

use std::cell::Cell;

use serde_json::{Value, json};
use umpire_lease::INTERFACE;
use umpire_service::{Access, BACKLOG, Closer};

use super::start::{Ends, Given};
use super::*;
use crate::broker::tests::busy_broker;
use crate::config::ArbiterConfig;
use crate::room::OF_STRANGERS;

thread_local! {
    /// The time of a test's arbiter: it passes when the test says so, and a busy machine makes
    /// nothing due.
    pub(super) static TIME: Cell<Option<BootTime>> = const { Cell::new(None) };
}

/// One CPU with four counters, for users 7 and 8.
fn arbiterd(folder: &tempfile::TempDir) -> Arbiterd {
    let text = "[[pmu]]\nprogrammable = 4\ncpus = \"0\"\n\
                [[tenant]]\nname = \"all\"\nusers = [7, 8]\nwhole-cpus = true\n";
    let config = ArbiterConfig::parse("test".as_ref(), text).expect("a configuration");
    let [(stop, _), (hangup, _)] = [(); 2].map(|()| UnixStream::pair().expect("a pair"));
    let access = Access {
        mode: 0o600,
        group: None,
    };
    let socket = folder.path().join("socket");
    let ends = Ends {
        stop,
        hangup,
        manager: Manager::default(),
    };
    // From here on it passes by hand.
    pass(0);
    Arbiterd::start_until(ends, Given::default(), config, None, &socket, &access)
        .expect("it starts")
}

fn call(arbiterd: &mut Arbiterd, uid: u32, method: &str, parameters: Value) {
    let client = Client {
        pid: 40 + uid,
        uid,
        ..Client::default()
    };
    let request = Request::create(format!("{INTERFACE}.{method}"), Some(parameters));
    let from = ConnectionId(1000 + u64::from(uid));
    arbiterd
        .desk
        .service_mut()
        .call(from, &client, &request, now());
}

fn acquire(arbiterd: &mut Arbiterd, uid: u32, lasts_ms: u64) {
    let request = json!({ "counters": [{ "count": 1 }], "cpus": "0", "lasts_ms": lasts_ms });
    call(arbiterd, uid, "Acquire", json!({ "request": request }));
}

fn users(arbiterd: &Arbiterd) -> Vec<u32> {
    let leases = arbiterd.desk.service().arbiter().leases();
    leases.map(|lease| lease.owner.uid).collect()
}

fn pass(ms: u64) {
    TIME.set(Some(BootTime(now().0 + ms * 1_000_000)));
}

/// Something of somebody's is due all the time. Another's lease, which has become due since it
/// was looked who has said something, does not end before its renewal is read, whatever else is
/// done meanwhile; and all goes on.
#[test]
fn nobody_elses_call_ends_a_lease_whose_renewal_may_have_come() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut arbiterd = arbiterd(&folder);
    acquire(&mut arbiterd, 8, 1);
    acquire(&mut arbiterd, 7, 200);
    assert_eq!(users(&arbiterd), [8, 7]);
    pass(2);
    arbiterd.advance(true);
    assert!(arbiterd.held.is_some());
    pass(250);
    arbiterd.advance(true);
    assert!(arbiterd.is_free);
    assert_eq!(users(&arbiterd), [7]);
    // All of these came after the renewal, and are read before it.
    acquire(&mut arbiterd, 8, 1);
    arbiterd.drop_connection(ConnectionId(9), None);
    arbiterd.settle();
    assert_eq!(users(&arbiterd), [7, 8]);
    call(&mut arbiterd, 7, "Renew", json!({ "lease": 2 }));
    pass(2);
    arbiterd.advance(true);
    assert_eq!(
        users(&arbiterd),
        [7, 8],
        "it is looked who has said something"
    );
    arbiterd.advance(true);
    assert_eq!(users(&arbiterd), [7], "nobody has renewed");
    pass(250);
    arbiterd.advance(true);
    arbiterd.advance(true);
    assert_eq!(users(&arbiterd), [0; 0]);
}

/// There is always somebody who waits to be accepted; but all who had come are read after as many
/// as can wait.
#[test]
fn who_connects_without_end_does_not_hold_what_is_due() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut arbiterd = arbiterd(&folder);
    let path = folder.path().join("socket");
    let connect = |count| (0..count).map(|_| UnixStream::connect(&path).expect("it listens"));
    let mut clients: Vec<UnixStream> = connect(2 * ACCEPTS).collect();
    acquire(&mut arbiterd, 8, 1);
    pass(2);
    arbiterd.advance(false);
    assert!(arbiterd.held.is_some());
    let turns = (1..20).find(|_| {
        clients.extend(connect(ACCEPTS));
        arbiterd.accept()
    });
    assert_eq!(turns, Some(BACKLOG / 16 + 1));
}

/// However many users they are, those without a tenant have so many connections together, and
/// each of them has its part; who has a tenant connects.
#[test]
fn many_users_without_a_tenant_have_few_connections_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut arbiterd = arbiterd(&folder);
    let closer = Closer::new(1 << 20);
    let mut clients = Vec::new();
    let mut connect = |arbiterd: &mut Arbiterd, uid| {
        let (client, server) = UnixStream::pair().expect("a pair");
        clients.push(client);
        let client = Client {
            pid: 1,
            uid,
            ..Client::default()
        };
        arbiterd.admit(ClientSocket::new(server.into(), &closer), client);
    };
    let of = |arbiterd: &Arbiterd, uid| {
        let all = arbiterd.connections.values();
        all.filter(|one| one.client().uid == uid).count()
    };
    for _ in 0..200 {
        (1000..1003).for_each(|uid| connect(&mut arbiterd, uid));
    }
    assert_eq!(arbiterd.connections.len(), OF_STRANGERS);
    (0..200).for_each(|_| connect(&mut arbiterd, 7));
    (0..200).for_each(|_| connect(&mut arbiterd, 1003));
    assert_eq!(arbiterd.connections.len(), OF_STRANGERS + 200);
    assert_eq!(of(&arbiterd, 7), 200);
    for uid in 1000..=1003 {
        assert_eq!(of(&arbiterd, uid), OF_STRANGERS / 4, "{uid}");
    }
}

/// Who is told to end does not leave what is to be stopped to nobody.
#[test]
fn events_are_stopped_before_the_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut arbiterd = arbiterd(&folder);
    let Some((_folder, broker)) = busy_broker() else {
        println!("skipped: events_are_stopped_before_the_end: no events");
        return;
    };
    assert!(!broker.is_idle());
    arbiterd.broker = Some(broker);
    arbiterd.finish_stops();
    assert!(arbiterd.broker.is_some_and(|broker| broker.is_idle()));
}
