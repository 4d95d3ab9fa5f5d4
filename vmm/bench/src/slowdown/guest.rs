//! The guest: a loop at CPL 3, its NMI handler, and the way back.

use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, dx, eax, ebx, ecx, edx, esi, qword_ptr, r8, r9, rax, rcx, rdi, rdx,
    rsp,
};
use pmu_virt::PmuModel;
use vmm::micro::{KERNEL_CODE, MicroError, MicroGuest, SCRATCH, Start, USER_CODE, assemble};

use super::Load;
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
/// NMIs that it took, and what the last one found: RIP and the count, or registers of IBS.
pub(super) const NMIS: u64 = 24;

/// `IbsOpCtl`, `IbsOpRip` and `IbsOpData` (APM vol. 2, 13.3).
const IBS_OP: [u32; 3] = [0xc001_1033, 0xc001_1034, 0xc001_1035];

/// Where the words of a vCPU are.
pub(super) fn words_of(vcpu: usize) -> u64 {
    WORDS + u64::try_from(vcpu).unwrap_or(0) * STRIDE
}

/// One vCPU for each load. RDI is its place in [`WORDS`], ESI what its sampling counter, or
/// the control of its op sampler, is set to, and EBX whether it has the latter.
pub(super) fn guest(
    model: &PmuModel,
    events: &[Event],
    loads: &[Load],
) -> Result<MicroGuest, BenchError> {
    let msrs = PmuMsrs::of(model);
    let ibs = model.ibs() != 0;
    let code = |code: Result<_, _>| code.map_err(MicroError::from);
    let mut guest = with_gp_handler(MicroGuest::new())?
        .code(USER_CODE, code(assemble(USER_CODE, user))?)
        .code(
            NMI_HANDLER,
            code(assemble(NMI_HANDLER, |a| nmi(a, &msrs, ibs)))?,
        )
        .code(TURN_OVER, code(assemble(TURN_OVER, turn_over))?)
        .handler(NMI_VECTOR, NMI_HANDLER)
        .handler(UD_VECTOR, TURN_OVER);
    for (place, load) in loads.iter().enumerate() {
        let at = KERNEL_CODE + u64::try_from(place).unwrap_or(0) * BEGIN_STRIDE;
        let begin = assemble(at, |a| {
            // Samples of IBS interrupt in x2APIC mode alone.
            if ibs {
                x2apic(a)?;
            } else {
                apic(a)?;
            }
            begin(a, &msrs, events, *load)
        });
        let mut start = Start::at(at, 0);
        start.rdi = words_of(place);
        guest = guest.code(at, code(begin)?).start(start);
    }
    Ok(guest)
}

fn begin(a: &mut CodeAssembler, msrs: &PmuMsrs, events: &[Event], load: Load) -> Written {
    let counters = load.counters();
    a.mov(ebx, u32::from(load == Load::Ibs))?;
    if counters > 0 {
        msrs.enable(a, counters)?;
    }
    let events = msrs.selects.iter().zip(events);
    for (n, (select, event)) in (0..counters).zip(events) {
        let samples = load != Load::Counting && n == 0;
        if samples {
            reload(a, msrs.first().1)?;
        }
        let int = if samples { INT } else { 0 };
        wrmsr(a, *select, event.code | USR_OS_ENABLE | int)?;
    }
    if load == Load::Ibs {
        restart_sampler(a)?;
    }
    enter_user(a)
}

/// Switches the local APIC to x2APIC mode and on, and has NMIs for PMIs and for entry 0 of
/// its extended vector table, which is IBS's.
fn x2apic(a: &mut CodeAssembler) -> Written {
    const APIC_BASE: u32 = 0x1b;
    const X2APIC: i32 = 1 << 10;
    a.mov(ecx, APIC_BASE)?;
    a.rdmsr()?;
    a.or(eax, X2APIC)?;
    a.wrmsr()?;
    for (msr, value) in [(0x80f, 0x1ff), (0x834, 0x400), (0x850, 0x400)] {
        wrmsr(a, msr, value)?;
    }
    Ok(())
}

/// Writes ESI to `IbsOpCtl`: the count begins at 0.
fn restart_sampler(a: &mut CodeAssembler) -> Written {
    let [control, ..] = IBS_OP;
    a.mov(ecx, control)?;
    a.mov(eax, esi)?;
    a.xor(edx, edx)?;
    a.wrmsr()
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
/// guest was. Of IBS it reads control, RIP and whether that is valid, as Linux does.
fn nmi(a: &mut CodeAssembler, msrs: &PmuMsrs, ibs: bool) -> Written {
    let (mut sampler, mut done) = (a.create_label(), a.create_label());
    let (_, counter) = msrs.first();
    a.push(rax)?;
    a.push(rcx)?;
    a.push(rdx)?;
    a.inc(qword_ptr(rdi + NMIS))?;
    a.mov(rax, qword_ptr(rsp + 24))?;
    a.mov(qword_ptr(rdi + NMIS + 8), rax)?;
    if ibs {
        a.test(ebx, ebx)?;
        a.jne(sampler)?;
    }
    note(a, counter, NMIS + 16)?;
    reload(a, counter)?;
    a.set_label(&mut done)?;
    a.pop(rdx)?;
    a.pop(rcx)?;
    a.pop(rax)?;
    a.iretq()?;
    if ibs {
        a.set_label(&mut sampler)?;
        for (at, msr) in (NMIS + 16..).step_by(8).zip(IBS_OP) {
            note(a, msr, at)?;
        }
        restart_sampler(a)?;
        a.jmp(done)?;
    }
    Ok(())
}

/// RDMSR into one of the vCPU's words.
fn note(a: &mut CodeAssembler, msr: u32, at: u64) -> Written {
    a.mov(ecx, msr)?;
    a.rdmsr()?;
    a.mov(dword_ptr(rdi + at), eax)?;
    a.mov(dword_ptr(rdi + at + 4), edx)
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
