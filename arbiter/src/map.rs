//! Legacy names: which counter the registers of an unmodified kernel reach.

use crate::bank::Bank;
use crate::counter::PerKind;
use crate::layer::Phase;
use crate::{CounterId, CounterSet, Layer};

/// The legacy names of one vCPU. They change when the firmware's phase ends, once from each
/// start of the machine to the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names {
    map: LegacyMap,
    /// How many counters get a name when the firmware's phase ends, if they then do.
    legacy: Option<PerKind>,
    given: Given,
}

/// Whether names were given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Given {
    /// They never are: each counter keeps its own.
    Never,
    /// When the phase ends.
    NotYet,
    /// In this start of the machine ([`Phase::starts`]).
    In(u32),
}

impl Names {
    /// The names before the firmware's phase ends.
    pub(crate) fn new(legacy: Option<PerKind>) -> Self {
        Names {
            map: LegacyMap::identity(),
            legacy,
            given: legacy.map_or(Given::Never, |_| Given::NotYet),
        }
    }

    /// As after power-on.
    pub(crate) fn reset(&mut self) {
        *self = Names::new(self.legacy);
    }

    pub(crate) fn map(&self) -> &LegacyMap {
        &self.map
    }

    /// Whether names are ever given.
    pub(crate) fn are_given(&self) -> bool {
        self.given != Given::Never
    }

    /// Whether they are others by now: the phase has ended and they are to be given, or the
    /// machine was started again after they were. A vCPU can be reset first, when the phase
    /// still is that of before, and be asked for names in between.
    #[inline]
    pub(crate) fn are_old(&self, phase: &Phase) -> bool {
        match self.given {
            Given::Never => false,
            Given::NotYet => phase.is_over(),
            Given::In(start) => start != phase.starts(),
        }
    }

    /// Gives them around what is held, apart from the counters in `lost`, which their
    /// holders are about to lose. `start`: that of the machine ([`Phase::starts`]), as it was
    /// before anybody looked whether the phase is over in it.
    pub(crate) fn give(&mut self, start: u32, bank: &Bank, lost: CounterSet) {
        if let Some(names) = self.legacy {
            self.given = Given::In(start);
            self.map = LegacyMap::around(bank, lost, names);
        }
    }
}

/// The map from legacy names to counters. A name that is not mapped has no counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegacyMap {
    /// Positions of programmable counters, by legacy index.
    positions: [u8; 32],
    names: CounterSet,
    /// Counters that have a name.
    named: CounterSet,
    renames: bool,
}

impl LegacyMap {
    /// The map in which every counter has its own name.
    pub fn identity() -> Self {
        let mut positions = [0; 32];
        for (position, n) in positions.iter_mut().zip(0..) {
            *position = n;
        }
        LegacyMap {
            positions,
            names: CounterSet::from_bits(u64::MAX),
            named: CounterSet::from_bits(u64::MAX),
            renames: false,
        }
    }

    /// The map that leaves out what firmware and hypervisor hold, apart from the
    /// counters in `lost`, which they are about to lose. `names` says how many
    /// counters get a name: the first programmable ones of the rest, by order, and
    /// the first fixed-function ones, which keep their own.
    pub fn around(bank: &Bank, lost: CounterSet, names: PerKind) -> Self {
        let PerKind {
            programmable,
            fixed,
        } = names;
        let taken = bank.held_by(Layer::Firmware) | bank.held_by(Layer::Hypervisor);
        let taken = taken & !lost;
        let free = (bank.counters() & !taken).iter();
        let free = free.filter_map(|counter| match counter {
            CounterId::Programmable(n) => Some(n),
            CounterId::Fixed(_) | CounterId::Ibs(_) => None,
        });
        // Samplers keep their names, as fixed-function counters do.
        let fixed = (CounterSet::first(0, fixed) | CounterSet::SAMPLERS) & bank.counters();
        let mut map = LegacyMap {
            positions: [0; 32],
            names: fixed,
            named: fixed,
            renames: true,
        };
        for ((name, position), n) in (0..programmable).zip(&mut map.positions).zip(free) {
            *position = n;
            map.names.insert(CounterId::Programmable(name));
            map.named.insert(CounterId::Programmable(n));
        }
        map
    }

    /// Whether every counter has its own name.
    #[inline]
    pub fn is_identity(&self) -> bool {
        !self.renames
    }

    /// The names that have a counter.
    #[inline]
    pub fn names(&self) -> CounterSet {
        self.names
    }

    /// The counters that have a name.
    #[inline]
    pub fn named(&self) -> CounterSet {
        self.named
    }

    /// The counter behind a legacy name.
    #[inline]
    pub fn counter(&self, name: CounterId) -> Option<CounterId> {
        if !self.names.contains(name) {
            return None;
        }
        match name {
            CounterId::Programmable(n) => {
                let position = self.positions.get(usize::from(n))?;
                Some(CounterId::Programmable(*position))
            }
            CounterId::Fixed(_) | CounterId::Ibs(_) => Some(name),
        }
    }

    /// Converts bits of a legacy global register to bits of the counters behind the
    /// names.
    #[inline]
    pub fn to_counters(&self, bits: u64) -> u64 {
        if self.renames {
            (CounterSet::from_bits(bits) & self.names)
                .iter()
                .filter_map(|name| self.counter(name))
                .collect::<CounterSet>()
                .bits()
        } else {
            bits
        }
    }

    /// Converts bits of counters to bits of a legacy global register.
    #[inline]
    pub fn to_names(&self, bits: u64) -> u64 {
        if self.renames {
            let counters = CounterSet::from_bits(bits);
            let is_set = |name: &CounterId| {
                self.counter(*name)
                    .is_some_and(|counter| counters.contains(counter))
            };
            self.names
                .iter()
                .filter(is_set)
                .collect::<CounterSet>()
                .bits()
        } else {
            bits
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_the_start_in_which_the_phase_was_over() {
        let phase = Phase::new(true);
        let mut names = Names::new(Some(PerKind {
            programmable: 2,
            fixed: 0,
        }));
        assert!(!names.are_old(&phase));
        assert!(phase.end() && names.are_old(&phase));
        let start = phase.starts();
        // Another vCPU has the machine start over, after this one saw that the phase is over.
        phase.restart();
        names.give(start, &Bank::new(4, 3), CounterSet::EMPTY);
        assert!(names.are_old(&phase));
        phase.end();
        names.give(phase.starts(), &Bank::new(4, 3), CounterSet::EMPTY);
        assert!(!names.are_old(&phase));
    }
}
