//! From mnemonics to classes.

use super::{InsnClass, StepKind};
use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind, Register};

/// How the instruction moves RIP.
pub(super) fn class(insn: &Instruction) -> InsnClass {
    match kind(insn) {
        StepKind::Iret
        | StepKind::Syscall
        | StepKind::Sysret
        | StepKind::Sysenter
        | StepKind::Sysexit
        | StepKind::SoftInt(_)
        | StepKind::Int3
        | StepKind::Int1
        | StepKind::Into
        | StepKind::FarTransfer => return InsnClass::Far,
        _ => {}
    }
    match insn.flow_control() {
        FlowControl::ConditionalBranch => InsnClass::ConditionalBranch,
        FlowControl::UnconditionalBranch | FlowControl::IndirectBranch => InsnClass::Jump,
        FlowControl::Call | FlowControl::IndirectCall if is_call(insn) => InsnClass::Call,
        FlowControl::Return if insn.mnemonic() == Mnemonic::Ret => InsnClass::Return,
        _ => InsnClass::Plain,
    }
}

/// Calls of a hypervisor or of firmware flow like calls and are none.
fn is_call(insn: &Instruction) -> bool {
    insn.mnemonic() == Mnemonic::Call
}

/// What a stepper must treat specially.
pub(super) fn kind(insn: &Instruction) -> StepKind {
    match insn.mnemonic() {
        Mnemonic::Pushf | Mnemonic::Pushfd | Mnemonic::Pushfq => StepKind::Pushf,
        Mnemonic::Popf | Mnemonic::Popfd | Mnemonic::Popfq => StepKind::Popf,
        Mnemonic::Iret | Mnemonic::Iretd | Mnemonic::Iretq => StepKind::Iret,
        Mnemonic::Syscall => StepKind::Syscall,
        Mnemonic::Sysret | Mnemonic::Sysretq => StepKind::Sysret,
        Mnemonic::Sysenter => StepKind::Sysenter,
        Mnemonic::Sysexit | Mnemonic::Sysexitq => StepKind::Sysexit,
        Mnemonic::Int => StepKind::SoftInt(insn.immediate8()),
        Mnemonic::Int3 => StepKind::Int3,
        Mnemonic::Int1 => StepKind::Int1,
        Mnemonic::Into => StepKind::Into,
        Mnemonic::Mov => kind_of_mov(insn),
        Mnemonic::Pop if insn.op0_register() == Register::SS => StepKind::PopSs,
        Mnemonic::Sti => StepKind::Sti,
        Mnemonic::Cli => StepKind::Cli,
        Mnemonic::Rdmsr => StepKind::Rdmsr,
        Mnemonic::Wrmsr => StepKind::Wrmsr,
        Mnemonic::Rdpmc => StepKind::Rdpmc,
        Mnemonic::Hlt => StepKind::Hlt,
        Mnemonic::Lidt => StepKind::Lidt,
        Mnemonic::Retf => StepKind::FarTransfer,
        Mnemonic::Jmp | Mnemonic::Call if is_far(insn) => StepKind::FarTransfer,
        _ => StepKind::Other,
    }
}

fn kind_of_mov(insn: &Instruction) -> StepKind {
    let registers = [insn.op0_register(), insn.op1_register()];
    if registers.iter().any(|register| register.is_dr()) {
        StepKind::MovDr
    } else if registers.iter().any(|register| register.is_cr()) {
        StepKind::MovCr
    } else if registers[0] == Register::SS {
        StepKind::MovSs
    } else {
        StepKind::Other
    }
}

fn is_far(insn: &Instruction) -> bool {
    matches!(insn.op0_kind(), OpKind::FarBranch16 | OpKind::FarBranch32)
        || insn.is_jmp_far_indirect()
        || insn.is_call_far_indirect()
}

/// A string instruction with a repeat prefix.
pub(super) fn is_repeated(insn: &Instruction) -> bool {
    insn.is_string_instruction() && (insn.has_rep_prefix() || insn.has_repne_prefix())
}
