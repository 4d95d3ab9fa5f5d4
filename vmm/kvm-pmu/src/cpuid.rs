//! CPUID in KVM's own entries. What it says of a PMU is `pmu-virt`'s
//! ([`pmu_virt::cpuid`]).

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use pmu_virt::PmuCpuid;
use pmu_virt::cpuid::{CpuidRegs, Leaf, Leaves, hide_everything, show};

/// `entries` with the leaves of a guest's virtual PMU, and no trace of any other;
/// `None`: the guest has no PMU.
#[must_use]
pub fn merge(entries: &[kvm_cpuid_entry2], pmu: Option<&PmuCpuid>) -> Vec<kvm_cpuid_entry2> {
    let mut leaves = from_kvm(entries);
    hide_everything(&mut leaves);
    if let Some(pmu) = pmu {
        show(&mut leaves, pmu);
    }
    to_kvm(&leaves)
}

/// The list that `KVM_GET_SUPPORTED_CPUID` gives.
#[must_use]
pub fn from_kvm(entries: &[kvm_cpuid_entry2]) -> Leaves {
    let entries = entries.iter();
    entries
        .map(|entry| Leaf {
            leaf: entry.function,
            subleaf: (entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0).then_some(entry.index),
            regs: CpuidRegs {
                eax: entry.eax,
                ebx: entry.ebx,
                ecx: entry.ecx,
                edx: entry.edx,
            },
        })
        .collect()
}

/// The list for `KVM_SET_CPUID2`.
#[must_use]
pub fn to_kvm(leaves: &Leaves) -> Vec<kvm_cpuid_entry2> {
    let leaves = leaves.iter();
    leaves
        .map(|leaf| kvm_cpuid_entry2 {
            function: leaf.leaf,
            index: leaf.subleaf.unwrap_or(0),
            flags: leaf.subleaf.map_or(0, |_| KVM_CPUID_FLAG_SIGNIFCANT_INDEX),
            eax: leaf.regs.eax,
            ebx: leaf.regs.ebx,
            ecx: leaf.regs.ecx,
            edx: leaf.regs.edx,
            ..Default::default()
        })
        .collect()
}
