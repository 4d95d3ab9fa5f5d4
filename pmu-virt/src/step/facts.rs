//! Static facts about one decoded instruction.

use iced_x86::{
    Decoder, DecoderError, DecoderOptions, Instruction, InstructionInfoFactory, OpKind,
};
use pmu_model::MathUnit;
use thiserror::Error;

use super::retire::{CountRegister, Taken};
use super::{FaultSet, classify, faults, memory, retire};

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

/// How an instruction moves RIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsnClass {
    /// To the next instruction.
    Plain,
    /// Jcc, LOOP, JCXZ.
    ConditionalBranch,
    /// JMP near, direct or indirect.
    Jump,
    /// CALL near, direct or indirect.
    Call,
    /// RET near.
    Return,
    /// Far jump, call, return, software interrupt, IRET, system call or return.
    Far,
}

/// Instructions that a stepper must treat specially: they store or load TF,
/// change the privilege level, delay traps, stop, or are trapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// PUSHF: would save a TF that is not the guest's.
    Pushf,
    /// POPF: may set or clear TF.
    Popf,
    /// IRET: may set or clear TF and change the ring.
    Iret,
    /// SYSCALL: flags go to R11 and are masked.
    Syscall,
    /// SYSRET: flags come from R11.
    Sysret,
    /// SYSENTER.
    Sysenter,
    /// SYSEXIT.
    Sysexit,
    /// INT n.
    SoftInt(u8),
    /// INT3.
    Int3,
    /// INT1.
    Int1,
    /// INTO.
    Into,
    /// MOV SS: traps wait for the next instruction.
    MovSs,
    /// POP SS: likewise.
    PopSs,
    /// STI.
    Sti,
    /// CLI.
    Cli,
    /// RDMSR.
    Rdmsr,
    /// WRMSR.
    Wrmsr,
    /// RDPMC.
    Rdpmc,
    /// HLT.
    Hlt,
    /// A move to or from a debug register.
    MovDr,
    /// A move to or from a control register.
    MovCr,
    /// LIDT: the addresses of the handlers change.
    Lidt,
    /// Far JMP, CALL or RET: the ring may change.
    FarTransfer,
    /// None of these.
    Other,
}

/// Why bytes could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Undecodable {
    /// More bytes are needed; fetch up to 15.
    #[error("the instruction at {rip:#x} is longer than the {given} bytes given; fetch up to 15")]
    Truncated {
        /// Address of the instruction.
        rip: u64,
        /// Bytes given.
        given: usize,
    },
    /// No instruction: executing it raises #UD (or #GP above 15 bytes).
    #[error("the bytes at {rip:#x} are no instruction")]
    Invalid {
        /// Address of the bytes.
        rip: u64,
    },
    /// Not 16, 32 or 64.
    #[error("there is no {bitness}-bit mode; give 16, 32 or 64")]
    Bitness {
        /// The value given.
        bitness: u32,
    },
}

/// Decodes the instruction at `rip` from the bytes found there, in a code
/// segment of 16, 32 or 64 bits.
///
/// # Errors
/// The bytes are too few, no instruction, or the mode does not exist.
pub fn decode(bytes: &[u8], bitness: u32, rip: u64) -> Result<InsnFacts, Undecodable> {
    let mut decoder = Decoder::try_with_ip(bitness, bytes, rip, DecoderOptions::NONE)
        .map_err(|_| Undecodable::Bitness { bitness })?;
    let insn = decoder.decode();
    match decoder.last_error() {
        DecoderError::None => {}
        DecoderError::NoMoreBytes if bytes.len() < 15 => {
            return Err(Undecodable::Truncated {
                rip,
                given: bytes.len(),
            });
        }
        _ => return Err(Undecodable::Invalid { rip }),
    }
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(&insn);
    let accesses = memory::accesses(&insn, info);
    let class = classify::class(&insn);
    let kind = classify::kind(&insn);
    Ok(InsnFacts {
        rip,
        len: insn.len().to_le_bytes()[0],
        class,
        rep: classify::is_repeated(&insn),
        inhibits_interrupts: matches!(kind, StepKind::MovSs | StepKind::PopSs | StepKind::Sti),
        loads: accesses.loads,
        stores: accesses.stores,
        stack_operand: accesses.far_stack,
        near_target: near_target(&insn, class),
        string: insn.is_string_instruction(),
        unit: classify::unit(&insn),
        conditional: class == InsnClass::ConditionalBranch || kind == StepKind::Into,
        kind,
        may_fault: faults::of(&insn, &accesses, class, kind, bitness),
        next: insn.next_ip(),
        taken: retire::rule(&insn, class, kind),
        rep_count: retire::rep_count(&insn),
    })
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
