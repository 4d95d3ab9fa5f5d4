//! The guests: one that computes at CPL 3 and times itself, and one that times
//! its PMU accesses beside vCPUs that compute.

use iced_x86::code_asm::{CodeAssembler, dx, eax, qword_ptr, r8, r9, rax, rdi, rsp};
use pmu_virt::PmuModel;
use vmm::micro::{KERNEL_CODE, MicroError, MicroGuest, SCRATCH, Start, USER_CODE, assemble};

use crate::guest::{self as accesses, now};
use crate::harness::DONE;
use crate::registers::Written;

/// UD2 leads from CPL 3 to CPL 0 on every KVM; INT n does not on a software one.
const UD_VECTOR: u8 = 6;
const TURN_OVER: u64 = KERNEL_CODE + 0x9000;
/// Where vCPUs compute beside one that measures.
const SPIN: u64 = USER_CODE + 0x8000;
/// A vCPU's words: rounds of its loop, TSC before and after it, its number.
const STRIDE: u64 = 0x100;
pub(super) const BEFORE: u64 = 8;
pub(super) const AFTER: u64 = 16;
const NUMBER: u64 = 24;

/// Where the words of a vCPU are.
pub(super) fn words_of(vcpu: usize) -> u64 {
    SCRATCH + u64::try_from(vcpu).unwrap_or(0) * STRIDE
}

/// One vCPU that runs a loop at CPL 3, again and again, and reports how long each
/// turn took. The rounds of the loop are the word at [`words_of`]; until it is
/// written, a turn has one.
pub(super) fn busy() -> Result<MicroGuest, MicroError> {
    let mut start = Start::at(USER_CODE, 3);
    start.rdi = words_of(0);
    Ok(MicroGuest::new()
        .code(USER_CODE, assemble(USER_CODE, turn)?)
        .code(TURN_OVER, assemble(TURN_OVER, turn_over)?)
        .handler(UD_VECTOR, TURN_OVER)
        .start(start))
}

/// vCPU 0 times its PMU accesses, with a counter on the event of code `event`;
/// the others, up to `vcpus` in all, compute at CPL 3 for ever.
pub(super) fn measuring(model: &PmuModel, event: u64, vcpus: u8) -> Result<MicroGuest, MicroError> {
    let mut guest = accesses::guest(model, event, 1)?.code(SPIN, assemble(SPIN, spin)?);
    for _ in 1..vcpus {
        guest = guest.start(Start::at(SPIN, 3));
    }
    Ok(guest)
}

fn turn(a: &mut CodeAssembler) -> Written {
    now(a)?;
    a.mov(qword_ptr(rdi + BEFORE), rax)?;
    a.mov(r8, qword_ptr(rdi))?;
    a.or(r8, 1)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.lea(r9, qword_ptr(r9 + r8 * 2))?;
    a.dec(r8)?;
    a.jne(again)?;
    now(a)?;
    a.mov(qword_ptr(rdi + AFTER), rax)?;
    a.ud2()
}

/// Reports that the loop is over, and goes back to it.
fn turn_over(a: &mut CodeAssembler) -> Written {
    a.mov(rax, qword_ptr(rdi + NUMBER))?;
    a.mov(dx, u32::from(DONE))?;
    a.out(dx, eax)?;
    a.mov(rax, USER_CODE)?;
    a.mov(qword_ptr(rsp), rax)?;
    a.iretq()
}

fn spin(a: &mut CodeAssembler) -> Written {
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.lea(r9, qword_ptr(r9 + r8 * 2))?;
    a.inc(r8)?;
    a.jmp(again)
}
