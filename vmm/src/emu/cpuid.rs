//! What the processor in software announces: the same on every host.
//!
//! Of instructions it is what `emu` implements, and nothing else; of the machine, what its
//! chips and its clock do. [`guest_cpuid`](crate::cpuid::guest_cpuid) makes of it the list of
//! a vCPU, as it does of KVM's. Nothing of the host goes in.

use emu::Cpuid;
use pmu_virt::Vendor;
use pmu_virt::cpuid::{CpuidRegs, Leaves, PmuCpuid};

use super::TSC_HZ;
use crate::cpuid::{ApicFacts, CpuidError, CpuidPlan, INTEL_SIGNATURE, guest_cpuid};

/// Ticks of the clock that the APICs' timers divide, in a second: CPUID's leaf 15H calls it
/// the core crystal (SDM vol. 3A, 12.5.4), and the TSC ticks as it does.
pub(crate) const APIC_HZ: u32 = 1_000_000_000;

/// Leaf 1 ECX: a hypervisor runs the guest.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 EDX: there is a local APIC; page attributes can be chosen.
const APIC_AND_PAT: u32 = 1 << 9 | 1 << 16;
/// Leaf 1 EBX: lines of 64 bytes, which CLFLUSH takes.
const CLFLUSH_LINE: u32 = 8 << 8;
/// Leaf 6 EAX: the APIC's timer never stops.
const ARAT: u32 = 1 << 2;
/// Leaf 7 EDX: `IA32_ARCH_CAPABILITIES` is there.
const ARCH_CAPABILITIES: u32 = 1 << 29;
/// Leaf 8000_0007H EDX: the TSC ticks alike in all states of power.
const INVARIANT_TSC: u32 = 1 << 8;
/// KVM's features (Linux, `Documentation/virt/kvm/x86/cpuid.rst`): the second kvm-clock, and
/// its times are right on all vCPUs alike.
const CLOCKSOURCE2_AND_STABLE: u32 = 1 << 3 | 1 << 24;

/// What the brand string says, at most 47 characters.
const BRAND: &[u8] = b"Umpire processor in software";

/// The list of vCPU `vcpu` of `cpus` that show a processor of `vendor`, all of it that there is,
/// with `pmu` or without one.
///
/// # Errors
/// As of [`guest_cpuid`].
pub fn processor(
    vendor: Vendor,
    (vcpu, cpus): (u8, u8),
    pmu: Option<&PmuCpuid>,
) -> Result<Leaves, CpuidError> {
    let plan = CpuidPlan {
        cpus,
        vendor,
        identity: None,
        pmu,
        apic: ApicFacts {
            x2apic: true,
            tsc_deadline: true,
        },
        async_page_faults: false,
        slow_cpl0: false,
        hidden: &[],
    };
    guest_cpuid(&supported(vendor), vcpu, &plan)
}

/// The table that a guest's CPUID is made of where it is to see a processor of `vendor`.
pub(crate) fn supported(vendor: Vendor) -> Leaves {
    let implemented = Cpuid::implemented();
    let of = |leaf| implemented.answer(leaf, 0);
    let mut leaves = Leaves::default();
    let mut add = |leaf, index, eax, ebx, ecx, edx| {
        leaves.set(leaf, index, CpuidRegs { eax, ebx, ecx, edx });
    };
    let word = |text: &[u8; 4]| u32::from_le_bytes(*text);
    let (genu, inei, ntel) = (word(b"Genu"), word(b"ineI"), word(b"ntel"));
    add(0, 0, 0, genu, ntel, inei);
    let one = of(1);
    let (ecx, edx) = (one.ecx | HYPERVISOR, one.edx | APIC_AND_PAT);
    add(1, 0, INTEL_SIGNATURE, CLFLUSH_LINE, ecx, edx);
    // "See leaf 4", and TLBs that nothing is said of.
    add(2, 0, 0x0000_ff01, 0, 0, 0);
    for (index, (eax, sets)) in (0..).zip(CACHES) {
        // 16 ways of lines of 64 bytes.
        add(4, index, eax, 15 << 22 | 63, sets - 1, 0);
    }
    add(4, 4, 0, 0, 0, 0);
    add(6, 0, ARAT, 0, 0, 0);
    let seven = of(7);
    let capabilities = if vendor == Vendor::Intel {
        ARCH_CAPABILITIES
    } else {
        0
    };
    add(7, 0, 0, seven.ebx, seven.ecx, seven.edx | capabilities);
    add(0xb, 0, 0, 0, 0, 0);
    if vendor == Vendor::Intel {
        let mhz = u32::try_from(TSC_HZ / 1_000_000).unwrap_or(u32::MAX);
        let ratio = u32::try_from(TSC_HZ / u64::from(APIC_HZ)).unwrap_or(1);
        add(0x15, 0, 1, ratio, APIC_HZ, 0);
        add(0x16, 0, mhz, mhz, 100, 0);
    }
    let kvm = (word(b"KVMK"), word(b"VMKV"), word(b"M\0\0\0"));
    add(0x4000_0000, 0, 0, kvm.0, kvm.1, kvm.2);
    add(0x4000_0001, 0, CLOCKSOURCE2_AND_STABLE, 0, 0, 0);
    extended(&mut add, of(0x8000_0001), of(0x8000_0008).eax);
    leaves
}

/// EAX of leaf 4 and sets of each cache, which nothing models: 32 KiB for data, 32 KiB for
/// code, 1 MiB, and 8 MiB for all.
const CACHES: [(u32, u32); 4] = [(0x121, 32), (0x122, 32), (0x143, 1024), (0x163, 8192)];

/// Leaves from 8000_0000H on. `widths` are those of addresses.
fn extended(add: &mut impl FnMut(u32, u32, u32, u32, u32, u32), features: CpuidRegs, widths: u32) {
    add(0x8000_0000, 0, 0, 0, 0, 0);
    add(0x8000_0001, 0, 0, 0, features.ecx, features.edx);
    let mut text = [0; 48];
    for (to, from) in text.iter_mut().zip(BRAND) {
        *to = *from;
    }
    let (parts, _) = text.as_chunks::<16>();
    for (leaf, part) in (0x8000_0002..).zip(parts) {
        let (words, _) = part.as_chunks::<4>();
        let at = |n: usize| words.get(n).copied().map_or(0, u32::from_le_bytes);
        add(leaf, 0, at(0), at(1), at(2), at(3));
    }
    // The second cache: KiB, 16 ways, lines of 64 bytes.
    add(0x8000_0006, 0, 0, 0, 1024 << 16 | 8 << 12 | 64, 0);
    add(0x8000_0007, 0, 0, 0, 0, INVARIANT_TSC);
    add(0x8000_0008, 0, widths & 0xffff, 0, 0, 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_virt::cpuid::Reg;

    fn guest(vendor: Vendor, vcpu: u8, cpus: u8) -> Leaves {
        processor(vendor, (vcpu, cpus), None).expect("a guest's CPUID")
    }

    /// Linux, `arch/x86/include/asm/required-features.h`, and what its clocks and timers want.
    #[test]
    fn a_64_bit_linux_finds_what_it_cannot_do_without() {
        let required = [
            ("fpu", 1, Reg::Edx, 0),
            ("pse", 1, Reg::Edx, 3),
            ("tsc", 1, Reg::Edx, 4),
            ("msr", 1, Reg::Edx, 5),
            ("pae", 1, Reg::Edx, 6),
            ("cx8", 1, Reg::Edx, 8),
            ("apic", 1, Reg::Edx, 9),
            ("pge", 1, Reg::Edx, 13),
            ("cmov", 1, Reg::Edx, 15),
            ("pat", 1, Reg::Edx, 16),
            ("fxsr", 1, Reg::Edx, 24),
            ("sse", 1, Reg::Edx, 25),
            ("sse2", 1, Reg::Edx, 26),
            ("x2apic", 1, Reg::Ecx, 21),
            ("tsc_deadline_timer", 1, Reg::Ecx, 24),
            ("hypervisor", 1, Reg::Ecx, 31),
            ("arat", 6, Reg::Eax, 2),
            ("syscall", 0x8000_0001, Reg::Edx, 11),
            ("lm", 0x8000_0001, Reg::Edx, 29),
            ("nonstop_tsc", 0x8000_0007, Reg::Edx, 8),
        ];
        for vendor in [Vendor::Intel, Vendor::Amd] {
            let leaves = guest(vendor, 0, 1);
            for (name, leaf, register, bit) in required {
                assert!(leaves.test(leaf, 0, register, bit), "{vendor:?}: {name}");
            }
        }
    }

    #[test]
    fn what_nobody_implements_is_not_announced() {
        let absent = [
            ("monitor", 1, Reg::Ecx, 3),
            ("vmx", 1, Reg::Ecx, 5),
            ("pcid", 1, Reg::Ecx, 17),
            ("xsave", 1, Reg::Ecx, 26),
            ("avx", 1, Reg::Ecx, 28),
            ("rdrand", 1, Reg::Ecx, 30),
            ("mce", 1, Reg::Edx, 7),
            ("mtrr", 1, Reg::Edx, 12),
            ("tsc_adjust", 7, Reg::Ebx, 1),
            ("invpcid", 7, Reg::Ebx, 10),
            ("rdseed", 7, Reg::Ebx, 18),
            ("umip", 7, Reg::Ecx, 2),
            ("pku", 7, Reg::Ecx, 3),
            ("la57", 7, Reg::Ecx, 16),
            ("svm", 0x8000_0001, Reg::Ecx, 2),
        ];
        for vendor in [Vendor::Intel, Vendor::Amd] {
            let leaves = guest(vendor, 0, 1);
            for (name, leaf, register, bit) in absent {
                assert!(!leaves.test(leaf, 0, register, bit), "{vendor:?}: {name}");
            }
            assert_eq!(leaves.get(0x4000_0001, 0).eax, 1 << 3 | 1 << 24);
            assert_eq!(pmu_virt::cpuid::traces(&leaves), Vec::<String>::new());
        }
    }

    #[test]
    fn a_guest_finds_its_vendor_its_cores_and_the_frequency() {
        let intel = guest(Vendor::Intel, 2, 4);
        assert_eq!(intel.get(0, 0).eax, 0x16);
        assert_eq!(intel.get(0, 0).ebx, u32::from_le_bytes(*b"Genu"));
        assert_eq!(intel.get(0xb, 1).ebx, 4);
        assert_eq!(intel.get(0xb, 0).edx, 2);
        assert_eq!(intel.get(1, 0).ebx >> 24, 2);
        let crystal = intel.get(0x15, 0);
        let hz = u64::from(crystal.ecx) * u64::from(crystal.ebx) / u64::from(crystal.eax);
        assert_eq!(hz, TSC_HZ);
        let amd = guest(Vendor::Amd, 2, 4);
        assert_eq!(amd.get(0, 0).ebx, u32::from_le_bytes(*b"Auth"));
        assert_eq!(amd.get(0x8000_0008, 0).ecx & 0xff, 3);
        assert_eq!(amd.get(0x8000_001e, 0).eax, 2);
        assert!(!amd.has(0x15, 0) && !amd.has(4, 0));
        assert!(!amd.test(7, 0, Reg::Edx, 29), "no ARCH_CAPABILITIES");
    }
}
