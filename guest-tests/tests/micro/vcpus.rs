//! Two vCPUs.

use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::micro::{DATA, LOG, Lab, Program, Setup, Test, Written, exit, log_value, wrmsr};
use iced_x86::code_asm::{CodeAssembler, dword_ptr, eax, ecx, qword_ptr, r8, r12, r13, rdi};
use pmu_virt::CounterId;
use vmm::micro::{KERNEL_CODE, MicroGuest, Start};
use vmm::sched::CorePlan;
use vmm::vcpu::{PmiRoute, TrapEvent};

use crate::overflow::{AMD, Apic, Counter, INTEL, TAKEN, VECTOR, await_value, handler, lvtpc_of};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "vcpus::have_counters_of_their_own",
        run: own_counters,
    },
    Test {
        name: "vcpus::no_ipi_is_lost_among_pmis_on_intel_x2apic",
        run: |lab| storm(lab, &INTEL, Apic::X2, PmiRoute::Fixed(VECTOR)),
    },
    Test {
        name: "vcpus::no_ipi_is_lost_among_pmis_on_intel_xapic",
        run: |lab| storm(lab, &INTEL, Apic::X, PmiRoute::Nmi),
    },
    Test {
        name: "vcpus::no_ipi_is_lost_among_pmis_on_amd_xapic",
        run: |lab| storm(lab, &AMD, Apic::X, PmiRoute::Fixed(VECTOR)),
    },
    Test {
        name: "vcpus::no_ipi_is_lost_among_pmis_on_one_core",
        run: |lab| storm_on(lab, &INTEL, Apic::X2, PmiRoute::Fixed(VECTOR), ONE_CORE),
    },
];

/// Both vCPUs on one core, with the shortest slice there is.
const ONE_CORE: Option<CorePlan> = Some(CorePlan {
    cores: 1,
    slice: Duration::from_millis(1),
});

/// Code of the second vCPU.
const SECOND: u64 = KERNEL_CODE + 0x1_0000;

fn two(program: Program) -> MicroGuest {
    let first = Start {
        rdi: LOG,
        ..Start::at(KERNEL_CODE, 0)
    };
    program.guest().start(first).start(Start {
        rdi: LOG + 0x4000,
        ..Start::at(SECOND, 0)
    })
}

fn read(a: &mut CodeAssembler, msr: u32) -> Written {
    a.mov(ecx, msr)?;
    a.rdmsr()?;
    log_value(a)
}

/// What one programs the other does not see, and an overflow interrupts the
/// vCPU that it happened on.
fn own_counters(lab: &Lab) -> Result<()> {
    const FIRST_READY: u64 = DATA + 0x100;
    const SECOND_READY: u64 = DATA + 0x108;
    const FIRST_DONE: u64 = DATA + 0x110;
    const NMIS: u64 = DATA + 0x118;
    // R8 is where a vCPU counts its NMIs.
    let program = Program::new()?.handler(2, |a| {
        a.inc(qword_ptr(r8))?;
        a.iretq()
    })?;
    let program = program.kernel(|a| {
        a.mov(r8, NMIS)?;
        Apic::X.enable(a)?;
        Apic::X.route(a, 0x400)?;
        wrmsr(a, 0xc001_0201, 5)?;
        wrmsr(a, 0xc001_0200, 0x76)?;
        a.mov(qword_ptr(FIRST_READY), 1)?;
        await_value(a, SECOND_READY, 1)?;
        [0xc001_0200, 0xc001_0201, 0xc001_0202, 0xc001_0203]
            .into_iter()
            .try_for_each(|msr| read(a, msr))?;
        a.mov(qword_ptr(FIRST_DONE), 1)?;
        // The other one ends the guest.
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.pause()?;
        a.jmp(again)
    })?;
    let program = program.code(SECOND, |a| {
        a.mov(r12, rdi)?;
        a.mov(r8, NMIS + 8)?;
        Apic::X.enable(a)?;
        Apic::X.route(a, 0x400)?;
        await_value(a, FIRST_READY, 1)?;
        wrmsr(a, 0xc001_0203, (1 << 48) - 1000)?;
        wrmsr(a, 0xc001_0202, 0x53_0076)?;
        await_value(a, NMIS + 8, 1)?;
        wrmsr(a, 0xc001_0202, 0)?;
        a.mov(qword_ptr(SECOND_READY), 1)?;
        [0xc001_0200, 0xc001_0201]
            .into_iter()
            .try_for_each(|msr| read(a, msr))?;
        await_value(a, FIRST_DONE, 1)?;
        exit(a)
    })?;
    let ran = lab.run(&Setup::clock("amd-core"), &two(program))?;
    let first: Vec<u64> = ran
        .log
        .iter()
        .map(|entry| entry.b << 32 | entry.a)
        .collect();
    ensure!(first == [0x76, 5, 0, 0], "the first one read {first:x?}");
    let second = [ran.word(LOG + 0x4008)?, ran.word(LOG + 0x4028)?];
    ensure!(second == [0, 0], "the second one read {second:x?}");
    let nmis = [ran.word(NMIS)?, ran.word(NMIS + 8)?];
    ensure!(nmis == [0, 1], "NMIs {nmis:?}");
    let pmis = |vcpu: usize| {
        let events = ran.outcome.vcpus[vcpu].events.iter();
        events
            .filter_map(|event| match event {
                TrapEvent::Pmi { request, .. } => Some(request.counters),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    let of_second = pmis(1);
    ensure!(pmis(0).is_empty() && of_second.len() == 1, "{of_second:?}");
    ensure!(
        of_second[0].contains(CounterId::Programmable(1)),
        "{of_second:?}"
    );
    Ok(())
}

/// One vCPU takes PMIs as often as the floor lets it, the other one sends it
/// IPIs and waits for each: a lost one would be waited for in vain.
fn storm(lab: &Lab, counter: &Counter, apic: Apic, route: PmiRoute) -> Result<()> {
    storm_on(lab, counter, apic, route, None)
}

/// The same on `cores`: both take turns, and each goes on where it was.
fn storm_on(
    lab: &Lab,
    counter: &Counter,
    apic: Apic,
    route: PmiRoute,
    cores: Option<CorePlan>,
) -> Result<()> {
    const IPI: u8 = 0x60;
    const ACKNOWLEDGED: u64 = DATA + 0x100;
    const READY: u64 = DATA + 0x108;
    const SENT: u64 = DATA + 0x110;
    const IPIS: u64 = 100;
    const PMIS: u64 = 20;
    let (lvtpc, vector) = lvtpc_of(route);
    let eoi = (vector == VECTOR).then_some(apic);
    let program = Program::new()?
        .handler(vector, |a| {
            handler(a, eoi, |a| {
                // Intel's mask, where it was set.
                apic.route(a, lvtpc)?;
                counter.reload(a, 5000)
            })
        })?
        .handler(IPI, |a| {
            a.push(iced_x86::code_asm::rax)?;
            a.push(iced_x86::code_asm::rcx)?;
            a.push(iced_x86::code_asm::rdx)?;
            a.inc(qword_ptr(ACKNOWLEDGED))?;
            apic.end_of_interrupt(a)?;
            a.pop(iced_x86::code_asm::rdx)?;
            a.pop(iced_x86::code_asm::rcx)?;
            a.pop(iced_x86::code_asm::rax)?;
            a.iretq()
        })?;
    let program = program.kernel(|a| {
        apic.enable(a)?;
        apic.route(a, lvtpc)?;
        a.sti()?;
        counter.start(a, 5000)?;
        a.mov(qword_ptr(READY), 1)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.pause()?;
        a.jmp(again)
    })?;
    let program = program.code(SECOND, |a| {
        apic.enable(a)?;
        await_value(a, READY, 1)?;
        a.xor(r8, r8)?;
        let (mut next, mut waiting) = (a.create_label(), a.create_label());
        a.set_label(&mut next)?;
        a.inc(r8)?;
        match apic {
            // Destination 0, fixed, edge, assert.
            Apic::X => {
                let mut busy = a.create_label();
                apic.write(a, 0x310, 0)?;
                apic.write(a, 0x300, 0x4000 | u32::from(IPI))?;
                a.set_label(&mut busy)?;
                a.mov(eax, dword_ptr(r13 + 0x300))?;
                a.test(eax, 0x1000)?;
                a.jne(busy)?;
            }
            Apic::X2 => wrmsr(a, 0x830, 0x4000 | u64::from(IPI))?,
        }
        a.set_label(&mut waiting)?;
        a.pause()?;
        a.cmp(qword_ptr(ACKNOWLEDGED), r8)?;
        a.jne(waiting)?;
        a.cmp(r8, i32::try_from(IPIS).unwrap_or(0))?;
        a.jb(next)?;
        a.cmp(qword_ptr(TAKEN), i32::try_from(PMIS).unwrap_or(0))?;
        a.jb(next)?;
        a.mov(qword_ptr(SENT), r8)?;
        exit(a)
    })?;
    let mut setup = Setup::clock(counter.model);
    setup.cores = cores;
    // Both test hosts need some hundred microseconds for a PMI's handler: the
    // default floor would leave no time for the IPIs, as on real hardware. On a core of
    // two, time goes on while the other one runs: a handler that needs more than one
    // slice would find the next PMI due when it ends, which comes before an IPI.
    setup.pmi_floor_us = if cores.is_some() { 10_000 } else { 1000 };
    // Two spinning vCPUs on a busy host take turns of some milliseconds.
    setup.timeout = Duration::from_secs(60);
    let ran = lab.run(&setup, &two(program))?;
    // On a busy host more are sent, until enough PMIs have come.
    let (acknowledged, sent) = (ran.word(ACKNOWLEDGED)?, ran.word(SENT)?);
    ensure!(
        sent >= IPIS && acknowledged == sent,
        "{acknowledged} of {sent} IPIs arrived"
    );
    let (taken, pmis) = (ran.word(TAKEN)?, ran.outcome.vcpus[0].pmis);
    // The last one may still be on its way.
    ensure!(taken >= PMIS, "only {taken} PMIs arrived during the storm");
    ensure!(
        (taken..=taken + 1).contains(&pmis.0),
        "{taken} PMIs arrived of {}",
        pmis.0
    );
    Ok(())
}
