//! Counter assignment: tables, and a brute-force search as the judge.

use pmu_virt::{
    Constraint, CounterId, Demand, MAX_DEMANDS, SlotIndex, SlotSet, assign, assign_most,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn slots(indices: impl IntoIterator<Item = u8>) -> SlotSet {
    indices.into_iter().map(SlotIndex).collect()
}

fn demand(n: u8, constraint: Constraint, held: Option<u8>) -> Demand {
    Demand {
        counter: CounterId::Programmable(n),
        constraint,
        held: held.map(SlotIndex),
    }
}

fn on(indices: &[u8]) -> Constraint {
    Constraint::slots(slots(indices.iter().copied()))
}

fn paired(indices: &[u8]) -> Constraint {
    Constraint {
        paired: true,
        ..on(indices)
    }
}

fn exclusive(name: &'static str, indices: &[u8]) -> Constraint {
    Constraint {
        exclusive: Some(name),
        ..on(indices)
    }
}

/// Demands PMC0, PMC1, … with their held slots, on slots 0 to 7; `expected`
/// are their slots or the message.
#[track_caller]
fn check(demands: &[(Constraint, Option<u8>)], expected: Result<&[u8], &str>) {
    let demands: Vec<Demand> = (0..)
        .zip(demands)
        .map(|(n, (constraint, held))| demand(n, *constraint, *held))
        .collect();
    let placed = assign(&demands, SlotSet::below(8)).map(|placement| {
        (0..demands.len())
            .map(|index| placement.slot(index).expect("every demand is placed").0)
            .collect::<Vec<u8>>()
    });
    let expected = expected.map(<[u8]>::to_vec).map_err(str::to_owned);
    assert_eq!(placed.map_err(|error| error.to_string()), expected);
}

#[test]
fn places_in_order() {
    check(&[], Ok(&[]));
    check(&[(on(&[0, 1]), None), (on(&[0, 1]), None)], Ok(&[0, 1]));
}

#[test]
fn moves_a_counter_that_stands_in_the_way() {
    check(&[(on(&[0, 1]), Some(0)), (on(&[0]), None)], Ok(&[1, 0]));
    // A chain: each has to move by one.
    check(
        &[
            (on(&[0, 1]), Some(0)),
            (on(&[1, 2]), Some(1)),
            (on(&[2, 3]), Some(2)),
            (on(&[0]), None),
        ],
        Ok(&[1, 2, 3, 0]),
    );
}

#[test]
fn keeps_what_can_stay() {
    check(
        &[(on(&[0, 1, 5]), Some(5)), (on(&[0, 5]), None)],
        Ok(&[5, 0]),
    );
    // A newcomer takes a slot that nobody holds, though 0 would do.
    check(&[(on(&[0, 1]), None), (on(&[0, 1]), Some(0))], Ok(&[1, 0]));
    // A slot that is no longer allowed is given up.
    check(&[(on(&[1, 2]), Some(0))], Ok(&[1]));
    // Of the two that could make room, the pair stays.
    check(
        &[
            (paired(&[0, 1, 2, 3]), Some(0)),
            (on(&[2, 6]), Some(2)),
            (on(&[0, 2]), None),
        ],
        Ok(&[0, 6, 2]),
    );
}

#[test]
fn pairs_take_an_even_slot_and_the_next() {
    check(&[(paired(&[1, 2, 3, 4]), None)], Ok(&[2]));
    check(
        &[(on(&[0, 1, 2]), Some(0)), (paired(&[0, 1]), None)],
        Ok(&[2, 0]),
    );
    check(
        &[(paired(&[0, 1, 2, 3]), Some(2)), (paired(&[2, 3]), None)],
        Ok(&[0, 2]),
    );
}

#[test]
fn names_the_conflict() {
    check(
        &[
            (on(&[1, 2]), None),
            (on(&[3, 4]), None),
            (on(&[0, 3]), None),
            (on(&[1, 2]), None),
            (on(&[5]), None),
            (on(&[1, 2]), None),
        ],
        Err("counters PMC0, PMC3 and PMC5 need slots 1 and 2"),
    );
    check(
        &[(on(&[3]), None), (on(&[3]), Some(3))],
        Err("counters PMC0 and PMC1 need slot 3"),
    );
    check(
        &[(on(&[9]), None)],
        Err("counter PMC0 finds no free slot that can count for it"),
    );
    check(
        &[(paired(&[1, 2]), None)],
        Err("counter PMC0 needs slots 1 and 2 (PMC0: an even slot and the next)"),
    );
    check(
        &[(paired(&[4, 5]), None), (on(&[5]), None), (on(&[0]), None)],
        Err("counters PMC0 and PMC1 need slots 4 and 5 (PMC0: an even slot and the next)"),
    );
    check(
        &[
            (exclusive("northbridge", &[0, 1]), None),
            (on(&[0]), None),
            (exclusive("northbridge", &[2]), None),
            (exclusive("northbridge", &[3]), None),
        ],
        Err("counters PMC0, PMC2 and PMC3 exclude each other: \
             only one can count 'northbridge' events"),
    );
}

#[test]
fn more_demands_than_can_be_placed_are_refused() {
    let surplus = u8::try_from(MAX_DEMANDS).expect("a number");
    let demands: Vec<Demand> = (0..=surplus)
        .map(|n| demand(n % 17, Constraint::any(128), None))
        .collect();
    let error = assign(&demands, SlotSet::below(128)).expect_err("one too many");
    assert_eq!(
        error.to_string(),
        "counter PMC13 finds no free slot that can count for it"
    );
    assert_eq!(
        assign_most(&demands, SlotSet::below(128), 0).placed(),
        MAX_DEMANDS
    );
    assert_eq!(assign_most(&[], SlotSet::below(128), 3).placed(), 0);
}

#[test]
fn the_last_slots_can_be_used() {
    let demands = [
        demand(0, Constraint::any(128), Some(127)),
        demand(1, paired(&[126, 127, 124, 125]), None),
        demand(2, Constraint::any(128), Some(255)),
    ];
    let placement = assign(&demands, SlotSet::below(128)).expect("there is room");
    assert_eq!(placement.slot(0), Some(SlotIndex(127)));
    assert_eq!(placement.slot(1), Some(SlotIndex(124)));
    assert_eq!(placement.slot(2), Some(SlotIndex(0)));
}

#[test]
fn hopeless_pairs_do_not_take_forever() {
    // Eight pairs on seven places, and eight singles on seven slots; a blind
    // search would try 10^14 ways.
    let demands: Vec<Demand> = (0..16)
        .map(|n| match n % 2 {
            0 => demand(
                n,
                Constraint {
                    paired: true,
                    ..Constraint::any(14)
                },
                None,
            ),
            _ => demand(n, on(&[64, 65, 66, 67, 68, 69, 70]), None),
        })
        .collect();
    let error = assign(&demands, SlotSet::below(128)).expect_err("too few slots");
    assert_eq!(error.counters.len(), 8);
    assert_eq!(assign_most(&demands, SlotSet::below(128), 0).placed(), 14);
}

/// Every placement of all demands: none, or the fewest moves.
fn brute_force(demands: &[Demand], free: SlotSet) -> Option<u32> {
    let Some((demand, rest)) = demands.split_first() else {
        return Some(0);
    };
    let Constraint {
        paired,
        exclusive,
        slots,
    } = demand.constraint;
    if exclusive.is_some()
        && rest
            .iter()
            .any(|other| other.constraint.exclusive == exclusive)
    {
        return None;
    }
    (0..UNIVERSE)
        .filter_map(|slot| {
            let mut left = free;
            let taken = if paired {
                vec![slot, slot + 1]
            } else {
                vec![slot]
            };
            for slot in taken.iter().map(|slot| SlotIndex(*slot)) {
                if !left.contains(slot) || !slots.contains(slot) {
                    return None;
                }
                left.remove(slot);
            }
            if paired && slot % 2 != 0 {
                return None;
            }
            let moved = demand.held.is_some_and(|held| held != SlotIndex(slot));
            Some(brute_force(rest, left)? + u32::from(moved))
        })
        .min()
}

const UNIVERSE: u8 = 6;

fn some_demands() -> impl Strategy<Value = (Vec<Demand>, SlotSet)> {
    let slot_set = || {
        (0u8..1 << UNIVERSE)
            .prop_map(|bits| slots((0..UNIVERSE).filter(move |slot| bits & (1 << slot) != 0)))
    };
    let constraint = (
        slot_set(),
        prop::bool::weighted(0.25),
        option::weighted(0.15, prop_oneof![Just("a"), Just("b")]),
    )
        .prop_map(|(slots, paired, exclusive)| Constraint {
            slots,
            paired,
            exclusive,
        });
    let one = (constraint, option::of(0..UNIVERSE));
    let free = prop_oneof![3 => Just(SlotSet::below(usize::from(UNIVERSE))), 1 => slot_set()];
    (vec(one, 0..6), free).prop_map(|(demands, free)| {
        let mut taken = SlotSet::EMPTY;
        let demands = (0..)
            .zip(demands)
            .map(|(n, (constraint, held))| {
                // What is held is a placement that once was possible.
                let held =
                    held.filter(|slot| constraint.allows(SlotIndex(*slot), free.difference(taken)));
                if let Some(slot) = held {
                    taken = taken.union(constraint.taken_at(SlotIndex(slot)));
                }
                demand(n, constraint, held)
            })
            .collect();
        (demands, free)
    })
}

/// Whether no slot is used twice, and each suits.
fn is_valid(
    demands: &[Demand],
    free: SlotSet,
    slot_of: impl Fn(usize) -> Option<SlotIndex>,
) -> bool {
    let mut left = free;
    (0..demands.len()).all(|index| {
        let Some(slot) = slot_of(index) else {
            return true;
        };
        let fits = demands[index].constraint.allows(slot, left);
        left = left.difference(demands[index].constraint.taken_at(slot));
        fits
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Fails only where no placement exists; moves as few as any; and names
    /// a set that cannot be placed but can without any one of its members.
    #[test]
    fn agrees_with_brute_force((demands, free) in some_demands()) {
        match (assign(&demands, free), brute_force(&demands, free)) {
            (Ok(placement), Some(fewest)) => {
                prop_assert_eq!(placement.placed(), demands.len());
                prop_assert!(is_valid(&demands, free, |index| placement.slot(index)));
                let moves = (0..).zip(&demands).filter(|(index, demand)| {
                    demand.held.is_some() && demand.held != placement.slot(*index)
                });
                prop_assert_eq!(u32::try_from(moves.count()), Ok(fewest));
            }
            (Err(error), None) => {
                let named: Vec<Demand> = demands
                    .iter()
                    .filter(|demand| error.counters.contains(demand.counter))
                    .copied()
                    .collect();
                prop_assert_eq!(brute_force(&named, free), None);
                if error.exclusive.is_none() {
                    for index in 0..named.len() {
                        let mut fewer = named.clone();
                        fewer.remove(index);
                        prop_assert!(brute_force(&fewer, free).is_some());
                    }
                } else {
                    prop_assert!(named.iter().all(|demand| demand.constraint.exclusive == error.exclusive));
                }
            }
            (found, fewest) => prop_assert!(false, "{found:?}, brute force {fewest:?}"),
        }
    }

    /// A demand is placed if and only if it fits with those placed before it.
    #[test]
    fn most_is_greedy_by_priority((demands, free) in some_demands(), first in 0usize..20) {
        let placement = assign_most(&demands, free, first);
        prop_assert!(is_valid(&demands, free, |index| placement.slot(index)));
        let mut before: Vec<Demand> = Vec::new();
        for step in 0..demands.len() {
            let index = (first + step) % demands.len();
            before.push(demands[index]);
            let fits = brute_force(&before, free).is_some();
            prop_assert_eq!(placement.slot(index).is_some(), fits);
            if !fits {
                before.pop();
            }
        }
        // As few of them move as could.
        let moves = |slots: &dyn Fn(usize) -> Option<SlotIndex>, demands: &[Demand]| {
            let moved = demands.iter().enumerate().filter(|(index, demand)| {
                let may_stay = demand.held.filter(|held| demand.constraint.allows(*held, free));
                may_stay.is_some() && slots(*index) != may_stay
            });
            moved.count()
        };
        let placed: Vec<(Demand, Option<SlotIndex>)> = demands
            .iter()
            .enumerate()
            .map(|(index, demand)| (*demand, placement.slot(index)))
            .filter(|(_, slot)| slot.is_some())
            .collect();
        let (kept, at): (Vec<Demand>, Vec<_>) = placed.into_iter().unzip();
        let least = assign(&kept, free).expect("they were placed");
        prop_assert_eq!(
            moves(&|index| at[index], &kept),
            moves(&|index| least.slot(index), &kept)
        );
    }

    /// A placement that is complete and possible is left as it is.
    #[test]
    fn nothing_moves_without_need((demands, free) in some_demands()) {
        if let Ok(placement) = assign(&demands, free) {
            let held: Vec<Demand> = (0..)
                .zip(&demands)
                .map(|(index, demand)| Demand { held: placement.slot(index), ..*demand })
                .collect();
            prop_assert_eq!(assign(&held, free), Ok(placement));
        }
    }
}

#[test]
fn slot_sets_are_sets() {
    let set = slots([0, 7, 64, 127]);
    assert_eq!(set.len(), 4);
    assert_eq!(
        set.iter().map(|slot| slot.0).collect::<Vec<_>>(),
        [0, 7, 64, 127]
    );
    assert_eq!(set.intersection(SlotSet::below(65)), slots([0, 7, 64]));
    assert_eq!(set.difference(SlotSet::below(8)), slots([64, 127]));
    assert_eq!(slots([1]).union(slots([2])), slots([1, 2]));
    assert_eq!(slots([128, 255]), SlotSet::EMPTY);
    assert_eq!(SlotSet::below(128).len(), 128);
    assert_eq!(SlotSet::below(usize::MAX), SlotSet::below(128));
    assert_eq!(SlotSet::EMPTY.iter().next(), None);
}
