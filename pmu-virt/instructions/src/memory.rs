//! Memory operands that an instruction accesses.

use iced_x86::{Instruction, InstructionInfo, Mnemonic, OpAccess, Register, UsedMemory};

/// Sums over the memory operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Accesses {
    pub(crate) loads: u8,
    pub(crate) stores: u8,
    /// Some access goes through the stack segment.
    pub(crate) stack: bool,
    /// One of them has more than RSP or RBP and a displacement in its address.
    pub(crate) far_stack: bool,
    /// Some access goes through another segment.
    pub(crate) data: bool,
}

/// Counts reads and writes of memory, implicit ones included. An access that
/// the instruction makes only on a condition (CMPXCHG's store, a masked move)
/// counts as made: the processor performs it or may. Instructions that manage
/// cache lines are checked like loads, and load nothing.
pub(crate) fn accesses(insn: &Instruction, info: &InstructionInfo) -> Accesses {
    let mut sums = Accesses::default();
    let moves_no_data = matches!(
        insn.mnemonic(),
        Mnemonic::Clflush | Mnemonic::Clflushopt | Mnemonic::Clwb | Mnemonic::Cldemote
    );
    for memory in info.used_memory() {
        let (load, store) = match memory.access() {
            OpAccess::Read | OpAccess::CondRead => (1, 0),
            OpAccess::Write | OpAccess::CondWrite => (0, 1),
            OpAccess::ReadWrite | OpAccess::ReadCondWrite => (1, 1),
            OpAccess::None | OpAccess::NoMemAccess => (0, 0),
        };
        if !moves_no_data {
            sums.loads = sums.loads.saturating_add(load);
            sums.stores = sums.stores.saturating_add(store);
        }
        if load + store > 0 {
            let stack = memory.segment() == Register::SS;
            sums.stack |= stack;
            sums.far_stack |= stack && !is_near_frame(memory);
            sums.data |= !stack;
        }
    }
    sums
}

fn is_near_frame(memory: &UsedMemory) -> bool {
    let base = memory.base().full_register();
    matches!(base, Register::RSP | Register::RBP) && memory.index() == Register::None
}
