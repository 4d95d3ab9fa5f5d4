//! Registers of an event set, and what may be written to them.
//!
//! A vector is not atomic: the first bad element ends the command, carries a
//! return flag, and leaves those before it done. Return flags in the input are
//! ignored, so that an argument can be used again.

use std::fmt;

use perfmon_abi::consts::{
    PFM_PROV_DERIVED, PFM_PROV_EXACT, PFM_PROV_HARDWARE, PFM_PROV_LOST, PFM_PROV_NOT_COUNTED,
    PFM_PROV_SCALED, PFM_PROV_SIMULATED, PFM_REG_RETFL_EINVAL, PFM_REG_RETFL_MASK,
    PFM_REG_RETFL_NOTAVAIL, PFM_REG_RETFL_PROV_MASK, PFM_REGFL_NO_64BIT_EMUL,
    PFM_REGFL_OVFL_NOTIFY, PFM_REGFL_RANDOM, PFM_REGFL_READ_RESET,
};
use perfmon_abi::wire::{Errno, Refusal, Subcode};
use perfmon_abi::{PmcArg, PmdArg};
use pmu_model::Provenance;

use crate::bits::PmdBits;
use crate::description::{LogicalPmu, PmcDescription, PmdDescription, PmdKind};

const PMC_FLAGS: u32 = PFM_REGFL_OVFL_NOTIFY | PFM_REGFL_RANDOM | PFM_REGFL_NO_64BIT_EMUL;
pub(super) const PMD_RETURNED: u32 = PFM_REG_RETFL_MASK | PFM_REG_RETFL_PROV_MASK;

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

/// How the value of a counter came about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum How {
    /// Nobody has counted since it was written.
    #[default]
    NotCounted,
    /// All of it was counted, so.
    Counted(Provenance),
    /// Some was counted, but not all of the time that it was to be.
    Lost,
}

impl How {
    /// More was counted, so.
    pub(super) fn and(self, provenance: Provenance) -> Self {
        match self {
            How::NotCounted => How::Counted(provenance),
            How::Counted(earlier) => How::Counted(earlier.and(provenance)),
            How::Lost => How::Lost,
        }
    }

    /// PFM_PROV_*.
    pub(super) fn code(self) -> u32 {
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

/// A register of an event set, as refusals name it.
pub(super) struct Name {
    kind: &'static str,
    num: u16,
    set: u16,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{} of event set {}", self.kind, self.num, self.set)
    }
}

impl Name {
    pub(super) fn of_pmc(arg: &PmcArg) -> Self {
        Name {
            kind: "PMC",
            num: arg.num,
            set: arg.set,
        }
    }

    pub(super) fn of_pmd(arg: &PmdArg) -> Self {
        Name {
            kind: "PMD",
            num: arg.num,
            set: arg.set,
        }
    }

    fn refuse<T>(&self, why: impl fmt::Display) -> Result<T, Bad> {
        Err(Bad::new(PFM_REG_RETFL_EINVAL, format!("{self}{why}")))
    }

    fn refuse_flags<T>(&self, flags: u32) -> Result<T, Bad> {
        self.refuse(format_args!(
            ": reg_flags has bits that are not defined: {flags:#x}"
        ))
    }
}

/// A PMC of one set.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pmc {
    pub(super) value: u64,
    /// PFM_REGFL_*.
    pub(super) flags: u32,
    pub(super) reset_pmds: PmdBits,
    pub(super) smpl_pmds: PmdBits,
    pub(super) eventid: u64,
}

impl Pmc {
    /// What a write makes of it, and which one it is.
    pub(super) fn written<'a>(
        pmu: &'a LogicalPmu,
        arg: &PmcArg,
    ) -> Result<(&'a PmcDescription, Self), Bad> {
        let name = Name::of_pmc(arg);
        let pmc = pmu.pmc(arg.num).ok_or_else(|| {
            let reason = format!("this PMU has no PMC{}", arg.num);
            Bad::new(PFM_REG_RETFL_NOTAVAIL, reason)
        })?;
        let unknown = arg.flags & !PMC_FLAGS;
        if unknown != 0 {
            return name.refuse_flags(unknown);
        }
        let pmds = |words, field| {
            let pmds = PmdBits::from_words(words);
            let missing = pmds.difference(pmu.implemented_pmds());
            if missing.is_empty() {
                return Ok(pmds);
            }
            name.refuse(format_args!(
                ": {field} names {missing}, which this PMU does not have"
            ))
        };
        let state = Pmc {
            value: pmc.accept(arg.value),
            flags: arg.flags,
            reset_pmds: pmds(arg.reset_pmds, "reg_reset_pmds")?,
            smpl_pmds: pmds(arg.smpl_pmds, "reg_smpl_pmds")?,
            eventid: arg.eventid,
        };
        Ok((pmc, state))
    }

    pub(super) fn notifies(&self) -> bool {
        self.flags & PFM_REGFL_OVFL_NOTIFY != 0
    }
}

/// A PMD of one set.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pmd {
    /// As the tool sees it: 64 bits, or the hardware's width with
    /// PFM_REGFL_NO_64BIT_EMUL. A sampler's is its count alone.
    pub(super) value: u64,
    /// Of a sampler, what its control says of its sample.
    pub(super) sample: u64,
    pub(super) long_reset: u64,
    pub(super) short_reset: u64,
    pub(super) last_reset: u64,
    /// Overflows before a switch, as written, and those that are left.
    pub(super) threshold: u64,
    pub(super) threshold_left: u64,
    pub(super) random_mask: u64,
    /// State of Carta's generator.
    pub(super) random: u32,
    pub(super) how: How,
}

impl Pmd {
    /// What a write makes of it, where the register has the bits of `mask`.
    pub(super) fn written(arg: &PmdArg, mask: u64) -> Self {
        let value = arg.value & mask;
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
        }
    }
}

/// The PMD of a write that may be carried out.
pub(super) fn writable<'a>(pmu: &'a LogicalPmu, arg: &PmdArg) -> Result<&'a PmdDescription, Bad> {
    let name = Name::of_pmd(arg);
    let pmd = find_pmd(pmu, arg.num)?;
    if arg.flags != 0 {
        return name.refuse_flags(arg.flags);
    }
    match pmd.what {
        PmdKind::Virtual(which) => name.refuse(format_args!(
            " ({which}) is a quantity of the VMM and cannot be written"
        )),
        PmdKind::Sample { .. } => name.refuse(" describes a sample of IBS and cannot be written"),
        PmdKind::Counter { .. } | PmdKind::Sampler { .. } => Ok(pmd),
    }
}

/// The PMD of a read that may be carried out, and whether it is reset by it.
pub(super) fn readable<'a>(
    pmu: &'a LogicalPmu,
    arg: &PmdArg,
) -> Result<(&'a PmdDescription, bool), Bad> {
    let name = Name::of_pmd(arg);
    let pmd = find_pmd(pmu, arg.num)?;
    let unknown = arg.flags & !PFM_REGFL_READ_RESET;
    if unknown != 0 {
        return name.refuse_flags(unknown);
    }
    let reset = arg.flags & PFM_REGFL_READ_RESET != 0;
    match pmd.what {
        PmdKind::Virtual(which) if reset => name.refuse(format_args!(
            " ({which}) is a quantity of the VMM and cannot be reset"
        )),
        PmdKind::Sample { .. } if reset => {
            name.refuse(" describes a sample of IBS and cannot be reset")
        }
        _ => Ok((pmd, reset)),
    }
}

fn find_pmd(pmu: &LogicalPmu, num: u16) -> Result<&PmdDescription, Bad> {
    pmu.pmd(num).ok_or_else(|| {
        let reason = format!("this PMU has no PMD{num}");
        Bad::new(PFM_REG_RETFL_NOTAVAIL, reason)
    })
}
