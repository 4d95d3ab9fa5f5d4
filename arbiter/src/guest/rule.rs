//! The rule in which the arbiters differ: when a counter is locked.

/// The rule, with what it keeps beside.
pub trait LockRule: Default {
    /// Whether a counter is locked while not both of its registers are reserved; else it is
    /// always open.
    const LOCKS: bool;
}
