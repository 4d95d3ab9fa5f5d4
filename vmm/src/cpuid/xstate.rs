//! Leaf 0DH after features went away: no state component may stay whose feature
//! is hidden, or guests reserve and enable state that they cannot use.

use pmu_virt::cpuid::{CpuidRegs, Leaves, Reg};

const LEAF: u32 = 0xd;
/// Bytes of the legacy region and the header (SDM vol. 1, 13.4).
const LEGACY_AND_HEADER: u32 = 576;

/// User state components and the feature bit each of them needs.
const COMPONENTS: &[(u8, u32, Reg, u8)] = &[
    (2, 1, Reg::Ecx, 28),  // AVX
    (3, 7, Reg::Ebx, 14),  // MPX bounds
    (4, 7, Reg::Ebx, 14),  // MPX configuration
    (5, 7, Reg::Ebx, 16),  // AVX-512 masks
    (6, 7, Reg::Ebx, 16),  // AVX-512 upper halves
    (7, 7, Reg::Ebx, 16),  // AVX-512 upper registers
    (9, 7, Reg::Ecx, 3),   // protection keys
    (17, 7, Reg::Edx, 24), // AMX tile configuration
    (18, 7, Reg::Edx, 24), // AMX tile data
];

/// Removes the components whose feature is gone, and everything when XSAVE is;
/// the sizes follow. KVM computes EBX, which depends on XCR0, anew at run time.
pub(super) fn drop_orphaned_components(leaves: &mut Leaves) {
    if !leaves.test(1, 0, Reg::Ecx, 26) {
        leaves.remove(LEAF);
        return;
    }
    let mut orphans = 0;
    for &(component, leaf, reg, bit) in COMPONENTS {
        if !leaves.test(leaf, 0, reg, bit) {
            orphans |= 1 << component;
        }
    }
    let before = leaves.get(LEAF, 0).eax;
    let supervisor = leaves.get(LEAF, 1).ecx;
    let kept = before & !orphans;
    for index in leaves.indices(LEAF) {
        let alive = index < 2 || index < 32 && (kept | supervisor) & 1 << index != 0;
        if !alive {
            leaves.set(LEAF, index, CpuidRegs::default());
        }
    }
    if kept == before {
        return;
    }
    let end = (2..32)
        .filter(|i| kept & 1 << i != 0)
        .map(|i| leaves.get(LEAF, i))
        .map(|r| r.eax.saturating_add(r.ebx))
        .fold(LEGACY_AND_HEADER, u32::max);
    leaves.edit(LEAF, 0, |r| {
        r.eax = kept;
        (r.ebx, r.ecx) = (end.min(r.ebx.max(LEGACY_AND_HEADER)), end);
    });
}
