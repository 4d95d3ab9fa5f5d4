//! The guest's debug registers and traps beside ours.

mod reference;

use anyhow::{Result, ensure};
use guest_tests::micro::{
    DATA, Entry, FAULT, Lab, LabRun, Program, Setup, Test, Written, enter_user, exit, log_value,
    wrmsr,
};
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, al, dr0, dr1, dr2, dr3, dr6, dr7, dword_ptr, eax, ebx, ecx,
    qword_ptr, r12, r14, r15, rax, rsp,
};
use pmu_virt::ReadOutcome;
use vmm::micro::{KERNEL_CS, USER_CODE, USER_CS};
use vmm::vcpu::{TrapEvent, TrapMode};

pub(crate) use reference::TESTS as REFERENCE;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "debug::execution_breakpoint_of_the_guest",
        run: execution,
    },
    Test {
        name: "debug::data_breakpoint_at_cpl_0",
        run: |lab| data(lab, 0),
    },
    Test {
        name: "debug::data_breakpoint_at_cpl_3",
        run: |lab| data(lab, 3),
    },
    Test {
        name: "debug::breakpoint_behind_an_rdpmc",
        run: behind_rdpmc,
    },
    Test {
        name: "debug::breakpoint_set_while_ours_is_in_use",
        run: set_late,
    },
    Test {
        name: "debug::a_guest_that_takes_all_four_is_told",
        run: all_four,
    },
    Test {
        name: "debug::a_guest_that_steps_its_program",
        run: ptrace,
    },
    Test {
        name: "debug::int3_at_cpl_0",
        run: |lab| int3(lab, 0),
    },
    Test {
        name: "debug::int3_at_cpl_3",
        run: |lab| int3(lab, 3),
    },
];

const COUNT: u64 = 0x77;
const SELECT: u32 = 0xc001_0200;
const PCE: u64 = 1 << 8;
const TF: i32 = 1 << 8;
const RF: i32 = 1 << 16;
/// DR6 without a cause.
const DR6_CLEAR: u64 = 0xffff_0ff0;
const DR6_BS: u64 = 1 << 14;
/// DR7: slot 0 enabled locally, on execution; on writes of four bytes.
const ON_EXECUTION: u32 = 0x401;
const ON_WRITE: u32 = 0xd_0401;
const WATCHED: u64 = DATA + 0x40;

/// With debug registers of ours.
fn setup() -> Setup {
    Setup {
        trap: TrapMode::Breakpoint,
        ..Setup::clock("amd-core")
    }
}

/// Has the #GP handler watched, with counter 0 at [`COUNT`]: it is on, and counts
/// at no ring.
fn watch(a: &mut CodeAssembler) -> Written {
    wrmsr(a, 0xc001_0201, COUNT)?;
    wrmsr(a, SELECT, 1 << 22)
}

fn rdpmc(a: &mut CodeAssembler) -> Written {
    a.xor(ecx, ecx)?;
    a.rdpmc()?;
    log_value(a)
}

/// Logs DR6, the distance of RIP from R14, and CS; resets DR6. In the frame it sets
/// RF if a breakpoint was met, and clears TF unless that is kept.
fn log_debug(a: &mut CodeAssembler, keep_tf: bool) -> Written {
    let mut stepped = a.create_label();
    a.push(rax)?;
    log_hit(a)?;
    a.mov(rax, dr6)?;
    a.test(al, 0xf)?;
    a.je(stepped)?;
    a.or(dword_ptr(rsp + 24), RF)?;
    a.set_label(&mut stepped)?;
    a.mov(eax, u32::try_from(DR6_CLEAR).unwrap_or(0))?;
    a.mov(dr6, rax)?;
    if !keep_tf {
        a.and(dword_ptr(rsp + 24), !TF)?;
    }
    a.pop(rax)?;
    a.iretq()
}

/// The log's entry of a #DB, behind which one register was pushed.
pub(crate) fn log_hit(a: &mut CodeAssembler) -> Written {
    a.mov(qword_ptr(r12), i32::try_from(FAULT).unwrap_or(0) + 1)?;
    a.mov(rax, dr6)?;
    a.mov(qword_ptr(r12 + 8), rax)?;
    a.mov(rax, qword_ptr(rsp + 8))?;
    a.sub(rax, r14)?;
    a.mov(qword_ptr(r12 + 16), rax)?;
    a.mov(rax, qword_ptr(rsp + 16))?;
    a.mov(qword_ptr(r12 + 24), rax)?;
    a.lea(r12, qword_ptr(r12 + 32))
}

fn debug_entry(cause: u64, distance: u64, cs: u16) -> Entry {
    Entry {
        kind: FAULT + 1,
        a: DR6_CLEAR | cause,
        b: distance,
        c: cs.into(),
    }
}

fn count_entry() -> Entry {
    Entry::value(COUNT, 0)
}

fn check_log(ran: &LabRun, expected: &[Entry]) -> Result<()> {
    ensure!(
        ran.log == expected,
        "{:x?}\nexpected {expected:x?}",
        ran.log
    );
    Ok(())
}

/// Sets DR0 to `target` and DR7.
fn set_breakpoint(a: &mut CodeAssembler, target: CodeLabel, control: u32) -> Written {
    a.lea(rax, qword_ptr(target))?;
    a.mov(dr0, rax)?;
    a.mov(eax, control)?;
    a.mov(dr7, rax)
}

/// Once, before the instruction, and our own breakpoint goes on working.
fn execution(lab: &Lab) -> Result<()> {
    let program = Program::new()?
        .handler(1, |a| log_debug(a, false))?
        .kernel(|a| {
            let mut target = a.create_label();
            set_breakpoint(a, target, ON_EXECUTION)?;
            a.lea(r14, qword_ptr(target))?;
            watch(a)?;
            rdpmc(a)?;
            a.nop()?;
            a.set_label(&mut target)?;
            a.nop()?;
            rdpmc(a)?;
            exit(a)
        })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    let trap = debug_entry(1, 0, KERNEL_CS);
    check_log(&ran, &[count_entry(), trap, count_entry()])?;
    let told = ran
        .events(|event| *event == TrapEvent::GuestDebug { dr6: 1 })
        .len();
    // Unless KVM delivers it by itself.
    let expected = usize::from(!lab.probe.quirks().serves_execution);
    ensure!(told == expected, "{told} #DBs handed back");
    let dr7_kept = ran.outcome.vcpus[0].debug_regs.dr7;
    ensure!(
        dr7_kept == u64::from(ON_EXECUTION),
        "DR7 became {dr7_kept:#x}"
    );
    Ok(())
}

/// After the instruction that writes.
fn data(lab: &Lab, cpl: u8) -> Result<()> {
    let body = |a: &mut CodeAssembler| -> Written {
        let mut after = a.create_label();
        a.lea(r14, qword_ptr(after))?;
        a.mov(ebx, dword_ptr(WATCHED))?;
        a.mov(dword_ptr(WATCHED), eax)?;
        a.set_label(&mut after)?;
        rdpmc(a)
    };
    let program = Program::new()?
        .handler(1, |a| log_debug(a, false))?
        .at_cpl(
            cpl,
            |a| {
                a.mov(eax, u32::try_from(WATCHED).unwrap_or(0))?;
                a.mov(dr0, rax)?;
                a.mov(eax, ON_WRITE)?;
                a.mov(dr7, rax)?;
                watch(a)
            },
            body,
        )?;
    let ran = lab.run(&setup(), &program.start(PCE))?;
    let cs = if cpl == 3 { USER_CS } else { KERNEL_CS };
    check_log(&ran, &[debug_entry(1, 0, cs), count_entry()])
}

/// The emulated return clears RF, so the next instruction's breakpoint counts.
fn behind_rdpmc(lab: &Lab) -> Result<()> {
    let program = Program::new()?
        .handler(1, |a| log_debug(a, false))?
        .kernel(|a| {
            let mut target = a.create_label();
            set_breakpoint(a, target, ON_EXECUTION)?;
            a.lea(r14, qword_ptr(target))?;
            watch(a)?;
            a.xor(ecx, ecx)?;
            a.rdpmc()?;
            a.set_label(&mut target)?;
            a.nop()?;
            log_value(a)?;
            exit(a)
        })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    check_log(&ran, &[debug_entry(1, 0, KERNEL_CS), count_entry()])
}

/// MOV to DR is not seen on most KVMs: the next exit a millisecond later
/// merges what it set.
fn set_late(lab: &Lab) -> Result<()> {
    const NOWHERE: i32 = 0xe8;
    let program = Program::new()?
        .handler(1, |a| log_debug(a, false))?
        .kernel(|a| {
            let (mut target, mut again) = (a.create_label(), a.create_label());
            watch(a)?;
            set_breakpoint(a, target, ON_EXECUTION)?;
            a.lea(r14, qword_ptr(target))?;
            // 5 ms in port exits: an exit takes 8 µs at least.
            a.mov(ebx, 700)?;
            a.set_label(&mut again)?;
            a.out(NOWHERE, eax)?;
            a.dec(ebx)?;
            a.jne(again)?;
            a.set_label(&mut target)?;
            a.nop()?;
            rdpmc(a)?;
            exit(a)
        })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    check_log(&ran, &[debug_entry(1, 0, KERNEL_CS), count_entry()])
}

/// Its RDPMC faults until it gives one back.
fn all_four(lab: &Lab) -> Result<()> {
    let program = Program::new()?.kernel(|a| {
        a.mov(eax, u32::try_from(WATCHED).unwrap_or(0))?;
        for register in [dr0, dr1, dr2, dr3] {
            a.mov(register, rax)?;
        }
        a.mov(eax, 0xdddd_0455u32)?;
        a.mov(dr7, rax)?;
        watch(a)?;
        let (mut fault, mut next) = (a.create_label(), a.create_label());
        a.lea(r14, qword_ptr(fault))?;
        a.lea(r15, qword_ptr(next))?;
        a.xor(ecx, ecx)?;
        a.set_label(&mut fault)?;
        a.rdpmc()?;
        a.set_label(&mut next)?;
        a.mov(eax, 0xdddd_0415u32)?;
        a.mov(dr7, rax)?;
        watch(a)?;
        rdpmc(a)?;
        exit(a)
    })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    let fault = Entry {
        kind: FAULT + 13,
        a: 0,
        b: 0,
        c: KERNEL_CS.into(),
    };
    check_log(&ran, &[fault, count_entry()])?;
    let told = ran
        .events(|event| *event == TrapEvent::DebugRegistersFull)
        .len();
    ensure!(told == 1, "told {told} times");
    let read = |event: &TrapEvent| {
        matches!(
            event,
            TrapEvent::Rdpmc {
                outcome: ReadOutcome::Value(COUNT),
                ..
            }
        )
    };
    ensure!(ran.events(read).len() == 1, "{:x?}", ran.events(|_| true));
    Ok(())
}

/// As ptrace and a debugger do it: TF in the frame of an IRET, one #DB after
/// each instruction of CPL 3, an emulated RDPMC among them.
fn ptrace(lab: &Lab) -> Result<()> {
    let program = Program::new()?
        .handler(1, |a| log_debug(a, true))?
        .kernel(|a| {
            watch(a)?;
            a.mov(r14, USER_CODE)?;
            enter_user(a, u32::try_from(TF).unwrap_or(0))
        })?;
    let program = program.user(|a| {
        a.nop()?; // 1 byte
        a.xor(ecx, ecx)?; // 2
        a.rdpmc()?; // 2
        a.mov(qword_ptr(rsp - 8), rax)?; // 5
        a.nop()?; // 1
        a.ud2()
    })?;
    let ran = lab.run(&setup(), &program.start(PCE))?;
    let expected = [1, 3, 5, 10, 11].map(|distance| debug_entry(DR6_BS, distance, USER_CS));
    check_log(&ran, &expected)?;
    let count = ran.word(vmm::micro::USER_STACK - 8)?;
    ensure!(count == COUNT, "RDPMC read {count:#x}");
    Ok(())
}

/// Its own handler, behind the instruction.
fn int3(lab: &Lab, cpl: u8) -> Result<()> {
    let body = |a: &mut CodeAssembler| -> Written {
        let mut after = a.create_label();
        a.lea(r14, qword_ptr(after))?;
        a.lea(r15, qword_ptr(after))?;
        a.int3()?;
        a.set_label(&mut after)?;
        rdpmc(a)
    };
    let program = Program::new()?
        .handler(3, |a| guest_tests::micro::log_fault(a, 3, false))?
        .at_cpl(cpl, watch, body)?;
    let ran = lab.run(&setup(), &program.start(PCE))?;
    let cs = if cpl == 3 { USER_CS } else { KERNEL_CS };
    let trap = Entry {
        kind: FAULT + 3,
        a: 0,
        b: 0,
        c: cs.into(),
    };
    check_log(&ran, &[trap, count_entry()])
}
