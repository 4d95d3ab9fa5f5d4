//! Which counters a core PMU has, by CPUID.

use std::fmt;

use crate::budget::CpuidLeaf;

/// A fixed-function counter of Intel's processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fixed {
    /// Counter 0: retired instructions.
    Instructions,
    /// Counter 1: core cycles.
    Cycles,
    /// Counter 2: reference cycles.
    RefCycles,
    /// Counter 3: slots of the top-down method.
    Slots,
}

impl Fixed {
    /// All that a measurement looks for.
    pub const ALL: [Fixed; 4] = [
        Fixed::Instructions,
        Fixed::Cycles,
        Fixed::RefCycles,
        Fixed::Slots,
    ];

    /// Its number.
    pub fn index(self) -> u32 {
        match self {
            Fixed::Instructions => 0,
            Fixed::Cycles => 1,
            Fixed::RefCycles => 2,
            Fixed::Slots => 3,
        }
    }

    /// The `config` of its event. The last two are the kernel's codes for what no programmable
    /// counter counts.
    pub fn config(self) -> u64 {
        match self {
            Fixed::Instructions => 0xC0,
            Fixed::Cycles => 0x3C,
            Fixed::RefCycles => 0x0300,
            Fixed::Slots => 0x0400,
        }
    }
}

impl fmt::Display for Fixed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fixed::Instructions => "instructions",
            Fixed::Cycles => "cycles",
            Fixed::RefCycles => "ref-cycles",
            Fixed::Slots => "slots",
        })
    }
}

/// The counters that a CPU's PMU has, whoever holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Programmable counters.
    pub programmable: u32,
    /// Fixed-function counters: bit N for the counter N.
    pub fixed_mask: u32,
}

impl Capacity {
    /// Whether it has this fixed-function counter.
    pub fn has(self, fixed: Fixed) -> bool {
        self.fixed_mask & (1 << fixed.index()) != 0
    }

    /// Reads CPUID: leaf 0xA of Intel's (SDM volume 3, "Architectural Performance
    /// Monitoring"); for AMD leaf 0x8000_0022, else PerfCtrExtCore of 0x8000_0001 (APM volume 3,
    /// appendix E). `None` without a PMU, or for other vendors.
    pub(crate) fn by_cpuid(mut cpuid: impl FnMut(u32) -> CpuidLeaf) -> Option<Capacity> {
        let first = cpuid(0);
        let perfmon = if first.eax >= 0xA {
            cpuid(0xA)
        } else {
            CpuidLeaf::default()
        };
        let version = perfmon.eax & 0xFF;
        if version > 0 {
            let contiguous = if version > 1 { perfmon.edx & 0x1F } else { 0 };
            let listed = if version > 4 { perfmon.ecx } else { 0 };
            return Some(Capacity {
                programmable: perfmon.eax >> 8 & 0xFF,
                fixed_mask: ((1 << contiguous) - 1) | listed,
            });
        }
        // "Auth", and Hygon's "Hygo".
        if ![0x6874_7541, 0x6F67_7948].contains(&first.ebx) {
            return None;
        }
        let last = cpuid(0x8000_0000).eax;
        let counted = (last >= 0x8000_0022).then(|| cpuid(0x8000_0022));
        let counted = counted.filter(|leaf| leaf.eax & 1 != 0);
        let extended = last >= 0x8000_0001 && cpuid(0x8000_0001).ecx & 1 << 23 != 0;
        let programmable = match counted {
            Some(leaf) => leaf.ebx & 0xF,
            None if extended => 6,
            None => 4,
        };
        Some(Capacity {
            programmable,
            fixed_mask: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors() {
        let check = |leaves: &[(u32, [u32; 4])], expected: Option<(u32, u32)>| {
            let found = Capacity::by_cpuid(|leaf| {
                let found = leaves.iter().find(|(one, _)| *one == leaf);
                let [eax, ebx, ecx, edx] = found.map_or([0; 4], |(_, registers)| *registers);
                CpuidLeaf { eax, ebx, ecx, edx }
            });
            let found = found.map(|one| (one.programmable, one.fixed_mask));
            assert_eq!(found, expected, "{leaves:x?}");
        };
        let intel = (0, [0x16, 0x756E_6547, 0, 0]);
        let amd = (0, [0x10, 0x6874_7541, 0, 0]);
        check(&[], None);
        check(&[intel], None);
        check(&[(0, [5, 0x756E_6547, 0, 0])], None);
        check(&[intel, (0xA, [0x0730_0401, 0, 0, 0x603])], Some((4, 0)));
        check(&[intel, (0xA, [0x0730_0402, 0, 0xFF, 0x603])], Some((4, 7)));
        check(
            &[intel, (0xA, [0x0830_0805, 0, 0x8, 0x603])],
            Some((8, 0xF)),
        );
        check(&[amd], Some((4, 0)));
        let (k10, f15) = ([0, 0, 0, 0], [0, 0, 1 << 23, 0]);
        let (short, long) = ([0x8000_0008, 0, 0, 0], [0x8000_0028, 0, 0, 0]);
        let (main, more) = (0x8000_0000, 0x8000_0001);
        check(&[amd, (main, short), (more, k10)], Some((4, 0)));
        check(&[amd, (main, short), (more, f15)], Some((6, 0)));
        let v2 = (0x8000_0022, [1, 0x0010_4108, 0, 0]);
        check(&[amd, (main, long), (more, f15), v2], Some((8, 0)));
        check(&[amd, (main, short), (more, f15), v2], Some((6, 0)));
    }
}
