//! From bytes to facts.

use iced_x86::{
    Decoder, DecoderError, DecoderOptions, Instruction, InstructionInfoFactory, Mnemonic,
};
use thiserror::Error;

use crate::facts::InsnFacts;

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

/// An encoding that a decoder of iced-x86 may lack: each has a feature that takes it away, and
/// any crate of a build switches it on for all, without a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// AVX, BMI and AVX-512's masks; `no_vex`.
    Vex,
    /// AVX-512; `no_evex`.
    Evex,
    /// AMD's XOP and TBM; `no_xop`, which this repository has itself.
    Xop,
}

impl Encoding {
    /// Whether this build decodes it.
    #[must_use]
    pub fn is_decoded(self) -> bool {
        let (bytes, mnemonic): (&[u8], _) = match self {
            // VMOVAPS xmm0, xmm1 and zmm0, zmm1; VPROTD xmm0, xmm1, 5.
            Self::Vex => (&[0xc5, 0xf8, 0x28, 0xc1], Mnemonic::Vmovaps),
            Self::Evex => (&[0x62, 0xf1, 0x7c, 0x48, 0x28, 0xc1], Mnemonic::Vmovaps),
            Self::Xop => (&[0x8f, 0xe8, 0x78, 0xc2, 0xc1, 5], Mnemonic::Vprotd),
        };
        let decoder = Decoder::try_with_ip(64, bytes, 0, DecoderOptions::NONE);
        decoder.is_ok_and(|mut decoder| decoder.decode().mnemonic() == mnemonic)
    }

    /// The feature of iced-x86 that takes it away.
    #[must_use]
    pub fn feature(self) -> &'static str {
        match self {
            Self::Vex => "no_vex",
            Self::Evex => "no_evex",
            Self::Xop => "no_xop",
        }
    }
}

/// An instruction, and what is known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// As the decoder has it: for [`operand`](crate::operand), and for who executes it.
    pub insn: Instruction,
    pub facts: InsnFacts,
}

/// Decodes the instruction at `rip` from the bytes found there, in a code
/// segment of 16, 32 or 64 bits.
///
/// # Errors
/// The bytes are too few, no instruction, or the mode does not exist.
pub fn decode(
    bytes: &[u8],
    bitness: u32,
    rip: u64,
    factory: &mut InstructionInfoFactory,
) -> Result<Decoded, Undecodable> {
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
    let facts = InsnFacts::of(&insn, factory);
    Ok(Decoded { insn, facts })
}

const RDPMC: [u8; 2] = [0x0f, 0x33];

/// Address of the instruction behind the RDPMC that `code` at `rip` begins with; `None` if it
/// begins with something else.
#[must_use]
pub fn rip_after_rdpmc(code: &[u8], bitness: u32, rip: u64) -> Option<u64> {
    // Compilers write it without prefixes, and the decoder has tables.
    if bitness == 64 && code.starts_with(&RDPMC) {
        return Some(rip.wrapping_add(RDPMC.len() as u64));
    }
    let mut decoder = Decoder::try_with_ip(bitness, code, rip, DecoderOptions::NONE).ok()?;
    let insn = decoder.decode();
    (insn.mnemonic() == Mnemonic::Rdpmc).then(|| insn.next_ip())
}
