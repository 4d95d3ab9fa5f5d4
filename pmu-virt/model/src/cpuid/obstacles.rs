//! What a guest must not have where a hypervisor traps its PMU, or only at a price.

use super::leaves::{Leaves, Reg};

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
