//! What is left of a context when its VM ends.

use perfmon_abi::wire::last;
use perfmon_abi::{PmdArg, SetInfo};
use pmu_model::VirtualPmd;

use super::{Context, Phase};
use crate::moment::Quantities;

/// Nobody tells a quantity of a VM that has ended: what was kept is known.
struct Ended;

impl Quantities for Ended {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }
}

impl Context {
    /// What its event sets and PMDs read from now on ([`last`]); `None` while it is
    /// attached.
    #[must_use]
    pub fn last_counts(&mut self) -> Option<Vec<u8>> {
        if self.phase != Phase::Unloaded {
            return None;
        }
        let (mut sets, mut pmds) = (Vec::new(), Vec::new());
        for (&id, set) in &self.sets {
            sets.push(SetInfo {
                id,
                ..SetInfo::default()
            });
            let read = |num| PmdArg {
                num,
                set: id,
                ..PmdArg::default()
            };
            match id {
                0 => pmds.extend(self.pmu.pmds().iter().map(|pmd| read(pmd.num))),
                _ => pmds.extend(set.pmds.keys().map(|&num| read(num))),
            }
        }
        self.getinfo_sets(&mut sets).ok()?;
        self.read_pmds(&mut pmds, &Ended).ok()?;
        let of_vmm = VirtualPmd::ALL.iter().map(|which| which.pmd());
        let shared = of_vmm.min().unwrap_or(u16::MAX);
        Some(last::encode(&sets, &pmds, shared))
    }
}
