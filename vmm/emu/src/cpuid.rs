//! What the processor says that it can do, and so what it has to do.

use iced_x86::CpuidFeature as Iced;
use pmu_model::CpuidRegs;
use pmu_model::cpuid::{Leaf, Leaves, Reg};

/// The answers to CPUID.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cpuid {
    leaves: Leaves,
}

/// Features, by where CPUID announces them: leaf, register, bit.
const ANNOUNCED: &[(Iced, u32, Reg, u8)] = &[
    (Iced::SSE3, 1, Reg::Ecx, 0),
    (Iced::PCLMULQDQ, 1, Reg::Ecx, 1),
    (Iced::MONITOR, 1, Reg::Ecx, 3),
    (Iced::VMX, 1, Reg::Ecx, 5),
    (Iced::SSSE3, 1, Reg::Ecx, 9),
    (Iced::FMA, 1, Reg::Ecx, 12),
    (Iced::CMPXCHG16B, 1, Reg::Ecx, 13),
    (Iced::SSE4_1, 1, Reg::Ecx, 19),
    (Iced::SSE4_2, 1, Reg::Ecx, 20),
    (Iced::MOVBE, 1, Reg::Ecx, 22),
    (Iced::POPCNT, 1, Reg::Ecx, 23),
    (Iced::AES, 1, Reg::Ecx, 25),
    (Iced::XSAVE, 1, Reg::Ecx, 26),
    (Iced::AVX, 1, Reg::Ecx, 28),
    (Iced::F16C, 1, Reg::Ecx, 29),
    (Iced::RDRAND, 1, Reg::Ecx, 30),
    (Iced::FPU, 1, Reg::Edx, 0),
    (Iced::FPU287, 1, Reg::Edx, 0),
    (Iced::FPU287XL_ONLY, 1, Reg::Edx, 0),
    (Iced::FPU387, 1, Reg::Edx, 0),
    (Iced::FPU387SL_ONLY, 1, Reg::Edx, 0),
    (Iced::TSC, 1, Reg::Edx, 4),
    (Iced::MSR, 1, Reg::Edx, 5),
    (Iced::CX8, 1, Reg::Edx, 8),
    (Iced::SEP, 1, Reg::Edx, 11),
    (Iced::CMOV, 1, Reg::Edx, 15),
    (Iced::CLFSH, 1, Reg::Edx, 19),
    (Iced::MMX, 1, Reg::Edx, 23),
    (Iced::FXSR, 1, Reg::Edx, 24),
    (Iced::SSE, 1, Reg::Edx, 25),
    (Iced::SSE2, 1, Reg::Edx, 26),
    (Iced::FSGSBASE, 7, Reg::Ebx, 0),
    (Iced::BMI1, 7, Reg::Ebx, 3),
    (Iced::AVX2, 7, Reg::Ebx, 5),
    (Iced::BMI2, 7, Reg::Ebx, 8),
    (Iced::INVPCID, 7, Reg::Ebx, 10),
    (Iced::RDSEED, 7, Reg::Ebx, 18),
    (Iced::ADX, 7, Reg::Ebx, 19),
    (Iced::SMAP, 7, Reg::Ebx, 20),
    (Iced::CLFLUSHOPT, 7, Reg::Ebx, 23),
    (Iced::CLWB, 7, Reg::Ebx, 24),
    (Iced::SHA, 7, Reg::Ebx, 29),
    (Iced::RDPID, 7, Reg::Ecx, 22),
    (Iced::LZCNT, 0x8000_0001, Reg::Ecx, 5),
    (Iced::SSE4A, 0x8000_0001, Reg::Ecx, 6),
    (Iced::SYSCALL, 0x8000_0001, Reg::Edx, 11),
    (Iced::RDTSCP, 0x8000_0001, Reg::Edx, 27),
    (Iced::WBNOINVD, 0x8000_0008, Reg::Ebx, 9),
];

/// What every processor with long mode has, and hints that do nothing where they mean nothing.
const ALWAYS: &[Iced] = &[
    Iced::INTEL8086,
    Iced::INTEL8086_ONLY,
    Iced::INTEL186,
    Iced::INTEL286,
    Iced::INTEL386,
    Iced::INTEL486,
    Iced::X64,
    Iced::CPUID,
    Iced::PAUSE,
    Iced::MULTIBYTENOP,
    Iced::RDPMC,
    Iced::PREFETCHW,
    Iced::PREFETCHWT1,
    Iced::CLDEMOTE,
    Iced::CET_IBT,
    Iced::CET_SS,
];

impl Cpuid {
    /// With these answers.
    #[must_use]
    pub fn new(leaves: Leaves) -> Self {
        Self { leaves }
    }

    /// What is implemented whole, and no more: a processor for tests. Whoever builds a machine
    /// has answers of its own.
    #[must_use]
    pub fn implemented() -> Self {
        let leaf = |leaf, subleaf, [eax, ebx, ecx, edx]: [u32; 4]| Leaf {
            leaf,
            subleaf,
            regs: CpuidRegs { eax, ebx, ecx, edx },
        };
        // FPU is announced by every processor with long mode.
        let edx1 = 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 8 | 1 << 11 | 1 << 13 | 1 << 15;
        // SSE3, SSSE3, SSE4.1 and SSE4.2; MMX, FXSR, SSE and SSE2.
        let ecx1 = 1 | 1 << 9 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 23 | 1 << 31;
        let edx1 = edx1 | 1 << 23 | 1 << 24 | 1 << 25 | 1 << 26;
        let leaves = [
            leaf(0, None, [7, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
            leaf(1, None, [0x0005_0654, 0x800, ecx1, edx1 | 1 << 19]),
            // FIP and FDP have no selectors: bit 13.
            leaf(
                7,
                Some(0),
                [0, 1 | 1 << 7 | 1 << 9 | 1 << 13 | 1 << 20, 0, 0],
            ),
            leaf(0x8000_0000, None, [0x8000_0008, 0, 0, 0]),
            leaf(
                0x8000_0001,
                None,
                [0, 0, 1, 1 << 11 | 1 << 20 | 1 << 26 | 1 << 27 | 1 << 29],
            ),
            leaf(0x8000_0008, None, [0x3029, 0, 0, 0]),
        ];
        Self::new(leaves.into_iter().collect())
    }

    fn find(&self, leaf: u32, subleaf: u32) -> Option<&Leaf> {
        self.leaves
            .iter()
            .find(|one| one.leaf == leaf && one.subleaf.is_none_or(|sub| sub == subleaf))
    }

    /// What a question is answered. Above the highest leaf the highest basic one answers on
    /// Intel's processors (SDM vol. 2A, "CPUID"), and nothing on AMD's (APM vol. 3, "CPUID").
    /// Each 256 leaves of a hypervisor's have a highest one of their own, as Linux and KVM look
    /// for them.
    #[must_use]
    pub fn answer(&self, leaf: u32, subleaf: u32) -> CpuidRegs {
        let most = |first: u32| self.find(first, 0).map_or(0, |one| one.regs.eax);
        let known = match leaf >> 16 {
            0 => leaf <= most(0),
            0x4000 => leaf <= most(leaf & 0xffff_ff00),
            0x8000 => leaf <= most(0x8000_0000),
            _ => false,
        };
        if !known && self.is_amd() {
            return CpuidRegs::default();
        }
        let leaf = if known { leaf } else { most(0) };
        self.find(leaf, subleaf)
            .map_or_else(CpuidRegs::default, |found| found.regs)
    }

    /// Whether an instruction of this feature is there.
    #[must_use]
    pub fn has(&self, feature: Iced) -> bool {
        ALWAYS.contains(&feature)
            || ANNOUNCED.iter().any(|(one, leaf, register, bit)| {
                *one == feature && self.leaves.test(*leaf, 0, *register, *bit)
            })
    }

    /// 1 GiB pages.
    #[must_use]
    pub fn has_gigabyte_pages(&self) -> bool {
        self.leaves.test(0x8000_0001, 0, Reg::Edx, 26)
    }

    /// PSE-36: pages of 4 MiB may lie above 4 GiB.
    #[must_use]
    pub fn has_pse36(&self) -> bool {
        self.leaves.test(1, 0, Reg::Edx, 17)
    }

    /// Bits of a guest-physical address; 36 where nothing is said.
    #[must_use]
    pub fn physical_bits(&self) -> u32 {
        let bits = self.find(0x8000_0008, 0).map_or(36, |one| one.regs.eax);
        (bits & 0xff).clamp(32, 52)
    }

    /// CR8 outside of 64-bit code, as MOV CR0 with a LOCK prefix (AltMovCr8).
    #[must_use]
    pub fn has_locked_cr8(&self) -> bool {
        self.is_amd() && self.leaves.test(0x8000_0001, 0, Reg::Ecx, 4)
    }

    /// The vendor is AMD.
    #[must_use]
    pub fn is_amd(&self) -> bool {
        self.leaves.get(0, 0).ebx == 0x6874_7541
    }

    /// CR4 bits that may be set.
    #[must_use]
    pub fn cr4_mask(&self) -> u64 {
        use crate::state::{
            CR4_DE, CR4_FSGSBASE, CR4_MCE, CR4_OSFXSR, CR4_OSXMMEXCPT, CR4_PAE, CR4_PCE, CR4_PGE,
            CR4_PSE, CR4_PVI, CR4_SMAP, CR4_SMEP, CR4_TSD, CR4_VME,
        };
        let bits = [
            (1, Reg::Edx, 1, CR4_VME | CR4_PVI),
            (1, Reg::Edx, 4, CR4_TSD),
            (1, Reg::Edx, 2, CR4_DE),
            (1, Reg::Edx, 3, CR4_PSE),
            (1, Reg::Edx, 6, CR4_PAE),
            (1, Reg::Edx, 7, CR4_MCE),
            (1, Reg::Edx, 13, CR4_PGE),
            (1, Reg::Edx, 24, CR4_OSFXSR),
            (1, Reg::Edx, 25, CR4_OSXMMEXCPT),
            (7, Reg::Ebx, 0, CR4_FSGSBASE),
            (7, Reg::Ebx, 7, CR4_SMEP),
            (7, Reg::Ebx, 20, CR4_SMAP),
        ];
        // RDPMC is always there.
        self.announced(CR4_PCE, &bits)
    }

    /// EFER bits that may be set, LMA left out.
    #[must_use]
    pub fn efer_mask(&self) -> u64 {
        use crate::state::{EFER_LME, EFER_NXE, EFER_SCE};
        let bits = [
            (0x8000_0001, Reg::Edx, 11, EFER_SCE),
            (0x8000_0001, Reg::Edx, 20, EFER_NXE),
            (0x8000_0001, Reg::Edx, 29, EFER_LME),
        ];
        self.announced(0, &bits)
    }

    /// `always`, and the bits of a control register whose features are announced.
    fn announced(&self, always: u64, bits: &[(u32, Reg, u8, u64)]) -> u64 {
        bits.iter()
            .filter(|(leaf, register, bit, _)| self.leaves.test(*leaf, 0, *register, *bit))
            .fold(always, |mask, (.., control)| mask | control)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_above_the_highest_leaf() {
        let check = |vendor: u32, expected: &[(u32, u32)]| {
            let leaf = |leaf, eax, ebx| Leaf {
                leaf,
                subleaf: None,
                regs: CpuidRegs {
                    eax,
                    ebx,
                    ..CpuidRegs::default()
                },
            };
            let leaves = [
                leaf(0, 7, vendor),
                leaf(7, 77, 0),
                leaf(0x4000_0000, 0x4000_0001, 0),
                leaf(0x4000_0001, 41, 0),
                leaf(0x4000_0100, 0x4000_0102, 0),
                leaf(0x4000_0102, 42, 0),
                leaf(0x8000_0000, 0x8000_0001, 0),
                leaf(0x8000_0001, 81, 0),
            ];
            let cpuid = Cpuid::new(leaves.into_iter().collect());
            for &(leaf, eax) in expected {
                assert_eq!(cpuid.answer(leaf, 0).eax, eax, "{vendor:#x}: {leaf:#x}");
            }
        };
        let known = [
            (7, 77),
            (0x4000_0001, 41),
            (0x4000_0102, 42),
            (0x8000_0001, 81),
        ];
        let above = [
            8,
            0x4000_0002,
            0x4000_0103,
            0x4000_0200,
            0x8000_0002,
            0xc000_0000,
        ];
        let amd = 0x6874_7541;
        check(0, &known);
        check(amd, &known);
        check(0, &above.map(|leaf| (leaf, 77)));
        check(amd, &above.map(|leaf| (leaf, 0)));
    }
}
