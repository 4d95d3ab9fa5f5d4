//! A table of CPUID leaves, with the access that steps which change it need.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// The registers of one (sub)leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Regs {
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
}

/// One of the four result registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reg {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

/// Leaves whose result depends on ECX. KVM needs a flag for that in each entry.
const INDEXED: &[u32] = &[
    0x4,
    0x7,
    0xb,
    0xd,
    0xf,
    0x10,
    0x12,
    0x14,
    0x17,
    0x18,
    0x1b,
    0x1d,
    0x1f,
    0x20,
    0x23,
    0x24,
    0x8000_001d,
    0x8000_0020,
    0x8000_0026,
];

/// The CPUID leaves of one vCPU.
#[derive(Clone, Debug)]
pub struct Leaves {
    entries: Vec<kvm_cpuid_entry2>,
}

impl Leaves {
    /// The list that `KVM_GET_SUPPORTED_CPUID` gives.
    #[must_use]
    pub fn new(entries: &[kvm_cpuid_entry2]) -> Self {
        Self {
            entries: entries.to_vec(),
        }
    }

    /// The list for `KVM_SET_CPUID2`.
    #[must_use]
    pub fn into_entries(self) -> Vec<kvm_cpuid_entry2> {
        self.entries
    }

    /// Whether a (sub)leaf is there.
    #[must_use]
    pub fn has(&self, function: u32, index: u32) -> bool {
        self.find(function, index).is_some()
    }

    /// The registers of a leaf; an absent leaf is all zero, as CPUID defines it.
    #[must_use]
    pub fn get(&self, function: u32, index: u32) -> Regs {
        self.find(function, index).map_or_else(Regs::default, |i| {
            let e = &self.entries[i];
            Regs {
                eax: e.eax,
                ebx: e.ebx,
                ecx: e.ecx,
                edx: e.edx,
            }
        })
    }

    /// Sets a leaf, which is added if it is absent. The leaf that states the
    /// highest leaf of the range is raised where that is needed.
    pub fn set(&mut self, function: u32, index: u32, regs: Regs) {
        let indexed = INDEXED.contains(&function);
        let i = self.find(function, index).unwrap_or_else(|| {
            self.entries.push(kvm_cpuid_entry2 {
                function,
                index,
                flags: if indexed {
                    KVM_CPUID_FLAG_SIGNIFCANT_INDEX
                } else {
                    0
                },
                ..kvm_cpuid_entry2::default()
            });
            self.entries.len() - 1
        });
        let e = &mut self.entries[i];
        (e.eax, e.ebx, e.ecx, e.edx) = (regs.eax, regs.ebx, regs.ecx, regs.edx);

        let range = function & range_mask(function);
        if function != range
            && let Some(limit) = self.find(range, 0)
            && self.entries[limit].eax < function
        {
            self.entries[limit].eax = function;
        }
    }

    /// Changes a leaf if it is there.
    pub fn edit(&mut self, function: u32, index: u32, change: impl FnOnce(&mut Regs)) {
        if self.has(function, index) {
            let mut regs = self.get(function, index);
            change(&mut regs);
            self.set(function, index, regs);
        }
    }

    /// Clears one bit; an absent leaf has none to clear.
    pub fn clear(&mut self, function: u32, index: u32, reg: Reg, bit: u8) {
        self.edit(function, index, |r| *r.of(reg) &= !(1 << bit));
    }

    /// One bit; clear in an absent leaf.
    #[must_use]
    pub fn test(&self, function: u32, index: u32, reg: Reg, bit: u8) -> bool {
        *self.get(function, index).of(reg) & 1 << bit != 0
    }

    /// Removes a leaf with all its subleaves; it then reads as zero.
    pub fn remove(&mut self, function: u32) {
        self.entries.retain(|e| e.function != function);
    }

    /// Removes the leaves that `gone` names.
    pub fn remove_if(&mut self, gone: impl Fn(u32) -> bool) {
        self.entries.retain(|e| !gone(e.function));
    }

    /// The subleaves that exist of a leaf, in KVM's order.
    #[must_use]
    pub fn indices(&self, function: u32) -> Vec<u32> {
        self.entries
            .iter()
            .filter(|e| e.function == function)
            .map(|e| e.index)
            .collect()
    }

    fn find(&self, function: u32, index: u32) -> Option<usize> {
        self.entries
            .iter()
            .position(|e| e.function == function && e.index == index)
    }
}

/// The bits of a leaf's number that name its range. Each hypervisor block has a
/// limit of its own (Linux, `hypervisor_cpuid_base`: steps of 0x100).
fn range_mask(function: u32) -> u32 {
    match function >> 16 {
        0x4000 => 0xffff_ff00,
        _ => 0xffff_0000,
    }
}

impl Regs {
    /// One of them by its name.
    pub fn of(&mut self, reg: Reg) -> &mut u32 {
        match reg {
            Reg::Eax => &mut self.eax,
            Reg::Ebx => &mut self.ebx,
            Reg::Ecx => &mut self.ecx,
            Reg::Edx => &mut self.edx,
        }
    }
}
