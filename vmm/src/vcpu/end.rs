//! How a vCPU's thread ends.

use std::fmt;

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
