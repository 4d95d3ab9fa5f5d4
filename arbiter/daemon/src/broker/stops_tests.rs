//! What a user's thread does to events, in which order, and that nobody waits for it.

use std::cell::Cell;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use crate::broker::manager::tests::thread_clock;

use super::*;

fn inherited() -> Option<Arc<InheritedEvent>> {
    let event = Handed::open(&thread_clock()).ok()?;
    let closer = Closer::new(1 << 20);
    match EventFile::new(event, Follows::Children, None, &closer, 7) {
        EventFile::Inherited(event) => Some(event),
        EventFile::Alone(_) => None,
    }
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
    let check = |order: Order, runs: u64, on: bool, stopped: u32| {
        let Some(event) = inherited() else {
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
        assert_eq!((seen[0].on, seen[0].enabled), (on, known), "{order:?}");
        assert_eq!(STOPPED.get(), stopped, "{order:?} {runs}");
    };
    let known = Some(Duration::from_nanos(10));
    check(Order::Stop, 0, false, 2);
    check(Order::Stop, 5, false, 2);
    let look = |stops| Order::Look { known, stops };
    check(look(false), 0, false, 0);
    check(look(false), 5, true, 2);
    // One that sleeps is not seen on, and is stopped all the same.
    check(look(true), 0, false, 2);
    check(look(true), 5, true, 2);
}

/// The kernel takes an hour for user 7; nobody else waits, and what is to be stopped comes before
/// what is only looked at.
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
    // The thread ends when there is nothing to be done.
    while !lock(&stops.users).is_empty() {
        assert!(began.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn what_is_to_be_stopped_comes_before_looks() {
    let Some(event) = inherited() else {
        println!("skipped: what_is_to_be_stopped_comes_before_looks: no events");
        return;
    };
    let mut orders = Orders::default();
    let job = |number, order| Errand {
        number,
        event: Arc::clone(&event),
        order,
    };
    let look = Order::Look {
        known: None,
        stops: false,
    };
    orders.looks.extend([job(1, look), job(2, look)]);
    orders
        .stops
        .extend([job(3, Order::Stop), job(4, Order::Stop)]);
    let mut next = || -> Vec<u64> { orders.next().iter().map(|job| job.number).collect() };
    assert_eq!(
        [next(), next(), next(), next()],
        [vec![3, 4], vec![1], vec![2], vec![]]
    );
}
