//! What holds under every scheme, whatever layers do.

use arbiter::{
    Control, CounterId, CounterSet, Event, Layer, Outcome, PcrRegister, PerKind, Policy, Reason,
    Reply, Request, Scheme, Share, Wanted,
};
use proptest::prelude::*;

use crate::harness::{FW, HV, Harness, KERNEL, bits, cookie};

const COUNTERS: PerKind = PerKind {
    programmable: 6,
    fixed: 2,
};

#[derive(Clone, Copy, Debug)]
enum Do {
    Ask(Wanted, Option<u32>),
    Release(CounterId),
    Withdraw,
    Reply(CounterId, bool),
    /// A raw write to a register of the mailbox.
    Raw(u8, u64),
    Manage(CounterId, u64, u64),
    Lend(CounterId, bool),
    EndPhase,
    Wait(u64),
}

fn counter() -> impl Strategy<Value = CounterId> {
    // One more of each kind than there is.
    prop_oneof![
        (0..7_u8).prop_map(CounterId::Programmable),
        (0..3_u8).prop_map(CounterId::Fixed)
    ]
}

fn cookies() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(bits(FW)),
        Just(bits(HV)),
        Just(bits(KERNEL)),
        Just(u64::MAX)
    ]
}

fn action() -> impl Strategy<Value = Do> {
    let wanted = prop_oneof![
        (1..8_u8).prop_map(Wanted::Any),
        counter().prop_map(Wanted::This)
    ];
    let lease = prop::option::of(1..500_u32);
    prop_oneof![
        4 => (wanted, lease).prop_map(|(wanted, lease)| Do::Ask(wanted, lease)),
        2 => counter().prop_map(Do::Release),
        1 => Just(Do::Withdraw),
        3 => (counter(), any::<bool>()).prop_map(|(counter, yields)| Do::Reply(counter, yields)),
        1 => (0..3_u8, any::<u64>()).prop_map(|(which, value)| Do::Raw(which, value)),
        3 => (counter(), cookies(), cookies()).prop_map(|(counter, a, b)| Do::Manage(counter, a, b)),
        1 => (counter(), any::<bool>()).prop_map(|(counter, lends)| Do::Lend(counter, lends)),
        1 => Just(Do::EndPhase),
        2 => (1..300_u64).prop_map(Do::Wait),
    ]
}

fn layer() -> impl Strategy<Value = Layer> {
    prop::sample::select(&Policy::LAYERS[..])
}

prop_compose! {
    fn share()(min in 0..2_u8, min_fixed in 0..1_u8, more in 0..7_u8, priority in 0..4_u8,
               lease_ms in prop::option::weighted(0.3, 50..400_u32)) -> Share {
        Share {
            min: PerKind { programmable: min, fixed: min_fixed },
            max: PerKind { programmable: min + more, fixed: min_fixed + more },
            priority,
            lease_ms,
        }
    }
}

prop_compose! {
    fn policy()(firmware in share(), hypervisor in share(), kernel in share(),
                grace_ms in 0..150_u32) -> Policy {
        Policy { firmware, hypervisor, kernel, grace_ms }
    }
}

fn scheme() -> impl Strategy<Value = Scheme> {
    prop::sample::select(&Scheme::ALL[..])
}

fn act(harness: &mut Harness, layer: Layer, action: Do) {
    let own = cookie(layer);
    match action {
        Do::Ask(wanted, lease_ms) => {
            let request = Request::Reserve {
                wanted,
                cookie: own,
                lease_ms,
                event: None,
            };
            let _ = harness.request(layer, request);
        }
        Do::Release(counter) => {
            let _ = harness.request(
                layer,
                Request::Release {
                    counter,
                    cookie: own,
                },
            );
        }
        Do::Withdraw => {
            harness.withdraw(layer);
        }
        Do::Reply(counter, yields) => {
            let done = harness.cx(|unit, cx| unit.reply(layer, Reply { counter, yields }, cx));
            harness.note(done.unwrap_or(arbiter::Effects::NONE));
        }
        Do::Raw(which, value) => {
            let registers = [
                PcrRegister::Request,
                PcrRegister::Reply,
                PcrRegister::NoticeVector,
            ];
            harness.write(layer, registers[usize::from(which)], value, bits(layer));
        }
        Do::Manage(counter, presented, value) => {
            harness.write(layer, PcrRegister::ManagementKey(counter), value, presented);
        }
        Do::Lend(counter, lends) => {
            let control = Control::INITIAL.with_lend(lends).bits();
            harness.write(layer, PcrRegister::Control(counter), control, bits(layer));
        }
        Do::EndPhase => {
            harness.write(layer, PcrRegister::Phase, 1, 0);
        }
        Do::Wait(ms) => {
            harness.at(harness.now + ms);
        }
    }
}

fn of_kind(set: CounterSet, fixed: bool) -> u32 {
    let half = if fixed {
        u64::from(u32::MAX) << 32
    } else {
        u64::from(u32::MAX)
    };
    (set & CounterSet::from_bits(half)).len()
}

/// Every counter is free or one layer's, no layer has too many, and what is
/// free is enough for everybody's minimum.
fn check(harness: &Harness) -> Result<(), TestCaseError> {
    let policy = *harness.unit.policy();
    let mut all = harness.bank().free();
    for layer in Policy::LAYERS {
        prop_assert!((all & harness.held(layer)).is_empty());
        all = all | harness.held(layer);
    }
    prop_assert_eq!(all, harness.bank().counters());
    for (fixed, sample) in [
        (false, CounterId::Programmable(0)),
        (true, CounterId::Fixed(0)),
    ] {
        let mut owed = 0;
        for layer in Policy::LAYERS {
            let share = policy.share(layer).unwrap();
            let held = of_kind(harness.held(layer), fixed);
            prop_assert!(
                held <= u32::from(share.max.of(sample)),
                "{layer} has {held}"
            );
            owed += u32::from(share.min.of(sample)).saturating_sub(held);
        }
        prop_assert!(
            of_kind(harness.bank().free(), fixed) >= owed,
            "a minimum was given away"
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn shares_hold_and_no_counter_leaks(
        scheme in scheme(), policy in policy(),
        actions in prop::collection::vec((layer(), action()), 1..80),
    ) {
        prop_assume!(policy.fits(COUNTERS.programmable, COUNTERS.fixed).is_ok());
        let mut harness = Harness::with(scheme, COUNTERS, policy, true);
        for (layer, action) in actions {
            let before: Vec<_> = Policy::LAYERS.map(|layer| harness.held(layer)).to_vec();
            harness.cleared = CounterSet::EMPTY;
            act(&mut harness, layer, action);
            check(&harness)?;
            // Whoever comes to a counter by the arbiter's hand finds it clear;
            // and what somebody held and is free now is clear as well.
            for (layer, before) in Policy::LAYERS.into_iter().zip(before) {
                let gone = before & !harness.held(layer);
                let mut handed_over = CounterSet::EMPTY;
                for (_, counter, event) in harness.events_so_far() {
                    if let (Some(counter), Event::HandedOver { .. }) = (counter, event) {
                        handed_over.insert(counter);
                    }
                }
                prop_assert!((gone & !harness.cleared & !handed_over).is_empty());
            }
            for (layer, _, event) in harness.events() {
                if let Event::Revoking { wanted_by, .. } = event {
                    let priority = |layer| policy.share(layer).unwrap().priority;
                    prop_assert!(priority(wanted_by) > priority(layer));
                }
                if event == Event::Revoked(Reason::Priority) || matches!(event, Event::Asked { .. }) {
                    prop_assert!(scheme != Scheme::Independent);
                }
            }
        }
    }

    #[test]
    fn every_request_is_answered_in_time(
        scheme in scheme(), policy in policy(),
        actions in prop::collection::vec((layer(), action()), 1..40),
    ) {
        prop_assume!(policy.fits(COUNTERS.programmable, COUNTERS.fixed).is_ok());
        let mut harness = Harness::with(scheme, COUNTERS, policy, true);
        for (layer, action) in actions {
            act(&mut harness, layer, action);
        }
        // Each counter can be asked for once and be announced once.
        let longest = 2 * u64::from(COUNTERS.programmable) * u64::from(policy.grace_ms);
        harness.at(harness.now + longest);
        for layer in Policy::LAYERS {
            prop_assert_ne!(harness.unit.answer(layer).outcome, Outcome::Pending);
        }
    }

    /// The kernel's minimum is there when it comes, whatever firmware did.
    #[test]
    fn a_greedy_firmware_leaves_the_kernel_its_minimum(
        scheme in scheme(), least in 1..6_u8, leases in any::<bool>(),
        actions in prop::collection::vec(action(), 0..60),
    ) {
        let policy = Policy {
            firmware: Share { priority: 9, lease_ms: leases.then_some(50), ..Share::FREE },
            kernel: Share { min: PerKind { programmable: least, fixed: 0 }, ..Share::FREE },
            ..Policy::default()
        };
        let mut harness = Harness::with(scheme, COUNTERS, policy, true);
        for n in 0..COUNTERS.programmable {
            harness.this(FW, n);
            harness.write(FW, PcrRegister::ManagementKey(CounterId::Programmable(n)), 5, 0);
        }
        for action in actions {
            act(&mut harness, FW, action);
        }
        harness.write(FW, PcrRegister::Phase, 1, 0);
        let outcome = harness.any(KERNEL, least).outcome;
        prop_assert!(matches!(outcome, Outcome::Granted(_)), "{:?}", outcome);
    }

    /// Nothing that a layer does makes another's queue longer than it may be.
    #[test]
    fn notices_are_bounded(
        policy in policy(),
        actions in prop::collection::vec((layer(), action()), 1..200),
    ) {
        prop_assume!(policy.fits(COUNTERS.programmable, COUNTERS.fixed).is_ok());
        let mut harness = Harness::with(Scheme::Interacting, COUNTERS, policy, true);
        for (layer, action) in actions {
            act(&mut harness, layer, action);
        }
        for layer in Policy::LAYERS {
            let notices = harness.notices(layer);
            prop_assert!(notices.len() <= 16);
            prop_assert!(notices.iter().skip(1).all(|notice| !notice.lost));
        }
    }
}
