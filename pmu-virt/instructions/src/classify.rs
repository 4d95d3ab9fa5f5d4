//! From mnemonics to classes.

use iced_x86::{
    CodeSize, ConditionCode, CpuidFeature, FlowControl, Instruction, Mnemonic, OpKind, Register,
};
use pmu_model::MathUnit;

use crate::kinds::{CountRegister, InsnClass, StepKind, Taken};

/// How the instruction moves RIP.
pub(crate) fn class(insn: &Instruction) -> InsnClass {
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
pub(crate) fn kind(insn: &Instruction) -> StepKind {
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
        Mnemonic::Lfence
        | Mnemonic::Mfence
        | Mnemonic::Sfence
        | Mnemonic::Swapgs
        | Mnemonic::Endbr32
        | Mnemonic::Endbr64
        | Mnemonic::Rdfsbase
        | Mnemonic::Rdgsbase
        | Mnemonic::Wrfsbase
        | Mnemonic::Wrgsbase
        | Mnemonic::Rdrand
        | Mnemonic::Rdseed
        | Mnemonic::Fxsave
        | Mnemonic::Fxsave64
        | Mnemonic::Fxrstor
        | Mnemonic::Fxrstor64 => StepKind::Unemulated,
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
pub(crate) fn is_repeated(insn: &Instruction) -> bool {
    insn.is_string_instruction() && (insn.has_rep_prefix() || insn.has_repne_prefix())
}

/// The unit that the instruction needs: told by the registers that it names,
/// since MMX registers have instructions of SSE's date, and SSE's set has some
/// for the integer ones (MOVNTI, PREFETCH, the fences).
pub(crate) fn unit(insn: &Instruction) -> Option<MathUnit> {
    let has = |features: &[CpuidFeature]| {
        let all = insn.cpuid_features();
        all.iter().any(|feature| features.contains(feature))
    };
    let names = |is: fn(Register) -> bool| {
        let mut operands = 0..insn.op_count();
        operands.any(|n| insn.op_kind(n) == OpKind::Register && is(insn.op_register(n)))
    };
    let x87 = [
        CpuidFeature::FPU,
        CpuidFeature::FPU287,
        CpuidFeature::FPU287XL_ONLY,
        CpuidFeature::FPU387,
        CpuidFeature::FPU387SL_ONLY,
    ];
    if has(&x87)
        || names(Register::is_st)
        || matches!(insn.mnemonic(), Mnemonic::Fisttp | Mnemonic::Wait)
    {
        return Some(MathUnit::X87);
    }
    if names(|register| register.is_vector_register() || register.is_k()) {
        return Some(MathUnit::Sse);
    }
    if names(Register::is_mm) {
        return Some(MathUnit::Mmx);
    }
    match insn.mnemonic() {
        Mnemonic::Emms | Mnemonic::Femms => Some(MathUnit::Mmx),
        Mnemonic::Ldmxcsr
        | Mnemonic::Stmxcsr
        | Mnemonic::Vldmxcsr
        | Mnemonic::Vstmxcsr
        | Mnemonic::Vzeroall
        | Mnemonic::Vzeroupper => Some(MathUnit::Sse),
        _ => None,
    }
}

/// When the instruction is taken.
pub(crate) fn taken(insn: &Instruction, class: InsnClass, kind: StepKind) -> Taken {
    let count = || CountRegister::of_address_size(insn.op_code().address_size());
    let condition = || match insn.condition_code() {
        ConditionCode::None => None,
        code => Some(code),
    };
    match (class, insn.mnemonic()) {
        (InsnClass::Plain, _) => Taken::Never,
        _ if kind == StepKind::Into => Taken::IfOverflow,
        (_, Mnemonic::Jcxz | Mnemonic::Jecxz | Mnemonic::Jrcxz) => Taken::IfZero(count()),
        (_, Mnemonic::Loop | Mnemonic::Loope | Mnemonic::Loopne) => {
            Taken::Loop(count(), condition())
        }
        (InsnClass::ConditionalBranch, _) => condition().map_or(Taken::Always, Taken::If),
        _ => Taken::Always,
    }
}

/// Where a repeated instruction keeps its count: as wide as its addresses.
pub(crate) fn rep_count(insn: &Instruction) -> CountRegister {
    if !is_repeated(insn) {
        return CountRegister::Rcx;
    }
    let narrow = |kind: OpKind| match kind {
        OpKind::MemorySegSI | OpKind::MemorySegDI | OpKind::MemoryESDI => Some(CountRegister::Cx),
        OpKind::MemorySegESI | OpKind::MemorySegEDI | OpKind::MemoryESEDI => {
            Some(CountRegister::Ecx)
        }
        _ => None,
    };
    insn.op_kinds()
        .find_map(narrow)
        .unwrap_or(CountRegister::Rcx)
}

/// Whether the instruction is one of 64-bit mode.
pub(crate) fn is_64_bit(insn: &Instruction) -> bool {
    insn.code_size() == CodeSize::Code64
}
