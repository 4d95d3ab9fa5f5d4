//! The register rules of the AMD models, seen by a guest.

use anyhow::Result;
use guest_tests::micro::Op::{
    Rdpmc, RdpmcGp, RdpmcWithin, Read, ReadGp, ReadWithin, Spin, Write, WriteGp,
};
use guest_tests::micro::{Lab, Op, Script, Setup, Test};

const ALL: &[&str] = &["amd-k7", "amd-fam10h", "amd-core", "amd-perfmonv2"];
const K7: &[&str] = &["amd-k7"];
const MODERN: &[&str] = &["amd-fam10h", "amd-core", "amd-perfmonv2"];
const SIX: &[&str] = &["amd-core", "amd-perfmonv2"];
const V2: &[&str] = &["amd-perfmonv2"];

/// Cycles at every CPL, enabled.
const CYCLES: u64 = 0x43_0076;
const GUEST_ONLY: u64 = 1 << 40;
const HOST_ONLY: u64 = 1 << 41;
const FULL: u64 = 0xffff_ffff_ffff;
const PCE: u64 = 1 << 8;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "amd::selects",
        run: selects,
    },
    Test {
        name: "amd::counters",
        run: counters,
    },
    Test {
        name: "amd::absent_registers",
        run: absent,
    },
    Test {
        name: "amd::aliases",
        run: aliases,
    },
    Test {
        name: "amd::global_registers",
        run: global,
    },
    Test {
        name: "amd::freeze",
        run: freeze,
    },
    Test {
        name: "amd::counting",
        run: counting,
    },
    Test {
        name: "amd::rdpmc_indices",
        run: rdpmc,
    },
    Test {
        name: "amd::cpl_3",
        run: cpl_3,
    },
];

/// Plays `ops` at CPL 0 on each model.
fn check(lab: &Lab, name: &str, models: &[&str], ops: &[Op]) -> Result<()> {
    for model in models {
        let script = Script {
            name,
            cr4: 0,
            kernel: ops,
            user: &[],
        };
        script.check(lab, &Setup::clock(model))?;
    }
    Ok(())
}

fn selects(lab: &Lab) -> Result<()> {
    let ops = [Write(0xc001_0000, u64::MAX), Read(0xc001_0000, 0xffdf_ffff)];
    check(lab, "reserved bits are dropped", K7, &ops)?;
    let ops = [
        Write(0xc001_0003, u64::MAX),
        Read(0xc001_0003, 0x30f_ffd7_ffff),
        Write(0xc001_0003, HOST_ONLY | CYCLES),
        Read(0xc001_0003, HOST_ONLY | CYCLES),
    ];
    check(lab, "reserved bits are dropped", MODERN, &ops)
}

fn counters(lab: &Lab) -> Result<()> {
    let ops = [
        Read(0xc001_0004, 0),
        Write(0xc001_0004, u64::MAX),
        Read(0xc001_0004, FULL),
        Write(0xc001_0007, 0x8000_0000),
        Read(0xc001_0007, 0x8000_0000),
        Write(0xc001_0005, 1 << 47),
        Read(0xc001_0005, 1 << 47),
    ];
    check(lab, "48 bits", ALL, &ops)
}

fn absent(lab: &Lab) -> Result<()> {
    let ops = [
        ReadGp(0xc1),
        WriteGp(0x186, 0),
        ReadGp(0x38f),
        ReadGp(0x345),
        ReadGp(0x309),
        WriteGp(0xc001_020c, 0),
    ];
    check(lab, "Intel's registers, and a seventh counter", ALL, &ops)?;
    let ops = [ReadGp(0xc001_0200), WriteGp(0xc001_0201, 0)];
    check(lab, "the core extension", &["amd-k7", "amd-fam10h"], &ops)?;
    let ops = [
        ReadGp(0xc000_0300),
        WriteGp(0xc000_0301, 0),
        WriteGp(0xc000_0302, 0),
        WriteGp(0xc000_0303, 0),
    ];
    let before = ["amd-k7", "amd-fam10h", "amd-core"];
    check(lab, "the global registers", &before, &ops)
}

fn aliases(lab: &Lab) -> Result<()> {
    let ops = [
        Write(0xc001_0206, 0x76),
        Read(0xc001_0003, 0x76),
        Write(0xc001_0004, 0x1234),
        Read(0xc001_0201, 0x1234),
        Write(0xc001_0203, 0x4321),
        Read(0xc001_0005, 0x4321),
        // The fifth and sixth have one name only.
        Write(0xc001_0209, 5),
        Write(0xc001_020b, 6),
        Read(0xc001_0004, 0x1234),
        Read(0xc001_0005, 0x4321),
        Read(0xc001_020b, 6),
    ];
    check(lab, "two names", SIX, &ops)
}

fn global(lab: &Lab) -> Result<()> {
    let ops = [
        Read(0xc000_0301, 0x3f),
        Write(0xc000_0301, u64::MAX),
        Read(0xc000_0301, 0x3f),
        Write(0xc000_0303, u64::MAX),
        Read(0xc000_0300, 0x3f),
        Write(0xc000_0302, 0b11),
        Read(0xc000_0300, 0x3c),
        Read(0xc000_0302, 0),
        Read(0xc000_0303, 0),
        Write(0xc000_0302, u64::MAX),
        Write(0xc000_0301, 0b10),
        Write(0xc001_0200, CYCLES),
        Write(0xc001_0202, CYCLES),
        Write(0xc001_0201, FULL),
        Write(0xc001_0203, FULL),
        Spin(50),
        Write(0xc000_0301, 0),
        Read(0xc001_0201, FULL),
        Read(0xc000_0300, 0b10),
        // Writes are ignored.
        Write(0xc000_0300, 0),
        Read(0xc000_0300, 0b10),
    ];
    check(lab, "PerfMonV2", V2, &ops)
}

fn freeze(lab: &Lab) -> Result<()> {
    const STATUS: u32 = 0xc000_0300;
    const CLEAR: u32 = 0xc000_0302;
    const FROZEN: u64 = 1 << 59;
    let ops = [
        Write(0x1d9, 1 << 12),
        Read(0x1d9, 1 << 12),
        Write(0xc001_0202, CYCLES),
        Write(0xc001_0201, FULL),
        Write(0xc001_0200, CYCLES | 1 << 20),
        Spin(50),
        Read(STATUS, FROZEN | 1),
        // It stands.
        ReadWithin(0xc001_0201, 0, 1 << 40),
        Write(0xc001_0203, 7),
        Spin(50),
        Read(0xc001_0203, 7),
        Write(CLEAR, FROZEN | 1),
        Spin(50),
        ReadWithin(0xc001_0203, 8, 1 << 40),
        Write(0x1d9, 0),
    ];
    check(lab, "PerfCntrFreeze", &["amd-perfmonv2,freeze=on"], &ops)
}

fn counting(lab: &Lab) -> Result<()> {
    let counts = [
        Write(0xc001_0000, CYCLES),
        Spin(50),
        ReadWithin(0xc001_0004, 1, 1 << 40),
        Write(0xc001_0000, CYCLES & !(1 << 22)),
        Write(0xc001_0004, 77),
        Spin(50),
        Read(0xc001_0004, 77),
        Write(0xc001_0000, 0x40_0076),
        Spin(50),
        Read(0xc001_0004, 77),
        // An event that nobody can count leaves the counter as it is.
        Write(0xc001_0000, 0x43_00c3),
        Spin(50),
        Read(0xc001_0004, 77),
        Write(0xc001_0000, CYCLES),
        Spin(50),
        ReadWithin(0xc001_0004, 78, 1 << 40),
    ];
    check(lab, "EN", ALL, &counts)?;
    let ops = [
        Write(0xc001_0000, HOST_ONLY | CYCLES),
        Write(0xc001_0001, GUEST_ONLY | CYCLES),
        Write(0xc001_0002, HOST_ONLY | GUEST_ONLY | CYCLES),
        // Bits 35:32 extend the event select: another event.
        Write(0xc001_0003, 1 << 32 | CYCLES),
        Spin(50),
        ReadWithin(0xc001_0004, 1, 1 << 40),
        Read(0xc001_0005, 0),
        ReadWithin(0xc001_0006, 1, 1 << 40),
        Read(0xc001_0007, 0),
    ];
    check(lab, "host-only and guest-only", MODERN, &ops)?;
    let ops = [
        Write(0xc001_0000, GUEST_ONLY | 1 << 32 | CYCLES),
        Read(0xc001_0000, CYCLES),
        Spin(50),
        ReadWithin(0xc001_0004, 1, 1 << 40),
    ];
    check(lab, "8-bit event select", K7, &ops)?;
    let ops = [
        Write(0xc001_020a, CYCLES),
        Spin(50),
        ReadWithin(0xc001_020b, 1, 1 << 40),
    ];
    check(lab, "the sixth counter", SIX, &ops)
}

fn rdpmc(lab: &Lab) -> Result<()> {
    let ops = [
        Write(0xc001_0000, 0),
        Write(0xc001_0004, u64::MAX),
        Rdpmc(0, FULL),
        Rdpmc(3, 0),
        RdpmcGp(6),
        RdpmcGp(0x4000_0000),
        RdpmcGp(0x8000_0000),
        RdpmcGp(u32::MAX),
        Write(0xc001_0001, CYCLES),
        Spin(50),
        RdpmcWithin(1, 1, 1 << 40),
    ];
    check(lab, "RDPMC", ALL, &ops)?;
    let ops = [Write(0xc001_0000, 0), RdpmcGp(4), RdpmcGp(5)];
    check(lab, "RDPMC of four", &["amd-k7", "amd-fam10h"], &ops)?;
    let ops = [
        Write(0xc001_020a, 0),
        Write(0xc001_020b, 5),
        Rdpmc(5, 5),
        Rdpmc(4, 0),
    ];
    check(lab, "RDPMC of six", SIX, &ops)
}

fn cpl_3(lab: &Lab) -> Result<()> {
    let privileged = [
        ReadGp(0xc001_0004),
        WriteGp(0xc001_0004, 0),
        ReadGp(0xc001_0000),
        WriteGp(0xc001_0000, CYCLES),
    ];
    let kernel = [Write(0xc001_0000, 0), Write(0xc001_0004, 5)];
    for model in ALL {
        let setup = Setup::clock(model);
        let script = Script {
            name: "without CR4.PCE",
            cr4: 0,
            kernel: &kernel,
            user: &[&privileged[..], &[RdpmcGp(0), RdpmcGp(7)]].concat(),
        };
        script.check(lab, &setup)?;
        let script = Script {
            name: "with CR4.PCE",
            cr4: PCE,
            user: &[&privileged[..], &[Rdpmc(0, 5), RdpmcGp(7), Rdpmc(0, 5)]].concat(),
            ..script
        };
        script.check(lab, &setup)?;
    }
    Ok(())
}
