//! The logical PMU: which PMCs and PMDs there are, and what they map to.

use perfmon_abi::consts::{PFM_REG_IDX_NONE, PFM_REG_TYPE_MSR, PFM_REG_TYPE_VIRTUAL};
use perfmon_abi::wire::info::ModelInfo;
use pmu_model::ibs::{fetch, is_on, op};
use pmu_model::{
    CountRequest, CounterId, EventFamily, IbsKind, IbsRegister, PmuModel, Register, Vendor,
    VirtualPmd, low_bits,
};

use super::bits::PmdBits;

/// First index of the fixed-function counters' registers.
const FIXED: u16 = 32;
/// On AMD, the programmable counters from this one on have indices above those
/// of IBS, which PMC4, PMC5 and PMD4 to PMD13 are for.
const AMD_BELOW_IBS: u8 = 4;
const AMD_ABOVE_IBS: u16 = 10;

/// Controls of IBS: PMC, PMD, register.
const SAMPLERS: [(u16, u16, IbsRegister); 2] = [
    (4, 4, IbsRegister::FetchControl),
    (5, 7, IbsRegister::OpControl),
];

/// What describes a sample of IBS: PMD, register. Those up to 13 are as other
/// implementations number them; they have no branch target.
const SAMPLES: [(u16, IbsRegister); 9] = [
    (5, IbsRegister::FetchLinear),
    (6, IbsRegister::FetchPhysical),
    (8, IbsRegister::OpRip),
    (9, IbsRegister::OpData),
    (10, IbsRegister::OpData2),
    (11, IbsRegister::OpData3),
    (12, IbsRegister::DataLinear),
    (13, IbsRegister::DataPhysical),
    (63, IbsRegister::BranchTarget),
];

/// The interrupt bit of an event select; and of a fixed counter's field.
const SELECT_INT: u64 = 1 << 20;
const FIXED_INT: u64 = 1 << 3;

/// A control register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmcDescription {
    /// Its index.
    pub num: u16,
    /// The counter, or the sampler, that it controls.
    pub counter: CounterId,
    /// The PMD of that counter, or sampler.
    pub pmd: u16,
    /// Its value when nothing was written.
    pub default: u64,
    /// Bits that keep their default.
    pub reserved: u64,
    /// Bits that are set whatever is written: an overflow has to interrupt.
    pub forced: u64,
    /// `PFM_REG_TYPE_*`.
    pub kind: u16,
    /// MSR.
    pub index: u64,
}

/// What a PMD stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmdKind {
    /// A counter of so many bits, controlled by a PMC.
    Counter {
        counter: CounterId,
        /// Bits of the hardware's.
        width: u8,
        pmc: u16,
    },
    /// The control of a sampler as the processor shows it: with its count, and with what
    /// it says of a sample. A sample is its overflow.
    Sampler {
        kind: IbsKind,
        /// Its PMC, which has all other bits.
        pmc: u16,
        /// Bits that a tool can write: the count's.
        count: u64,
    },
    /// What else describes the last sample of a sampler. It cannot be written.
    Sample {
        register: IbsRegister,
        /// The PMC of the sampler.
        pmc: u16,
    },
    /// A quantity of the VMM. It cannot be written.
    Virtual(VirtualPmd),
}

/// A data register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmdDescription {
    /// Its index.
    pub num: u16,
    /// What it stands for.
    pub what: PmdKind,
    /// `PFM_REG_TYPE_*`.
    pub kind: u16,
    /// MSR, or `PFM_REG_IDX_NONE`.
    pub index: u64,
}

/// The registers that host tools see: those of a PMU model, and virtual PMDs.
#[derive(Clone, Debug)]
pub struct LogicalPmu {
    model: PmuModel,
    pmcs: Vec<PmcDescription>,
    pmds: Vec<PmdDescription>,
}

impl LogicalPmu {
    /// The logical PMU of a model.
    #[must_use]
    pub fn new(model: PmuModel) -> Self {
        let pmc = |counter| pmc(&model, counter);
        let pmd = |counter| pmd(&model, counter);
        let mut pmcs: Vec<_> = model.counters().filter_map(pmc).collect();
        let mut pmds: Vec<_> = model.counters().filter_map(pmd).collect();
        pmds.extend(VirtualPmd::ALL.iter().map(|&which| PmdDescription {
            num: which.pmd(),
            what: PmdKind::Virtual(which),
            kind: PFM_REG_TYPE_VIRTUAL,
            index: PFM_REG_IDX_NONE,
        }));
        for sampler in SAMPLERS {
            if let Some((pmc, pmd)) = self::sampler(&model, sampler) {
                pmcs.push(pmc);
                pmds.push(pmd);
            }
        }
        pmds.extend(SAMPLES.iter().filter_map(|&of| sample(&model, of)));
        pmcs.sort_by_key(|pmc| pmc.num);
        pmds.sort_by_key(|pmd| pmd.num);
        LogicalPmu { model, pmcs, pmds }
    }

    /// The logical PMU of a VM, by what it says of itself (MODEL).
    ///
    /// # Errors
    /// The model as it was described: this version does not have it.
    pub fn served(info: &ModelInfo) -> Result<Self, String> {
        let fixed = match info.fixed_map {
            // Not the first ones.
            Some(map) if map.count_ones() != map.trailing_ones() => format!("{map:#x}"),
            _ => info.fixed.to_string(),
        };
        let text = format!(
            "{},counters={},fixed={fixed},width={}",
            info.model, info.programmable, info.counter_width
        );
        let Ok(model) = PmuModel::parse(&text) else {
            return Err(text);
        };
        // Whose event codes the guest has; a model's own stand for themselves.
        let mut families = EventFamily::ALL.into_iter();
        let own = families.find(|family| family.name() == info.event_family);
        let with = own.and_then(|family| model.clone().with_events(family));
        Ok(Self::new(with.unwrap_or(model)))
    }

    /// The model behind it.
    #[must_use]
    pub fn model(&self) -> &PmuModel {
        &self.model
    }

    /// Every PMC, by ascending index.
    #[must_use]
    pub fn pmcs(&self) -> &[PmcDescription] {
        &self.pmcs
    }

    /// Every PMD, by ascending index.
    #[must_use]
    pub fn pmds(&self) -> &[PmdDescription] {
        &self.pmds
    }

    /// The PMC of an index.
    #[must_use]
    pub fn pmc(&self, num: u16) -> Option<&PmcDescription> {
        self.pmcs.iter().find(|pmc| pmc.num == num)
    }

    /// The PMD of an index.
    #[must_use]
    pub fn pmd(&self, num: u16) -> Option<&PmdDescription> {
        self.pmds.iter().find(|pmd| pmd.num == num)
    }

    /// The PMDs that there are.
    #[must_use]
    pub fn implemented_pmds(&self) -> PmdBits {
        self.pmds.iter().map(|pmd| pmd.num).collect()
    }

    /// What a PMC of this value asks its counter to do, as a tool of the host means it; of a
    /// sampler, what comes nearest to what it samples.
    #[must_use]
    pub fn request(&self, pmc: &PmcDescription, value: u64) -> Option<CountRequest> {
        match pmc.counter {
            CounterId::Programmable(_) => {
                Some(CountRequest::decode(self.model.events(), value).of_host_tool())
            }
            CounterId::Fixed(n) => Some(CountRequest::decode_fixed(
                pmu_model::FixedFunction::of(n)?,
                value,
            )),
            CounterId::Ibs(kind) => self.sampler_requests(kind, value).next(),
        }
    }

    /// What can be counted for the samples of a control of this value, the best first.
    pub(crate) fn sampler_requests(
        &self,
        kind: IbsKind,
        value: u64,
    ) -> impl Iterator<Item = CountRequest> {
        let requests = self.model.ibs_requests(kind, value & op::COUNT_OPS != 0);
        let enabled = is_on(kind, value);
        requests.map(move |request| CountRequest { enabled, ..request })
    }

    /// The PMD of a register that describes a sample.
    pub(crate) fn sample(&self, of: IbsRegister) -> Option<&PmdDescription> {
        let is_it = |pmd: &&PmdDescription| matches!(pmd.what, PmdKind::Sample { register, .. } if register == of);
        self.pmds.iter().find(is_it)
    }

    /// The PMC and the PMD of a sampler.
    pub(crate) fn sampler(&self, kind: IbsKind) -> Option<(u16, u16)> {
        let is_it = |pmc: &&PmcDescription| pmc.counter == CounterId::Ibs(kind);
        self.pmcs.iter().find(is_it).map(|pmc| (pmc.num, pmc.pmd))
    }
}

impl PmcDescription {
    /// The value that a write leaves: reserved bits silently keep their default
    /// (§3.1.13).
    #[must_use]
    pub fn accept(&self, value: u64) -> u64 {
        (value & !self.reserved) | (self.default & self.reserved) | self.forced
    }
}

/// Index of a counter's PMC and PMD.
fn index(model: &PmuModel, counter: CounterId) -> Option<u16> {
    match counter {
        CounterId::Programmable(n) if model.vendor() == Vendor::Amd && n >= AMD_BELOW_IBS => {
            Some(AMD_ABOVE_IBS + u16::from(n))
        }
        CounterId::Programmable(n) => Some(n.into()),
        CounterId::Fixed(n) => Some(FIXED + u16::from(n)),
        CounterId::Ibs(_) => None,
    }
}

fn pmc(model: &PmuModel, counter: CounterId) -> Option<PmcDescription> {
    let (register, implemented, forced) = match counter {
        CounterId::Programmable(n) => {
            // A context has no PEBS records.
            (Register::Select(n), model.event_bits(), SELECT_INT)
        }
        CounterId::Fixed(n) => {
            let rule = model.write_rule(Register::FixedControl)?;
            let shift = 4 * u32::from(n);
            let field = 0xf << shift;
            let forced = FIXED_INT << shift;
            (Register::FixedControl, rule.implemented & field, forced)
        }
        CounterId::Ibs(_) => return None,
    };
    let num = index(model, counter)?;
    Some(PmcDescription {
        num,
        counter,
        pmd: num,
        default: 0,
        reserved: !implemented,
        forced: forced & implemented,
        kind: PFM_REG_TYPE_MSR,
        index: find_msr(model, |found| found == register)?.into(),
    })
}

fn pmd(model: &PmuModel, counter: CounterId) -> Option<PmdDescription> {
    let is_it = |register| matches!(register, Register::Counter { counter: c, .. } if c == counter);
    let width = match counter {
        CounterId::Programmable(_) => model.width(),
        CounterId::Fixed(_) => model.fixed_width(),
        CounterId::Ibs(_) => return None,
    };
    let num = index(model, counter)?;
    Some(PmdDescription {
        num,
        what: PmdKind::Counter {
            counter,
            width,
            pmc: num,
        },
        kind: PFM_REG_TYPE_MSR,
        index: find_msr(model, is_it)?.into(),
    })
}

/// PMC and PMD of a sampler, if the model has it. Ops are counted if a source counts
/// them, which a load finds out; the guest's CPUID says more.
fn sampler(
    model: &PmuModel,
    (num, pmd, register): (u16, u16, IbsRegister),
) -> Option<(PmcDescription, PmdDescription)> {
    let kind = register.sampler()?;
    let index = find_msr(model, |found| found == Register::Ibs(register))?.into();
    let rule = model.write_rule(Register::Ibs(register))?;
    let (control, count) = match kind {
        IbsKind::Fetch => (
            fetch::MAX | fetch::ENABLE | fetch::RANDOM,
            fetch::MAX << fetch::COUNT_SHIFT,
        ),
        IbsKind::Op => {
            let maximum = rule.implemented & (op::MAX | op::MAX_EXTENDED);
            let count = low_bits(model.ibs_op_count_bits()) << op::COUNT_SHIFT;
            (maximum | op::ENABLE | op::COUNT_OPS, count)
        }
    };
    let pmc = PmcDescription {
        num,
        counter: CounterId::Ibs(kind),
        pmd,
        default: 0,
        reserved: !control,
        forced: 0,
        kind: PFM_REG_TYPE_MSR,
        index,
    };
    let pmd = PmdDescription {
        num: pmd,
        what: PmdKind::Sampler {
            kind,
            pmc: num,
            count,
        },
        kind: PFM_REG_TYPE_MSR,
        index,
    };
    Some((pmc, pmd))
}

/// The PMD of what describes a sample, if the model has it.
fn sample(model: &PmuModel, (num, register): (u16, IbsRegister)) -> Option<PmdDescription> {
    let index = find_msr(model, |found| found == Register::Ibs(register))?.into();
    let of_it = |control: &IbsRegister| control.sampler() == register.sampler();
    let pmc = SAMPLERS.iter().find(|(_, _, control)| of_it(control))?.0;
    Some(PmdDescription {
        num,
        what: PmdKind::Sample { register, pmc },
        kind: PFM_REG_TYPE_MSR,
        index,
    })
}

/// The first MSR of a register that `is_it`.
fn find_msr(model: &PmuModel, is_it: impl Fn(Register) -> bool) -> Option<u32> {
    let mut registers = model.registers();
    registers.find_map(|(msr, register)| is_it(register).then_some(msr))
}
