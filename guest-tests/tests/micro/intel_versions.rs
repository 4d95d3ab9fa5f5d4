//! What versions 3, 4 and 5 of Intel's PMU added, seen by a guest.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::micro::Op::{Rdpmc, RdpmcGp, Read, ReadGp, ReadWithin, Spin, Write, WriteGp};
use guest_tests::micro::{
    DATA, Lab, Op, Program, Script, Setup, Test, Written, exit, log_value, spin, wrmsr,
};
use iced_x86::code_asm::{CodeAssembler, ecx, qword_ptr, rax, rcx, rdx};

use crate::overflow::Apic;

const V3_V4: &[&str] = &["intel-v3", "intel-v4"];
const FROM_V4: &[&str] = &["intel-v4", "intel-v5,counters=4"];
const BEFORE_V4: &[&str] = &["intel-v1", "intel-v2", "intel-v3"];
const WITHOUT_ANY_THREAD: &[&str] = &["intel-v2", "intel-v5"];

/// Reference cycles at every CPL, enabled; then with INT.
const REF: u64 = 0x43_013c;
const REF_INT: u64 = 0x53_013c;
const ANY_THREAD: u64 = 1 << 21;
const CTR_FRZ: u64 = 1 << 59;
const COND_CHGD: u64 = 1 << 63;
/// LBR_FRZ, CTR_FRZ, ASCI, Ovf_Uncore, OvfBuffer.
const INDICATORS: u64 = 0b1_1111 << 58;
const FULL: u64 = 0xffff_ffff_ffff;
const DEBUGCTL: u32 = 0x1d9;
const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "intel_versions::any_thread",
        run: any_thread,
    },
    Test {
        name: "intel_versions::status",
        run: status,
    },
    Test {
        name: "intel_versions::in_use",
        run: in_use,
    },
    Test {
        name: "intel_versions::frozen_by_software",
        run: frozen,
    },
    Test {
        name: "intel_versions::frozen_by_an_overflow",
        run: overflow,
    },
    Test {
        name: "intel_versions::frozen_by_a_pmi",
        run: pmi,
    },
    Test {
        name: "intel_versions::fixed_bitmap",
        run: bitmap,
    },
    Test {
        name: "intel_versions::perf_capabilities",
        run: capabilities,
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

fn any_thread(lab: &Lab) -> Result<()> {
    let ops = [
        // It counts this thread, the core's only one.
        Write(0x186, REF | ANY_THREAD),
        Read(0x186, REF | ANY_THREAD),
        Spin(50),
        ReadWithin(0xc1, 1, 1 << 40),
        Write(0x38d, 0xfff),
        Read(0x38d, 0xfff),
        WriteGp(0x38d, 1 << 12),
        Write(0x38d, 0x700),
        Write(0x38f, 0x4_0000_0000),
        Spin(50),
        ReadWithin(0x30b, 1, 1 << 40),
    ];
    check(lab, "any-thread", V3_V4, &ops)?;
    let ops = [
        WriteGp(0x186, ANY_THREAD),
        WriteGp(0x186, REF | ANY_THREAD),
        Read(0x186, 0),
        WriteGp(0x38d, 1 << 2),
        WriteGp(0x38d, 1 << 6),
        WriteGp(0x38d, 1 << 10),
        Read(0x38d, 0),
    ];
    check(lab, "without any-thread", WITHOUT_ANY_THREAD, &ops)
}

fn status(lab: &Lab) -> Result<()> {
    let ops = [ReadGp(0x391), WriteGp(0x391, 0), ReadGp(0x392)];
    check(lab, "before version 4", BEFORE_V4, &ops)?;
    check(
        lab,
        "OVF_CTRL",
        &["intel-v2", "intel-v3"],
        &[WriteGp(0x390, 1 << 61), WriteGp(0x390, CTR_FRZ)],
    )?;
    for model in FROM_V4 {
        let guest = Setup::clock(model).guest_model()?;
        let counters = guest.context("a PMU")?.global_mask();
        let ops = [
            Read(0x38e, 0),
            WriteGp(0x38e, CTR_FRZ),
            Write(0x391, counters | INDICATORS),
            Read(0x38e, counters | INDICATORS),
            Read(0x391, 0),
            Write(0x390, INDICATORS | 1),
            Read(0x38e, counters & !1),
            Read(0x390, 0),
            Write(0x390, counters | INDICATORS | COND_CHGD),
            Read(0x38e, 0),
            WriteGp(0x391, COND_CHGD),
            WriteGp(0x391, 1 << 57),
            WriteGp(0x391, 1 << 55),
            WriteGp(0x391, 1 << 35),
            WriteGp(0x391, 1 << 4),
            WriteGp(0x390, 1 << 57),
            WriteGp(0x390, 1 << 55),
            WriteGp(0x390, 1 << 35),
            WriteGp(0x390, 1 << 4),
            Read(0x38e, 0),
        ];
        check(lab, "STATUS_SET and STATUS_RESET", &[model], &ops)?;
    }
    Ok(())
}

fn in_use(lab: &Lab) -> Result<()> {
    let ops = [
        Read(0x392, 0),
        WriteGp(0x392, 0),
        Write(0x187, 0x3c),
        Read(0x392, 0b10),
        Write(0x38d, 0x030),
        Read(0x392, 0x2_0000_0002),
        Write(0x38d, 0x0b0),
        Read(0x392, COND_CHGD | 0x2_0000_0002),
        Write(0x38d, 0),
        Write(0x187, 0),
        Write(0x188, 0x50_0000),
        Read(0x392, COND_CHGD),
    ];
    check(lab, "INUSE", FROM_V4, &ops)
}

fn frozen(lab: &Lab) -> Result<()> {
    let ops = [
        Write(0x38f, 0x4_0000_0003),
        Write(0x186, REF),
        Write(0x38d, 0x300),
        Write(0x391, CTR_FRZ),
        Write(0xc1, 7),
        Write(0x30b, 7),
        Spin(50),
        Read(0xc1, 7),
        Read(0x30b, 7),
        // The controls are as they were, and start nothing.
        Read(0x38f, 0x4_0000_0003),
        Write(0x38f, 0x4_0000_0001),
        Write(0x187, REF),
        Write(0x186, REF),
        Spin(50),
        Read(0xc1, 7),
        Read(0xc2, 0),
        Write(0x390, CTR_FRZ),
        Spin(50),
        ReadWithin(0xc1, 8, 1 << 40),
        ReadWithin(0x30b, 8, 1 << 40),
        Read(0xc2, 0),
    ];
    check(lab, "CTR_FRZ", FROM_V4, &ops)
}

fn overflow(lab: &Lab) -> Result<()> {
    let ops = [
        Write(DEBUGCTL, FREEZE_PERFMON_ON_PMI),
        Read(DEBUGCTL, FREEZE_PERFMON_ON_PMI),
        Write(0x187, REF),
        // Without INT nothing freezes.
        Write(0x4c1, FULL - 1),
        Write(0x186, REF),
        Spin(50),
        Read(0x38e, 1),
        Write(0x186, 0),
        Write(0x390, 1),
        Write(0x4c1, FULL - 1),
        Write(0x186, REF_INT),
        Spin(50),
        // LVTPC is masked: the counters stand nevertheless.
        Read(0x38e, CTR_FRZ | 1),
        Read(0x38f, 0xf),
        Write(0xc2, 7),
        Spin(50),
        Read(0xc2, 7),
        Write(0x390, 1),
        Spin(50),
        Read(0xc2, 7),
        Write(0x390, CTR_FRZ),
        Spin(50),
        ReadWithin(0xc2, 8, 1 << 40),
        Write(DEBUGCTL, 0),
        Read(DEBUGCTL, 0),
    ];
    check(lab, "freeze on PMI", FROM_V4, &ops)
}

/// How many PMIs were taken.
const TAKEN: u64 = DATA;
const PMIS: i32 = 3;
/// Ticks from one to the next.
const PERIOD: u64 = 0x10_0000;

/// As a driver of version 4 has it: the handler finds the counters frozen, reloads, and
/// clears status and freeze with one write; GLOBAL_CTRL is not touched.
fn pmi(lab: &Lab) -> Result<()> {
    const NMI: u8 = 2;
    let read = |a: &mut CodeAssembler, msr: u32| -> Written {
        a.mov(ecx, msr)?;
        a.rdmsr()?;
        log_value(a)
    };
    for model in FROM_V4 {
        let program = Program::new()?
            .handler(NMI, |a| {
                a.push(rax)?;
                a.push(rcx)?;
                a.push(rdx)?;
                read(a, 0x38e)?;
                read(a, 0xc2)?;
                spin(a, 500)?;
                read(a, 0xc2)?;
                wrmsr(a, 0x4c1, FULL - PERIOD)?;
                // The local APIC has masked LVTPC.
                Apic::X2.route(a, 0x400)?;
                wrmsr(a, 0x390, CTR_FRZ | 1)?;
                a.inc(qword_ptr(TAKEN))?;
                a.pop(rdx)?;
                a.pop(rcx)?;
                a.pop(rax)?;
                a.iretq()
            })?
            .kernel(|a| {
                Apic::X2.enable(a)?;
                Apic::X2.route(a, 0x400)?;
                wrmsr(a, DEBUGCTL, FREEZE_PERFMON_ON_PMI)?;
                wrmsr(a, 0x4c1, FULL - PERIOD)?;
                wrmsr(a, 0x187, REF)?;
                wrmsr(a, 0x186, REF_INT)?;
                let mut again = a.create_label();
                a.set_label(&mut again)?;
                a.mov(rax, qword_ptr(TAKEN))?;
                a.cmp(rax, PMIS)?;
                a.jb(again)?;
                wrmsr(a, 0x38f, 0)?;
                exit(a)
            })?;
        let setup = Setup {
            timeout: Duration::from_secs(20),
            ..Setup::clock(model)
        };
        let ran = lab.run(&setup, &program.start(0))?;
        let seen: Vec<u64> = ran.log.iter().map(|one| one.b << 32 | one.a).collect();
        ensure!(seen.len() >= 9, "{model}: {seen:x?}");
        let mut last = 0;
        for pmi in seen.chunks_exact(3) {
            let [status, before, after] = pmi else {
                continue;
            };
            ensure!(*status == CTR_FRZ | 1, "{model}: {seen:x?}");
            ensure!(before == after, "{model} counts while frozen: {seen:x?}");
            ensure!(*before > last, "{model} stands after the PMI: {seen:x?}");
            last = *before;
        }
    }
    Ok(())
}

fn bitmap(lab: &Lab) -> Result<()> {
    let ops = [
        // The watch on RDPMC is armed by the first control that is written.
        Write(0x186, 0),
        ReadGp(0x309),
        WriteGp(0x309, 0),
        Read(0x30a, 0),
        Read(0x30b, 0),
        RdpmcGp(0x4000_0000),
        Rdpmc(0x4000_0001, 0),
        WriteGp(0x38d, 1),
        WriteGp(0x38d, 8),
        WriteGp(0x38f, 1 << 32),
        WriteGp(0x390, 1 << 32),
        WriteGp(0x391, 1 << 32),
        Write(0x38d, 0x330),
        Write(0x38f, 0x6_0000_0000),
        Spin(50),
        ReadWithin(0x30a, 1, 1 << 40),
        ReadWithin(0x30b, 1, 1 << 40),
        Read(0x392, 0x6_0000_0000),
    ];
    // `clock` counts no instructions, so a guest has no counter that is made for them.
    let models = ["intel-v5,fixed=0x6", "intel-v5"];
    check(lab, "two of three", &models, &ops)?;
    let ops = [
        ReadGp(0x309),
        ReadGp(0x30b),
        ReadGp(0x38d),
        WriteGp(0x38f, 1 << 34),
        Read(0x38f, 0xff),
    ];
    check(lab, "none", &["intel-v5,fixed=0x0"], &ops)
}

fn capabilities(lab: &Lab) -> Result<()> {
    let ops = [
        Read(0x345, 0),
        WriteGp(0x345, 0),
        ReadGp(0x4c1),
        WriteGp(0x4c1, 0),
        Write(DEBUGCTL, FREEZE_PERFMON_ON_PMI),
        Read(DEBUGCTL, FREEZE_PERFMON_ON_PMI),
        Write(0xc1, 0xffff_ffff),
        Write(0x186, REF_INT),
        Spin(50),
        Read(0x38e, 1),
        Read(0x38f, 0),
        Write(DEBUGCTL, 0),
    ];
    let models = [
        "intel-v2,full-width=off,perf-capabilities=on",
        "intel-v3,full-width=off,perf-capabilities=on",
    ];
    check(lab, "before full-width writes", &models, &ops)
}
