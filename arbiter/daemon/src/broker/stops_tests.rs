//! What a user's thread does to events, in which order, and that nobody waits for it.

use std::cell::Cell;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use crate::broker::manager::tests::thread_clock;

use super::*;

fn event(follows: Follows, uid: u32) -> Option<Arc<ThreadEvent>> {
    let of = HandedEvent {
        follows,
        ..thread_clock()
    };
    let event = Handed::open(&of).ok()?;
    match EventFile::new(event, &of, None, &Closer::new(1 << 20), uid) {
        EventFile::OfThread(event) => Some(event),
        EventFile::OfCpu(_) => None,
    }
}

fn inherited() -> Option<Arc<ThreadEvent>> {
    event(Follows::Children, 7)
}

thread_local! {
    /// How long the event of a test's kernel has counted, how much more each call finds, and
    /// how often it was stopped.
    static TIME: Cell<u64> = const { Cell::new(0) };
    static RUNS: Cell<u64> = const { Cell::new(0) };
    static STOPPED: Cell<u32> = const { Cell::new(0) };
}

/// What was seen for each order, and how often the event was stopped for it.
#[test]
fn what_may_be_on_is_stopped_twice_and_what_was_off_is_read_alone() {
    const KERNEL: Kernel = Kernel {
        disable: |_| {
            STOPPED.set(STOPPED.get() + 1);
            Ok(())
        },
        enabled: |_| {
            TIME.set(TIME.get() + RUNS.get());
            Some(Duration::from_nanos(TIME.get()))
        },
    };
    let check = |follows: Follows, order: Order, runs: u64, on: bool, stopped: u32| {
        let Some(event) = event(follows, 7) else {
            println!("skipped: what_may_be_on_is_stopped_twice: no events");
            return;
        };
        TIME.set(10);
        RUNS.set(runs);
        STOPPED.set(0);
        let job = Errand {
            number: 1,
            event,
            order,
        };
        let seen = KERNEL.obey(&[job]);
        let known = Some(Duration::from_nanos(TIME.get()));
        assert_eq!(
            (seen[0].on, seen[0].enabled),
            (Some(on), known),
            "{order:?}"
        );
        assert_eq!(STOPPED.get(), stopped, "{order:?} {runs}");
    };
    let known = Some(Duration::from_nanos(10));
    let look = |stops| Order::Look { known, stops };
    // What only its thread counts by is reached by the first stop.
    check(Follows::Nothing, Order::Stop, 5, false, 1);
    check(Follows::Nothing, look(false), 0, false, 0);
    check(Follows::Nothing, look(false), 5, true, 1);
    let check = |order, runs, on, stopped| check(Follows::Children, order, runs, on, stopped);
    check(Order::Stop, 0, false, 2);
    check(Order::Stop, 5, false, 2);
    check(look(false), 0, false, 0);
    check(look(false), 5, true, 2);
    // One that sleeps is not seen on, and is stopped all the same.
    check(look(true), 0, false, 2);
    check(look(true), 5, true, 2);
}

/// The kernel tells no time of an event that is pinned and had no counter: others may count by it
/// all the same, and it is stopped.
#[test]
fn what_the_kernel_tells_nothing_of_is_stopped_and_not_known_to_be_off() {
    const KERNEL: Kernel = Kernel {
        disable: |_| {
            STOPPED.set(STOPPED.get() + 1);
            Ok(())
        },
        enabled: |_| None,
    };
    let (Some(alone), Some(inherited)) = (event(Follows::Nothing, 7), inherited()) else {
        println!("skipped: what_the_kernel_tells_nothing_of_is_stopped: no events");
        return;
    };
    let known = Some(Duration::from_nanos(10));
    for (event, on, stopped) in [(alone, Some(false), 0), (inherited, None, 2)] {
        STOPPED.set(0);
        let order = Order::Look {
            known,
            stops: false,
        };
        let job = Errand {
            number: 1,
            event,
            order,
        };
        let seen = KERNEL.obey(&[job]);
        assert_eq!((seen[0].on, STOPPED.get()), (on, stopped));
    }
}

/// The kernel takes an hour for user 7, and nobody waits.
#[test]
fn a_users_orders_are_obeyed_in_turn_and_nobody_waits() {
    use std::sync::Condvar;
    static GOES: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());
    fn waits() {
        let goes = GOES.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(GOES.1.wait_while(goes, |goes| !*goes));
    }
    const KERNEL: Kernel = Kernel {
        disable: |_| {
            waits();
            Ok(())
        },
        enabled: |_| {
            waits();
            None
        },
    };
    let (_told, bell) = UnixStream::pair().expect("a pair");
    let mut stops = Stops::new(bell, KERNEL);
    let Some(event) = inherited() else {
        println!("skipped: a_users_orders_are_obeyed_in_turn_and_nobody_waits: no events");
        return;
    };
    let began = Instant::now();
    let look = Order::Look {
        known: None,
        stops: false,
    };
    let orders = [Order::Stop, look, look, Order::Stop];
    let numbers = orders.map(|order| stops.begin(&event, order));
    assert_eq!(numbers, [1, 2, 3, 4]);
    assert!(began.elapsed() < Duration::from_secs(5), "nobody waits");
    assert!(!stops.is_idle() && stops.finished().is_empty());
    *GOES.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
    GOES.1.notify_all();
    let mut all = BTreeMap::new();
    while all.len() < 4 {
        assert!(began.elapsed() < Duration::from_secs(20), "{all:?}");
        all.append(&mut stops.finished());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(stops.is_idle());
    // The threads end when there is nothing to be done.
    while lock(&stops.queue).threads > 0 {
        assert!(began.elapsed() < Duration::from_secs(20));
    }
    assert!(lock(&stops.queue).users.is_empty());
}

/// An order for an event, by its number.
fn job(event: &Arc<ThreadEvent>, number: u64, order: Order) -> Errand {
    Errand {
        number,
        event: Arc::clone(event),
        order,
    }
}

fn numbers(jobs: &[Errand]) -> Vec<u64> {
    jobs.iter().map(|job| job.number).collect()
}

const LOOK: Order = Order::Look {
    known: None,
    stops: false,
};

/// A job that ends and starts always has something to be stopped.
#[test]
fn looks_have_their_turn_beside_endless_stops() {
    let (Some(alone), Some(inherited)) = (event(Follows::Nothing, 7), inherited()) else {
        println!("skipped: looks_have_their_turn_beside_endless_stops: no events");
        return;
    };
    let mut orders = Orders::default();
    let looks = [(1, &inherited), (2, &alone), (3, &alone), (4, &inherited)];
    let looks = looks.map(|(number, event)| job(event, number, LOOK));
    orders.looks.extend(looks);
    let stops = (100..150).map(|number| job(&inherited, number, Order::Stop));
    orders.stops.extend(stops);
    let mut next = || numbers(&orders.next());
    let batch = |first: u64| (first..first + 16).collect::<Vec<_>>();
    assert_eq!(next(), batch(100));
    // One that may take long alone, some that do not together.
    assert_eq!(next(), [1]);
    assert_eq!(next(), batch(116));
    assert_eq!(next(), [2, 3]);
    assert_eq!(next(), batch(132));
    assert_eq!(next(), [4]);
    assert_eq!([next(), next()], [vec![148, 149], vec![]]);
}

/// However many users have something to be stopped, no more threads are started than some, and
/// each user has its turn.
#[test]
fn users_have_turns_and_threads_are_few() {
    let mut queue = Queue::default();
    for uid in 0..20 {
        let Some(event) = event(Follows::Children, uid) else {
            println!("skipped: users_have_turns_and_threads_are_few: no events");
            return;
        };
        let orders = queue.users.entry(uid).or_default();
        let stops = (0..20).map(|at| job(&event, u64::from(100 * uid + at), Order::Stop));
        orders.stops.extend(stops);
    }
    assert_eq!(
        (0..30).filter(|_| queue.takes_thread()).count(),
        MOST_THREADS
    );
    let mut begun = Vec::new();
    let mut next = |queue: &mut Queue| {
        let (uid, jobs) = queue.next()?;
        begun.push((uid, jobs.len()));
        Some(uid)
    };
    // User 1's takes for ever, and is begun once; the others go on.
    for at in 0..50 {
        match next(&mut queue) {
            Some(1) => {}
            Some(uid) => queue.done(uid),
            None => assert!(at >= 39, "{at}"),
        }
    }
    let all = (1..20).chain([0]);
    let mut expected: Vec<(u32, usize)> = all.map(|uid| (uid, 16)).collect();
    expected.extend((2..20).chain([0]).map(|uid| (uid, 4)));
    assert_eq!(begun, expected);
    // The one thread there is still does user 1's, and goes on with the rest of that by itself.
    queue.threads = 1;
    assert!(!queue.takes_thread());
    if let Some(event) = inherited() {
        let orders = queue.users.entry(7).or_default();
        orders.stops.push_back(job(&event, 1, Order::Stop));
    }
    assert!(queue.takes_thread() && queue.next().is_some());
    queue.done(7);
    queue.done(1);
    assert!(!queue.takes_thread());
    assert_eq!(
        queue.next().map(|(uid, jobs)| (uid, jobs.len())),
        Some((1, 4))
    );
    queue.done(1);
    assert!(queue.users.is_empty());
}
