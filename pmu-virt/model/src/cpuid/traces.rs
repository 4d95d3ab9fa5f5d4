//! Where CPUID says something of performance monitoring, for both vendors: what is hidden
//! from a guest, and what is shown to it.

use super::leaves::{Leaves, Reg};
use super::{CpuidRegs, PmuCpuid};
use crate::accounting;

/// Architectural performance monitoring (SDM vol. 2A, CPUID leaf 0AH).
const ARCH_PERFMON: u32 = 0xa;
/// Instruction-based sampling (APM vol. 3, appendix E.4.17).
const IBS: u32 = 0x8000_001b;
/// AMD's PerfMonV2 (APM vol. 3, appendix E.4.24).
const PERFMON_V2: u32 = 0x8000_0022;

/// Single bits that announce some way to count or trace: leaf, subleaf,
/// register, bit, name.
const BITS: &[(u32, u32, Reg, u8, &str)] = &[
    (1, 0, Reg::Ecx, 2, "DTES64"),
    (1, 0, Reg::Ecx, 4, "DS-CPL"),
    (1, 0, Reg::Ecx, 15, "PDCM"),
    (1, 0, Reg::Edx, 21, "DS"),
    (6, 0, Reg::Ecx, 0, "APERF and MPERF"),
    (7, 0, Reg::Ebx, 25, "Processor Trace"),
    (7, 0, Reg::Edx, 19, "architectural LBR"),
    (
        7,
        1,
        Reg::Eax,
        8,
        "architectural perfmon extension, leaf 23H",
    ),
    (0xd, 1, Reg::Ecx, 8, "XSAVES state of Processor Trace"),
    (0xd, 1, Reg::Ecx, 15, "XSAVES state of LBR"),
    (0x8000_0001, 0, Reg::Ecx, 10, "IBS"),
    (0x8000_0001, 0, Reg::Ecx, 15, "LWP"),
    (0x8000_0001, 0, Reg::Ecx, 23, "PerfCtrExtCore"),
    (0x8000_0001, 0, Reg::Ecx, 24, "PerfCtrExtNB"),
    (0x8000_0001, 0, Reg::Ecx, 27, "PerfTsc"),
    (0x8000_0001, 0, Reg::Ecx, 28, "PerfCtrExtLLC"),
    (
        0x8000_0007,
        0,
        Reg::Edx,
        10,
        "read-only effective frequency",
    ),
    (0x8000_0008, 0, Reg::Ebx, 1, "instructions-retired counter"),
];

/// Leaves that describe a PMU and nothing else: leaf 0AH, Processor Trace, LBR,
/// leaf 23H, IBS, LWP, PerfMonV2, our own.
const LEAVES: &[u32] = &[
    ARCH_PERFMON,
    0x14,
    0x1c,
    0x23,
    IBS,
    0x8000_001c,
    PERFMON_V2,
    accounting::CPUID_BASE,
    accounting::CPUID_FEATURES,
    arbiter::abi::CPUID_LEAF,
];

/// Removes every trace of a PMU, of both vendors.
///
/// AMD's four legacy counters have no CPUID bit: they are architecturally
/// present on every AMD processor. Under `--pmu none` their MSRs raise #GP, which
/// makes drivers give up.
pub fn hide_everything(leaves: &mut Leaves) {
    for &(leaf, index, reg, bit, _) in BITS {
        leaves.clear(leaf, index, reg, bit);
    }
    leaves.remove_if(|leaf| LEAVES.contains(&leaf));
}

/// Announces the virtual PMU. What it does not have stays hidden.
pub fn show(leaves: &mut Leaves, pmu: &PmuCpuid) {
    set_if_any(leaves, ARCH_PERFMON, &pmu.leaf_0xa);
    leaves.edit(1, 0, |r| {
        r.ecx |= u32::from(pmu.pdcm) << 15 | u32::from(pmu.debug_store) << 2;
        r.edx |= u32::from(pmu.debug_store) << 21;
    });
    leaves.edit(0x8000_0001, 0, |r| {
        r.ecx |= u32::from(pmu.perfctr_core) << 23;
    });
    if pmu.leaf_8000001b.eax != 0 {
        leaves.edit(0x8000_0001, 0, |r| r.ecx |= 1 << 10);
        set_if_any(leaves, IBS, &pmu.leaf_8000001b);
    }
    if pmu.perfmon_v2 {
        set_if_any(leaves, PERFMON_V2, &pmu.leaf_80000022);
    }
    show_own_leaves(leaves, pmu);
}

/// Announces the leaves that are Umpire's own.
pub fn show_own_leaves(leaves: &mut Leaves, pmu: &PmuCpuid) {
    for (leaf, regs) in &pmu.hypervisor {
        set_if_any(leaves, *leaf, regs);
    }
}

fn set_if_any(leaves: &mut Leaves, leaf: u32, regs: &CpuidRegs) {
    if *regs != CpuidRegs::default() {
        leaves.set(leaf, 0, *regs);
    }
}

/// Names what is left of a PMU in a list of leaves.
#[must_use]
pub fn traces(leaves: &Leaves) -> Vec<String> {
    let bits = BITS
        .iter()
        .filter(|&&(leaf, index, reg, bit, _)| leaves.test(leaf, index, reg, bit))
        .map(|&(.., name)| name.to_owned());
    let whole = LEAVES
        .iter()
        .filter(|&&leaf| !leaves.indices(leaf).is_empty())
        .map(|leaf| format!("leaf {leaf:#x}"));
    bits.chain(whole).collect()
}

// What a guest must not have where a hypervisor traps its PMU, or only at a price.

/// What [`hide_obstacles`] hides, for a VMM that keeps one all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// VMX with SMX, SVM with SKINIT and memory encryption.
    NestedVirtualisation,
    /// FRED, with LKGS and NMI source.
    Fred,
    /// Shadow stacks and indirect branch tracking.
    Cet,
    /// AMD's address masks of breakpoints, BPEXT.
    BreakpointMasks,
    /// AMD's XOP and TBM, of processors up to Excavator.
    Xop,
}

/// One that was kept, and is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    pub what: Keep,
    /// What of the PMU does not work with it.
    pub stops: &'static str,
}

/// One feature, where CPUID announces it.
struct Obstacle {
    what: Keep,
    stops: &'static str,
    /// Leaf, subleaf, register, bits.
    bits: &'static [(u32, u32, Reg, &'static [u8])],
    /// Leaves that are about nothing else.
    leaves: &'static [u32],
}

/// Intel SDM vol. 2A, CPUID; FRED specification, 2; APM vol. 3, appendix E.
const OBSTACLES: &[Obstacle] = &[
    Obstacle {
        what: Keep::NestedVirtualisation,
        stops: "the PMU within nested guests: their accesses do not come to the VMM",
        bits: &[
            (1, 0, Reg::Ecx, &[5, 6]),
            (0x8000_0001, 0, Reg::Ecx, &[2, 12]),
        ],
        leaves: &[0x8000_000a, 0x8000_001f],
    },
    Obstacle {
        what: Keep::Fred,
        stops: "RDPMC of a guest that enables FRED: the trap stands on the IDT",
        bits: &[(7, 1, Reg::Eax, &[17, 18, 20])],
        leaves: &[],
    },
    Obstacle {
        what: Keep::Cet,
        stops: "RDPMC of a guest that enables shadow stacks: the trap pops an exception's frame",
        bits: &[
            (7, 0, Reg::Ecx, &[7]),
            (7, 0, Reg::Edx, &[20]),
            (7, 1, Reg::Edx, &[18]),
            // XSAVES' components of CET.
            (0xd, 1, Reg::Ecx, &[11, 12]),
        ],
        leaves: &[],
    },
    Obstacle {
        what: Keep::BreakpointMasks,
        stops: "the guest's masks: KVM has none for debug registers that the VMM has taken",
        bits: &[(0x8000_0001, 0, Reg::Ecx, &[26])],
        leaves: &[],
    },
    Obstacle {
        what: Keep::Xop,
        stops: "counts by stepping: the decoder does not know these instructions",
        bits: &[(0x8000_0001, 0, Reg::Ecx, &[11, 21])],
        leaves: &[],
    },
];

/// Hides what the traps of a PMU cannot stand, but for what is to be kept; of that, what is
/// there.
pub fn hide_obstacles(leaves: &mut Leaves, keep: &[Keep]) -> Vec<Kept> {
    let mut kept = Vec::new();
    for obstacle in OBSTACLES {
        if keep.contains(&obstacle.what) {
            if obstacle.is_in(leaves) {
                let (what, stops) = (obstacle.what, obstacle.stops);
                kept.push(Kept { what, stops });
            }
            continue;
        }
        for (leaf, subleaf, reg, bit) in obstacle.places() {
            leaves.clear(leaf, subleaf, reg, bit);
        }
        leaves.remove_if(|leaf| obstacle.leaves.contains(&leaf));
    }
    kept
}

impl Obstacle {
    fn places(&self) -> impl Iterator<Item = (u32, u32, Reg, u8)> {
        let places = self.bits.iter();
        places.flat_map(|&(leaf, subleaf, reg, bits)| {
            bits.iter().map(move |&bit| (leaf, subleaf, reg, bit))
        })
    }

    fn is_in(&self, leaves: &Leaves) -> bool {
        let mut places = self.places();
        places.any(|(leaf, subleaf, reg, bit)| leaves.test(leaf, subleaf, reg, bit))
    }
}
