//! Which counter counts what.

use super::event::MAX_PIC;

/// Most counters of a PMU: one bit each.
pub(crate) const MAX_COUNTERS: usize = 64;

/// A counter for each of `wants`, which are sets of counters that would do, one bit each.
/// `None` only if there is no such assignment. Of equal counters, pic N gets the Nth.
pub(crate) fn assign(wants: &[u64]) -> Option<[usize; MAX_PIC]> {
    let mut owner = [usize::MAX; MAX_COUNTERS];
    for pic in 0..wants.len() {
        let mut seen = 0;
        if !place(pic, wants, &mut owner, &mut seen) {
            return None;
        }
    }
    let mut counters = [0; MAX_PIC];
    for (counter, &pic) in owner.iter().enumerate() {
        if let Some(place) = counters.get_mut(pic) {
            *place = counter;
        }
    }
    Some(counters)
}

/// Finds a counter for `pic`, and moves others if that makes room (an augmenting path).
/// `seen`: counters that were tried.
fn place(pic: usize, wants: &[u64], owner: &mut [usize; MAX_COUNTERS], seen: &mut u64) -> bool {
    let own = (pic..MAX_COUNTERS).chain(0..pic);
    let free_first = [true, false];
    for free in free_first {
        for counter in own.clone() {
            let bit = 1 << counter;
            let is_free = owner[counter] == usize::MAX;
            if wants[pic] & bit == 0 || *seen & bit != 0 || is_free != free {
                continue;
            }
            *seen |= bit;
            if is_free || place(owner[counter], wants, owner, seen) {
                owner[counter] = pic;
                return true;
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    /// Whether there is an assignment, by trying all.
    fn exists(wants: &[u64], taken: u64) -> bool {
        let Some((first, rest)) = wants.split_first() else {
            return true;
        };
        let counters = (0..8).map(|counter| 1 << counter);
        let mut fits = counters.filter(|bit| first & bit != 0 && taken & bit == 0);
        fits.any(|bit| exists(rest, taken | bit))
    }

    #[test]
    fn counters_in_order_where_all_are_alike() {
        let all = 0b1111;
        assert_eq!(assign(&[all; 4]).unwrap()[..4], [0, 1, 2, 3]);
        // Who can be on one counter only gets it, though it comes later.
        assert_eq!(assign(&[0b11, 0b01]).unwrap()[..2], [1, 0]);
        assert_eq!(assign(&[0b01, 0b01]), None);
        assert_eq!(assign(&[0]), None);
    }

    proptest! {
        #[test]
        fn an_assignment_is_found_if_there_is_one(
            wants in proptest::collection::vec(0u64..256, 0..6),
        ) {
            match assign(&wants) {
                None => prop_assert!(!exists(&wants, 0)),
                Some(counters) => {
                    let mut taken = 0u64;
                    for (want, counter) in wants.iter().zip(counters) {
                        prop_assert!(want & 1 << counter != 0);
                        prop_assert_eq!(taken & 1 << counter, 0);
                        taken |= 1 << counter;
                    }
                }
            }
        }
    }
}
