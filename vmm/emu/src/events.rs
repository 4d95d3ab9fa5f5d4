//! What instructions count for. The facts are those that stepping a guest counts by.

use iced_x86::{Instruction, InstructionInfoFactory};
use instruction_facts::{EventClass, InsnFacts};

/// Classes of events, and the deliveries behind them.
pub(crate) const LANES: usize = EventClass::COUNT + 1;

/// The lane of exceptions and interrupts that were delivered.
pub(crate) const DELIVERIES: usize = EventClass::COUNT;

/// What one operation counts for.
pub(crate) type Vector = [u8; LANES];

/// Sums of events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventTotals([u64; LANES]);

impl EventTotals {
    /// How many there were of a class.
    #[must_use]
    pub fn of(&self, class: EventClass) -> u64 {
        self.0[class as usize]
    }

    /// Exceptions and interrupts that were delivered, those of INT n and its like left out.
    #[must_use]
    pub fn deliveries(&self) -> u64 {
        self.0[DELIVERIES]
    }

    pub(crate) fn add(&mut self, lanes: &[u16; LANES]) {
        for (sum, lane) in self.0.iter_mut().zip(lanes) {
            *sum += u64::from(*lane);
        }
    }
}

/// What an instruction counts for when it retires, a conditional branch if it falls through.
pub(crate) fn vector(insn: &Instruction, factory: &mut InstructionInfoFactory) -> Vector {
    let events = InsnFacts::of(insn, factory).events();
    let mut vector = Vector::default();
    vector[..EventClass::COUNT].copy_from_slice(events.as_array());
    vector
}
