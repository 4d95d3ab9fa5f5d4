//! From assembler calls to bytes.

use iced_x86::IcedError;
use iced_x86::code_asm::CodeAssembler;
use thiserror::Error;

/// A micro-guest's code could not be assembled.
#[derive(Debug, Error)]
#[error("the micro-guest's code cannot be assembled: {0}")]
pub struct CodeError(#[from] IcedError);

/// Assembles 64-bit code for the address `base`.
///
/// # Errors
/// [`CodeError`] where `write` uses an operand that no instruction has.
pub fn assemble(
    base: u64,
    write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Result<Vec<u8>, CodeError> {
    assemble_for(64, base, write)
}

/// Assembles code of another width: 16, 32 or 64.
///
/// # Errors
/// [`CodeError`] where `write` uses an operand that no instruction has.
pub fn assemble_for(
    bitness: u32,
    base: u64,
    write: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Result<Vec<u8>, CodeError> {
    let mut assembler = CodeAssembler::new(bitness)?;
    write(&mut assembler)?;
    Ok(assembler.assemble(base)?)
}
