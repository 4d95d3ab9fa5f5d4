//! The neighbours' guests.

use arbiter::abi;
use iced_x86::code_asm::{
    CodeAssembler, al, dword_ptr, dx, eax, ecx, edx, qword_ptr, rax, rbx, rsi, rsp, word_ptr,
};
use vmm::micro::{KERNEL_CODE, LAPIC, MicroError, MicroGuest, Start, assemble};

use super::error::BenchError;
use super::registers::{Written, wrmsr};

const GP_VECTOR: u8 = 13;
const NMI_VECTOR: u8 = 2;
const GP_HANDLER: u64 = KERNEL_CODE + 0x4000;
/// A port where nothing is.
const NOTHING: u32 = 0x1234;
/// The bit by which the address of its twin differs.
const OTHER_HANDLER: u16 = 0x2000;
const NMI_HANDLER: u64 = KERNEL_CODE + 0x5000;

/// Port accesses of one round of a hostile guest that find nothing: IN and OUT.
pub(super) const UNCLAIMED_PER_ROUND: u64 = 2;

/// A guest that computes and never leaves by itself.
pub(super) fn quiet() -> Result<MicroGuest, BenchError> {
    endless(|a| {
        a.imul_3(eax, eax, 3)?;
        a.inc(eax)
    })
}

/// A guest that leaves on every way out, one after the other: PMU registers with
/// legal values, reserved bits and absent ones, PMIs, RDPMC, ports, MMIO. In each round
/// its #GP gate leads to another handler than in the one before, so that a patch has to
/// move. (Stores to the handler's page would end that: after eight there is no patch.)
pub(super) fn hostile() -> Result<MicroGuest, BenchError> {
    endless(|a| {
        const GATE_SIZE: u64 = 16;
        a.lea(rsp, qword_ptr(rsp - 16))?;
        a.sidt(qword_ptr(rsp))?;
        a.mov(rbx, qword_ptr(rsp + 2))?;
        a.lea(rsp, qword_ptr(rsp + 16))?;
        a.xor(
            word_ptr(rbx + GATE_SIZE * u64::from(GP_VECTOR)),
            i32::from(OTHER_HANDLER),
        )?;
        msrs(a)?;
        for index in [0u32, 77] {
            a.mov(ecx, index)?;
            a.rdpmc()?;
        }
        const COM1: u32 = 0x3f8;
        for port in [COM1, NOTHING] {
            a.mov(edx, port)?;
            a.in_(al, dx)?;
            a.out(dx, al)?;
        }
        // Beyond the local APIC's page, which is mapped but not there.
        a.mov(rbx, LAPIC + 0x8000)?;
        a.mov(rax, qword_ptr(rbx))?;
        a.mov(qword_ptr(rbx), rax)
    })
}

/// A guest that reserves counters and gives them back as fast as it can, by key and by
/// request.
pub(super) fn reserving() -> Result<MicroGuest, BenchError> {
    endless(|a| {
        const COOKIE: u64 = 0x1234_5678;
        const BY_KEY: u32 = 2;
        const ASKED_FOR: u64 = 3;
        let about = |operation: u64| {
            operation | abi::REQUEST_POSITION | ASKED_FOR << abi::REQUEST_WHICH_SHIFT
        };
        let key = abi::MSR_BASE + abi::MSR_MANAGEMENT_KEY + BY_KEY;
        let request = abi::MSR_BASE + abi::MSR_REQUEST;
        for (msr, value, cookie) in [
            (key, COOKIE, abi::DEFAULT_COOKIE),
            (key, abi::DEFAULT_COOKIE, COOKIE),
            (request, about(abi::REQUEST_RESERVE), COOKIE),
            (request, about(abi::REQUEST_RELEASE), COOKIE),
        ] {
            a.mov(rsi, cookie)?;
            wrmsr(a, msr, value)?;
        }
        a.mov(edx, NOTHING)?;
        a.in_(al, dx)?;
        a.out(dx, al)
    })
}

fn msrs(a: &mut CodeAssembler) -> Written {
    const SVR: (u64, u32) = (LAPIC + 0xf0, 0x1ff);
    const LVTPC_NMI: (u64, u32) = (LAPIC + 0x340, 0x400);
    const CYCLES: u32 = 0x0053_0076;
    const NEAR_OVERFLOW: u32 = 0xffff_f000;
    for (register, value) in [SVR, LVTPC_NMI] {
        a.mov(rbx, register)?;
        a.mov(eax, value)?;
        a.mov(dword_ptr(rbx), eax)?;
    }
    for msr in [0xc001_0200u32, 0xc001_0201, 0x186, 0xc1, 0x38f, 0x3f6] {
        for (low, high) in [
            (CYCLES, 0u32),
            (NEAR_OVERFLOW, 0xffff),
            (u32::MAX, u32::MAX),
        ] {
            a.mov(ecx, msr)?;
            a.mov(eax, low)?;
            a.mov(edx, high)?;
            a.wrmsr()?;
        }
        a.rdmsr()?;
    }
    Ok(())
}

/// `code` for ever at CPL 0. Its #GPs are skipped.
fn endless(code: fn(&mut CodeAssembler) -> Written) -> Result<MicroGuest, BenchError> {
    let body = assembled(KERNEL_CODE, |a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        code(a)?;
        a.jmp(again)
    })?;
    // RDMSR, WRMSR and RDPMC have two bytes each. The error code goes first.
    let skip = assembled(GP_HANDLER, |a| {
        // Can be patched.
        a.endbr64()?;
        a.lea(rsp, qword_ptr(rsp + 8))?;
        a.add(qword_ptr(rsp), 2)?;
        a.iretq()
    })?;
    Ok(MicroGuest::new()
        .code(KERNEL_CODE, body)
        .code(GP_HANDLER, skip.clone())
        .code(GP_HANDLER ^ u64::from(OTHER_HANDLER), skip)
        .code(NMI_HANDLER, assembled(NMI_HANDLER, CodeAssembler::iretq)?)
        .handler(GP_VECTOR, GP_HANDLER)
        .handler(NMI_VECTOR, NMI_HANDLER)
        .start(Start::at(KERNEL_CODE, 0)))
}

fn assembled(
    base: u64,
    write: impl FnOnce(&mut CodeAssembler) -> Written,
) -> Result<Vec<u8>, BenchError> {
    Ok(assemble(base, write).map_err(MicroError::from)?)
}
