//! Who shares the counters of a process by an arbiter in it.

use std::sync::mpsc::{Sender, channel};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use umpire_lease::{Counters, Fate, LeaseScope, Request, wait_readable};

use super::*;

/// The first place.
const PLACE: arbiter_host::Place = arbiter_host::Place {
    pmu: PmuId(0),
    domain: 0,
};

/// Four counters, and three of a fixed function.
fn four() -> OwnLeases {
    let stated = PmuConfig::stated(4, 3).expect("a PMU");
    OwnLeases::start(Some(stated), &CpuSet::default()).expect("it starts")
}

/// One CPU with four counters, of which `look` sees something.
fn seen_by(look: impl FnMut() -> Look + Send + 'static) -> OwnLeases {
    let config = ArbiterConfig {
        pmus: PmuConfig::stated(4, 0).into_iter().collect(),
        ..ArbiterConfig::default()
    };
    let config = config.with_watchdog().expect("a tenant for it");
    let state = State::new(config, &CpuSet::from_iter([0]), &[]).expect("counters");
    OwnLeases::of(state, look).expect("it starts")
}

/// So many of the counters are free.
fn free(free: u32) -> Look {
    Look {
        seen: vec![Seen::for_test(PLACE, free)],
        ..Look::default()
    }
}

/// What the first look sees; the next takes longer than a test.
fn once(look: Look) -> (Sender<()>, impl FnMut() -> Look + Send + 'static) {
    let (goes_on, waits) = channel::<()>();
    let mut first = Some(look);
    let look = move || {
        first.take().unwrap_or_else(|| {
            let _ = waits.recv_timeout(Duration::from_secs(120));
            Look::default()
        })
    };
    (goes_on, look)
}

fn outside(leases: &OwnLeases) -> Vec<arbiter::CounterSet> {
    leases.0.lock().arbiter.outside(PLACE).to_vec()
}

fn asks(counters: u32) -> Request {
    Request {
        counters: vec![Counters::programmable(counters)],
        cpus: Some("0".to_owned()),
        scope: Some(LeaseScope::Thread),
        threads: Some(vec![std::process::id()]),
        at_least: Some(1),
        waits_ms: Some(-1),
        label: Some("guest".to_owned()),
        ..Request::default()
    }
}

/// Waits until something is heard, as a holder does.
fn heard(kept: &mut Box<dyn Kept>) -> wire::Event {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        match kept.hear() {
            Some(News::Event(event)) => return *event,
            Some(other) => panic!("{other:?}"),
            None => assert!(Instant::now() < until, "nothing is heard"),
        }
        let left = kept
            .due()
            .unwrap_or(until)
            .saturating_duration_since(Instant::now());
        wait_readable(kept.connection().as_slice(), Some(left));
    }
}

fn what(kept: &mut Box<dyn Kept>) -> (What, u32) {
    let event = heard(kept);
    (event.what, kept.lease().holds)
}

#[test]
fn what_one_gives_back_is_anothers() {
    let leases = four();
    let places = leases.places().expect("places");
    let first = places.first().expect("a CPU");
    assert_eq!((first.programmable, first.fixed), (4, 3));
    let mut guest = leases.acquire(&asks(3)).expect("three of four");
    assert_eq!(guest.lease().holds, 3);
    assert!(guest.hear().is_none());

    let mut tool = leases.acquire(&asks(2)).expect("one of the other");
    assert_eq!((tool.lease().holds, tool.lease().wants), (1, 2));
    let whole = Request {
        at_least: None,
        waits_ms: None,
        ..asks(2)
    };
    let explained = leases.explain(&whole).expect("an answer");
    let why = explained.why.expect("it is short");
    assert_eq!(
        (explained.outcome, why.reason),
        (Fate::Refused, Reason::Held)
    );
    assert!(
        why.message.contains("held by lease 1 (guest)"),
        "{}",
        why.message
    );
    let refused = leases.acquire(&whole).expect_err("there is no room");
    assert!(matches!(refused, CallError::Refused(again) if again.reason == Reason::Held));

    guest.keep(2).expect("it is there");
    assert_eq!(what(&mut guest), (What::Holds, 2));
    assert_eq!(what(&mut tool), (What::Holds, 2));
    // Silence, until there is something to hear.
    assert!(tool.hear().is_none());
    wait_readable(
        &[tool.connection().expect("it holds")],
        Some(Duration::ZERO),
    );

    let mut late = leases.acquire(&asks(4)).expect("it may wait");
    assert_eq!(what(&mut late), (What::Waits, 0));
    drop(guest);
    assert_eq!(what(&mut late), (What::Holds, 2));
    tool.keep(0).expect("it is there");
    assert_eq!(what(&mut tool), (What::Ended, 2));
    assert!(tool.has_ended() && tool.connection().is_none() && tool.hear().is_none());
    assert_eq!(what(&mut late), (What::Holds, 4));
}

/// Nobody but the holder's own thread renews, when it hears.
#[test]
fn a_lease_lasts_while_its_holder_hears() {
    let leases = four();
    let short = Request {
        lasts_ms: Some(4000),
        ..asks(4)
    };
    let mut kept = leases.acquire(&short).expect("all");
    for _ in 0..2 {
        assert!(kept.due().is_some());
        assert_eq!(what(&mut kept), (What::Renewed, 4));
    }
    // It does not listen any more.
    let mut next = leases.acquire(&asks(1)).expect("it may wait");
    assert_eq!(what(&mut next), (What::Waits, 0));
    assert_eq!(what(&mut next), (What::Holds, 1));
    let ended = std::iter::from_fn(|| kept.hear()).last();
    assert!(
        matches!(&ended, Some(News::Event(event)) if event.what == What::Ended),
        "{ended:?}"
    );
    assert!(kept.has_ended() && kept.due().is_none());
}

#[test]
fn requests_are_judged_as_the_service_judges_them() {
    let leases = four();
    let check = |request: Request, reason: Reason| {
        let refused = leases.acquire(&request).expect_err("it is refused");
        assert!(
            matches!(&refused, CallError::Refused(why) if why.reason == reason),
            "{refused:?}"
        );
    };
    let like = || asks(1);
    check(
        Request {
            tenant: Some("blue".to_owned()),
            ..like()
        },
        Reason::WrongRequest,
    );
    check(
        Request {
            label: Some("a\nb".to_owned()),
            ..like()
        },
        Reason::WrongRequest,
    );
    check(
        Request {
            lasts_ms: Some(0),
            ..like()
        },
        Reason::WrongRequest,
    );
    check(
        Request {
            cpus: Some("4000".to_owned()),
            ..like()
        },
        Reason::NoSuchCpu,
    );
    check(
        Request {
            counters: vec![Counters::programmable(5)],
            at_least: None,
            ..like()
        },
        Reason::MoreThanThereIs,
    );
}

/// What others have is nobody's here, from the first lease on and when they come.
#[test]
fn outsiders_have_what_is_not_free() {
    let leases = four();
    let any = arbiter::CounterSet::first(4, 0);
    let see = |counters| {
        for _ in 0..2 {
            leases.0.lock().see(&free(counters));
        }
        outside(&leases)
    };
    assert_eq!(see(3), [any]);
    let mut kept = leases.acquire(&asks(4)).expect("three of them");
    assert_eq!(kept.lease().holds, 3);
    // Its holder uses them by now, and the outsider its own.
    assert_eq!(see(0), [any]);
    assert_eq!(see(1), []);
    assert_eq!(what(&mut kept), (What::Holds, 4));
    drop(kept);

    // Who writes registers explains nothing of what the kernel has given away.
    let registers = Request {
        scope: Some(LeaseScope::Cpu),
        threads: None,
        ..asks(4)
    };
    let mut kept = leases.acquire(&registers).expect("all");
    assert_eq!(see(2), [any, any]);
    assert_eq!(what(&mut kept).0, What::Broken);
}

/// The NMI watchdog's counter is nobody else's, however little of its lease a guest uses.
#[test]
fn the_watchdog_keeps_its_counter() {
    let watched = |counters| Look {
        watchdog: Some(CpuSet::from_iter([0])),
        ..free(counters)
    };
    let (_goes_on, look) = once(watched(3));
    let leases = seen_by(look);
    assert_eq!(outside(&leases), []);
    let guest = leases.acquire(&asks(4)).expect("three of them");
    assert_eq!(guest.lease().holds, 3);
    let see = |counters| (0..2).for_each(|_| leases.0.lock().see(&watched(counters)));
    see(3);
    let whole = Request {
        at_least: None,
        waits_ms: None,
        ..asks(1)
    };
    let refused = leases.acquire(&whole).expect_err("it is the watchdog's");
    assert!(matches!(refused, CallError::Refused(why) if why.reason == Reason::Held));
    drop(guest);

    // The kernel sees nothing of who writes registers, and the watchdog's event.
    let registers = Request {
        scope: Some(LeaseScope::Cpu),
        threads: None,
        ..asks(3)
    };
    let mut guest = leases.acquire(&registers).expect("all but the watchdog's");
    see(3);
    assert_eq!(outside(&leases), []);
    assert_eq!((guest.lease().holds, guest.hear().is_none()), (3, true));

    // Nobody wants it any more.
    leases.0.lock().see(&free(4));
    let kept = leases.acquire(&whole).expect("it is free");
    assert_eq!(kept.lease().holds, 1);
}

/// One look at the host tells who is there at the start; and however long the next takes, who
/// does not renew ends.
#[test]
fn a_look_takes_its_time() {
    let (_goes_on, look) = once(free(3));
    let leases = seen_by(look);
    assert_eq!(outside(&leases), [arbiter::CounterSet::first(4, 0)]);
    let short = Request {
        lasts_ms: Some(2000),
        ..asks(3)
    };
    let kept = leases.acquire(&short).expect("what is left");
    let mut next = leases.acquire(&asks(1)).expect("it may wait");
    assert_eq!(what(&mut next), (What::Waits, 0));
    assert_eq!(what(&mut next), (What::Holds, 1));
    assert_eq!(kept.lease().holds, 3, "it has not heard of its end");
}

/// A look that fails is not the last.
#[test]
fn it_looks_again_after_a_failure() {
    let mut looks = 0;
    let leases = seen_by(move || {
        looks += 1;
        assert_ne!(looks, 2, "a look that fails, as it is to");
        free(if looks == 1 { 4 } else { 3 })
    });
    let until = Instant::now() + Duration::from_secs(60);
    while outside(&leases).is_empty() {
        assert!(Instant::now() < until, "nobody looks");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Each look tells which CPUs are online, whether counters are measured or not.
#[test]
fn each_look_reads_which_cpus_are_online() {
    let root = tempfile::tempdir().expect("a folder");
    let folder = root.path().join("sys/devices/system/cpu");
    std::fs::create_dir_all(&folder).expect("a folder");
    let write = |file: &str, cpus: &str| {
        std::fs::write(folder.join(file), cpus).expect("a file");
    };
    write("present", "0-3");
    write("online", "0-3");
    let config = ArbiterConfig {
        root: root.path().to_owned(),
        ..ArbiterConfig::default()
    };
    let mut looks = Looks {
        host: HostFiles::new(&config).expect("its CPUs"),
        found: Vec::new(),
        due: Instant::now(),
    };
    for cpus in ["0-3", "0-1", "0,2"] {
        write("online", cpus);
        assert_eq!(looks.look().online, cpus.parse().ok());
    }
}

/// When a lease is renewed follows from when it had so long left, not from when that is heard.
#[test]
fn renewals_are_planned_from_what_was_heard() {
    let leases = four();
    let guest = leases.acquire(&asks(4)).expect("all");
    let long = Request {
        lasts_ms: Some(600_000),
        ..asks(4)
    };
    let mut kept = leases.acquire(&long).expect("it may wait");
    assert_eq!(what(&mut kept), (What::Waits, 0));
    drop(guest);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(what(&mut kept), (What::Holds, 4));
    let left = kept.lease().left_ms.expect("it has an end");
    assert_eq!(
        kept.due().expect("it is renewed") - kept.heard(),
        Duration::from_millis(left / 2)
    );
}

/// Only of counters that are held it is said that they are.
#[test]
fn a_refusal_says_what_it_is() {
    let held_by = vec![wire::Lease {
        id: 7,
        label: "guest".to_owned(),
        ..wire::Lease::default()
    }];
    for (reason, said) in [
        (Reason::Held, "the counters are held by lease 7 (guest)"),
        (Reason::Behind, "it says so itself"),
        (Reason::Wanted, "it says so itself"),
    ] {
        let refusal = in_here(wire::Refusal {
            held_by: held_by.clone(),
            ..wire::Refusal::of(reason.clone(), "it says so itself")
        });
        assert_eq!(refusal.message, said);
        assert_eq!(refusal.reason, reason);
    }
}

/// What counts for a lease takes descriptors.
#[test]
fn as_many_files_may_be_open_as_the_host_lets() {
    let before = getrlimit(Resource::Nofile);
    let most = before.maximum;
    let fewer = most.unwrap_or(1 << 16) - 1;
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(fewer),
            ..before
        },
    )
    .expect("a lower limit");
    let leases = four();
    assert_eq!(getrlimit(Resource::Nofile).current, most);
    drop(leases);
}

/// The threads end with those who may ask.
#[test]
fn nothing_is_left_of_it() {
    let leases = four();
    let shared = Arc::downgrade(&leases.0);
    let kept = leases.acquire(&asks(1)).expect("one");
    drop(leases);
    assert!(shared.upgrade().is_some(), "a lease is left");
    drop(kept);
    let until = Instant::now() + Duration::from_secs(60);
    while shared.strong_count() > 0 {
        assert!(Instant::now() < until, "the thread has it still");
        std::thread::sleep(Duration::from_millis(1));
    }
}
