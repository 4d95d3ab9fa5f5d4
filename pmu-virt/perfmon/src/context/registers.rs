//! PFM_WRITE_PMCS, PFM_WRITE_PMDS and PFM_READ_PMDS.
//!
//! A vector is not atomic: the first bad element ends the command, carries a
//! return flag, and leaves those before it done. Return flags in the input are
//! ignored, so that an argument can be used again.

use perfmon_abi::consts::{
    PFM_PROV_DERIVED, PFM_PROV_EXACT, PFM_PROV_HARDWARE, PFM_PROV_LOST, PFM_PROV_NONE,
    PFM_PROV_NOT_COUNTED, PFM_PROV_SCALED, PFM_PROV_SIMULATED, PFM_REG_RETFL_EINVAL,
    PFM_REG_RETFL_MASK, PFM_REG_RETFL_NOSET, PFM_REG_RETFL_NOTAVAIL, PFM_REG_RETFL_PROV_MASK,
    PFM_REG_RETFL_PROV_SHIFT, PFM_REGFL_NO_64BIT_EMUL, PFM_REGFL_OVFL_NOTIFY, PFM_REGFL_RANDOM,
    PFM_REGFL_READ_RESET, PFM_SETFL_OVFL_SWITCH,
};
use perfmon_abi::wire::{Errno, Refusal, Subcode};
use perfmon_abi::{PmcArg, PmdArg};
use pmu_model::Provenance;

use super::{Context, EventSet, How, Phase, Pmc, Pmd};
use crate::bits::PmdBits;
use crate::description::{PmcDescription, PmdDescription, PmdKind};
use crate::moment::Quantities;
use pmu_model::VirtualPmd;

const PMC_FLAGS: u32 = PFM_REGFL_OVFL_NOTIFY | PFM_REGFL_RANDOM | PFM_REGFL_NO_64BIT_EMUL;
const PMD_RETURNED: u32 = PFM_REG_RETFL_MASK | PFM_REG_RETFL_PROV_MASK;

/// Why an element is refused: its return flag, and the reason.
pub(crate) struct Bad {
    flag: u32,
    reason: String,
}

impl Bad {
    pub(crate) fn new(flag: u32, reason: String) -> Self {
        Bad { flag, reason }
    }

    /// What the element's flags and the command become.
    pub(crate) fn mark(self, flags: &mut u32) -> Refusal {
        *flags |= self.flag;
        let subcode = match self.flag {
            PFM_REG_RETFL_NOTAVAIL => Subcode::InvalidPicNumber,
            _ => Subcode::None,
        };
        Refusal::new(Errno::EINVAL, self.reason).because(subcode)
    }
}

/// What a PMD reads that nobody can tell: a quantity that this host does not
/// have, or that no attached context has seen. Not 0, which is a number of events.
pub(crate) const UNKNOWN: u64 = u64::MAX;

impl How {
    /// PFM_PROV_*.
    fn code(self) -> u32 {
        match self {
            How::NotCounted => PFM_PROV_NOT_COUNTED,
            How::Lost => PFM_PROV_LOST,
            How::Counted(Provenance::Exact) => PFM_PROV_EXACT,
            How::Counted(Provenance::Hardware) => PFM_PROV_HARDWARE,
            How::Counted(Provenance::Scaled) => PFM_PROV_SCALED,
            How::Counted(Provenance::Derived) => PFM_PROV_DERIVED,
            How::Counted(Provenance::Simulated) => PFM_PROV_SIMULATED,
        }
    }
}

impl Context {
    /// 3.1.2
    pub(super) fn write_pmcs(&mut self, vector: &mut [PmcArg]) -> Result<(), Refusal> {
        for arg in vector {
            arg.flags &= !PFM_REG_RETFL_MASK;
            self.write_pmc(arg)
                .map_err(|bad| bad.mark(&mut arg.flags))?;
        }
        Ok(())
    }

    fn write_pmc(&mut self, arg: &PmcArg) -> Result<(), Bad> {
        let name = format!("PMC{} of event set {}", arg.num, arg.set);
        self.find_set(arg.set, &name)?;
        let pmc = *self.find_pmc(arg.num)?;
        let unknown = arg.flags & !PMC_FLAGS;
        if unknown != 0 {
            let reason = format!("{name}: reg_flags has bits that are not defined: {unknown:#x}");
            return Err(Bad::new(PFM_REG_RETFL_EINVAL, reason));
        }
        let reset_pmds = self.checked_pmds(arg.reset_pmds, &name, "reg_reset_pmds")?;
        let smpl_pmds = self.checked_pmds(arg.smpl_pmds, &name, "reg_smpl_pmds")?;
        let state = Pmc {
            value: pmc.accept(arg.value),
            flags: arg.flags,
            reset_pmds,
            smpl_pmds,
            eventid: arg.eventid,
        };
        if let Some(set) = self.sets.get_mut(&arg.set) {
            set.pmcs.insert(arg.num, state);
            // With PFM_REGFL_NO_64BIT_EMUL the counter has no upper bits.
            if let (Some(pmd), Some(description)) =
                (set.pmds.get(&pmc.pmd).copied(), self.pmu.pmd(pmc.pmd))
            {
                let value = pmd.value & set.mask(description);
                set.pmds.insert(pmc.pmd, Pmd { value, ..pmd });
            }
        }
        Ok(())
    }

    /// 3.1.3
    pub(super) fn write_pmds(&mut self, vector: &mut [PmdArg]) -> Result<(), Refusal> {
        for arg in vector {
            arg.flags &= !PMD_RETURNED;
            self.write_pmd(arg)
                .map_err(|bad| bad.mark(&mut arg.flags))?;
        }
        Ok(())
    }

    fn write_pmd(&mut self, arg: &PmdArg) -> Result<(), Bad> {
        let name = format!("PMD{} of event set {}", arg.num, arg.set);
        self.find_set(arg.set, &name)?;
        let pmd = *self.find_pmd(arg.num)?;
        if arg.flags != 0 {
            let flags = arg.flags;
            let reason = format!("{name}: reg_flags has bits that are not defined: {flags:#x}");
            return Err(Bad::new(PFM_REG_RETFL_EINVAL, reason));
        }
        if let PmdKind::Virtual(which) = pmd.what {
            let reason = format!("{name} ({which}) is a quantity of the VMM and cannot be written");
            return Err(Bad::new(PFM_REG_RETFL_EINVAL, reason));
        }
        if let PmdKind::Sample { .. } = pmd.what {
            let reason = format!("{name} describes a sample of IBS and cannot be written");
            return Err(Bad::new(PFM_REG_RETFL_EINVAL, reason));
        }
        if arg.set == self.active {
            self.pending.remove(arg.num);
            self.due.remove(arg.num);
        }
        if let Some(set) = self.sets.get_mut(&arg.set) {
            let value = arg.value & set.mask(&pmd);
            // Of the active set, what was told of its overflow stays true: PFM_RESTART loads
            // it with the long reset value that is written here (3.4.2). A set that is not
            // active counts on from what is written when its turn comes.
            if arg.set != self.active {
                set.overflowed.remove(arg.num);
            }
            set.pmds.insert(
                arg.num,
                Pmd {
                    value,
                    sample: 0,
                    long_reset: arg.long_reset,
                    short_reset: arg.short_reset,
                    last_reset: value,
                    threshold: arg.ovflsw_thres,
                    threshold_left: arg.ovflsw_thres,
                    random_mask: arg.random_mask,
                    random: arg.random_seed,
                    how: How::NotCounted,
                },
            );
            set.load_if_sampler(&pmd, value);
        }
        Ok(())
    }

    /// 3.1.4
    pub(super) fn read_pmds(
        &mut self,
        vector: &mut [PmdArg],
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        for arg in vector {
            arg.flags &= !PMD_RETURNED;
            self.read_pmd(arg, values)
                .map_err(|bad| bad.mark(&mut arg.flags))?;
        }
        Ok(())
    }

    fn read_pmd(&mut self, arg: &mut PmdArg, values: &dyn Quantities) -> Result<(), Bad> {
        let name = format!("PMD{} of event set {}", arg.num, arg.set);
        let set = self.find_set(arg.set, &name)?;
        let pmd = self.find_pmd(arg.num)?;
        let unknown = arg.flags & !PFM_REGFL_READ_RESET;
        if unknown != 0 {
            let reason = format!("{name}: reg_flags has bits that are not defined: {unknown:#x}");
            return Err(Bad::new(PFM_REG_RETFL_EINVAL, reason));
        }
        let reset = arg.flags & PFM_REGFL_READ_RESET != 0;
        let provenance = match pmd.what {
            PmdKind::Virtual(which) if reset => {
                let reason =
                    format!("{name} ({which}) is a quantity of the VMM and cannot be reset");
                return Err(Bad::new(PFM_REG_RETFL_EINVAL, reason));
            }
            PmdKind::Virtual(which) => {
                let value = self.quantity(which, values);
                arg.value = value.unwrap_or(UNKNOWN);
                arg.last_reset_val = 0;
                arg.ovflsw_thres = 0;
                value.map_or(PFM_PROV_NOT_COUNTED, |_| PFM_PROV_NONE)
            }
            PmdKind::Sample { .. } if reset => {
                let reason = format!("{name} describes a sample of IBS and cannot be reset");
                return Err(Bad::new(PFM_REG_RETFL_EINVAL, reason));
            }
            PmdKind::Sample { .. } => {
                let state = set.pmds.get(&arg.num).copied().unwrap_or_default();
                arg.value = state.value;
                arg.last_reset_val = 0;
                arg.ovflsw_thres = 0;
                match state.how {
                    How::NotCounted => PFM_PROV_NOT_COUNTED,
                    _ => PFM_PROV_NONE,
                }
            }
            PmdKind::Counter { .. } | PmdKind::Sampler { .. } => {
                let state = set.pmds.get(&arg.num).copied().unwrap_or_default();
                arg.value = match pmd.what {
                    PmdKind::Sampler { kind, pmc, .. } => set.sampler_value(kind, pmc, &state),
                    _ => state.value,
                };
                arg.last_reset_val = state.last_reset;
                arg.ovflsw_thres = match set.flags & PFM_SETFL_OVFL_SWITCH {
                    0 => 0,
                    _ => state.threshold_left,
                };
                state.how.code()
            }
        };
        arg.flags |= provenance << PFM_REG_RETFL_PROV_SHIFT;
        if reset {
            self.read_reset(arg.set, arg.num);
        }
        Ok(())
    }

    /// A quantity of the VMM now, or when the context was detached; while monitoring
    /// waits for PFM_RESTART, also where the vCPU was at the overflow behind it.
    fn quantity(&self, which: VirtualPmd, values: &dyn Quantities) -> Option<u64> {
        if which.is_of_overflow() {
            let waits = self.phase == Phase::Masked || self.blocked;
            return self.moment.filter(|_| waits)?.value(which);
        }
        match self.phase {
            Phase::Unloaded => self.kept.get(&which.pmd()).copied(),
            Phase::Loaded | Phase::Masked => values.read(which),
        }
    }

    fn find_set(&self, set: u16, name: &str) -> Result<&EventSet, Bad> {
        self.sets.get(&set).ok_or_else(|| {
            let reason = format!("{name}: there is no such event set");
            Bad::new(PFM_REG_RETFL_NOSET, reason)
        })
    }

    fn find_pmc(&self, num: u16) -> Result<&PmcDescription, Bad> {
        self.pmu.pmc(num).ok_or_else(|| {
            let reason = format!("this PMU has no PMC{num}");
            Bad::new(PFM_REG_RETFL_NOTAVAIL, reason)
        })
    }

    fn find_pmd(&self, num: u16) -> Result<&PmdDescription, Bad> {
        self.pmu.pmd(num).ok_or_else(|| {
            let reason = format!("this PMU has no PMD{num}");
            Bad::new(PFM_REG_RETFL_NOTAVAIL, reason)
        })
    }

    /// The PMDs of a vector of bits.
    fn checked_pmds(
        &self,
        words: [u64; perfmon_abi::PMD_WORDS],
        name: &str,
        field: &str,
    ) -> Result<PmdBits, Bad> {
        let pmds = PmdBits::from_words(words);
        let missing = pmds.difference(self.pmu.implemented_pmds());
        if missing.is_empty() {
            return Ok(pmds);
        }
        let reason = format!("{name}: {field} names {missing}, which this PMU does not have");
        Err(Bad::new(PFM_REG_RETFL_EINVAL, reason))
    }
}
