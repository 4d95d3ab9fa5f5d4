//! What the administrator of the host does to reservations while the guest runs.

use crate::harness::{FW, HV, Harness, KERNEL, bits, config, plain, pmc, set, share};
use arbiter::{
    AdminAct, AdminError, Event, Layer, Notice, NoticeKind, Outcome, PcrConfig, PcrRegister,
    PerKind, Policy, PolicyError, Reason, Scheme, Share, Tsc, Wanted,
};

const ADMIN: Reason = Reason::Administrator;

fn under(scheme: Scheme) -> Harness {
    let mut harness = Harness::new(scheme, 4, plain());
    harness.end_phase();
    harness.events();
    harness
}

fn act(harness: &mut Harness, act: AdminAct) -> Result<(), AdminError> {
    let effects = harness.cx(|unit, cx| unit.administer(act, cx))?;
    harness.note(effects);
    Ok(())
}

fn notice(harness: &mut Harness, layer: Layer) -> Option<Notice> {
    harness.unit.next_notice(layer, Tsc(harness.now))
}

fn revoke(harness: &mut Harness, n: u8, grace_ms: u32) -> Result<(), AdminError> {
    let counter = pmc(n);
    act(harness, AdminAct::Revoke { counter, grace_ms })
}

fn bar(harness: &mut Harness, layer: Layer, barred: bool) {
    act(harness, AdminAct::Bar { layer, barred }).unwrap();
}

#[test]
fn a_counter_is_revoked_at_once_whatever_its_holder_may_keep() {
    for scheme in Scheme::ALL {
        let policy = Policy {
            kernel: share(2, 4, 9),
            ..plain()
        };
        let mut harness = Harness::new(scheme, 4, policy);
        harness.end_phase();
        harness.any(KERNEL, 2);
        harness.events();
        harness.cleared = set([]);
        revoke(&mut harness, 3, 0).unwrap();
        assert_eq!(
            harness.events(),
            [(KERNEL, Some(pmc(3)), Event::Revoked(ADMIN))]
        );
        assert_eq!(harness.cleared, set([3]), "nothing of it is left");
        assert_eq!(harness.held(KERNEL), set([2]));
        let notice = notice(&mut harness, KERNEL).unwrap();
        assert_eq!(
            (notice.kind, notice.counter, notice.layer, notice.reason),
            (NoticeKind::Revoked, Some(pmc(3)), HV, Some(ADMIN))
        );
        // Nobody keeps the layer from reserving it again.
        assert_eq!(harness.this(KERNEL, 3).outcome, Outcome::Granted(set([3])));
        assert_eq!(
            revoke(&mut harness, 0, 0),
            Err(AdminError::Unreserved(pmc(0)))
        );
        assert_eq!(
            revoke(&mut harness, 4, 0),
            Err(AdminError::NoCounter(pmc(4)))
        );
    }
}

#[test]
fn a_holder_is_told_before_and_nothing_saves_its_counter() {
    let mut harness = under(Scheme::Interacting);
    harness.any(KERNEL, 1);
    harness.events();
    revoke(&mut harness, 3, 50).unwrap();
    let announced = Event::Revoking {
        wanted_by: HV,
        reason: ADMIN,
        in_ms: 50,
    };
    assert_eq!(harness.events(), [(KERNEL, Some(pmc(3)), announced)]);
    harness.now += 20;
    let notice = notice(&mut harness, KERNEL).unwrap();
    assert_eq!((notice.kind, notice.rest_ms), (NoticeKind::Revoking, 30));
    let status = harness.read(KERNEL, PcrRegister::Status(pmc(3))).unwrap();
    assert_ne!(status & arbiter::abi::STATUS_REVOKING, 0);
    assert_eq!(status >> arbiter::abi::STATUS_REST_SHIFT, 30);
    // A renewal does not help, and a second announcement gives no more time.
    harness.this(KERNEL, 3);
    revoke(&mut harness, 3, 500).unwrap();
    harness.at(50);
    assert!(harness.held(KERNEL).is_empty());
    assert!(
        harness
            .events()
            .contains(&(KERNEL, Some(pmc(3)), Event::Revoked(ADMIN)))
    );
    assert_eq!(harness.unit.deadline(), None);
    // What the hypervisor holds can be revoked with notice as well.
    harness.any(HV, 1);
    revoke(&mut harness, 3, 50).unwrap();
    harness.at(100);
    assert!(harness.held(HV).is_empty());
}

#[test]
fn who_waits_for_a_counter_gets_one_that_is_revoked() {
    let mut harness = under(Scheme::Interacting);
    harness.any(HV, 4);
    // It has the higher priority, so the others are asked first.
    assert_eq!(harness.any(KERNEL, 1).outcome, Outcome::Pending);
    revoke(&mut harness, 0, 0).unwrap();
    assert_eq!(
        harness.unit.answer(KERNEL).outcome,
        Outcome::Granted(set([0]))
    );
    assert_eq!(harness.held(HV), set([1, 2, 3]));
}

#[test]
fn a_request_loses_all_that_it_has_gathered_with_the_counter_that_is_revoked() {
    let mut harness = under(Scheme::Interacting);
    harness.any(HV, 3);
    assert_eq!(harness.any(KERNEL, 2).outcome, Outcome::Pending);
    assert_eq!(harness.held(KERNEL), set([0]));
    revoke(&mut harness, 0, 1000).unwrap();
    assert_eq!(harness.unit.answer(KERNEL).outcome, Outcome::Refused(ADMIN));
    assert!(harness.held(KERNEL).is_empty());
}

#[test]
fn a_barred_layer_keeps_what_it_has_and_gets_nothing_more() {
    for scheme in Scheme::ALL {
        let mut harness = under(scheme);
        harness.any(KERNEL, 1);
        harness.events();
        bar(&mut harness, KERNEL, true);
        assert_eq!(harness.events(), [(HV, None, Event::LayerBarred(KERNEL))]);
        assert!(harness.unit.is_barred(KERNEL) && !harness.unit.is_barred(FW));
        for wanted in [Wanted::Any(1), Wanted::This(pmc(0))] {
            let answer = harness.reserve(KERNEL, wanted, None);
            assert_eq!(answer.outcome, Outcome::Refused(ADMIN), "{scheme}");
        }
        if scheme != Scheme::SingleMaster {
            assert!(!harness.write(KERNEL, PcrRegister::ManagementKey(pmc(0)), 5, 0));
            assert_eq!(
                harness.read(KERNEL, PcrRegister::Refusal),
                Some(ADMIN.code())
            );
        }
        // It renews, sets and gives back what it holds.
        assert_eq!(harness.this(KERNEL, 3).outcome, Outcome::Granted(set([3])));
        let drop_value = PcrRegister::DropValue(pmc(3));
        assert!(harness.write(KERNEL, drop_value, 7, bits(KERNEL)));
        assert_eq!(harness.any(HV, 1).outcome, Outcome::Granted(set([2])));
        harness.release(KERNEL, 3);
        assert!(harness.held(KERNEL).is_empty());
        bar(&mut harness, KERNEL, false);
        assert_eq!(harness.any(KERNEL, 1).outcome, Outcome::Granted(set([3])));
    }
    let layer = Layer::GuestUser;
    let wrong = AdminAct::Bar {
        layer,
        barred: true,
    };
    let mut harness = under(Scheme::Independent);
    assert_eq!(act(&mut harness, wrong), Err(AdminError::Layer(layer)));
}

#[test]
fn a_request_that_waits_is_refused_with_its_layer() {
    let mut harness = under(Scheme::Interacting);
    harness.any(HV, 4);
    assert_eq!(harness.any(KERNEL, 1).outcome, Outcome::Pending);
    bar(&mut harness, KERNEL, true);
    assert_eq!(harness.unit.answer(KERNEL).outcome, Outcome::Refused(ADMIN));
    let last = std::iter::from_fn(|| notice(&mut harness, KERNEL))
        .last()
        .unwrap();
    assert_eq!((last.kind, last.reason), (NoticeKind::Refused, Some(ADMIN)));
    assert_eq!(harness.held(HV), set([0, 1, 2, 3]), "nobody takes them now");
    assert_eq!(harness.unit.deadline(), None);
}

#[test]
fn a_policy_holds_for_what_comes_after_it() {
    let mut harness = under(Scheme::Independent);
    harness.any(KERNEL, 3);
    harness.events();
    let policy = Policy {
        kernel: Share {
            lease_ms: Some(70),
            ..share(0, 1, 2)
        },
        grace_ms: 1,
        ..plain()
    };
    act(&mut harness, AdminAct::SetPolicy(policy)).unwrap();
    let (of, share) = (KERNEL, policy.kernel);
    assert_eq!(
        harness.events(),
        [(HV, None, Event::PolicySet { of, share })],
        "the others are as before"
    );
    assert_eq!(harness.unit.policy().grace_ms, 100, "no part of it");
    assert_eq!(harness.held(KERNEL), set([1, 2, 3]), "it keeps what it has");
    assert_eq!(
        harness.this(KERNEL, 0).outcome,
        Outcome::Refused(Reason::Maximum)
    );
    assert_eq!(harness.unit.deadline(), None, "no lease begins by itself");
    harness.this(KERNEL, 3);
    assert!(harness.unit.deadline().is_some(), "a renewal begins one");
    // It cannot be kept: nothing changes.
    let minima = Policy {
        firmware: crate::harness::share(4, 4, 0),
        hypervisor: crate::harness::share(1, 4, 0),
        ..plain()
    };
    let error = act(&mut harness, AdminAct::SetPolicy(minima)).unwrap_err();
    assert!(matches!(
        error,
        AdminError::Policy(PolicyError::TooFew { wanted: 5, .. })
    ));
    assert!(error.to_string().contains("lower them"));
    assert_eq!(harness.unit.policy().kernel, policy.kernel);
}

#[test]
fn nobody_is_asked_for_what_a_new_minimum_leaves_it() {
    let mut harness = under(Scheme::Interacting);
    harness.any(HV, 4);
    assert_eq!(harness.any(KERNEL, 1).outcome, Outcome::Pending);
    assert_eq!(notice(&mut harness, HV).unwrap().kind, NoticeKind::Asked);
    let policy = Policy {
        hypervisor: share(4, 4, 1),
        ..plain()
    };
    act(&mut harness, AdminAct::SetPolicy(policy)).unwrap();
    assert_eq!(
        notice(&mut harness, HV).unwrap().kind,
        NoticeKind::Cancelled
    );
    assert_eq!(
        harness.unit.answer(KERNEL).outcome,
        Outcome::Refused(Reason::NoneFree)
    );
}

#[test]
fn a_request_that_waits_begins_anew_under_another_scheme() {
    let check = |scheme, outcome| {
        let mut harness = under(Scheme::Interacting);
        harness.any(HV, 4);
        assert_eq!(harness.any(KERNEL, 1).outcome, Outcome::Pending);
        let asked = notice(&mut harness, HV).unwrap();
        assert_eq!(asked.kind, NoticeKind::Asked);
        act(&mut harness, AdminAct::SetScheme(scheme)).unwrap();
        assert_eq!(harness.unit.scheme(), scheme);
        assert_eq!(
            notice(&mut harness, HV).unwrap().kind,
            NoticeKind::Cancelled
        );
        assert_eq!(harness.unit.answer(KERNEL).outcome, outcome);
        harness
    };
    // Nobody asks for others' counters.
    check(Scheme::Independent, Outcome::Refused(Reason::NoneFree));
    // The master revokes by priority, without asking.
    let mut harness = check(Scheme::SingleMaster, Outcome::Pending);
    assert_eq!(notice(&mut harness, HV).unwrap().kind, NoticeKind::Revoking);
    // Back again: the announcement is off, and the holder is asked.
    act(&mut harness, AdminAct::SetScheme(Scheme::Interacting)).unwrap();
    assert_eq!(
        notice(&mut harness, HV).unwrap().kind,
        NoticeKind::Cancelled
    );
    assert_eq!(notice(&mut harness, HV).unwrap().kind, NoticeKind::Asked);
}

#[test]
fn reservations_of_another_scheme_keep_their_cookies() {
    for (before, after) in [
        (Scheme::SingleMaster, Scheme::Independent),
        (Scheme::SingleMaster, Scheme::Interacting),
        (Scheme::Independent, Scheme::SingleMaster),
        (Scheme::Interacting, Scheme::SingleMaster),
    ] {
        let mut harness = under(before);
        harness.any(KERNEL, 2);
        let open = PcrRegister::AccessKey(pmc(3));
        assert!(harness.write(KERNEL, open, 0, bits(KERNEL)));
        act(&mut harness, AdminAct::SetScheme(after)).unwrap();
        assert_eq!(harness.held(KERNEL), set([2, 3]));
        assert!(!harness.bank().reservation(pmc(3)).unwrap().is_private());
        // The cookie of the reservation still manages it, and no other.
        assert!(harness.write(KERNEL, open, 9, bits(KERNEL)), "{after}");
        assert!(!harness.write(KERNEL, open, 9, 9), "{after}");
        // By which key it is given back is a rule of the scheme that is in force.
        let key = PcrRegister::ManagementKey(pmc(3));
        let by_key = harness.write(KERNEL, key, 0, bits(KERNEL));
        assert_eq!(by_key, after != Scheme::SingleMaster);
        assert_eq!(
            harness.release(KERNEL, 2).outcome,
            Outcome::Granted(set([2])),
            "{after}"
        );
    }
}

/// How many counters the guest's layers may hold.
fn budget(harness: &mut Harness, most: u8, grace_ms: u32) {
    let most = PerKind {
        programmable: most,
        fixed: 0,
    };
    act(harness, AdminAct::SetBudget { most, grace_ms }).unwrap();
    let set = (HV, None, Event::BudgetSet(most));
    let events = harness.events();
    assert!(events.contains(&set), "{events:?}");
}

#[test]
fn a_smaller_budget_takes_from_the_lowest_priority_after_notice() {
    for scheme in Scheme::ALL {
        let mut harness = Harness::new(scheme, 4, plain());
        // The firmware comes last.
        harness.any(FW, 1);
        harness.end_phase();
        harness.any(KERNEL, 2);
        harness.any(HV, 1);
        budget(&mut harness, 1, 50);
        let at = |harness: &Harness, n| {
            let held = harness.unit.bank().reservation(pmc(n))?;
            let revocation = held.revocation?;
            Some((revocation.reason, revocation.at))
        };
        let soon = Some((Reason::Budget, Tsc(50)));
        // PMC3 is the firmware's, PMC1 and PMC2 the kernel's, PMC0 the hypervisor's.
        let found = [0, 1, 2, 3].map(|n| at(&harness, n));
        assert_eq!(found, [None, None, soon, soon], "{scheme}");
        let notice = notice(&mut harness, KERNEL).unwrap();
        assert_eq!(
            (notice.kind, notice.counter, notice.reason),
            (NoticeKind::Revoking, Some(pmc(2)), Some(Reason::Budget))
        );
        // What is given back meanwhile saves the other.
        harness.release(KERNEL, 1);
        harness.at(50);
        // One of the two, and the first that is due.
        assert_eq!(harness.held(KERNEL), set([2]));
        assert!(harness.held(FW).is_empty());
        assert_eq!(harness.held(HV), set([0]), "the budget is the guest's");
    }
}

#[test]
fn a_larger_budget_spares_what_was_to_go() {
    let mut harness = under(Scheme::Independent);
    harness.any(KERNEL, 3);
    revoke(&mut harness, 1, 500).unwrap();
    budget(&mut harness, 0, 100);
    budget(&mut harness, 1, 100);
    // The administrator has taken one himself, which no budget gives back.
    let leaving = |harness: &Harness| {
        let held = harness.unit.bank().held().iter();
        held.filter(|counter| {
            let held = harness.unit.bank().reservation(*counter);
            held.is_some_and(|held| held.revocation.is_some())
        })
        .collect::<arbiter::CounterSet>()
    };
    assert_eq!(leaving(&harness), set([1, 3]));
    budget(&mut harness, 9, 100);
    assert_eq!(leaving(&harness), set([1]));
    // What goes anyhow goes first, however long its holder was given.
    budget(&mut harness, 1, 0);
    assert_eq!(harness.held(KERNEL), set([2]));
}

/// A machine is reset vCPU by vCPU, and its phase last. Whoever acts in between sees the phase
/// of before, and gives no names that outlast it.
#[test]
fn what_is_set_during_a_reset_of_the_machine_gives_no_names_early() {
    let most = PerKind::ALL;
    for acts in [0, 1] {
        let names = PerKind {
            programmable: 2,
            fixed: 0,
        };
        let counters = PerKind {
            programmable: 4,
            fixed: 0,
        };
        let mut harness = Harness::of(PcrConfig {
            legacy: Some(names),
            ..config(Scheme::Independent, counters, plain(), true)
        });
        harness.end_phase();
        harness.unit.reset();
        for _ in 0..acts {
            act(&mut harness, AdminAct::SetBudget { most, grace_ms: 0 }).unwrap();
        }
        // Until it starts, and without a start, these are its names.
        assert!(!harness.unit.map().is_identity());
        harness.unit.phase().restart();
        assert!(harness.unit.map().is_identity(), "{acts} acts");
        let key = PcrRegister::ManagementKey(pmc(0));
        assert!(harness.write(FW, key, bits(FW), 0));
        harness.end_phase();
        let map = *harness.unit.map();
        let behind = |n| map.counter(pmc(n));
        assert_eq!([0, 1, 2].map(behind), [Some(pmc(1)), Some(pmc(2)), None]);
    }
}
