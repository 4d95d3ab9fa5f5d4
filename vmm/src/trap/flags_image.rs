//! The flags that an instruction is about to load.

use iced_x86::{Code, Decoder, DecoderOptions};
use pmu_virt::step::{InsnFacts, StepKind};

use super::context::{CpuContext, MAX_INSTRUCTION};

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

/// How far above the stack pointer the flags lie.
fn flags_offset(context: &CpuContext<'_>, facts: &InsnFacts) -> Option<u64> {
    let base = match context.bitness() {
        64 => 0,
        _ => context.sregs.cs.base,
    };
    let mut bytes = [0; MAX_INSTRUCTION];
    let len = context.read_linear(base.wrapping_add(facts.rip), &mut bytes);
    let code = Decoder::new(context.bitness(), &bytes[..len], DecoderOptions::NONE)
        .decode()
        .code();
    match code {
        Code::Popfw | Code::Popfd | Code::Popfq => Some(0),
        Code::Iretw => Some(4),
        Code::Iretd => Some(8),
        Code::Iretq => Some(16),
        _ => None,
    }
}
