//! AMD's events: a delivered exception is a far branch that was taken, and on
//! K7 and K8 an instruction as well (BKDG, events 0C0h, 0C2h, 0C4h, 0C6h).

use anyhow::{Result, ensure};
use guest_tests::micro::{Lab, Program, Setup, Test, Written, exit, log_value, wrmsr};
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx, qword_ptr, r15, rax, rbx, rsp};
use pmu_virt::{CounterId, Provenance, Reading};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "step::amd_events",
        run: events,
    },
    Test {
        name: "step::k7_counts_deliveries_as_instructions",
        run: k7,
    },
];

const GLOBAL_CONTROL: u32 = 0xc000_0301;

/// One #GP, whose handler returns behind the instruction: eight instructions
/// with the handler's three, an IRET among them. One store, five loads.
fn region(a: &mut CodeAssembler) -> Written {
    let mut next = a.create_label();
    a.lea(r15, qword_ptr(next))?;
    a.mov(rbx, 0x8000_0000_0000_0000u64)?;
    // This one never retires.
    a.mov(rax, qword_ptr(rbx))?;
    a.ud2()?;
    a.set_label(&mut next)?;
    a.xor(eax, eax)?;
    let mut over = a.create_label();
    // Taken.
    a.je(over)?;
    a.ud2()?;
    a.set_label(&mut over)?;
    a.nop()
}

fn handler(a: &mut CodeAssembler) -> Written {
    a.mov(qword_ptr(rsp + 8), r15)?;
    a.lea(rsp, qword_ptr(rsp + 8))?;
    a.iretq()
}

/// Writes 0 to `control` and logs the counters; three instructions count.
pub(super) fn stop(a: &mut CodeAssembler, control: u32, counters: &[u32]) -> Written {
    a.mov(ecx, control)?;
    a.xor(eax, eax)?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    for &counter in counters {
        a.mov(ecx, counter)?;
        a.rdmsr()?;
        log_value(a)?;
    }
    exit(a)
}

/// Runs `program` on `model`: what it logs, and what the counters are labelled.
pub(super) fn check(
    lab: &Lab,
    model: &str,
    program: Program,
    expected: &[(u64, Provenance)],
) -> Result<()> {
    let ran = lab.run(&Setup::step(model), &program.start(0))?;
    let counts: Vec<u64> = ran
        .log
        .iter()
        .map(|entry| entry.b << 32 | entry.a)
        .collect();
    let values: Vec<u64> = expected.iter().map(|(value, _)| *value).collect();
    ensure!(counts == values, "counted {counts:?}, expected {values:?}");
    for ((_, provenance), counter) in expected.iter().zip(0..) {
        let report = ran.report(0, CounterId::Programmable(counter))?;
        let labelled = matches!(
            report.reading,
            Reading::Counted { provenance: found, .. } if found == *provenance
        );
        ensure!(labelled && report.loss.is_none(), "{report:?}");
    }
    Ok(())
}

fn events(lab: &Lab) -> Result<()> {
    const COUNTERS: [u32; 6] = [
        0xc001_0201,
        0xc001_0203,
        0xc001_0205,
        0xc001_0207,
        0xc001_0209,
        0xc001_020b,
    ];
    // Instructions, branches, taken, far, loads dispatched, stores dispatched.
    let selects = [
        0x43_00c0, 0x43_00c2, 0x43_00c4, 0x43_00c6, 0x43_0129, 0x43_0229,
    ];
    let program = Program::new()?.handler(13, handler)?.kernel(|a| {
        wrmsr(a, GLOBAL_CONTROL, 0)?;
        for (counter, select) in COUNTERS.iter().zip(selects) {
            wrmsr(a, counter - 1, select)?;
        }
        wrmsr(a, GLOBAL_CONTROL, 0x3f)?;
        region(a)?;
        stop(a, GLOBAL_CONTROL, &COUNTERS)
    })?;
    let expected = [
        (8 + 3, Provenance::Exact),
        // JE, IRET and the delivery.
        (3, Provenance::Exact),
        (3, Provenance::Exact),
        (2, Provenance::Exact),
        // Dispatched operations are taken from retired instructions.
        (5, Provenance::Derived),
        (1, Provenance::Derived),
    ];
    check(lab, "amd-perfmonv2", program, &expected)
}

fn k7(lab: &Lab) -> Result<()> {
    const SELECT: u32 = 0xc001_0000;
    const COUNTER: u32 = 0xc001_0004;
    let program = Program::new()?.handler(13, handler)?.kernel(|a| {
        wrmsr(a, SELECT, 0x43_00c0)?;
        region(a)?;
        a.mov(ecx, SELECT)?;
        // The event stays selected, without EN, so that the report has it.
        a.mov(eax, 0x03_00c0)?;
        a.xor(edx, edx)?;
        a.wrmsr()?;
        a.mov(ecx, COUNTER)?;
        a.rdmsr()?;
        log_value(a)?;
        exit(a)
    })?;
    check(lab, "amd-k7", program, &[(8 + 3 + 1, Provenance::Exact)])
}
