//! Made-up tables: two hosts on which every feature there is happens to be set.

use pmu_virt::{PmuCpuid, PmuModel, Vendor, accounting};

use super::*;
use pmu_virt::cpuid::{CpuidRegs, Leaves, Reg};

mod steps;
mod whole;

const APIC: ApicFacts = ApicFacts {
    x2apic: true,
    tsc_deadline: true,
};

fn regs(eax: u32, ebx: u32, ecx: u32, edx: u32) -> CpuidRegs {
    CpuidRegs { eax, ebx, ecx, edx }
}

fn table(rows: &[(u32, u32, CpuidRegs)]) -> Leaves {
    let mut leaves = Leaves::default();
    for &(function, index, r) in rows {
        leaves.set(function, index, r);
    }
    leaves
}

const ALL: CpuidRegs = CpuidRegs {
    eax: !0,
    ebx: !0,
    ecx: !0,
    edx: !0,
};

/// An AMD host on which every feature bit there is happens to be set.
fn amd_host() -> Leaves {
    table(&[
        (0, 0, regs(0x23, 0x6874_7541, 0x444d_4163, 0x6974_6e65)),
        (1, 0, regs(0x00a1_0f11, 0x0002_0800, !0, !0)),
        (6, 0, ALL),
        (7, 0, regs(1, !0, !0, !0)),
        (7, 1, ALL),
        (0xa, 0, regs(0x0730_0404, 0, 0, 0x603)),
        (0xb, 0, regs(0, 0, 0, 1)),
        (0xd, 0, regs(0x2e7, 0x980, 0x988, 0)),
        (0xd, 1, regs(0xf, 0x980, 0x9900, 0)),
        (0xd, 2, regs(0x100, 0x240, 0, 0)),
        (0xd, 5, regs(0x40, 0x340, 0, 0)),
        (0xd, 6, regs(0x200, 0x380, 0, 0)),
        (0xd, 7, regs(0x400, 0x580, 0, 0)),
        (0xd, 9, regs(0x8, 0x980, 0, 0)),
        (0x14, 0, ALL),
        (0x1c, 0, ALL),
        (0x23, 0, ALL),
        (
            0x4000_0000,
            0,
            regs(0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d),
        ),
        (0x4000_0001, 0, regs(0x0100_7efb, 0, 0, 0)),
        (
            0x8000_0000,
            0,
            regs(0x8000_0026, 0x6874_7541, 0x444d_4163, 0x6974_6e65),
        ),
        (0x8000_0001, 0, regs(0x00a1_0f11, 0x4000_0000, !0, !0)),
        (0x8000_0005, 0, ALL),
        (0x8000_0006, 0, regs(!0, !0, 0x0400_6140, !0)),
        (0x8000_0007, 0, ALL),
        (0x8000_0008, 0, regs(0x0030_3030, !0, 0x7001, !0)),
        (0x8000_000a, 0, ALL),
        (0x8000_001b, 0, ALL),
        (0x8000_001c, 0, ALL),
        (0x8000_001d, 0, regs(0x121, 0x01c0_003f, 0x3f, 0)),
        (0x8000_001d, 1, regs(0x122, 0x01c0_003f, 0x3f, 0)),
        (0x8000_001d, 2, regs(0x143, 0x01c0_003f, 0x7ff, 2)),
        (0x8000_001d, 3, regs(0x4163, 0x03c0_003f, 0x7fff, 1)),
        (0x8000_001d, 4, CpuidRegs::default()),
        (0x8000_001e, 0, regs(5, 5, 5, 0)),
        (0x8000_001f, 0, ALL),
        (0x8000_0022, 0, ALL),
        (0x8000_0026, 0, ALL),
    ])
}

/// An Intel host on which every feature bit there is happens to be set.
fn intel_host() -> Leaves {
    table(&[
        (0, 0, regs(0x23, 0x756e_6547, 0x6c65_746e, 0x4965_6e69)),
        (1, 0, regs(0x0008_06f8, 0x0002_0800, !0, 0x1fff_fbff)),
        (2, 0, regs(0x00fe_ff01, 0, 0, 0)),
        (4, 0, regs(0xfc00_4121, 0x02c0_003f, 0x3f, 0)),
        (4, 1, regs(0xfc00_4122, 0x01c0_003f, 0x3f, 0)),
        (4, 2, regs(0xfc00_4143, 0x03c0_003f, 0x7ff, 0)),
        (4, 3, regs(0xfc1f_c163, 0x0380_003f, 0x1_bfff, 4)),
        (7, 0, regs(1, !0, !0, !0)),
        (7, 1, ALL),
        (0xa, 0, regs(0x0830_0805, 0, 0xf, 0x8603)),
        (0xb, 0, regs(1, 2, 0x100, 1)),
        (0xd, 0, regs(0x602e7, 0x2b00, 0x2b00, 0)),
        (0xd, 1, regs(0xf, 0x2b00, 0x9900, 0)),
        (0xd, 2, regs(0x100, 0x240, 0, 0)),
        (0xd, 17, regs(0x40, 0xac0, 0, 0)),
        (0xd, 18, regs(0x2000, 0xb00, 0, 0)),
        (0x12, 0, ALL),
        (0x14, 0, ALL),
        (0x1a, 0, ALL),
        (0x1f, 0, regs(1, 2, 0x100, 1)),
        (
            0x4000_0000,
            0,
            regs(0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d),
        ),
        (0x4000_0001, 0, regs(0x0100_7efb, 0, 0, 0)),
        (0x8000_0000, 0, regs(0x8000_0008, 0, 0, 0)),
        (0x8000_0001, 0, regs(0, 0, 0x121, 0x2c10_0800)),
        (0x8000_0006, 0, regs(0, 0, 0x0800_7040, 0)),
        (0x8000_0008, 0, regs(0x3934, 0x0100_d000, 0, 0)),
    ])
}

fn core_pmu() -> PmuCpuid {
    PmuCpuid {
        leaf_0xa: CpuidRegs::default(),
        pdcm: false,
        perf_capabilities: None,
        debug_store: false,
        perfctr_core: true,
        leaf_8000001b: CpuidRegs::default(),
        leaf_80000022: CpuidRegs::default(),
        perfmon_v2: false,
        hypervisor: {
            let [base, features] = pmu_virt::accounting_leaves(&PmuModel::default_for(Vendor::Amd));
            [base, features, Default::default()]
        },
    }
}

fn intel_pmu() -> PmuCpuid {
    PmuCpuid {
        leaf_0xa: CpuidRegs {
            eax: 0x0730_0402,
            ebx: 0x7e,
            ecx: 0,
            edx: 0x603,
        },
        pdcm: true,
        perf_capabilities: Some(0x2000),
        perfctr_core: false,
        ..core_pmu()
    }
}

fn plan(vendor: Vendor, pmu: Option<&PmuCpuid>) -> CpuidPlan<'_> {
    CpuidPlan {
        cpus: 4,
        vendor,
        identity: None,
        pmu,
        apic: APIC,
        async_page_faults: true,
        slow_cpl0: false,
        hidden: &[],
    }
}

fn made(host: &Leaves, vcpu: u8, plan: &CpuidPlan<'_>) -> Leaves {
    guest_cpuid(host, vcpu, plan).unwrap()
}
