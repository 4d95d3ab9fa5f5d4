//! Where stepping misses something, the label says so.

use anyhow::{Result, ensure};
use guest_tests::micro::{DATA, Lab, Program, Setup, Test, log_fault, one_of_three};
use iced_x86::code_asm::{dr0, dr1, dr2, dr3, dr7, eax, ecx, qword_ptr, r12, r15, rax, rbx};
use pmu_virt::{LossReason, Provenance};
use vmm::vcpu::StepSupport;

use super::region::{counted, label, run, setup};

const PCE: u64 = 1 << 8;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "step::four_breakpoints_of_the_guest_cost_the_label",
        run: |lab| four_breakpoints(lab, Program::new()?),
    },
    Test {
        name: "step::a_handler_that_nobody_saw_hands_our_tf_back",
        run: |lab| {
            let program = Program::new()?.handler(13, |a| {
                // The exit finds the guest there.
                a.out(0xe8, eax)?;
                log_fault(a, 13, true)
            })?;
            four_breakpoints(lab, program)
        },
    },
    Test {
        name: "step::a_ring_that_is_not_stepped_costs_the_label",
        run: unsteppable_ring,
    },
    Test {
        name: "step::rdpmc_in_a_ring_that_is_not_stepped",
        run: |lab| one_of_three(lab, rdpmc_in_unsteppable_ring),
    },
];

/// The guest leaves no debug register for the handler of its fault.
fn four_breakpoints(lab: &Lab, program: Program) -> Result<()> {
    let program = counted(program, 0, |a| {
        let mut next = a.create_label();
        a.mov(eax, u32::try_from(DATA).unwrap_or(0) + 0x1000)?;
        a.mov(dr0, rax)?;
        a.mov(dr1, rax)?;
        a.mov(dr2, rax)?;
        a.mov(dr3, rax)?;
        // Watch writes of one byte, all four enabled locally.
        a.mov(eax, 0x1111_0455)?;
        a.mov(dr7, rax)?;
        a.lea(r15, qword_ptr(next))?;
        a.mov(rbx, 0x8000_0000_0000_0000u64)?;
        a.mov(ecx, 0xc1)?;
        a.mov(rax, qword_ptr(rbx))?;
        a.set_label(&mut next)?;
        // An exit where the handler returns to.
        a.rdmsr()?;
        // The handler logged the fault; the counts come after it.
        a.lea(r12, qword_ptr(r12 - 32))?;
        a.nop()
    })?;
    let (ran, _) = run(lab, &setup(), program)?;
    label(&ran, Provenance::Scaled, Some(LossReason::EventDelivery))
}

/// On a KVM that steps CPL 0 only; every host can be told to be one.
fn unsteppable_ring(lab: &Lab) -> Result<()> {
    let setup = unsteppable(lab);
    let program = counted(Program::new()?, 3, |a| {
        a.nop()?;
        a.nop()
    })?;
    let (ran, counts) = run(lab, &setup, program)?;
    label(&ran, Provenance::Scaled, Some(LossReason::Unsupported))?;
    ensure!(counts.user == 0, "{counts:?}");
    Ok(())
}

fn unsteppable(lab: &Lab) -> Setup {
    let mut setup = setup();
    setup.step = Some(StepSupport {
        user: false,
        ..lab.probe.step_support()
    });
    setup
}

/// The watch on the #GP handler stays while the guest runs unstepped.
fn rdpmc_in_unsteppable_ring(lab: &Lab) -> Result<()> {
    let program = counted(Program::new()?, 3, |a| {
        // Only the first instruction was planned.
        a.xor(ecx, ecx)?;
        a.nop()?;
        a.mov(eax, -1)?;
        a.rdpmc()?;
        a.mov(qword_ptr(DATA + 16), rax)
    })?;
    let ran = lab.run(&unsteppable(lab), &program.start(PCE))?;
    label(&ran, Provenance::Scaled, Some(LossReason::Unsupported))?;
    let read = ran.word(DATA + 16)?;
    ensure!(0 < read && read < 1000, "RDPMC read {read:#x}");
    Ok(())
}
