//! The integration tests of this crate: one program, because each one more is linked with all that
//! it tests once more. A file or folder beside this one is a module here.

mod counts;
mod facts;
mod operands;
mod other_build;
mod retire;

use instruction_facts::{Decoded, InsnFacts, InstructionInfoFactory, Undecodable, decode};

const RIP: u64 = 0x1000;

fn decoded(bytes: &[u8], bitness: u32) -> Result<Decoded, Undecodable> {
    decode(bytes, bitness, RIP, &mut InstructionInfoFactory::new())
}

fn facts(bitness: u32, bytes: &[u8]) -> InsnFacts {
    let decoded = decoded(bytes, bitness);
    decoded
        .unwrap_or_else(|error| panic!("{bytes:02x?}: {error}"))
        .facts
}
