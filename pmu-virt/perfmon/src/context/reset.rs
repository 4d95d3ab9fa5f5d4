//! Loading PMDs with their next period (§3.4.1, §3.4.2).

use perfmon_abi::consts::PFM_REGFL_RANDOM;

use super::{Context, EventSet, How};
use crate::bits::PmdBits;
use crate::carta;
use crate::description::{LogicalPmu, PmdDescription, PmdKind};

/// Which of its reset values a PMD is loaded with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Period {
    /// After an overflow that needs no restart.
    Short,
    /// At PFM_RESTART.
    Long,
}

impl Context {
    /// Loads these PMDs of a set, and those in the `reset_pmds` of their PMCs.
    pub(super) fn reset(&mut self, set: u16, pmds: PmdBits, period: Period) {
        if let Some(set) = self.sets.get_mut(&set) {
            set.reset(&self.pmu, pmds, period);
        }
    }

    /// The long reset of one PMD, and of those in its PMC's `reset_pmds` (6.2.2).
    pub(super) fn read_reset(&mut self, set: u16, pmd: u16) {
        self.reset(set, [pmd].into_iter().collect(), Period::Long);
    }
}

impl EventSet {
    fn reset(&mut self, pmu: &LogicalPmu, pmds: PmdBits, period: Period) {
        let named = |pmd| self.pmcs.get(&counter(pmu, pmd)?.1);
        let of_pmcs = pmds.iter().filter_map(named).map(|pmc| pmc.reset_pmds);
        let all = of_pmcs.fold(pmds, PmdBits::union);
        for pmd in all.iter() {
            self.reload(pmu, pmd, period);
        }
        self.overflowed = self.overflowed.difference(all);
    }

    /// Loads one PMD. One that neither counts nor samples has nothing that could be loaded.
    fn reload(&mut self, pmu: &LogicalPmu, num: u16, period: Period) {
        let Some((description, pmc)) = counter(pmu, num) else {
            return;
        };
        let mask = self.mask(description);
        let flags = self.pmcs.get(&pmc).map_or(0, |pmc| pmc.flags);
        let pmd = self.pmds.entry(num).or_default();
        let base = match period {
            Period::Short => pmd.short_reset,
            Period::Long => pmd.long_reset,
        };
        let value = if flags & PFM_REGFL_RANDOM == 0 {
            base
        } else {
            let (value, state) = carta::vary(base, pmd.random_mask, pmd.random);
            pmd.random = state;
            value
        };
        // What is told later is what was loaded (3.1.4), not what was asked for.
        pmd.value = value & mask;
        pmd.last_reset = pmd.value;
        pmd.how = How::NotCounted;
        self.load_if_sampler(description, value);
    }

    /// A sampler's PMD is loaded with its count, and holds no sample then.
    pub(super) fn load_if_sampler(&mut self, description: &PmdDescription, value: u64) {
        let PmdKind::Sampler { kind, pmc, count } = description.what else {
            return;
        };
        let control = self.pmcs.get(&pmc).map_or(0, |pmc| pmc.value);
        let pmd = self.pmds.entry(description.num).or_default();
        pmd.last_reset = pmd.load_sampler((kind, count), control, value);
    }
}

/// A counter's or a sampler's PMD and its PMC; `None` if it is neither's.
fn counter(pmu: &LogicalPmu, pmd: u16) -> Option<(&PmdDescription, u16)> {
    let pmd = pmu.pmd(pmd)?;
    match pmd.what {
        PmdKind::Counter { pmc, .. } | PmdKind::Sampler { pmc, .. } => Some((pmd, pmc)),
        PmdKind::Sample { .. } | PmdKind::Virtual(_) => None,
    }
}
