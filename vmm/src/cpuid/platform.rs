//! Features that depend on the hypervisor rather than on the processor.

use super::ApicFacts;
use pmu_virt::cpuid::{Leaves, Reg};

/// KVM's feature leaf and its asynchronous page fault bits: ASYNC_PF,
/// ASYNC_PF_VMEXIT, ASYNC_PF_INT.
pub(super) const KVM_FEATURES: u32 = 0x4000_0001;
const ASYNC_PF_BITS: [u8; 3] = [4, 10, 14];

/// Sets CPUID.1:ECX[31], which KVM's list omits: without it guests look for
/// neither kvm-clock nor any other help. KVM's own leaves stay as they are.
pub(super) fn show_hypervisor(leaves: &mut Leaves) {
    leaves.edit(1, 0, |r| r.ecx |= 1 << 31);
}

/// x2APIC (CPUID.1:ECX[21]) and the TSC-deadline timer (ECX[24]), as the
/// in-kernel interrupt controller provides them.
pub(super) fn show_apic_features(leaves: &mut Leaves, apic: ApicFacts) {
    leaves.edit(1, 0, |r| {
        r.ecx &= !(1 << 21 | 1 << 24);
        r.ecx |= u32::from(apic.x2apic) << 21 | u32::from(apic.tsc_deadline) << 24;
    });
}

/// VMX and SMX, SVM and SKINIT, SVM's leaf, and memory encryption: a nested
/// guest's PMU accesses would not reach the VMM.
pub(super) fn hide_nested_virtualisation(leaves: &mut Leaves) {
    leaves.clear(1, 0, Reg::Ecx, 5);
    leaves.clear(1, 0, Reg::Ecx, 6);
    leaves.clear(0x8000_0001, 0, Reg::Ecx, 2);
    leaves.clear(0x8000_0001, 0, Reg::Ecx, 12);
    for leaf in [0x8000_000a, 0x8000_001f] {
        leaves.remove(leaf);
    }
}

/// FRED, its companions LKGS and NMI source, and CET: the RDPMC trap stands on
/// the IDT and pops exception frames, and would break the shadow stack.
pub(super) fn hide_fred_and_cet(leaves: &mut Leaves) {
    for bit in [17, 18, 20] {
        leaves.clear(7, 1, Reg::Eax, bit);
    }
    leaves.clear(7, 0, Reg::Ecx, 7); // shadow stacks
    leaves.clear(7, 0, Reg::Edx, 20); // indirect branch tracking
    leaves.clear(7, 1, Reg::Edx, 18); // supervisor shadow stacks
    for component in [11, 12] {
        leaves.clear(0xd, 1, Reg::Ecx, component);
    }
}

/// AMD's breakpoint address masks (0x80000001 ECX[26]): the VMM takes over the
/// debug registers, and KVM gives it no masks for them.
pub(super) fn hide_breakpoint_extensions(leaves: &mut Leaves) {
    leaves.clear(0x8000_0001, 0, Reg::Ecx, 26);
}

pub(super) fn hide_async_page_faults(leaves: &mut Leaves) {
    for bit in ASYNC_PF_BITS {
        leaves.clear(KVM_FEATURES, 0, Reg::Eax, bit);
    }
}
