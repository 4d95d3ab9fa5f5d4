//! The decoder's list of instructions, and which of them are there.

use emu::{Cpuid, is_known};
use iced_x86::{Code, CpuidFeature, Instruction, Mnemonic, OpCodeOperandKind};

/// Encodings of announced features, in 64-bit code, that the processor executes.
pub(crate) fn implemented() -> Vec<Code> {
    announced()
        .into_iter()
        .filter(|code| is_there(*code))
        .collect()
}

fn is_there(code: Code) -> bool {
    let mut insn = Instruction::default();
    insn.set_code(code);
    is_known(&insn)
}

/// SSE has instructions of MMX registers too.
fn is_of_mmx(code: Code) -> bool {
    let op = code.op_code();
    let kinds = (0..op.op_count()).map(|operand| op.op_kind(operand));
    kinds.into_iter().any(|kind| {
        matches!(
            kind,
            OpCodeOperandKind::mm_reg | OpCodeOperandKind::mm_rm | OpCodeOperandKind::mm_or_mem
        )
    })
}

fn announced() -> Vec<Code> {
    let cpuid = Cpuid::implemented();
    Code::values()
        .filter(|code| *code != Code::INVALID && code.op_code().is_instruction())
        .filter(|code| code.op_code().mode64())
        // FWAIT and an instruction are two for the decoder; others need an option of it.
        .filter(|code| !code.op_code().fwait() && !OLD.contains(code))
        .filter(|code| code.cpuid_features().iter().all(|one| cpuid.has(*one)))
        .filter(|code| !is_of_mmx(*code) || cpuid.has(CpuidFeature::MMX))
        .filter(|code| code.mnemonic() != Mnemonic::Fisttp || cpuid.has(CpuidFeature::FPU))
        .collect()
}

/// Of the 80287 and 80387, which no later processor has.
const OLD: &[Code] = &[Code::Frstpm, Code::Fstdw_AX, Code::Fstsg_AX];

/// Not there, with the reason.
const ABSENT: &[(&str, &str)] = &[
    ("Rstorssp", CET),
    ("Setssbsy", CET),
    ("Saveprevssp", CET),
    ("Incssp", CET),
    ("Clrssbsy", CET),
    ("Wruss", CET),
    ("Wrss", CET),
];

/// RDSSP of the same feature is a NOP without it (SDM vol. 1, 17.2).
const CET: &str = "without shadow stacks it is #UD";

#[test]
fn what_is_announced_is_there() {
    let mut wrong = Vec::new();
    for code in announced() {
        let name = format!("{code:?}");
        let excused = ABSENT.iter().any(|(one, _)| name.starts_with(one));
        if is_there(code) == excused {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
