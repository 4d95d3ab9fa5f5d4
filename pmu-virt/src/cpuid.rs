//! What CPUID says about a PMU.

use crate::accounting;
use crate::backend::CounterBackend;
use crate::event::{ARCHITECTURAL, EventCode};
use crate::ids::Vendor;
use crate::model::PmuModel;
use crate::request::CountRequest;

/// The four registers of one CPUID leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuidRegs {
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
}

/// Everything that CPUID tells a guest about its PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmuCpuid {
    /// Leaf 0xA; all 0 on AMD.
    pub leaf_0xa: CpuidRegs,
    /// Leaf 1 ECX bit 15, PDCM: `IA32_PERF_CAPABILITIES` exists.
    pub pdcm: bool,
    /// The value of that register.
    pub perf_capabilities: Option<u64>,
    /// Leaf 0x80000001 ECX bit 23, PerfCtrExtCore.
    pub perfctr_core: bool,
    /// Leaf 0x80000022; all 0 without PerfMonV2.
    pub leaf_80000022: CpuidRegs,
    /// Leaf 0x80000022 EAX bit 0, PerfMonV2.
    pub perfmon_v2: bool,
    /// Leaves of the hypervisor range that announce [`crate::accounting`].
    pub accounting: [(u32, CpuidRegs); 2],
}

impl PmuModel {
    /// What CPUID has to say about this model when `backend` does the
    /// counting. Sources: SDM vol. 2A, CPUID leaf 0AH; APM vol. 3, appendix E,
    /// functions 8000_0001h and 8000_0022h.
    pub fn cpuid(&self, backend: &dyn CounterBackend) -> PmuCpuid {
        let amd_extended = self.vendor() == Vendor::Amd && self.programmable() > 4;
        let perfmon_v2 = self.vendor() == Vendor::Amd && self.has_global_control();
        PmuCpuid {
            leaf_0xa: match self.vendor() {
                Vendor::Intel => self.leaf_0xa(backend),
                Vendor::Amd => CpuidRegs::default(),
            },
            pdcm: self.perf_capabilities().is_some(),
            perf_capabilities: self.perf_capabilities(),
            perfctr_core: amd_extended || perfmon_v2,
            leaf_80000022: if perfmon_v2 {
                CpuidRegs {
                    eax: 1,
                    ebx: u32::from(self.programmable()),
                    ..CpuidRegs::default()
                }
            } else {
                CpuidRegs::default()
            },
            perfmon_v2,
            accounting: accounting::cpuid_leaves(self),
        }
    }

    /// EAX: version, counters, width, length of EBX. EBX: a set bit says that
    /// the event is *not* available. EDX (from version 2): fixed counters and
    /// their width. ECX: 0 before version 5.
    fn leaf_0xa(&self, backend: &dyn CounterBackend) -> CpuidRegs {
        let mut ebx = 0;
        let mut length: u8 = 0;
        for (select, umask) in ARCHITECTURAL {
            let event = EventCode::Selected {
                family: self.events(),
                select,
                umask,
            };
            if backend
                .can_count(&CountRequest::plain(event, true, true))
                .is_err()
            {
                ebx |= 1 << length;
            }
            length += 1;
        }
        CpuidRegs {
            eax: u32::from_le_bytes([self.version(), self.programmable(), self.width(), length]),
            ebx,
            ecx: 0,
            edx: if self.version() >= 2 {
                u32::from(self.fixed()) | u32::from(self.fixed_width()) << 5
            } else {
                0
            },
        }
    }
}
