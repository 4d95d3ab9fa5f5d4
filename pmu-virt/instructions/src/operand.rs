//! Where an instruction accesses memory.

use iced_x86::{
    Instruction, InstructionInfoFactory, InstructionInfoOptions, OpAccess, Register, UsedMemory,
};

use crate::classify::is_64_bit;

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

/// The registers that addresses are made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressRegisters {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub general: [u64; 16],
    /// Bases of ES, CS, SS, DS, FS and GS; in 64-bit mode those of the first four count as 0.
    pub bases: [u64; 6],
}

impl AddressRegisters {
    fn value(&self, register: Register, flat: bool) -> u64 {
        if register.is_segment_register() {
            let segment = register.number();
            let base = self.bases.get(segment).copied().unwrap_or(0);
            return if flat && segment < FS { 0 } else { base };
        }
        let full = register.full_register();
        if !full.is_gpr() {
            return 0;
        }
        let value = self.general[full.number()];
        match (register.size(), register) {
            (1, Register::AH | Register::CH | Register::DH | Register::BH) => value >> 8 & 0xff,
            (1, _) => value & 0xff,
            (2, _) => value & 0xffff,
            (4, _) => value & 0xffff_ffff,
            _ => value,
        }
    }
}

/// Number of FS among the segment registers.
const FS: usize = 4;

/// The memory operand of `kind` of an instruction, with the registers that it found. `None`
/// if there is none, or what it accesses depends on more than these (gathers).
pub fn operand(
    insn: &Instruction,
    kind: OperandKind,
    registers: &AddressRegisters,
    factory: &mut InstructionInfoFactory,
) -> Option<Operand> {
    let info = factory.info_options(insn, InstructionInfoOptions::NO_REGISTER_USAGE);
    let mut operands = info.used_memory().iter().map(|one| (one, moves(one)));
    let (first, (load, store)) = operands.find(|(_, (load, store))| match kind {
        OperandKind::Any => *load || *store,
        OperandKind::Load => *load,
        OperandKind::Store => *store,
    })?;
    if first.vsib_size() != 0 {
        return None;
    }
    let flat = is_64_bit(insn);
    let linear =
        first.virtual_address(0, |register, _, _| Some(registers.value(register, flat)))?;
    Some(Operand {
        linear: if flat { linear } else { linear & 0xffff_ffff },
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
