//! A table of CPUID leaves, with the access that steps which change it need.

use super::CpuidRegs;

/// One of the four result registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reg {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

/// Leaves whose result depends on ECX.
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

/// One (sub)leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// EAX, with which it is asked for.
    pub leaf: u32,
    /// ECX; `None`: it does not matter.
    pub subleaf: Option<u32>,
    /// What CPUID answers.
    pub regs: CpuidRegs,
}

impl Leaf {
    fn is(&self, leaf: u32, subleaf: u32) -> bool {
        self.leaf == leaf && self.subleaf.unwrap_or(0) == subleaf
    }
}

/// The CPUID leaves of one vCPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaves {
    entries: Vec<Leaf>,
}

impl FromIterator<Leaf> for Leaves {
    fn from_iter<I: IntoIterator<Item = Leaf>>(leaves: I) -> Self {
        Self {
            entries: leaves.into_iter().collect(),
        }
    }
}

impl Leaves {
    /// All of them, in the order in which they came.
    pub fn iter(&self) -> impl Iterator<Item = &Leaf> {
        self.entries.iter()
    }

    /// Whether a (sub)leaf is there.
    #[must_use]
    pub fn has(&self, function: u32, index: u32) -> bool {
        self.find(function, index).is_some()
    }

    /// The registers of a leaf; an absent leaf is all zero, as CPUID defines it.
    #[must_use]
    pub fn get(&self, function: u32, index: u32) -> CpuidRegs {
        let found = self.find(function, index);
        found.map_or_else(CpuidRegs::default, |at| self.entries[at].regs)
    }

    /// Sets a leaf, which is added if it is absent. The leaf that states the
    /// highest leaf of the range is raised where that is needed.
    pub fn set(&mut self, function: u32, index: u32, regs: CpuidRegs) {
        match self.find(function, index) {
            Some(at) => self.entries[at].regs = regs,
            None => self.entries.push(Leaf {
                leaf: function,
                subleaf: INDEXED.contains(&function).then_some(index),
                regs,
            }),
        }
        let range = function & range_mask(function);
        if function != range
            && let Some(limit) = self.find(range, 0)
            && self.entries[limit].regs.eax < function
        {
            self.entries[limit].regs.eax = function;
        }
    }

    /// Changes a leaf if it is there.
    pub fn edit(&mut self, function: u32, index: u32, change: impl FnOnce(&mut CpuidRegs)) {
        if self.has(function, index) {
            let mut regs = self.get(function, index);
            change(&mut regs);
            self.set(function, index, regs);
        }
    }

    /// Clears one bit; an absent leaf has none to clear.
    pub fn clear(&mut self, function: u32, index: u32, reg: Reg, bit: u8) {
        self.edit(function, index, |r| *r.register(reg) &= !(1 << bit));
    }

    /// One bit; clear in an absent leaf.
    #[must_use]
    pub fn test(&self, function: u32, index: u32, reg: Reg, bit: u8) -> bool {
        *self.get(function, index).register(reg) & 1 << bit != 0
    }

    /// Removes a leaf with all its subleaves; it then reads as zero.
    pub fn remove(&mut self, function: u32) {
        self.entries.retain(|entry| entry.leaf != function);
    }

    /// Removes the leaves that `gone` names.
    pub fn remove_if(&mut self, gone: impl Fn(u32) -> bool) {
        self.entries.retain(|entry| !gone(entry.leaf));
    }

    /// The subleaves that exist of a leaf, in the order in which they came.
    #[must_use]
    pub fn indices(&self, function: u32) -> Vec<u32> {
        self.entries
            .iter()
            .filter(|entry| entry.leaf == function)
            .map(|entry| entry.subleaf.unwrap_or(0))
            .collect()
    }

    fn find(&self, function: u32, index: u32) -> Option<usize> {
        self.entries
            .iter()
            .position(|entry| entry.is(function, index))
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
