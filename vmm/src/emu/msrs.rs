//! MSRs that are neither the processor's own, nor its PMU's, nor its APIC's: what the machine
//! answers. Whatever is not here raises #GP(0); kernels ask for it with accessors that expect
//! that.

use pmu_virt::Vendor;
use serde::{Deserialize, Serialize};

use super::TSC_HZ;
use super::paravirt::{ClockPage, GuestTime, GuestWrite, SYSTEM_TIME, WALL_CLOCK, wall_clock};

/// `IA32_PLATFORM_ID` (SDM vol. 4, table 2-2, as all numbers of Intel's here).
const PLATFORM_ID: u32 = 0x17;
/// `IA32_FEATURE_CONTROL`.
const FEATURE_CONTROL: u32 = 0x3a;
/// `IA32_BIOS_SIGN_ID`; AMD's `PATCH_LEVEL`.
const BIOS_SIGN_ID: u32 = 0x8b;
/// `MSR_PLATFORM_INFO`.
const PLATFORM_INFO: u32 = 0xce;
/// `IA32_ARCH_CAPABILITIES`.
const ARCH_CAPABILITIES: u32 = 0x10a;
/// `IA32_MISC_ENABLE`.
const MISC_ENABLE: u32 = 0x1a0;
/// `IA32_DEBUGCTL`.
const DEBUGCTL: u32 = 0x1d9;
/// `SYSCFG` (APM vol. 2, appendix A, as all numbers of AMD's here).
const SYSCFG: u32 = 0xc001_0010;
/// `HWCR`.
const HWCR: u32 = 0xc001_0015;
/// `NB_CFG`, in which kernels open ways to PCI's extended configuration space.
const NB_CFG: u32 = 0xc001_001f;
/// `INT_PENDING_MSG`, which says how C1E is entered.
const INT_PENDING: u32 = 0xc001_0055;
/// `MMIO_CFG_BASE_ADDR`.
const MMIO_CONFIG: u32 = 0xc001_0058;
/// `LS_CFG`.
const LS_CFG: u32 = 0xc001_1020;
/// `DE_CFG`.
const DE_CFG: u32 = 0xc001_1029;

/// Locked, and nothing is enabled.
const FEATURES_LOCKED: u64 = 1;
/// A revision in the upper half, as KVM's.
const MICROCODE: u64 = 1 << 32;
const FAST_STRINGS: u64 = 1;
const PERFMON: u64 = 1 << 7;
const NO_BTS: u64 = 1 << 11;
const NO_PEBS: u64 = 1 << 12;
/// LFENCE waits for all before it, which it always does here.
const LFENCE_SERIALIZES: u64 = 1 << 1;
/// The TSC counts at the frequency of P0.
const TSC_AT_P0: u64 = 1 << 24;
/// Bits of HWCR that a kernel may set and that mean nothing here: caches, INVD, monitors.
const HWCR_KEPT: u64 = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 8 | 1 << 9 | 1 << 18 | TSC_AT_P0;

/// What speculation there is none of (SDM vol. 4, 10AH): RDCL, L1D flush on VM entry, SSB, MDS,
/// page-size changes, TAA, SBDR, FBSDP, PSDP, BHI, PBRSB, GDS, RFDS, ITS.
const NOTHING_SPECULATES: u64 = 1
    | 1 << 3
    | 1 << 4
    | 1 << 5
    | 1 << 6
    | 1 << 8
    | 1 << 13
    | 1 << 14
    | 1 << 15
    | 1 << 20
    | 1 << 24
    | 1 << 26
    | 1 << 27
    | 1 << 62;

/// What a vCPU's registers are to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MsrFacts {
    /// Whose processor the guest sees.
    pub(crate) vendor: Vendor,
    /// CPUID's leaf 0AH announces a PMU.
    pub(crate) perfmon: bool,
    /// The PMU has PEBS.
    pub(crate) pebs: bool,
}

/// What a WRMSR comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    /// It is done.
    Done,
    /// It is done, and this goes into the guest's memory before it runs on.
    Fills(GuestWrite),
    /// #GP(0).
    Gp,
}

/// The registers of one vCPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Msrs {
    is_intel: bool,
    misc_fixed: u64,
    fast_strings: u64,
    bios_sign: u64,
    hwcr: u64,
    ls_cfg: u64,
    wall_clock: u64,
    wall_clocks: u32,
    clock: ClockPage,
}

impl Msrs {
    /// As after a reset.
    pub(crate) fn new(facts: MsrFacts) -> Self {
        let MsrFacts {
            vendor,
            perfmon,
            pebs,
        } = facts;
        let on = |yes: bool, bit| if yes { bit } else { 0 };
        Self {
            is_intel: vendor == Vendor::Intel,
            misc_fixed: on(perfmon, PERFMON) | NO_BTS | on(!pebs, NO_PEBS),
            fast_strings: FAST_STRINGS,
            bios_sign: MICROCODE,
            hwcr: TSC_AT_P0,
            ls_cfg: 0,
            wall_clock: 0,
            wall_clocks: 0,
            clock: ClockPage::default(),
        }
    }

    /// RDMSR; none is #GP(0). Of registers that are a PMU's in part it is the other part.
    pub(crate) fn read(&self, index: u32) -> Option<u64> {
        Some(match index {
            WALL_CLOCK => self.wall_clock,
            SYSTEM_TIME => self.clock.msr(),
            BIOS_SIGN_ID => self.bios_sign,
            _ if self.is_intel => return self.read_intel(index),
            _ => return self.read_amd(index),
        })
    }

    fn read_intel(&self, index: u32) -> Option<u64> {
        // 100 MHz is what the ratios of "maximum non-turbo" and "maximum efficiency" multiply.
        let ratio = TSC_HZ / 100_000_000;
        Some(match index {
            PLATFORM_ID | DEBUGCTL => 0,
            FEATURE_CONTROL => FEATURES_LOCKED,
            PLATFORM_INFO => ratio << 40 | ratio << 8,
            ARCH_CAPABILITIES => NOTHING_SPECULATES,
            MISC_ENABLE => self.misc_fixed | self.fast_strings,
            _ => return None,
        })
    }

    fn read_amd(&self, index: u32) -> Option<u64> {
        Some(match index {
            // No TOM2, no C1E, no window for configuration space.
            SYSCFG | NB_CFG | INT_PENDING | MMIO_CONFIG | DEBUGCTL => 0,
            HWCR => self.hwcr,
            LS_CFG => self.ls_cfg,
            DE_CFG => LFENCE_SERIALIZES,
            _ => return None,
        })
    }

    /// WRMSR.
    pub(crate) fn write(&mut self, index: u32, value: u64, time: GuestTime) -> Written {
        match index {
            SYSTEM_TIME => return fills(self.clock.set(value, time)),
            WALL_CLOCK => {
                self.wall_clock = value;
                self.wall_clocks = self.wall_clocks.wrapping_add(1);
                return Written::Fills(wall_clock(value, self.wall_clocks, time.began));
            }
            _ => {}
        }
        let taken = if self.is_intel {
            self.write_intel(index, value)
        } else {
            self.write_amd(index, value)
        };
        if taken { Written::Done } else { Written::Gp }
    }

    fn write_intel(&mut self, index: u32, value: u64) -> bool {
        match index {
            // CPUID leaf 1 puts the revision there again (SDM vol. 3A, 11.11.7.1).
            BIOS_SIGN_ID => true,
            MISC_ENABLE => {
                // What is fixed stays, as on a processor without the feature.
                self.fast_strings = value & FAST_STRINGS;
                true
            }
            // No branches are recorded, and none is trapped.
            DEBUGCTL => value == 0,
            _ => false,
        }
    }

    fn write_amd(&mut self, index: u32, value: u64) -> bool {
        match index {
            HWCR if value & !HWCR_KEPT == 0 => {
                self.hwcr = value | TSC_AT_P0;
                true
            }
            LS_CFG => {
                self.ls_cfg = value;
                true
            }
            DE_CFG => value & LFENCE_SERIALIZES != 0,
            // There is no northbridge that would do it.
            NB_CFG => true,
            DEBUGCTL => value == 0,
            _ => false,
        }
    }

    /// What goes into the guest's memory since it has set its TSC, if anything does.
    #[inline]
    pub(crate) fn refresh(&mut self, time: GuestTime) -> Option<GuestWrite> {
        self.clock.refresh(time)
    }
}

fn fills(write: Option<GuestWrite>) -> Written {
    write.map_or(Written::Done, Written::Fills)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: GuestTime = GuestTime {
        ticks: 77,
        tsc_offset: 0,
        began: 5,
    };

    fn of(vendor: Vendor) -> Msrs {
        Msrs::new(MsrFacts {
            vendor,
            perfmon: vendor == Vendor::Intel,
            pebs: false,
        })
    }

    /// Of each register: what is read at first, what is written, and what is read then; none
    /// for #GP.
    fn check(vendor: Vendor, index: u32, first: Option<u64>, write: u64, then: Option<u64>) {
        let mut msrs = of(vendor);
        assert_eq!(msrs.read(index), first, "{vendor:?}: {index:#x}");
        let written = msrs.write(index, write, NOW);
        let what = format!("{vendor:?}: {index:#x} <- {write:#x}");
        match then {
            None => assert_eq!(written, Written::Gp, "{what}"),
            Some(_) => assert_ne!(written, Written::Gp, "{what}"),
        }
        assert_eq!(msrs.read(index), then.or(first), "{what}");
    }

    #[test]
    fn registers_of_an_intel_processor() {
        let intel = |index, first, write, then| check(Vendor::Intel, index, first, write, then);
        let misc = 1 | 1 << 7 | 1 << 11 | 1 << 12;
        intel(0x17, Some(0), 1, None);
        intel(0x3a, Some(1), 5, None);
        intel(0x8b, Some(1 << 32), 0, Some(1 << 32));
        intel(0xce, Some(0xa00_0000_0a00), 0, None);
        intel(0x1a0, Some(misc), 0, Some(misc & !1));
        intel(0x1a0, Some(misc), u64::MAX, Some(misc));
        intel(0x1d9, Some(0), 0, Some(0));
        intel(0x1d9, Some(0), 2, None);
        assert_eq!(
            of(Vendor::Intel).read(0x10a).map(|it| it & 1),
            Some(1),
            "RDCL_NO"
        );
        for absent in [
            0x11,
            0x34,
            0x3b,
            0x48,
            0x2ff,
            0x4b56_4d02,
            0xc001_0015,
            0xc001_1029,
        ] {
            intel(absent, None, 0, None);
        }
    }

    #[test]
    fn registers_of_an_amd_processor() {
        let amd = |index, first, write, then| check(Vendor::Amd, index, first, write, then);
        amd(0x8b, Some(1 << 32), 0, None);
        amd(0xc001_0010, Some(0), 1 << 22, None);
        amd(0xc001_0015, Some(1 << 24), 1 << 18, Some(1 << 24 | 1 << 18));
        amd(0xc001_0015, Some(1 << 24), 1, None);
        amd(0xc001_001f, Some(0), 1 << 46, Some(0));
        amd(0xc001_1029, Some(2), 3, Some(2));
        amd(0xc001_1029, Some(2), 0, None);
        for absent in [0x3a, 0xce, 0x10a, 0x1a0, 0xc001_0114] {
            amd(absent, None, 0, None);
        }
    }

    #[test]
    fn the_clock_is_filled_when_it_is_switched_on_and_when_the_tsc_is_set() {
        let mut msrs = of(Vendor::Intel);
        assert_eq!(msrs.write(SYSTEM_TIME, 0x1000, NOW), Written::Done);
        let Written::Fills(page) = msrs.write(SYSTEM_TIME, 0x1001, NOW) else {
            panic!("a page");
        };
        assert_eq!(
            (page.address, msrs.read(SYSTEM_TIME)),
            (0x1000, Some(0x1001))
        );
        assert_eq!(msrs.refresh(NOW), None);
        let set = GuestTime {
            tsc_offset: 9,
            ..NOW
        };
        assert!(msrs.refresh(set).is_some());
        let Written::Fills(wall) = msrs.write(WALL_CLOCK, 0x2000, NOW) else {
            panic!("a time of day");
        };
        assert_eq!((wall.address, wall.bytes().len()), (0x2000, 12));
    }
}
