//! What instructions count for. The facts are those that stepping a guest counts by.

use iced_x86::{Instruction, InstructionInfoFactory};
use instruction_facts::{EventClass, InsnFacts};
use pmu_model::EventTotals;

/// Classes of events, and the deliveries behind them.
pub(crate) const LANES: usize = EventClass::COUNT + 1;

/// The lane of exceptions and interrupts that were delivered.
pub(crate) const DELIVERIES: usize = EventClass::COUNT;

/// What one operation counts for.
pub(crate) type Vector = [u8; LANES];

/// Adds what a run counted, in so many ticks.
pub(crate) fn add(totals: &mut EventTotals, lanes: &[u16; LANES], ticks: u64) {
    // The chunk is shorter than the lanes, and so there.
    if let Some(events) = lanes.first_chunk() {
        totals.add_events(events);
    }
    totals.add_deliveries(lanes[DELIVERIES].into());
    totals.add_ticks(ticks);
}

/// What an instruction counts for when it retires, a conditional branch if it falls through.
pub(crate) fn vector(insn: &Instruction, factory: &mut InstructionInfoFactory) -> Vector {
    let events = InsnFacts::of(insn, factory).events();
    let mut vector = Vector::default();
    vector[..EventClass::COUNT].copy_from_slice(events.as_array());
    vector
}
