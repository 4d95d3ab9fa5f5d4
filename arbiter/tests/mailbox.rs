//! The registers of the mailbox, bit by bit.

use arbiter::abi::{
    ANSWER_GRANTED, ANSWER_NUMBER_SHIFT, ANSWER_PENDING, ANSWER_REASON_SHIFT, ANSWER_REFUSED,
    COOKIE_MASK, FEATURE_MAILBOX, NOTICE_ASKED, NOTICE_GRANTED, NOTICE_LOST, NOTICE_REASON_SHIFT,
    NOTICE_REFUSED, NOTICE_REVOKED, REASON_LENT, REASON_NONE_FREE, REASON_WITHDRAWN, REPLY_REFUSE,
    REPLY_YIELD, REQUEST_EVENT, REQUEST_POSITION, REQUEST_RELEASE, REQUEST_RESERVE,
    REQUEST_WHICH_SHIFT, REQUEST_WITHDRAW,
};
use arbiter::{
    CounterId, Event, IbsKind, Layer, NamedEvent, NoticeKind, PcrRegister, PerKind, Reason, Reply,
    Request, Scheme, Wanted,
};

use crate::harness::{FW, HV, Harness, KERNEL, bits, plain, pmc, set, share};

fn reserve(request: Result<Request, Reason>) -> Option<(Wanted, Option<u32>)> {
    match request {
        Ok(Request::Reserve {
            wanted,
            lease_ms,
            event: None,
            ..
        }) => Some((wanted, lease_ms)),
        _ => None,
    }
}

#[test]
fn requests_to_reserve() {
    let check = |value: u64, cookie: u64, expected| {
        assert_eq!(
            reserve(Request::decode(value, cookie)),
            expected,
            "{value:#x} {cookie:#x}"
        );
    };
    let sampler = Wanted::This(CounterId::Ibs(IbsKind::Op));
    check(0x0101, 1, Some((Wanted::Any(1), None)));
    check(0xff01, 1, Some((Wanted::Any(255), None)));
    check(0x3f11, 1, Some((sampler, None)));
    check(0x0011, COOKIE_MASK, Some((Wanted::This(pmc(0)), None)));
    check(0x0001_0101, 1, Some((Wanted::Any(1), Some(10))));
    check(0xffff_0101, 1, Some((Wanted::Any(1), Some(655_350))));
    // No counter, no position, no cookie, too much of one, unknown bits.
    check(0x0001, 1, None);
    check(0x4011, 1, None);
    check(0x0101, 0, None);
    check(0x0101, 1 << 48, None);
    for bit in (5..8).chain(32..64) {
        check(0x0101 | 1 << bit, 1, None);
    }
    check(0x0101 | u64::MAX << 32, 1, None);
    for operation in (0..16).filter(|operation| *operation != REQUEST_RESERVE) {
        check(0x0100 | operation, 1, None);
    }
}

#[test]
fn requests_that_name_an_event() {
    let named = |value| match Request::decode(value, 1) {
        Ok(Request::Reserve { event, .. }) => event.map(NamedEvent::select),
        _ => None,
    };
    let check = |field: u64, select| {
        let value = 0x0101 | field << 32 | REQUEST_EVENT;
        assert_eq!(named(value), Some(select), "{field:#x}");
        let event = NamedEvent::of_select(select).unwrap();
        assert_eq!(0x0101 | event.request_bits(), value);
    };
    check(0, 0);
    check(0x412e, 0x412e);
    check(0xf_0000, 0xf_0000_0000);
    check(1 << 20, 1 << 18);
    check(1 << 21, 1 << 23);
    check(0xff << 22, 0xff << 24);
    check(0x3fff_ffff, 0xf_ff84_ffff);
    // No bit of rings, interrupt, enabling or a width that no model has.
    for bit in (16..18).chain(19..23).chain(36..64) {
        assert_eq!(NamedEvent::of_select(1 << bit), None, "{bit}");
    }
    // Only who reserves names one, and a fixed-function counter has its own.
    for value in [0x0112, 0x0003, 0x2111] {
        let request = Request::decode(value | REQUEST_EVENT, 1);
        assert_eq!(request.unwrap_err(), Reason::Malformed, "{value:#x}");
    }
}

#[test]
fn requests_to_give_back_and_to_withdraw() {
    let check = |value: u64, expected: &str| {
        let shown = match Request::decode(value, 1) {
            Ok(Request::Release { counter, .. }) => counter.to_string(),
            Ok(Request::Withdraw { .. }) => "withdraw".to_owned(),
            Ok(Request::Reserve { .. }) => "reserve".to_owned(),
            Err(reason) => reason.name().to_owned(),
        };
        assert_eq!(shown, expected, "{value:#x}");
    };
    check(0x2112, "FIXED1");
    check(0x0112, "PMC1");
    check(0x0102, "malformed");
    check(0x4012, "malformed");
    check(0x0001_0112, "malformed");
    check(3, "withdraw");
    check(0x13, "malformed");
    check(0x103, "malformed");
    assert_eq!(Request::decode(3, 1 << 48).unwrap_err(), Reason::Malformed);
}

#[test]
fn replies() {
    let yields = |yields| {
        Ok(Reply {
            counter: pmc(2),
            yields,
        })
    };
    for (value, expected) in [
        (0x201, yields(true)),
        (0x202, yields(false)),
        (0x200, Err(Reason::Malformed)),
        (0x203, Err(Reason::Malformed)),
        (0x211, Err(Reason::Malformed)),
        (0x4001, Err(Reason::Malformed)),
        (0x0001_0201, Err(Reason::Malformed)),
        (1 << 63 | 0x201, Err(Reason::Malformed)),
    ] {
        assert_eq!(Reply::decode(value), expected, "{value:#x}");
    }
}

#[test]
fn a_driver_reserves_asks_and_replies_by_registers() {
    let mut harness = Harness::new(Scheme::Interacting, 2, plain());
    assert_ne!(harness.unit.features() & FEATURE_MAILBOX, 0);
    let any = |count: u64| REQUEST_RESERVE | count << REQUEST_WHICH_SHIFT;
    assert_eq!(harness.read(FW, PcrRegister::Answer), Some(0));
    assert!(harness.write(FW, PcrRegister::Request, any(2), bits(FW)));
    assert_eq!(
        harness.read(FW, PcrRegister::Answer),
        Some(ANSWER_GRANTED | 1 << 16)
    );
    assert_eq!(harness.read(FW, PcrRegister::Granted), Some(0b11));

    assert!(harness.write(HV, PcrRegister::Request, any(1), bits(HV)));
    assert_eq!(
        harness.read(HV, PcrRegister::Answer),
        Some(ANSWER_PENDING | 1 << ANSWER_NUMBER_SHIFT)
    );
    assert_eq!(harness.read(HV, PcrRegister::Granted), Some(0));
    assert!(
        !harness.write(HV, PcrRegister::Request, any(1), bits(HV)),
        "one at a time"
    );
    let asked = NOTICE_ASKED | 1 << 8 | 1 << 16 | 100 << 32;
    assert_eq!(harness.read(FW, PcrRegister::Notice), Some(asked));
    assert_eq!(harness.read(FW, PcrRegister::Notice), Some(0));
    assert!(
        !harness.write(FW, PcrRegister::Reply, REPLY_REFUSE, bits(FW)),
        "PMC0 was not asked for"
    );
    assert!(
        !harness.write(FW, PcrRegister::Reply, REPLY_YIELD | 1 << 8, bits(HV)),
        "only who knows the cookie gives a counter away"
    );
    assert_eq!(harness.held(FW).len(), 2);
    assert!(harness.write(FW, PcrRegister::Reply, REPLY_YIELD | 1 << 8, bits(FW)));
    assert_eq!(
        harness.read(HV, PcrRegister::Answer),
        Some(ANSWER_GRANTED | 1 << 16)
    );
    assert_eq!(harness.read(HV, PcrRegister::Granted), Some(0b10));
    assert_eq!(
        harness.read(HV, PcrRegister::Notice),
        Some(NOTICE_GRANTED | 1 << 16)
    );

    let give_back = REQUEST_RELEASE | REQUEST_POSITION;
    assert!(harness.write(FW, PcrRegister::Request, give_back, bits(FW)));
    assert_eq!(harness.bank().free(), set([0]));
    assert!(harness.write(FW, PcrRegister::Request, any(2), bits(FW)));
    assert!(harness.write(FW, PcrRegister::Request, REQUEST_WITHDRAW, bits(FW)));
    assert!(harness.write(HV, PcrRegister::Request, any(2), bits(HV)));
    assert_eq!(
        harness.read(HV, PcrRegister::Answer),
        Some(ANSWER_REFUSED | REASON_NONE_FREE << ANSWER_REASON_SHIFT | 2 << 16)
    );
}

/// The kernel has two components. One waits for counters and has gathered some. The
/// other does not know its cookie.
#[test]
fn who_does_not_know_the_cookie_neither_withdraws_nor_replies() {
    let mut harness = Harness::new(Scheme::Interacting, 4, plain());
    harness.end_phase();
    harness.any(HV, 2);
    let want_4 = REQUEST_RESERVE | 4 << REQUEST_WHICH_SHIFT;
    assert!(harness.write(KERNEL, PcrRegister::Request, want_4, bits(KERNEL)));
    assert_eq!(harness.held(KERNEL), set([0, 1]));
    let pending = Some(ANSWER_PENDING | 1 << ANSWER_NUMBER_SHIFT);
    for (guess, counted) in [(0, 0), (bits(HV), 1), (1 << 48, 0)] {
        let before = harness.unit.wrong_cookies();
        let withdraw = REQUEST_WITHDRAW;
        assert!(!harness.write(KERNEL, PcrRegister::Request, withdraw, guess));
        assert_eq!(harness.unit.wrong_cookies() - before, counted, "{guess:#x}");
        assert_eq!(harness.held(KERNEL), set([0, 1]));
        assert_eq!(harness.read(KERNEL, PcrRegister::Answer), pending);
    }
    assert!(harness.notices(KERNEL).is_empty());
    let (withdraw, cookie) = (REQUEST_WITHDRAW, bits(KERNEL));
    assert!(harness.write(KERNEL, PcrRegister::Request, withdraw, cookie));
    assert_eq!(harness.bank().free(), set([0, 1]));
    let word = NOTICE_REFUSED | 2 << 16 | REASON_WITHDRAWN << NOTICE_REASON_SHIFT;
    assert_eq!(harness.read(KERNEL, PcrRegister::Notice), Some(word));
    assert!(
        harness.write(KERNEL, PcrRegister::Request, withdraw, 0),
        "nothing is pending"
    );

    // The other way round: the kernel is asked for what one component holds.
    harness.any(KERNEL, 2);
    harness.any(HV, 1);
    harness.notices(KERNEL);
    for reply in [REPLY_REFUSE, REPLY_YIELD] {
        let reply = reply | 1 << 8;
        assert!(!harness.write(KERNEL, PcrRegister::Reply, reply, 0));
        assert!(!harness.write(KERNEL, PcrRegister::Reply, reply, bits(HV)));
        assert!(!harness.write(KERNEL, PcrRegister::Reply, reply, 1 << 48));
    }
    assert_eq!(harness.unit.wrong_cookies(), 3);
    assert_eq!(harness.unit.answer(HV).outcome, arbiter::Outcome::Pending);
    let yields = REPLY_YIELD | 1 << 8;
    assert!(harness.write(KERNEL, PcrRegister::Reply, yields, cookie));
    assert_eq!(harness.held(HV), set([1, 2, 3]));
    let lost = NOTICE_REVOKED | 1 << 8 | 1 << 16 | REASON_LENT << NOTICE_REASON_SHIFT;
    assert_eq!(harness.read(KERNEL, PcrRegister::Notice), Some(lost));
}

#[test]
fn what_is_malformed_faults_and_changes_nothing() {
    let mut harness = Harness::new(Scheme::Interacting, 2, plain());
    harness.any(FW, 1);
    harness.events();
    let before = harness.unit.answer(FW);
    for (register, value, cookie) in [
        (PcrRegister::Request, 0, 1),
        (PcrRegister::Request, 0x0101, 0),
        (PcrRegister::Request, 0x0101, u64::MAX),
        (PcrRegister::Reply, 0x101, 0),
        (PcrRegister::Reply, u64::MAX, 0),
        (PcrRegister::NoticeVector, 15, 0),
        (PcrRegister::NoticeVector, 256, 0),
        (PcrRegister::NoticeVector, 0x1_0000_0020, 0),
    ] {
        assert!(
            !harness.write(FW, register, value, cookie),
            "{register:?} {value:#x}"
        );
        assert_eq!(
            harness.events(),
            [(FW, None, Event::Refused(Reason::Malformed))]
        );
    }
    assert_eq!(harness.unit.answer(FW), before);
    for register in [
        PcrRegister::Answer,
        PcrRegister::Granted,
        PcrRegister::Notice,
    ] {
        assert!(!harness.write(FW, register, 0, 0), "read-only");
        assert_eq!(
            harness.read(Layer::GuestUser, register),
            None,
            "has no mailbox"
        );
    }
    for register in [PcrRegister::Request, PcrRegister::Reply] {
        assert_eq!(harness.read(FW, register), None, "write-only");
    }
    assert!(!harness.write(Layer::GuestUser, PcrRegister::Request, 0x101, 1));
}

#[test]
fn an_interrupt_tells_of_notices_and_belongs_to_the_layer_that_runs() {
    let policy = arbiter::Policy {
        firmware: share(0, 9, 5),
        ..plain()
    };
    let mut harness = Harness::new(Scheme::Interacting, 1, policy);
    harness.any(FW, 1);
    harness.any(HV, 1);
    assert_eq!(harness.unit.take_notice(), None, "no vector");
    assert!(harness.write(FW, PcrRegister::NoticeVector, 0x20, 0));
    assert_eq!(harness.read(FW, PcrRegister::NoticeVector), Some(0x20));
    assert_eq!(
        harness.read(KERNEL, PcrRegister::NoticeVector),
        Some(0),
        "its own"
    );
    assert_eq!(harness.unit.take_notice(), Some(0x20), "one waited");
    assert_eq!(harness.unit.take_notice(), None, "once");
    harness.at(100);
    harness.any(HV, 1);
    harness.end_phase();
    assert_eq!(
        harness.unit.take_notice(),
        None,
        "nobody is there to take the firmware's"
    );

    assert!(harness.write(KERNEL, PcrRegister::NoticeVector, 0xec, 0));
    harness.this(KERNEL, 0);
    harness.at(10_000);
    assert_eq!(
        harness.unit.take_notice(),
        None,
        "it was told by the answer"
    );
    harness.notices(KERNEL);
    assert!(harness.write(KERNEL, PcrRegister::NoticeVector, 0, 0));
    assert_eq!(harness.unit.take_notice(), None);
}

#[test]
fn the_queue_is_bounded_and_tells_what_it_lost() {
    let mut harness = Harness::new(Scheme::Interacting, 1, plain());
    harness.any(FW, 1);
    for _ in 0..40 {
        harness.any(HV, 1);
        harness.withdraw(HV);
    }
    let first = harness.read(FW, PcrRegister::Notice).unwrap();
    assert_ne!(first & NOTICE_LOST, 0);
    let rest = harness.notices(FW);
    assert_eq!(rest.len(), 15);
    assert!(rest.iter().all(|notice| !notice.lost));
    assert_eq!(
        rest.last().unwrap().kind,
        NoticeKind::Cancelled,
        "the newest is there"
    );
    harness.any(HV, 1);
    assert!(!harness.notices(FW)[0].lost);
}

#[test]
fn fixed_counters_are_asked_for_by_position() {
    let counters = PerKind {
        programmable: 1,
        fixed: 2,
    };
    let mut harness = Harness::with(Scheme::Interacting, counters, plain(), true);
    let fixed = CounterId::Fixed(1);
    harness.reserve(FW, Wanted::This(fixed), None);
    assert_eq!(harness.held(FW).bits(), 1 << 33);
    harness.reserve(HV, Wanted::This(fixed), None);
    assert_eq!(harness.notices(FW)[0].word() >> 8 & 0xff, 33);
    harness.at(200);
    assert_eq!(harness.held(HV).bits(), 1 << 33, "by priority");
}

/// With the policy, the guard, the names and all that the mailbox keeps.
#[test]
fn a_vcpu_takes_at_most_4_kib() {
    // As many as any model here can have, and more.
    let (programmable, fixed) = (16, 8);
    let slots = size_of::<Option<arbiter::Reservation>>() * (programmable + fixed);
    let all = size_of::<arbiter::PcrUnit>() + slots;
    assert!(
        all <= 4096,
        "{all} bytes, {slots} of them for {} counters",
        programmable + fixed
    );
}
