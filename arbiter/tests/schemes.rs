//! What each scheme makes of the same requests.

use arbiter::abi::{CONTROL_ACCESS_USER, CONTROL_FAULT, CONTROL_MANAGE_KERNEL};
use arbiter::{
    Access, Backing, Control, Event, Layer, NoticeKind, Outcome, PcrConfig, PcrRegister, PerKind,
    Policy, Reason, Request, Scheme, Share, Tsc, Verdict, Wanted,
};

use crate::harness::{FW, HV, Harness, KERNEL, bits, config, cookie, plain, pmc, set, share};

const GRANTED: fn([u8; 1]) -> Outcome = |counters| Outcome::Granted(set(counters));

fn under(scheme: Scheme) -> Harness {
    Harness::new(scheme, 4, plain())
}

#[test]
fn free_counters_are_granted_from_the_highest_under_every_scheme() {
    for scheme in Scheme::ALL {
        let mut harness = under(scheme);
        assert_eq!(
            harness.any(FW, 2).outcome,
            Outcome::Granted(set([2, 3])),
            "{scheme}"
        );
        assert_eq!(harness.held(FW), set([2, 3]));
        assert_eq!(harness.cleared, set([2, 3]), "nobody's event goes on");
        assert_eq!(harness.any(HV, 1).outcome, GRANTED([1]));
        assert_eq!(harness.this(HV, 0).outcome, GRANTED([0]));
        let reservation = harness.bank().reservation(pmc(3)).unwrap();
        assert!(reservation.is_access(cookie(FW)) && reservation.is_private());
        assert!(reservation.is_management(cookie(FW)));
    }
}

#[test]
fn numbers_tell_requests_apart() {
    let mut harness = under(Scheme::Independent);
    assert_eq!(harness.unit.answer(FW).number, 0);
    assert_eq!(harness.unit.answer(FW).outcome, Outcome::Nothing);
    assert_eq!(harness.any(FW, 1).number, 1);
    assert_eq!(harness.any(HV, 1).number, 1, "each layer has its own");
    assert_eq!(harness.release(FW, 3).number, 2);
    for _ in 2..=u16::MAX {
        harness.any(FW, 5);
    }
    assert_eq!(harness.unit.answer(FW).number, 1, "0 is no number");
}

#[test]
fn under_a_single_master_guests_reserve_and_give_back_by_the_mailbox_alone() {
    let mut harness = under(Scheme::SingleMaster);
    let lock = PcrRegister::ManagementKey(pmc(0));
    assert!(!harness.write(FW, lock, 5, 0));
    assert_eq!(
        harness.events(),
        [(FW, Some(pmc(0)), Event::Refused(Reason::Master))]
    );
    assert_eq!(
        harness.bank().free(),
        set([0, 1, 2, 3]),
        "nothing looks reserved"
    );

    harness.this(FW, 0);
    // The holder sets how others are treated, with the cookie of its request.
    for (layer, cookie, done) in [
        (FW, 6, false),
        (KERNEL, bits(FW), false),
        (FW, bits(FW), true),
    ] {
        let register = PcrRegister::DropValue(pmc(0));
        assert_eq!(harness.write(layer, register, 7, cookie), done);
    }
    assert_eq!(
        harness.read(KERNEL, PcrRegister::DropValue(pmc(0))),
        Some(7)
    );
    // The access cookie too, 0 included: legacy software uses the counter then. The
    // cookie of the request stays the one that manages.
    for access in [5, 0] {
        assert!(!harness.write(FW, PcrRegister::AccessKey(pmc(0)), access, 6));
        assert!(!harness.write(KERNEL, PcrRegister::AccessKey(pmc(0)), access, bits(FW)));
        assert!(harness.write(FW, PcrRegister::AccessKey(pmc(0)), access, bits(FW)));
        let reservation = harness.bank().reservation(pmc(0)).unwrap();
        assert!(reservation.is_access(arbiter::Cookie::new(access).unwrap()));
    }
    assert!(harness.write(FW, lock, bits(FW), bits(FW)), "renewed");
    assert!(harness.write(FW, lock, 9, bits(FW)) && harness.write(FW, lock, bits(FW), 9));
    assert!(
        !harness.write(FW, lock, 0, bits(FW)),
        "given back by the mailbox alone"
    );
    assert!(
        !harness.write(FW, PcrRegister::Control(pmc(1)), 0xff, 0),
        "nobody's"
    );
    assert_eq!(harness.release(FW, 0).outcome, GRANTED([0]));
    assert!(harness.bank().held().is_empty());
}

#[test]
fn the_hypervisor_asks_its_own_master_as_others_do() {
    let mut harness = under(Scheme::SingleMaster);
    harness.any(HV, 1);
    harness.lend(HV, 3);
    harness.end_phase();
    harness.this(KERNEL, 3);
    assert_eq!(harness.held(KERNEL), set([3]), "lent");
    assert!(!harness.write(HV, PcrRegister::ManagementKey(pmc(3)), 0, bits(KERNEL)));
}

#[test]
fn the_master_itself_can_set_counters_aside() {
    for scheme in Scheme::ALL {
        let mut harness = under(scheme);
        let done = harness.cx(|unit, cx| unit.reserve_for_hypervisor(pmc(1), cookie(HV), cx));
        assert_eq!(done.unwrap().cleared, set([1]));
        let again = harness.cx(|unit, cx| unit.reserve_for_hypervisor(pmc(1), cookie(HV), cx));
        assert_eq!(again, Err(Reason::Held));
        let absent = harness.cx(|unit, cx| unit.reserve_for_hypervisor(pmc(9), cookie(HV), cx));
        assert_eq!(absent, Err(Reason::NoCounter));
        let control = harness.bank().reservation(pmc(1)).unwrap().control;
        for layer in [FW, KERNEL, arbiter::Layer::GuestUser] {
            assert!(!control.accesses(layer) && !control.manages(layer));
        }
        for shared in arbiter::Shared::ALL {
            assert_eq!(harness.unit.reached_by(shared), set([0, 2, 3]));
        }
        harness.any(FW, 1);
        harness.unit.reset();
        assert_eq!(
            harness.bank().held(),
            set([1]),
            "it outlives the guest's reset"
        );
    }
}

#[test]
fn independent_layers_are_served_from_free_counters_only() {
    let mut harness = under(Scheme::Independent);
    harness.any(FW, 3);
    harness.lend(FW, 3);
    for (wanted, reason) in [
        (Wanted::Any(2), Reason::NoneFree),
        (Wanted::This(pmc(3)), Reason::Held),
        (Wanted::This(pmc(7)), Reason::NoCounter),
        (Wanted::Any(5), Reason::NoCounter),
    ] {
        let outcome = harness.reserve(HV, wanted, None).outcome;
        assert_eq!(outcome, Outcome::Refused(reason), "{wanted:?}");
    }
    assert_eq!(harness.held(FW).len(), 3);
    assert!(harness.held(HV).is_empty(), "all or nothing");
}

#[test]
fn a_holder_that_yields_hands_its_counter_over() {
    let mut harness = under(Scheme::Interacting);
    harness.any(FW, 4);
    harness.events();
    assert_eq!(harness.any(HV, 1).outcome, Outcome::Pending);
    let asked = harness.notices(FW);
    assert_eq!(asked.len(), 1);
    assert_eq!(
        (asked[0].kind, asked[0].counter),
        (NoticeKind::Asked, Some(pmc(3)))
    );
    assert_eq!((asked[0].layer, asked[0].rest_ms), (HV, 100));
    harness.cleared = set([]);
    harness.reply(FW, 3, true).unwrap();
    assert_eq!(harness.unit.answer(HV).outcome, GRANTED([3]));
    assert_eq!(harness.held(HV), set([3]));
    assert_eq!(harness.cleared, set([3]));
    assert_eq!(harness.notices(HV)[0].kind, NoticeKind::Granted);
    assert_eq!(
        harness.reply(FW, 3, true),
        Err(Reason::Malformed),
        "it was asked once"
    );
    let names: Vec<_> = harness
        .events()
        .iter()
        .map(|(_, _, event)| event.name())
        .collect();
    assert_eq!(names, ["asked", "yielded", "reserved"]);
    assert_eq!(harness.deadline(), None);
}

/// The counter that a question is about is one of those that the asker can have.
#[test]
fn the_last_counter_that_is_backed_can_be_asked_for() {
    let mut harness = under(Scheme::Interacting);
    assert_eq!(
        harness.any(HV, 4).outcome,
        Outcome::Granted(set([0, 1, 2, 3]))
    );
    let last = Backing {
        programmable: 1,
        ..Backing::whole()
    };
    let _ = harness.cx(|unit, cx| unit.back(last, cx));
    assert_eq!(harness.any(FW, 1).outcome, Outcome::Pending);
    harness.reply(HV, 3, true).unwrap();
    assert_eq!(harness.unit.answer(FW).outcome, GRANTED([3]));
    assert_eq!(
        harness.any(FW, 1).outcome,
        Outcome::Refused(Reason::NoneFree)
    );
}

/// A kernel wants what the firmware holds, and both answer nothing.
#[test]
fn what_is_refused_is_revoked_only_by_priority() {
    for (firmware, outcome) in [(0, GRANTED([0])), (2, Outcome::Refused(Reason::Refused))] {
        let policy = Policy {
            firmware: share(0, 255, firmware),
            hypervisor: share(0, 255, 1),
            ..plain()
        };
        let mut harness = Harness::new(Scheme::Interacting, 1, policy);
        harness.any(FW, 1);
        assert_eq!(harness.any(HV, 1).outcome, Outcome::Pending);
        harness.reply(FW, 0, false).unwrap();
        if firmware == 0 {
            assert_eq!(harness.unit.answer(HV).outcome, Outcome::Pending);
            assert_eq!(harness.deadline(), Some(100));
            let kinds: Vec<_> = harness
                .notices(FW)
                .iter()
                .map(|notice| notice.kind)
                .collect();
            assert_eq!(kinds, [NoticeKind::Asked, NoticeKind::Revoking]);
            assert_eq!(
                harness.read(FW, PcrRegister::Status(pmc(0))).unwrap() & 0x40,
                0x40
            );
            harness.at(100);
            assert_eq!(harness.notices(FW)[0].kind, NoticeKind::Revoked);
        }
        assert_eq!(harness.unit.answer(HV).outcome, outcome);
    }
}

#[test]
fn silence_is_told_from_refusal() {
    let mut harness = Harness::new(
        Scheme::Interacting,
        2,
        Policy {
            firmware: share(0, 9, 1),
            ..plain()
        },
    );
    harness.any(FW, 2);
    harness.any(HV, 1);
    harness.at(99);
    assert_eq!(harness.unit.answer(HV).outcome, Outcome::Pending);
    harness.at(100);
    // Who did not answer is not asked for the next counter.
    assert_eq!(
        harness.unit.answer(HV).outcome,
        Outcome::Refused(Reason::NoAnswer)
    );
    let refused = harness.notices(HV)[0];
    assert_eq!(
        (refused.kind, refused.reason),
        (NoticeKind::Refused, Some(Reason::NoAnswer))
    );
    // Who refuses one counter is asked for the next.
    harness.any(HV, 1);
    harness.reply(FW, 1, false).unwrap();
    harness.reply(FW, 0, false).unwrap();
    assert_eq!(
        harness.unit.answer(HV).outcome,
        Outcome::Refused(Reason::Refused)
    );
}

#[test]
fn firmware_that_is_over_is_not_asked() {
    let mut harness = Harness::new(Scheme::Interacting, 2, plain());
    harness.any(FW, 2);
    harness.lend(FW, 0);
    harness.end_phase();
    harness.events();
    assert_eq!(harness.this(KERNEL, 0).outcome, GRANTED([0]), "lent");
    assert_eq!(
        harness.events()[0],
        (FW, Some(pmc(0)), Event::Revoked(Reason::Lent))
    );
    assert_eq!(
        harness.any(KERNEL, 1).outcome,
        Outcome::Pending,
        "of higher priority"
    );
    assert!(matches!(
        harness.events()[0].2,
        Event::Revoking {
            reason: Reason::Priority,
            ..
        }
    ));
    harness.at(100);
    assert_eq!(harness.held(KERNEL), set([0, 1]));
    let mut equals = Harness::new(
        Scheme::Interacting,
        1,
        Policy {
            firmware: share(0, 9, 2),
            ..plain()
        },
    );
    equals.any(FW, 1);
    equals.end_phase();
    assert_eq!(
        equals.any(KERNEL, 1).outcome,
        Outcome::Refused(Reason::NoneFree)
    );
    assert_eq!(
        equals.this(KERNEL, 0).outcome,
        Outcome::Refused(Reason::Held)
    );
}

/// Firmware that has left code in SMM is asked after its phase, and called by an SMI, once
/// for all notices that have come. Other firmware is not called.
#[test]
fn firmware_in_smm_is_called_when_it_is_asked() {
    for (end, called) in [(0x13, true), (1, false)] {
        let mut harness = Harness::of(PcrConfig {
            smm: true,
            ..config(Scheme::Interacting, kinds(2), plain(), true)
        });
        harness.any(FW, 2);
        assert_eq!(harness.any(HV, 1).outcome, Outcome::Pending);
        let is_called = |harness: &mut Harness| {
            let is_called = harness.unit.wants_smi();
            harness.unit.smi_sent();
            is_called
        };
        assert!(!harness.unit.wants_smi(), "it runs by itself");
        assert!(harness.write(FW, PcrRegister::Phase, end, 0));
        assert!(!harness.unit.wants_smi(), "nothing is there yet");
        if harness.unit.take_smram().is_some() {
            harness.unit.smram_filled();
        }
        assert_eq!(is_called(&mut harness), called, "it was asked in its phase");
        assert_eq!(harness.any(KERNEL, 1).outcome, Outcome::Pending);
        assert_eq!(is_called(&mut harness), called);
        assert!(!harness.unit.wants_smi(), "once");
        let asked = harness.notices(FW);
        let asked = asked.iter().map(|notice| (notice.kind, notice.counter));
        let questions = [1, 0].map(|n| (NoticeKind::Asked, Some(pmc(n))));
        assert!(asked.eq(questions));
        harness.reply(FW, 0, true).unwrap();
        assert_eq!(harness.unit.answer(KERNEL).outcome, GRANTED([0]));
    }
}

#[test]
fn the_master_revokes_by_priority_and_asks_nobody() {
    let mut harness = under(Scheme::SingleMaster);
    harness.any(FW, 4);
    harness.events();
    assert_eq!(harness.any(HV, 2).outcome, Outcome::Pending);
    let names: Vec<_> = harness
        .events()
        .iter()
        .map(|(_, _, event)| event.name())
        .collect();
    assert_eq!(names, ["revoking", "revoking"]);
    // One that is given back in time is one less to be revoked.
    harness.release(FW, 0);
    let names: Vec<_> = harness
        .events()
        .iter()
        .map(|(_, _, event)| event.name())
        .collect();
    assert_eq!(names, ["released", "spared", "gathered"]);
    harness.at(100);
    assert_eq!(harness.held(HV).len(), 2);
    assert_eq!(harness.held(FW).len(), 2);
    harness.end_phase();
    assert_eq!(harness.any(HV, 2).outcome, Outcome::Pending);
    harness.at(200);
    assert_eq!(harness.held(HV).len(), 4, "all that it held, and two more");
}

#[test]
fn minima_and_maxima_hold_whoever_asks() {
    for scheme in Scheme::ALL {
        let policy = Policy {
            firmware: share(1, 3, 0),
            hypervisor: share(0, 2, 9),
            kernel: share(1, 4, 0),
            grace_ms: 10,
        };
        let mut harness = Harness::new(scheme, 4, policy);
        assert_eq!(
            harness.any(FW, 4).outcome,
            Outcome::Refused(Reason::Maximum)
        );
        harness.any(FW, 3);
        // One is left, and the kernel's.
        assert_eq!(
            harness.this(HV, 0).outcome,
            Outcome::Refused(Reason::Minimum),
            "{scheme}"
        );
        harness.any(HV, 2);
        harness.at(1000);
        assert!(!harness.held(FW).is_empty(), "{scheme}");
        harness.end_phase();
        assert_eq!(harness.any(KERNEL, 1).outcome, GRANTED([0]), "{scheme}");
        assert_eq!(
            harness.any(HV, 3).outcome,
            Outcome::Refused(Reason::Maximum)
        );
    }
}

#[test]
fn a_request_can_be_withdrawn_and_only_one_is_pending() {
    let mut harness = under(Scheme::Interacting);
    harness.any(FW, 4);
    harness.any(HV, 1);
    let wanted = Wanted::Any(1);
    let request = Request::Reserve {
        wanted,
        cookie: cookie(HV),
        lease_ms: None,
        event: None,
    };
    assert_eq!(harness.request(HV, request).unwrap_err(), Reason::Busy);
    assert_eq!(harness.unit.answer(HV).number, 1);
    harness.notices(FW);
    let wrong = Request::Withdraw { cookie: cookie(FW) };
    assert_eq!(harness.request(HV, wrong), Err(Reason::Cookie));
    let answer = harness.withdraw(HV);
    assert_eq!(answer.outcome, Outcome::Refused(Reason::Withdrawn));
    assert_eq!(harness.notices(FW)[0].kind, NoticeKind::Cancelled);
    let told = harness.notices(HV);
    assert_eq!(told.len(), 1, "whoever waits beside it");
    assert_eq!(
        (told[0].kind, told[0].reason),
        (NoticeKind::Refused, Some(Reason::Withdrawn))
    );
    assert_eq!(harness.reply(FW, 3, true), Err(Reason::Malformed));
    assert_eq!(harness.withdraw(HV), answer, "nothing is pending");
    assert_eq!(harness.deadline(), None);
}

#[test]
fn what_a_request_had_come_by_is_free_again_if_it_is_refused() {
    let mut harness = Harness::new(
        Scheme::Interacting,
        3,
        Policy {
            firmware: share(0, 9, 5),
            ..plain()
        },
    );
    harness.any(FW, 2);
    assert_eq!(harness.any(HV, 3).outcome, Outcome::Pending);
    assert_eq!(harness.held(HV), set([0]), "nobody else gets it meanwhile");
    harness.reply(FW, 2, true).unwrap();
    assert_eq!(harness.held(HV), set([0, 2]));
    harness.cleared = set([]);
    harness.reply(FW, 1, false).unwrap();
    assert_eq!(
        harness.unit.answer(HV).outcome,
        Outcome::Refused(Reason::Refused)
    );
    assert_eq!(harness.bank().free(), set([0, 2]));
    assert_eq!(harness.cleared, set([0, 2]));
}

#[test]
fn a_counter_that_is_given_back_goes_to_who_waits() {
    let mut harness = Harness::new(Scheme::Interacting, 1, plain());
    harness.any(FW, 1);
    harness.any(HV, 1);
    assert!(harness.write(FW, PcrRegister::ManagementKey(pmc(0)), 0, bits(FW)));
    assert_eq!(harness.unit.answer(HV).outcome, GRANTED([0]));
    harness.end_phase();
    harness.any(KERNEL, 1);
    // Handing over to whom it is for does the same.
    let held = harness.bank().reservation(pmc(0)).unwrap().owner;
    assert_eq!(held, HV);
    assert!(harness.write(KERNEL, PcrRegister::ManagementKey(pmc(0)), 77, bits(HV)));
    assert_eq!(harness.held(KERNEL), set([0]));
    harness.at(1000);
    assert_eq!(
        harness.held(KERNEL),
        set([0]),
        "and it is not taken away again"
    );
}

#[test]
fn leases_end_with_a_notice_unless_renewed() {
    let lease = |ms| Share {
        lease_ms: Some(ms),
        ..Share::FREE
    };
    for scheme in Scheme::ALL {
        let mut harness = Harness::new(
            scheme,
            2,
            Policy {
                firmware: lease(500),
                ..plain()
            },
        );
        harness.any(FW, 1);
        harness.reserve(FW, Wanted::This(pmc(0)), Some(50));
        assert_eq!(harness.deadline(), Some(50), "shorter than policy allows");
        harness.at(40).reserve(FW, Wanted::This(pmc(0)), Some(9000));
        harness.at(400);
        assert_eq!(harness.held(FW), set([0, 1]), "{scheme}");
        if scheme != Scheme::SingleMaster {
            assert!(harness.write(FW, PcrRegister::ManagementKey(pmc(0)), bits(FW), bits(FW)));
        }
        harness.at(500);
        assert_eq!(harness.held(FW), set([0]));
        let notices = harness.notices(FW);
        assert_eq!(
            (notices[0].kind, notices[0].counter),
            (NoticeKind::Expired, Some(pmc(1)))
        );
        assert!(
            harness
                .events()
                .contains(&(FW, Some(pmc(1)), Event::Revoked(Reason::Expired)))
        );
        harness.at(899);
        let renewed = scheme != Scheme::SingleMaster;
        assert_eq!(
            !harness.held(FW).is_empty(),
            renewed,
            "a renewal lasts as long as before"
        );
        harness.at(900);
        assert!(harness.held(FW).is_empty());
    }
}

#[test]
fn a_short_lease_stays_short_when_renewed_by_the_key() {
    let mut harness = Harness::new(Scheme::Independent, 1, plain());
    harness.reserve(FW, Wanted::Any(1), Some(50));
    harness.at(30);
    assert!(harness.write(FW, PcrRegister::ManagementKey(pmc(0)), bits(FW), bits(FW)));
    assert_eq!(harness.deadline(), Some(80));
}

/// A host's tool asks for what others have reserved: free counters are left alone, an owner
/// that gives one back has yielded it, and nobody can draw the question out.
#[test]
fn a_tool_asks_for_what_others_hold() {
    let held =
        |harness: &mut Harness, count| harness.reserve(Layer::HostTool, Wanted::Held(count), None);
    let mut harness = Harness::new(Scheme::Interacting, 4, plain());
    harness.any(FW, 2);
    assert_eq!(harness.held(FW), set([2, 3]));
    assert_eq!(
        held(&mut harness, 3).outcome,
        Outcome::Refused(Reason::Minimum)
    );
    assert_eq!(held(&mut harness, 2).outcome, Outcome::Pending);
    harness.reply(FW, 3, true).unwrap();
    assert_eq!(harness.last_answer(HV).outcome, Outcome::Pending);
    harness.release(FW, 2);
    let expected = Outcome::Granted(set([2, 3]));
    assert_eq!(harness.last_answer(HV).outcome, expected);
    assert_eq!(harness.held(HV), set([2, 3]));
    assert_eq!(harness.bank().free(), set([0, 1]));

    // Another question is under way, and what came of the first one goes back.
    harness.any(FW, 1);
    assert_eq!(held(&mut harness, 1).outcome, Outcome::Pending);
    harness.give_back(HV, 2);
    assert_eq!(harness.held(HV), set([3]));
    assert_eq!(
        harness.last_answer(HV).outcome,
        Outcome::Pending,
        "its answer stays"
    );
    harness.give_back(FW, 3);
    assert_eq!(harness.held(HV), set([3]), "that is not its cookie");
    // It keeps it, is to lose it by priority, and gives it back before.
    harness.reply(FW, 1, false).unwrap();
    harness.release(FW, 1);
    let granted = Outcome::Granted(set([1]));
    assert_eq!(harness.last_answer(HV).outcome, granted);
}

#[test]
fn renewing_saves_nobody_from_a_revocation() {
    let mut harness = Harness::new(Scheme::Interacting, 1, plain());
    harness.any(FW, 1);
    harness.any(HV, 1);
    harness.reply(FW, 0, false).unwrap();
    assert!(harness.write(FW, PcrRegister::ManagementKey(pmc(0)), bits(FW), bits(FW)));
    harness.this(FW, 0);
    harness.at(100);
    assert_eq!(harness.held(HV), set([0]));
}

#[test]
fn a_holder_that_is_down_to_its_minimum_is_spared() {
    let policy = Policy {
        firmware: share(1, 9, 0),
        ..plain()
    };
    let mut harness = Harness::new(Scheme::Interacting, 2, policy);
    harness.any(FW, 2);
    harness.this(HV, 1);
    harness.reply(FW, 1, false).unwrap();
    harness.at(50).release(FW, 0);
    // PMC1 was asked for, and PMC0 does not do.
    harness.at(100);
    assert_eq!(harness.held(FW), set([1]));
    assert_eq!(
        harness.unit.answer(HV).outcome,
        Outcome::Refused(Reason::Refused)
    );
    assert!(
        harness
            .events()
            .contains(&(FW, Some(pmc(1)), Event::Spared))
    );
    assert_eq!(
        harness.notices(FW).last().unwrap().kind,
        NoticeKind::Cancelled
    );
}

#[test]
fn what_becomes_needless_is_called_off_where_it_would_not_take_place_anyway() {
    let policy = Policy {
        firmware: share(1, 9, 0),
        hypervisor: share(0, 9, 2),
        kernel: share(0, 9, 1),
        ..plain()
    };
    let mut harness = Harness::new(Scheme::SingleMaster, 4, policy);
    harness.any(FW, 2);
    harness.end_phase();
    harness.any(KERNEL, 2);
    harness.any(HV, 3);
    harness.events();
    harness.release(FW, 2);
    assert_eq!(harness.events()[1], (FW, Some(pmc(3)), Event::Spared));
    harness.at(100);
    assert_eq!(harness.held(HV), set([0, 1, 2]));
}

/// Two layers pass a counter to and fro, so that the layer that is to lose one is at
/// its minimum when the time comes.
#[test]
fn no_game_of_others_keeps_a_request_waiting_for_ever() {
    let policy = Policy {
        firmware: share(1, 9, 0),
        hypervisor: share(0, 9, 5),
        kernel: share(1, 9, 0),
        grace_ms: 100,
    };
    let mut harness = Harness::new(Scheme::Interacting, 3, policy);
    harness.any(FW, 2);
    harness.end_phase();
    harness.any(KERNEL, 1);
    assert_eq!(harness.any(HV, 1).outcome, Outcome::Pending);
    let mut spared = 0;
    while harness.now < 2 * 3 * 100 && harness.unit.answer(HV).outcome == Outcome::Pending {
        harness.at(harness.deadline().unwrap() - 1);
        let marked = |harness: &Harness, n: &u8| {
            let held = harness.bank().reservation(pmc(*n));
            held.is_some_and(|held| held.revocation.is_some())
        };
        if let Some(n) = (0..3).find(|n| marked(&harness, n)) {
            let loser = harness.bank().reservation(pmc(n)).unwrap().owner;
            let other = if loser == FW { KERNEL } else { FW };
            let passed = (0..3).find(|one| *one != n && harness.held(loser).contains(pmc(*one)));
            let register = PcrRegister::ManagementKey(pmc(passed.unwrap()));
            // One of the two cookies is right, and then it has another one.
            let mut knows = [bits(FW), bits(KERNEL)].into_iter();
            let took = knows.any(|cookie| harness.write(other, register, bits(other) + 8, cookie));
            let back = harness.write(other, register, bits(other), bits(other) + 8);
            assert!(took && back);
        }
        harness.at(harness.now + 1);
        let events = harness.events();
        spared += events
            .iter()
            .filter(|(.., event)| *event == Event::Spared)
            .count();
    }
    assert!(spared >= 2, "they played it: {spared}");
    assert!(matches!(
        harness.unit.answer(HV).outcome,
        Outcome::Refused(_)
    ));
}

#[test]
fn guessing_in_the_mailbox_is_counted() {
    for scheme in Scheme::ALL {
        let mut harness = under(scheme);
        harness.any(FW, 1);
        let wrong = |guess| arbiter::Cookie::new(guess).unwrap();
        for guess in 1..=20 {
            let request = match guess % 2 {
                0 => Request::Release {
                    counter: pmc(3),
                    cookie: wrong(guess),
                },
                _ => Request::Reserve {
                    wanted: Wanted::This(pmc(3)),
                    cookie: wrong(guess),
                    lease_ms: None,
                    event: None,
                },
            };
            let answer = harness.request(FW, request).unwrap();
            assert_eq!(answer.outcome, Outcome::Refused(Reason::Cookie));
        }
        assert_eq!(harness.unit.wrong_cookies(), 20);
        assert!(harness.unit.locked_out_until(Tsc(0)).is_some());
        assert_eq!(harness.held(FW), set([3]));
    }
}

/// A program of the kernel's presents junk, then the right cookie.
#[test]
fn programs_that_guess_are_not_listened_to_for_a_while() {
    let user = Layer::GuestUser;
    for faults in [false, true] {
        let mut harness = under(Scheme::Independent);
        harness.end_phase();
        harness.this(KERNEL, 0);
        let control = Control::INITIAL.bits() | if faults { CONTROL_FAULT } else { 0 };
        assert!(harness.write(KERNEL, PcrRegister::Control(pmc(0)), control, bits(KERNEL)));
        let wrong = if faults {
            Verdict::Fault
        } else {
            Verdict::Drop { read_as: 0 }
        };
        let mut rdpmc = |layer, register| {
            let caller = (layer, arbiter::Cookie::new(register).unwrap());
            let verdict = harness.cx(|unit, cx| {
                let verdict = unit.check(caller, pmc(0), Access::Rdpmc, cx.now);
                unit.denied(caller, pmc(0), Access::Rdpmc, verdict, cx);
                verdict
            });
            (verdict, harness.unit.wrong_cookies(), harness.events())
        };
        for guess in 1..=16 {
            assert_eq!(rdpmc(user, guess).0, wrong);
        }
        assert_eq!(rdpmc(user, bits(KERNEL)).0, Verdict::Permit, "still free");
        let (verdict, wrongs, told) = rdpmc(user, 17);
        assert_eq!((verdict, wrongs), (wrong, 17));
        assert_eq!(told[1], (user, None, Event::Deaf { ms: 10 }));
        for guess in [18, bits(KERNEL)] {
            let (verdict, wrongs, told) = rdpmc(user, guess);
            assert_eq!((verdict, wrongs), (wrong, 17), "not compared, not counted");
            assert_eq!(told.len(), 1);
        }
        assert_eq!(rdpmc(KERNEL, bits(KERNEL)).0, Verdict::Permit);
        assert_eq!(harness.unit.locked_out_until(Tsc(harness.now)), None);
        harness.at(10);
        let caller = (user, cookie(KERNEL));
        let verdict = harness
            .unit
            .check(caller, pmc(0), Access::Rdpmc, Tsc(harness.now));
        assert_eq!(verdict, Verdict::Permit);
    }
}

/// Where the mode bits lock a layer out, no cookie is right: none is counted, and
/// the answer does not reveal the right one.
#[test]
fn a_layer_that_is_shut_out_cannot_guess() {
    let mut harness = under(Scheme::Interacting);
    harness.end_phase();
    harness.this(KERNEL, 0);
    let control = Control::INITIAL.bits() & !(CONTROL_ACCESS_USER | CONTROL_MANAGE_KERNEL);
    assert!(harness.write(KERNEL, PcrRegister::Control(pmc(0)), control, bits(KERNEL)));
    for guess in [bits(KERNEL), 1, 2] {
        let caller = (Layer::GuestUser, arbiter::Cookie::new(guess).unwrap());
        harness.cx(|unit, cx| {
            let verdict = unit.check(caller, pmc(0), Access::Rdpmc, cx.now);
            assert_eq!(verdict, Verdict::Drop { read_as: 0 });
            unit.denied(caller, pmc(0), Access::Rdpmc, verdict, cx);
        });
        assert!(!harness.write(KERNEL, PcrRegister::ManagementKey(pmc(0)), 0, guess));
        let (counter, cookie) = (pmc(0), caller.1);
        let released = harness.request(KERNEL, Request::Release { counter, cookie });
        let refused = Outcome::Refused(Reason::Cookie);
        assert_eq!(released.unwrap().outcome, refused, "{guess:#x}");
        let told = harness.events().into_iter();
        assert!(
            told.rev()
                .take(3)
                .all(|(_, _, event)| event.reason() == Some(Reason::Layer))
        );
    }
    assert_eq!(harness.unit.wrong_cookies(), 0);
}

#[test]
fn what_the_hypervisor_sets_aside_has_no_lease() {
    let mut policy = plain();
    policy.hypervisor.lease_ms = Some(50);
    let mut harness = Harness::new(Scheme::Independent, 2, policy);
    let done = harness.cx(|unit, cx| unit.reserve_for_hypervisor(pmc(1), cookie(HV), cx));
    assert!(done.is_ok());
    assert_eq!(harness.deadline(), None);
    harness.at(1000);
    assert_eq!(harness.held(HV), set([1]));
    // What it asks for as others do, it renews as others do.
    harness.any(HV, 1);
    harness.at(2000);
    assert_eq!(harness.held(HV), set([1]));
}

/// The firmware hands over while it waits for counters: what it had gathered has
/// a name, whichever vCPU ended the phase and whatever happens here first.
#[test]
fn what_the_firmware_was_gathering_keeps_its_legacy_name() {
    type Look = fn(&mut Harness);
    let firsts: [(&str, Look); 4] = [
        ("this vCPU ends it", |harness| {
            harness.end_phase();
        }),
        ("tick", |harness| {
            harness.unit.phase().end();
            harness.at(0);
        }),
        ("a legacy access, then a tick", |harness| {
            harness.unit.phase().end();
            let _ = harness.unit.map();
            harness.at(0);
        }),
        ("a request of the kernel", |harness| {
            harness.unit.phase().end();
            harness.any(KERNEL, 1);
            harness.at(0);
            harness.release(KERNEL, 3);
        }),
    ];
    for (first, look) in firsts {
        for pending in [false, true] {
            let mut harness = Harness::of(PcrConfig {
                legacy: Some(kinds(4)),
                ..config(Scheme::Interacting, kinds(4), plain(), true)
            });
            harness.this(FW, 0);
            harness.this(HV, 2);
            if pending {
                assert_eq!(harness.any(FW, 3).outcome, Outcome::Pending);
                assert_eq!(harness.held(FW), set([0, 1, 3]));
            }
            look(&mut harness);
            assert_eq!(harness.held(FW), set([0]), "{first}");
            assert_eq!(harness.deadline(), None, "{first}");
            let map = harness.unit.map();
            let named = [0, 1, 2].map(|n| map.counter(pmc(n)));
            assert_eq!(named, [Some(pmc(1)), Some(pmc(3)), None], "{first}");
            let refused = if pending {
                Outcome::Refused(Reason::Phase)
            } else {
                Outcome::Granted(set([0]))
            };
            assert_eq!(harness.unit.answer(FW).outcome, refused, "{first}");
        }
    }
}

fn kinds(programmable: u8) -> PerKind {
    PerKind {
        programmable,
        fixed: 0,
    }
}
