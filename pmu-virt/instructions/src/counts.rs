//! What one instruction counts for, class by class.

use pmu_model::{MathUnit, Retirement};

/// A class of events that instructions cause, as the documentation of this crate defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventClass {
    /// Every instruction that retires.
    Instructions,
    /// Near and far ones, taken or not.
    Branches,
    /// Near and far, as AMD counts them.
    TakenBranches,
    /// Near ones alone, as Intel counts them.
    NearTakenBranches,
    /// Those that look at flags or a count; INTO is none.
    ConditionalBranches,
    /// Those that may change the code segment.
    FarBranches,
    /// Operands in memory that are read.
    Loads,
    /// Operands in memory that are written.
    Stores,
    /// Near calls.
    Calls,
    /// Near returns.
    Returns,
    /// x87, MMX and SSE.
    FloatingPoint,
    /// Instructions of the x87 stack.
    X87,
    /// Instructions of the MMX registers.
    Mmx,
    /// Instructions of the vector registers.
    Sse,
    /// String instructions, repeated or not: one each.
    Strings,
}

impl EventClass {
    /// Each of them, in the order of its number.
    pub const ALL: [EventClass; 15] = [
        EventClass::Instructions,
        EventClass::Branches,
        EventClass::TakenBranches,
        EventClass::NearTakenBranches,
        EventClass::ConditionalBranches,
        EventClass::FarBranches,
        EventClass::Loads,
        EventClass::Stores,
        EventClass::Calls,
        EventClass::Returns,
        EventClass::FloatingPoint,
        EventClass::X87,
        EventClass::Mmx,
        EventClass::Sse,
        EventClass::Strings,
    ];

    /// The number of classes.
    pub const COUNT: usize = EventClass::ALL.len();

    /// Events of this class that one instruction causes at most: a counter with `n` to go
    /// does not overflow before `n / most` instructions are over.
    #[must_use]
    pub const fn most(self) -> u8 {
        match self {
            // ENTER at nesting level 31 copies 30 frame pointers, and stores two more.
            EventClass::Loads => 30,
            EventClass::Stores => 32,
            _ => 1,
        }
    }
}

/// The events of one instruction in each class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventCounts([u8; EventClass::COUNT]);

impl EventCounts {
    /// Those of an instruction that did `insn`.
    #[must_use]
    pub fn of(insn: &Retirement) -> Self {
        let is = |unit| u8::from(insn.unit == Some(unit));
        // In the order of `EventClass::ALL`.
        EventCounts([
            1,
            insn.branch.into(),
            insn.taken.into(),
            (insn.taken && !insn.far).into(),
            insn.conditional.into(),
            insn.far.into(),
            insn.loads,
            insn.stores,
            insn.call.into(),
            insn.near_return.into(),
            insn.unit.is_some().into(),
            is(MathUnit::X87),
            is(MathUnit::Mmx),
            is(MathUnit::Sse),
            insn.string.into(),
        ])
    }

    /// The events of one class.
    #[inline]
    #[must_use]
    pub fn get(&self, class: EventClass) -> u8 {
        self.0[class as usize]
    }

    /// All of them, in the order of [`EventClass::ALL`]: for sums over instructions.
    #[inline]
    #[must_use]
    pub fn as_array(&self) -> &[u8; EventClass::COUNT] {
        &self.0
    }
}
