//! Making one vendor's processor look like the other's.

use pmu_virt::Vendor;

use super::CpuidError;
use super::platform::KVM_FEATURES;
use pmu_virt::cpuid::{CpuidRegs, Leaves, Reg};

/// Family 6, model 10H, stepping 0: a model that Intel never sold and that no
/// table of Linux names (its `intel-family.h` goes from 0FH to 16H here). The
/// guest's PMU driver then uses the architectural events alone, which are all
/// that a model of `pmu-virt` has. Models below 0FH would make Linux distrust the
/// PAT.
pub const INTEL_SIGNATURE: u32 = 0x0001_0600;

/// Family 19H, model 1, stepping 1 (a Zen 3 server): new enough for every AMD
/// model of `pmu-virt`.
const AMD_SIGNATURE: u32 = 0x00a0_0f11;

/// Bits of 80000001H that Intel defines (SDM vol. 2A): ECX LAHF, LZCNT,
/// PREFETCHW; EDX SYSCALL, NX, 1-GiB pages, RDTSCP, Intel 64.
const INTEL_EXT_ECX: u32 = 1 << 0 | 1 << 5 | 1 << 8;
const INTEL_EXT_EDX: u32 = 1 << 11 | 1 << 20 | 1 << 26 | 1 << 27 | 1 << 29;
/// Bits of 1:EDX that AMD repeats in 80000001H EDX (APM vol. 3, E.4.2).
pub(super) const AMD_MIRRORED_EDX: u32 = 0x0183_f3ff;
/// 80000001H ECX: leaves 8000001DH and 8000001EH exist.
const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
/// 7:EBX bits of Intel alone: SGX, HLE, RTM, MPX.
const INTEL_ONLY_7_EBX: u32 = 1 << 2 | 1 << 4 | 1 << 11 | 1 << 14;
/// 80000008H EBX: the one bit that both vendors define, WBNOINVD.
const WBNOINVD: u32 = 1 << 9;
/// KVM's features that the guest uses by hypercall: PV_UNHALT, PV_SEND_IPI,
/// PV_SCHED_YIELD, HC_MAP_GPA_RANGE (Linux, Documentation/virt/kvm/x86/cpuid.rst).
const KVM_HYPERCALL_BITS: [u8; 4] = [7, 11, 13, 16];
/// 80000007H EDX: the TSC's rate is constant.
const INVARIANT_TSC: u32 = 1 << 8;

/// The vendor of the host's processor, from the list that KVM gives.
///
/// # Errors
/// There is no leaf 0, or it names another vendor than AMD (or its licensee
/// Hygon) and Intel.
pub fn host_vendor(supported: &Leaves) -> Result<Vendor, CpuidError> {
    if !supported.has(0, 0) {
        return Err(CpuidError::MissingLeaf(0));
    }
    let leaf = supported.get(0, 0);
    let text: Vec<u8> = [leaf.ebx, leaf.edx, leaf.ecx]
        .iter()
        .flat_map(|r| r.to_le_bytes())
        .collect();
    match text.as_slice() {
        b"AuthenticAMD" | b"HygonGenuine" => Ok(Vendor::Amd),
        b"GenuineIntel" => Ok(Vendor::Intel),
        other => Err(CpuidError::UnknownHostVendor(
            String::from_utf8_lossy(other).into_owned(),
        )),
    }
}

/// Rewrites the table for `vendor` if the host's processor is another vendor's.
/// For the host's own vendor family and model stay.
pub(super) fn rewrite(leaves: &mut Leaves, vendor: Vendor) {
    if is(leaves, vendor) {
        return;
    }
    leaves.edit(0, 0, |r| (r.ebx, r.edx, r.ecx) = name(vendor));
    // Leaves of other makers (Centaur's range) belong to neither.
    leaves.remove_if(|leaf| leaf >> 16 == 0xc000);
    hide_hypercalls(leaves);
    match vendor {
        Vendor::Intel => to_intel(leaves),
        Vendor::Amd => to_amd(leaves),
    }
}

/// Hides KVM's features that are hypercalls. A guest chooses VMCALL or VMMCALL
/// by its CPU's vendor; on the other vendor's processor KVM then tries to patch
/// the instruction in place, and the write faults in read-only kernel text.
fn hide_hypercalls(leaves: &mut Leaves) {
    for bit in KVM_HYPERCALL_BITS {
        leaves.clear(KVM_FEATURES, 0, Reg::Eax, bit);
    }
}

/// Whether the table shows this vendor's processor now.
pub(super) fn is(leaves: &Leaves, vendor: Vendor) -> bool {
    let present = leaves.get(0, 0);
    (present.ebx, present.edx, present.ecx) == name(vendor)
}

/// The vendor string in the order EBX, EDX, ECX.
fn name(vendor: Vendor) -> (u32, u32, u32) {
    let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
    match vendor {
        Vendor::Intel => (word(b"Genu"), word(b"ineI"), word(b"ntel")),
        Vendor::Amd => (word(b"Auth"), word(b"enti"), word(b"cAMD")),
    }
}

fn to_intel(leaves: &mut Leaves) {
    leaves.edit(1, 0, |r| r.eax = INTEL_SIGNATURE);

    // The cache leaves have one layout but for EAX[31:26], which the topology
    // step fills in. Descriptor FFH of leaf 2 refers to leaf 4.
    leaves.remove(4);
    for index in leaves.indices(0x8000_001d) {
        let cache = leaves.get(0x8000_001d, index);
        leaves.set(4, index, cache);
    }
    let see_leaf_4 = CpuidRegs {
        eax: 0x0000_ff01,
        ..CpuidRegs::default()
    };
    leaves.set(2, 0, see_leaf_4);

    leaves.edit(0x8000_0001, 0, |r| {
        *r = CpuidRegs {
            ecx: r.ecx & INTEL_EXT_ECX,
            edx: r.edx & INTEL_EXT_EDX,
            ..CpuidRegs::default()
        };
    });
    leaves.remove(0x8000_0005);
    leaves.edit(0x8000_0006, 0, |r| {
        *r = CpuidRegs {
            ecx: r.ecx,
            ..CpuidRegs::default()
        };
    });
    leaves.edit(0x8000_0007, 0, |r| {
        *r = CpuidRegs {
            edx: r.edx & INVARIANT_TSC,
            ..CpuidRegs::default()
        };
    });
    leaves.edit(0x8000_0008, 0, |r| {
        *r = CpuidRegs {
            eax: r.eax & 0xffff,
            ebx: r.ebx & WBNOINVD,
            ..CpuidRegs::default()
        };
    });
    leaves.remove_if(|leaf| (0x8000_0009..0x8001_0000).contains(&leaf));
    leaves.edit(0x8000_0000, 0, |r| {
        *r = CpuidRegs {
            eax: 0x8000_0008,
            ..CpuidRegs::default()
        };
    });
}

fn to_amd(leaves: &mut Leaves) {
    leaves.edit(1, 0, |r| r.eax = AMD_SIGNATURE);
    leaves.edit(7, 0, |r| r.ebx &= !INTEL_ONLY_7_EBX);

    // Deterministic caches move to AMD's leaf; EAX[31:26] is reserved there.
    for index in leaves.indices(4) {
        let cache = leaves.get(4, index);
        let moved = CpuidRegs {
            eax: cache.eax & 0x03ff_ffff,
            ..cache
        };
        leaves.set(0x8000_001d, index, moved);
    }
    // Descriptors, caches, DCA, SGX, TLBs, hybrid cores: Intel's own leaves.
    leaves.remove_if(|leaf| matches!(leaf, 2 | 4 | 9 | 0x12 | 0x18 | 0x1a));

    let mirrored = leaves.get(1, 0).edx & AMD_MIRRORED_EDX;
    leaves.edit(0x8000_0001, 0, |r| {
        r.eax = AMD_SIGNATURE;
        r.ecx |= TOPOLOGY_EXTENSIONS;
        r.edx |= mirrored;
    });
    let (ebx, edx, ecx) = name(Vendor::Amd);
    leaves.edit(0x8000_0000, 0, |r| {
        r.eax = r.eax.max(0x8000_001e);
        (r.ebx, r.ecx, r.edx) = (ebx, ecx, edx);
    });
}
