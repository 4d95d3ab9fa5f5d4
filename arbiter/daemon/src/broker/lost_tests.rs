//! Which looks are excused, what is taken, and for whom there is room.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use crate::budget::{EventSpec, Follows, Handed, HandedEvent, Rings};

use super::*;
use crate::broker::inherited::Root;
use crate::broker::manager::tests::thread_clock;
use crate::broker::stops;
use crate::broker::tests::{Gate, open_event};
use crate::peer::Started;
use crate::service::Allowed;

/// An event of this thread that was lost then. `None`: the kernel opens none here.
fn lost(since: u64, life: (u32, Option<Started>)) -> Option<Lost> {
    lost_of(since, life, thread_clock())
}

/// The same, of an event of the caller's choice.
fn lost_of(since: u64, life: (u32, Option<Started>), event: HandedEvent) -> Option<Lost> {
    let mut stops = stops();
    let mut lost = lost_by(since, life, event, &mut stops)?;
    answered(&mut lost, &mut stops, &mut Excuses::default(), since);
    Some(lost)
}

/// Waits for the answer to the order that one waits for; `None`: it waits for none.
fn answered(one: &mut Lost, stops: &mut Stops, excuses: &mut Excuses, now: u64) -> Option<OnOff> {
    let number = one.asked?.number;
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(sight) = stops.finished().remove(&number) {
            return Some(one.answered(&sight, excuses, now));
        }
        assert!(Instant::now() < until, "{number} is not answered");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Looks at one, and hears what was seen.
fn look_at(one: &mut Lost, excuses: &mut Excuses, now: u64) -> OnOff {
    let mut stops = stops();
    let seen = one.look(&mut stops, excuses, now);
    answered(one, &mut stops, excuses, now).unwrap_or(seen)
}

/// The same, of a kernel of the caller's choice, and with what is to be done to it still not done.
fn lost_by(
    since: u64,
    life: (u32, Option<Started>),
    event: HandedEvent,
    stops: &mut Stops,
) -> Option<Lost> {
    let open = open_event(Allowed::of(event), life)?;
    Some(Lost::new(open, stops, since))
}

pub(in crate::broker) fn me() -> (u32, Option<Started>) {
    let me = Life::of(std::process::id()).expect("it can be seen");
    let me = me.expect("it is there").id;
    (me.number, Some(Started(me.started)))
}

fn stops() -> Stops {
    let (_, bell) = UnixStream::pair().expect("a pair");
    Stops::new(bell, stops::HOST)
}

/// The host's descriptor of an event.
fn handed(one: &Lost) -> &Handed {
    match &one.open.event {
        EventFile::OfCpu(event) => event,
        EventFile::OfThread(event) => event.handed(),
    }
}

/// Half a second.
const LOOK: u64 = 500_000_000;

#[test]
fn one_look_is_excused_and_the_next_is_not() {
    // Looks in half seconds after the loss, and whether the event was on.
    let check = |looks: &[(u64, bool)], expected: &[OnOff]| {
        let Some(mut one) = lost(10 * LOOK, me()) else {
            println!("skipped: one_look_is_excused_and_the_next_is_not: no events");
            return;
        };
        let mut excuses = Excuses::default();
        let seen = looks
            .iter()
            .map(|(at, on)| one.judge(*on, &mut excuses, (10 + at) * LOOK));
        assert_eq!(seen.collect::<Vec<_>>(), expected, "{looks:?}");
        let taken = expected.contains(&OnOff::On);
        assert_eq!(one.taken_until > 0, taken, "{looks:?}");
    };
    use OnOff::{Excused, Off, On};
    // It was enabled in the moment of the end, and stopped at the first look.
    check(&[(1, true), (2, false), (9, false)], &[Excused, Off, Off]);
    // The first look was at once: what was on its way then is excused, too.
    check(&[(0, true), (1, true), (2, true)], &[Excused, Excused, On]);
    check(&[(1, true), (2, true)], &[Excused, On]);
    // Nobody is that late by an oversight.
    check(&[(1, false), (2, true)], &[Off, On]);
    check(&[(1, false), (90, true)], &[Off, On]);
}

/// Who gets lease after lease, and has each event count for the look that is excused, is no
/// better off.
#[test]
fn a_process_is_excused_three_losses_a_minute() {
    let mut excuses = Excuses::default();
    let me = (7, 7, Some(Started(1)));
    // Many events that are lost at once are one, at whichever look: the VM with all its threads.
    assert!((0..100).all(|_| excuses.take(me, 0, 0)));
    assert!((0..100).all(|_| excuses.take(me, 0, LOOK)));
    assert!(excuses.take(me, LOOK, 2 * LOOK) && excuses.take(me, 2 * LOOK, 2 * LOOK));
    assert!(!excuses.take(me, 3 * LOOK, 3 * LOOK) && !excuses.take(me, 3 * LOOK, LIVES - 1));
    // Other VMs of the same user, and one that has the number later.
    assert!(excuses.take((7, 8, Some(Started(1))), 3 * LOOK, 3 * LOOK));
    assert!(excuses.take((7, 7, Some(Started(2))), 3 * LOOK, 3 * LOOK));
    // Process after process of one user.
    let many = (100..200).map(|pid| excuses.take((7, pid, None), 3 * LOOK, 3 * LOOK));
    assert_eq!(many.filter(|excused| *excused).count(), MOST_OF_USER - 5);
    assert!(excuses.take((8, 100, None), 3 * LOOK, 3 * LOOK));
    assert!(excuses.take(me, LIVES, LIVES));
    excuses.forget_old(3 * LIVES);
    assert!(excuses.0.is_empty());
}

/// One user runs four VMs, which lose their counters at four moments and are late each time.
#[test]
fn vms_of_one_user_are_late_each_for_itself() {
    let mut excuses = Excuses::default();
    for vm in 1..=4 {
        let since = u64::from(vm) * 10 * LOOK;
        let Some(mut one) = lost(since, me()) else {
            println!("skipped: vms_of_one_user_are_late_each_for_itself: no events");
            return;
        };
        one.open.pid = vm;
        // The first look was at once.
        for at in [since, since + LOOK] {
            assert_eq!(one.judge(true, &mut excuses, at), OnOff::Excused, "{vm}");
        }
    }
}

/// An event of the kernel's, which its holder starts again and again.
#[test]
fn an_event_that_is_enabled_again_is_seen_and_stopped() {
    // PERF_COUNT_SW_CPU_CLOCK.
    let of_cpu = HandedEvent {
        spec: EventSpec {
            config: 0,
            ..thread_clock().spec
        },
        thread: None,
        cpu: Some(0),
        rings: Rings::All,
        ..thread_clock()
    };
    for event in [thread_clock(), of_cpu] {
        let text = format!("{event:?}");
        let Some(mut one) = lost_of(0, me(), event) else {
            println!("skipped: an_event_that_is_enabled_again_is_seen_and_stopped: {text}");
            continue;
        };
        let mut excuses = Excuses::default();
        let spend = || (0..200_000u64).fold(0, |sum, one| sum ^ std::hint::black_box(one));
        let mut look = |on: bool, at: u64| {
            if on {
                handed(&one).enable().expect("it can be started");
            }
            spend();
            let seen = look_at(&mut one, &mut excuses, at * LOOK);
            let stopped = handed(&one).enabled().expect("it can be read");
            spend();
            assert_eq!(handed(&one).enabled().expect("it can be read"), stopped);
            seen
        };
        let seen = [(false, 1), (true, 2), (false, 3), (true, 4)].map(|(on, at)| look(on, at));
        let expected = [OnOff::Off, OnOff::On, OnOff::Off, OnOff::On];
        assert_eq!(seen, expected, "{text}");
    }
}

/// The kernel tells no time of an event that it has no counter for, until its thread has
/// ended: nobody has enabled it then.
#[test]
fn the_end_of_a_thread_is_no_start_of_its_event() {
    let ended = std::thread::spawn(|| {
        let number = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get());
        let task = Life::of(number.expect("a number")).expect("it can be seen");
        task.expect("it is there").id
    });
    let ended = ended.join().expect("it ends");
    let ended = (ended.number, Some(Started(ended.started)));
    for (life, seen) in [(ended, [OnOff::Off, OnOff::On]), (me(), [OnOff::On; 2])] {
        let Some(mut one) = lost(0, life) else {
            println!("skipped: the_end_of_a_thread_is_no_start_of_its_event: no events");
            return;
        };
        one.enabled = None;
        one.excused = true;
        let mut excuses = Excuses::default();
        assert_eq!(
            look_at(&mut one, &mut excuses, 2 * LOOK),
            seen[0],
            "{life:?}"
        );
        // What it tells from now on is measured by that.
        assert_eq!(
            look_at(&mut one, &mut excuses, 3 * LOOK),
            OnOff::Off,
            "{life:?}"
        );
        handed(&one).enable().expect("it can be started");
        std::hint::black_box((0..200_000u64).fold(0, |sum, one| sum ^ std::hint::black_box(one)));
        assert_eq!(
            look_at(&mut one, &mut excuses, 4 * LOOK),
            seen[1],
            "{life:?}"
        );
    }
}

#[test]
fn what_is_taken_is_an_outsiders_until_it_is_off_for_a_minute_or_forgiven() {
    let Some(one) = lost(0, me()) else {
        println!("skipped: what_is_taken_is_an_outsiders: no events");
        return;
    };
    let mut all = VecDeque::from([one]);
    assert_eq!(taken(&all, LOOK), []);
    let mut excuses = Excuses::default();
    all[0].judge(false, &mut excuses, LOOK);
    all[0].judge(true, &mut excuses, 2 * LOOK);
    assert_eq!(taken(&all, 3 * LOOK).len(), 1);
    assert_eq!(taken(&all, 2 * LOOK + LIVES), []);
    all[0].judge(true, &mut excuses, 9 * LOOK);
    forgive(&mut all, &mut stops(), 8, 10 * LOOK);
    assert_eq!(taken(&all, 10 * LOOK).len(), 1, "another user");
    forgive(&mut all, &mut stops(), 7, 10 * LOOK);
    assert_eq!(taken(&all, 10 * LOOK), []);
    assert_eq!(all[0].judge(true, &mut excuses, 10 * LOOK), OnOff::Excused);
}

#[test]
fn a_lost_event_is_looked_at_while_there_is_something_to_count() {
    let (Some(lives), Some(gone)) = (lost(0, me()), lost(0, (u32::MAX, me().1))) else {
        println!("skipped: a_lost_event_is_looked_at_while_there_is_something_to_count: no events");
        return;
    };
    let groups = LateTree::new(Path::new("/"));
    let mut states = States::new(&groups);
    assert!(!lives.is_over(&mut states) && gone.is_over(&mut states));
}

/// A thread that is not the first of its process takes the first one's number and start by
/// `execve`, and its event goes along.
#[test]
fn what_a_thread_has_that_calls_execve_is_not_over() {
    let (process, started) = me();
    for (pid, process, over) in [
        (process, started, false),
        // Another has the number of the process.
        (process, Some(Started(1)), true),
        // Of a name of before only the number is known.
        (process, None, false),
        (u32::MAX, None, true),
    ] {
        let Some(mut one) = lost(0, (u32::MAX, started)) else {
            println!("skipped: what_a_thread_has_that_calls_execve_is_not_over: no events");
            return;
        };
        (one.open.pid, one.open.process) = (pid, process);
        let groups = LateTree::new(Path::new("/"));
        assert_eq!(
            one.is_over(&mut States::new(&groups)),
            over,
            "{pid} {process:?}"
        );
    }
}

/// However long it was off: who waits for that would have it count with nobody looking.
#[test]
fn who_loses_many_events_has_room_when_their_threads_are_gone() {
    let gone = (u32::MAX, me().1);
    let lives = [me(), gone, me()];
    let many = (0..).zip(lives).map(|(at, life)| lost(at, life));
    let Some(mut many) = many.collect::<Option<VecDeque<Lost>>>() else {
        println!("skipped: who_loses_many_events_has_room_when_their_threads_are_gone: no events");
        return;
    };
    let since = |many: &VecDeque<Lost>| -> Vec<u64> { many.iter().map(|one| one.since).collect() };
    let groups = LateTree::new(Path::new("/"));
    // Another user cannot have it.
    assert!(take_over(&mut many, 8, &groups).is_none());
    assert_eq!(since(&many), [0, 1, 2]);
    assert!(take_over(&mut many, 7, &groups).is_some());
    assert_eq!(since(&many), [0, 2]);
    // Nobody looks whether these were off for long.
    assert!(take_over(&mut many, 7, &groups).is_none());
    assert_eq!(since(&many), [0, 2]);
}

/// What others may have inherited takes the kernel as long as they are many. Whoever decides does
/// not wait for it; until it is stopped nobody is told that the counter is free, and if that takes
/// too long it is taken.
#[test]
fn an_inherited_event_is_stopped_while_nobody_waits() {
    static GATE: Gate = Gate::new();
    const KERNEL: stops::Kernel = stops::Kernel {
        disable: |_| {
            GATE.wait();
            Ok(())
        },
        enabled: |_| Some(Duration::from_secs(1)),
    };
    let began = Instant::now();
    let Some(one) = lost_with(KERNEL) else {
        println!("skipped: an_inherited_event_is_stopped_while_nobody_waits: no events");
        return;
    };
    let (one, mut judges) = one;
    let mut all = VecDeque::from([one]);
    let groups = LateTree::new(Path::new("/"));
    let mut told = Vec::new();
    assert!(!hear(&mut all, &mut judges, &mut told, 1));
    assert_eq!(all[0].is_being_stopped(), Some(1));
    look(&mut all, &mut judges, &mut told, &groups, LOOK);
    assert_eq!(all[0].is_being_stopped(), Some(1));
    assert_eq!(taken(&all, LOOK), []);
    // Nobody waits any longer, and nobody is promised it.
    look(&mut all, &mut judges, &mut told, &groups, 2 * LOOK);
    assert_eq!(all[0].is_being_stopped(), None);
    assert_eq!(taken(&all, 200 * LOOK).len(), 1);
    forgive(&mut all, &mut judges.stops, 7, 3 * LOOK);
    assert_eq!(taken(&all, 200 * LOOK).len(), 1, "it runs on");
    assert!(began.elapsed() < Duration::from_secs(10), "nobody waits");
    GATE.open();
    while !hear(&mut all, &mut judges, &mut told, 4 * LOOK) {
        assert!(began.elapsed() < Duration::from_secs(20));
    }
    assert_eq!(taken(&all, 4 * LOOK), []);
    assert!(told.is_empty() && all[0].enabled.is_some(), "{told:?}");
}

/// One of user 7 that others may have inherited.
fn lost_with(kernel: stops::Kernel) -> Option<(Lost, Judges)> {
    let (_, bell) = UnixStream::pair().expect("a pair");
    let mut judges = Judges {
        stops: Stops::new(bell, kernel),
        excuses: Excuses::default(),
    };
    let event = HandedEvent {
        follows: Follows::Children,
        ..thread_clock()
    };
    let lost = lost_by(0, me(), event, &mut judges.stops)?;
    Some((lost, judges))
}

/// Whoever is started while an event is stopped takes over that its parent has counted, and is
/// stopped at the next look, or one after that: for which nobody can do anything.
#[test]
fn what_was_being_started_at_the_stop_has_no_price() {
    use OnOff::{Excused, Off, On, Settles};
    // Looks in half seconds after the loss, and whether the event was on.
    let check = |looks: &[(u64, bool)], expected: &[OnOff]| {
        let Some((mut one, _)) = lost_with(stops::HOST) else {
            println!("skipped: what_was_being_started_at_the_stop_has_no_price: no events");
            return;
        };
        let mut excuses = Excuses::default();
        let seen = looks
            .iter()
            .map(|(at, on)| one.judge(*on, &mut excuses, at * LOOK));
        assert_eq!(seen.collect::<Vec<_>>(), expected, "{looks:?}");
        assert_eq!(one.taken_until > 0, expected.contains(&On), "{looks:?}");
    };
    check(&[(1, true), (2, false), (3, false)], &[Settles, Off, Off]);
    let four = [(1, true), (2, true), (3, true), (4, true)];
    check(&four, &[Settles; 4]);
    // After a look that found it off somebody has enabled it.
    check(&[(1, true), (2, false), (3, true)], &[Settles, Off, On]);
    check(
        &[(0, false), (0, true), (1, true)],
        &[Off, Excused, Excused],
    );
    check(&[(1, false), (2, true)], &[Off, On]);
    // Nothing is being started for so long.
    let always = [four.as_slice(), &[(5, true)]].concat();
    check(&always, &[Settles, Settles, Settles, Settles, On]);
    // Who gets lease after lease is no better off.
    let mut excuses = Excuses::default();
    for loss in 1..=MOST_EXCUSED + 1 {
        let Some((mut one, _)) = lost_with(stops::HOST) else {
            return;
        };
        one.since = loss as u64;
        let seen = one.judge(true, &mut excuses, LOOK);
        assert_eq!(seen == On, loss > MOST_EXCUSED, "{loss}: {seen:?}");
    }
}

/// What another user's processes do costs who asked for the event nothing; the counter is taken.
#[test]
fn an_event_of_anothers_thread_bars_nobody() {
    for (foreign, told) in [(false, 2), (true, 1)] {
        let Some((mut one, _)) = lost_with(stops::HOST) else {
            println!("skipped: an_event_of_anothers_thread_bars_nobody: no events");
            return;
        };
        one.open.root = one.open.root.map(|root| Root { foreign, ..root });
        one.settles = 0;
        let mut all = Vec::new();
        let seen = one.judge(true, &mut Excuses::default(), 9 * LOOK);
        assert_eq!(seen, OnOff::Excused);
        let seen = one.judge(true, &mut Excuses::default(), 10 * LOOK);
        tell(&one, seen, &mut all);
        assert_eq!((seen, all.len()), (OnOff::On, told), "{all:?}");
        assert_eq!(taken(&VecDeque::from([one]), 10 * LOOK).len(), 1);
    }
}

/// A look that is not answered in time says nothing, and so its event counts as taken until it
/// is.
#[test]
fn an_event_that_cannot_be_looked_at_is_taken() {
    static GATE: Gate = Gate::new();
    const KERNEL: stops::Kernel = stops::Kernel {
        disable: |_| Ok(()),
        enabled: |_| {
            GATE.wait();
            None
        },
    };
    let Some(mut one) = lost(0, me()) else {
        println!("skipped: an_event_that_cannot_be_looked_at_is_taken: no events");
        return;
    };
    one.enabled = None;
    let (_, bell) = UnixStream::pair().expect("a pair");
    let mut judges = Judges {
        stops: Stops::new(bell, KERNEL),
        excuses: Excuses::default(),
    };
    let mut all = VecDeque::from([one]);
    let (groups, mut told) = (LateTree::new(Path::new("/")), Vec::new());
    for (at, is_taken) in [(1, 0), (2, 0), (20, 0), (21, 1), (300, 1)] {
        look(&mut all, &mut judges, &mut told, &groups, at * LOOK);
        assert_eq!(taken(&all, at * LOOK).len(), is_taken, "{at}");
        assert_eq!(all[0].is_being_stopped(), None, "nobody waits for a look");
    }
    // A pardon is for what was done; it is not known what is.
    forgive(&mut all, &mut judges.stops, 7, 301 * LOOK);
    assert_eq!(taken(&all, 301 * LOOK).len(), 1);
    GATE.open();
    let until = Instant::now() + Duration::from_secs(20);
    while !hear(&mut all, &mut judges, &mut told, 302 * LOOK) {
        assert!(Instant::now() < until);
    }
    assert!(taken(&all, 302 * LOOK).is_empty() && told.is_empty());
}

/// The kernel tells nothing of one that is pinned and had no counter, whoever counts by it: it is
/// taken, and costs nobody anything.
#[test]
fn what_the_kernel_tells_nothing_of_is_taken_and_bars_nobody() {
    let Some((mut one, _)) = lost_with(stops::HOST) else {
        println!("skipped: what_the_kernel_tells_nothing_of_is_taken: no events");
        return;
    };
    let sight = |on| EventSight {
        on,
        enabled: None,
        failed: None,
    };
    let mut excuses = Excuses::default();
    let mut told = Vec::new();
    for at in 9..20 {
        let seen = one.saw(&sight(None), &mut excuses, at * LOOK, at * LOOK);
        tell(&one, seen, &mut told);
        assert!(one.is_taken(at * LOOK) && told.is_empty(), "{told:?}");
    }
    let seen = one.saw(&sight(Some(false)), &mut excuses, 20 * LOOK, 20 * LOOK);
    assert_eq!(seen, OnOff::Off);
    assert!(one.is_taken(20 * LOOK) && !one.is_taken(19 * LOOK + LIVES));
}

/// The last look that is excused is the first half a second after the loss, by when it began: the
/// kernel may take its time with it.
#[test]
fn a_look_that_takes_long_is_no_later_for_that() {
    let Some(mut one) = lost(0, me()) else {
        println!("skipped: a_look_that_takes_long_is_no_later_for_that: no events");
        return;
    };
    let mut excuses = Excuses::default();
    let mut look = |began: u64, answered: u64, enabled: u64| {
        let sight = EventSight {
            on: Some(true),
            enabled: Some(Duration::from_secs(enabled)),
            failed: None,
        };
        let seen = one.saw(&sight, &mut excuses, began, answered);
        (seen, one.taken_until)
    };
    assert_eq!(look(LOOK / 2, 3 * LOOK, 1), (OnOff::Excused, 0));
    assert_eq!(look(4 * LOOK, 5 * LOOK, 2), (OnOff::Excused, 0));
    // What is taken is so for as long as it was known last.
    assert_eq!(look(6 * LOOK, 9 * LOOK, 3), (OnOff::On, 9 * LOOK + LIVES));
}

/// Of those that are not stopped in time it is found out in turn whether they are over: the live
/// ones before them do not hide those that have ended.
#[test]
fn who_has_ended_is_found_behind_many_that_are_late() {
    let gone = (u32::MAX, me().1);
    let lives = std::iter::repeat_n(me(), 2 * TRIES);
    let all = lives.chain([gone]).map(|life| lost(0, life));
    let Some(mut all) = all.collect::<Option<VecDeque<Lost>>>() else {
        println!("skipped: who_has_ended_is_found_behind_many_that_are_late: no events");
        return;
    };
    for one in &mut all {
        one.asked = Some(Asked {
            number: u64::MAX,
            stops: true,
            since: 0,
            is_late: true,
        });
    }
    let mut judges = Judges {
        stops: stops(),
        excuses: Excuses::default(),
    };
    let groups = LateTree::new(Path::new("/"));
    let mut look = |at: u64| look(&mut all, &mut judges, &mut Vec::new(), &groups, at * LOOK).len();
    assert_eq!([1, 2, 3, 4, 5].map(&mut look), [0, 0, 1, 0, 0]);
}
