//! The register rules of the Intel models, seen by a guest.

use anyhow::Result;
use guest_tests::micro::Op::{
    Rdpmc, RdpmcGp, RdpmcWithin, Read, ReadGp, ReadWithin, Spin, Write, WriteGp,
};
use guest_tests::micro::{Lab, Op, Script, Setup, Test};

const V1: &[&str] = &["intel-v1"];
/// From version 2 on, with as many counters as the tests expect.
const V2: &[&str] = &["intel-v2", "intel-v3", "intel-v4", V5];
/// Which of three fixed counters these have: `clock` counts no instructions, and CPUID can say
/// so from version 5 on.
const FIXED: &[(&[&str], u64)] = &[
    (&["intel-v2", "intel-v3", "intel-v4"], 0b111),
    (&[V5], 0b110),
];
const V5: &str = "intel-v5,counters=4";
const BOTH: &[&str] = &["intel-v1", "intel-v2", "intel-v4"];

/// Reference cycles at every CPL, enabled.
const REF: u64 = 0x43_013c;
const FULL: u64 = 0xffff_ffff_ffff;
const PCE: u64 = 1 << 8;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "intel::selects",
        run: selects,
    },
    Test {
        name: "intel::counters",
        run: counters,
    },
    Test {
        name: "intel::absent_registers",
        run: absent,
    },
    Test {
        name: "intel::global_registers",
        run: global,
    },
    Test {
        name: "intel::fixed_counters",
        run: fixed,
    },
    Test {
        name: "intel::counting",
        run: counting,
    },
    Test {
        name: "intel::rdpmc_indices",
        run: rdpmc,
    },
    Test {
        name: "intel::cpl_3",
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
    let ops = [
        Read(0x186, 0),
        WriteGp(0x186, 1 << 32),
        WriteGp(0x187, 1 << 63),
        Read(0x186, 0),
        // Pin control is kept; a refused write changes nothing.
        Write(0x186, 1 << 19 | REF),
        WriteGp(0x186, 1 << 40 | 0x76),
        Read(0x186, 1 << 19 | REF),
        Write(0x187, 0xff9f_ffff & !(1 << 22)),
        Read(0x187, 0xff9f_ffff & !(1 << 22)),
    ];
    check(lab, "selects", BOTH, &ops)
}

fn counters(lab: &Lab) -> Result<()> {
    // SDM 3B, "Full-Width Writes to Performance Counter Registers".
    let ops = [
        Read(0xc1, 0),
        Write(0xc1, 0x8000_0000),
        Read(0xc1, 0xffff_8000_0000),
        Write(0xc1, 0x1234_5678_7fff_ffff),
        Read(0xc1, 0x7fff_ffff),
        Write(0x4c1, 0x8000_0000_0001),
        Read(0x4c1, 0x8000_0000_0001),
        Read(0xc1, 0x8000_0000_0001),
        WriteGp(0x4c1, 1 << 48),
        WriteGp(0x4c1, u64::MAX),
        Read(0x4c1, 0x8000_0000_0001),
        Read(0x345, 0x2000),
        WriteGp(0x345, 0x2000),
        WriteGp(0x345, 0),
    ];
    check(lab, "48-bit counters", V2, &ops)?;
    let ops = [
        Write(0xc1, 0xffff_fff0),
        Read(0xc1, 0xff_ffff_fff0),
        Write(0xc2, 0x7fff_fff0),
        Read(0xc2, 0x7fff_fff0),
    ];
    check(
        lab,
        "40-bit counters",
        &["intel-v1", "intel-v2,width=40"],
        &ops,
    )
}

fn absent(lab: &Lab) -> Result<()> {
    let ops = [
        ReadGp(0xc5),
        WriteGp(0xc5, 0),
        WriteGp(0x18a, 0),
        ReadGp(0x4c5),
        ReadGp(0xc001_0000),
        WriteGp(0xc001_0200, 0),
    ];
    check(lab, "counters beyond the model's", BOTH, &ops)?;
    let ops = [
        ReadGp(0x309),
        ReadGp(0x38d),
        WriteGp(0x38e, 0),
        WriteGp(0x38f, 0),
        ReadGp(0x390),
    ];
    check(lab, "version 1", V1, &ops)?;
    let ops = [
        ReadGp(0x4c1),
        WriteGp(0x4c1, 0),
        ReadGp(0x345),
        WriteGp(0x345, 0),
    ];
    let models = [
        "intel-v1",
        "intel-v2,full-width=off",
        "intel-v5,full-width=off",
    ];
    check(lab, "full-width writes are off", &models, &ops)?;
    let ops = [
        Write(0xc8, 5),
        Read(0xc8, 5),
        Write(0x18d, 0),
        ReadGp(0xc9),
        Read(0x30a, 0),
        ReadGp(0x30b),
        WriteGp(0x30c, 0),
        WriteGp(0x38d, 1 << 8),
    ];
    check(lab, "numbers", &["intel-v2,counters=8,fixed=2"], &ops)
}

fn global(lab: &Lab) -> Result<()> {
    // SDM 3A, "Processor States Following Power-up, Reset, or INIT": the
    // programmable counters are on.
    for (models, fixed) in FIXED {
        let ops = [
            Read(0x38f, 0xf),
            WriteGp(0x38f, 1 << 4),
            WriteGp(0x38f, 1 << 35),
            WriteGp(0x38f, 1 << 63),
            Write(0x38f, fixed << 32 | 0xf),
            Read(0x38f, fixed << 32 | 0xf),
            WriteGp(0x38e, 0),
            WriteGp(0x38e, 1),
            Read(0x38e, 0),
            Read(0x390, 0),
            Write(0x390, 0b11 << 62),
            WriteGp(0x390, 1 << 4),
            WriteGp(0x390, 1 << 35),
            // Overflow sets the bit of its counter, with and without INT.
            Write(0x38f, 0),
            Write(0x186, REF),
            Write(0x187, REF),
            Write(0x4c1, FULL),
            Write(0x4c2, FULL - 1),
            Write(0x38f, 0b11),
            Spin(50),
            Read(0x38e, 0b11),
            Write(0x38f, 0),
            Write(0x390, 0b10),
            Read(0x38e, 0b01),
            Read(0x390, 0),
            Write(0x390, 0b01),
            Read(0x38e, 0),
            ReadWithin(0xc1, 1, 1 << 40),
        ];
        check(lab, "global control and status", models, &ops)?;
    }
    Ok(())
}

fn fixed(lab: &Lab) -> Result<()> {
    for (models, fixed) in FIXED {
        let of = |n: u32| ((fixed >> n & 1) * 0xb) << (4 * n);
        let controls = of(0) | of(1) | of(2);
        let ops = [
            Write(0x30b, FULL),
            Read(0x30b, FULL),
            WriteGp(0x30b, 1 << 48),
            Write(0x38d, controls),
            WriteGp(0x38d, 1 << 12),
            Read(0x38d, controls),
            Write(0x38d, 0x300),
            Write(0x38f, 0x4_0000_0000),
            Spin(50),
            Write(0x38f, 0),
            Read(0x38e, 0x4_0000_0000),
            ReadWithin(0x30b, 0, 1 << 40),
            Write(0x390, 0x4_0000_0000),
            Read(0x38e, 0),
        ];
        check(lab, "fixed counters", models, &ops)?;
    }
    Ok(())
}

fn counting(lab: &Lab) -> Result<()> {
    let ops = [
        // EN counts; without it the count stays; a written count goes on.
        Write(0x186, REF),
        Spin(50),
        ReadWithin(0xc1, 1, 1 << 40),
        Write(0x186, REF & !(1 << 22)),
        Write(0xc1, 77),
        Spin(50),
        Read(0xc1, 77),
        Write(0x186, REF),
        Spin(50),
        ReadWithin(0xc1, 78, 1 << 40),
        // Neither USR nor OS: nothing.
        Write(0x186, 0x40_013c),
        Write(0xc1, 9),
        Spin(50),
        Read(0xc1, 9),
    ];
    check(lab, "EN", BOTH, &ops)?;
    let ops = [
        Write(0x186, REF),
        Write(0x187, REF),
        Write(0x38f, 0b10),
        Write(0xc1, 3),
        Write(0xc2, 3),
        Spin(50),
        Read(0xc1, 3),
        ReadWithin(0xc2, 4, 1 << 40),
        Write(0x38f, 0b01),
        Spin(50),
        ReadWithin(0xc1, 4, 1 << 40),
    ];
    check(lab, "global and local enable", V2, &ops)
}

fn rdpmc(lab: &Lab) -> Result<()> {
    let ops = [
        // The watch is armed by the first control that is written.
        Write(0x186, 0),
        Write(0xc1, 0x8000_0000),
        Write(0xc4, 3),
        Rdpmc(0, 0xffff_8000_0000),
        Rdpmc(3, 3),
        RdpmcGp(4),
        Write(0x30a, 9),
        Write(0x30b, FULL),
        Rdpmc(0x4000_0001, 9),
        Rdpmc(0x4000_0002, FULL),
        RdpmcGp(0x4000_0003),
        RdpmcGp(0x2000_0000),
        RdpmcGp(0x8000_0000),
        RdpmcGp(0x6000_0000),
        RdpmcGp(0x0001_0000),
        RdpmcGp(u32::MAX),
        Write(0x186, REF),
        Spin(50),
        RdpmcWithin(0, 0xffff_8000_0001, FULL),
    ];
    check(lab, "RDPMC", V2, &ops)?;
    let ops = [
        Write(0x186, 0),
        Rdpmc(1, 0),
        RdpmcGp(2),
        RdpmcGp(0x4000_0000),
    ];
    check(lab, "RDPMC without fixed counters", V1, &ops)
}

fn cpl_3(lab: &Lab) -> Result<()> {
    let privileged = [
        ReadGp(0xc1),
        WriteGp(0xc1, 0),
        ReadGp(0x186),
        WriteGp(0x186, REF),
    ];
    let kernel = [Write(0x186, 0), Write(0xc1, 5)];
    for model in BOTH {
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
