//! What CPUID says about a PMU, and the table of leaves that it says it in.

mod leaves;
mod traces;

pub use leaves::{Leaf, Leaves, Reg};
pub use traces::{Keep, Kept, hide_everything, hide_obstacles, show, show_own_leaves, traces};

use arbiter::{CounterId, CounterSet, PcrUnit, PerKind, abi};

use crate::accounting::{
    ABI_VERSION, CPUID_BASE, CPUID_FEATURES, FEATURE_ACCOUNTING, MSR_BASE, SIGNATURE,
};
use crate::event::{ARCHITECTURAL, EventCode};
use crate::ids::Vendor;
use crate::model::{MAX_FIXED, PmuModel};
use crate::request::CountRequest;

/// The four registers of one CPUID leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuidRegs {
    pub eax: u32,
    pub ebx: u32,
    pub ecx: u32,
    pub edx: u32,
}

impl CpuidRegs {
    /// One of them by its name.
    pub fn register(&mut self, reg: Reg) -> &mut u32 {
        match reg {
            Reg::Eax => &mut self.eax,
            Reg::Ebx => &mut self.ebx,
            Reg::Ecx => &mut self.ecx,
            Reg::Edx => &mut self.edx,
        }
    }
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
    /// Leaf 1 EDX bit 21, DS, and ECX bit 2, DTES64: there is a debug store area, in the
    /// layout of 64 bits.
    pub debug_store: bool,
    /// Leaf 0x80000001 ECX bit 23, PerfCtrExtCore.
    pub perfctr_core: bool,
    /// Leaf 0x8000001B, instruction-based sampling; all 0 without. With it goes leaf
    /// 0x80000001 ECX bit 10.
    pub leaf_8000001b: CpuidRegs,
    /// Leaf 0x80000022; all 0 without PerfMonV2.
    pub leaf_80000022: CpuidRegs,
    /// Leaf 0x80000022 EAX bit 0, PerfMonV2.
    pub perfmon_v2: bool,
    /// Leaves of the hypervisor range, by number: those that announce
    /// [`crate::accounting`], then that of counter reservations, which is all 0
    /// where there are none.
    pub hypervisor: [(u32, CpuidRegs); 3],
}

impl PmuCpuid {
    /// The same for a guest that can reserve counters: `docs/reference/pcr.md`, "Finding
    /// it".
    #[must_use]
    pub fn with_reservations(mut self, unit: &PcrUnit) -> Self {
        let [(_, base), (_, features), (leaf, reservations)] = &mut self.hypervisor;
        base.eax = base.eax.max(*leaf);
        features.ecx |= abi::CPUID_FEATURES_ECX_PCR;
        let counters = PerKind::count(unit.bank().counters().counters());
        *reservations = CpuidRegs {
            eax: abi::VERSION,
            ebx: abi::MSR_BASE,
            ecx: unit.features(),
            edx: u32::from_le_bytes([counters.programmable, counters.fixed, COOKIE_BITS, 0]),
        };
        self
    }
}

/// Programmable counters that every AMD processor has.
const AMD_LEGACY_COUNTERS: u8 = 4;

/// Bits of a cookie.
const COOKIE_BITS: u8 = 48;

/// The CPUID leaves that announce [`crate::accounting`] to a guest with `model`.
pub fn accounting_leaves(model: &PmuModel) -> [(u32, CpuidRegs); 2] {
    let [s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11] = *SIGNATURE;
    let base = CpuidRegs {
        eax: CPUID_FEATURES,
        ebx: u32::from_le_bytes([s0, s1, s2, s3]),
        ecx: u32::from_le_bytes([s4, s5, s6, s7]),
        edx: u32::from_le_bytes([s8, s9, s10, s11]),
    };
    let features = CpuidRegs {
        eax: ABI_VERSION,
        ebx: MSR_BASE,
        ecx: FEATURE_ACCOUNTING,
        edx: u32::from_le_bytes([model.programmable(), model.fixed(), 0, 0]),
    };
    [(CPUID_BASE, base), (CPUID_FEATURES, features)]
}

impl PmuModel {
    /// What CPUID has to say about this model where `countable` says whether
    /// anybody counts what a request asks for. Sources: SDM vol. 2A, CPUID leaf 0AH; APM vol. 3, appendix E,
    /// functions 8000_0001h and 8000_0022h.
    pub fn cpuid(&self, countable: impl Fn(&CountRequest) -> bool) -> PmuCpuid {
        self.announced(countable, self.counts())
    }

    /// The same for a guest that is to see `visible` counters, which is an
    /// answer of [`PmuModel::can_announce`]. What the hypervisor's own leaves
    /// say is about the counters that there are.
    pub fn announced(
        &self,
        countable: impl Fn(&CountRequest) -> bool,
        visible: PerKind,
    ) -> PmuCpuid {
        let amd_extended =
            self.vendor() == Vendor::Amd && visible.programmable > AMD_LEGACY_COUNTERS;
        let perfmon_v2 = self.vendor() == Vendor::Amd && self.has_global_control();
        PmuCpuid {
            leaf_0xa: match self.vendor() {
                Vendor::Intel => self.leaf_0xa(countable, visible),
                Vendor::Amd => CpuidRegs::default(),
            },
            pdcm: self.perf_capabilities().is_some(),
            perf_capabilities: self.perf_capabilities(),
            debug_store: self.pebs().is_some(),
            perfctr_core: amd_extended || perfmon_v2,
            leaf_8000001b: CpuidRegs {
                eax: self.ibs(),
                ..CpuidRegs::default()
            },
            leaf_80000022: if perfmon_v2 {
                CpuidRegs {
                    eax: 1 | u32::from(self.can_freeze()) << 2,
                    ebx: u32::from(visible.programmable),
                    ..CpuidRegs::default()
                }
            } else {
                CpuidRegs::default()
            },
            perfmon_v2,
            hypervisor: {
                let [base, features] = accounting_leaves(self);
                [base, features, (abi::CPUID_LEAF, CpuidRegs::default())]
            },
        }
    }

    /// The most counters that CPUID can announce when legacy software is to use
    /// none but those in `free`. Programmable counters are renamed, so that any
    /// will do; fixed-function counters cannot be, and CPUID announces the first
    /// so many. `None`: what is left cannot be said.
    ///
    /// Intel and PerfMonV2 give a number of programmable counters. The core
    /// extension of AMD is one bit that stands for six, and below it stand the
    /// four legacy counters, which no bit announces.
    pub fn can_announce(&self, free: CounterSet) -> Option<PerKind> {
        let free = |counter: &CounterId| free.contains(*counter);
        let programmable = (0..self.programmable()).map(CounterId::Programmable);
        let programmable = u8::try_from(programmable.filter(free).count()).ok()?;
        let fixed = (0..self.fixed()).map(CounterId::Fixed).take_while(free);
        let by_number = self.vendor() == Vendor::Intel || self.has_global_control();
        let least = if by_number { 1 } else { AMD_LEGACY_COUNTERS };
        let said = if by_number || programmable == self.programmable() {
            programmable
        } else {
            AMD_LEGACY_COUNTERS
        };
        (programmable >= least).then_some(PerKind {
            programmable: said,
            fixed: u8::try_from(fixed.count()).ok()?,
        })
    }

    /// EAX: version, counters, width, length of EBX. EBX: a set bit says that
    /// the event is *not* available. EDX (from version 2): how many fixed counters
    /// there are from the first one on, and their width; from version 5 on bit 15 says
    /// that any-thread is no more. ECX: 0 before version 5, then a bit for each fixed
    /// counter.
    fn leaf_0xa(&self, countable: impl Fn(&CountRequest) -> bool, visible: PerKind) -> CpuidRegs {
        let mut ebx = 0;
        let mut length: u8 = 0;
        for (select, umask) in ARCHITECTURAL {
            let event = EventCode::Selected {
                family: self.events(),
                select,
                umask,
            };
            if !countable(&CountRequest::plain(event, true, true)) {
                ebx |= 1 << length;
            }
            length += 1;
        }
        let fixed = u32::from(self.fixed_map()) & ((1 << visible.fixed.min(MAX_FIXED)) - 1);
        CpuidRegs {
            eax: u32::from_le_bytes([self.version(), visible.programmable, self.width(), length]),
            ebx,
            ecx: if self.has_fixed_map() { fixed } else { 0 },
            edx: if self.version() >= 2 {
                let no_any_thread = u32::from(self.has_fixed_map()) << 15;
                fixed.trailing_ones() | u32::from(self.fixed_width()) << 5 | no_any_thread
            } else {
                0
            },
        }
    }
}
