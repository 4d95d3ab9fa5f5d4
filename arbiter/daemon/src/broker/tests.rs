//! What waits for events to be stopped, and what is not taken for over.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use arbiter_host::CpuSet;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
use serde_json::{Value, json};
use umpire_lease::INTERFACE;
use varlink::Request;

use super::lost::tests::me;
use super::manager::tests::thread_clock;
use super::stops::Kernel;
use super::*;
use crate::budget::HandedEvent;
use crate::service::ConnectionId;

/// What a test's kernel waits for.
pub(super) struct Gate(Mutex<bool>, Condvar);

impl Gate {
    pub(super) const fn new() -> Self {
        Gate(Mutex::new(false), Condvar::new())
    }

    pub(super) fn wait(&self) {
        let is_open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.1.wait_while(is_open, |is_open| !*is_open));
    }

    pub(super) fn open(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.1.notify_all();
    }
}

/// An event of user 7, of this thread or what looks so. `None`: the kernel opens none here.
pub(super) fn open_event(allowed: Allowed, life: (u32, Option<Started>)) -> Option<OpenEvent> {
    let event = &allowed.event;
    let handed = Handed::open(event).ok()?;
    let root = (event.follows != Follows::Nothing).then_some(Root {
        process: None,
        since: Started(0),
        foreign: false,
    });
    Some(OpenEvent {
        event: EventFile::new(handed, event, None, &Closer::new(1 << 20), 7),
        allowed,
        uid: 7,
        tenant: None,
        pid: u32::MAX,
        life,
        root,
        process: me().1,
        name: None,
    })
}

/// One that this thread and what it starts count by.
fn inherited() -> Allowed {
    Allowed::of(HandedEvent {
        follows: Follows::Children,
        ..thread_clock()
    })
}

/// One with a kernel of the test's own.
fn broker(kernel: Kernel) -> (tempfile::TempDir, Broker) {
    let folder = tempfile::tempdir().expect("a folder");
    let closer = Closer::new(1 << 20);
    let access = Access {
        mode: 0o600,
        group: None,
    };
    let listener = Broker::listen(&folder.path().join("socket"), &access, &closer);
    let listener = listener.expect("it listens");
    let broker = Broker::new(listener, (1 << 20, &closer), false, Path::new("/"));
    let mut broker = broker.expect("it starts");
    let bell = broker.opens.bell().expect("a pipe");
    broker.judges.stops = Stops::new(bell, kernel);
    (folder, broker)
}

/// One whose kernel takes a moment to stop the one event that is lost. `None`: no events here.
pub(crate) fn busy_broker() -> Option<(tempfile::TempDir, Broker)> {
    const KERNEL: Kernel = Kernel {
        disable: |_| {
            std::thread::sleep(Duration::from_millis(50));
            Ok(())
        },
        enabled: |_| None,
    };
    let (folder, mut broker) = broker(KERNEL);
    broker.lose(vec![open_event(inherited(), me())?], 0);
    Some((folder, broker))
}

/// User 7's leases 1 and 2, of two counters of CPU 0 each.
fn service() -> Service {
    let text = "[[pmu]]\nprogrammable = 4\nperf-type = 1\ncpus = \"0-1\"\n\
                [[tenant]]\nname = \"blue\"\nusers = [7]\nwhole-cpus = true\nopens-events = true\n";
    let config = ArbiterConfig::parse("test".as_ref(), text).expect("a configuration");
    let pmus = config.host_pmus(&CpuSet::from_iter([0, 1]));
    let arbiter = HostArbiter::new(pmus, config.policy.clone()).expect("the policy fits");
    let mut service = Service::new(arbiter, config);
    let request = json!({ "counters": [{ "count": 2 }], "cpus": "0" });
    let request: Value = json!({ "request": request });
    for _ in 0..2 {
        let client = Client {
            pid: 47,
            uid: 7,
            ..Client::default()
        };
        let method = format!("{INTERFACE}.Acquire");
        let request = Request::create(method, Some(request.clone()));
        service.call(ConnectionId(7), &client, &request, BootTime(1));
    }
    assert_eq!(service.arbiter().leases().count(), 2);
    service
}

/// An event that is being stopped, and one that is to be given: of which lease, which of its
/// counters, which PMU, which CPU.
#[test]
fn an_event_waits_for_those_that_may_be_on_its_counter() {
    static GATE: Gate = Gate::new();
    const KERNEL: Kernel = Kernel {
        disable: |_| {
            GATE.wait();
            Ok(())
        },
        enabled: |_| None,
    };
    let service = service();
    let arbiter = service.arbiter();
    let check = |old: (u64, usize, u16, Option<u32>), new, order: u64, waits: bool| {
        let of = |(lease, counter, pmu, cpu): (u64, usize, u16, Option<u32>)| Allowed {
            lease: LeaseId(lease),
            counter,
            pmu: PmuId(pmu),
            event: HandedEvent {
                cpu,
                ..inherited().event
            },
            ..inherited()
        };
        let (_folder, mut broker) = broker(KERNEL);
        let (Some(stopping), Some(next)) = (open_event(of(old), me()), open_event(of(new), me()))
        else {
            println!("skipped: an_event_waits_for_those_that_may_be_on_its_counter: no events");
            return;
        };
        broker.lose(vec![stopping], 0);
        let later = Later {
            connection: 1,
            allowed: next.allowed,
            tenant: None,
            event: next.event,
            order,
        };
        let told = broker.being_stopped(arbiter);
        assert_eq!(
            broker.is_free(&later, arbiter),
            !waits,
            "{old:?} {new:?} {order}"
        );
        // Of what its lease has still nobody else is told that it has it.
        let has = old.0 < 3 && old.1 < 2;
        let of_pmu = BeingStopped::from([((PmuId(old.2), old.3), 1)]);
        assert_eq!(
            told,
            if has { BeingStopped::new() } else { of_pmu },
            "{old:?}"
        );
    };
    // Its own that is replaced; another of its own that it has still.
    check((1, 0, 0, None), (1, 0, 0, None), 1, true);
    check((1, 1, 0, None), (1, 0, 0, None), 1, false);
    // What another lease has still, what that has lost, and one of a lease that is gone.
    check((1, 0, 0, None), (2, 0, 0, None), 1, false);
    check((1, 2, 0, None), (2, 0, 0, None), 1, true);
    check((9, 0, 0, None), (2, 0, 0, None), 1, true);
    // Another PMU, another CPU, and one that may be on each.
    check((9, 0, 1, None), (2, 0, 0, None), 1, false);
    check((9, 0, 0, Some(1)), (2, 0, 0, Some(0)), 1, false);
    check((9, 0, 0, Some(1)), (2, 0, 0, None), 1, true);
    // What was lost after it was opened needs nothing that it has.
    check((9, 0, 0, None), (2, 0, 0, None), 0, false);
    GATE.open();
}

/// While an event waits to be given its lease loses the counter. It is stopped like each that is
/// lost, and who has waited is told why it gets nothing.
#[test]
fn an_event_that_is_lost_before_it_is_given_is_refused() {
    let service = service();
    let (_folder, mut broker) = broker(stops::HOST);
    let (own, other) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("a pair");
    let socket = ClientSocket::new(own, &broker.closer);
    assert!(broker.admit(1, socket, service.config()));
    // Lease 1 has counter 0, and 7 no more, which the broker has not heard yet.
    for (counter, is_lost) in [(0, false), (0, true), (7, false)] {
        let allowed = Allowed {
            counter,
            ..inherited()
        };
        let Some(open) = open_event(allowed, me()) else {
            println!("skipped: an_event_that_is_lost_before_it_is_given_is_refused: no events");
            return;
        };
        let later = Later {
            connection: 1,
            allowed: open.allowed.clone(),
            tenant: None,
            event: open.event.clone(),
            order: 0,
        };
        broker.have(open, 0);
        broker.later.push(later);
        if is_lost {
            broker.lose_of(LeaseId(1), 0, |_| true);
        }
        assert_eq!(broker.give_free(&service), [1]);
        assert!(broker.later.is_empty());
        let mut bytes = [0; 4096];
        let (_, length) = recv(&other, &mut bytes[..], RecvFlags::DONTWAIT).expect("an answer");
        let reply: EventReply = serde_json::from_slice(&bytes[..length]).expect("a reply");
        let refused = reply.refused.map(|refusal| refusal.reason);
        let is_refused = is_lost || counter == 7;
        let expected = is_refused.then_some(Reason::WrongGeneration);
        assert_eq!(
            (reply.counter, refused),
            ((!is_refused).then_some(0), expected)
        );
    }
}

/// Of one thread, whose process has ended with it, one event counts that process alone, and
/// another what it has started, too.
#[test]
fn what_a_thread_has_left_is_not_over_with_what_was_its_own() {
    let gone = (u32::MAX, me().1);
    let (_folder, mut broker) = broker(stops::HOST);
    for follows in [Follows::Threads, Follows::Children] {
        let event = HandedEvent {
            follows,
            ..thread_clock()
        };
        let Some(mut open) = open_event(Allowed::of(event), gone) else {
            println!("skipped: what_a_thread_has_left_is_not_over: no events");
            return;
        };
        open.root = open.root.map(|root| Root {
            process: Some(u32::MAX),
            ..root
        });
        broker.open.entry(LeaseId(1)).or_default().push(open);
    }
    broker.look_at_threads(0);
    let left = broker.open.values().flatten();
    let left: Vec<Follows> = left.map(|open| open.allowed.event.follows).collect();
    assert_eq!((left, broker.lost.len()), (vec![Follows::Children], 1));
}
