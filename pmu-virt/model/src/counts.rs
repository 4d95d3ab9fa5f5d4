//! What instructions count for, class by class: one of them, or any number.

use std::ops::AddAssign;

use crate::retirement::{MathUnit, Retirement};

/// A class of events that instructions cause. What is one of them, the documentation of the
/// crate `instruction-facts` says.
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

/// What a processor did in one ring, summed over any number of instructions: what
/// [`Progress::Executed`](crate::Progress::Executed) tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventTotals {
    classes: [u64; EventClass::COUNT],
    deliveries: u64,
    ticks: u64,
}

impl EventTotals {
    /// Those of an exception or interrupt that was delivered.
    pub const DELIVERY: EventTotals = EventTotals {
        classes: [0; EventClass::COUNT],
        deliveries: 1,
        ticks: 0,
    };

    /// How many there were of a class.
    #[inline]
    #[must_use]
    pub fn of(&self, class: EventClass) -> u64 {
        self.classes[class as usize]
    }

    /// Exceptions and interrupts that were delivered, those of INT n and its like left out.
    #[inline]
    #[must_use]
    pub fn deliveries(&self) -> u64 {
        self.deliveries
    }

    /// Ticks of virtual time in which the processor executed; 0 from who knows no such time.
    #[inline]
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.ticks
    }

    /// The same and so many more of a class.
    #[must_use]
    pub fn with(mut self, class: EventClass, events: u64) -> Self {
        self.classes[class as usize] += events;
        self
    }

    /// Adds events, in the order of [`EventClass::ALL`].
    #[inline]
    pub fn add_events(&mut self, events: &[u16; EventClass::COUNT]) {
        for (sum, events) in self.classes.iter_mut().zip(events) {
            *sum += u64::from(*events);
        }
    }

    /// Adds deliveries.
    #[inline]
    pub fn add_deliveries(&mut self, deliveries: u64) {
        self.deliveries += deliveries;
    }

    /// Adds ticks.
    #[inline]
    pub fn add_ticks(&mut self, ticks: u64) {
        self.ticks += ticks;
    }
}

impl From<EventCounts> for EventTotals {
    fn from(one: EventCounts) -> Self {
        EventTotals {
            classes: one.0.map(u64::from),
            ..EventTotals::default()
        }
    }
}

impl AddAssign for EventTotals {
    fn add_assign(&mut self, more: EventTotals) {
        for (sum, more) in self.classes.iter_mut().zip(more.classes) {
            *sum += more;
        }
        self.deliveries += more.deliveries;
        self.ticks += more.ticks;
    }
}
