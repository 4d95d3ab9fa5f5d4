//! From the scenario to code: every step reports its number before it begins and
//! what it came to afterwards.

use arbiter::abi;
use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, eax, ebx, ecx, edx, qword_ptr, r12d, r13, rax, rcx, rdx, rsi, rsp,
};
use vmm::devices::ports::TEST_EXIT;
use vmm::micro::{KERNEL_CODE, LAPIC, MicroError, MicroGuest, SCRATCH, Start, USER_CODE, assemble};

use super::super::guest::{UD_VECTOR, Written, enter_program, out};
use super::scenario::{Act, Action, CookieName, NOTICE_VECTOR, WrittenValue};

/// A step begins; the value is its number.
pub(super) const STEP_PORT: u16 = 0xe8;
/// The low half of what a step read.
pub(super) const LOW_PORT: u16 = 0xe9;
/// The high half; the step has ended well.
pub(super) const HIGH_PORT: u16 = 0xea;
/// The step's instruction raised #GP.
pub(super) const FAULT_PORT: u16 = 0xeb;
/// The step has ended well and read nothing.
pub(super) const DONE_PORT: u16 = 0xec;
/// A notice has arrived.
pub(super) const NOTICE_PORT: u16 = 0xed;

const GP_HANDLER: u64 = KERNEL_CODE + 0x1000;
const USER_DONE: u64 = KERNEL_CODE + 0x1200;
const NOTICE_HANDLER: u64 = KERNEL_CODE + 0x1400;
const CODE: u64 = KERNEL_CODE + 0x2000;
const GP_VECTOR: u8 = 13;
const CR4_PCE: u64 = 1 << 8;

/// Cookies, 8 bytes each.
const KEYS: u64 = SCRATCH;
/// How many #GP came in this step.
const FAULTS: u64 = SCRATCH + 0x100;
/// How many notices came.
const NOTICES: u64 = SCRATCH + 0x108;
/// Where the kernel goes on after a program's step.
const RESUME: u64 = SCRATCH + 0x110;

const SVR: u64 = LAPIC + 0xf0;
const EOI: u64 = LAPIC + 0xb0;
const SVR_ON: u32 = 0x1ff;
/// Some milliseconds of work.
const PROGRAM_ROUNDS: u32 = 10_000_000;
/// A cookie that no generator has made: the guess.
const GUESS: u64 = 0x1234_5678_9abc;

/// The guest that plays `acts`.
pub(super) fn guest(acts: &[Act]) -> Result<MicroGuest, MicroError> {
    let mut start = Start::at(CODE, 0);
    start.cr4 = CR4_PCE;
    Ok(MicroGuest::new()
        .code(CODE, assemble(CODE, |a| kernel(a, acts))?)
        .code(USER_CODE, assemble(USER_CODE, program)?)
        .code(GP_HANDLER, assemble(GP_HANDLER, gp_handler)?)
        .code(USER_DONE, assemble(USER_DONE, user_done)?)
        .code(NOTICE_HANDLER, assemble(NOTICE_HANDLER, notice_handler)?)
        .handler(GP_VECTOR, GP_HANDLER)
        .handler(UD_VECTOR, USER_DONE)
        .handler(NOTICE_VECTOR, NOTICE_HANDLER)
        .start(start))
}

fn kernel(a: &mut CodeAssembler, acts: &[Act]) -> Written {
    a.mov(r13, rsp)?;
    a.mov(rax, SVR)?;
    a.mov(dword_ptr(rax), SVR_ON)?;
    a.mov(rax, GUESS)?;
    a.mov(rcx, key_address(CookieName::Wrong))?;
    a.mov(qword_ptr(rcx), rax)?;
    let steps = acts.iter().flat_map(|act| &act.steps);
    for (number, step) in (0u32..).zip(steps) {
        a.mov(eax, number)?;
        out(a, STEP_PORT)?;
        a.mov(rax, FAULTS)?;
        a.mov(dword_ptr(rax), 0)?;
        action(a, &step.action)?;
    }
    a.xor(eax, eax)?;
    out(a, TEST_EXIT)
}

fn key_address(key: CookieName) -> u64 {
    KEYS + 8 * u64::from(key.index())
}

fn present(a: &mut CodeAssembler, key: CookieName) -> Written {
    a.mov(rsi, key_address(key))?;
    a.mov(rsi, qword_ptr(rsi))
}

/// EDX:EAX.
fn load(a: &mut CodeAssembler, value: WrittenValue) -> Written {
    match value {
        WrittenValue::Number(number) => a.mov(rax, number)?,
        WrittenValue::Cookie(key) => {
            a.mov(rax, key_address(key))?;
            a.mov(rax, qword_ptr(rax))?;
        }
    }
    a.mov(rdx, rax)?;
    a.shr(rdx, 32)
}

fn action(a: &mut CodeAssembler, action: &Action) -> Written {
    match *action {
        Action::MakeCookie(key) => make_cookie(a, key),
        Action::Read { msr, key } => {
            present(a, key)?;
            a.mov(ecx, msr)?;
            a.rdmsr()?;
            ended(a, true)
        }
        Action::Write { msr, value, key } => {
            present(a, key)?;
            load(a, value)?;
            a.mov(ecx, msr)?;
            a.wrmsr()?;
            ended(a, false)
        }
        Action::Repeat {
            msr,
            value,
            key,
            times,
        } => {
            present(a, key)?;
            load(a, WrittenValue::Number(value))?;
            a.mov(ecx, msr)?;
            a.mov(r12d, times)?;
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.wrmsr()?;
            a.dec(r12d)?;
            a.jne(again)?;
            ended(a, false)
        }
        Action::UserRdpmc { index, key } => {
            let mut resume = a.create_label();
            a.lea(rax, qword_ptr(resume))?;
            a.mov(rcx, RESUME)?;
            a.mov(qword_ptr(rcx), rax)?;
            present(a, key)?;
            a.mov(ecx, index)?;
            enter_program(a)?;
            a.set_label(&mut resume)?;
            a.nop()
        }
        Action::AwaitNotice => {
            let (mut look, mut come) = (a.create_label(), a.create_label());
            a.set_label(&mut look)?;
            // No interrupt comes between the look and HLT: STI holds it back.
            a.cli()?;
            a.mov(rax, NOTICES)?;
            a.cmp(dword_ptr(rax), 0)?;
            a.jne(come)?;
            a.sti()?;
            a.hlt()?;
            a.jmp(look)?;
            a.set_label(&mut come)?;
            ended(a, false)
        }
    }
}

fn make_cookie(a: &mut CodeAssembler, key: CookieName) -> Written {
    a.mov(ecx, abi::MSR_BASE + abi::MSR_RANDOM)?;
    a.rdmsr()?;
    // 48 bits.
    a.and(edx, 0xffff)?;
    a.mov(rcx, key_address(key))?;
    a.mov(dword_ptr(rcx), eax)?;
    a.mov(dword_ptr(rcx + 4), edx)?;
    ended(a, false)
}

/// Reports how the step ended, unless it faulted: the handler reported that.
fn ended(a: &mut CodeAssembler, value: bool) -> Written {
    let mut faulted = a.create_label();
    a.mov(rcx, FAULTS)?;
    a.cmp(dword_ptr(rcx), 0)?;
    a.jne(faulted)?;
    if value {
        a.mov(ebx, edx)?;
        out(a, LOW_PORT)?;
        a.mov(eax, ebx)?;
        out(a, HIGH_PORT)?;
    } else {
        out(a, DONE_PORT)?;
    }
    a.set_label(&mut faulted)?;
    a.nop()
}

/// At CPL 3: works a little, reads, and goes back. UD2 leads to the kernel on
/// every KVM.
fn program(a: &mut CodeAssembler) -> Written {
    a.mov(ebx, PROGRAM_ROUNDS)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.dec(ebx)?;
    a.jne(again)?;
    a.rdpmc()?;
    a.ud2()
}

fn user_done(a: &mut CodeAssembler) -> Written {
    a.mov(rsp, r13)?;
    ended(a, true)?;
    a.mov(rax, RESUME)?;
    a.jmp(qword_ptr(rax))
}

/// Reports the fault once in a step, and goes on after the instruction: all that can
/// fault here are two bytes long.
fn gp_handler(a: &mut CodeAssembler) -> Written {
    let mut reported = a.create_label();
    a.push(rax)?;
    a.push(rdx)?;
    a.mov(rax, FAULTS)?;
    a.add(dword_ptr(rax), 1)?;
    a.cmp(dword_ptr(rax), 1)?;
    a.jne(reported)?;
    out(a, FAULT_PORT)?;
    a.set_label(&mut reported)?;
    a.pop(rdx)?;
    a.pop(rax)?;
    a.add(rsp, 8)?;
    a.add(qword_ptr(rsp), 2)?;
    a.iretq()
}

fn notice_handler(a: &mut CodeAssembler) -> Written {
    a.push(rax)?;
    a.push(rdx)?;
    a.mov(rax, NOTICES)?;
    a.add(dword_ptr(rax), 1)?;
    out(a, NOTICE_PORT)?;
    a.mov(rax, EOI)?;
    a.mov(dword_ptr(rax), 0)?;
    a.pop(rdx)?;
    a.pop(rax)?;
    a.iretq()
}
