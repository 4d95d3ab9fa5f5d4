//! How often execution was not the dispatch of an operation: for measurements, no part of a state.

/// Times that something took the slow path since the processor was made. What of it happens
/// depends on what is decoded and translated already, and so on budgets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlowPath {
    /// Instructions that are executed from their decoded form.
    pub handlers: u64,
    /// Loads and stores whose page was not known, that lie across two, or that are watched.
    pub accesses: u64,
    /// Walks of page tables.
    pub walks: u64,
    /// Blocks that were not found by a jump before.
    pub lookups: u64,
    /// Blocks that were decoded.
    pub decoded: u64,
    /// Instructions that were executed alone: in a shadow, under TF or a breakpoint, behind an
    /// answer, or that write to code.
    pub alone: u64,
}
