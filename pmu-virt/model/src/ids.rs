//! Small identifiers: MSR indices, vendors, rings, backend slots.

use std::fmt;

/// Index of a model-specific register, as in ECX of RDMSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MsrIndex(pub u32);

impl fmt::Display for MsrIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MSR {:#x}", self.0)
    }
}

/// Whose architecture a PMU follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// Intel architectural performance monitoring.
    Intel,
    /// AMD core performance counters.
    Amd,
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Vendor::Intel => "Intel",
            Vendor::Amd => "AMD",
        })
    }
}

/// The privilege level that a counter's OS and USR bits tell apart.
///
/// OS stands for CPL 0 alone; USR for CPL 1, 2 and 3 (SDM vol. 3B,
/// "Architectural Performance Monitoring Version 1", USR and OS flags;
/// APM vol. 2, section 13.2.1, `PERF_CTL` OS and USR bits).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ring {
    /// CPL 0.
    Kernel,
    /// CPL 1, 2 or 3.
    User,
}

impl Ring {
    /// The ring of a current privilege level; only the low two bits count, as
    /// in a selector.
    #[inline]
    pub fn from_cpl(cpl: u8) -> Self {
        match cpl & 3 {
            0 => Ring::Kernel,
            _ => Ring::User,
        }
    }
}

/// Whose counters: a vCPU, by a number that no other vCPU on its cores has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerId(pub u32);

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {}", self.0)
    }
}

/// Names a context of the machine, by which a tool of the host counts; no other one has the
/// same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContextId(pub u32);

impl fmt::Display for ContextId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "context {}", self.0)
    }
}

/// A physical counter of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(pub u8);

/// A set of backend slots, 0 to 127.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SlotSet(u128);

impl SlotSet {
    /// The set without members.
    pub const EMPTY: SlotSet = SlotSet(0);

    /// Slots that a set can hold: indices 0 to 127.
    pub const CAPACITY: u8 = 128;

    /// The slots below `count`, all of them from 128 on.
    #[inline]
    pub const fn below(count: usize) -> Self {
        if count >= 128 {
            SlotSet(u128::MAX)
        } else {
            SlotSet((1 << count) - 1)
        }
    }

    /// The set of one slot.
    #[must_use]
    #[inline]
    pub fn of(slot: SlotIndex) -> Self {
        let mut set = SlotSet::EMPTY;
        set.insert(slot);
        set
    }

    /// Adds a slot; true if it was no member. An index above 127 cannot be one, and changes
    /// nothing.
    #[inline]
    pub fn insert(&mut self, slot: SlotIndex) -> bool {
        let before = self.0;
        if slot.0 < SlotSet::CAPACITY {
            self.0 |= 1 << slot.0;
        }
        self.0 != before
    }

    /// Takes a slot out; true if it was a member.
    #[inline]
    pub fn remove(&mut self, slot: SlotIndex) -> bool {
        let before = self.0;
        if slot.0 < SlotSet::CAPACITY {
            self.0 &= !(1 << slot.0);
        }
        self.0 != before
    }

    /// Whether `slot` is a member.
    #[inline]
    pub fn contains(self, slot: SlotIndex) -> bool {
        slot.0 < SlotSet::CAPACITY && self.0 & (1 << slot.0) != 0
    }

    /// Whether there is no member.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of members.
    #[inline]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// The members of either set.
    #[must_use]
    #[inline]
    pub fn union(self, other: SlotSet) -> Self {
        SlotSet(self.0 | other.0)
    }

    /// The members of both sets.
    #[must_use]
    #[inline]
    pub fn intersection(self, other: SlotSet) -> Self {
        SlotSet(self.0 & other.0)
    }

    /// The members that are not in `other`.
    #[must_use]
    #[inline]
    pub fn difference(self, other: SlotSet) -> Self {
        SlotSet(self.0 & !other.0)
    }

    /// The members with each index moved up by `by`; what goes above 127 is
    /// dropped.
    #[must_use]
    pub fn shifted_up(self, by: u8) -> Self {
        SlotSet(self.0.checked_shl(by.into()).unwrap_or(0))
    }

    /// The members with each index moved down by `by`; what goes below 0 is
    /// dropped.
    #[must_use]
    pub fn shifted_down(self, by: u8) -> Self {
        SlotSet(self.0.checked_shr(by.into()).unwrap_or(0))
    }

    /// The members in ascending order.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = SlotIndex> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let lowest = u8::try_from(rest.trailing_zeros()).ok()?;
            rest &= rest.checked_sub(1)?;
            Some(SlotIndex(lowest))
        })
    }
}

impl FromIterator<SlotIndex> for SlotSet {
    fn from_iter<I: IntoIterator<Item = SlotIndex>>(slots: I) -> Self {
        let mut set = SlotSet::EMPTY;
        for slot in slots {
            set.insert(slot);
        }
        set
    }
}

impl fmt::Display for SlotSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let noun = if self.len() == 1 { "slot" } else { "slots" };
        let slots = crate::text::list(self.iter().map(|slot| slot.0));
        write!(f, "{noun} {slots}")
    }
}

/// A mask of the lowest `bits` bits.
#[inline]
pub const fn low_bits(bits: u8) -> u64 {
    if bits >= 64 {
        u64::MAX
    } else {
        (1 << bits) - 1
    }
}
