//! The registers that measuring guests program, found in the model's own table.

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx};
use pmu_virt::CounterId::Programmable;
use pmu_virt::{MsrIndex, PmuModel, Register};

/// What the assembler returns.
pub(super) type Written = Result<(), IcedError>;

/// MSR indices of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PmuMsrs {
    /// Event selects in the order of their counters.
    pub(super) selects: Vec<u32>,
    /// Counters in the same order.
    pub(super) counters: Vec<u32>,
    pub(super) global_control: Option<u32>,
}

impl PmuMsrs {
    pub(super) fn of(model: &PmuModel) -> Self {
        let find = |wanted: &dyn Fn(Register) -> bool| {
            let ranges = model.msr_ranges();
            let mut all = ranges.iter().flat_map(|&(first, last)| first..=last);
            all.find(|&msr| model.decode(MsrIndex(msr)).is_some_and(wanted))
        };
        let numbers = 0..model.programmable();
        let select = |n| find(&|register| register == Register::Select(n));
        let counter = |n| {
            find(
                &|register| matches!(register, Register::Counter { counter, .. } if counter == Programmable(n)),
            )
        };
        Self {
            selects: numbers.clone().filter_map(select).collect(),
            counters: numbers.filter_map(counter).collect(),
            global_control: find(&|register| register == Register::GlobalControl),
        }
    }

    /// The first counter's select and count; every model has one.
    pub(super) fn first(&self) -> (u32, u32) {
        let first = |of: &[u32]| of.first().copied().unwrap_or_default();
        (first(&self.selects), first(&self.counters))
    }

    /// Code that lets the first `counters` counters follow their selects.
    pub(super) fn enable(&self, a: &mut CodeAssembler, counters: u32) -> Written {
        match self.global_control {
            Some(msr) => wrmsr(a, msr, (1 << counters) - 1),
            None => Ok(()),
        }
    }
}

/// WRMSR of a constant.
pub(super) fn wrmsr(a: &mut CodeAssembler, msr: u32, value: u64) -> Written {
    let low = |word: u64| u32::try_from(word & 0xffff_ffff).unwrap_or_default();
    a.mov(ecx, msr)?;
    a.mov(eax, low(value))?;
    a.mov(edx, low(value >> 32))?;
    a.wrmsr()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(model: &str, first: (u32, u32), last: (u32, u32), global: Option<u32>) {
        let msrs = PmuMsrs::of(&PmuModel::parse(model).unwrap());
        let ends = (msrs.selects.last(), msrs.counters.last());
        assert_eq!(msrs.first(), first, "{model}");
        assert_eq!(ends, (Some(&last.0), Some(&last.1)), "{model}");
        assert_eq!(msrs.global_control, global, "{model}");
    }

    #[test]
    fn every_counter_is_found() {
        check("intel-v1", (0x186, 0xc1), (0x187, 0xc2), None);
        check(
            "intel-v2,counters=8",
            (0x186, 0xc1),
            (0x18d, 0xc8),
            Some(0x38f),
        );
        check(
            "amd-perfmonv2",
            // The first four answer under their old numbers too.
            (0xc001_0000, 0xc001_0004),
            (0xc001_020a, 0xc001_020b),
            Some(0xc000_0301),
        );
    }
}
