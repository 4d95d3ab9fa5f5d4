//! Tables, and guests in virtual time that halt, are woken and never stop.

mod world;

use std::time::Duration;

use pmu_virt::{Ticks, Tsc};
use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

use super::{Action, Pace, RunQueue, Runnability};
use crate::kvm::VcpuId;
use world::{Life, Wake, World, life};

/// A TSC of 1 MHz: ticks are microseconds.
const KHZ: u32 = 1000;
const SLICE: u64 = 5000;

fn queue(all: &[Runnability]) -> RunQueue {
    let mut queue = RunQueue::new(Pace::new(Duration::from_micros(SLICE), KHZ));
    for (id, runnability) in (0..).zip(all) {
        queue.admit(Tsc(0), VcpuId(id), *runnability, Ticks(0));
    }
    queue
}

fn run(id: u32, until: impl Into<Option<u64>>) -> Action {
    Action::Run {
        vcpu: VcpuId(id),
        until: until.into().map(Tsc),
    }
}

fn locked_out(until: u64) -> Runnability {
    Runnability::LockedOut { until: Tsc(until) }
}

/// What happens to the vCPU that the queue last named, and when.
enum Then {
    Left(u64, Runnability),
    Probed(u64, Runnability),
}

fn check(all: &[Runnability], story: &[(Action, Then)], last: Action) {
    let mut queue = queue(all);
    let mut now = 0;
    for (step, (expected, then)) in story.iter().enumerate() {
        let action = queue.next(Tsc(now));
        assert_eq!(action, *expected, "step {step}");
        match *then {
            Then::Left(at, runnability) => {
                now = at;
                queue.left(Tsc(now), runnability);
            }
            Then::Probed(at, runnability) => {
                let Action::Probe(id) = action else {
                    panic!("step {step} is no probe");
                };
                now = at;
                queue.probed(Tsc(now), id, runnability);
            }
        }
    }
    assert_eq!(queue.next(Tsc(now)), last);
}

#[test]
fn what_runs_next() {
    use Runnability::{Idle, Runnable};
    use Then::{Left, Probed};
    let look = SLICE / 16;
    let every = SLICE * 4 / 5;
    // Alone it is left alone, halted or not.
    check(&[Runnable], &[(run(0, None), Left(9, Idle))], run(0, None));
    check(&[], &[], Action::Wait { until: None });
    // Looks come at growing distances; the slice's end is the others' turn.
    check(
        &[Runnable, Runnable],
        &[
            (run(0, look), Left(look, Runnable)),
            (run(0, 3 * look), Left(3 * look, Runnable)),
            (run(0, 7 * look), Left(7 * look, Runnable)),
            (run(0, 15 * look), Left(15 * look, Runnable)),
            (run(0, SLICE), Left(SLICE, Runnable)),
            (run(1, SLICE + look), Left(SLICE + look, Idle)),
        ],
        run(0, SLICE + look + every),
    );
    // Who halts leaves the core; who is found awake goes ahead, with its rest.
    check(
        &[Runnable, Runnable],
        &[
            (run(0, look), Left(look, Idle)),
            (run(1, look + every), Left(look + every, Runnable)),
            (Action::Probe(VcpuId(0)), Probed(look + every + 1, Runnable)),
            (run(0, look + every + 1 + look), Left(5000, Idle)),
        ],
        run(1, 5000 + every),
    );
    // One that has just woken without a rest of its slice queues up.
    check(
        &[Runnable, Runnable],
        &[
            (run(0, look), Left(SLICE, Idle)),
            (run(1, SLICE + every), Left(SLICE + every, Runnable)),
            (Action::Probe(VcpuId(0)), Probed(SLICE + every, Runnable)),
        ],
        run(1, SLICE + every + look),
    );
    // Where all are idle, the core waits in the one that halted last.
    check(
        &[Runnable, Runnable],
        &[
            (run(0, look), Left(10, Idle)),
            (run(1, 10 + every), Left(20, Idle)),
            (run(1, 10 + every), Left(10 + every, Idle)),
            (Action::Probe(VcpuId(0)), Probed(10 + every, Idle)),
        ],
        run(1, 10 + 2 * every),
    );
}

#[test]
fn who_is_locked_out_is_left_out_until_its_time() {
    use Runnability::{Idle, Runnable};
    use Then::{Left, Probed};
    let look = SLICE / 16;
    let every = SLICE * 4 / 5;
    // The other one has the core at once, and alone until then.
    check(
        &[Runnable, Runnable],
        &[
            (run(0, look), Left(10, locked_out(9000))),
            (run(1, 9000), Left(9000, Runnable)),
        ],
        run(0, 9000 + look),
    );
    // Alone it leaves the core empty.
    check(
        &[Runnable],
        &[(run(0, None), Left(10, locked_out(9000)))],
        Action::Wait {
            until: Some(Tsc(9000)),
        },
    );
    // It is not asked whether it has been woken, others are.
    check(
        &[Runnable, Runnable],
        &[
            (run(0, look), Left(10, locked_out(9000))),
            (run(1, 9000), Left(20, Idle)),
            (run(1, 9000), Left(9000, Idle)),
            (run(0, 9000 + every), Left(9010, locked_out(99_000))),
            (run(1, 99_000), Left(10_000, locked_out(20_000))),
        ],
        Action::Wait {
            until: Some(Tsc(20_000)),
        },
    );
    // One that a probe finds locked out, and one that comes so.
    check(
        &[Runnable, Idle, locked_out(50_000)],
        &[
            (run(0, every), Left(every, Runnable)),
            (Action::Probe(VcpuId(1)), Probed(every, locked_out(60_000))),
            (run(0, 50_000), Left(50_000, Idle)),
        ],
        run(2, 50_000 + every),
    );
}

#[test]
fn who_is_blocked_is_left_out_until_somebody_frees_it() {
    let mut queue = queue(&[
        Runnability::Runnable,
        Runnability::Blocked,
        Runnability::Runnable,
    ]);
    assert_eq!(queue.next(Tsc(0)), run(0, 312));
    queue.left(Tsc(100), Runnability::Blocked);
    // Nothing but the other one, however long.
    assert_eq!(queue.next(Tsc(100)), run(2, None));
    queue.left(Tsc(1_000_000), Runnability::Runnable);
    queue.unblock(VcpuId(2));
    queue.unblock(VcpuId(0));
    queue.unblock(VcpuId(0));
    assert_eq!(
        queue.runnable(),
        2,
        "who was not blocked is not queued twice"
    );
    queue.remove(VcpuId(2));
    assert_eq!(queue.next(Tsc(1_000_000)), run(0, None));
    queue.left(Tsc(1_000_001), Runnability::Blocked);
    assert_eq!(queue.next(Tsc(1_000_001)), Action::Wait { until: None });
    // A probe that finds it blocked, and a halted one that is.
    queue.unblock(VcpuId(1));
    assert_eq!(queue.next(Tsc(1_000_002)), run(1, None));
    queue.left(Tsc(1_000_003), Runnability::Idle);
    assert_eq!(queue.next(Tsc(1_000_004)), run(1, None));
    queue.left(Tsc(1_000_005), Runnability::Blocked);
    assert_eq!(queue.next(Tsc(1_000_006)), Action::Wait { until: None });
}

#[test]
fn who_is_locked_out_does_not_migrate() {
    let mut queue = queue(&[Runnability::Runnable, Runnability::Runnable]);
    let _ = queue.next(Tsc(0));
    queue.left(Tsc(1), locked_out(u64::MAX));
    let mut now = 1;
    while now < 100 * SLICE {
        let _ = queue.next(Tsc(now));
        now += SLICE;
        queue.left(Tsc(now), Runnability::Runnable);
        assert_eq!(queue.surplus(Tsc(now), |_| true), None);
        assert_eq!(queue.runnable(), 1);
    }
}

#[test]
fn surplus_is_what_has_been_waiting_for_long() {
    let mut queue = queue(&[Runnability::Runnable, Runnability::Runnable]);
    let (mut now, mut given) = (0, None);
    while given.is_none() && now < 100 * SLICE {
        let Action::Run { until, .. } = queue.next(Tsc(now)) else {
            panic!("both are runnable");
        };
        now = until.expect("the other one waits").0;
        queue.left(Tsc(now), Runnability::Runnable);
        assert_eq!(queue.surplus(Tsc(now), |_| false), None);
        given = queue.surplus(Tsc(now), |_| true);
    }
    let settled = Pace::new(Duration::from_micros(SLICE), KHZ).settle.0;
    assert!(now >= settled, "one migrated at {now}");
    let id = given.expect("one waits for ever");
    queue.remove(id);
    let Action::Run { vcpu, until } = queue.next(Tsc(now)) else {
        panic!("one is left");
    };
    assert_ne!(vcpu, id);
    assert_eq!(until, None);
}

proptest! {
    /// Whatever the vCPUs do: nobody waits longer than a slice for each other
    /// one, no wake-up is lost or found late, and probes have their bound.
    #[test]
    fn every_vcpu_gets_its_turn(
        lives in proptest::collection::vec(life(), 2..12),
        probe_cost in 1..200u64,
    ) {
        const END: u64 = 400 * SLICE;
        let pace = Pace::new(Duration::from_micros(SLICE), KHZ);
        let mut world = World::new(&lives, probe_cost);
        while world.now < END {
            world.step(END)?;
        }
        let members = lives.len() as u64;
        let round = members * probe_cost;
        // Rounds of probes come on top, and the rest of a slice too short to use.
        let bound = members * (SLICE + pace.shortest.0) * 9 / 8 + 2 * round;
        prop_assert!(world.waited <= bound, "{} > {bound}", world.waited);
        let quiet = 2 * round + pace.quiet(Ticks(round)).0;
        // A round may have to wait for another one and the quiet after it.
        let seen = pace.probe_every.0 + quiet;
        prop_assert!(world.unnoticed <= seen, "{} > {seen}", world.unnoticed);
        prop_assert!(world.overslept <= quiet, "{} > {quiet}", world.overslept);
        prop_assert!(!world.asked_barred);
        let share = world.now * round / (round + pace.quiet(Ticks(round)).0) + round;
        prop_assert!(world.probing <= share, "{} > {share}", world.probing);
    }

    /// Spinning vCPUs share the core evenly.
    #[test]
    fn equals_get_equal_time(count in 2..10usize) {
        const END: u64 = 400 * SLICE;
        let spin = Life { runs: u64::MAX, sleeps: 1, wake: Wake::Interrupt };
        let mut world = World::new(&vec![spin; count], 1);
        while world.now < END {
            world.step(END)?;
        }
        let ran: Vec<u64> = world.guests.values().map(|guest| guest.ran).collect();
        let (least, most) = (ran.iter().min(), ran.iter().max());
        prop_assert!(most.zip(least).is_some_and(|(most, least)| most - least <= SLICE), "{:?}", ran);
        prop_assert_eq!(world.probing, 0);
    }
}

/// Whatever guessers do, a busy vCPU has the core while they are locked out: what they
/// get is their runs.
#[test]
fn guessers_cost_a_busy_one_their_runs_and_nothing_else() {
    const END: u64 = 1000 * SLICE;
    let guesser = Life {
        runs: 50,
        sleeps: 10_000,
        wake: Wake::Penalty,
    };
    let busy = Life {
        runs: u64::MAX,
        sleeps: 1,
        wake: Wake::Interrupt,
    };
    let lives: Vec<Life> = std::iter::once(busy).chain([guesser; 3]).collect();
    let mut world = World::new(&lives, 10);
    while world.now < END {
        world.step(END).unwrap();
    }
    let ran = world.guests[&VcpuId(0)].ran;
    let theirs: u64 = (1..4).map(|id| world.guests[&VcpuId(id)].ran).sum();
    assert!(ran * 100 > world.now * 98, "{ran} of {}", world.now);
    assert_eq!(ran + theirs, world.now);
    assert_eq!(world.probing, 0);
}

/// What fifteen idle vCPUs cost a busy one: probes, and nothing else.
#[test]
fn idle_vcpus_cost_a_busy_one_less_than_a_twentieth() {
    const END: u64 = 1000 * SLICE;
    let idle = Life {
        runs: 10,
        sleeps: u64::MAX / 2,
        wake: Wake::Interrupt,
    };
    let busy = Life {
        runs: u64::MAX,
        ..idle
    };
    let lives: Vec<Life> = std::iter::once(busy).chain([idle; 15]).collect();
    // A probe of 10 us is what slow hosts need.
    let mut world = World::new(&lives, 10);
    while world.now < END {
        world.step(END).unwrap();
    }
    let ran = world.guests[&VcpuId(0)].ran;
    assert!(ran * 100 > world.now * 95, "{ran} of {}", world.now);
}
