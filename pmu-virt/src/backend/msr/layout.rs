//! Where this processor's counters are, from CPUID and the crate's own tables
//! of registers.

use arbiter::CounterId;
use pmu_model::{CpuidRegs, MsrIndex, PmuModel, Register, Vendor};

use super::error::MsrRefusal;

/// What CPUID says about a host's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCpuid {
    /// Who made the processor; Hygon's counters are AMD's.
    pub vendor: Option<Vendor>,
    /// Leaf 1: family and model.
    pub leaf_1: CpuidRegs,
    /// Leaf 0xA: architectural performance monitoring (Intel).
    pub leaf_0xa: CpuidRegs,
    /// Leaf 0x80000001: ECX bit 23 is the core extension (AMD).
    pub leaf_80000001: CpuidRegs,
    /// Leaf 0x80000022: PerfMonV2 (AMD).
    pub leaf_80000022: CpuidRegs,
}

impl HostCpuid {
    /// Family with the extended family added (SDM vol. 2A, CPUID leaf 1;
    /// APM vol. 3, function 1).
    pub fn family(&self) -> u32 {
        let eax = self.leaf_1.eax;
        match eax >> 8 & 0xf {
            0xf => 0xf + (eax >> 20 & 0xff),
            family => family,
        }
    }

    /// Model with the extended model in front.
    pub fn model(&self) -> u32 {
        let eax = self.leaf_1.eax;
        (eax >> 4 & 0xf) | (eax >> 12 & 0xf0)
    }

    /// Whether `IA32_PERF_CAPABILITIES` exists (leaf 1 ECX bit 15, PDCM).
    pub(super) fn has_capabilities(&self) -> bool {
        self.vendor == Some(Vendor::Intel) && self.leaf_1.ecx & 1 << 15 != 0
    }

    /// The model whose registers this processor has, as far as they are used
    /// here: at most 8 programmable and 3 fixed counters.
    pub(super) fn pmu(&self, full_width: bool) -> Result<PmuModel, MsrRefusal> {
        let byte = |word: u32, shift: u32| (word >> shift) & 0xff;
        let spec = match self.vendor {
            None => return Err(MsrRefusal::UnknownCpu),
            Some(Vendor::Intel) => {
                let (eax, edx) = (self.leaf_0xa.eax, self.leaf_0xa.edx);
                let counters = byte(eax, 8).min(8);
                let width = byte(eax, 16);
                let full_width = if full_width { "on" } else { "off" };
                match byte(eax, 0) {
                    0 => return Err(MsrRefusal::NoPmu),
                    _ if counters == 0 => return Err(MsrRefusal::NoPmu),
                    1 => format!(
                        "intel-v1,counters={counters},width={width},full-width={full_width}"
                    ),
                    _ => {
                        let (fixed, fixed_width) = ((edx & 0x1f).min(3), byte(edx, 5));
                        let fixed_width = if fixed == 0 { width } else { fixed_width };
                        format!(
                            "intel-v2,counters={counters},width={width},fixed={fixed},\
                             fixed-width={fixed_width},full-width={full_width}"
                        )
                    }
                }
            }
            Some(Vendor::Amd) if self.leaf_80000022.eax & 1 != 0 => {
                // EBX bits 3:0 are the number of core counters (APM vol. 3).
                format!(
                    "amd-perfmonv2,counters={}",
                    (self.leaf_80000022.ebx & 0xf).min(6)
                )
            }
            Some(Vendor::Amd) if self.leaf_80000001.ecx & 1 << 23 != 0 => "amd-core".to_owned(),
            Some(Vendor::Amd) if self.family() >= 0x10 => "amd-fam10h".to_owned(),
            Some(Vendor::Amd) => "amd-k7".to_owned(),
        };
        PmuModel::parse(&spec).map_err(|error| MsrRefusal::OddPmu {
            problem: error.to_string(),
        })
    }
}

/// One physical counter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counter {
    pub(super) id: CounterId,
    /// Where the count is read and written.
    pub(super) value: MsrIndex,
    /// Where its event is selected; a fixed counter has no such register.
    pub(super) select: Option<MsrIndex>,
    /// The bits it has.
    pub(super) mask: u64,
}

/// Every register in use.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) model: PmuModel,
    /// Programmable counters first; the position is the slot.
    pub(super) counters: Vec<Counter>,
    pub(super) fixed_control: Option<MsrIndex>,
    pub(super) global_control: Option<MsrIndex>,
}

impl Layout {
    pub(super) fn of(model: PmuModel) -> Self {
        let registers = || {
            let ranges = model.msr_ranges().into_iter();
            let indices = ranges.flat_map(|(first, last)| (first..=last).map(MsrIndex));
            indices.filter_map(|msr| Some((msr, model.decode(msr)?)))
        };
        // Where a register has several indices the highest one is best: on
        // Intel it takes full-width writes, on AMD it is the core extension's.
        let find = |wanted: &dyn Fn(Register) -> bool| {
            let found = registers().filter(|(_, register)| wanted(*register));
            found.map(|(msr, _)| msr).last()
        };
        let counters = model.counters().filter_map(|id| {
            let value = find(
                &|register| matches!(register, Register::Counter { counter, .. } if counter == id),
            )?;
            let select = match id {
                CounterId::Programmable(n) => Some(find(&|r| r == Register::Select(n))?),
                CounterId::Fixed(_) | CounterId::Ibs(_) => None,
            };
            let mask = model.counter_mask(id);
            Some(Counter {
                id,
                value,
                select,
                mask,
            })
        });
        Layout {
            counters: counters.collect(),
            fixed_control: find(&|register| register == Register::FixedControl),
            global_control: find(&|register| register == Register::GlobalControl),
            model,
        }
    }

    /// The registers that are saved and restored, in the order in which they
    /// are restored: what lets counters run comes last.
    pub(super) fn all(&self) -> Vec<MsrIndex> {
        let values = self.counters.iter().map(|counter| counter.value);
        let selects = self.counters.iter().filter_map(|counter| counter.select);
        values
            .chain(selects)
            .chain(self.fixed_control)
            .chain(self.global_control)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regs(eax: u32, ebx: u32, ecx: u32, edx: u32) -> CpuidRegs {
        CpuidRegs { eax, ebx, ecx, edx }
    }

    /// Family and model as leaf 1 EAX has them.
    fn signature(family: u32, model: u32) -> CpuidRegs {
        let (base, extended) = if family > 0xf {
            (0xf, family - 0xf)
        } else {
            (family, 0)
        };
        let eax = base << 8 | extended << 20 | (model & 0xf) << 4 | (model >> 4) << 16;
        regs(eax, 0, 0, 0)
    }

    fn indices(layout: &Layout) -> (Vec<u32>, Vec<u32>) {
        let values = layout.counters.iter().map(|counter| counter.value.0);
        let selects = layout.counters.iter().filter_map(|counter| counter.select);
        (values.collect(), selects.map(|msr| msr.0).collect())
    }

    #[test]
    fn layouts_follow_cpuid() {
        let skylake = HostCpuid {
            vendor: Some(Vendor::Intel),
            leaf_1: signature(6, 0x5e),
            leaf_0xa: regs(0x0730_0404, 0, 0, 0x603),
            ..HostCpuid::default()
        };
        assert_eq!((skylake.family(), skylake.model()), (6, 0x5e));
        let layout = Layout::of(skylake.pmu(true).expect("a PMU"));
        assert_eq!(
            indices(&layout),
            (
                vec![0x4c1, 0x4c2, 0x4c3, 0x4c4, 0x309, 0x30a, 0x30b],
                vec![0x186, 0x187, 0x188, 0x189]
            )
        );
        assert_eq!(layout.global_control, Some(MsrIndex(0x38f)));
        assert_eq!(layout.fixed_control, Some(MsrIndex(0x38d)));
        let narrow = Layout::of(skylake.pmu(false).expect("a PMU"));
        assert_eq!(narrow.counters[0].value, MsrIndex(0xc1));

        let zen2 = HostCpuid {
            vendor: Some(Vendor::Amd),
            leaf_1: signature(0x17, 0x31),
            leaf_80000001: regs(0, 0, 1 << 23, 0),
            ..HostCpuid::default()
        };
        assert_eq!((zen2.family(), zen2.model()), (0x17, 0x31));
        let layout = Layout::of(zen2.pmu(false).expect("a PMU"));
        let pairs = (0..6).map(|n| 0xc001_0201 + 2 * n).collect::<Vec<_>>();
        assert_eq!(indices(&layout).0, pairs);
        assert_eq!(layout.global_control, None);

        let zen4 = HostCpuid {
            leaf_80000022: regs(1, 6, 0, 0),
            ..zen2
        };
        let layout = Layout::of(zen4.pmu(false).expect("a PMU"));
        assert_eq!(layout.global_control, Some(MsrIndex(0xc000_0301)));

        let barcelona = HostCpuid {
            leaf_1: signature(0x10, 2),
            leaf_80000001: CpuidRegs::default(),
            ..zen2
        };
        let layout = Layout::of(barcelona.pmu(false).expect("a PMU"));
        assert_eq!(
            indices(&layout).0,
            [0xc001_0004, 0xc001_0005, 0xc001_0006, 0xc001_0007]
        );
        assert_eq!(layout.model.name(), "amd-fam10h");
    }

    #[test]
    fn a_processor_without_counters_is_refused() {
        let none = HostCpuid {
            vendor: Some(Vendor::Intel),
            ..HostCpuid::default()
        };
        assert!(matches!(none.pmu(false), Err(MsrRefusal::NoPmu)));
        let unknown = HostCpuid::default();
        assert!(matches!(unknown.pmu(false), Err(MsrRefusal::UnknownCpu)));
        let odd = HostCpuid {
            leaf_0xa: regs(0x0701_0402, 0, 0, 0),
            ..none
        };
        assert!(matches!(odd.pmu(false), Err(MsrRefusal::OddPmu { .. })));
    }
}
