//! Static facts about one decoded instruction.

use pmu_model::MathUnit;

use super::faults::FaultSet;
use super::kinds::{CountRegister, InsnClass, StepKind, Taken};

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
    /// Address of the instruction after it, wrapped at the mode's size.
    pub(super) next: u64,
    pub(super) taken: Taken,
    pub(super) rep_count: CountRegister,
}
