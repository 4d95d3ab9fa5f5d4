//! The flags that an instruction is about to load, and where it returns to.

use iced_x86::{Code, Decoder, DecoderOptions};
use pmu_virt::step::{InsnFacts, StepKind};

use super::context::{CpuContext, MAX_INSTRUCTION, descriptor_base};

const RFLAGS_TF: u64 = 1 << 8;

/// TF as POPF, IRET or SYSRET will load it; `None` for other instructions, or
/// where the image cannot be read (the instruction then faults).
pub(super) fn loaded_tf(context: &CpuContext<'_>, facts: &InsnFacts) -> Option<bool> {
    let flags = match facts.kind {
        StepKind::Sysret => context.regs.r11,
        StepKind::Popf | StepKind::Iret => {
            let at = context.sregs.ss.base.wrapping_add(context.regs.rsp);
            context.word::<2>(at.wrapping_add(flags_offset(context, facts)?))?
        }
        _ => return None,
    };
    Some(flags & RFLAGS_TF != 0)
}

/// Where an IRET, SYSRET, SYSEXIT or far RET goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReturnTarget {
    /// In its code segment.
    pub(super) rip: u64,
    /// With the segment's base.
    pub(super) linear: u64,
    /// Privilege level there.
    pub(super) cpl: u8,
}

/// Where the instruction returns to; `None` for other instructions, or where
/// its frame cannot be read.
pub(super) fn return_target(context: &CpuContext<'_>, facts: &InsnFacts) -> Option<ReturnTarget> {
    let (rip, cs) = match facts.kind {
        StepKind::Sysret => {
            // With REX.W to RCX in 64-bit mode, else to ECX in compatibility mode.
            let wide = matches!(code_at(context, facts), Code::Sysretq);
            let rcx = context.regs.rcx;
            let rip = if wide { rcx } else { rcx & 0xffff_ffff };
            return Some(ReturnTarget {
                rip,
                linear: rip,
                cpl: 3,
            });
        }
        StepKind::Sysexit => {
            let wide = matches!(code_at(context, facts), Code::Sysexitq);
            let rdx = context.regs.rdx;
            let rip = if wide { rdx } else { rdx & 0xffff_ffff };
            return Some(ReturnTarget {
                rip,
                linear: rip,
                cpl: 3,
            });
        }
        // A far RET pops what an IRET pops first; other far transfers have no
        // frame.
        StepKind::Iret | StepKind::FarTransfer => {
            let at = context.sregs.ss.base.wrapping_add(context.regs.rsp);
            match code_at(context, facts) {
                Code::Iretw | Code::Retfw | Code::Retfw_imm16 => (
                    context.word::<2>(at)?,
                    context.word::<2>(at.wrapping_add(2))?,
                ),
                Code::Iretd | Code::Retfd | Code::Retfd_imm16 => (
                    context.word::<4>(at)?,
                    context.word::<2>(at.wrapping_add(4))?,
                ),
                Code::Iretq | Code::Retfq | Code::Retfq_imm16 => (
                    context.word::<8>(at)?,
                    context.word::<2>(at.wrapping_add(8))?,
                ),
                _ => return None,
            }
        }
        _ => return None,
    };
    let selector = u16::try_from(cs & 0xffff).unwrap_or(0);
    let descriptor = context.descriptor(selector)?;
    let long = context.long_mode() && descriptor >> 53 & 1 != 0;
    let base = if long { 0 } else { descriptor_base(descriptor) };
    Some(ReturnTarget {
        rip,
        linear: base.wrapping_add(rip),
        cpl: u8::try_from(cs & 3).unwrap_or(0),
    })
}

/// How far above the stack pointer the flags lie.
fn flags_offset(context: &CpuContext<'_>, facts: &InsnFacts) -> Option<u64> {
    match code_at(context, facts) {
        Code::Popfw | Code::Popfd | Code::Popfq => Some(0),
        Code::Iretw => Some(4),
        Code::Iretd => Some(8),
        Code::Iretq => Some(16),
        _ => None,
    }
}

/// Which form of the instruction it is.
fn code_at(context: &CpuContext<'_>, facts: &InsnFacts) -> Code {
    let base = context.code_base();
    let mut bytes = [0; MAX_INSTRUCTION];
    let len = context.read_linear(base.wrapping_add(facts.rip), &mut bytes);
    Decoder::new(context.bitness(), &bytes[..len], DecoderOptions::NONE)
        .decode()
        .code()
}
