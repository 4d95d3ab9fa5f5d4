//! The decoder's list of instructions, and which of them are there.

use emu::{Cpuid, is_known};
use iced_x86::{Code, Instruction};

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

fn announced() -> Vec<Code> {
    let cpuid = Cpuid::implemented();
    Code::values()
        .filter(|code| *code != Code::INVALID && code.op_code().is_instruction())
        .filter(|code| code.op_code().mode64())
        .filter(|code| code.cpuid_features().iter().all(|one| cpuid.has(*one)))
        .collect()
}

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
