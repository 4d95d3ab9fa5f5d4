//! The guest: a loop at CPL 3 and an NMI handler that takes the time.

use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, dx, eax, ebx, ecx, edx, esi, r8, r13, rax, rdi,
};
use pmu_virt::PmuModel;
use vmm::micro::{
    KERNEL_CODE, LAPIC, MicroError, MicroGuest, SCRATCH, Start, USER_CODE, USER_CS, USER_SS,
    USER_STACK, assemble,
};

use super::{BATCH, VCPUS};
use crate::error::BenchError;
use crate::guest::with_gp_handler;
use crate::harness::DONE;
use crate::registers::{PmuMsrs, Written, wrmsr};
use crate::sources::{Event, INT, USR_OS_ENABLE};

const NMI_VECTOR: u8 = 2;
const NMI_HANDLER: u64 = KERNEL_CODE + 0x2000;

/// Where vCPU `vcpu` leaves its samples: TSC values.
pub(super) fn taken_at(vcpu: u8) -> u64 {
    const STRIDE: u64 = 0x1000;
    SCRATCH + u64::from(vcpu) * STRIDE
}

/// A loop at CPL 3, interrupted by one NMI for each overflow, on each vCPU. ESI
/// holds what the counter is set to, R8 the next sample, EBX the samples to come.
pub(super) fn guest(model: &PmuModel, event: Event) -> Result<MicroGuest, BenchError> {
    let msrs = PmuMsrs::of(model);
    let (select, counter) = msrs.first();
    let begin = assemble(KERNEL_CODE, |a| {
        apic(a)?;
        a.mov(r8, rdi)?;
        a.mov(ebx, BATCH)?;
        msrs.enable(a, 1)?;
        reload(a, counter)?;
        wrmsr(a, select, event.code | USR_OS_ENABLE | INT)?;
        enter_user(a)
    });
    let handler = assemble(NMI_HANDLER, |a| {
        let mut more = a.create_label();
        a.rdtsc()?;
        a.mov(dword_ptr(r8), eax)?;
        a.mov(dword_ptr(r8 + 4), edx)?;
        a.add(r8, 8)?;
        a.dec(ebx)?;
        a.jne(more)?;
        a.xor(eax, eax)?;
        a.mov(dx, u32::from(DONE))?;
        a.out(dx, eax)?;
        a.mov(r8, rdi)?;
        a.mov(ebx, BATCH)?;
        a.set_label(&mut more)?;
        reload(a, counter)?;
        a.iretq()
    });
    let user = assemble(USER_CODE, |a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.inc(rax)?;
        a.jmp(again)
    });
    let code = |code: Result<_, _>| code.map_err(MicroError::from);
    let guest = with_gp_handler(MicroGuest::new())?
        .code(KERNEL_CODE, code(begin)?)
        .code(NMI_HANDLER, code(handler)?)
        .code(USER_CODE, code(user)?)
        .handler(NMI_VECTOR, NMI_HANDLER);
    Ok((0..VCPUS).fold(guest, |guest, vcpu| {
        let mut start = Start::at(KERNEL_CODE, 0);
        start.rdi = taken_at(vcpu);
        guest.start(start)
    }))
}

/// Switches the local APIC on and routes PMIs as NMIs.
pub(crate) fn apic(a: &mut CodeAssembler) -> Written {
    const SVR: (u32, u32) = (0xf0, 0x1ff);
    const LVTPC_NMI: (u32, u32) = (0x340, 0x400);
    a.mov(r13, LAPIC)?;
    for (register, value) in [SVR, LVTPC_NMI] {
        a.mov(eax, value)?;
        a.mov(dword_ptr(r13 + register), eax)?;
    }
    Ok(())
}

/// Sets the counter to ESI, sign-extended: a write to Intel's counters does that
/// by itself, AMD's take 48 bits.
pub(crate) fn reload(a: &mut CodeAssembler, counter: u32) -> Written {
    a.mov(ecx, counter)?;
    a.mov(eax, esi)?;
    a.mov(edx, 0xffffu32)?;
    a.wrmsr()
}

/// Goes to [`USER_CODE`] at CPL 3.
pub(crate) fn enter_user(a: &mut CodeAssembler) -> Written {
    const RFLAGS_FIXED: i32 = 2;
    a.push(i32::from(USER_SS))?;
    a.mov(rax, USER_STACK)?;
    a.push(rax)?;
    a.push(RFLAGS_FIXED)?;
    a.push(i32::from(USER_CS))?;
    a.mov(rax, USER_CODE)?;
    a.push(rax)?;
    a.iretq()
}
