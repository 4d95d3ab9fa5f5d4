//! For how long a vCPU runs, and how that ends.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use kvm_pmu::{Tsc, now};

use crate::devices::GuestEnd;

/// Why a vCPU runs no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VcpuEnd {
    /// Somebody asked it to stop.
    Stopped,
    /// The guest ended the run.
    Guest(GuestEnd),
    /// A triple fault.
    TripleFault {
        /// Where, if KVM has kept it: on AMD hosts the state is gone by then.
        rip: Option<u64>,
    },
    /// KVM cannot go on; the text says what the guest did and what may help.
    Stuck(String),
}

impl fmt::Display for VcpuEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stopped => f.write_str("stopped"),
            Self::Guest(end) => end.fmt(f),
            Self::TripleFault { rip: Some(rip) } => write!(f, "triple fault at RIP {rip:#x}"),
            Self::TripleFault { rip: None } => f.write_str("triple fault"),
            Self::Stuck(why) => f.write_str(why),
        }
    }
}

/// What a vCPU does while it is not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runnability {
    /// It could run.
    Runnable,
    /// It waits for an interrupt or a start-up IPI.
    Idle,
    /// It could run, and may not before this instant.
    LockedOut {
        /// When.
        until: Tsc,
    },
    /// It could run, and may not before somebody says so: a tool's context blocks
    /// it until PFM_RESTART.
    Blocked,
}

/// When a vCPU has to leave the core.
#[derive(Debug, Clone, Copy)]
pub struct Timeslice<'a> {
    /// At the latest then; `None`: nobody else needs the core.
    pub until: Option<Tsc>,
    /// Set, and the thread kicked, when the core has something else to do.
    pub attention: &'a AtomicBool,
}

impl Timeslice<'_> {
    pub(super) fn is_over(&self) -> bool {
        self.attention.load(Ordering::Acquire) || self.until.is_some_and(|until| now() >= until)
    }
}

/// How a timeslice ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunOutcome {
    /// With the vCPU.
    Ended(VcpuEnd),
    /// With the timeslice.
    Paused(Runnability),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeslice_is_over_at_its_time_or_when_asked() {
        let attention = AtomicBool::new(false);
        let timeslice = |until| Timeslice {
            until,
            attention: &attention,
        };
        assert!(!timeslice(None).is_over());
        assert!(!timeslice(Some(Tsc::NEVER)).is_over());
        assert!(timeslice(Some(now())).is_over());
        attention.store(true, Ordering::Release);
        assert!(timeslice(None).is_over());
    }
}
