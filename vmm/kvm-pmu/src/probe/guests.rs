//! The probe guests, in bytes: what assembles is no part of this crate.

use std::time::Instant;

use guest_exit::VmExit;
use kvm_bindings::{KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP};

use super::runner::{Code, Probe, SMM_ENTRY};
use super::{GuestStep, HandlerOut, Host, ProbeError, ProtectedStore, RdpmcBehaviour};
use crate::layout::{KERNEL_CODE, SCRATCH, USER_CODE, USER_CS, USER_SS, USER_STACK};
use crate::memory::GuestBytes;

/// Ports on which probes report.
const DONE: u16 = 0xe1;
const FAULTED: u16 = 0xe2;

const HANDLER: u64 = KERNEL_CODE + 0x1000;
const DB_VECTOR: u8 = 1;
const GP_VECTOR: u8 = 13;
const DR7_GD: u64 = 1 << 13;
const DR6_BD: u64 = 1 << 13;
const DR6_BS: u64 = 1 << 14;
const RFLAGS_FIXED: u32 = 2;
const RFLAGS_TF: u32 = 1 << 8;
const RFLAGS_RF: u64 = 1 << 16;
const DR7_SLOT0: u64 = 2 | 1 << 10;

/// Code at CPL `cpl`.
fn guest(cpl: u8, code: &[&[u8]]) -> Code {
    Code::new(cpl).at(code_address(cpl), code)
}

fn code_address(cpl: u8) -> u64 {
    if cpl == 3 { USER_CODE } else { KERNEL_CODE }
}

/// MOV EDX, `port`; OUT DX, EAX.
const fn report(port: u16) -> [u8; 6] {
    let [low, high] = port.to_le_bytes();
    [0xba, low, high, 0, 0, 0xef]
}

/// An instruction of one byte, or more, and an operand of 32 bits.
fn with_operand(instruction: &[u8], operand: u32) -> Vec<u8> {
    [instruction, &operand.to_le_bytes()].concat()
}

/// An address of the guest's memory, which lies below 4 GiB.
fn low(address: u64) -> u32 {
    u32::try_from(address).unwrap_or(0)
}

const MOV_EAX: &[u8] = &[0xb8];
const MOV_ECX: &[u8] = &[0xb9];
const MOV_EDX: &[u8] = &[0xba];
const PUSH: &[u8] = &[0x68];
const XOR_ECX_ECX: &[u8] = &[0x31, 0xc9];
const RDPMC: &[u8] = &[0x0f, 0x33];
const MOV_DR0_RAX: &[u8] = &[0x0f, 0x23, 0xc0];
const NOP: &[u8] = &[0x90];

fn is_report(exit: &VmExit, wanted: u16) -> bool {
    matches!(exit, VmExit::IoOut { port, .. } if *port == wanted)
}

/// Picoseconds an instruction of a tight loop at `cpl`.
pub(super) fn loop_time(host: &Host<'_>, cpl: u8) -> Result<u64, ProbeError> {
    // Long enough to outweigh the exit at either end on a native KVM, short
    // enough for an emulator: about 5 ms there.
    const ITERATIONS: u32 = 4000;
    // The best of a few: the first is slow on a machine that translates code,
    // and any may be interrupted.
    const ROUNDS: usize = 3;
    let guest = guest(
        cpl,
        &[
            &report(DONE),
            &with_operand(MOV_ECX, ITERATIONS),
            // DEC ECX; JNE there; JMP to the beginning.
            &[0xff, 0xc9, 0x75, 0xfc, 0xeb, 0xef],
        ],
    );
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
pub(super) fn rdpmc(host: &Host<'_>) -> Result<RdpmcBehaviour, ProbeError> {
    const MARK: u32 = 0x5a5a_5a5a;
    let guest = guest(
        0,
        &[
            &with_operand(MOV_EAX, MARK),
            &with_operand(MOV_EDX, MARK),
            XOR_ECX_ECX,
            RDPMC,
            &report(DONE),
        ],
    );
    let guest = guest.handler(GP_VECTOR, HANDLER, &[&report(FAULTED)]);
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

fn three_nops(cpl: u8) -> Code {
    guest(cpl, &[NOP, NOP, NOP, &report(DONE)])
}

/// Whether single step stops after each instruction at `cpl`.
pub(super) fn step(host: &Host<'_>, cpl: u8) -> Result<bool, ProbeError> {
    let mut probe = Probe::new(host, &three_nops(cpl))?;
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
pub(super) fn step_fence(host: &Host<'_>) -> Result<bool, ProbeError> {
    let mfence = &[0x0f, 0xae, 0xf0];
    let guest = guest(0, &[mfence, NOP, NOP, &report(DONE)]);
    let mut probe = Probe::new(host, &guest)?;
    let behind = code_address(0) + 3;
    Ok(probe.debug(KVM_GUESTDBG_SINGLESTEP, 0, 0)
        && matches!(probe.run()?, VmExit::Debug(exit) if exit.pc == behind))
}

/// Whether an execution breakpoint fires at `cpl`.
pub(super) fn breakpoint(host: &Host<'_>, cpl: u8) -> Result<bool, ProbeError> {
    let target = code_address(cpl) + 1;
    let mut probe = Probe::new(host, &three_nops(cpl))?;
    if !probe.debug(KVM_GUESTDBG_USE_HW_BP, target, DR7_SLOT0) {
        return Ok(false);
    }
    Ok(matches!(probe.run()?, VmExit::Debug(exit) if exit.pc == target && exit.dr6 & 1 != 0))
}

/// Whether RF, set through `KVM_SET_REGS`, lets the guest go on from a breakpoint.
pub(super) fn resume_flag(host: &Host<'_>) -> Result<bool, ProbeError> {
    let target = code_address(0) + 1;
    let mut probe = Probe::new(host, &three_nops(0))?;
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
pub(super) fn guest_step(host: &Host<'_>, ours: bool) -> Result<GuestStep, ProbeError> {
    let push = |value| with_operand(PUSH, value);
    let kernel: [&[u8]; 6] = [
        &push(USER_SS.into()),
        &push(low(USER_STACK)),
        &push(RFLAGS_TF | RFLAGS_FIXED),
        &push(USER_CS.into()),
        &push(low(USER_CODE)),
        // IRETQ.
        &[0x48, 0xcf],
    ];
    // Without a step UD2 ends the probe.
    let user = &[0x0f, 0x0b];
    // MOV RAX, [RSP].
    let handler = &[0x48, 0x8b, 0x04, 0x24];
    let guest = Code::new(0)
        .at(KERNEL_CODE, &kernel)
        .at(USER_CODE, &[NOP, NOP, user])
        .handler(DB_VECTOR, HANDLER, &[handler, &report(DONE)]);
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
pub(super) fn guest_breakpoint(host: &Host<'_>) -> Result<bool, ProbeError> {
    let guest = guest(
        0,
        &[
            // LEA RAX of the NOP, from behind the LEA on.
            &with_operand(&[0x48, 0x8d, 0x05], 3 + 5 + 3),
            MOV_DR0_RAX,
            &with_operand(MOV_EAX, low(DR7_SLOT0)),
            // MOV DR7, RAX.
            &[0x0f, 0x23, 0xf8],
            NOP,
            &report(FAULTED),
        ],
    );
    let guest = guest.handler(DB_VECTOR, HANDLER, &[&report(DONE)]);
    let mut probe = Probe::new(host, &guest)?;
    Ok(probe.debug(KVM_GUESTDBG_USE_HW_BP, SCRATCH, DR7_SLOT0) && is_report(&probe.run()?, DONE))
}

/// Whether DR7.GD, passed through `KVM_SET_GUEST_DEBUG`, stops a MOV to DR0.
pub(super) fn dr_access(host: &Host<'_>) -> Result<bool, ProbeError> {
    // XOR EAX, EAX; MOV AL, 1.
    let one = &[0x31, 0xc0, 0xb0, 0x01];
    let guest = guest(0, &[one, MOV_DR0_RAX, &report(DONE)]);
    let mut probe = Probe::new(host, &guest)?;
    if !probe.debug(KVM_GUESTDBG_USE_HW_BP, 0, DR7_GD | 1 << 10) {
        return Ok(false);
    }
    Ok(matches!(probe.run()?, VmExit::Debug(exit) if exit.dr6 & DR6_BD != 0))
}

/// Where a vCPU stands that stopped at an OUT in the place of its #GP handler's first
/// instruction, and whether it can go on behind that.
pub(super) fn handler_out(host: &Host<'_>) -> Result<HandlerOut, ProbeError> {
    // ENDBR64 with an OUT for its first byte.
    const PATCHED: [u8; 4] = [0xe6, 0x0f, 0x1e, 0xfa];
    const PORT: u16 = 0x0f;
    let behind = HANDLER + PATCHED.len() as u64;
    let guest = guest(0, &[XOR_ECX_ECX, RDPMC])
        .handler(GP_VECTOR, HANDLER, &[&PATCHED])
        .at(behind, &[&report(DONE)]);
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
pub(super) fn protected_store(host: &Host<'_>, cpl: u8) -> Result<ProtectedStore, ProbeError> {
    const VALUE: u32 = 0x1234_5678;
    let guest = guest(
        cpl,
        &[
            // MOV EAX, [SCRATCH], and back.
            &with_operand(&[0x8b, 0x04, 0x25], low(SCRATCH)),
            &with_operand(MOV_EAX, VALUE),
            &with_operand(&[0x89, 0x04, 0x25], low(SCRATCH)),
            &report(DONE),
        ],
    );
    let mut probe = Probe::new(host, &guest)?;
    if probe.memory().set_writable(SCRATCH, false).is_err() {
        return Ok(ProtectedStore::Unnoticed);
    }
    let exit = probe.run()?;
    if probe.memory().set_writable(SCRATCH, true).is_err() {
        return Ok(ProtectedStore::Unnoticed);
    }
    let went_on = is_report(&probe.run()?, DONE);
    let memory: &dyn GuestBytes = probe.memory();
    let stored = memory.array(SCRATCH).map_or(0, u32::from_le_bytes);
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
pub(super) fn smm(host: &Host<'_>) -> Result<bool, ProbeError> {
    if !host.has_smm() {
        return Ok(false);
    }
    // In 16-bit code: MOV DX, FAULTED; OUT DX, EAX; RSM.
    let [low, high] = FAULTED.to_le_bytes();
    let handler = &[0xba, low, high, 0x66, 0xef, 0x0f, 0xaa];
    let guest = guest(0, &[&report(DONE), &report(DONE)]).at(SMM_ENTRY, &[handler]);
    let mut probe = Probe::new(host, &guest)?;
    let before = is_report(&probe.run()?, DONE) && !probe.in_smm();
    // Without an in-kernel local APIC KVM takes no SMI.
    if !before || probe.vcpu().smi().is_err() {
        return Ok(false);
    }
    let inside = is_report(&probe.run()?, FAULTED) && probe.in_smm();
    Ok(inside && is_report(&probe.run()?, DONE) && !probe.in_smm())
}
