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
    pub fn from_cpl(cpl: u8) -> Self {
        match cpl & 3 {
            0 => Ring::Kernel,
            _ => Ring::User,
        }
    }
}

/// A physical counter of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(pub u8);

/// A set of backend slots, 0 to 63.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotSet(u64);

impl SlotSet {
    /// The set without members.
    pub const EMPTY: SlotSet = SlotSet(0);

    /// Adds a slot. An index above 63 cannot be a member and changes nothing.
    pub fn insert(&mut self, slot: SlotIndex) {
        if slot.0 < 64 {
            self.0 |= 1 << slot.0;
        }
    }

    /// Takes a slot out.
    pub fn remove(&mut self, slot: SlotIndex) {
        if slot.0 < 64 {
            self.0 &= !(1 << slot.0);
        }
    }

    /// Whether `slot` is a member.
    pub fn contains(self, slot: SlotIndex) -> bool {
        slot.0 < 64 && self.0 & (1 << slot.0) != 0
    }

    /// Whether there is no member.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}
