//! Notices as interrupts, and freezing on a PMI.

use std::time::Duration;

use anyhow::{Result, ensure};
use arbiter::abi;
use guest_tests::micro::{Lab, Program, Setup, Test, Written, exit, log_value, wrmsr};
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx, qword_ptr, rax};
use vmm::micro::MicroPcr;
use vmm::vcpu::TrapEvent;

use super::{KEY, NOTICE, TAKEN, key, setup, single, status, take_notice, told, with};
use crate::overflow::Apic;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "pcr::a_lease_that_ends_is_announced_by_an_interrupt",
        run: |lab| lease(lab, None),
    },
    Test {
        name: "pcr::a_lease_that_ends_is_announced_on_a_core",
        run: |lab| lease(lab, super::super::cores::plan(1)),
    },
    Test {
        name: "pcr::a_pmi_freezes_the_counters",
        run: freeze,
    },
    Test {
        name: "pcr::debugctl_is_kvms_without_the_freeze",
        run: debugctl,
    },
];

const VECTOR: u8 = 0x68;

fn lease(lab: &Lab, cores: Option<vmm::sched::CorePlan>) -> Result<()> {
    let program = Program::new()?.handler(VECTOR, take_notice)?.kernel(|a| {
        Apic::X2.enable(a)?;
        wrmsr(a, single(abi::MSR_NOTICE_VECTOR), VECTOR.into())?;
        wrmsr(a, key(2), KEY)?;
        a.sti()?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.mov(rax, qword_ptr(TAKEN))?;
        a.test(rax, rax)?;
        a.je(again)?;
        a.cli()?;
        a.mov(ecx, status(2))?;
        a.rdmsr()?;
        log_value(a)?;
        exit(a)
    })?;
    let mut pcr = MicroPcr::default();
    pcr.plan.policy.kernel.lease_ms = Some(30);
    let setup = Setup { cores, ..with(pcr) };
    let ran = lab.run(&setup, &program.start(0))?;
    ensure!(ran.log[0].a == 0, "still held: {:x?}", ran.log);
    ensure!(ran.word(TAKEN)? == 1);
    let notice = ran.word(NOTICE)?;
    let kind = notice & abi::NOTICE_KIND_MASK;
    let position = notice >> abi::NOTICE_POSITION_SHIFT & 0xff;
    ensure!((kind, position) == (abi::NOTICE_EXPIRED, 2), "{notice:#x}");
    ensure!(told(&ran) == "reserved, revoked expired", "{}", told(&ran));
    let sent = ran.events(|event| {
        let expected = TrapEvent::Notice {
            vector: VECTOR,
            sent: true,
        };
        *event == expected
    });
    ensure!(sent.len() == 1);
    Ok(())
}

const DEBUGCTL: u32 = 0x1d9;
const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;
const GLOBAL_CTRL: u32 = 0x38f;

/// RDMSR into the log.
fn read(a: &mut CodeAssembler, msr: u32) -> Written {
    a.mov(ecx, msr)?;
    a.rdmsr()?;
    log_value(a)
}

/// The counter overflows, the PMI clears the enable bits, and it stands still
/// until software sets them again.
fn freeze(lab: &Lab) -> Result<()> {
    const PMI: u8 = 2;
    let program = Program::new()?
        .handler(PMI, |a| {
            a.inc(qword_ptr(TAKEN))?;
            a.iretq()
        })?
        .kernel(|a| {
            Apic::X2.enable(a)?;
            Apic::X2.route(a, 0x400)?;
            wrmsr(a, DEBUGCTL, FREEZE_PERFMON_ON_PMI)?;
            read(a, DEBUGCTL)?;
            // All are enabled at reset, and one that overflowed before the last of these
            // writes would be enabled by it again.
            wrmsr(a, GLOBAL_CTRL, 0)?;
            wrmsr(a, 0x4c1, 0xffff_fff0_0000)?;
            wrmsr(a, 0x186, 0x53_013c)?;
            wrmsr(a, GLOBAL_CTRL, 1)?;
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.mov(rax, qword_ptr(TAKEN))?;
            a.test(rax, rax)?;
            a.je(again)?;
            read(a, GLOBAL_CTRL)?;
            read(a, 0xc1)?;
            guest_tests::micro::spin(a, 2000)?;
            read(a, 0xc1)?;
            // Bits that neither the PMU nor KVM has.
            a.xor(eax, eax)?;
            a.xor(edx, edx)?;
            wrmsr(a, DEBUGCTL, 0)?;
            read(a, DEBUGCTL)?;
            exit(a)
        })?;
    let setup = Setup {
        timeout: Duration::from_secs(20),
        ..Setup::clock("intel-v2,full-width=on")
    };
    let ran = lab.run(&setup, &program.start(0))?;
    let seen: Vec<u64> = ran.log.iter().map(|one| one.b << 32 | one.a).collect();
    let [debugctl, global, first, second, after] = seen[..] else {
        anyhow::bail!("{seen:x?}");
    };
    ensure!(debugctl & FREEZE_PERFMON_ON_PMI != 0, "{seen:x?}");
    ensure!(global == 0, "GLOBAL_CTRL was not cleared: {seen:x?}");
    ensure!(first == second, "it counts while frozen: {seen:x?}");
    ensure!(after & FREEZE_PERFMON_ON_PMI == 0, "{seen:x?}");
    Ok(())
}

/// On models without the bit, the MSR does not exit: KVM answers as it likes.
fn debugctl(lab: &Lab) -> Result<()> {
    let program = Program::new()?.kernel(|a| {
        let mut next = a.create_label();
        a.lea(iced_x86::code_asm::r15, qword_ptr(next))?;
        read(a, DEBUGCTL)?;
        a.set_label(&mut next)?;
        exit(a)
    })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    let exits = ran.events(|event| matches!(event, TrapEvent::MsrRead { .. }));
    ensure!(exits.is_empty(), "{exits:x?}");
    Ok(())
}
