//! The probe guests.

use std::time::Instant;

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, al, dr0, dr7, dword_ptr, dx, eax, ecx, edx, qword_ptr, rax, rsp,
};
use kvm_bindings::{KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP};
use vm_memory::{Bytes, GuestAddress};

use super::runner::Probe;
use super::{GuestStep, HandlerOut, ProtectedStore, RdpmcBehaviour};
use crate::kvm::{Host, SMM_ENTRY, VmExit, VmOptions};
use crate::micro::{
    KERNEL_CODE, MicroError, MicroGuest, SCRATCH, Start, USER_CODE, USER_CS, USER_SS, USER_STACK,
    assemble, assemble_for,
};

/// Ports on which probes report.
const DONE: u16 = 0xe1;
const FAULTED: u16 = 0xe2;

const HANDLER: u64 = KERNEL_CODE + 0x1000;
const DB_VECTOR: u8 = 1;
const GP_VECTOR: u8 = 13;
const IOPL_3: u64 = 0x3000;
const DR7_GD: u64 = 1 << 13;
const DR6_BD: u64 = 1 << 13;
const DR6_BS: u64 = 1 << 14;
const RFLAGS_FIXED: i32 = 2;
const RFLAGS_TF: i32 = 1 << 8;
const RFLAGS_RF: u64 = 1 << 16;
const DR7_SLOT0: u64 = 2 | 1 << 10;

type Written = Result<(), IcedError>;

fn guest(
    cpl: u8,
    write: impl FnOnce(&mut CodeAssembler) -> Written,
) -> Result<MicroGuest, MicroError> {
    let base = code_address(cpl);
    let mut start = Start::at(base, cpl);
    // So that CPL 3 may use its report ports.
    start.rflags = IOPL_3;
    Ok(MicroGuest::new()
        .code(base, assemble(base, write)?)
        .start(start))
}

fn code_address(cpl: u8) -> u64 {
    if cpl == 3 { USER_CODE } else { KERNEL_CODE }
}

fn report(a: &mut CodeAssembler, port: u16) -> Written {
    a.mov(dx, u32::from(port))?;
    a.out(dx, eax)
}

fn is_report(exit: &VmExit, wanted: u16) -> bool {
    matches!(exit, VmExit::IoOut { port, .. } if *port == wanted)
}

/// Picoseconds an instruction of a tight loop at `cpl`.
pub(super) fn loop_time(host: &Host, cpl: u8) -> Result<u64, MicroError> {
    // Long enough to outweigh the exit at either end on a native KVM, short
    // enough for an emulator: about 5 ms there.
    const ITERATIONS: u32 = 4000;
    // The best of a few: the first is slow on a machine that translates code,
    // and any may be interrupted.
    const ROUNDS: usize = 3;
    let guest = guest(cpl, |a| {
        let mut round = a.create_label();
        a.set_label(&mut round)?;
        report(a, DONE)?;
        a.mov(ecx, ITERATIONS)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.dec(ecx)?;
        a.jne(again)?;
        a.jmp(round)
    })?;
    let mut probe = Probe::new(host, &guest)?;
    probe.run()?;
    let mut best = u64::MAX;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        probe.run()?;
        let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        best = best.min(ns);
    }
    Ok(best.saturating_mul(1000) / (2 * u64::from(ITERATIONS)))
}

/// What RDPMC does at CPL 0.
pub(super) fn rdpmc(host: &Host) -> Result<RdpmcBehaviour, MicroError> {
    const MARK: u32 = 0x5a5a_5a5a;
    let guest = guest(0, |a| {
        a.mov(eax, MARK)?;
        a.mov(edx, MARK)?;
        a.xor(ecx, ecx)?;
        a.rdpmc()?;
        report(a, DONE)
    })?;
    let handler = assemble(HANDLER, |a| report(a, FAULTED))?;
    let guest = guest.code(HANDLER, handler).handler(GP_VECTOR, HANDLER);
    let mut probe = Probe::new(host, &guest)?;
    let exit = probe.run()?;
    Ok(match exit {
        VmExit::IoOut { port: FAULTED, .. } => RdpmcBehaviour::Faults,
        VmExit::IoOut { port: DONE, .. } => {
            if probe.io_data().iter().all(|&byte| byte == 0) {
                RdpmcBehaviour::SilentZero
            } else {
                RdpmcBehaviour::Answered
            }
        }
        _ => RdpmcBehaviour::Unknown,
    })
}

fn three_nops(cpl: u8) -> Result<MicroGuest, MicroError> {
    guest(cpl, |a| {
        a.nop()?;
        a.nop()?;
        a.nop()?;
        report(a, DONE)
    })
}

/// Whether single step stops after each instruction at `cpl`.
pub(super) fn step(host: &Host, cpl: u8) -> Result<bool, MicroError> {
    let mut probe = Probe::new(host, &three_nops(cpl)?)?;
    for stop in 1..=2 {
        if !probe.debug(KVM_GUESTDBG_SINGLESTEP, 0, 0) {
            return Ok(false);
        }
        let stopped = match probe.run()? {
            VmExit::Debug(exit) => exit.dr6 & DR6_BS != 0 && exit.pc == code_address(cpl) + stop,
            _ => false,
        };
        if !stopped {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a step over an MFENCE at CPL 0 stops right behind it.
pub(super) fn step_fence(host: &Host) -> Result<bool, MicroError> {
    let guest = guest(0, |a| {
        a.mfence()?;
        a.nop()?;
        a.nop()?;
        report(a, DONE)
    })?;
    let mut probe = Probe::new(host, &guest)?;
    let behind = code_address(0) + 3;
    Ok(probe.debug(KVM_GUESTDBG_SINGLESTEP, 0, 0)
        && matches!(probe.run()?, VmExit::Debug(exit) if exit.pc == behind))
}

/// Whether an execution breakpoint fires at `cpl`.
pub(super) fn breakpoint(host: &Host, cpl: u8) -> Result<bool, MicroError> {
    let target = code_address(cpl) + 1;
    let mut probe = Probe::new(host, &three_nops(cpl)?)?;
    if !probe.debug(KVM_GUESTDBG_USE_HW_BP, target, DR7_SLOT0) {
        return Ok(false);
    }
    Ok(matches!(probe.run()?, VmExit::Debug(exit) if exit.pc == target && exit.dr6 & 1 != 0))
}

/// Whether RF, set through `KVM_SET_REGS`, lets the guest go on from a breakpoint.
pub(super) fn resume_flag(host: &Host) -> Result<bool, MicroError> {
    let target = code_address(0) + 1;
    let mut probe = Probe::new(host, &three_nops(0)?)?;
    if !probe.debug(KVM_GUESTDBG_USE_HW_BP, target, DR7_SLOT0) {
        return Ok(false);
    }
    if !matches!(probe.run()?, VmExit::Debug(exit) if exit.pc == target) {
        return Ok(false);
    }
    let mut regs = probe.vcpu().get_regs()?;
    regs.rflags |= RFLAGS_RF;
    probe.vcpu().set_regs(&regs)?;
    Ok(is_report(&probe.run()?, DONE))
}

/// Where the #DB of the guest's own step of a program at CPL 3 goes, with a
/// breakpoint of ours elsewhere if `ours`.
pub(super) fn guest_step(host: &Host, ours: bool) -> Result<GuestStep, MicroError> {
    let kernel = assemble(KERNEL_CODE, |a| {
        a.push(i32::from(USER_SS))?;
        a.push(imm(USER_STACK))?;
        a.push(RFLAGS_TF | RFLAGS_FIXED)?;
        a.push(i32::from(USER_CS))?;
        a.push(imm(USER_CODE))?;
        a.iretq()
    })?;
    let user = assemble(USER_CODE, |a| {
        a.nop()?;
        a.nop()?;
        // Without a step this ends the probe through the #UD vector.
        a.ud2()
    })?;
    let handler = assemble(HANDLER, |a| {
        a.mov(rax, qword_ptr(rsp))?;
        report(a, DONE)
    })?;
    let guest = MicroGuest::new()
        .code(KERNEL_CODE, kernel)
        .code(USER_CODE, user)
        .code(HANDLER, handler)
        .handler(DB_VECTOR, HANDLER)
        .start(Start::at(KERNEL_CODE, 0));
    let mut probe = Probe::new(host, &guest)?;
    if ours && !probe.debug(KVM_GUESTDBG_USE_HW_BP, SCRATCH, DR7_SLOT0) {
        return Ok(GuestStep::Lost);
    }
    let after_one = USER_CODE + 1;
    Ok(match probe.run()? {
        VmExit::Debug(exit) if exit.pc == after_one && exit.dr6 & DR6_BS != 0 => GuestStep::ToUs,
        exit if is_report(&exit, DONE) && probe.vcpu().get_regs()?.rax == after_one => {
            GuestStep::ToGuest
        }
        _ => GuestStep::Lost,
    })
}

/// Whether the guest's own breakpoint on execution fires at CPL 0 while one of ours
/// is elsewhere.
pub(super) fn guest_breakpoint(host: &Host) -> Result<bool, MicroError> {
    let guest = guest(0, |a| {
        let mut target = a.create_label();
        a.lea(rax, qword_ptr(target))?;
        a.mov(dr0, rax)?;
        a.mov(eax, imm(DR7_SLOT0))?;
        a.mov(dr7, rax)?;
        a.set_label(&mut target)?;
        a.nop()?;
        report(a, FAULTED)
    })?;
    let handler = assemble(HANDLER, |a| report(a, DONE))?;
    let guest = guest.code(HANDLER, handler).handler(DB_VECTOR, HANDLER);
    let mut probe = Probe::new(host, &guest)?;
    Ok(probe.debug(KVM_GUESTDBG_USE_HW_BP, SCRATCH, DR7_SLOT0) && is_report(&probe.run()?, DONE))
}

/// An address of the micro-guest's memory, which lies below 2 GiB.
fn imm(address: u64) -> i32 {
    i32::try_from(address).unwrap_or(0)
}

/// Whether DR7.GD, passed through `KVM_SET_GUEST_DEBUG`, stops a MOV to DR0.
pub(super) fn dr_access(host: &Host) -> Result<bool, MicroError> {
    let guest = guest(0, |a| {
        a.xor(eax, eax)?;
        a.mov(al, 1)?;
        a.mov(dr0, rax)?;
        report(a, DONE)
    })?;
    let mut probe = Probe::new(host, &guest)?;
    if !probe.debug(KVM_GUESTDBG_USE_HW_BP, 0, DR7_GD | 1 << 10) {
        return Ok(false);
    }
    Ok(matches!(probe.run()?, VmExit::Debug(exit) if exit.dr6 & DR6_BD != 0))
}

/// Where a vCPU stands that stopped at an OUT in the place of its #GP handler's first
/// instruction, and whether it can go on behind that.
pub(super) fn handler_out(host: &Host) -> Result<HandlerOut, MicroError> {
    // ENDBR64 with an OUT for its first byte.
    const PATCHED: [u8; 4] = [0xe6, 0x0f, 0x1e, 0xfa];
    const PORT: u16 = 0x0f;
    let guest = guest(0, |a| {
        a.xor(ecx, ecx)?;
        a.rdpmc()
    })?;
    let behind = HANDLER + PATCHED.len() as u64;
    let handler = assemble(behind, |a| report(a, DONE))?;
    let guest = guest
        .code(HANDLER, PATCHED.to_vec())
        .code(behind, handler)
        .handler(GP_VECTOR, HANDLER);
    let mut probe = Probe::new(host, &guest)?;
    if !is_report(&probe.run()?, PORT) {
        return Ok(HandlerOut::Unnoticed);
    }
    let found = match probe.vcpu().get_regs()?.rip.checked_sub(HANDLER) {
        Some(0) => HandlerOut::At,
        Some(2) => HandlerOut::Behind,
        _ => return Ok(HandlerOut::Unnoticed),
    };
    probe.complete()?;
    let mut regs = probe.vcpu().get_regs()?;
    regs.rip = behind;
    probe.vcpu().set_regs(&regs)?;
    Ok(if is_report(&probe.run()?, DONE) {
        found
    } else {
        HandlerOut::Unnoticed
    })
}

/// How a store at `cpl` to a page that is read-only in KVM's mapping alone comes to us.
pub(super) fn protected_store(host: &Host, cpl: u8) -> Result<ProtectedStore, MicroError> {
    const VALUE: u32 = 0x1234_5678;
    let guest = guest(cpl, |a| {
        a.mov(eax, dword_ptr(SCRATCH))?;
        a.mov(eax, VALUE)?;
        a.mov(dword_ptr(SCRATCH), eax)?;
        report(a, DONE)
    })?;
    let mut probe = Probe::new(host, &guest)?;
    if probe.vm().protect(SCRATCH, false).is_err() {
        return Ok(ProtectedStore::Unnoticed);
    }
    let exit = probe.run()?;
    if probe.vm().protect(SCRATCH, true).is_err() {
        return Ok(ProtectedStore::Unnoticed);
    }
    let went_on = is_report(&probe.run()?, DONE);
    let stored: u32 = probe
        .vm()
        .memory()
        .read_obj(GuestAddress(SCRATCH))
        .unwrap_or(0);
    Ok(match exit {
        // The store is left to us.
        VmExit::MmioWrite {
            address: SCRATCH,
            data,
            len: 4,
        } if went_on && data[..4] == VALUE.to_le_bytes() && stored == 0 => ProtectedStore::Mmio,
        // The store takes place now.
        VmExit::MemoryFault {
            address: Some(SCRATCH) | None,
        } if went_on && stored == VALUE => ProtectedStore::Fault,
        _ => ProtectedStore::Unnoticed,
    })
}

/// Whether an SMI leads to its handler, and KVM marks an exit from there.
pub(super) fn smm(host: &Host) -> Result<bool, MicroError> {
    if !host.features().smm {
        return Ok(false);
    }
    let handler = assemble_for(16, SMM_ENTRY, |a| {
        report(a, FAULTED)?;
        a.rsm()
    })?;
    let guest = guest(0, |a| {
        report(a, DONE)?;
        report(a, DONE)
    })?;
    let options = VmOptions {
        smm: true,
        ..VmOptions::default()
    };
    let mut probe = Probe::with_options(host, &guest.smm(handler), &options)?;
    let before = is_report(&probe.run()?, DONE) && !probe.in_smm();
    // Without an in-kernel local APIC KVM takes no SMI.
    if !before || probe.vcpu().smi().is_err() {
        return Ok(false);
    }
    let inside = is_report(&probe.run()?, FAULTED) && probe.in_smm();
    Ok(inside && is_report(&probe.run()?, DONE) && !probe.in_smm())
}
