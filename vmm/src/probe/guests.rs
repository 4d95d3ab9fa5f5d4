//! The probe guests.

use std::time::Instant;

use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, al, dr0, dx, eax, ecx, edx, esi, rax};
use kvm_bindings::{KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP};

use super::RdpmcBehaviour;
use super::runner::Probe;
use crate::kvm::{Host, VmExit};
use crate::micro::{KERNEL_CODE, MicroError, MicroGuest, Start, USER_CODE, assemble};

/// Ports on which probes report.
const DONE: u16 = 0xe1;
const FAULTED: u16 = 0xe2;

const HANDLER: u64 = KERNEL_CODE + 0x1000;
const GP_VECTOR: u8 = 13;
const IOPL_3: u64 = 0x3000;
const DR7_GD: u64 = 1 << 13;
const DR6_BD: u64 = 1 << 13;
const DR6_BS: u64 = 1 << 14;
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

/// Picoseconds an instruction of a tight loop at `cpl`: the best of some
/// rounds, because a busy host stretches single ones at will.
pub(super) fn loop_time(host: &Host, cpl: u8) -> Result<u64, MicroError> {
    // Long enough to outweigh the exit at either end on a native KVM, short
    // enough for an emulator: about 5 ms there.
    const ITERATIONS: u32 = 4000;
    const ROUNDS: u32 = 5;
    let guest = guest(cpl, |a| {
        let (mut round, mut again) = (a.create_label(), a.create_label());
        a.mov(esi, ROUNDS)?;
        a.set_label(&mut round)?;
        report(a, DONE)?;
        a.mov(ecx, ITERATIONS)?;
        a.set_label(&mut again)?;
        a.dec(ecx)?;
        a.jne(again)?;
        a.dec(esi)?;
        a.jne(round)?;
        report(a, DONE)
    })?;
    let mut probe = Probe::new(host, &guest)?;
    probe.run()?;
    let mut best = u64::MAX;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        probe.run()?;
        best = best.min(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
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
        VmExit::IoOut {
            port: DONE, data, ..
        } if data.iter().all(|&byte| byte == 0) => RdpmcBehaviour::SilentZero,
        VmExit::IoOut { port: DONE, .. } => RdpmcBehaviour::Answered,
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
