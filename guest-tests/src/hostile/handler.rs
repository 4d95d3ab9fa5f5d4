//! Attacks on the patch in a #GP handler: stores to its bytes from every vCPU, gates
//! that move to another copy of it, and the OUT by itself.

use iced_x86::code_asm::{CodeAssembler, al, byte_ptr, dword_ptr, eax, ecx, rax, rbx};

use super::Facts;
use super::rng::Rng;
use crate::micro::{DISPLACEABLE, ENDBR64, Written};

/// More copies than may be patched at a time; each in its own page or beside another.
pub(super) const COPIES: u64 = 12;
const COPY_STRIDE: u64 = 0x440;
/// From a handler to the first copy.
const TO_COPIES: u64 = 0x2000;

/// Where copy `copy` of `handler` is.
pub(super) fn copy_of(handler: u64, copy: u64) -> u64 {
    handler + TO_COPIES + copy * COPY_STRIDE
}

/// What a copy does: it goes to the handler behind its first instruction.
pub(super) fn copy(a: &mut CodeAssembler, handler: u64, which: u64) -> Written {
    let count = DISPLACEABLE.len() as u64;
    let first = DISPLACEABLE[usize::try_from(which % count).unwrap_or(0)];
    a.db(first)?;
    a.jmp(handler + ENDBR64.len() as u64)
}

pub(super) fn attack(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    // Its own, or that of the other vCPU, which may be in it.
    let handler = rng.pick(&facts.handlers);
    let handler = match rng.below(3) {
        0 => copy_of(handler, u64::from(rng.byte()) % COPIES),
        _ => handler,
    };
    match rng.below(8) {
        // What stands there for the guest, in pieces.
        0 => a.mov(byte_ptr(handler), i32::from(ENDBR64[0].cast_signed())),
        1 => {
            a.mov(eax, u32::from_le_bytes(ENDBR64))?;
            a.mov(dword_ptr(handler), eax)
        }
        2 => {
            // A NOP of the same length: another port.
            a.mov(eax, 0x0040_1f0fu32)?;
            a.mov(dword_ptr(handler), eax)
        }
        3 => {
            a.mov(rbx, handler)?;
            a.xor(eax, eax)?;
            a.lock().add(dword_ptr(rbx + 0x10), eax)
        }
        // Another handler.
        4 | 5 => {
            let to = copy_of(facts.handler, u64::from(rng.byte()) % COPIES);
            a.mov(rax, facts.gp_gate)?;
            a.mov(ecx, u32::try_from(to & 0xffff).unwrap_or(0) | 8 << 16)?;
            a.mov(dword_ptr(rax), ecx)?;
            a.mov(
                byte_ptr(rax + 6),
                i32::try_from(to >> 16 & 0x7f).unwrap_or(0),
            )
        }
        // The OUT without a #GP, and the handler without one.
        6 => {
            a.mov(al, u32::from(rng.byte()))?;
            a.out(rng.pick(&[0x01u32, 0x0f, 0x1f]), al)
        }
        _ => a.jmp(handler),
    }
}
