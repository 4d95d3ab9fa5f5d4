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

pub(super) fn hide_async_page_faults(leaves: &mut Leaves) {
    for bit in ASYNC_PF_BITS {
        leaves.clear(KVM_FEATURES, 0, Reg::Eax, bit);
    }
}
