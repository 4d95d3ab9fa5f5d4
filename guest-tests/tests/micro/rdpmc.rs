//! RDPMC by emulation: what the return must leave alone, and the #GPs that are
//! none of ours.

use anyhow::{Result, ensure};
use guest_tests::micro::{
    DATA, ENDBR64, Entry, FAULT, Lab, LabRun, Program, Setup, Test, Written, enter_user, exit,
    log_value, wrmsr,
};
use iced_x86::code_asm::{
    CodeAssembler, ax, byte_ptr, dr6, ds, eax, ecx, edx, qword_ptr, r8, r9, r10, r11, r12, r13,
    r14, r15, rax, rbp, rbx, rcx, rdi, rdx, rsi, rsp, ss,
};
use pmu_virt::{ReadOutcome, Ring};
use vmm::micro::{KERNEL_CS, USER_CODE, USER_CS, USER_SS};
use vmm::vcpu::{Armed, TrapEvent};

use crate::debug::log_hit;

const PCE: u64 = 1 << 8;
const TF: u32 = 1 << 8;
const DR6_BS: u64 = 1 << 14;
/// DR6 with no cause: bits 4 to 11 and 16 to 31 read as 1.
const DR6_CLEAR: u64 = 0xffff_0ff0;
const COUNT: u64 = 0x1234_5678_9abc;
/// CF, PF, AF, ZF, SF, OF.
const ARITHMETIC: u32 = 0x8d5;

/// How the guest's #GP handler begins, and what must come of that.
#[derive(Clone, Copy)]
enum Handler {
    /// With a PUSH: a breakpoint is on it.
    Watched,
    /// With ENDBR64: it is patched.
    Patched,
}
use Handler::{Patched, Watched};

impl Handler {
    fn program(self) -> Result<Program> {
        match self {
            Watched => Program::new(),
            Patched => Program::new()?.gp_begins(&ENDBR64),
        }
    }

    fn check(self, ran: &LabRun) -> Result<()> {
        let armed = ran.events(|event| matches!(event, TrapEvent::Armed(_)));
        // A processor in software executes it: there is nothing to trap.
        let right = matches!(
            (self, armed.as_slice()),
            (Watched, [TrapEvent::Armed(Armed::Breakpoint(Some(_)))])
                | (Patched, [TrapEvent::Armed(Armed::Patch)])
        );
        let right = if ran.emulated {
            armed.is_empty()
        } else {
            right
        };
        ensure!(right, "RDPMC was trapped by {armed:?}");
        Ok(())
    }
}

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "rdpmc::leaves_the_registers_alone_at_cpl_0",
        run: |lab| registers_survive(lab, 0, Watched),
    },
    Test {
        name: "rdpmc::leaves_the_registers_alone_at_cpl_3",
        run: |lab| registers_survive(lab, 3, Watched),
    },
    Test {
        name: "rdpmc::in_compatibility_mode",
        run: |lab| compatibility_mode(lab, Watched),
    },
    Test {
        name: "rdpmc::tf_gives_one_trap_at_cpl_0",
        run: |lab| tf(lab, 0, Watched),
    },
    Test {
        name: "rdpmc::tf_gives_one_trap_at_cpl_3",
        run: |lab| tf(lab, 3, Watched),
    },
    Test {
        name: "rdpmc::a_real_gp_leaves_dr6_alone",
        run: |lab| dr6_untouched(lab, Watched),
    },
    Test {
        name: "rdpmc::other_gps_pass_through",
        run: |lab| other_gps(lab, Watched),
    },
    Test {
        name: "rdpmc::patched_leaves_the_registers_alone_at_cpl_0",
        run: |lab| registers_survive(lab, 0, Patched),
    },
    Test {
        name: "rdpmc::patched_leaves_the_registers_alone_at_cpl_3",
        run: |lab| registers_survive(lab, 3, Patched),
    },
    Test {
        name: "rdpmc::patched_in_compatibility_mode",
        run: |lab| compatibility_mode(lab, Patched),
    },
    Test {
        name: "rdpmc::patched_tf_gives_one_trap_at_cpl_0",
        run: |lab| tf(lab, 0, Patched),
    },
    Test {
        name: "rdpmc::patched_tf_gives_one_trap_at_cpl_3",
        run: |lab| tf(lab, 3, Patched),
    },
    Test {
        name: "rdpmc::patched_a_real_gp_leaves_dr6_alone",
        run: |lab| dr6_untouched(lab, Patched),
    },
    Test {
        name: "rdpmc::patched_other_gps_pass_through",
        run: |lab| other_gps(lab, Patched),
    },
];

/// Sets counter 0 to [`COUNT`], and with the write of a control has the #GP
/// handler watched.
fn program_counter(a: &mut CodeAssembler) -> Written {
    wrmsr(a, 0xc001_0201, COUNT)?;
    wrmsr(a, 0xc001_0200, 0)
}

fn setup() -> Setup {
    Setup::clock("amd-core")
}

/// The one RDPMC that was emulated, in `ring`.
fn emulated_once(ran: &LabRun, ring: Ring) -> Result<()> {
    let events = ran.events(|event| matches!(event, TrapEvent::Rdpmc { .. }));
    let expected = TrapEvent::Rdpmc {
        index: 0,
        ring,
        outcome: ReadOutcome::Value(COUNT),
    };
    ensure!(events == [&expected], "{events:x?}");
    Ok(())
}

/// Registers before and after, flags included.
fn registers_survive(lab: &Lab, cpl: u8, handler: Handler) -> Result<()> {
    const BEFORE: u64 = DATA;
    const AFTER: u64 = DATA + 0x100;
    let all = [
        rbx, rcx, rsi, rdi, rbp, rsp, r8, r9, r10, r11, r12, r13, r14, r15,
    ];
    let store = |a: &mut CodeAssembler, at: u64| -> Written {
        for (offset, register) in (at..).step_by(8).zip(all) {
            a.mov(qword_ptr(offset), register)?;
        }
        a.pushfq()?;
        a.pop(qword_ptr(at + 0x80))?;
        a.mov(ax, ss)?;
        a.mov(qword_ptr(at + 0x88), rax)?;
        a.mov(ax, ds)?;
        a.mov(qword_ptr(at + 0x90), rax)
    };
    let body = |a: &mut CodeAssembler| -> Written {
        for (value, register) in (0x5a5a_0000_1111_0000u64..).zip(all) {
            if register != rsp && register != rcx && register != r12 {
                a.mov(register, value)?;
            }
        }
        a.xor(ecx, ecx)?;
        a.push(i32::try_from(ARITHMETIC).unwrap_or(0))?;
        a.popfq()?;
        a.mov(eax, 0)?;
        store(a, BEFORE)?;
        a.rdpmc()?;
        a.mov(qword_ptr(AFTER + 0x98), rax)?;
        a.mov(qword_ptr(AFTER + 0xa0), rdx)?;
        a.mov(eax, 0)?;
        store(a, AFTER)
    };
    let program = handler.program()?.at_cpl(cpl, program_counter, body)?;
    let ran = lab.run(&setup(), &program.start(PCE))?;
    handler.check(&ran)?;
    for offset in (0..=0x90)
        .step_by(8)
        .filter(|at| *at < 8 * all.len() as u64 || *at >= 0x80)
    {
        let (before, after) = (ran.word(BEFORE + offset)?, ran.word(AFTER + offset)?);
        ensure!(
            before == after,
            "word {offset:#x}: {before:#x} became {after:#x}"
        );
    }
    let flags = ran.word(AFTER + 0x80)?;
    ensure!(
        flags & u64::from(ARITHMETIC) == u64::from(ARITHMETIC),
        "RFLAGS {flags:#x}"
    );
    let value = (ran.word(AFTER + 0xa0)?, ran.word(AFTER + 0x98)?);
    ensure!(value == (COUNT >> 32, COUNT & 0xffff_ffff), "{value:x?}");
    emulated_once(&ran, Ring::from_cpl(cpl))
}

/// A 32-bit code segment under a 64-bit kernel.
fn compatibility_mode(lab: &Lab, handler: Handler) -> Result<()> {
    // Slot 0x38 of the GDT (its limit is 0x3f) becomes a 32-bit code segment.
    const USER_CS_32: u16 = 0x3b;
    const CODE_32: u64 = 0x00cf_fb00_0000_ffff;
    const GDT: u64 = 0x5000;
    let program = handler.program()?.kernel(|a| {
        program_counter(a)?;
        a.push(i32::from(USER_SS))?;
        a.push(0x6_0000)?;
        a.push(2)?;
        a.push(i32::from(USER_CS_32))?;
        a.push(i32::try_from(USER_CODE).unwrap_or(0))?;
        a.iretq()
    })?;
    // xor ecx, ecx; rdpmc; mov [DATA], eax; mov [DATA + 8], edx; push cs; ud2
    let data = u32::try_from(DATA)?.to_le_bytes();
    let data_8 = u32::try_from(DATA + 8)?.to_le_bytes();
    let code = [
        &[0x31, 0xc9, 0x0f, 0x33, 0xa3][..],
        &data,
        &[0x89, 0x15],
        &data_8,
        &[0x0e, 0x0f, 0x0b],
    ];
    let guest = program
        .data(USER_CODE, code.concat())
        .data(GDT + 0x38, CODE_32.to_le_bytes().to_vec())
        .start(PCE);
    let ran = lab.run(&setup(), &guest)?;
    handler.check(&ran)?;
    let value = (ran.word(DATA + 8)?, ran.word(DATA)?);
    ensure!(value == (COUNT >> 32, COUNT & 0xffff_ffff), "{value:x?}");
    let cs = ran.word(0x5_fff8)? >> 32;
    ensure!(cs == u64::from(USER_CS_32), "CS {cs:#x} after RDPMC");
    emulated_once(&ran, Ring::User)
}

/// Logs DR6 and the distance of RIP from R14, and returns without TF.
fn log_debug(a: &mut CodeAssembler) -> Written {
    a.push(rax)?;
    log_hit(a)?;
    a.and(qword_ptr(rsp + 24), -1 ^ i32::try_from(TF).unwrap_or(0))?;
    a.pop(rax)?;
    a.iretq()
}

/// A guest that sets TF before its RDPMC gets one #DB after it.
fn tf(lab: &Lab, cpl: u8, handler: Handler) -> Result<()> {
    let body = |a: &mut CodeAssembler| -> Written {
        let mut after = a.create_label();
        a.lea(r14, qword_ptr(after))?;
        a.xor(ecx, ecx)?;
        a.pushfq()?;
        a.or(qword_ptr(rsp), i32::try_from(TF).unwrap_or(0))?;
        a.popfq()?;
        a.rdpmc()?;
        a.set_label(&mut after)?;
        log_value(a)
    };
    let program = handler.program()?.handler(1, log_debug)?;
    let program = program.at_cpl(cpl, program_counter, body)?;
    let ran = lab.run(&setup(), &program.start(PCE))?;
    handler.check(&ran)?;
    let cs = if cpl == 3 { USER_CS } else { KERNEL_CS };
    let expected = [
        Entry {
            kind: FAULT + 1,
            a: DR6_CLEAR | DR6_BS,
            b: 0,
            c: cs.into(),
        },
        Entry::value(COUNT & 0xffff_ffff, COUNT >> 32),
    ];
    ensure!(ran.log == expected, "{:x?}", ran.log);
    emulated_once(&ran, Ring::from_cpl(cpl))
}

/// An RDPMC of an absent counter reaches the guest's handler, and DR6 keeps
/// what the guest wrote into it.
fn dr6_untouched(lab: &Lab, handler: Handler) -> Result<()> {
    let program = handler.program()?.kernel(|a| {
        program_counter(a)?;
        a.mov(eax, 0xffff_4ff2u32)?;
        a.mov(dr6, rax)?;
        let (mut fault, mut next) = (a.create_label(), a.create_label());
        a.lea(r14, qword_ptr(fault))?;
        a.lea(r15, qword_ptr(next))?;
        a.mov(ecx, 77)?;
        a.set_label(&mut fault)?;
        a.rdpmc()?;
        a.set_label(&mut next)?;
        a.mov(rax, dr6)?;
        a.xor(edx, edx)?;
        log_value(a)?;
        exit(a)
    })?;
    let ran = lab.run(&setup(), &program.start(0))?;
    handler.check(&ran)?;
    let expected = [
        Entry {
            kind: FAULT + 13,
            a: 0,
            b: 0,
            c: KERNEL_CS.into(),
        },
        Entry::value(0xffff_4ff2, 0),
    ];
    ensure!(ran.log == expected, "{:x?}", ran.log);
    Ok(())
}

/// #GPs of other instructions arrive as on hardware: error code, RIP, CS.
fn other_gps(lab: &Lab, handler: Handler) -> Result<()> {
    // Beyond the GDT's limit.
    const BAD_SELECTOR: u16 = 0x1238;
    let faulting: [fn(&mut CodeAssembler) -> Written; 3] = [
        |a| a.mov(byte_ptr(rbx), 1),
        |a| a.mov(ds, ax),
        CodeAssembler::rdmsr,
    ];
    let errors = [0, u64::from(BAD_SELECTOR), 0];
    let emit = |a: &mut CodeAssembler, which: usize| -> Written {
        let (mut fault, mut next) = (a.create_label(), a.create_label());
        a.lea(r14, qword_ptr(fault))?;
        a.lea(r15, qword_ptr(next))?;
        a.mov(rbx, 0x8000_0000_0000_0000u64)?;
        a.mov(eax, u32::from(BAD_SELECTOR))?;
        a.mov(ecx, 0x1234_5678)?;
        a.set_label(&mut fault)?;
        faulting[which](a)?;
        a.set_label(&mut next)?;
        a.nop()
    };
    let program = handler.program()?.kernel(|a| {
        program_counter(a)?;
        (0..3).try_for_each(|which| emit(a, which))?;
        enter_user(a, 0)
    })?;
    let program = program.user(|a| {
        (0..3).try_for_each(|which| emit(a, which))?;
        a.ud2()
    })?;
    let ran = lab.run(&setup(), &program.start(PCE))?;
    handler.check(&ran)?;
    let expected: Vec<Entry> = [KERNEL_CS, USER_CS]
        .iter()
        .flat_map(|cs| {
            errors.map(|error| Entry {
                kind: FAULT + 13,
                a: error,
                b: 0,
                c: u64::from(*cs),
            })
        })
        .collect();
    ensure!(ran.log == expected, "{:x?}", ran.log);
    let foreign = ran.events(|event| *event == TrapEvent::ForeignGp).len();
    // A processor in software delivers them itself, and tells nobody.
    let told = if ran.emulated { 0 } else { expected.len() };
    ensure!(foreign == told, "{foreign} #GPs were told");
    Ok(())
}
