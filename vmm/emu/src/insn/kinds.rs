//! Which family an instruction belongs to.

use iced_x86::Mnemonic;

use super::{alu, muldiv, shift};

pub(crate) use super::alu::{CMP, TEST};

/// Operations on two values by mnemonic.
pub(crate) fn binary_of(mnemonic: Mnemonic) -> Option<u8> {
    Some(match mnemonic {
        Mnemonic::Add => alu::ADD,
        Mnemonic::Or => alu::OR,
        Mnemonic::Adc => alu::ADC,
        Mnemonic::Sbb => alu::SBB,
        Mnemonic::And => alu::AND,
        Mnemonic::Sub => alu::SUB,
        Mnemonic::Xor => alu::XOR,
        Mnemonic::Cmp => alu::CMP,
        Mnemonic::Test => alu::TEST,
        _ => return None,
    })
}

pub(crate) fn shift_of(mnemonic: Mnemonic) -> Option<u8> {
    Some(match mnemonic {
        Mnemonic::Rol => shift::ROL,
        Mnemonic::Ror => shift::ROR,
        Mnemonic::Rcl => shift::RCL,
        Mnemonic::Rcr => shift::RCR,
        Mnemonic::Shl | Mnemonic::Sal => shift::SHL,
        Mnemonic::Shr => shift::SHR,
        Mnemonic::Sar => shift::SAR,
        _ => return None,
    })
}

pub(crate) fn is_setcc(mnemonic: Mnemonic) -> bool {
    (Mnemonic::Seta as u32..=Mnemonic::Sets as u32).contains(&(mnemonic as u32))
        && mnemonic != Mnemonic::Setssbsy
}

pub(crate) fn is_cmovcc(mnemonic: Mnemonic) -> bool {
    (Mnemonic::Cmova as u32..=Mnemonic::Cmovs as u32).contains(&(mnemonic as u32))
}

/// Hints, fences, and what is none without its feature.
pub(crate) fn is_hint(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        mnemonic,
        M::Nop
            | M::Reservednop
            | M::Endbr32
            | M::Endbr64
            | M::Rdsspd
            | M::Rdsspq
            | M::Cldemote
            | M::Prefetch
            | M::Prefetchnta
            | M::Prefetcht0
            | M::Prefetcht1
            | M::Prefetcht2
            | M::Prefetchw
            | M::Prefetchwt1
            | M::Lfence
            | M::Mfence
            | M::Sfence
    )
}

/// Operations on one value by mnemonic.
pub(crate) fn unary_of(mnemonic: Mnemonic) -> Option<u8> {
    Some(match mnemonic {
        Mnemonic::Inc => alu::INC,
        Mnemonic::Dec => alu::DEC,
        Mnemonic::Neg => alu::NEG,
        Mnemonic::Not => alu::NOT,
        _ => return None,
    })
}

/// Multiplications and divisions with one operand.
pub(crate) fn multiply_of(mnemonic: Mnemonic) -> Option<u8> {
    Some(match mnemonic {
        Mnemonic::Mul => muldiv::MUL,
        Mnemonic::Imul => muldiv::IMUL,
        Mnemonic::Div => muldiv::DIV,
        Mnemonic::Idiv => muldiv::IDIV,
        _ => return None,
    })
}
