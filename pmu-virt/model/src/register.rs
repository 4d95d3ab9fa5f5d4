//! Registers of a PMU and what a write to each of them does.

use arbiter::CounterId;

use crate::ibs::IbsRegister;

/// One register of a PMU, decoded from an MSR index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Register {
    /// The count itself.
    Counter {
        counter: CounterId,
        /// How a written value becomes the count.
        form: WriteForm,
    },
    /// The event select of a programmable counter (`IA32_PERFEVTSELx`, `PERF_CTL`).
    Select(u8),
    /// `IA32_FIXED_CTR_CTRL`.
    FixedControl,
    /// `IA32_PERF_GLOBAL_STATUS`, `PerfCntrGlobalStatus`.
    GlobalStatus,
    /// `IA32_PERF_GLOBAL_CTRL`, `PerfCntrGlobalCtl`.
    GlobalControl,
    /// `IA32_PERF_GLOBAL_OVF_CTRL`, from version 4 on called
    /// `IA32_PERF_GLOBAL_STATUS_RESET`; `PerfCntrGlobalStatusClr`.
    GlobalStatusClear,
    /// `IA32_PERF_GLOBAL_STATUS_SET`, `PerfCntrGlobalStatusSet`.
    GlobalStatusSet,
    /// `IA32_PERF_GLOBAL_INUSE`.
    GlobalInUse,
    /// `IA32_PERF_CAPABILITIES`.
    PerfCapabilities,
    /// One of instruction-based sampling.
    Ibs(IbsRegister),
    /// `IA32_PEBS_ENABLE`.
    PebsEnable,
    /// `MSR_PEBS_DATA_CFG`.
    PebsDataConfig,
    /// `IA32_DS_AREA`.
    DsArea,
}

/// How a value written to a counter becomes its count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteForm {
    /// Bits 31:0 sign-extended, then cut to the counter's width (Intel `IA32_PMCx` at 0xC1).
    SignExtend32,
    /// The value as it is; a bit above the width raises #GP (Intel `IA32_A_PMCx`, fixed counters).
    FullWidth,
    /// The value cut to the counter's width (AMD).
    Truncate,
}

/// What happens to bits of a written value that the register does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reserved {
    /// The write raises #GP and changes nothing.
    Gp,
    /// The bits are ignored and read back as 0.
    Drop,
}

/// Which values a control register takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WriteRule {
    /// Bits that the register has.
    pub implemented: u64,
    /// What a write of any other bit does.
    pub reserved: Reserved,
}

impl WriteRule {
    /// The value that a write leaves to be used, or `None` for #GP.
    #[inline]
    pub fn accept(self, value: u64) -> Option<u64> {
        match self.reserved {
            Reserved::Gp if value & !self.implemented != 0 => None,
            Reserved::Gp | Reserved::Drop => Some(value & self.implemented),
        }
    }
}
