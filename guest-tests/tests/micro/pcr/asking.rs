//! What becomes of requests, leases and revocations without the guest's doing:
//! while it is halted on a shared core, and by the hypervisor's answers.

use anyhow::{Result, ensure};
use arbiter::{Layer, Scheme, Share, abi};
use guest_tests::micro::{LOG, Lab, Op, Program, Script, Setup, Test, Written, exit, wrmsr};
use iced_x86::code_asm::{CodeAssembler, qword_ptr, rax, rsi};
use vmm::config::{HypervisorCounters, PcrChoice};
use vmm::micro::{KERNEL_CODE, MicroPcr, Start};
use vmm::vcpu::TrapEvent;

use super::super::cores::plan;
use super::layers::planned;
use super::{CR4_PCE, KEY, NOTICE, TAKEN, key, rdpmc, single, status, take_notice, told, with};
use crate::overflow::Apic;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "pcr::a_lease_ends_while_its_vcpu_is_halted_on_a_core",
        run: lease,
    },
    Test {
        name: "pcr::a_revocation_takes_place_while_its_vcpu_is_halted_on_a_core",
        run: revocation,
    },
    Test {
        name: "pcr::the_hypervisor_yields_what_it_is_asked_for",
        run: yields,
    },
    Test {
        name: "pcr::the_hypervisor_keeps_its_minimum",
        run: keeps,
    },
    Test {
        name: "pcr::rdpmc_works_from_the_end_of_the_phase_on",
        run: early_rdpmc,
    },
];

const VECTOR: u8 = 0x69;
/// Code of the second vCPU.
const SECOND: u64 = KERNEL_CODE + 0x1_0000;
const REQUEST: u32 = single(abi::MSR_REQUEST);
const ANSWER: u32 = single(abi::MSR_ANSWER);
const GRANTED: u32 = single(abi::MSR_GRANTED);

/// `REQUEST`: so many counters, for so many hundredths of a second.
const fn any(count: u64, lease: u64) -> u64 {
    abi::REQUEST_RESERVE
        | abi::REQUEST_ANY
        | count << abi::REQUEST_WHICH_SHIFT
        | lease << abi::REQUEST_LEASE_SHIFT
}

/// The second vCPU does `act`, then halts; the first one spins beside it on the
/// same core until the second has taken the interrupt of a notice.
fn halted(
    lab: &Lab,
    pcr: MicroPcr,
    act: impl FnOnce(&mut CodeAssembler) -> Written,
) -> Result<(u64, Vec<String>)> {
    let program = Program::new()?
        .handler(VECTOR, take_notice)?
        .kernel(|a| {
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.mov(rax, qword_ptr(TAKEN))?;
            a.test(rax, rax)?;
            a.je(again)?;
            exit(a)
        })?
        .code(SECOND, |a| {
            Apic::X2.enable(a)?;
            act(a)?;
            wrmsr(a, single(abi::MSR_NOTICE_VECTOR), VECTOR.into())?;
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.sti()?;
            a.hlt()?;
            a.jmp(again)
        })?;
    let guest = program.start(0).start(Start {
        rdi: LOG,
        ..Start::at(SECOND, 0)
    });
    let setup = Setup {
        cores: plan(1),
        ..with(pcr)
    };
    let ran = lab.run(&setup, &guest)?;
    ensure!(ran.word(TAKEN)? == 1);
    let second = &ran.outcome.vcpus[1];
    let sent = TrapEvent::Notice {
        vector: VECTOR,
        sent: true,
    };
    ensure!(second.events.iter().filter(|event| **event == sent).count() == 1);
    let words = second.decisions.iter();
    let words = words.map(|record| record.event.name().to_owned());
    Ok((ran.word(NOTICE)?, words.collect()))
}

fn lease(lab: &Lab) -> Result<()> {
    let (notice, decisions) = halted(lab, MicroPcr::default(), |a| {
        a.mov(rsi, KEY)?;
        wrmsr(a, REQUEST, any(1, 3))
    })?;
    ensure!(notice & abi::NOTICE_KIND_MASK == abi::NOTICE_EXPIRED);
    ensure!(decisions == ["reserved", "revoked"], "{decisions:?}");
    Ok(())
}

/// The firmware holds two of six counters, and the kernel, of higher priority,
/// asks for five.
fn revocation(lab: &Lab) -> Result<()> {
    let mut pcr = MicroPcr {
        firmware: true,
        ..MicroPcr::default()
    };
    pcr.plan.scheme = Scheme::Interacting;
    pcr.plan.policy.grace_ms = 30;
    pcr.plan.policy.kernel.priority = 1;
    let (notice, decisions) = halted(lab, pcr, |a| {
        wrmsr(a, key(4), KEY)?;
        wrmsr(a, key(5), KEY)?;
        wrmsr(a, single(abi::MSR_PHASE), abi::PHASE_END)?;
        a.mov(rsi, KEY)?;
        wrmsr(a, REQUEST, any(5, 0))
    })?;
    ensure!(
        notice & abi::NOTICE_KIND_MASK == abi::NOTICE_GRANTED,
        "{notice:#x}, {decisions:?}"
    );
    ensure!(decisions.iter().any(|word| word == "revoked"));
    Ok(())
}

/// The hypervisor holds two of six counters.
fn hypervisors_two(hypervisor: Share) -> Result<MicroPcr> {
    let mut choice = PcrChoice {
        scheme: Scheme::Interacting,
        hypervisor: HypervisorCounters::Last(2),
        ..PcrChoice::default()
    };
    choice.policy.hypervisor = hypervisor;
    planned(&choice, &[])
}

/// The answer is there when the write is done, and nothing but the request has
/// put the guest's RDPMC under watch.
fn yields(lab: &Lab) -> Result<()> {
    const SCRIPT: Script<'_> = Script {
        name: "asked",
        cr4: CR4_PCE,
        kernel: &[
            Op::With(KEY, &Op::Write(REQUEST, any(5, 0))),
            Op::Read(ANSWER, abi::ANSWER_GRANTED | 1 << abi::ANSWER_NUMBER_SHIFT),
            Op::Read(GRANTED, 0b10_1111),
            Op::With(KEY, &Op::Rdpmc(rdpmc(5), 0)),
            Op::Read(
                status(4),
                abi::STATUS_RESERVED
                    | abi::STATUS_PRIVATE
                    | abi::LAYER_HYPERVISOR << abi::STATUS_OWNER_SHIFT,
            ),
        ],
        user: &[],
    };
    let ran = SCRIPT.check(lab, &with(hypervisors_two(Share::FREE)?))?;
    let vcpu = &ran.outcome.vcpus[0];
    let held = vcpu.holdings.iter();
    let kernels = held.filter(|held| held.owner == Layer::GuestKernel).count();
    ensure!(kernels == 5, "{:?}", vcpu.holdings);
    ensure!(told(&ran).contains("asked"), "{}", told(&ran));
    Ok(())
}

fn keeps(lab: &Lab) -> Result<()> {
    const SCRIPT: Script<'_> = Script {
        name: "at its minimum",
        cr4: 0,
        kernel: &[
            Op::With(KEY, &Op::Write(REQUEST, any(5, 0))),
            Op::Read(
                ANSWER,
                abi::ANSWER_REFUSED
                    | abi::REASON_NONE_FREE << abi::ANSWER_REASON_SHIFT
                    | 1 << abi::ANSWER_NUMBER_SHIFT,
            ),
        ],
        user: &[],
    };
    let mut share = Share::FREE;
    share.min.programmable = 2;
    SCRIPT.check(lab, &with(hypervisors_two(share)?))?;
    Ok(())
}

fn early_rdpmc(lab: &Lab) -> Result<()> {
    const SCRIPT: Script<'_> = Script {
        name: "phase, then RDPMC",
        cr4: CR4_PCE,
        kernel: &[
            Op::Write(single(abi::MSR_PHASE), abi::PHASE_END),
            Op::Rdpmc(0, 0),
        ],
        user: &[],
    };
    let firmware = MicroPcr {
        firmware: true,
        ..MicroPcr::default()
    };
    SCRIPT.check(lab, &with(firmware))?;
    Ok(())
}
