//! For how long a vCPU runs, and how that ends or fails.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use kvm_pmu::{KvmPmuError, Tsc, now};
use thiserror::Error;
use vmm_sys_util::errno;

use crate::devices::GuestEnd;
use crate::kvm::VcpuError;

/// Why a vCPU runs no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VcpuEnd {
    /// Somebody asked it to stop.
    Stopped,
    /// The guest ended the run.
    Guest(GuestEnd),
    TripleFault {
        /// Where, if KVM has kept it: on AMD hosts the state is gone by then.
        rip: Option<u64>,
    },
    /// KVM cannot go on; the text says what the guest did and what may help.
    Stuck(String),
    /// Emulator: all vCPUs have halted, and neither a timer nor anybody outside can wake one.
    Asleep,
    /// Emulator: CPUID announces something, or every processor has it, that is not there.
    Unimplemented {
        /// RIP of the instruction.
        rip: u64,
        /// What is lacking, and what to do.
        what: String,
    },
}

impl fmt::Display for VcpuEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stopped => f.write_str("stopped"),
            Self::Guest(end) => end.fmt(f),
            Self::TripleFault { rip: Some(rip) } => write!(f, "triple fault at RIP {rip:#x}"),
            Self::TripleFault { rip: None } => f.write_str("triple fault"),
            Self::Stuck(why) => f.write_str(why),
            Self::Asleep => f.write_str(
                "the guest sleeps for ever: all of its vCPUs have halted, and no timer runs and \
                 nobody is there who could wake one",
            ),
            Self::Unimplemented { rip, what } => write!(
                f,
                "at RIP {rip:#x} the guest needs what the engine emu lacks: {what}"
            ),
        }
    }
}

/// Why a vCPU's thread failed: the host's fault, not the guest's.
#[derive(Debug, Error)]
pub enum VcpuFailure {
    /// A vCPU ioctl failed.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// The PMU could not be served.
    #[error(transparent)]
    Pmu(#[from] KvmPmuError),
    /// The thread could not be kept on its host CPU.
    #[error("sched_setaffinity failed for host CPU {cpu}: {error}")]
    Pin { cpu: usize, error: errno::Error },
    /// A wait that a kick ends failed.
    #[error("a wait for a kick failed: {0}")]
    Wait(errno::Error),
    /// The signal that probes need could not be queued.
    #[error("a signal cannot be queued: {0} (limit of pending signals: `ulimit -i`)")]
    Signal(errno::Error),
}

impl VcpuFailure {
    /// A guest can lead KVM where its own checks fail; that ends the guest, and
    /// is no failure of ours.
    fn is_dead_machine(&self) -> bool {
        match self {
            Self::Vcpu(error) => error.is_dead(),
            Self::Pmu(error) => error.is_dead(),
            Self::Pin { .. } | Self::Wait(_) | Self::Signal(_) => false,
        }
    }
}

/// The end of a guest whose machine KVM has given up; other failures stay what
/// they are.
pub(super) fn dead_machine(failure: VcpuFailure) -> Result<VcpuEnd, VcpuFailure> {
    if failure.is_dead_machine() {
        Ok(VcpuEnd::Stuck(format!(
            "KVM has given this machine up ({failure}); the host's kernel log tells why"
        )))
    } else {
        Err(failure)
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
