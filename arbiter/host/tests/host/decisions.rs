//! What is decided in plain cases, one by one.

use std::collections::{BTreeMap, BTreeSet};

use arbiter::{CounterSet, Nanos, PerKind};
use arbiter_host::{
    BootTime, Cause, Change, CpuSet, Demand, Group, GroupId, HeldBefore, HostPolicyError, LeaseId,
    Outcome, Refusal, Scope, Tenant, TenantId, Terms, Waits,
};

use super::fixture::*;

const A: u16 = 0;
const B: u16 = 1;
const KEPT: u16 = 2;

fn open() -> Host {
    Host::new(open_policy())
}

#[test]
fn whole_cpus_do_not_share_and_threads_do() {
    let mut host = open();
    let of = |thread| Terms {
        scope: of_threads(&[thread]),
        ..terms(programmable(2), "0")
    };
    host.granted(A, of(1));
    host.granted(B, of(2));
    // The same thread again would need 4 of 3.
    let more = host.ask(A, of(1));
    assert!(
        matches!(more, Err(Refusal::Held { cpu: 0, .. })),
        "{more:?}"
    );
    host.granted(
        A,
        Terms {
            scope: of_threads(&[1]),
            ..terms(programmable(1), "0")
        },
    );
    let whole = host.ask(B, terms(programmable(1), "0-1"));
    assert!(
        matches!(whole, Err(Refusal::Held { cpu: 0, .. })),
        "{whole:?}"
    );
    host.granted(B, terms(programmable(1), "1"));
}

#[test]
fn only_some_counters_can_count_an_event() {
    let mut host = open();
    let only = |bits| {
        vec![Demand {
            pmu: CORE,
            counters: CounterSet::from_bits(bits),
        }]
    };
    // Two that want one of PMC0 and PMC1, one that can have any.
    host.granted(A, terms(only(0b011), "0"));
    host.granted(A, terms(programmable(1), "0"));
    host.granted(B, terms(only(0b011), "0"));
    let fourth = host.ask(B, terms(only(0b100), "0"));
    assert!(matches!(fourth, Err(Refusal::Held { .. })), "{fourth:?}");
    // Fixed-function counters are another kind.
    host.granted(B, terms(only(1 << 32), "0"));
    let taken = host.ask(B, terms(only(1 << 32), "0"));
    assert!(matches!(taken, Err(Refusal::Held { .. })), "{taken:?}");
}

#[test]
fn a_request_is_served_when_what_it_waits_for_is_free() {
    let mut host = open();
    let held = host.granted(A, terms(programmable(3), "0-1"));
    let elsewhere = host.granted(B, terms(programmable(3), "2-3"));
    let waits = host.waiting(B, terms(programmable(1), "1-2"));
    host.release(A, held);
    assert_eq!(host.holds(waits), Some(0), "CPU 2 is not free");
    host.release(B, elsewhere);
    assert_eq!(host.holds(waits), Some(1));
    assert!(host.changes().iter().any(|change| matches!(
        change,
        Change::Holds { lease, holds: 1, generation: 1, why: Cause::Granted } if *lease == waits
    )));
}

#[test]
fn a_group_is_whole_or_not_at_all_and_others_take_what_there_is() {
    let mut host = open();
    host.granted(A, terms(programmable(1), "0"));
    assert!(host.ask(B, terms(programmable(3), "0")).is_err());
    let fewer = host.ask(
        B,
        Terms {
            at_least: 1,
            ..terms(programmable(3), "0")
        },
    );
    assert!(
        matches!(fewer, Ok(Outcome::Granted { holds: 2, .. })),
        "{fewer:?}"
    );
}

#[test]
fn what_was_short_grows() {
    let mut host = open();
    let held = host.granted(A, terms(programmable(2), "0"));
    let terms = Terms {
        at_least: 1,
        waits: Waits::Always,
        ..terms(programmable(3), "0")
    };
    let short = host.granted(B, terms);
    assert_eq!(host.holds(short), Some(1));
    host.pass(7);
    host.release(A, held);
    assert_eq!(host.holds(short), Some(3));
    let lease = host.arbiter.lease(short).expect("it is there");
    assert_eq!((lease.generation, lease.blind), (2, Nanos(2 * 7 * MS)));
}

#[test]
fn best_effort_leaves_after_notice_and_comes_back() {
    let mut host = open();
    let effort = Terms {
        guaranteed: false,
        waits: Waits::Always,
        ..terms(programmable(3), "0")
    };
    let effort = host.granted(A, effort);
    let firm = host.waiting(B, terms(programmable(1), "0"));
    let announced = host.changes();
    let Some(Change::Announced { lease, departure }) = announced
        .iter()
        .find(|change| matches!(change, Change::Announced { .. }))
    else {
        panic!("nobody was told: {announced:?}")
    };
    assert_eq!(
        (*lease, departure.at, departure.to),
        (effort, at_ms(100), 0)
    );
    assert_eq!(departure.why, Cause::Preempted { by: firm });
    host.pass(99);
    assert_eq!((host.holds(effort), host.holds(firm)), (Some(3), Some(0)));
    host.pass(1);
    assert_eq!((host.holds(effort), host.holds(firm)), (Some(0), Some(1)));
    host.pass(50);
    host.release(B, firm);
    assert_eq!(host.holds(effort), Some(3));
    let blind = host.arbiter.lease(effort).map(|lease| lease.blind);
    assert_eq!(blind, Some(Nanos(3 * 50 * MS)));
}

#[test]
fn only_what_is_needed_is_taken_from_whom_it_matters_least() {
    let mut host = open();
    let lease = |priority, demands| Terms {
        preemptible: true,
        waits: Waits::Always,
        at_least: 1,
        priority,
        ..terms(demands, "0")
    };
    let low = host.granted(A, lease(1, programmable(2)));
    let high = host.granted(A, lease(2, programmable(1)));
    let urgent = host.waiting(
        B,
        Terms {
            priority: 5,
            ..terms(programmable(1), "0")
        },
    );
    host.pass(100);
    assert_eq!(
        (host.holds(low), host.holds(high), host.holds(urgent)),
        (Some(1), Some(1), Some(1))
    );
    // Equal priority takes nothing, and a lease that is not preemptible gives nothing.
    let equal = host.waiting(
        B,
        Terms {
            priority: 1,
            ..terms(programmable(1), "0")
        },
    );
    host.pass(500);
    assert_eq!(host.holds(equal), Some(0));
    assert_eq!(host.holds(low), Some(1));
}

#[test]
fn who_withdraws_spares_the_others() {
    let mut host = open();
    let effort = host.granted(
        A,
        Terms {
            guaranteed: false,
            ..terms(programmable(3), "0")
        },
    );
    let firm = host.waiting(B, terms(programmable(1), "0"));
    host.pass(50);
    host.changes();
    host.release(B, firm);
    let changes = host.changes();
    assert!(
        changes.contains(&Change::Spared { lease: effort }),
        "{changes:?}"
    );
    host.pass(500);
    assert_eq!(host.holds(effort), Some(3));
}

#[test]
fn a_lease_ends_with_its_time_unless_it_is_renewed() {
    let mut host = open();
    let lasting = Terms {
        lasts: Some(Nanos(10 * MS)),
        ..terms(programmable(1), "0")
    };
    let one = host.granted(A, lasting.clone());
    let other = host.granted(A, lasting);
    host.pass(9);
    let until = host
        .arbiter
        .renew(one, Some(1), caller(A), host.now, &mut host.out);
    assert_eq!(until, Ok(Some(at_ms(19))));
    host.pass(9);
    assert_eq!((host.holds(one), host.holds(other)), (Some(1), None));
    host.pass(1);
    assert_eq!(host.holds(one), None);
    let late = host
        .arbiter
        .renew(one, None, caller(A), host.now, &mut host.out);
    assert_eq!(late, Err(Refusal::NoSuchLease));
}

#[test]
fn who_has_waited_for_long_is_passed_no_more_and_stops_renewals() {
    let mut host = open();
    let lasting = Terms {
        preemptible: true,
        lasts: Some(Nanos(3000 * MS)),
        ..terms(programmable(2), "0")
    };
    let held = host.granted(A, lasting);
    let group = host.waiting(B, terms(programmable(3), "0"));
    let passes = host.granted(
        A,
        Terms {
            lasts: Some(Nanos(500 * MS)),
            ..terms(programmable(1), "0")
        },
    );
    assert!(
        host.arbiter
            .renew(held, None, caller(A), host.now, &mut host.out)
            .is_ok()
    );
    host.pass(1000);
    assert_eq!(host.holds(passes), None);
    let behind = host.ask(A, terms(programmable(1), "0"));
    assert_eq!(behind, Err(Refusal::Behind { lease: group }));
    // Elsewhere nobody waits.
    host.granted(A, terms(programmable(1), "1"));
    let wanted = host
        .arbiter
        .renew(held, None, caller(A), host.now, &mut host.out);
    assert_eq!(wanted, Err(Refusal::Wanted { by: group }));
    host.pass(2000);
    assert_eq!((host.holds(held), host.holds(group)), (None, Some(3)));
}

#[test]
fn who_waits_for_what_never_comes_keeps_nobody() {
    let mut host = open();
    // Nobody can take this, and it has no end.
    host.granted(A, terms(programmable(1), "0"));
    let never = host.waiting(B, terms(programmable(3), "0"));
    host.pass(5000);
    host.granted(A, terms(programmable(2), "0"));
    assert_eq!(host.holds(never), Some(0));
}

#[test]
fn minima_are_kept_and_maxima_are_not_passed() {
    let mut host = Host::new(policy());
    // One programmable counter is for `kept`'s whole CPUs, one for each of its threads.
    host.granted(A, terms(programmable(1), "0"));
    let more = host.ask(B, terms(programmable(1), "0"));
    assert_eq!(
        more,
        Err(Refusal::Kept {
            cpu: 0,
            tenant: TenantId(KEPT)
        })
    );
    host.granted(
        B,
        Terms {
            scope: of_threads(&[7]),
            ..terms(programmable(1), "0")
        },
    );
    host.granted(KEPT, terms(programmable(1), "0"));
    host.granted(
        KEPT,
        Terms {
            scope: of_threads(&[8]),
            ..terms(programmable(1), "0")
        },
    );
    let over = host.ask(
        KEPT,
        Terms {
            scope: of_threads(&[8]),
            ..terms(programmable(1), "0")
        },
    );
    assert_eq!(over, Err(Refusal::OverMaximum { cpu: 0, most: 2 }));
    let far = host.ask(KEPT, terms(programmable(3), "1"));
    assert_eq!(far, Err(Refusal::OverMaximum { cpu: 1, most: 2 }));
}

#[test]
fn a_policy_that_promises_too_much_changes_nothing() {
    let mut host = Host::new(policy());
    let mut greedy = policy();
    greedy.tenants[0].minimum.cpu = PerKind {
        programmable: 2,
        fixed: 0,
    };
    let error = host.arbiter.set_policy(greedy, host.now, &mut host.out);
    let promised = HostPolicyError::MoreThanThereIs {
        kind: "programmable",
        promised: 4,
        there: 3,
        cpu: 0,
    };
    assert_eq!(error, Err(promised));
    assert_eq!(host.arbiter.policy(), &policy());
}

#[test]
fn a_reload_keeps_leases_and_ids() {
    let mut host = Host::new(open_policy());
    let held = host.granted(B, terms(programmable(3), "0"));
    let mut new = policy();
    new.tenants.remove(0);
    new.tenants[1].revokes = [TenantId(0)].into();
    host.arbiter
        .set_policy(new, host.now, &mut host.out)
        .expect("it fits");
    assert_eq!(host.holds(held), Some(3));
    assert_eq!(
        host.ask(A, terms(programmable(1), "1")),
        Err(Refusal::UnknownTenant)
    );
    // `b` was the first of the new list, and is the second of the arbiter's.
    let tenants = &host.arbiter.policy().tenants;
    assert_eq!(tenants[2].revokes, [TenantId(1)].into());
    assert!(tenants[0].retired);
    let at = host
        .arbiter
        .revoke(held, Some(Nanos(0)), caller(KEPT), host.now, &mut host.out);
    assert_eq!(at, Ok(at_ms(0)));
    assert_eq!(host.holds(held), None);
}

#[test]
fn commands_need_the_owner_and_the_generation() {
    let mut host = open();
    let lease = host.granted(A, terms(programmable(1), "0"));
    let foreign = Err(Refusal::Foreign { tenant: "a".into() });
    let stale = Err(Refusal::WrongGeneration { now: 1 });
    let arbiter = &mut host.arbiter;
    let (now, out) = (host.now, &mut host.out);
    assert_eq!(
        arbiter.release(lease, 0, None, caller(B), now, out),
        foreign
    );
    assert_eq!(
        arbiter.release(lease, 0, Some(7), caller(A), now, out),
        stale
    );
    assert_eq!(
        arbiter.revoke(lease, None, caller(B), now, out).err(),
        foreign.clone().err()
    );
    assert_eq!(arbiter.claim(lease, Some(1), caller(B), now, out), foreign);
    let operator = arbiter_host::Caller {
        operator: true,
        ..caller(B)
    };
    assert_eq!(
        arbiter.release(lease, 0, Some(1), operator, now, out),
        Ok(())
    );
    assert_eq!(
        arbiter.release(lease, 0, None, caller(A), now, out),
        Err(Refusal::NoSuchLease)
    );
}

#[test]
fn giving_back_a_part_makes_room_and_is_not_waited_for() {
    let mut host = open();
    let terms_of = Terms {
        at_least: 1,
        waits: Waits::Always,
        ..terms(programmable(3), "0")
    };
    let lease = host.granted(A, terms_of);
    let waits = host.waiting(B, terms(programmable(2), "0"));
    let (now, out) = (host.now, &mut host.out);
    host.arbiter
        .release(lease, 1, Some(1), caller(A), now, out)
        .expect("it is its own");
    assert_eq!((host.holds(lease), host.holds(waits)), (Some(1), Some(2)));
    host.release(B, waits);
    assert_eq!(host.holds(lease), Some(1));
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let mut host = Host::new(policy());
    let demand = |pmu, bits| {
        vec![Demand {
            pmu,
            counters: CounterSet::from_bits(bits),
        }]
    };
    let cases = [
        (terms(Vec::new(), "0"), Refusal::WrongNumber { most: 128 }),
        (
            terms(programmable(129), "0"),
            Refusal::WrongNumber { most: 128 },
        ),
        (terms(programmable(1), ""), Refusal::NoCpus),
        (
            terms(programmable(1), "3-4"),
            Refusal::NoSuchCpu {
                cpu: 4,
                there: cpus("0-3"),
            },
        ),
        (
            terms(programmable(4), "2-3"),
            Refusal::MoreThanThereIs {
                pmu: CORE,
                cpu: 2,
                asked: 4,
                there: 3,
            },
        ),
        (
            terms(demand(CORE, 0b1000), "0"),
            Refusal::NoSuchCounters {
                pmu: CORE,
                counters: CounterSet::from_bits(8),
            },
        ),
        (
            terms(demand(CORE, 1 | 1 << 32), "0"),
            Refusal::NoSuchCounters {
                pmu: CORE,
                counters: CounterSet::from_bits(1 | 1 << 32),
            },
        ),
        (
            terms(demand(arbiter_host::PmuId(2), 1), "0"),
            Refusal::NoSuchCounters {
                pmu: arbiter_host::PmuId(2),
                counters: CounterSet::from_bits(1),
            },
        ),
        (
            Terms {
                scope: of_threads(&[1]),
                ..terms(demand(UNCORE, 1), "0")
            },
            Refusal::NotForThreads { pmu: UNCORE },
        ),
        (
            Terms {
                scope: Scope::Thread(vec![]),
                ..terms(programmable(1), "0")
            },
            Refusal::NoThreads,
        ),
        (
            Terms {
                priority: 10,
                ..terms(programmable(1), "0")
            },
            Refusal::Priority { most: 9 },
        ),
    ];
    for (terms, refusal) in cases {
        assert_eq!(host.ask(A, terms.clone()), Err(refusal), "{terms:?}");
    }
    assert_eq!(host.arbiter.leases().count(), 0);
    assert_eq!(
        host.ask(9, terms(programmable(1), "0")),
        Err(Refusal::UnknownTenant)
    );
}

#[test]
fn a_tenants_rules_bind_it() {
    let mut policy = open_policy();
    let tenant = &mut policy.tenants[0];
    tenant.cpus = Some(cpus("0-1"));
    tenant.keeps = false;
    tenant.longest = Some(Nanos(5));
    tenant.most_leases = 1;
    let mut host = Host::new(policy.clone());
    let good = Terms {
        preemptible: true,
        lasts: Some(Nanos(5)),
        ..terms(programmable(1), "0")
    };
    let cases = [
        (
            Terms {
                preemptible: false,
                ..good.clone()
            },
            Refusal::MustBePreemptible,
        ),
        (
            Terms {
                lasts: None,
                ..good.clone()
            },
            Refusal::TooLong { most: Nanos(5) },
        ),
        (
            Terms {
                lasts: Some(Nanos(6)),
                ..good.clone()
            },
            Refusal::TooLong { most: Nanos(5) },
        ),
        (
            Terms {
                cpus: cpus("1-2"),
                ..good.clone()
            },
            Refusal::CpuNotAllowed {
                cpu: 2,
                allowed: cpus("0-1"),
            },
        ),
    ];
    for (terms, refusal) in cases {
        assert_eq!(host.ask(A, terms.clone()), Err(refusal), "{terms:?}");
    }
    host.granted(A, good.clone());
    assert_eq!(
        host.ask(A, good.clone()),
        Err(Refusal::TooManyLeases { most: 1 })
    );
    policy.tenants[0].guaranteed = false;
    policy.tenants[0].whole_cpus = false;
    policy.tenants[0].most_leases = 2;
    host.arbiter
        .set_policy(policy, host.now, &mut host.out)
        .expect("it fits");
    assert_eq!(host.ask(A, good.clone()), Err(Refusal::NoGuarantees));
    let effort = Terms {
        guaranteed: false,
        ..good
    };
    assert_eq!(host.ask(A, effort), Err(Refusal::NoWholeCpus));
}

#[test]
fn an_uncore_counter_is_one_for_its_package() {
    let mut host = open();
    let uncore = |count| {
        vec![
            Demand {
                pmu: UNCORE,
                counters: CounterSet::first(2, 0)
            };
            count
        ]
    };
    host.granted(A, terms(uncore(1), "0"));
    host.granted(A, terms(uncore(1), "1,2"));
    let third = host.ask(B, terms(uncore(1), "0"));
    assert!(
        matches!(third, Err(Refusal::Held { cpu: 0, .. })),
        "{third:?}"
    );
    host.granted(B, terms(uncore(1), "3"));
}

#[test]
fn outsiders_break_the_lowest_rank_and_are_found_gone() {
    let mut host = open();
    let effort = host.granted(
        A,
        Terms {
            guaranteed: false,
            ..terms(programmable(1), "0")
        },
    );
    let firm = host.granted(B, terms(programmable(2), "0"));
    host.changes();
    let place = host.arbiter.place(CORE, 0).expect("CPU 0");
    let any = CounterSet::first(3, 0);
    let now = host.now;
    host.arbiter
        .set_outside(place, vec![any], now, &mut host.out);
    assert_eq!(host.changes(), [Change::Broken { lease: effort }]);
    host.pass(5);
    let now = host.now;
    host.arbiter
        .set_outside(place, vec![any, any], now, &mut host.out);
    assert_eq!(host.changes(), [Change::Broken { lease: firm }]);
    let refused = host.ask(A, terms(programmable(1), "0"));
    assert!(matches!(refused, Err(Refusal::Held { .. })), "{refused:?}");
    host.pass(5);
    let now = host.now;
    host.arbiter.set_outside(place, vec![], now, &mut host.out);
    let mended = |lease, ms| Change::Mended {
        lease,
        lasted: Nanos(ms * MS),
    };
    assert_eq!(host.changes(), [mended(effort, 10), mended(firm, 5)]);
    let blind = host.arbiter.lease(firm).map(|lease| lease.blind);
    assert_eq!(blind, Some(Nanos(2 * 5 * MS)));
    let place = host.arbiter.place(CORE, 3).expect("CPU 3");
    host.arbiter
        .set_outside(place, vec![any; 3], now, &mut host.out);
    let refused = host.ask(A, terms(programmable(1), "3"));
    assert_eq!(
        refused,
        Err(Refusal::Outside {
            cpu: 3,
            counters: 3
        })
    );
}

#[test]
fn holders_of_before_a_restart_come_back_or_lose_it() {
    let mut host = open();
    let one = host.granted(A, terms(programmable(2), "0"));
    let other = host.granted(B, terms(programmable(1), "0"));
    let leases: Vec<_> = host.arbiter.leases().cloned().collect();
    let mut after = open();
    after.now = at_ms(1000);
    let before = HeldBefore {
        leases,
        next: host.arbiter.next_id(),
        ..HeldBefore::default()
    };
    let window = Nanos(50 * MS);
    after
        .arbiter
        .restore(before, window, at_ms(1000), &mut after.out);
    assert!(matches!(
        after.ask(A, terms(programmable(1), "0")),
        Err(Refusal::Held { .. })
    ));
    after.pass(49);
    let (now, out) = (after.now, &mut after.out);
    after
        .arbiter
        .claim(one, Some(1), caller(A), now, out)
        .expect("it is its own");
    after.pass(1);
    assert_eq!((after.holds(one), after.holds(other)), (Some(2), None));
    let new = after.granted(B, terms(programmable(1), "0"));
    assert!(new > other, "an id is never given twice");
}

#[test]
fn a_cpu_that_goes_away_gets_no_new_lease() {
    let mut host = open();
    let held = host.granted(A, terms(programmable(1), "2-3"));
    host.arbiter
        .set_online(cpus("0-2"), host.now, &mut host.out);
    assert_eq!(host.holds(held), Some(1));
    let refused = host.ask(A, terms(programmable(1), "3"));
    assert_eq!(
        refused,
        Err(Refusal::NoSuchCpu {
            cpu: 3,
            there: cpus("0-2")
        })
    );
    host.arbiter.set_online(
        "0-3".parse::<CpuSet>().expect("a list"),
        host.now,
        &mut host.out,
    );
    host.granted(A, terms(programmable(1), "3"));
}

#[test]
fn leases_are_told_of_cpus_that_go_and_come() {
    let mut host = open();
    let held = host.granted(A, terms(programmable(3), "2-3"));
    let elsewhere = host.granted(A, terms(programmable(3), "0-1"));
    let waits = host.waiting(B, terms(programmable(1), "1-2"));
    host.changes();
    let now = host.now;
    host.arbiter.set_online(cpus("0-1"), now, &mut host.out);
    let gone = |lease, list| Change::CpusGone {
        lease,
        cpus: cpus(list),
    };
    assert_eq!(host.changes(), [gone(held, "2-3"), gone(waits, "2")]);
    // What is free is not given where a CPU is away, and is not kept for it either.
    host.release(A, elsewhere);
    host.release(A, held);
    host.pass(2000);
    assert_eq!(host.holds(waits), Some(0));
    let other = host.granted(A, terms(programmable(3), "0-1"));
    host.release(A, other);
    host.changes();
    let now = host.now;
    host.arbiter.set_online(cpus("0-3"), now, &mut host.out);
    assert!(host.changes().contains(&Change::CpusBack {
        lease: waits,
        cpus: cpus("2")
    }));
    assert_eq!(host.holds(waits), Some(1));
}

#[test]
fn some_give_way_to_some_tenants_only() {
    let mut policy = open_policy();
    policy.tenants[0].gives_way_to = Some([TenantId(1)].into_iter().collect());
    policy.tenants.push(Tenant::open("c"));
    let mut host = Host::new(policy.clone());
    let effort = Terms {
        guaranteed: false,
        waits: Waits::Always,
        ..terms(programmable(3), "0")
    };
    let effort = host.granted(A, effort);
    let waits = host.waiting(2, terms(programmable(1), "0"));
    host.pass(5000);
    assert_eq!((host.holds(effort), host.holds(waits)), (Some(3), Some(0)));
    let taker = host.waiting(B, terms(programmable(1), "0"));
    host.pass(100);
    assert_eq!((host.holds(effort), host.holds(taker)), (Some(0), Some(1)));
    // A reload that moves the tenants keeps who gives way to whom.
    policy.tenants.rotate_left(1);
    policy.tenants[2].gives_way_to = Some([TenantId(0)].into_iter().collect());
    let (now, out) = (host.now, &mut host.out);
    host.arbiter.set_policy(policy, now, out).expect("it fits");
    let only = host.arbiter.policy().tenants[0].gives_way_to.clone();
    assert_eq!(only, Some([TenantId(1)].into_iter().collect()));
}

/// What one tenant has had of it is not the next one's, whatever that one's rank is.
#[test]
fn what_gave_way_to_one_tenant_comes_back_before_others_are_served() {
    let mut policy = open_policy();
    policy.tenants[0].gives_way_to = Some([TenantId(1)].into_iter().collect());
    policy.tenants.push(Tenant::open("c"));
    let mut host = Host::new(policy);
    host.granted(B, terms(programmable(2), "0"));
    let effort = Terms {
        guaranteed: false,
        waits: Waits::Always,
        ..terms(programmable(1), "0")
    };
    let effort = host.granted(A, effort);
    let taker = host.waiting(B, terms(programmable(1), "0"));
    host.pass(100);
    assert_eq!((host.holds(effort), host.holds(taker)), (Some(0), Some(1)));
    let other = host.waiting(2, terms(programmable(1), "0"));
    host.release(B, taker);
    assert_eq!((host.holds(effort), host.holds(other)), (Some(1), Some(0)));
}

/// A host whose tenant `a` gives way to `b` only, and others, of `c`, wait after it; and
/// terms of best effort that wait.
fn choosy(grace: u64) -> (Host, impl Fn(usize) -> Terms) {
    let mut policy = open_policy();
    policy.grace = Nanos(grace * MS);
    policy.tenants[0].gives_way_to = Some([TenantId(1)].into_iter().collect());
    policy.tenants.push(Tenant {
        priority: 9,
        ..Tenant::open("c")
    });
    let effort = |count| Terms {
        guaranteed: false,
        waits: Waits::Always,
        ..terms(programmable(count), "0")
    };
    (Host::new(policy), effort)
}

/// What a tenant has taken of a lease that gives way to it alone is not to be had by
/// others from that tenant: they would get it after that lease, and without a grace be given
/// it and lose it for ever.
#[test]
fn nobody_takes_from_those_that_would_be_served_before_it() {
    for grace in [0, 100] {
        for (waits, patience) in [(Waits::Always, 0), (Waits::No, 0), (Waits::Always, 5000)] {
            let (mut host, effort) = choosy(grace);
            let stays = host.granted(B, terms(programmable(2), "0"));
            let watchdog = host.granted(A, effort(1));
            let taker = Terms {
                preemptible: true,
                lasts: Some(Nanos(10_000 * MS)),
                waits: Waits::Always,
                ..terms(programmable(1), "0")
            };
            let taker = host.waiting(B, taker);
            host.pass(grace);
            let held = |host: &Host| [watchdog, taker].map(|lease| host.holds(lease));
            assert_eq!(held(&host), [Some(0), Some(1)]);
            host.changes();
            let other = Terms {
                priority: 9,
                waits,
                ..terms(programmable(1), "0")
            };
            // It is told who holds them.
            let by = vec![stays, taker];
            let why = Refusal::Held { cpu: 0, by };
            match host.ask(2, other) {
                Ok(Outcome::Waits { why: told, .. }) => assert_eq!(told, why),
                told => assert_eq!(told, Err(why)),
            }
            host.pass(patience);
            host.pass(grace);
            assert_eq!(held(&host), [Some(0), Some(1)]);
            // Nor is it kept from being renewed.
            let now = host.now;
            let renewed = host
                .arbiter
                .renew(taker, None, caller(B), now, &mut host.out);
            assert!(renewed.is_ok(), "{renewed:?}");
            let told = |change: &Change| change.lease() == watchdog;
            assert!(!host.changes().iter().any(told));
            host.release(B, taker);
            assert_eq!(host.holds(watchdog), Some(1));
        }
    }
}

/// So it is where the one that gives no way waits for more than it can have, and where it
/// waits for other counters: rank decides again when it waits no more.
#[test]
fn nobody_takes_for_ever_what_comes_back_at_once() {
    let (mut host, effort) = choosy(0);
    host.granted(B, terms(programmable(1), "0"));
    let lower = host.granted(B, effort(1));
    let choosy_one = host.waiting(A, effort(3));
    let taker = host.waiting(2, terms(programmable(2), "0"));
    host.pass(5000);
    let held = |host: &Host| [lower, choosy_one, taker].map(|lease| host.holds(lease));
    assert_eq!(held(&host), [Some(1), Some(0), Some(0)]);
    assert!(host.changes().len() < 10);
    host.release(A, choosy_one);
    host.pass(0);
    assert_eq!(held(&host), [Some(0), None, Some(2)]);

    let (mut host, effort) = choosy(0);
    let only = |bits: &[u64]| {
        let demands = bits.iter().map(|bits| Demand {
            pmu: CORE,
            counters: CounterSet::from_bits(*bits),
        });
        demands.collect::<Vec<_>>()
    };
    host.granted(B, terms(only(&[2]), "1"));
    let lower = host.granted(
        B,
        Terms {
            demands: only(&[1]),
            ..effort(1)
        },
    );
    let other_counter = Terms {
        demands: only(&[2]),
        cpus: cpus("0-1"),
        ..effort(1)
    };
    host.waiting(A, other_counter);
    let taker = host.waiting(2, terms(only(&[1, 2]), "0"));
    host.pass(1);
    assert!(host.changes().len() < 10);
    assert_eq!((host.holds(lower), host.holds(taker)), (Some(1), Some(0)));
}

/// What leases leave for one that waits is not for those behind it that want other counters:
/// beside what is kept for tenants it can be the last one.
#[test]
fn who_wants_another_counter_does_not_pass_one_for_whom_others_leave() {
    let mut policy = policy();
    policy.grace = Nanos(0);
    let mut host = Host::new(policy);
    let only = |bits| {
        vec![Demand {
            pmu: CORE,
            counters: CounterSet::from_bits(bits),
        }]
    };
    let effort = |demands, on| Terms {
        guaranteed: false,
        waits: Waits::Always,
        ..terms(demands, on)
    };
    // Of 3 counters 2 are kept.
    let first = Terms {
        preemptible: true,
        waits: Waits::Always,
        ..terms(programmable(1), "1")
    };
    let first = host.granted(A, first);
    let other = host.waiting(A, effort(only(1), "1"));
    let second = host.granted(A, effort(programmable(1), "0"));
    let taker = Terms {
        priority: 1,
        ..terms(only(2), "0-1")
    };
    let taker = host.waiting(A, taker);
    host.pass(0);
    let holds = [first, other, second, taker].map(|lease| host.holds(lease));
    assert_eq!(holds, [Some(0), Some(0), Some(0), Some(1)]);
    assert!(host.changes().len() < 12);
}

#[test]
fn a_tenant_fills_neither_the_queue_nor_the_sets_of_others() {
    let mut policy = open_policy();
    policy.tenants[0].most_waiting = 1;
    policy.tenants[0].most_sets = 1;
    let mut host = Host::new(policy);
    let all = host.granted(A, terms(programmable(3), "0"));
    let waiting = |tenant| Terms {
        waits: Waits::Always,
        ..terms(programmable(1), if tenant == A { "0" } else { "0-1" })
    };
    host.waiting(A, waiting(A));
    assert_eq!(
        host.ask(A, waiting(A)),
        Err(Refusal::OwnQueueFull { most: 1 })
    );
    host.waiting(B, waiting(B));
    host.release(A, all);
    let named = |counter: u8| {
        let counters = CounterSet::from_bits(1 << counter);
        let demand = Demand {
            pmu: CORE,
            counters,
        };
        terms(vec![demand], "3")
    };
    let first = host.granted(A, named(0));
    let refused = host.ask(A, named(1));
    assert_eq!(refused, Err(Refusal::TooManySets { most: 1 }));
    host.granted(A, terms(programmable(1), "3"));
    host.granted(B, named(1));
    host.release(A, first);
    host.granted(A, named(2));
}

#[test]
fn an_explanation_changes_nothing() {
    let mut host = open();
    let effort = host.granted(
        A,
        Terms {
            guaranteed: false,
            ..terms(programmable(3), "0")
        },
    );
    let terms = Terms {
        waits: Waits::Always,
        ..terms(programmable(1), "0")
    };
    let (outcome, changes) = host.arbiter.explain(owner(B), terms, host.now);
    assert!(
        matches!(outcome, Ok(Outcome::Waits { behind: 0, .. })),
        "{outcome:?}"
    );
    assert!(changes.iter().any(|change| change.lease() == effort));
    host.pass(1000);
    assert_eq!(host.holds(effort), Some(3));
}

#[test]
fn time_over_and_over_does_not_matter() {
    let mut host = open();
    let lasting = Terms {
        lasts: Some(Nanos(10 * MS)),
        ..terms(programmable(3), "0")
    };
    let first = host.granted(A, lasting.clone());
    let second = host.waiting(
        B,
        Terms {
            lasts: Some(Nanos(10 * MS)),
            ..lasting
        },
    );
    // The caller comes late: each ended when it was due, one after the other.
    host.pass(10_000);
    assert_eq!((host.holds(first), host.holds(second)), (None, None));
    host.now = at_ms(1);
    let out = &mut host.out;
    host.arbiter.advance(at_ms(1), out);
    let lease = host.granted(A, terms(programmable(1), "0"));
    let asked = host.arbiter.lease(lease).map(|lease| lease.waits_since);
    assert_eq!(asked, Some(at_ms(10_000)), "time does not run backwards");
}

#[test]
fn a_revocation_comes_whatever_its_holder_gives_back_or_others_leave() {
    let mut host = open();
    let divisible = Terms {
        at_least: 1,
        waits: Waits::Always,
        ..terms(programmable(3), "0")
    };
    let other = host.granted(A, terms(programmable(1), "0"));
    let lease = host.granted(A, divisible);
    assert_eq!(host.holds(lease), Some(2));
    let (now, out) = (host.now, &mut host.out);
    host.arbiter
        .revoke(lease, None, caller(A), now, out)
        .expect("it is its own");
    // It would grow, were it not told to leave.
    host.release(A, other);
    assert_eq!(host.holds(lease), Some(2));
    let (now, out) = (host.now, &mut host.out);
    host.arbiter
        .release(lease, 1, None, caller(A), now, out)
        .expect("it is its own");
    assert_eq!(host.holds(lease), Some(1));
    host.pass(100);
    assert_eq!(host.holds(lease), None);
}

#[test]
fn a_group_is_served_among_a_stream_of_small_leases_that_nobody_can_take() {
    let mut host = open();
    let small = Terms {
        lasts: Some(Nanos(1000 * MS)),
        ..terms(programmable(1), "0")
    };
    host.granted(A, small.clone());
    let group = host.waiting(B, terms(programmable(3), "0"));
    for _ in 0..100 {
        host.pass(100);
        let _ = host.ask(A, small.clone());
    }
    assert_eq!(host.holds(group), Some(3));
}

#[test]
fn a_frozen_arbiter_grants_nothing_and_thaws() {
    let mut host = open();
    let held = host.granted(A, terms(programmable(3), "0"));
    let waits = host.waiting(B, terms(programmable(1), "0"));
    host.arbiter.freeze();
    host.release(A, held);
    assert_eq!(host.holds(waits), Some(0));
    let (now, out) = (host.now, &mut host.out);
    host.arbiter.thaw(now, out);
    assert_eq!(host.holds(waits), Some(1));
}

#[test]
fn who_leaves_in_a_century_leaves_sooner_for_others() {
    let mut host = open();
    let effort = Terms {
        guaranteed: false,
        ..terms(programmable(3), "0")
    };
    let lease = host.granted(A, effort);
    let (now, out) = (host.now, &mut host.out);
    let far = Some(Nanos(1 << 60));
    host.arbiter
        .revoke(lease, far, caller(A), now, out)
        .expect("it is its own");
    let firm = host.waiting(B, terms(programmable(3), "0"));
    host.pass(100);
    assert_eq!((host.holds(lease), host.holds(firm)), (None, Some(3)));
}

#[test]
fn a_user_speaks_for_one_tenant_at_a_time() {
    let mut host = open();
    let lease = host.granted(A, terms(programmable(1), "0"));
    let same_user = arbiter_host::Caller {
        uid: caller(A).uid,
        ..caller(B)
    };
    let foreign = Err(Refusal::Foreign { tenant: "a".into() });
    let (now, out) = (host.now, &mut host.out);
    let released = host.arbiter.release(lease, 0, None, same_user, now, out);
    assert_eq!(released, foreign);
    // A tenant without members is told by its user.
    let mut policy = open_policy();
    policy.tenants.remove(0);
    host.arbiter
        .set_policy(policy, now, &mut host.out)
        .expect("it fits");
    let (now, out) = (host.now, &mut host.out);
    let released = host.arbiter.release(lease, 0, None, same_user, now, out);
    assert_eq!(released, Ok(()));
}

#[test]
fn what_is_taken_back_is_waited_for_again() {
    let mut host = open();
    let held = host.granted(A, terms(programmable(2), "0"));
    let short = Terms {
        at_least: 1,
        waits: Waits::Always,
        ..terms(programmable(3), "0")
    };
    let short = host.granted(B, short);
    host.release(A, held);
    assert_eq!(host.holds(short), Some(3));
    host.arbiter.freeze();
    let (now, out) = (host.now, &mut host.out);
    host.arbiter.take_back(short, 1, now, out);
    assert_eq!(host.holds(short), Some(1));
    let (now, out) = (host.now, &mut host.out);
    host.arbiter.thaw(now, out);
    assert_eq!(host.holds(short), Some(3));
}

#[test]
fn a_lease_is_for_threads_that_live() {
    let mut host = open();
    let of = |threads: &[(u32, u64)]| Terms {
        scope: Scope::Thread(threads.iter().map(|one| thread(one.0, one.1)).collect()),
        ..terms(programmable(3), "0")
    };
    let lease = host.granted(A, of(&[(7, 100), (8, 100)]));
    assert!(host.ask(B, of(&[(7, 100)])).is_err());
    // The number is another's.
    let later = host.granted(B, of(&[(7, 200)]));
    let waits = host.waiting(B, terms(programmable(1), "0"));
    host.changes();

    let end = |host: &mut Host, threads: &[(u32, u64)]| {
        let ended: BTreeSet<_> = threads.iter().map(|one| thread(one.0, one.1)).collect();
        let ended = BTreeMap::from([(lease, ended.clone()), (later, ended)]);
        let (now, out) = (host.now, &mut host.out);
        host.arbiter.threads_ended(&ended, now, out);
        host.changes()
    };
    assert_eq!(end(&mut host, &[(7, 300), (9, 100)]), []);
    let threads = vec![thread(7, 100)];
    assert_eq!(
        end(&mut host, &[(7, 100)]),
        [Change::ThreadsGone { lease, threads }]
    );
    assert_eq!(
        host.arbiter.lease(lease).expect("it holds").terms,
        of(&[(8, 100)])
    );
    // What it held for that thread is free for it, and nobody else's.
    let ended = end(&mut host, &[(8, 100), (7, 200)]);
    let whys: Vec<_> = ended
        .iter()
        .filter_map(|change| match change {
            Change::Ended { lease, why } => Some((lease.id, *why)),
            _ => None,
        })
        .collect();
    assert_eq!(
        whys,
        [(lease, Cause::ThreadsEnded), (later, Cause::ThreadsEnded)]
    );
    assert_eq!(host.holds(waits), Some(1));
}

fn of_the_group(group: u64, count: usize) -> Terms {
    Terms {
        scope: of_group(group),
        ..terms(programmable(count), "0")
    }
}

#[test]
fn control_groups_share_in_time_and_one_below_another_takes_of_it() {
    let mut host = open();
    let job = host.granted(A, of_the_group(1, 2));
    // Another tree, at other times.
    host.granted(B, of_the_group(5, 3));
    assert!(matches!(
        host.ask(B, terms(programmable(1), "0")),
        Err(Refusal::Held { .. })
    ));
    // A step, and one in it: each path has what the job has at most.
    let step = host.granted(B, of_the_group(2, 1));
    let inner = host.granted(B, of_the_group(3, 1));
    host.granted(B, of_the_group(4, 2));
    assert_eq!(
        host.ask(B, of_the_group(3, 1)),
        Err(Refusal::BeyondGroup {
            cpu: 0,
            above: Some(job)
        })
    );
    let on_another = Terms {
        cpus: cpus("1"),
        ..of_the_group(4, 1)
    };
    let above = None;
    assert_eq!(
        host.ask(B, on_another),
        Err(Refusal::BeyondGroup { cpu: 1, above })
    );
    host.release(B, step);
    assert_eq!(host.holds(inner), None, "it was in the step");
    assert_eq!(host.holds(job), Some(2));
}

/// A counter that the group above has none of is not that one's to give.
#[test]
fn a_lease_below_a_group_is_for_counters_of_that_ones() {
    let of = |group, sets: &[u64]| {
        let demands = sets.iter().map(|bits| Demand {
            pmu: CORE,
            counters: CounterSet::from_bits(*bits),
        });
        Terms {
            demands: demands.collect(),
            at_least: 1,
            guaranteed: false,
            ..of_the_group(group, 1)
        }
    };
    let mut host = open();
    let job = host.granted(A, of(1, &[1, 2]));
    let beyond = |above| {
        let above = Some(above);
        Err(Refusal::BeyondGroup { cpu: 0, above })
    };
    assert_eq!(host.ask(A, of(2, &[4])), beyond(job));
    // Any of the three may be one of these two.
    host.granted(A, of(4, &[7]));
    let step = host.granted(A, of(2, &[2, 4]));
    assert_eq!(host.holds(step), Some(1));
    assert_eq!(host.ask(A, of(3, &[1])), beyond(step));
    let inner = host.granted(A, of(3, &[7]));
    // With the counter that they were taken out of they end.
    let (now, out) = (host.now, &mut host.out);
    let released = host.arbiter.release(job, 1, None, caller(A), now, out);
    assert!(released.is_ok(), "{released:?}");
    assert_eq!((host.holds(step), host.holds(inner)), (None, None));
}

#[test]
fn a_group_above_leased_ones_comes_too_late() {
    let mut host = open();
    let by = vec![host.granted(A, of_the_group(3, 1))];
    assert_eq!(
        host.ask(A, of_the_group(1, 3)),
        Err(Refusal::GroupsBelow { by })
    );
}

#[test]
fn leases_below_a_group_are_told_and_end_with_it() {
    let mut host = open();
    let best_effort = Terms {
        guaranteed: false,
        waits: Waits::Always,
        ..of_the_group(1, 3)
    };
    let job = host.granted(A, best_effort);
    let below = [(2, 2), (3, 1), (4, 3)];
    let below = below.map(|(id, count)| {
        host.granted(
            B,
            Terms {
                guaranteed: false,
                ..of_the_group(id, count)
            },
        )
    });
    host.changes();
    let all = host.waiting(B, terms(programmable(3), "0"));
    let changes = host.changes();
    let told = changes.iter().filter_map(|change| match change {
        Change::Announced { lease, .. } => Some(*lease),
        _ => None,
    });
    let told: BTreeSet<_> = told.collect();
    assert_eq!(told, below.into_iter().chain([job]).collect());
    host.pass(100);
    assert_eq!(host.holds(all), Some(3));
    assert_eq!(host.holds(job), Some(0), "it waits for its turn again");
    assert!(below.iter().all(|gone| host.holds(*gone).is_none()));
    // Nothing is given out of what it waits for.
    assert_eq!(
        host.ask(B, of_the_group(2, 1)),
        Err(Refusal::BeyondGroup {
            cpu: 0,
            above: Some(job)
        })
    );
}

/// One that waits in a group is served once that group has something, whatever its turn.
#[test]
fn a_group_that_is_served_serves_those_below_it() {
    let mut host = open();
    let all = host.granted(B, terms(programmable(3), "0"));
    let job = host.waiting(A, of_the_group(1, 3));
    let step = Terms {
        priority: 1,
        ..of_the_group(2, 2)
    };
    let step = host.waiting(A, step);
    host.release(B, all);
    assert_eq!((host.holds(job), host.holds(step)), (Some(3), Some(2)));
}

fn best_effort(group: u64, count: usize) -> Terms {
    Terms {
        guaranteed: false,
        ..of_the_group(group, count)
    }
}

/// Whom the last changes told that it leaves, and when.
fn told(host: &mut Host) -> BTreeMap<LeaseId, BootTime> {
    let changes = host.changes();
    let told = changes.iter().filter_map(|change| match change {
        Change::Announced { lease, departure } => Some((*lease, departure.at)),
        _ => None,
    });
    told.collect()
}

/// A group in group 1.
fn below(number: u64) -> Terms {
    let group = Group {
        id: GroupId(100 + number),
        above: vec![GroupId(1)],
        path: format!("/1/{number}"),
    };
    Terms {
        scope: Scope::Group(group.into()),
        ..terms(programmable(1), "0")
    }
}

/// Each change looks at what is beside a lease below the group that has one.
#[test]
fn so_many_leases_are_below_a_group_and_no_more() {
    let mut host = open();
    let above = host.granted(A, of_the_group(1, 1));
    let first = host.granted(A, below(0));
    (1..64).for_each(|number| {
        host.granted(A, below(number));
    });
    let most = 64;
    let refused = Err(Refusal::TooManyBelow { above, most });
    assert_eq!(host.ask(A, below(64)), refused);
    assert_eq!(host.ask(A, of_the_group(4, 1)), refused);
    host.release(A, first);
    host.granted(A, below(65));
    // All end with it, and others may come.
    host.release(A, above);
    assert_eq!(host.arbiter.leases().count(), 0);
    host.granted(A, below(66));
}

#[test]
fn who_comes_below_one_that_leaves_is_told_as_well() {
    let mut host = open();
    let job = host.granted(A, of_the_group(1, 2));
    let (by, now, out) = (caller(A), host.now, &mut host.out);
    let at = host
        .arbiter
        .revoke(job, Some(Nanos(60_000 * MS)), by, now, out);
    let at = at.expect("it is its own");
    host.pass(1000);
    host.changes();
    let step = host.granted(B, of_the_group(2, 1));
    assert_eq!(told(&mut host), BTreeMap::from([(step, at)]));
    host.pass(60_000);
    assert_eq!((host.holds(job), host.holds(step)), (None, None));
}

/// What the newest gives up is enough for the others.
#[test]
fn those_below_a_group_that_shrinks_are_told_newest_first() {
    let mut host = open();
    let job = Terms {
        at_least: 1,
        ..best_effort(1, 3)
    };
    let job = host.granted(A, job);
    let step = host.granted(A, best_effort(2, 1));
    let inner = host.granted(A, best_effort(3, 1));
    host.changes();
    let takes = host.waiting(B, terms(programmable(2), "0"));
    let told = told(&mut host).into_keys();
    assert_eq!(told.collect::<Vec<_>>(), [job, inner]);
    host.pass(100);
    assert_eq!(host.holds(takes), Some(2));
    assert_eq!((host.holds(job), host.holds(step)), (Some(1), Some(1)));
    assert_eq!(host.holds(inner), None);
}

fn of_a_part(group: u64, thread: u32, with_others: bool, count: usize) -> Terms {
    Terms {
        scope: of_part(group, &[thread], with_others),
        ..terms(programmable(count), "0")
    }
}

/// Threads in a group share what it has in time, and groups below it with them; what somebody has
/// others run in it is beside all of these.
#[test]
fn parts_of_what_a_group_has_are_taken_out_of_it() {
    let mut host = open();
    let beyond = |above| Err(Refusal::BeyondGroup { cpu: 0, above });
    assert_eq!(host.ask(A, of_a_part(1, 7, true, 1)), beyond(None));
    let job = host.granted(A, of_the_group(1, 3));
    let first = host.granted(A, of_a_part(1, 7, false, 2));
    host.granted(A, of_a_part(1, 8, false, 2));
    host.granted(A, of_the_group(2, 2));
    // One thread has all that it has while it runs.
    assert_eq!(host.ask(A, of_a_part(1, 7, false, 2)), beyond(Some(job)));
    let part = host.granted(A, of_a_part(1, 9, true, 1));
    assert_eq!(host.ask(A, of_a_part(1, 9, true, 1)), beyond(Some(job)));
    assert_eq!(host.ask(A, of_a_part(1, 7, false, 1)), beyond(Some(job)));
    // Nor is there so much for a part of what a group below has, beside that one's.
    assert_eq!(host.ask(A, of_a_part(2, 9, true, 1)), beyond(Some(job)));
    host.release(A, part);
    let inner = host.granted(A, of_a_part(2, 9, true, 1));
    host.release(A, inner);
    host.granted(A, of_a_part(1, 7, false, 1));
    // Nobody else has more in its way than what the group has.
    assert!(host.ask(B, terms(programmable(1), "0")).is_err());
    host.release(A, job);
    assert!(host.holds(first).is_none());
    assert_eq!(host.arbiter.leases().count(), 0);
    host.granted(B, terms(programmable(3), "0"));
}

/// On a CPU where the nearest leased group has nothing, what is above that is not for those in it.
#[test]
fn nothing_is_taken_past_the_nearest_leased_group() {
    let some = |scope, count, on: &str| Terms {
        scope,
        ..terms(programmable(count), on)
    };
    let on = |scope, on| some(scope, 1, on);
    let beyond = |above| Err(Refusal::BeyondGroup { cpu: 1, above });
    for scope in [of_part(2, &[7], true), of_part(2, &[7], false), of_group(3)] {
        let mut host = open();
        host.granted(A, some(of_group(1), 3, "0-1"));
        let near = host.granted(A, on(of_group(2), "0"));
        assert_eq!(host.ask(A, on(scope.clone(), "1")), beyond(None));
        assert_eq!(host.ask(A, on(scope.clone(), "0-1")), beyond(None));
        // It has some there, for a while.
        let more = host.granted(A, on(of_group(2), "1"));
        let below = host.granted(A, on(scope.clone(), "1"));
        host.changes();
        let (by, now, out) = (caller(A), host.now, &mut host.out);
        let grace = Some(Nanos(MS));
        let at = host.arbiter.revoke(more, grace, by, now, out);
        let at = at.expect("it is its own");
        assert_eq!(told(&mut host), BTreeMap::from([(more, at), (below, at)]));
        host.pass(1);
        assert_eq!((host.holds(near), host.holds(below)), (Some(1), None));
    }
}

/// What is left to a group leaves is too little for all: the newest goes.
#[test]
fn the_newest_part_ends_where_its_group_has_less() {
    let mut host = open();
    let job = Terms {
        at_least: 1,
        ..of_the_group(1, 3)
    };
    let job = host.granted(A, job);
    let old = host.granted(A, of_a_part(1, 7, true, 1));
    let new = host.granted(A, of_a_part(1, 8, true, 2));
    let (by, now, out) = (caller(A), host.now, &mut host.out);
    let kept = host.arbiter.release(job, 2, None, by, now, out);
    assert_eq!(kept, Ok(()));
    assert_eq!((host.holds(old), host.holds(new)), (Some(1), None));
}

/// A thread costs as much as a group.
#[test]
fn so_many_threads_have_parts_and_no_more() {
    let mut host = open();
    let above = host.granted(A, of_the_group(1, 1));
    let threads = |from: u32, count: u32| Terms {
        scope: of_part(1, &(from..from + count).collect::<Vec<_>>(), false),
        ..terms(programmable(1), "0")
    };
    host.granted(A, threads(0, 24));
    let refused = Err(Refusal::TooManyThreadsBelow { above, most: 32 });
    assert_eq!(host.ask(A, threads(24, 9)), refused);
    host.granted(A, threads(24, 8));
}

/// Whose group it is may use up what there is below it. Of somebody else, who need not ask for
/// that, others always find something left.
#[test]
fn nobody_uses_up_what_is_below_anothers_group() {
    const C: u16 = 2;
    let mut policy = open_policy();
    policy.tenants.push(Tenant::open("c"));
    let mut crowd = policy.clone();
    let more = ["d", "e", "f", "g", "h", "i"].map(Tenant::open);
    crowd.tenants.extend(more);
    let threads = |count: u32| Terms {
        scope: of_part(1, &(0..count).collect::<Vec<_>>(), false),
        ..terms(programmable(1), "0")
    };
    let mut host = Host::new(policy.clone());
    let above = host.granted(A, of_the_group(1, 3));
    let mut numbers = 0..;
    for (tenant, most) in [(B, 32), (C, 16), (A, 16)] {
        for number in numbers.by_ref().take(most) {
            host.granted(tenant, below(number));
        }
        let refused = Err(Refusal::TooManyBelow { above, most });
        assert_eq!(host.ask(tenant, below(1000)), refused);
    }
    // However many agree, one is left for the owner.
    let mut host = Host::new(crowd);
    let above = host.granted(A, of_the_group(1, 3));
    let mut numbers = 0..;
    for (tenant, most) in (1..=8).zip([32, 16, 8, 4, 2, 1, 0, 0]) {
        for number in numbers.by_ref().take(most) {
            host.granted(tenant, below(number));
        }
        let refused = Err(Refusal::TooManyBelow { above, most });
        assert_eq!(host.ask(tenant, below(1000)), refused);
    }
    host.granted(A, below(1001));
    let mut host = Host::new(policy);
    let above = host.granted(A, of_the_group(1, 3));
    for (tenant, most) in [(B, 16), (C, 8), (A, 8)] {
        let too_many = u32::try_from(most + 1).expect("a few");
        let refused = Err(Refusal::TooManyThreadsBelow { above, most });
        assert_eq!(host.ask(tenant, threads(too_many)), refused);
        host.granted(tenant, threads(too_many - 1));
    }
}
