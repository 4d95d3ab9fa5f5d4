//! What this host's KVM really does, found by running tiny guests.
//!
//! Capabilities say what an ioctl accepts. Whether a breakpoint fires, whether
//! RDPMC faults, or whether CPL 0 runs in an instruction emulator, only a guest
//! can tell.
//!
//! What they find depends on host, kernel and module alone: it can be saved, and used by a VMM
//! that may make no VM of its own any more.

mod guests;
mod runner;

use std::os::fd::{AsFd, BorrowedFd};

use kvm_bindings::{
    KVM_CAP_MULTI_ADDRESS_SPACE, KVM_CAP_SET_GUEST_DEBUG2, KVM_CAP_X86_SMM, KVM_GUESTDBG_BLOCKIRQ,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::debug::DebugQuirks;
use crate::error::{DescriptorError, Errno, KickError, VcpuError};
use crate::step_driver::StepSupport;
use crate::sys::{BareVmError, SharedError, ioctl};
use crate::trap::PatchRefusal;
use crate::vm::SetupError;
use crate::vm_traps::{TrapMode, TrapPlan};

/// CPL 0 that is this many times slower than CPL 3 runs in an emulator.
const EMULATOR_RATIO: u64 = 10;

/// How a guest's RDPMC ends on a KVM whose vPMU is absent or switched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RdpmcBehaviour {
    /// #GP(0): Umpire emulates it.
    Faults,
    /// It reads 0 and goes on: a guest cannot tell that from a real count.
    SilentZero,
    /// It reads something: a vPMU answers that could not be switched off.
    Answered,
    /// The probe ended otherwise.
    Unknown,
}

/// Where the #DB of a guest's own single step goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestStep {
    /// To the guest's handler.
    ToGuest,
    /// To us, with BS in DR6; we hand it back.
    ToUs,
    /// Nowhere.
    Lost,
}

/// What becomes of an OUT in the place of the first instruction of a #GP handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HandlerOut {
    /// It comes to us, with RIP at it.
    At,
    /// It comes to us, with RIP behind it.
    Behind,
    /// It does not come to us, or the guest cannot go on.
    Unnoticed,
}

/// What becomes of a guest's store to a page that is read-only in KVM's mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProtectedStore {
    /// It comes to us as a store to a device, which we do.
    Mmio,
    /// It comes to us as a fault, and takes place when the guest runs on.
    Fault,
    /// It does not come to us, or not as one of these.
    Unnoticed,
}

/// What the probes found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "a report: each is one independent finding"
)]
pub struct ProbeReport {
    /// Time of a two-instruction loop at CPL 0, in picoseconds an instruction.
    pub cpl0_ps_per_instruction: u64,
    /// Time of a two-instruction loop at CPL 3, in picoseconds an instruction.
    pub cpl3_ps_per_instruction: u64,
    /// RDPMC at CPL 0.
    pub rdpmc: RdpmcBehaviour,
    /// Single step works at CPL 0.
    pub step_cpl0: bool,
    /// Single step works at CPL 3.
    pub step_cpl3: bool,
    /// A step over an MFENCE at CPL 0 stops right behind it.
    pub step_fence: bool,
    /// Execution breakpoints work at CPL 0.
    pub breakpoint_cpl0: bool,
    /// Execution breakpoints work at CPL 3.
    pub breakpoint_cpl3: bool,
    /// RF, set by `KVM_SET_REGS`, steps over a breakpoint at CPL 0.
    pub rf_honoured: bool,
    /// DR7.GD reports the guest's accesses to its debug registers.
    pub dr_access_trap: bool,
    /// An OUT in the place of the #GP handler's first instruction.
    pub handler_out: HandlerOut,
    /// A store at CPL 0 to a page that is read-only in KVM's mapping.
    pub protected_store_cpl0: ProtectedStore,
    /// Such a store at CPL 3.
    pub protected_store_cpl3: ProtectedStore,
    /// KVM accepts `KVM_GUESTDBG_BLOCKIRQ`.
    pub block_irq: bool,
    /// System management mode: an SMI leads to its handler, and KVM marks an exit
    /// from there.
    pub smm: bool,
    /// Where the #DB goes of a guest that single-steps its own program by TF,
    /// as ptrace does.
    pub guest_step: GuestStep,
    /// Where the #DB of a guest's own single step goes while breakpoints of ours are
    /// in use.
    pub guest_step_beside_ours: GuestStep,
    /// While a breakpoint of ours is in use, the guest's own one on execution at CPL
    /// 0 leads to its handler.
    pub guest_breakpoint_beside_ours: bool,
}

/// The probes' guests could not be run.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// There is no KVM, or this user may not use it.
    #[error("probe: /dev/kvm cannot be opened: {0}")]
    Open(Errno),
    #[error("probe: {0} failed: {1}")]
    Ioctl(&'static str, Errno),
    #[error("probe: no memory for a guest: {0}")]
    Memory(Errno),
    #[error("probe: no memory for a guest: {0}")]
    Slot(#[from] SharedError),
    /// KVM's own vPMU stays.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The process has no more descriptors or mappings.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// The kick signal, or the timer for guests that hang.
    #[error("probe: kicks cannot be set up: {0}")]
    Kicks(Errno),
    /// A kick would not end a guest that hangs.
    #[error("probe: a guest that hangs would never be left: {0}")]
    Kick(#[from] KickError),
}

impl From<BareVmError> for ProbeError {
    fn from(error: BareVmError) -> Self {
        match error {
            BareVmError::Ioctl(call, error) => Self::Ioctl(call, error),
            BareVmError::File(error) => Self::Memory(error),
            BareVmError::Slot(error) => Self::Slot(error),
        }
    }
}

/// Why a guest with a virtual PMU cannot run on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum HostRefusal {
    /// [`RdpmcBehaviour::SilentZero`].
    #[error(
        "RDPMC returns 0 without a fault on this KVM (known of kvm_amd before Linux 6.2 without a \
         vPMU): a guest would read counts that nobody took; use a newer host kernel"
    )]
    SilentZero,
    /// [`RdpmcBehaviour::Answered`].
    #[error(
        "RDPMC is answered by a vPMU of KVM that could not be switched off; load the module with \
         enable_pmu=0 (kvm) or pmu=0"
    )]
    Answered,
    /// [`RdpmcBehaviour::Unknown`].
    #[error("the RDPMC probe guest ended in an unknown way")]
    Unknown,
    /// RDPMC faults, and nothing stops at the handler.
    #[error(
        "neither a patch nor a hardware breakpoint at CPL 0 works on this KVM, so RDPMC cannot be \
         emulated"
    )]
    NoTrap,
}

/// What this host's KVM really does, found by throw-away VMs in some ten milliseconds: before any
/// sandbox, for it opens `/dev/kvm`, makes VMs, and kicks its own thread
/// ([`install_kick_handler`](crate::install_kick_handler), so a VMM with a signal or a handler of
/// its own chooses, and installs, before). The thread must not block the signal.
///
/// # Errors
/// [`ProbeError`]: the guests could not be run. What they found against a virtual PMU,
/// [`ProbeReport::obstacle`] says.
pub fn probe() -> Result<ProbeReport, ProbeError> {
    let kvm = ioctl::open_kvm().map_err(ProbeError::Open)?;
    ProbeReport::gather(&Host::new(kvm.as_fd()))
}

/// An open `/dev/kvm`.
struct Host<'a> {
    kvm: BorrowedFd<'a>,
    /// System management mode, with memory of its own.
    smm: bool,
    /// `KVM_GUESTDBG_BLOCKIRQ`.
    block_irq: bool,
}

impl<'a> Host<'a> {
    fn new(kvm: BorrowedFd<'a>) -> Self {
        let has = |cap: u32| ioctl::call(kvm, ioctl::CHECK_EXTENSION, cap.into()).unwrap_or(0);
        let debug = u32::try_from(has(KVM_CAP_SET_GUEST_DEBUG2)).unwrap_or(0);
        Self {
            kvm,
            smm: has(KVM_CAP_X86_SMM) > 0 && has(KVM_CAP_MULTI_ADDRESS_SPACE) > 1,
            block_irq: debug & KVM_GUESTDBG_BLOCKIRQ != 0,
        }
    }

    fn kvm(&self) -> BorrowedFd<'a> {
        self.kvm
    }

    fn has_smm(&self) -> bool {
        self.smm
    }
}

impl ProbeReport {
    fn gather(host: &Host<'_>) -> Result<Self, ProbeError> {
        Ok(Self {
            cpl0_ps_per_instruction: guests::loop_time(host, 0)?,
            cpl3_ps_per_instruction: guests::loop_time(host, 3)?,
            rdpmc: guests::rdpmc(host)?,
            step_cpl0: guests::step(host, 0)?,
            step_cpl3: guests::step(host, 3)?,
            step_fence: guests::step_fence(host)?,
            breakpoint_cpl0: guests::breakpoint(host, 0)?,
            breakpoint_cpl3: guests::breakpoint(host, 3)?,
            rf_honoured: guests::resume_flag(host)?,
            dr_access_trap: guests::dr_access(host)?,
            smm: guests::smm(host)?,
            handler_out: guests::handler_out(host)?,
            protected_store_cpl0: guests::protected_store(host, 0)?,
            protected_store_cpl3: guests::protected_store(host, 3)?,
            block_irq: host.block_irq,
            guest_step: guests::guest_step(host, false)?,
            guest_step_beside_ours: guests::guest_step(host, true)?,
            guest_breakpoint_beside_ours: guests::guest_breakpoint(host)?,
        })
    }

    /// True if guest CPL 0 runs in KVM's instruction emulator: loops there are
    /// hundreds of times slower than at CPL 3, and rare instructions fail.
    #[must_use]
    pub fn slow_cpl0(&self) -> bool {
        self.cpl0_ps_per_instruction / EMULATOR_RATIO > self.cpl3_ps_per_instruction
    }

    /// What the debug machinery has to know.
    #[must_use]
    pub fn quirks(&self) -> DebugQuirks {
        DebugQuirks {
            rf_ignored: !self.rf_honoured,
            block_irq: self.block_irq,
            // At CPL 3 there must be none to serve.
            serves_execution: self.guest_breakpoint_beside_ours && !self.breakpoint_cpl3,
        }
    }

    /// Why a guest's #GP handler cannot be patched here, if it cannot.
    #[must_use]
    pub fn patch_obstacle(&self) -> Option<PatchRefusal> {
        let stores = [self.protected_store_cpl0, self.protected_store_cpl3];
        if self.handler_out == HandlerOut::Unnoticed {
            Some(PatchRefusal::OutUnnoticed)
        } else if stores.contains(&ProtectedStore::Unnoticed) {
            Some(PatchRefusal::StoresUnnoticed)
        } else {
            None
        }
    }

    /// How RDPMC is to be trapped here, if `mode` was asked for.
    #[must_use]
    pub fn trap_plan(&self, mode: TrapMode) -> TrapPlan {
        TrapPlan {
            mode,
            obstacle: self.patch_obstacle(),
        }
    }

    /// What the `step` backend can do here.
    #[must_use]
    pub fn step_support(&self) -> StepSupport {
        StepSupport {
            user: self.step_cpl3 && self.breakpoint_cpl3,
            hold_irqs: self.block_irq,
            loses_traps: !self.step_fence,
        }
    }

    /// Why a guest with a virtual PMU cannot run here, if it cannot.
    #[must_use]
    pub fn obstacle(&self) -> Option<HostRefusal> {
        let untrapped = !self.breakpoint_cpl0 && self.patch_obstacle().is_some();
        match self.rdpmc {
            RdpmcBehaviour::SilentZero => Some(HostRefusal::SilentZero),
            RdpmcBehaviour::Answered => Some(HostRefusal::Answered),
            RdpmcBehaviour::Unknown => Some(HostRefusal::Unknown),
            RdpmcBehaviour::Faults => untrapped.then_some(HostRefusal::NoTrap),
        }
    }

    /// [`ProbeReport::obstacle`] as an error.
    ///
    /// # Errors
    /// A guest with a virtual PMU cannot run on this host, for this reason.
    pub fn check(&self) -> Result<(), HostRefusal> {
        self.obstacle().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests;
