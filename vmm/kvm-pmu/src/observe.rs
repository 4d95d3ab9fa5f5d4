//! What the crate reports of its work. It prints nothing itself.

use std::fmt::{self, Debug};

#[cfg(feature = "contexts")]
use kvm_bindings::{kvm_regs, kvm_sregs};
#[cfg(feature = "contexts")]
use pmu_virt::perfmon::{Quantities, VirtualPmd, Wish};
use pmu_virt::{MsrIndex, PmiDelivery, PmiRequest, ReadOutcome, Ring, Tsc, WriteOutcome};

use crate::error::VcpuId;
use crate::trap::PatchRefusal;

/// How RDPMC is trapped on a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    /// The guest's #GP handler is patched.
    Patch,
    /// A breakpoint is on it; why it is not patched, if that was to be.
    Breakpoint(Option<PatchRefusal>),
    /// Not at all: RDPMC raises #GP.
    Nothing,
}

impl fmt::Display for Armed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Patch => f.write_str("RDPMC is trapped by a patch of the #GP handler"),
            Self::Breakpoint(None) => f.write_str("RDPMC is trapped by a breakpoint"),
            Self::Breakpoint(Some(reason)) => {
                write!(f, "RDPMC is trapped by a breakpoint: {reason}")
            }
            Self::Nothing => f.write_str("RDPMC is not trapped"),
        }
    }
}

/// One thing that happened on the trap path.
#[derive(Debug, Clone, PartialEq)]
pub enum TrapEvent {
    /// RDMSR of a PMU register.
    MsrRead {
        /// ECX.
        msr: MsrIndex,
        /// What the guest got.
        outcome: ReadOutcome,
    },
    /// WRMSR of a PMU register.
    MsrWrite {
        /// ECX.
        msr: MsrIndex,
        /// EDX:EAX.
        value: u64,
        /// What the guest got.
        outcome: WriteOutcome,
    },
    /// RDMSR or WRMSR of a register whose value is a secret: a cookie, or random
    /// bits that may become one. The value is not reported.
    Secret {
        /// ECX.
        msr: MsrIndex,
        /// It was a WRMSR.
        write: bool,
        /// The guest got a #GP.
        gp: bool,
    },
    /// The vCPU has presented too many wrong cookies and is kept off its core.
    LockedOut {
        /// Until when.
        until: Tsc,
    },
    /// A notice of the reservations raised an interrupt, or could not.
    Notice {
        vector: u8,
        /// It was sent; false if the local APIC is off or has lost its ID.
        sent: bool,
    },
    /// A legal RDPMC.
    Rdpmc {
        /// ECX.
        index: u32,
        /// Where it was executed.
        ring: Ring,
        /// What the guest got.
        outcome: ReadOutcome,
    },
    /// From now on RDPMC is trapped in this way.
    Armed(Armed),
    /// The guest has written to a page with a patched handler, which is patched no
    /// more.
    HandlerWritten,
    /// A #GP that was none of ours went on to the guest's handler.
    ForeignGp,
    /// The guest's own #DB was handed back to it.
    GuestDebug {
        /// The cause bits of DR6.
        dr6: u64,
    },
    /// The guest uses all four debug registers: its RDPMC will fault.
    DebugRegistersFull,
    /// Counters overflowed and a PMI was sent, or could not be.
    Pmi {
        /// Which counters.
        request: PmiRequest,
        /// Where it went.
        delivery: PmiDelivery,
        /// When the guest had to be interrupted for the first of
        /// them, as far as the counter backend knew it when the guest was
        /// entered.
        due: Option<Tsc>,
    },
    /// A PMI is held back by the throttle.
    PmiLate,
}

/// Receives a vCPU's reports, on its thread. Every method does nothing by itself.
pub trait TrapObserver: Debug {
    /// One event. Must not block: the guest waits.
    fn event(&mut self, vcpu: VcpuId, event: TrapEvent) {
        let _ = (vcpu, event);
    }

    /// The vCPU has stopped and is to be sampled, with what `wish` says of the guest's
    /// memory. What is found there, [`quantities`](Self::quantities) has as
    /// [`Quantities::guest`]. `tsc` reads the guest's TSC. Must not block.
    #[cfg(feature = "contexts")]
    fn look(
        &mut self,
        vcpu: VcpuId,
        wish: Wish,
        (regs, sregs): (&kvm_regs, &kvm_sregs),
        tsc: &dyn Fn() -> Option<u64>,
    ) {
        let _ = (vcpu, wish, regs, sregs, tsc);
    }

    /// What the VMM counts of the vCPU, for samples that record it.
    #[cfg(feature = "contexts")]
    fn quantities(&self) -> &dyn Quantities {
        &NoQuantities
    }
}

/// A VMM that counts nothing.
#[cfg(feature = "contexts")]
struct NoQuantities;

#[cfg(feature = "contexts")]
impl Quantities for NoQuantities {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }
}

/// Drops every report.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl TrapObserver for NoObserver {}
