//! The `sim` backend: its table's errors, and counts that are differences of
//! pure functions of the time in which a vCPU ran.

use pmu_virt::{
    Constraint, CountRequest, CounterBackend, EventCode, EventFamily, OwnerId, Progress,
    Provenance, RateTable, Reading, Ring, SimBackend, SimClocks, SlotIndex, SlotSet, SoftwareEvent,
    Ticks, Tsc, UnavailableReason,
};
use proptest::prelude::*;
use std::num::NonZeroU64;

/// TSC ticks in a millisecond.
const KHZ: u32 = 2_500_000;
const A: SlotIndex = SlotIndex(0);
const B: SlotIndex = SlotIndex(1);

fn event(family: EventFamily, select: u16, umask: u8) -> CountRequest {
    let code = EventCode::Selected {
        family,
        select,
        umask,
    };
    CountRequest::plain(code, true, true)
}

fn instructions() -> CountRequest {
    event(EventFamily::Intel, 0xc0, 0)
}

fn clocks(table: &str) -> SimClocks {
    let table = RateTable::parse(table, "t.toml").unwrap_or_else(|error| panic!("{error}"));
    SimClocks::new(table, KHZ)
}

fn backend(table: &str) -> SimBackend {
    SimBackend::of(&clocks(table))
}

/// One interval from an entry to an exit.
fn interval(backend: &mut SimBackend, from: u64, ticks: u64, ring: Ring) {
    backend.observe(&Progress::Entered { tsc: Tsc(from) });
    backend.observe(&Progress::Left {
        tsc: Tsc(from + ticks),
        halted: Ticks(0),
        ring: Some(ring),
    });
}

fn count(backend: &SimBackend, slot: SlotIndex) -> u64 {
    match backend.read(slot) {
        Reading::Counted { value, provenance } => {
            assert_eq!(provenance, Provenance::Simulated);
            value
        }
        Reading::Unavailable(reason) => panic!("{reason}"),
    }
}

fn started(table: &str, request: &CountRequest) -> SimBackend {
    let mut backend = backend(table);
    backend.program(A, request).expect("in the table");
    backend.start(A);
    backend
}

#[test]
fn errors_name_file_line_and_the_nearest_name() {
    fn check(table: &str, expected: &str) {
        let error = RateTable::parse(table, "t.toml").expect_err(table);
        assert_eq!(error.to_string(), expected, "{table}");
    }
    check(
        "",
        "t.toml:1: no event: add a table such as [event.instructions] with `rate = 1000`",
    );
    check(
        "[event]",
        "t.toml:1: no event: add a table such as [event.instructions] with `rate = 1000`",
    );
    check(
        "seed = 1\n[event.instructons]\nrate = 1",
        "t.toml:2: unknown event `instructons`; did you mean `instructions`? (or a raw code: \
         r00c0, unit mask and event select)",
    );
    check(
        "[event.cycles]\nkernel = 1\nusr = 1",
        "t.toml:3: unknown key `usr`; did you mean `user`?",
    );
    check(
        "count = 3\n[event.cycles]\nrate = 1",
        "t.toml:1: unknown key `count`; did you mean `counters`?",
    );
    check(
        "counters = 0\n[event.cycles]\nrate = 1",
        "t.toml:1: `counters` has to be from 1 to 128",
    );
    check(
        "counters = 129\n[event.cycles]\nrate = 1",
        "t.toml:1: `counters` has to be from 1 to 128",
    );
    check(
        "counters = \"4\"\n[event.cycles]\nrate = 1",
        "t.toml:1: `counters` has to be a whole number",
    );
    check(
        "\n\n[event.cycles]\nrate = 1000001",
        "t.toml:4: `rate` has to be from 0 to 1000000",
    );
    check(
        "[event.cycles]\nrate = -1",
        "t.toml:2: `rate` has to be from 0 to 1000000",
    );
    check(
        "[event.cycles]\nrate = 1e3",
        "t.toml:2: `rate` has to be a number with at most six decimals and no exponent",
    );
    check(
        "[event.cycles]\nrate = nan",
        "t.toml:2: `rate` has to be a number with at most six decimals and no exponent",
    );
    check(
        "[event.cycles]\nrate = \"fast\"",
        "t.toml:2: `rate` has to be a number",
    );
    check(
        "[event.cycles]\nuser = 1",
        "t.toml:1: no rate at CPL 0: give `rate` for both rings, or `kernel` and `user` (0 for none)",
    );
    check(
        "[event.cycles]\nphases = [\n{ us = 1, rate = 1 },\n{ us = 1, kernel = 1 },\n]",
        "t.toml:4: no rate at CPL 3: give `rate` for both rings, or `kernel` and `user` (0 for none)",
    );
    check(
        "[event.cycles]\nphases = []",
        "t.toml:2: `phases` has to be a list of 1 to 1024 tables",
    );
    check(
        "[event.cycles]\nphases = [{ us = 0, rate = 1 }]",
        "t.toml:2: `us` has to be from 1 to 1000000000",
    );
    check(
        "[event.cycles]\nphases = [{ rate = 1 }]",
        "t.toml:2: `phases` has to be a list of tables with `us`",
    );
    check(
        "[event.cycles]\nrate = 1\nnoise = 1.0",
        "t.toml:3: `noise` has to be below 1: 0.05 varies the rate by up to 5 % either way",
    );
    check(
        "counters = 2\n[event.cycles]\nrate = 1\nslots = [2]",
        "t.toml:4: `slots` has to be from 0 to 1",
    );
    check(
        "[event.cycles]\nrate = 1\nslots = [1, 2]\npaired = true",
        "t.toml:4: `paired` needs an even counter and the one after it among `slots`",
    );
    check(
        "[event.cycles]\nrate = 1\nexclusive = \"northbrige\"",
        "t.toml:3: `exclusive` cannot be `northbrige`; did you mean `northbridge`?",
    );
    check(
        "[event.r00c0]\nrate = 1\n[event.0x5300c0]\nrate = 1",
        "t.toml:3: `0x5300c0` names the same event as another entry",
    );
    check(
        "[event.cycles]\nrate = 1\n[event.cpu-cycles]\nrate = 1",
        "t.toml:3: `cpu-cycles` names the same event as another entry",
    );
    check(
        "[event.r18400c0]\nrate = 1",
        "t.toml:1: `r18400c0` has bits beyond event select, unit mask, USR, OS, PC, INT and EN",
    );
    check(
        "[event.cycles]\nrate = 1\nrate = 2",
        "t.toml:3: duplicate key",
    );
    check("event = 3", "t.toml:1: `event` has to be a table");
}

#[test]
fn events_are_found_by_meaning_and_by_code() {
    let table = "[event.instructions]\nrate = 1\n[event.r00c0]\nrate = 2\n\
                 [event.0x1005300e0]\nrate = 3\n[event.page-faults]\nrate = 4\n";
    let per_us = |request: &CountRequest| {
        let mut backend = started(table, request);
        interval(&mut backend, 0, u64::from(KHZ), Ring::User);
        count(&backend, A) / 1000
    };
    // The very code comes before the meaning.
    assert_eq!(per_us(&instructions()), 2);
    assert_eq!(per_us(&event(EventFamily::AmdZen, 0xc0, 0x11)), 1);
    assert_eq!(per_us(&event(EventFamily::AmdZen, 0x1e0, 0)), 3);
    let software = EventCode::Software(SoftwareEvent::PageFaults);
    assert_eq!(per_us(&CountRequest::plain(software, true, true)), 4);
    let refused = backend(table).plan(&event(EventFamily::Intel, 0x3c, 0));
    assert!(matches!(
        refused.expect_err("not in the table").reason,
        UnavailableReason::Event { .. }
    ));
}

/// Cycles are ticks: of 2 events in each microsecond one is in each 1250 of them.
#[test]
fn cycles_with_enough_events_are_counted() {
    let table = "[event.instructions]\nkernel = 2\nuser = 6250\n\
                 [event.cycles]\nrate = 1\nnoise = 0.1\n";
    let mut backend = backend(table);
    let any = |request: CountRequest| CountRequest {
        any_thread: true,
        ..request
    };
    let noisy = CountRequest {
        cmask: 1,
        ..event(EventFamily::AmdZen, 0x76, 0)
    };
    for request in [any(instructions()), noisy] {
        let refused = backend.plan(&request).expect_err("it cannot be told");
        assert_eq!(
            refused.reason,
            UnavailableReason::Modifier { backend: "sim" }
        );
    }
    // Counter mask, invert, edge; cycles in 1 ms at CPL 0, and in 1 ms at CPL 3, of which each
    // has two events and every other one a third.
    let rows = [
        ((1, false, false), (2_000, 2_500_000)),
        ((2, false, false), (0, 2_500_000)),
        ((3, false, false), (0, 1_250_000)),
        ((4, false, false), (0, 0)),
        ((1, true, false), (2_498_000, 0)),
        ((3, true, false), (2_500_000, 1_250_000)),
        // The last cycle at CPL 0 has an event, too.
        ((0, false, true), (2_000, 0)),
        ((3, false, true), (0, 1_250_000)),
        ((1, true, true), (2_000, 0)),
        // As without a counter mask there is nothing to be below.
        ((0, true, false), (2_000, 6_250_000)),
    ];
    for (at, ((cmask, invert, edge), _)) in (0..).zip(rows) {
        let request = CountRequest {
            cmask,
            invert,
            edge,
            ..instructions()
        };
        backend.program(SlotIndex(at), &request).expect("a slot");
        backend.start(SlotIndex(at));
    }
    let ms = u64::from(KHZ);
    let counts = |backend: &SimBackend| -> Vec<u64> {
        let all = (0..).zip(rows).map(|(at, _)| count(backend, SlotIndex(at)));
        all.collect()
    };
    interval(&mut backend, 0, ms, Ring::Kernel);
    let kernel = counts(&backend);
    interval(&mut backend, ms, ms, Ring::User);
    for (at, (what, expected)) in rows.into_iter().enumerate() {
        let user = counts(&backend)[at] - kernel[at];
        assert_eq!((kernel[at], user), expected, "{what:?}");
    }
}

/// A counter that is given up and programmed anew, here or on another core, counts what one
/// that stays does.
#[test]
fn cycles_are_the_same_in_pieces_and_elsewhere() {
    let clocks = clocks(
        "[event.instructions]\nphases = [{ us = 3, kernel = 700, user = 6100 }, { us = 2, rate = 9 }]\n",
    );
    for (cmask, invert, edge) in [(1, false, false), (3, false, true), (2, true, true)] {
        let request = CountRequest {
            cmask,
            invert,
            edge,
            ..instructions()
        };
        let [mut stays, mut first, mut second] = [(); 3].map(|()| SimBackend::of(&clocks.anew()));
        let pieces = clocks.anew();
        for backend in [&mut first, &mut second] {
            *backend = SimBackend::of(&pieces);
        }
        stays.program(A, &request).expect("a slot");
        stays.start(A);
        let (mut time, mut sum) = (0, 0);
        for turn in 0..40_u64 {
            let ring =
                [Ring::Kernel, Ring::User, Ring::User][usize::try_from(turn % 3).unwrap_or(0)];
            let ticks = 1 + turn * 977;
            interval(&mut stays, time, ticks, ring);
            let here = if turn % 4 < 2 {
                &mut first
            } else {
                &mut second
            };
            here.program(B, &request).expect("a slot");
            here.start(B);
            interval(here, time, ticks, ring);
            sum += count(here, B);
            here.release(B);
            time += ticks;
        }
        assert_eq!(sum, count(&stays, A), "{request}");
        assert!(sum > 0);
    }
}

/// Cycles are counted of when the overflow comes, to the cycle.
#[test]
fn an_overflow_of_cycles_comes_when_it_was_foreseen() {
    let table =
        "[event.instructions]\nphases = [{ us = 30000, rate = 0 }, { us = 1, rate = 5000 }]\n";
    let mut backend = backend(table);
    let request = CountRequest {
        cmask: 2,
        edge: true,
        ..instructions()
    };
    backend.program(A, &request).expect("a slot");
    backend.start(A);
    backend.arm(A, NonZeroU64::new(1));
    let ms = u64::from(KHZ);
    let (mut time, mut looks) = (0, 0);
    let overflowed = loop {
        backend.observe(&Progress::Entered { tsc: Tsc(time) });
        let due = backend.deadline().expect("it is armed");
        interval(&mut backend, time, due.0 - time, Ring::User);
        time = due.0;
        looks += 1;
        if !backend.take_overflows().is_empty() {
            break time;
        }
        assert!(looks < 10 && time <= 31 * ms, "{time}");
    };
    assert_eq!(overflowed, 30 * ms + 1);
    assert_eq!(count(&backend, A), 1);
}

#[test]
fn constraints_come_from_the_table_and_hold() {
    let mut sim = backend(
        "counters = 4\n[event.instructions]\nrate = 1\nslots = [1]\n\
         [event.cycles]\nrate = 1\npaired = true\nexclusive = \"northbridge\"\n\
         [event.branches]\nrate = 1\n",
    );
    let (cycles, branches) = (
        event(EventFamily::Intel, 0x3c, 0),
        event(EventFamily::Intel, 0xc4, 0),
    );
    assert_eq!(sim.capacity(), 4);
    assert_eq!(
        constraint(&sim, &instructions()).slots,
        [B].into_iter().collect()
    );
    let paired = constraint(&sim, &cycles);
    assert!(paired.paired);
    assert_eq!(paired.exclusive, Some("northbridge"));
    assert_eq!(constraint(&sim, &branches).slots, SlotSet::below(4));
    let misplaced = |slot| UnavailableReason::Misplaced {
        backend: "sim",
        slot,
    };
    let mut refused =
        |slot, request: &CountRequest| sim.program(slot, request).err().map(|e| e.reason);
    assert_eq!(refused(A, &instructions()), Some(misplaced(A)));
    assert_eq!(refused(B, &cycles), Some(misplaced(B)), "an odd slot");
    assert_eq!(refused(SlotIndex(2), &cycles), None);
    let odd = SlotIndex(3);
    assert_eq!(
        refused(odd, &branches),
        Some(misplaced(odd)),
        "part of a pair"
    );
    assert_eq!(refused(B, &instructions()), None);
    assert_eq!(
        refused(A, &cycles),
        Some(misplaced(A)),
        "its partner is taken"
    );
    assert_eq!(
        refused(SlotIndex(4), &branches),
        Some(UnavailableReason::NoSuchSlot {
            backend: "sim",
            slot: SlotIndex(4)
        })
    );
}

#[test]
fn the_deadline_is_the_tick_at_which_the_overflow_comes() {
    // One event in 3 microseconds, which is no whole number of ticks.
    let table = "[event.instructions]\nrate = 0.333333";
    let mut late = started(table, &instructions());
    interval(&mut late, 0, 12_345, Ring::User);
    late.arm(A, NonZeroU64::new(10));
    let before = count(&late, A);
    late.observe(&Progress::Entered { tsc: Tsc(50_000) });
    let deadline = late.deadline().expect("an overflow is armed").0;
    for (ticks, events) in [(deadline - 50_000 - 1, 9), (1, 10)] {
        let from = if ticks == 1 { 90_000 } else { 50_000 };
        interval(&mut late, from, ticks, Ring::Kernel);
        assert_eq!(count(&late, A) - before, events);
        assert_eq!(late.take_overflows().contains(A), events == 10);
    }
    assert_eq!(late.deadline(), None);
}

#[test]
fn an_event_that_never_happens_has_no_deadline() {
    let mut idle = started("[event.instructions]\nrate = 0", &instructions());
    idle.arm(A, NonZeroU64::new(1));
    idle.observe(&Progress::Entered { tsc: Tsc(0) });
    assert_eq!(idle.deadline(), None);
}

#[test]
fn rings_with_different_rates_are_sampled() {
    let table = "[event.instructions]\nkernel = 100\nuser = 1000";
    let mut both = started(table, &instructions());
    assert!(both.needs_ring());
    both.observe(&Progress::Entered { tsc: Tsc(7) });
    assert_eq!(
        both.deadline(),
        Some(Tsc(7 + u64::from(KHZ))),
        "a sample is due"
    );
    let ms = u64::from(KHZ);
    both.observe(&Progress::Left {
        tsc: Tsc(7 + ms),
        halted: Ticks(0),
        ring: None,
    });
    assert_eq!(count(&both, A), 100_000, "a vCPU begins in the kernel");
    interval(&mut both, 2 * ms, ms, Ring::User);
    assert_eq!(count(&both, A), 1_100_000);
    both.observe(&Progress::Entered { tsc: Tsc(3 * ms) });
    both.observe(&Progress::Left {
        tsc: Tsc(4 * ms),
        halted: Ticks(0),
        ring: None,
    });
    assert_eq!(count(&both, A), 2_100_000, "it was seen in user code last");
    interval(&mut both, 4 * ms, ms, Ring::Kernel);
    assert_eq!(count(&both, A), 2_200_000);
    // The earliest possible time of an overflow: were it all in user code.
    both.arm(A, NonZeroU64::new(10));
    both.observe(&Progress::Entered { tsc: Tsc(0) });
    assert_eq!(both.deadline(), Some(Tsc(ms / 100_000)));
}

/// The first microsecond counts 1000, all later ones of the period none.
const BURST: &str =
    "[event.instructions]\nphases = [{ us = 1, rate = 1000 }, { us = 999, rate = 0 }]";

#[test]
fn phases_are_in_the_time_of_the_vcpu() {
    let us = u64::from(KHZ) / 1000;
    let mut sim = started(BURST, &instructions());
    interval(&mut sim, 0, us / 2, Ring::User);
    assert_eq!(count(&sim, A), 500);
    // Another vCPU is at its own time 0, and the first one stands still.
    sim.pause(SlotSet::below(1));
    sim.attach(OwnerId(1));
    sim.program(B, &instructions()).expect("in the table");
    sim.start(B);
    interval(&mut sim, 1_000_000, 500 * us, Ring::User);
    assert_eq!((count(&sim, A), count(&sim, B)), (500, 1000));
    // Neither programming nor stopping takes a vCPU back or holds it up.
    sim.program(B, &instructions()).expect("in the table");
    sim.start(B);
    interval(&mut sim, 2_000_000, 500 * us, Ring::User);
    assert_eq!(count(&sim, B), 0);
    sim.stop(B);
    interval(&mut sim, 3_000_000, us / 4, Ring::User);
    sim.start(B);
    interval(&mut sim, 4_000_000, us, Ring::User);
    assert_eq!(count(&sim, B), 750);
    // The first one goes on where it stood.
    sim.pause(SlotSet::below(2));
    sim.attach(OwnerId::default());
    sim.resume(SlotSet::below(1));
    interval(&mut sim, 5_000_000, 501 * us, Ring::User);
    assert_eq!((count(&sim, A), count(&sim, B)), (1000, 750));
}

#[test]
fn a_slot_left_running_goes_on_with_the_vcpu_that_comes() {
    let us = u64::from(KHZ) / 1000;
    let mut sim = started(BURST, &instructions());
    interval(&mut sim, 0, us / 2, Ring::User);
    sim.attach(OwnerId(1));
    interval(&mut sim, 1_000_000, us / 4, Ring::User);
    assert_eq!(count(&sim, A), 750);
}

#[test]
fn a_slot_counts_whole_intervals_only() {
    let mut sim = backend("[event.instructions]\nrate = 1000");
    sim.program(A, &instructions()).expect("in the table");
    let us = u64::from(KHZ) / 1000;
    for (starts, counted) in [(true, 0), (false, 1000)] {
        sim.observe(&Progress::Entered { tsc: Tsc(0) });
        if starts {
            sim.arm(A, NonZeroU64::new(1000));
            sim.start(A);
        }
        sim.observe(&Progress::Left {
            tsc: Tsc(us),
            halted: Ticks(0),
            ring: None,
        });
        assert_eq!(count(&sim, A), counted);
        assert_eq!(sim.take_overflows().contains(A), !starts);
    }
}

#[test]
fn a_machine_begins_anew_with_clocks_of_its_own() {
    let clocks = clocks(BURST);
    let first_us = |clocks: &SimClocks| {
        let mut sim = SimBackend::of(clocks);
        sim.program(A, &instructions()).expect("in the table");
        sim.start(A);
        interval(&mut sim, 0, u64::from(KHZ) / 1000, Ring::User);
        count(&sim, A)
    };
    assert_eq!(first_us(&clocks), 1000);
    assert_eq!(first_us(&clocks), 0, "the same time on another core");
    assert_eq!(first_us(&clocks.anew()), 1000);
}

/// Tables that differ in every respect, with whether the rings are alike.
const TABLES: [(&str, bool); 4] = [
    ("[event.instructions]\nrate = 0.000001", true),
    (
        "[event.instructions]\nrate = 1234.567891\nnoise = 0.9",
        true,
    ),
    (
        "[event.instructions]\nkernel = 3\nuser = 1000000\nnoise = 0.25",
        false,
    ),
    (
        "seed = 9\n[event.instructions]\nphases = [{ us = 3, rate = 7.7 }, \
         { us = 11, kernel = 0, user = 900 }]\nnoise = 0.5",
        false,
    ),
];

proptest! {
    /// Some of the time passes before anybody counts, at one ring or another.
    /// Then one counter stays where it is, and of another one each piece is
    /// counted elsewhere, with other vCPUs in between.
    #[test]
    fn pieces_give_what_the_whole_gives(
        before in proptest::collection::vec((0..1u64 << 24, any::<bool>()), 0..4),
        pieces in proptest::collection::vec(
            (0..1u64 << 34, any::<Option<bool>>(), 0..2usize, 0..3u8, any::<bool>()),
            1..40,
        ),
        rings in 1..4u8,
        table in 0..TABLES.len(),
    ) {
        let (table, alike) = TABLES[table];
        let request = CountRequest { os: rings & 1 != 0, usr: rings & 2 != 0, ..instructions() };
        let ring = |user: bool| if user { Ring::User } else { Ring::Kernel };
        let mut whole = backend(table);
        let shared = clocks(table);
        let mut cores = [SimBackend::of(&shared), SimBackend::of(&shared)];
        for (ticks, user) in before {
            for sim in [&mut whole, &mut cores[0]] {
                interval(sim, 0, ticks, ring(user));
            }
        }
        whole.program(A, &request).expect("in the table");
        whole.start(A);
        prop_assert_eq!(whole.needs_ring(), !(alike && request.os && request.usr));
        let mut counted = 0;
        for (ticks, user, core, slot, other) in pieces {
            let sim = &mut cores[core];
            let slot = SlotIndex(slot);
            sim.program(slot, &request).expect("in the table");
            sim.start(slot);
            for sim in [&mut *sim, &mut whole] {
                sim.observe(&Progress::Entered { tsc: Tsc(3) });
                sim.observe(&Progress::Left { tsc: Tsc(3 + ticks), halted: Ticks(0), ring: user.map(ring) });
            }
            sim.pause([slot].into_iter().collect());
            if other {
                sim.attach(OwnerId(7));
                interval(sim, 0, ticks ^ 0xffff, ring(user == Some(true)));
                sim.attach(OwnerId::default());
            }
            counted += count(sim, slot);
            sim.release(slot);
            prop_assert_eq!(counted, count(&whole, A));
        }
    }

    #[test]
    fn counters_of_one_ring_add_up_to_that_of_both(
        pieces in proptest::collection::vec((0..1u64 << 24, any::<bool>()), 1..40),
        table in 0..TABLES.len(),
    ) {
        let mut sim = backend(TABLES[table].0);
        let slots = [(A, true, true), (B, true, false), (SlotIndex(2), false, true)];
        for (slot, os, usr) in slots {
            let request = CountRequest { os, usr, ..instructions() };
            sim.program(slot, &request).expect("in the table");
            sim.start(slot);
        }
        let mut now = 0;
        for (ticks, kernel) in pieces {
            let ring = if kernel { Ring::Kernel } else { Ring::User };
            interval(&mut sim, now, ticks, ring);
            now += ticks;
        }
        let [both, kernel, user] = slots.map(|(slot, ..)| count(&sim, slot));
        // Each is rounded down once.
        prop_assert!((kernel + user..=kernel + user + 1).contains(&both));
    }

    #[test]
    fn an_overflow_is_told_once_and_in_its_interval(
        after in 1..1u64 << 20,
        pieces in proptest::collection::vec(0..1u64 << 22, 1..40),
        table in 0..TABLES.len(),
    ) {
        let mut sim = started(TABLES[table].0, &instructions());
        sim.arm(A, NonZeroU64::new(after));
        let (mut now, mut told) = (0, 0);
        for ticks in pieces {
            sim.observe(&Progress::Entered { tsc: Tsc(now) });
            let deadline = sim.deadline();
            sim.observe(&Progress::Left { tsc: Tsc(now + ticks), halted: Ticks(0), ring: Some(Ring::User) });
            let overflowed = sim.take_overflows().contains(A);
            if overflowed {
                prop_assert!(deadline.is_some_and(|at| at.0 <= now + ticks));
                prop_assert!(told == 0);
                told += 1;
            }
            prop_assert_eq!(told == 1, count(&sim, A) >= after);
            now += ticks;
        }
    }
}

fn constraint(backend: &impl CounterBackend, request: &CountRequest) -> Constraint {
    backend.plan(request).expect("it counts that").constraint
}
