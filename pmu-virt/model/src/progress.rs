//! What the VMM tells a PMU about its vCPU.

use std::fmt;

use arbiter::{Ticks, Tsc};
use serde::{Deserialize, Serialize};

use crate::counts::EventTotals;
use crate::ids::Ring;

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
    /// of one ring.
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

/// What one retired instruction counts for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retirement {
    /// It is a branch, near or far.
    pub branch: bool,
    /// It is a branch that was taken.
    pub taken: bool,
    /// It is a conditional branch: Jcc, LOOP or JCXZ.
    pub conditional: bool,
    /// It is a far branch.
    pub far: bool,
    /// Memory operands it read.
    pub loads: u8,
    /// Memory operands it wrote.
    pub stores: u8,
    /// It is a near call.
    pub call: bool,
    /// It is a near return.
    pub near_return: bool,
    /// It is a string instruction.
    pub string: bool,
    /// The unit that it used, beyond the integer ones.
    pub unit: Option<MathUnit>,
}

/// What AMD's event 0CBh tells instructions apart by (Family 10h BKDG and
/// later, "Retired MMX/FP Instructions").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MathUnit {
    /// The x87 stack.
    X87,
    /// MMX and 3DNow!.
    Mmx,
    /// SSE and AVX, with what came after them for the same registers.
    Sse,
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
