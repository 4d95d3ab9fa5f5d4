//! Where an instruction accesses memory.

use iced_x86::{Decoder, DecoderOptions, InstructionInfoFactory, OpAccess, Register, UsedMemory};

/// One memory operand of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Linear address.
    pub linear: u64,
    /// Bytes; 0 if there are more than 65535, or that is not fixed.
    pub bytes: u16,
    /// It is read.
    pub load: bool,
    /// It is written.
    pub store: bool,
}

/// Which memory operand of several is meant: `PUSH [RAX]` reads one and writes another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OperandKind {
    /// The first that is read or written.
    #[default]
    Any,
    /// The first that is read.
    Load,
    /// The first that is written.
    Store,
}

/// The memory operand of `kind` of the instruction at `rip`, with the registers that it
/// found: `value` tells each, of a segment register its base. `None` if there is none, or
/// what it accesses depends on more than registers (gathers).
pub fn operand(
    bytes: &[u8],
    bitness: u32,
    rip: u64,
    kind: OperandKind,
    value: impl Fn(Register) -> u64,
) -> Option<Operand> {
    let mut decoder = Decoder::try_with_ip(bitness, bytes, rip, DecoderOptions::NONE).ok()?;
    let insn = decoder.decode();
    if insn.is_invalid() {
        return None;
    }
    let mut factory = InstructionInfoFactory::new();
    let memory = factory.info(&insn).used_memory();
    let (first, (load, store)) =
        memory
            .iter()
            .map(|one| (one, moves(one)))
            .find(|(_, (load, store))| match kind {
                OperandKind::Any => *load || *store,
                OperandKind::Load => *load,
                OperandKind::Store => *store,
            })?;
    if first.vsib_size() != 0 {
        return None;
    }
    let linear = first.virtual_address(0, |register, _, _| Some(value(register)))?;
    Some(Operand {
        linear: if bitness == 64 {
            linear
        } else {
            linear & 0xffff_ffff
        },
        bytes: u16::try_from(first.memory_size().size()).unwrap_or(0),
        load,
        store,
    })
}

/// Whether an access reads and writes; one on a condition counts as made.
fn moves(memory: &UsedMemory) -> (bool, bool) {
    match memory.access() {
        OpAccess::Read | OpAccess::CondRead => (true, false),
        OpAccess::Write | OpAccess::CondWrite => (false, true),
        OpAccess::ReadWrite | OpAccess::ReadCondWrite => (true, true),
        OpAccess::None | OpAccess::NoMemAccess => (false, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bytes: &[u8], expected: Option<(u64, u16, bool, bool)>) {
        check_kind(OperandKind::Any, bytes, expected);
    }

    fn check_kind(kind: OperandKind, bytes: &[u8], expected: Option<(u64, u16, bool, bool)>) {
        let value = |register: Register| match register {
            Register::RAX => 0x1000,
            Register::RCX => 0x20,
            Register::RSP => 0x8000,
            Register::RSI => 0x3000,
            Register::RDI => 0x4000,
            Register::GS => 0x7_0000,
            _ => 0,
        };
        let found = operand(bytes, 64, 0x100, kind, value);
        let expected = expected.map(|(linear, bytes, load, store)| Operand {
            linear,
            bytes,
            load,
            store,
        });
        assert_eq!(found, expected, "{kind:?} {bytes:x?}");
    }

    #[test]
    fn of_several_operands_the_kind_decides() {
        use OperandKind::{Load, Store};
        let push = [0xff, 0x30]; // PUSH [RAX]
        check_kind(Load, &push, Some((0x1000, 8, true, false)));
        check_kind(Store, &push, Some((0x7ff8, 8, false, true)));
        let movs = [0x48, 0xa5]; // MOVSQ
        check_kind(Load, &movs, Some((0x3000, 8, true, false)));
        check_kind(Store, &movs, Some((0x4000, 8, false, true)));
        let both = [0x48, 0x01, 0x08]; // ADD [RAX],RCX
        check_kind(Load, &both, Some((0x1000, 8, true, true)));
        check_kind(Store, &both, Some((0x1000, 8, true, true)));
        check_kind(Store, &[0x58], None); // POP RAX
        check_kind(Load, &[0x50], None); // PUSH RAX
    }

    #[test]
    fn addresses_are_those_of_the_registers() {
        check(&[0x90], None); // NOP
        check(&[0x48, 0x8d, 0x00], None); // LEA RAX,[RAX]
        check(&[0x8b, 0x04, 0x88], Some((0x1080, 4, true, false))); // MOV EAX,[RAX+RCX*4]
        check(&[0x88, 0x48, 0xff], Some((0xfff, 1, false, true))); // MOV [RAX-1],CL
        check(&[0x48, 0x01, 0x08], Some((0x1000, 8, true, true))); // ADD [RAX],RCX
        check(&[0x50], Some((0x7ff8, 8, false, true))); // PUSH RAX
        check(&[0x58], Some((0x8000, 8, true, false))); // POP RAX
        check(&[0xc3], Some((0x8000, 8, true, false))); // RET
        // MOV EAX,[RIP+0x10]: behind six bytes.
        check(&[0x8b, 0x05, 0x10, 0, 0, 0], Some((0x116, 4, true, false)));
        // MOV RAX,GS:[RAX]
        check(&[0x65, 0x48, 0x8b, 0x00], Some((0x7_1000, 8, true, false)));
        check(&[0x0f, 0x0b], None); // UD2
        check(&[0xff], None);
    }
}
