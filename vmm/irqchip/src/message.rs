//! Messages on the bus of the APICs.

/// Who is addressed. Broadcast addresses are [`Destination::All`] already, since they depend
/// on who sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Destination {
    All,
    /// All but this CPU.
    AllBut(usize),
    /// This CPU alone.
    Itself(usize),
    /// APIC ID.
    Physical(u32),
    /// What is compared with LDR.
    Logical(u32),
}

/// What the addressed ones are to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Fixed(u8),
    /// [`Order::Fixed`] for the one that does the least important work.
    Lowest(u8),
    Smi,
    Nmi,
    Init,
    Startup(u8),
}

impl Order {
    /// Delivery mode, bits 10:8 of ICR, LVT and redirection entries. None is reserved, or
    /// asks an 8259 for its vector, and none of those answers here.
    pub(crate) fn of(mode: u32, vector: u8) -> Option<Self> {
        match mode & 7 {
            0 => Some(Self::Fixed(vector)),
            1 => Some(Self::Lowest(vector)),
            2 => Some(Self::Smi),
            4 => Some(Self::Nmi),
            5 => Some(Self::Init),
            6 => Some(Self::Startup(vector)),
            _ => None,
        }
    }
}

/// What TMR remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trigger {
    Edge,
    Level,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) destination: Destination,
    pub(crate) order: Order,
    pub(crate) trigger: Trigger,
}
