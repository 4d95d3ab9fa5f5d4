//! CPUID in KVM's own entries. What it says of a PMU is `pmu-virt`'s
//! ([`pmu_virt::cpuid`]).

use instruction_facts::Encoding;
use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use pmu_virt::PmuCpuid;
pub use pmu_virt::cpuid::{CpuidRegs, Keep, Kept, Leaf, Leaves};
use pmu_virt::cpuid::{Reg, hide_everything, hide_obstacles, show};

/// `leaves` with those of a guest's virtual PMU, no trace of any other, and without what
/// the traps of one cannot stand ([`hide_obstacles`]), but for what is to be kept: of that,
/// what is there, and what of the PMU does not work with it. `None`: the guest has no PMU.
#[must_use]
pub fn merge(mut leaves: Leaves, pmu: Option<&PmuCpuid>, keep: &[Keep]) -> (Leaves, Vec<Kept>) {
    let kept = hide_obstacles(&mut leaves, keep);
    hide_everything(&mut leaves);
    if let Some(pmu) = pmu {
        show(&mut leaves, pmu);
    }
    (leaves, kept)
}

/// Encodings of instructions that a guest with these leaves may execute. No leaf at all says
/// nothing of XOP, which [`merge`] hides.
pub(crate) fn announced(leaves: &Leaves) -> Vec<Encoding> {
    let unknown = leaves.iter().next().is_none();
    let has = |leaf, reg, bits: &[u8]| bits.iter().any(|&bit| leaves.test(leaf, 0, reg, bit));
    let amd = 0x8000_0001;
    let encodings = [
        // AVX; and BMI1 and BMI2, which need no AVX.
        (
            Encoding::Vex,
            unknown || has(1, Reg::Ecx, &[28]) || has(7, Reg::Ebx, &[3, 8]),
        ),
        // AVX-512F.
        (Encoding::Evex, unknown || has(7, Reg::Ebx, &[16])),
        // XOP and TBM.
        (Encoding::Xop, has(amd, Reg::Ecx, &[11, 21])),
    ];
    let there = encodings.into_iter().filter(|(_, there)| *there);
    there.map(|(encoding, _)| encoding).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, ebx: u32, ecx: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            ebx,
            ecx,
            ..Default::default()
        }
    }

    #[test]
    fn what_the_trap_stands_on_is_hidden_unless_it_is_kept() {
        const SVM: u32 = 1 << 2;
        const BPEXT: u32 = 1 << 26;
        let host = [entry(0x8000_0001, 0, 0, SVM | BPEXT | 1)];
        let merged = |keep: &[Keep]| {
            let (leaves, kept) = merge(from_kvm(&host), None, keep);
            (to_kvm(&leaves)[0].ecx, kept)
        };
        assert_eq!(merged(&[Keep::Cet]), (1, Vec::new()));
        let (shown, kept) = merged(&[Keep::NestedVirtualisation, Keep::Cet]);
        assert_eq!(shown, SVM | 1);
        assert_eq!(kept.len(), 1);
        assert_eq!(kept[0].what, Keep::NestedVirtualisation);
        assert!(kept[0].stops.contains("nested guests"), "{kept:?}");
    }

    #[test]
    fn encodings_are_those_that_are_announced() {
        let check = |entries: &[kvm_cpuid_entry2], expected: &[Encoding]| {
            assert_eq!(announced(&from_kvm(entries)), expected, "{entries:x?}");
        };
        check(&[], &[Encoding::Vex, Encoding::Evex]);
        check(&[entry(1, 0, 0, 1)], &[]);
        check(&[entry(1, 0, 0, 1 << 28)], &[Encoding::Vex]);
        check(&[entry(7, 0, 1 << 3, 0)], &[Encoding::Vex]);
        check(&[entry(7, 0, 1 << 16, 0)], &[Encoding::Evex]);
        check(&[entry(0x8000_0001, 0, 0, 1 << 11)], &[Encoding::Xop]);
    }
}
