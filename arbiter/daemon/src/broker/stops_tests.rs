//! What a user's thread does to events, in which order, and that nobody waits for it.

use std::cell::Cell;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use crate::broker::manager::tests::thread_clock;
use crate::broker::tests::Gate;

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
        let seen = KERNEL.obey(&[job(&event, 1, order)]);
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
        let seen = KERNEL.obey(&[job(&event, 1, order)]);
        assert_eq!((seen[0].on, STOPPED.get()), (on, stopped));
    }
}

/// The kernel takes an hour for user 7, and nobody waits.
#[test]
fn a_users_orders_are_obeyed_in_turn_and_nobody_waits() {
    static GATE: Gate = Gate::new();
    const KERNEL: Kernel = Kernel {
        disable: |_| {
            GATE.wait();
            Ok(())
        },
        enabled: |_| {
            GATE.wait();
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
    GATE.open();
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
        event: Arc::downgrade(event),
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
    let Some(event) = inherited() else {
        println!("skipped: looks_have_their_turn_beside_endless_stops: no events");
        return;
    };
    let mut orders = Orders::default();
    for number in 1..=70 {
        orders.add(job(&event, number, LOOK));
    }
    for number in 100..300 {
        orders.add(job(&event, number, Order::Stop));
    }
    let mut next = || numbers(&orders.next());
    assert_eq!(next(), (100..164).collect::<Vec<_>>());
    assert_eq!(next(), (1..65).collect::<Vec<_>>());
    assert_eq!(next(), (164..228).collect::<Vec<_>>());
    assert_eq!(next(), (65..=70).collect::<Vec<_>>());
    assert_eq!(next(), (228..292).collect::<Vec<_>>());
    assert_eq!([next(), next()], [(292..300).collect(), vec![]]);
}

/// Each takes the kernel as long as a whole turn: others are done in turns to come, each in its
/// place.
#[test]
fn a_turn_has_an_end_and_what_is_left_comes_first() {
    const KERNEL: Kernel = Kernel {
        disable: |_| {
            sleep(TURN);
            Ok(())
        },
        enabled: |_| None,
    };
    let Some(event) = inherited() else {
        println!("skipped: a_turn_has_an_end_and_what_is_left_comes_first: no events");
        return;
    };
    let mut queue = Queue::default();
    let orders = queue.users.entry(7).or_default();
    for number in 1..=4 {
        orders.add(job(&event, number, Order::Stop));
    }
    let (uid, mut jobs) = queue.next(Instant::now()).expect("there are four");
    let done = KERNEL.obey(&jobs).len();
    assert_eq!((jobs.len(), done), (4, 1));
    queue.done(uid, jobs.split_off(done));
    let left = queue.next(Instant::now()).map(|(_, jobs)| numbers(&jobs));
    assert_eq!(left, Some(vec![2, 3, 4]));
    queue.done(7, vec![]);
    assert!(queue.users.is_empty());
}

/// Whose process has ended leaves no file open for what was still to be done to its events, and no
/// more orders than some.
#[test]
fn what_nobody_looks_at_any_more_is_closed_and_not_looked_at() {
    const KERNEL: Kernel = Kernel {
        disable: |_| panic!("it is closed"),
        enabled: |_| panic!("it is closed"),
    };
    let (Some(gone), Some(stays)) = (inherited(), inherited()) else {
        println!("skipped: what_nobody_looks_at_any_more_is_closed: no events");
        return;
    };
    let file = Arc::downgrade(&gone);
    let mut orders = Orders::default();
    let many = u64::try_from(MANY).expect("it is small");
    for number in 1..many {
        assert_eq!(orders.add(job(&gone, number, Order::Stop)), 0);
    }
    drop(gone);
    assert_eq!(file.strong_count(), 0);
    assert_eq!(KERNEL.obey(&orders.next()), vec![GONE; BATCH]);
    assert_eq!(orders.add(job(&stays, many, LOOK)), 0);
    for number in 1..=u64::try_from(BATCH).expect("it is small") {
        let forgotten = orders.add(job(&stays, many + number, LOOK));
        assert_eq!(forgotten == 0, number < 64, "{number}");
    }
    assert_eq!(orders.len(), BATCH + 1);
}

/// However many users have something to be stopped, no more threads are started than some, and
/// each user has its turn.
#[test]
fn users_have_turns_and_threads_are_few() {
    let mut queue = Queue::default();
    let all: Option<Vec<_>> = (0..100).map(|uid| event(Follows::Children, uid)).collect();
    let Some(all) = all else {
        println!("skipped: users_have_turns_and_threads_are_few: no events");
        return;
    };
    let add = |queue: &mut Queue, uid: u32, count: u64| {
        let orders = queue.users.entry(uid).or_default();
        let event = &all[uid as usize];
        (0..count).for_each(|number| _ = orders.add(job(event, number, Order::Stop)));
    };
    (0..20).for_each(|uid| add(&mut queue, uid, 70));
    let start = Instant::now();
    let takes = (0..30).filter(|_| queue.takes_thread(start));
    assert_eq!(takes.count(), MOST_THREADS);
    let mut begun = Vec::new();
    // User 1's takes for ever, and is begun once; the others go on.
    for _ in 0..50 {
        let Some((uid, jobs)) = queue.next(start) else {
            break;
        };
        begun.push((uid, jobs.len()));
        if uid != 1 {
            queue.done(uid, vec![]);
        }
    }
    let expected = (1..20).chain([0]).map(|uid| (uid, 64));
    let expected = expected.chain((2..20).chain([0]).map(|uid| (uid, 6)));
    assert_eq!(begun, expected.collect::<Vec<_>>());
    // The one thread there is still does user 1's, and goes on with the rest of that by itself.
    queue.threads = 1;
    assert!(!queue.takes_thread(start));
    // Eight that are slow leave room for others, up to many.
    (2..100).for_each(|uid| add(&mut queue, uid, 1));
    let at = |ms| start + Duration::from_millis(ms);
    let mut serve = |now| {
        let threads = (0..200).filter(|_| queue.takes_thread(now)).count();
        (0..threads).for_each(|_| assert!(queue.next(now).is_some()));
        threads
    };
    assert_eq!([serve(at(0)), serve(at(50))], [7, 0]);
    assert_eq!([serve(at(100)), serve(at(150)), serve(at(200))], [8, 0, 8]);
    let later = (3..20).map(|turn| serve(at(100 * turn))).sum::<usize>();
    assert_eq!(later, MOST_WITH_SLOW - 24);
}
