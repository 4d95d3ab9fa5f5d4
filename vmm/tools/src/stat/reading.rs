//! What a context's registers said at one moment, and what took place between
//! two such moments.

use perfmon_abi::consts::{
    PFM_PROV_DERIVED, PFM_PROV_EXACT, PFM_PROV_HARDWARE, PFM_PROV_LOST, PFM_PROV_NOT_COUNTED,
    PFM_PROV_SCALED, PFM_PROV_SIMULATED, PFM_REG_RETFL_PROV_MASK, PFM_REG_RETFL_PROV_SHIFT,
};
use pmu_model::Provenance;

/// How a register came to its value, as its return flags say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It was counted so.
    Counted(Provenance),
    /// It is no counter; the value is the VMM's own.
    Known,
    /// Nobody has counted yet.
    Never,
    /// It was counted, but not all of the time that it was to be.
    Lost,
    /// Others had its counter for a time that the VMM reports; meanwhile neither
    /// it nor its set's time went on.
    Interrupted,
}

impl How {
    /// That of a register with these flags.
    #[must_use]
    pub fn of(flags: u32) -> Self {
        match (flags & PFM_REG_RETFL_PROV_MASK) >> PFM_REG_RETFL_PROV_SHIFT {
            PFM_PROV_EXACT => Self::Counted(Provenance::Exact),
            PFM_PROV_HARDWARE => Self::Counted(Provenance::Hardware),
            PFM_PROV_SCALED => Self::Counted(Provenance::Scaled),
            PFM_PROV_DERIVED => Self::Counted(Provenance::Derived),
            PFM_PROV_SIMULATED => Self::Counted(Provenance::Simulated),
            PFM_PROV_NOT_COUNTED => Self::Never,
            PFM_PROV_LOST => Self::Lost,
            // A later version may count in ways that this one has no word for.
            0 => Self::Known,
            _ => Self::Lost,
        }
    }
}

/// An event's counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// The event, by its number.
    pub event: usize,
    /// The counter's value.
    pub value: u64,
    /// How it came about.
    pub how: How,
}

/// An event set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetReading {
    /// Nanoseconds that it was active.
    pub active_ns: u64,
    /// Its counters.
    pub counts: Vec<Count>,
}

/// A context at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Its sets, in the order in which they take turns.
    pub sets: Vec<SetReading>,
    /// Quantities of the VMM.
    pub quantities: Vec<Count>,
    /// Nanoseconds that the vCPU ran; none for a core, or where nobody knows.
    pub run_ns: Option<u64>,
}

impl Reading {
    /// Nanoseconds that any set was active.
    #[must_use]
    pub fn active_ns(&self) -> u64 {
        let each = self.sets.iter().map(|set| set.active_ns);
        each.fold(0, u64::saturating_add)
    }

    /// Others had the counters, and the VMM reports for how long: what reads as lost
    /// went on afterwards where it had stopped.
    pub fn explain(&mut self) {
        for count in self.sets.iter_mut().flat_map(|set| &mut set.counts) {
            if count.how == How::Lost {
                count.how = How::Interrupted;
            }
        }
    }

    /// What the next reading is to be compared with. The guest runs on between
    /// the times and the counts of a reading: a set that became active there has
    /// counted in no time. This has to wait for the reading that has the time.
    #[must_use]
    pub fn base(self, before: &Self) -> Self {
        let keep = |(index, set): (usize, SetReading)| match before.sets.get(index) {
            Some(earlier) if earlier.active_ns == set.active_ns => earlier.clone(),
            _ => set,
        };
        Self {
            sets: self.sets.into_iter().enumerate().map(keep).collect(),
            ..self
        }
    }
}

/// Time in which one set was active, and what its events counted in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    pub set: usize,
    /// How long.
    pub ns: u64,
    /// Which event took place how often.
    pub counts: Vec<(usize, u64)>,
}

/// What took place between two readings, set by set. The first is `active`, the
/// set that was active last, and the others follow in their order. A set that
/// was active twice in between has one slice all the same: read as often as
/// sets change, and there is no such one.
#[must_use]
pub fn slices(before: &Reading, now: &Reading, active: usize) -> Vec<Slice> {
    let count = now.sets.len();
    let turns = (0..count).map(|turn| (active + turn) % count.max(1));
    turns
        .filter_map(|index| {
            let set = now.sets.get(index)?;
            let earlier = before.sets.get(index);
            let ns = set.active_ns;
            let ns = ns.saturating_sub(earlier.map_or(0, |earlier| earlier.active_ns));
            let counted = |count: &Count| {
                let first =
                    earlier.and_then(|set| set.counts.iter().find(|it| it.event == count.event));
                let events = count
                    .value
                    .wrapping_sub(first.map_or(0, |first| first.value));
                match count.how {
                    How::Counted(_) | How::Interrupted => Some((count.event, events)),
                    // It was counted before the register was reset.
                    How::Never if events > 0 => Some((count.event, events)),
                    How::Never | How::Known | How::Lost => None,
                }
            };
            let counts = set.counts.iter().filter_map(counted).collect();
            (ns > 0).then_some(Slice {
                set: index,
                ns,
                counts,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HARDWARE: How = How::Counted(Provenance::Hardware);

    /// Time and counts of a set.
    type Set<'a> = (u64, &'a [(usize, u64, How)]);
    /// A slice: set, time and counts.
    type Expected<'a> = (usize, u64, &'a [(usize, u64)]);

    fn reading(sets: &[Set<'_>]) -> Reading {
        let set = |(active_ns, counts): &Set<'_>| SetReading {
            active_ns: *active_ns,
            counts: counts
                .iter()
                .map(|&(event, value, how)| Count { event, value, how })
                .collect(),
        };
        Reading {
            sets: sets.iter().map(set).collect(),
            ..Reading::default()
        }
    }

    fn check(before: &Reading, now: &Reading, active: usize, expected: &[Expected<'_>]) {
        let found = slices(before, now, active);
        let slice = |&(set, ns, counts): &Expected<'_>| Slice {
            set,
            ns,
            counts: counts.to_vec(),
        };
        assert_eq!(found, expected.iter().map(slice).collect::<Vec<_>>());
    }

    #[test]
    fn slices_come_in_the_order_of_the_turns() {
        let before = reading(&[
            (10, &[(0, 100, HARDWARE)]),
            (10, &[(1, 5, HARDWARE)]),
            (0, &[(2, 0, How::Never)]),
        ]);
        let now = reading(&[
            (12, &[(0, 120, HARDWARE)]),
            (13, &[(1, 9, HARDWARE)]),
            (4, &[(2, 7, HARDWARE)]),
        ]);
        check(
            &before,
            &now,
            1,
            &[(1, 3, &[(1, 4)]), (2, 4, &[(2, 7)]), (0, 2, &[(0, 20)])],
        );
        check(&now, &now, 0, &[]);
        check(&Reading::default(), &Reading::default(), 3, &[]);
    }

    #[test]
    fn what_nobody_counted_is_not_0() {
        let now = reading(&[(
            9,
            &[(0, 0, How::Never), (1, 3, How::Lost), (2, 0, HARDWARE)],
        )]);
        check(&Reading::default(), &now, 0, &[(0, 9, &[(2, 0)])]);
    }

    #[test]
    fn what_is_counted_between_time_and_counts_is_not_lost() {
        let zero = reading(&[(0, &[(0, 0, How::Never)]), (0, &[(1, 0, How::Never)])]);
        // The second set became active after the times were read.
        let first = reading(&[(10, &[(0, 100, HARDWARE)]), (0, &[(1, 5, HARDWARE)])]);
        let second = reading(&[(10, &[(0, 103, HARDWARE)]), (10, &[(1, 80, HARDWARE)])]);
        let third = reading(&[(20, &[(0, 200, HARDWARE)]), (10, &[(1, 80, HARDWARE)])]);
        check(&zero, &first, 0, &[(0, 10, &[(0, 100)])]);
        let first = first.base(&zero);
        check(&first, &second, 0, &[(1, 10, &[(1, 80)])]);
        let second = second.base(&first);
        check(&second, &third, 1, &[(0, 10, &[(0, 100)])]);
    }

    #[test]
    fn a_register_that_was_reset_has_counted_before() {
        let before = reading(&[(10, &[(0, 100, HARDWARE), (1, 7, HARDWARE)])]);
        let now = reading(&[(12, &[(0, 105, How::Never), (1, 7, How::Never)])]);
        check(&before, &now, 0, &[(0, 2, &[(0, 5)])]);
    }

    #[test]
    fn what_is_lost_counts_if_its_time_is_reported() {
        let before = reading(&[(10, &[(0, 100, HARDWARE)])]);
        let mut now = reading(&[(30, &[(0, 160, How::Lost)])]);
        check(&before, &now, 0, &[(0, 20, &[])]);
        now.explain();
        check(&before, &now, 0, &[(0, 20, &[(0, 60)])]);
    }

    #[test]
    fn flags_tell_how() {
        let flags = |field: u32| field << PFM_REG_RETFL_PROV_SHIFT | 0x8000_0001;
        assert_eq!(
            How::of(flags(PFM_PROV_EXACT)),
            How::Counted(Provenance::Exact)
        );
        assert_eq!(How::of(flags(PFM_PROV_NOT_COUNTED)), How::Never);
        assert_eq!(How::of(flags(PFM_PROV_LOST)), How::Lost);
        assert_eq!(How::of(flags(0)), How::Known);
        assert_eq!(How::of(flags(15)), How::Lost);
    }
}
