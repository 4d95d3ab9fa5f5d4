//! `emu`: what a processor in software executed.

use super::instructions::{InstructionBackend, Watcher};

/// Counts what a processor in software has told it to have executed.
///
/// It executes as many instructions at once as [`horizon`](super::CounterBackend::horizon)
/// allows, so that an overflow is noticed behind the very instruction that completed it.
pub type EmuBackend = InstructionBackend<Emulator>;

/// What a processor in software, which has no clock, counts as cycles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmuCycles {
    /// Nothing: core cycles and reference cycles are unavailable.
    #[default]
    Unavailable,
    /// Ticks of its virtual time, labelled simulated: one an instruction, more for a PAUSE and
    /// some others, none while it is halted.
    Simulated,
}

/// A processor in software.
#[derive(Debug)]
pub struct Emulator {
    cycles: EmuCycles,
}

impl Watcher for Emulator {
    const NAME: &'static str = "emu";
    const STEPS: bool = false;

    fn is_blind_to_users(&self) -> bool {
        false
    }

    fn lends_ticks(&self) -> bool {
        self.cycles == EmuCycles::Simulated
    }
}

impl EmuBackend {
    /// A backend with all counters free.
    pub fn new(cycles: EmuCycles) -> Self {
        InstructionBackend::of(Emulator { cycles })
    }
}
