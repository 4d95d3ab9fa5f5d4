//! What one KVM or another cannot run, and why: the only reasons for which a
//! micro-guest test is skipped.

use vmm::probe::ProbeReport;

/// Tests that a kind of host cannot run.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// True on such a host.
    pub applies: fn(&ProbeReport) -> bool,
    /// Why.
    pub reason: &'static str,
    /// Names of the tests.
    pub tests: &'static [&'static str],
}

/// Every limit.
pub const LIMITS: &[Limit] = &[];
