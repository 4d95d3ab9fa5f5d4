//! Every layer against every counter under every kind of grant.

use arbiter::{Access, CounterId, CounterSet, Denial, Grant, Layer, Verdict};

/// Every counter that a set can hold, and some that it cannot.
fn counters() -> impl Iterator<Item = CounterId> {
    (0..=40)
        .chain([255])
        .flat_map(|n| [CounterId::Programmable(n), CounterId::Fixed(n)])
}

fn check(grant: &Grant, held: &[CounterId], denied: Verdict) {
    for layer in Layer::ALL {
        for counter in counters() {
            for access in [Access::Read, Access::Write] {
                let bound = matches!(
                    layer,
                    Layer::Firmware | Layer::GuestKernel | Layer::GuestUser
                );
                let expected = if !bound || held.contains(&counter) {
                    Verdict::Permit
                } else {
                    denied
                };
                assert_eq!(
                    grant.check(layer, counter, access),
                    expected,
                    "{layer} {access:?} {counter}"
                );
                assert_eq!(grant.holds(counter), held.contains(&counter), "{counter}");
            }
        }
    }
}

#[test]
fn verdicts_follow_the_grant() {
    let some = [
        CounterId::Programmable(0),
        CounterId::Programmable(31),
        CounterId::Fixed(2),
    ];
    check(&Grant::of(some, Denial::Fault), &some, Verdict::Fault);
    check(
        &Grant::of(some, Denial::Drop { read_as: 0 }),
        &some,
        Verdict::Drop { read_as: 0 },
    );
    check(
        &Grant::of([], Denial::Drop { read_as: u64::MAX }),
        &[],
        Verdict::Drop { read_as: u64::MAX },
    );
    let all: Vec<_> = counters().filter(|c| c.global_bit().is_some()).collect();
    check(&Grant::everything(), &all, Verdict::Fault);
}

#[test]
fn every_pair_of_counters_makes_a_grant_of_just_that_pair() {
    for a in counters() {
        for b in counters() {
            let grant = Grant::of([a, b], Denial::Fault);
            for c in counters() {
                let held = (c == a || c == b) && c.global_bit().is_some();
                assert_eq!(grant.holds(c), held, "{c} in a grant of {a} and {b}");
            }
        }
    }
}

#[test]
fn sets_are_laid_out_as_the_global_registers() {
    let set: CounterSet = [CounterId::Programmable(3), CounterId::Fixed(1)]
        .into_iter()
        .collect();
    assert_eq!(set.bits(), 0x2_0000_0008);
    assert_eq!(set.len(), 2);
    assert!(!set.is_empty());
    assert_eq!(
        set.iter().collect::<Vec<_>>(),
        [CounterId::Programmable(3), CounterId::Fixed(1)]
    );
    assert_eq!(format!("{set:?}"), "{Programmable(3), Fixed(1)}");
    let mut set = CounterSet::EMPTY;
    assert!(!set.insert(CounterId::Fixed(32)) && set.is_empty());
}

#[test]
fn counters_and_layers_have_names() {
    assert_eq!(CounterId::Programmable(4).to_string(), "PMC4");
    assert_eq!(CounterId::Fixed(2).to_string(), "FIXED2");
    assert!(CounterId::Programmable(31) < CounterId::Fixed(0));
    assert_eq!(Layer::GuestUser.to_string(), "guest user");
}
