//! Which event is counted by which counter, and in which event set.
//!
//! If all events fit at once there is one set. Else sets take turns, and each
//! event is in one of them. The events of a group are in the same set.

use arbiter::CounterId;

use crate::registers::Need;

/// An event, by the caller's number, and what it needs.
pub type Wanted = (usize, Need);

/// Counters that may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Programmable ones, from 0 on.
    pub programmable: u8,
    /// Fixed ones, from 0 on.
    pub fixed: u8,
}

/// An event on its counter.
pub type Place = (usize, CounterId);

/// Who counts when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    pub sets: Vec<Vec<Place>>,
    /// Events for which there are too few counters, or none of the right kind;
    /// with the whole group.
    pub left_out: Vec<usize>,
}

impl Schedule {
    /// Puts each group into the first set in which all of it has counters.
    #[must_use]
    pub fn of(groups: &[Vec<Wanted>], counters: Counters) -> Self {
        let mut sets: Vec<(Vec<Wanted>, Vec<Place>)> = Vec::new();
        let mut left_out = Vec::new();
        for group in groups.iter().filter(|group| !group.is_empty()) {
            let with = |events: &[Wanted]| -> Option<(Vec<Wanted>, Vec<Place>)> {
                let all = [events, group].concat();
                let places = places(&all, counters)?;
                Some((all, places))
            };
            let found = sets.iter_mut().find_map(|set| {
                let (events, _) = &set;
                *set = with(events)?;
                Some(())
            });
            if found.is_some() {
                continue;
            }
            match with(&[]) {
                Some(set) => sets.push(set),
                None => left_out.extend(group.iter().map(|(event, _)| *event)),
            }
        }
        Self {
            sets: sets.into_iter().map(|(_, places)| places).collect(),
            left_out,
        }
    }

    /// The most programmable and fixed counters that a set uses.
    #[must_use]
    pub fn uses(&self) -> Counters {
        let most = |is: fn(CounterId) -> bool| {
            let used = |set: &Vec<Place>| set.iter().filter(|(_, it)| is(*it)).count();
            let most = self.sets.iter().map(used).max().unwrap_or(0);
            u8::try_from(most).unwrap_or(u8::MAX)
        };
        Counters {
            programmable: most(|it| matches!(it, CounterId::Programmable(_))),
            fixed: most(|it| matches!(it, CounterId::Fixed(_))),
        }
    }
}

/// A counter for each event; `None` if there are too few. A fixed counter
/// serves one function only, so who needs it goes first, who can do with it
/// comes next, and the programmable ones are for the rest.
fn places(events: &[Wanted], counters: Counters) -> Option<Vec<Place>> {
    let mut taken = Vec::new();
    let mut free = |fixed: Option<u8>| {
        let fixed = fixed.filter(|it| *it < counters.fixed && !taken.contains(it))?;
        taken.push(fixed);
        Some(CounterId::Fixed(fixed))
    };
    let mut places = vec![None; events.len()];
    for must in [true, false] {
        for (place, (_, need)) in places.iter_mut().zip(events) {
            if place.is_none() && (!must || !need.programmable) {
                *place = free(need.fixed);
            }
        }
    }
    let mut next = 0..counters.programmable;
    let each = events.iter().zip(places);
    each.map(|((event, need), place)| {
        let counter = match place {
            Some(fixed) => fixed,
            None if need.programmable => CounterId::Programmable(next.next()?),
            None => return None,
        };
        Some((*event, counter))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, proptest};

    const ANY: Need = Need {
        fixed: None,
        programmable: true,
    };
    const CYCLES: Need = Need {
        fixed: Some(1),
        programmable: true,
    };
    const REF: Need = Need {
        fixed: Some(2),
        programmable: false,
    };

    /// Numbers the events in order, and writes sets as `0:pmc0 1:fixed1`.
    fn check(groups: &[&[Need]], counters: (u8, u8), sets: &[&str], left_out: &[usize]) {
        let mut number = 0..;
        let groups: Vec<Vec<Wanted>> = groups
            .iter()
            .map(|group| number.by_ref().zip(group.iter().copied()).collect())
            .collect();
        let (programmable, fixed) = counters;
        let counters = Counters {
            programmable,
            fixed,
        };
        let schedule = Schedule::of(&groups, counters);
        let text = |set: &Vec<Place>| {
            let word = |(event, counter): &Place| match counter {
                CounterId::Programmable(n) => format!("{event}:pmc{n}"),
                CounterId::Fixed(n) => format!("{event}:fixed{n}"),
                CounterId::Ibs(_) => format!("{event}:{counter}"),
            };
            set.iter().map(word).collect::<Vec<_>>().join(" ")
        };
        let found: Vec<String> = schedule.sets.iter().map(text).collect();
        assert_eq!(found, sets);
        assert_eq!(schedule.left_out, left_out);
    }

    #[test]
    fn what_fits_is_counted_at_once() {
        check(&[&[ANY], &[ANY]], (2, 0), &["0:pmc0 1:pmc1"], &[]);
        check(
            &[&[CYCLES], &[ANY], &[REF]],
            (1, 3),
            &["0:fixed1 1:pmc0 2:fixed2"],
            &[],
        );
        // The second one for cycles finds a programmable counter.
        check(&[&[CYCLES], &[CYCLES]], (1, 3), &["0:fixed1 1:pmc0"], &[]);
        // Who can only be on the fixed counter gets it, also if it comes later.
        let both = Need {
            programmable: true,
            ..REF
        };
        check(&[&[both], &[REF]], (1, 3), &["0:pmc0 1:fixed2"], &[]);
        check(&[], (4, 0), &[], &[]);
    }

    #[test]
    fn the_rest_takes_turns() {
        check(
            &[&[ANY], &[ANY], &[ANY]],
            (2, 0),
            &["0:pmc0 1:pmc1", "2:pmc0"],
            &[],
        );
        // A later event fills what a group has left free.
        check(
            &[&[ANY, ANY], &[ANY, ANY], &[ANY]],
            (3, 0),
            &["0:pmc0 1:pmc1 4:pmc2", "2:pmc0 3:pmc1"],
            &[],
        );
        check(&[&[REF], &[REF]], (4, 3), &["0:fixed2", "1:fixed2"], &[]);
    }

    #[test]
    fn what_can_never_fit_is_left_out() {
        check(&[&[ANY; 3], &[ANY]], (2, 0), &["3:pmc0"], &[0, 1, 2]);
        check(&[&[REF], &[ANY]], (1, 2), &["1:pmc0"], &[0]);
        check(&[&[ANY]], (0, 3), &[], &[0]);
    }

    proptest! {
        #[test]
        fn every_event_is_counted_once_and_no_counter_is_used_twice(
            needs in proptest::collection::vec(
                proptest::collection::vec(
                    (proptest::option::of(0u8..4), any::<bool>())
                        .prop_map(|(fixed, programmable)| Need { fixed, programmable }),
                    1..4,
                ),
                0..8,
            ),
            programmable in 0u8..7,
            fixed in 0u8..4,
        ) {
            let mut number = 0..;
            let groups: Vec<Vec<Wanted>> = needs
                .iter()
                .map(|group| number.by_ref().zip(group.iter().copied()).collect())
                .collect();
            let total: usize = groups.iter().map(Vec::len).sum();
            let schedule = Schedule::of(&groups, Counters { programmable, fixed });
            let mut seen: Vec<usize> = schedule.left_out.clone();
            for set in &schedule.sets {
                let mut used: Vec<CounterId> = set.iter().map(|(_, it)| *it).collect();
                used.sort_by_key(|it| format!("{it:?}"));
                used.dedup();
                prop_assert_eq!(used.len(), set.len());
                for (event, counter) in set {
                    let need = groups.iter().flatten().find(|(it, _)| it == event).map(|it| it.1);
                    let fits = need.is_some_and(|need| match counter {
                        CounterId::Fixed(n) => need.fixed == Some(*n) && *n < fixed,
                        CounterId::Programmable(n) => need.programmable && *n < programmable,
                        CounterId::Ibs(_) => false,
                    });
                    prop_assert!(fits);
                }
                seen.extend(set.iter().map(|(event, _)| *event));
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..total).collect::<Vec<_>>());
            for group in &groups {
                let home = |event: usize| {
                    let has = |set: &Vec<Place>| set.iter().any(|(it, _)| *it == event);
                    schedule.sets.iter().position(has)
                };
                let first = group.first().map(|it| home(it.0));
                prop_assert!(group.iter().all(|it| Some(home(it.0)) == first));
            }
        }
    }
}
