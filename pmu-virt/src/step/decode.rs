//! From bytes to facts.

use iced_x86::{
    Decoder, DecoderError, DecoderOptions, Instruction, InstructionInfoFactory, OpKind,
};
use thiserror::Error;

use super::facts::InsnFacts;
use super::kinds::{InsnClass, StepKind};
use super::{classify, faults, memory, retire};

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
