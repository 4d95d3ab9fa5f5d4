//! One socket with N cores of one thread each. APIC ids are the vCPU numbers, so
//! `ceil(log2(N))` low bits of an APIC id number the core.

use pmu_virt::Vendor;

use pmu_virt::cpuid::{CpuidRegs, Leaves};

/// Describes the socket in every leaf that has a field for it. Leaf 0BH serves
/// both vendors; 1FH is rewritten only where KVM has it; AMD's 80000026H, which
/// would override all of them, goes away.
pub(super) fn describe_one_socket(leaves: &mut Leaves, vendor: Vendor, vcpu: u8, cpus: u8) {
    let socket = Socket {
        apic_id: u32::from(vcpu),
        cores: u32::from(cpus),
    };
    socket.leaf_1(leaves);
    socket.extended_topology(leaves, 0xb);
    if leaves.has(0x1f, 0) {
        socket.extended_topology(leaves, 0x1f);
    }
    leaves.remove(0x8000_0026);
    match vendor {
        Vendor::Intel => socket.intel_caches(leaves),
        Vendor::Amd => {
            socket.amd_caches(leaves);
            socket.amd_cores(leaves);
        }
    }
}

#[derive(Clone, Copy)]
struct Socket {
    apic_id: u32,
    /// 1 to 64.
    cores: u32,
}

/// Extended topology level types (SDM vol. 2A, CPUID leaf 0BH, ECX[15:8]).
const LEVEL_SMT: u32 = 1 << 8;
const LEVEL_CORE: u32 = 2 << 8;

/// Cache level 3, in EAX[7:5] of the deterministic cache leaves.
const LAST_LEVEL: u32 = 3;

impl Socket {
    /// APIC ids that the socket reserves: the next power of two.
    fn ids(self) -> u32 {
        self.cores.next_power_of_two()
    }

    fn id_bits(self) -> u32 {
        self.ids().trailing_zeros()
    }

    /// EBX[31:24] initial APIC id, EBX[23:16] addressable ids, EDX[28] HTT. The
    /// flush line size in EBX[15:8] stays.
    fn leaf_1(self, leaves: &mut Leaves) {
        leaves.edit(1, 0, |r| {
            r.ebx = r.ebx & 0xffff | self.apic_id << 24 | self.ids() << 16;
            r.edx &= !(1 << 28);
            r.edx |= u32::from(self.cores > 1) << 28;
        });
    }

    fn extended_topology(self, leaves: &mut Leaves, leaf: u32) {
        let level = |shift, count, ecx| CpuidRegs {
            eax: shift,
            ebx: count,
            ecx,
            edx: self.apic_id,
        };
        leaves.remove(leaf);
        leaves.set(leaf, 0, level(0, 1, LEVEL_SMT));
        leaves.set(leaf, 1, level(self.id_bits(), self.cores, LEVEL_CORE | 1));
        leaves.set(leaf, 2, level(0, 0, 2));
    }

    /// Leaf 4: EAX[31:26] core ids in the package − 1, EAX[25:14] ids that share
    /// the cache − 1.
    fn intel_caches(self, leaves: &mut Leaves) {
        for index in leaves.indices(4) {
            leaves.edit(4, index, |r| {
                if r.eax & 0x1f != 0 {
                    let sharing = self.sharing(r.eax, self.ids());
                    r.eax = r.eax & 0x3fff | sharing << 14 | (self.ids() - 1) << 26;
                }
            });
        }
    }

    /// Leaf 8000001DH: EAX[25:14] logical processors that share the cache − 1.
    fn amd_caches(self, leaves: &mut Leaves) {
        for index in leaves.indices(0x8000_001d) {
            leaves.edit(0x8000_001d, index, |r| {
                if r.eax & 0x1f != 0 {
                    r.eax = r.eax & 0x3fff | self.sharing(r.eax, self.cores) << 14;
                }
            });
        }
    }

    /// The last level is the socket's, the others are each core's own.
    fn sharing(self, eax: u32, in_socket: u32) -> u32 {
        if eax >> 5 & 0b111 >= LAST_LEVEL {
            in_socket - 1
        } else {
            0
        }
    }

    /// CmpLegacy (80000001H ECX[1]), core count and id size (80000008H ECX), and
    /// where TopologyExtensions is announced the ids of 8000001EH.
    fn amd_cores(self, leaves: &mut Leaves) {
        leaves.edit(0x8000_0001, 0, |r| {
            r.ecx &= !(1 << 1);
            r.ecx |= u32::from(self.cores > 1) << 1;
        });
        leaves.edit(0x8000_0008, 0, |r| {
            r.ecx = r.ecx & !0xf0ff | self.id_bits() << 12 | (self.cores - 1);
        });
        if leaves.get(0x8000_0001, 0).ecx & 1 << 22 != 0 {
            // EBX[15:8] threads per core − 1 and ECX (node 0 of 1) are zero.
            let ids = CpuidRegs {
                eax: self.apic_id,
                ebx: self.apic_id,
                ..CpuidRegs::default()
            };
            leaves.set(0x8000_001e, 0, ids);
        }
    }
}
