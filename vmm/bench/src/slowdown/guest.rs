//! The guest: a loop at CPL 3, its NMI handler, and the way back.

use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, dx, eax, ecx, edx, qword_ptr, r8, r9, rax, rcx, rdi, rdx, rsp,
};
use pmu_virt::PmuModel;
use vmm::micro::{KERNEL_CODE, MicroError, MicroGuest, SCRATCH, Start, USER_CODE, assemble};

use super::{COUNTERS, Load};
use crate::error::BenchError;
use crate::guest::{now, with_gp_handler};
use crate::harness::DONE;
use crate::pmi::{apic, enter_user, reload};
use crate::registers::{PmuMsrs, Written, wrmsr};
use crate::sources::{Event, INT, USR_OS_ENABLE};

const NMI_VECTOR: u8 = 2;
const NMI_HANDLER: u64 = KERNEL_CODE + 0x8000;
/// UD2 leads from CPL 3 to CPL 0 on every KVM; INT n does not on a software one.
const UD_VECTOR: u8 = 6;
const TURN_OVER: u64 = KERNEL_CODE + 0x9000;
/// Where each vCPU begins.
const BEGIN_STRIDE: u64 = 0x1000;
/// Each vCPU's words: rounds of the loop, TSC before and after it.
const WORDS: u64 = SCRATCH;
const STRIDE: u64 = 0x100;
pub(super) const BEFORE: u64 = 8;
pub(super) const AFTER: u64 = 16;
/// NMIs that it took, and what the last one found: RIP and the count.
pub(super) const NMIS: u64 = 24;

/// Where the words of a vCPU are.
pub(super) fn words_of(vcpu: usize) -> u64 {
    WORDS + u64::try_from(vcpu).unwrap_or(0) * STRIDE
}

/// RDI is a vCPU's place in [`WORDS`], ESI what its sampling counter is set to.
pub(super) fn guest(model: &PmuModel, events: &[Event]) -> Result<MicroGuest, BenchError> {
    let msrs = PmuMsrs::of(model);
    let code = |code: Result<_, _>| code.map_err(MicroError::from);
    let mut guest = with_gp_handler(MicroGuest::new())?
        .code(USER_CODE, code(assemble(USER_CODE, user))?)
        .code(NMI_HANDLER, code(assemble(NMI_HANDLER, |a| nmi(a, &msrs)))?)
        .code(TURN_OVER, code(assemble(TURN_OVER, turn_over))?)
        .handler(NMI_VECTOR, NMI_HANDLER)
        .handler(UD_VECTOR, TURN_OVER);
    for (place, load) in Load::ALL.into_iter().enumerate() {
        let at = KERNEL_CODE + u64::try_from(place).unwrap_or(0) * BEGIN_STRIDE;
        let begin = assemble(at, |a| begin(a, &msrs, events, load));
        let mut start = Start::at(at, 0);
        start.rdi = words_of(place);
        guest = guest.code(at, code(begin)?).start(start);
    }
    Ok(guest)
}

fn begin(a: &mut CodeAssembler, msrs: &PmuMsrs, events: &[Event], load: Load) -> Written {
    apic(a)?;
    if load != Load::None {
        msrs.enable(a, COUNTERS)?;
        for (n, (select, event)) in msrs.selects.iter().zip(events).enumerate() {
            let samples = load == Load::Sampling && n == 0;
            if samples {
                reload(a, msrs.first().1)?;
            }
            let int = if samples { INT } else { 0 };
            wrmsr(a, *select, event.code | USR_OS_ENABLE | int)?;
        }
    }
    enter_user(a)
}

fn user(a: &mut CodeAssembler) -> Written {
    now(a)?;
    a.mov(qword_ptr(rdi + BEFORE), rax)?;
    a.mov(r8, qword_ptr(rdi))?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.lea(r9, qword_ptr(r9 + r8 * 2))?;
    a.dec(r8)?;
    a.jne(again)?;
    now(a)?;
    a.mov(qword_ptr(rdi + AFTER), rax)?;
    a.ud2()
}

/// What a sampling driver does: reads the counter, sets it anew, notes where the
/// guest was.
fn nmi(a: &mut CodeAssembler, msrs: &PmuMsrs) -> Written {
    let (_, counter) = msrs.first();
    a.push(rax)?;
    a.push(rcx)?;
    a.push(rdx)?;
    a.inc(qword_ptr(rdi + NMIS))?;
    a.mov(rax, qword_ptr(rsp + 24))?;
    a.mov(qword_ptr(rdi + NMIS + 8), rax)?;
    a.mov(ecx, counter)?;
    a.rdmsr()?;
    a.mov(dword_ptr(rdi + NMIS + 16), eax)?;
    a.mov(dword_ptr(rdi + NMIS + 20), edx)?;
    reload(a, counter)?;
    a.pop(rdx)?;
    a.pop(rcx)?;
    a.pop(rax)?;
    a.iretq()
}

/// Reports that the loop is over, and goes back to it.
fn turn_over(a: &mut CodeAssembler) -> Written {
    a.xor(eax, eax)?;
    a.mov(dx, u32::from(DONE))?;
    a.out(dx, eax)?;
    a.mov(rax, USER_CODE)?;
    a.mov(qword_ptr(rsp), rax)?;
    a.iretq()
}
