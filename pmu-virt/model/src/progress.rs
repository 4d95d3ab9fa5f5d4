//! What the VMM tells a PMU about its vCPU.

use std::fmt;

use arbiter::{Ticks, Tsc};
use serde::{Deserialize, Serialize};

use crate::counts::EventTotals;
use crate::ids::Ring;
use crate::retirement::Retirement;

/// One thing that happened to the vCPU.
///
/// Control registers are written between `Left` and the next `Entered`: the
/// guest does not run while a trapped access is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The guest is about to run.
    Entered {
        /// TSC just before.
        tsc: Tsc,
    },
    /// The guest has stopped running.
    Left {
        /// TSC just after.
        tsc: Tsc,
        /// The part of the interval in which the vCPU did not run: it was halted,
        /// or the host ran something else.
        halted: Ticks,
        /// Ring in which it was found; to be told while the PMU
        /// needs it.
        ring: Option<Ring>,
    },
    /// One stepped instruction retired.
    Retired {
        /// Ring in which it executed.
        ring: Ring,
        /// What it did.
        insn: Retirement,
    },
    /// An exception or interrupt was delivered to the guest. AMD's branch
    /// events count deliveries too, Intel's do not.
    Delivered {
        /// Ring that was interrupted.
        ring: Ring,
    },
    /// A processor in software has executed: any number of instructions and deliveries, all
    /// of one ring. Counters that were started since it was entered last count none of it: the
    /// instruction that did so retires behind its exit.
    Executed {
        /// Ring in which they executed, or that the deliveries interrupted.
        ring: Ring,
        /// What they did.
        done: EventTotals,
    },
    /// Stepping missed instructions: counts are exact no longer.
    Lost {
        /// How they escaped.
        reason: LossReason,
    },
}

/// Why a count is no longer whole: how instructions escaped the stepper, or who cleared it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossReason {
    /// The guest ran without being stepped.
    NotStepped,
    /// An interrupt or exception handler was entered unseen.
    EventDelivery,
    /// SYSCALL, SYSENTER or a software interrupt cleared TF unseen.
    SystemCall,
    /// An instruction could not be fetched or decoded.
    Undecodable,
    /// This KVM cannot step the guest's present ring or mode.
    Unsupported,
    /// The counter was taken from its owner while it counted, and cleared.
    Taken,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LossReason::NotStepped => "the guest ran without being stepped",
            LossReason::EventDelivery => "an event handler was entered unseen",
            LossReason::SystemCall => "a system call was entered unseen",
            LossReason::Undecodable => "an instruction could not be decoded",
            LossReason::Unsupported => "this KVM cannot step the guest's ring or mode",
            LossReason::Taken => "the counter was taken away and cleared while it counted",
        })
    }
}
