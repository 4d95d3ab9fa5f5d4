//! Static facts about one decoded instruction.

use iced_x86::{Code, Instruction, InstructionInfoFactory, InstructionInfoOptions, OpKind};
use pmu_model::MathUnit;

use crate::faults::{self, FaultSet};
use crate::kinds::{CountRegister, InsnClass, StepKind, Taken};
use crate::{classify, memory};

/// What a guest's instruction is, known before it executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InsnFacts {
    /// Address of the instruction.
    pub rip: u64,
    /// Bytes, 1 to 15.
    pub len: u8,
    /// How it moves RIP.
    pub class: InsnClass,
    /// Repeated by a REP, REPE or REPNE prefix; single steps stop after each
    /// iteration, and the instruction retires with the last one.
    pub rep: bool,
    /// Holds back interrupts and single-step traps (MOV SS, POP SS) or
    /// interrupts alone (STI) until after the next instruction.
    pub inhibits_interrupts: bool,
    /// Memory operands read.
    pub loads: u8,
    /// Memory operands written.
    pub stores: u8,
    /// An operand lies in the stack segment, at an address that more than RSP or
    /// RBP and a displacement make up.
    pub stack_operand: bool,
    /// Target of a direct near branch.
    pub near_target: Option<u64>,
    /// A branch that may fall through.
    pub conditional: bool,
    /// MOVS, CMPS, SCAS, LODS, STOS, INS or OUTS, repeated or not.
    pub string: bool,
    /// The unit that it needs, beyond the integer ones.
    pub unit: Option<MathUnit>,
    /// What a stepper must treat specially.
    pub kind: StepKind,
    /// Vectors that its execution can raise, fetching it aside.
    pub may_fault: FaultSet,
    /// Bytes of the words that an IRET, far RET or POPF pops, and of the address that a
    /// SYSRET or SYSEXIT loads; 0 for all others.
    pub word: u8,
    /// Address of the instruction after it, wrapped at the mode's size.
    pub(crate) next: u64,
    pub(crate) taken: Taken,
    pub(crate) rep_count: CountRegister,
}

impl InsnFacts {
    /// The facts of an instruction that a decoder yielded.
    #[must_use]
    pub fn of(insn: &Instruction, factory: &mut InstructionInfoFactory) -> Self {
        let info = factory.info_options(insn, InstructionInfoOptions::NO_REGISTER_USAGE);
        let accesses = memory::accesses(insn, info);
        let class = classify::class(insn);
        let kind = classify::kind(insn);
        InsnFacts {
            rip: insn.ip(),
            len: insn.len().to_le_bytes()[0],
            class,
            rep: classify::is_repeated(insn),
            inhibits_interrupts: matches!(kind, StepKind::MovSs | StepKind::PopSs | StepKind::Sti),
            loads: accesses.loads,
            stores: accesses.stores,
            stack_operand: accesses.far_stack,
            near_target: near_target(insn, class),
            string: insn.is_string_instruction(),
            unit: classify::unit(insn),
            conditional: class == InsnClass::ConditionalBranch || kind == StepKind::Into,
            kind,
            may_fault: faults::of(insn, &accesses, class, kind),
            word: word(insn.code()),
            next: insn.next_ip(),
            taken: classify::taken(insn, class, kind),
            rep_count: classify::rep_count(insn),
        }
    }
}

/// Target of a direct near branch; XBEGIN, whose operand looks alike, is none.
fn near_target(insn: &Instruction, class: InsnClass) -> Option<u64> {
    let direct = insn.op_count() > 0
        && matches!(
            insn.op0_kind(),
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
        );
    (direct && class != InsnClass::Plain).then(|| insn.near_branch_target())
}

/// [`InsnFacts::word`].
fn word(code: Code) -> u8 {
    match code {
        Code::Iretw | Code::Retfw | Code::Retfw_imm16 | Code::Popfw => 2,
        Code::Iretd
        | Code::Retfd
        | Code::Retfd_imm16
        | Code::Popfd
        | Code::Sysretd
        | Code::Sysexitd => 4,
        Code::Iretq
        | Code::Retfq
        | Code::Retfq_imm16
        | Code::Popfq
        | Code::Sysretq
        | Code::Sysexitq => 8,
        _ => 0,
    }
}
