//! Who may take a counter: every division of three counters, every policy of
//! small numbers, against a search for a way to satisfy everybody.

use arbiter::{Bank, CounterId, Layer, PerKind, Policy, PolicyError, Reason, Share};

use super::fixture::hold;

const HOLDERS: [Option<Layer>; 6] = [
    None,
    Some(Layer::Firmware),
    Some(Layer::Hypervisor),
    Some(Layer::GuestKernel),
    Some(Layer::HostTool),
    Some(Layer::GuestUser),
];

fn party(layer: Layer) -> Option<usize> {
    match layer {
        Layer::Firmware => Some(0),
        Layer::Hypervisor | Layer::HostTool => Some(1),
        Layer::GuestKernel => Some(2),
        Layer::GuestUser => None,
    }
}

fn policy(min: [u8; 3], max: [u8; 3], kind: CounterId) -> Policy {
    let number = |n| match kind {
        CounterId::Programmable(_) | CounterId::Ibs(_) => PerKind {
            programmable: n,
            fixed: 0,
        },
        CounterId::Fixed(_) => PerKind {
            programmable: 0,
            fixed: n,
        },
    };
    let share = |party: usize| Share {
        min: number(min[party]),
        max: number(max[party]),
        ..Share::FREE
    };
    Policy {
        firmware: share(0),
        hypervisor: share(1),
        kernel: share(2),
        grace_ms: 0,
    }
}

/// Whether free counters can be given out so that all others have their minimum.
fn can_be_kept(owners: &[Option<usize>], min: [u8; 3], taker: usize) -> bool {
    match owners.iter().position(Option::is_none) {
        Some(free) => (0..3).any(|party| {
            let mut given = owners.to_vec();
            given[free] = Some(party);
            can_be_kept(&given, min, taker)
        }),
        None => (0..3).all(|party| {
            let has = owners.iter().filter(|owner| **owner == Some(party));
            party == taker || has.count() >= usize::from(min[party])
        }),
    }
}

struct Case<'a> {
    holders: &'a [Option<Layer>; 3],
    min: [u8; 3],
    max: [u8; 3],
}

/// All three questions of all layers, for one kind of counters.
fn check(case: &Case<'_>, name: fn(u8) -> CounterId) {
    let Case { holders, min, max } = *case;
    let mut bank = match name(0) {
        CounterId::Programmable(_) | CounterId::Ibs(_) => Bank::new(3, 1),
        CounterId::Fixed(_) => Bank::new(1, 3),
    };
    for (n, holder) in (0..).zip(holders) {
        if let Some(holder) = holder {
            hold(&mut bank, name(n), *holder);
        }
    }
    // Users hold nothing that counts for anybody, but it is taken.
    const NOBODY: usize = 9;
    let owners = holders.map(|holder| holder.map(|layer| party(layer).unwrap_or(NOBODY)));
    let policy = policy(min, max, name(0));
    for layer in Layer::ALL {
        for n in 0..3 {
            let expected = match party(layer) {
                None => Err(Reason::Layer),
                Some(taker) => {
                    let held = owners.iter().filter(|owner| **owner == Some(taker)).count();
                    let mut after = owners;
                    after[usize::from(n)] = Some(taker);
                    match (
                        held < usize::from(max[taker]),
                        can_be_kept(&after, min, taker),
                    ) {
                        (false, _) => Err(Reason::Maximum),
                        (true, false) => Err(Reason::Minimum),
                        (true, true) => Ok(()),
                    }
                }
            };
            let found = policy.admit(&bank, layer, name(n));
            assert_eq!(
                found, expected,
                "{layer} {n} {holders:?} min {min:?} max {max:?}"
            );
        }
    }
}

fn every_policy(mut with: impl FnMut([u8; 3], [u8; 3])) {
    for numbers in 0..27 {
        let min = [numbers % 3, numbers / 3 % 3, numbers / 9];
        for max in [[u8::MAX; 3], [1, 2, 0], [2, 1, 3], [0, 3, 1]] {
            with(min, max);
        }
    }
}

#[test]
fn every_request_under_every_policy() {
    for choice in 0..HOLDERS.len().pow(3) {
        let holders = [1, 6, 36].map(|power| HOLDERS[choice / power % 6]);
        every_policy(|min, max| {
            let case = Case {
                holders: &holders,
                min,
                max,
            };
            check(&case, CounterId::Programmable);
            check(&case, CounterId::Fixed);
        });
    }
}

/// A policy that fits can be kept from the first request on: no layer below its
/// minimum is ever refused for the minimum of another.
#[test]
fn a_policy_that_fits_can_always_be_kept() {
    every_policy(|min, _| {
        let policy = policy(min, [u8::MAX; 3], CounterId::Programmable(0));
        if policy.fits(3, 0).is_err() {
            return;
        }
        // Every order in which six requests can come.
        for order in 0..3_usize.pow(6) {
            let mut bank = Bank::new(3, 0);
            for turn in 0..6 {
                let layer = Policy::LAYERS[order / 3_usize.pow(turn) % 3];
                let Some(counter) = bank.free().iter().next() else {
                    break;
                };
                let below = bank.held_by(layer).len() < u32::from(min[party(layer).expect("one")]);
                let admitted = policy.admit(&bank, layer, counter);
                assert!(admitted.is_ok() || !below, "{layer} {min:?} {bank:?}");
                if admitted.is_ok() {
                    hold(&mut bank, counter, layer);
                }
            }
            for layer in Policy::LAYERS {
                let short = u32::from(min[party(layer).expect("one")])
                    .saturating_sub(bank.held_by(layer).len());
                assert!(short <= bank.free().len(), "{layer} {min:?} {bank:?}");
            }
        }
    });
}

fn check_fits(policy: Policy, there: (u8, u8), expected: Result<(), &str>) {
    let found = policy
        .fits(there.0, there.1)
        .map_err(|error| error.to_string());
    assert_eq!(found, expected.map_err(str::to_owned));
}

#[test]
fn a_policy_that_cannot_be_kept_is_named() {
    let programmable = CounterId::Programmable(0);
    check_fits(Policy::default(), (1, 0), Ok(()));
    check_fits(
        Policy::default(),
        (0, 3),
        Err("the layers' minima add up to 1 programmable counters and the PMU has 0: lower them"),
    );
    check_fits(policy([1, 1, 2], [4; 3], programmable), (4, 0), Ok(()));
    check_fits(
        policy([1, 2, 2], [4; 3], programmable),
        (4, 4),
        Err("the layers' minima add up to 5 programmable counters and the PMU has 4: lower them"),
    );
    check_fits(
        policy([255, 255, 255], [255; 3], CounterId::Fixed(0)),
        (8, 3),
        Err("the layers' minima add up to 765 fixed counters and the PMU has 3: lower them"),
    );
    check_fits(
        policy([0, 0, 3], [1, 1, 2], CounterId::Fixed(0)),
        (8, 8),
        Err("the guest kernel is to have at least 3 and at most 2 counters: lower the minimum"),
    );
}

#[test]
fn a_lease_lasts() {
    for (lease_ms, expected) in [
        (None, Ok(())),
        (Some(1), Ok(())),
        (
            Some(0),
            Err("the hypervisor's leases are to last 0 ms: give at least 1, or none for no lease"),
        ),
    ] {
        let mut policy = Policy::default();
        policy.hypervisor.lease_ms = lease_ms;
        check_fits(policy, (1, 0), expected);
    }
}

#[test]
fn fits_is_the_sum_of_the_minima() {
    every_policy(|min, max| {
        for there in 0..8 {
            let found = policy(min, max, CounterId::Fixed(0)).fits(0, there);
            let crossed = min.iter().zip(max).any(|(min, max)| *min > max);
            let sum: u16 = min.iter().map(|min| u16::from(*min)).sum();
            match found {
                Ok(()) => assert!(!crossed && sum <= u16::from(there)),
                Err(PolicyError::MinOverMax { min, max, .. }) => assert!(crossed && min > max),
                Err(PolicyError::NoTime { layer }) => panic!("{layer} has no lease"),
                Err(PolicyError::TooFew { wanted, .. }) => {
                    assert!(!crossed && wanted == sum && sum > u16::from(there));
                }
            }
        }
    });
}
