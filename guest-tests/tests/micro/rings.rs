//! Whom the `clock` backend charges, what it cannot count, and resets.

use anyhow::{Result, ensure};
use guest_tests::micro::Op::{Rdpmc, Read, Spin, Write};
use guest_tests::micro::{
    Lab, LabRun, Program, Script, Setup, Test, Written, enter_user, exit, log_value, one_of_three,
    wrmsr,
};
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx, r8, r9, rax, rdx};
use pmu_virt::{CounterId, Provenance, Reading, UnavailableReason};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "rings::clock_charges_the_ring_that_ran",
        run: |lab| one_of_three(lab, clock),
    },
    Test {
        name: "rings::what_nobody_counts_is_unavailable",
        run: unavailable,
    },
    Test {
        name: "reset::every_guest_starts_from_reset_values",
        run: reset,
    },
];

/// Runs until `ticks` of the TSC have passed.
pub(crate) fn busy(a: &mut CodeAssembler, ticks: u32) -> Written {
    let mut again = a.create_label();
    let now = |a: &mut CodeAssembler| -> Written {
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.or(rax, rdx)
    };
    now(a)?;
    a.lea(r8, iced_x86::code_asm::qword_ptr(rax + ticks))?;
    a.set_label(&mut again)?;
    now(a)?;
    a.mov(r9, rax)?;
    a.cmp(r9, r8)?;
    a.jb(again)
}

/// A quarter of the time at CPL 0, three quarters at CPL 3.
fn clock(lab: &Lab) -> Result<()> {
    const KERNEL_TICKS: u32 = 50_000_000;
    const USER_TICKS: u32 = 3 * KERNEL_TICKS;
    let program = Program::new()?.handler(6, |a| {
        a.mov(ecx, 0x38f)?;
        a.xor(eax, eax)?;
        a.xor(edx, edx)?;
        a.wrmsr()?;
        for msr in 0xc1u32..0xc4 {
            a.mov(ecx, msr)?;
            a.rdmsr()?;
            log_value(a)?;
        }
        exit(a)
    })?;
    let program = program.kernel(|a| {
        wrmsr(a, 0x38f, 0)?;
        // Reference cycles: both rings, CPL 0, CPL 3.
        wrmsr(a, 0x186, 0x43_013c)?;
        wrmsr(a, 0x187, 0x42_013c)?;
        wrmsr(a, 0x188, 0x41_013c)?;
        wrmsr(a, 0x38f, 0b111)?;
        busy(a, KERNEL_TICKS)?;
        enter_user(a, 0)
    })?;
    let program = program.user(|a| {
        busy(a, USER_TICKS)?;
        a.ud2()
    })?;
    let ran = lab.run(&Setup::clock("intel-v2"), &program.start(0))?;
    let counts: Vec<u64> = ran
        .log
        .iter()
        .map(|entry| entry.b << 32 | entry.a)
        .collect();
    let [both, kernel, user] = counts[..] else {
        anyhow::bail!("the guest logged {:x?}", ran.log);
    };
    let labelled = |n: u8, provenance| -> Result<()> {
        let report = ran.report(0, CounterId::Programmable(n))?;
        let found = matches!(
            report.reading,
            Reading::Counted { provenance: found, .. } if found == provenance
        );
        ensure!(found, "{report:?}");
        Ok(())
    };
    labelled(0, Provenance::Exact)?;
    labelled(1, Provenance::Scaled)?;
    labelled(2, Provenance::Scaled)?;
    ensure!(
        kernel + user == both,
        "{kernel} at CPL 0 and {user} at CPL 3 of {both}"
    );
    // Each change of ring is off by one sample at most: two of 2.5 million
    // ticks here, and as much again for late ones.
    let share = user * 100 / both.max(1);
    ensure!((65..=85).contains(&share), "{share} % at CPL 3: {counts:?}");
    Ok(())
}

/// The counter is frozen, and the report gives the reason.
fn unavailable(lab: &Lab) -> Result<()> {
    let modifier =
        |reason: &UnavailableReason| matches!(reason, UnavailableReason::Modifier { .. });
    let event = |reason: &UnavailableReason| matches!(reason, UnavailableReason::Event { .. });
    let check = |model: &str, select: u64, fits: &dyn Fn(&UnavailableReason) -> bool| {
        let (control, count) = match model {
            "intel-v2" => (0x186, 0xc1),
            _ => (0xc001_0200, 0xc001_0201),
        };
        let script = Script {
            name: "frozen",
            cr4: 0,
            kernel: &[
                Write(count, 7),
                Write(control, select),
                Spin(50),
                Read(count, 7),
                Rdpmc(0, 7),
                Read(control, select),
            ],
            user: &[],
        };
        let ran: LabRun = script.check(lab, &Setup::clock(model))?;
        let report = ran.report(0, CounterId::Programmable(0))?;
        match &report.reading {
            Reading::Unavailable(reason) if fits(reason) && !report.running => Ok(()),
            _ => Err(anyhow::anyhow!("{select:#x} on {model}: {report:?}")),
        }
    };
    // Edge, inverse, counter mask.
    check("intel-v2", 0x43_013c | 1 << 18, &modifier)?;
    check("intel-v2", 0x43_013c | 1 << 23 | 1 << 24, &modifier)?;
    check("intel-v2", 0x43_013c | 1 << 24, &modifier)?;
    check("amd-core", 0x43_0076 | 1 << 18, &modifier)?;
    // Instructions, and a cache event.
    check("intel-v2", 0x43_00c0, &event)?;
    check("intel-v2", 0x43_412e, &event)?;
    check("amd-core", 0x43_00c0, &event)
}

/// Each guest finds reset values, and leaves everything changed.
fn reset(lab: &Lab) -> Result<()> {
    const FULL: u64 = 0xffff_ffff_ffff;
    let intel = [
        Read(0x186, 0),
        Read(0xc1, 0),
        Read(0x4c4, 0),
        Read(0x38d, 0),
        Read(0x309, 0),
        Read(0x38e, 0),
        Read(0x38f, 0xf),
        Write(0x4c1, FULL),
        Write(0x4c4, FULL),
        Write(0x30b, FULL),
        Write(0x186, 0x53_013c),
        Write(0x189, 0x43_013c),
        Write(0x38d, 0xbbb),
        Write(0x38f, 0x7_0000_0009),
        Spin(50),
    ];
    let amd = [
        Read(0xc001_0200, 0),
        Read(0xc001_0201, 0),
        Read(0xc001_020b, 0),
        Read(0xc000_0300, 0),
        Read(0xc000_0301, 0x3f),
        Write(0xc001_0201, FULL),
        Write(0xc001_020b, FULL),
        Write(0xc001_0200, 0x53_0076),
        Write(0xc001_020a, 0x43_0076),
        Write(0xc000_0301, 0x21),
        Spin(50),
    ];
    for (model, ops) in [("intel-v2", &intel[..]), ("amd-perfmonv2", &amd[..])] {
        for name in ["the first guest", "a guest after it"] {
            let script = Script {
                name,
                cr4: 0,
                kernel: ops,
                user: &[],
            };
            script.check(lab, &Setup::clock(model))?;
        }
    }
    Ok(())
}
