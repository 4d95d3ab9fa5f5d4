//! One vCPU: entering the guest, answering exits, registers.

use std::cell::Cell;

use kvm_bindings::{
    CpuId, KVM_RUN_X86_SMM, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS, Msrs, kvm_debugregs, kvm_fpu,
    kvm_guest_debug, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events,
};
use kvm_ioctls::{SyncReg, VcpuExit, VcpuFd};
use serde::Serialize;
use thiserror::Error;
use vmm_sys_util::errno;

use super::exit::{Answer, VmExit};
use super::host::KvmFeatures;
use super::sys;
use crate::sys::{HaltStats, SignalMask};

/// What [`KvmVcpu::sync_registers`] exchanges.
const SYNCED: u32 = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS;

/// Number of a vCPU, from 0; also its initial APIC ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct VcpuId(pub u8);

impl std::fmt::Display for VcpuId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "vCPU {}", self.0)
    }
}

/// An ioctl on a vCPU failed.
#[derive(Debug, Error)]
#[error("{id}: {ioctl} failed: {error}")]
pub struct VcpuError {
    id: VcpuId,
    ioctl: &'static str,
    error: errno::Error,
}

impl VcpuError {
    /// True if KVM has given the whole machine up (EIO): one of its own checks
    /// failed, and it refuses every further ioctl.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.error.errno() == libc::EIO
    }

    /// True if KVM cannot do it in the vCPU's present state (EBUSY).
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.error.errno() == libc::EBUSY
    }

    /// True if KVM found the values themselves wrong (EINVAL).
    #[must_use]
    pub fn is_invalid(&self) -> bool {
        self.error.errno() == libc::EINVAL
    }
}

/// One vCPU of KVM.
#[derive(Debug)]
pub struct KvmVcpu {
    fd: VcpuFd,
    id: VcpuId,
    mapping: usize,
    registers: Synced,
    /// The last exit was from system management mode.
    smm: bool,
}

/// Registers that travel in `kvm_run` instead of by ioctls
/// (`KVM_CAP_SYNC_REGS`): a system call costs as much as half an exit on some
/// hosts.
#[derive(Debug, Default)]
struct Synced {
    /// KVM can do it.
    possible: bool,
    /// `kvm_run` holds the general registers as they are now.
    regs_fresh: Cell<bool>,
    /// The same of the special registers.
    sregs_fresh: Cell<bool>,
    /// The last exit was a debug exit, so the vCPU runs code and the next
    /// `KVM_RUN` takes registers in before it does anything else.
    stageable: bool,
    /// Registers for the next `KVM_RUN` to take in.
    staged_regs: Cell<Option<kvm_regs>>,
    /// The same.
    staged_sregs: Cell<Option<kvm_sregs>>,
}

impl Synced {
    /// Another ioctl may have changed special registers.
    fn forget_sregs(&self) {
        self.sregs_fresh.set(false);
    }
}

macro_rules! ioctls {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) -> $ret:ty = $ioctl:literal;)*) => {
        impl KvmVcpu {
            $($(#[$doc])*
            ///
            /// # Errors
            /// The error of the ioctl.
            pub fn $name(&self, $($arg: $type),*) -> Result<$ret, VcpuError> {
                self.fd.$name($($arg),*).map_err(|error| self.error($ioctl, error))
            })*
        }
    };
}

ioctls! {
    /// Sets the x87 and SSE state.
    set_fpu(fpu: &kvm_fpu) -> () = "KVM_SET_FPU";
    /// Sets what CPUID answers.
    set_cpuid2(cpuid: &CpuId) -> () = "KVM_SET_CPUID2";
    /// The guest's own debug registers.
    get_debug_regs() -> kvm_debugregs = "KVM_GET_DEBUGREGS";
    /// Sets the guest's own debug registers.
    set_debug_regs(regs: &kvm_debugregs) -> () = "KVM_SET_DEBUGREGS";
    /// The local APIC's registers.
    get_lapic() -> kvm_lapic_state = "KVM_GET_LAPIC";
    /// Sends an NMI.
    nmi() -> () = "KVM_NMI";
    /// Sends an SMI.
    smi() -> () = "KVM_SMI";
    /// Runnable, halted, waiting for SIPI …
    get_mp_state() -> kvm_mp_state = "KVM_GET_MP_STATE";
    /// The guest's TSC frequency in kHz.
    get_tsc_khz() -> u32 = "KVM_GET_TSC_KHZ";
}

impl KvmVcpu {
    pub(super) fn new(fd: VcpuFd, id: VcpuId, mapping: usize, features: &KvmFeatures) -> Self {
        Self {
            fd,
            id,
            mapping,
            registers: Synced {
                possible: features.sync_regs & SYNCED == SYNCED,
                ..Synced::default()
            },
            smm: false,
        }
    }

    fn error(&self, ioctl: &'static str, error: errno::Error) -> VcpuError {
        VcpuError {
            id: self.id,
            ioctl,
            error,
        }
    }

    /// Which vCPU this is.
    #[must_use]
    pub fn id(&self) -> VcpuId {
        self.id
    }

    /// Whether the last exit was from system management mode.
    #[must_use]
    pub fn in_smm(&self) -> bool {
        self.smm
    }

    /// Enters the guest until it exits.
    ///
    /// # Errors
    /// What `KVM_RUN` failed with, except EINTR and EAGAIN, which are
    /// [`VmExit::Interrupted`].
    pub fn run(&mut self) -> Result<VmExit, VcpuError> {
        self.hand_over();
        let exit = self.enter();
        self.after_run(matches!(exit, Ok(VmExit::Debug(_))));
        exit
    }

    fn enter(&mut self) -> Result<VmExit, VcpuError> {
        let exit = match self.fd.run() {
            Ok(exit) => exit,
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                return Ok(VmExit::Interrupted);
            }
            Err(error) => return Err(self.error("KVM_RUN", error)),
        };
        Ok(match exit {
            VcpuExit::X86Rdmsr(msr) => VmExit::Rdmsr { index: msr.index },
            VcpuExit::X86Wrmsr(msr) => VmExit::Wrmsr {
                index: msr.index,
                value: msr.data,
            },
            VcpuExit::IoOut(port, data) => {
                let data = data.to_vec();
                let width = sys::io_width(self.fd.get_kvm_run());
                VmExit::IoOut { port, width, data }
            }
            VcpuExit::IoIn(port, data) => {
                let len = data.len();
                let width = sys::io_width(self.fd.get_kvm_run());
                VmExit::IoIn { port, width, len }
            }
            VcpuExit::MmioRead(address, data) => VmExit::MmioRead {
                address,
                len: data.len(),
            },
            VcpuExit::MmioWrite(address, bytes) => {
                let mut data = [0; 8];
                data[..bytes.len()].copy_from_slice(bytes);
                VmExit::MmioWrite {
                    address,
                    data,
                    len: bytes.len(),
                }
            }
            VcpuExit::Debug(arch) => VmExit::Debug(arch.into()),
            VcpuExit::Intr => VmExit::Interrupted,
            VcpuExit::Hlt => VmExit::Halted,
            VcpuExit::Shutdown => VmExit::Shutdown,
            VcpuExit::FailEntry(reason, _) => VmExit::FailEntry { reason },
            VcpuExit::SystemEvent(kind, _) => VmExit::SystemEvent { kind },
            VcpuExit::InternalError => {
                VmExit::InternalError(sys::internal_error(self.fd.get_kvm_run()))
            }
            other => VmExit::Unexpected {
                what: format!("{other:?}"),
            },
        })
    }

    /// Leaves the guest's answer for the exit that `run` returned last; the
    /// next `run` hands it over.
    pub fn answer(&mut self, answer: &Answer) {
        let run = self.fd.get_kvm_run();
        match answer {
            Answer::Done => sys::answer_msr(run, Some(0)),
            Answer::Io(bytes) => sys::answer_io(run, self.mapping, bytes),
            Answer::Mmio(bytes) => sys::answer_mmio(run, *bytes),
            Answer::Msr(value) => sys::answer_msr(run, Some(*value)),
            Answer::MsrFault => sys::answer_msr(run, None),
        }
    }

    /// Makes the next `run` finish a pending access and return at once.
    pub fn set_immediate_exit(&mut self, on: bool) {
        self.fd.set_kvm_immediate_exit(u8::from(on));
    }

    /// Takes `immediate_exit` back; true if a kick, or [`Self::set_immediate_exit`],
    /// had set it. A kick that comes in between is not lost: either it is told
    /// here, or the flag stays set for the next `run`.
    pub fn take_immediate_exit(&mut self) -> bool {
        let kicked = self.fd.get_kvm_run().immediate_exit != 0;
        if kicked {
            self.set_immediate_exit(false);
        }
        kicked
    }

    /// Runs `body` with kicks bound: meanwhile a kick of the calling thread ends
    /// or prevents this vCPU's `KVM_RUN`.
    pub fn with_kicks<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let _bound = sys::bind_kick(self.fd.get_kvm_run());
        body(self)
    }

    /// Signals that stay blocked inside `KVM_RUN`, instead of the thread's own;
    /// `None` makes it the thread's own again.
    ///
    /// # Errors
    /// The error of `KVM_SET_SIGNAL_MASK`.
    pub fn set_signal_mask(&self, mask: Option<SignalMask>) -> Result<(), VcpuError> {
        let set = sys::set_signal_mask(&self.fd, mask);
        set.map_err(|error| self.error("KVM_SET_SIGNAL_MASK", error))
    }

    /// Has `KVM_RUN` leave the registers in `kvm_run` and take changes from
    /// there, which spares an ioctl each; where KVM cannot, nothing changes.
    pub fn sync_registers(&mut self, on: bool) {
        let bits = match on && self.registers.possible {
            true => u64::from(SYNCED),
            false => 0,
        };
        self.fd.get_kvm_run().kvm_valid_regs = bits;
    }

    /// General registers.
    ///
    /// # Errors
    /// The error of `KVM_GET_REGS`.
    pub fn get_regs(&self) -> Result<kvm_regs, VcpuError> {
        if let Some(regs) = self.registers.staged_regs.get() {
            return Ok(regs);
        }
        if self.registers.regs_fresh.get() {
            return Ok(self.fd.sync_regs().regs);
        }
        let regs = self.fd.get_regs();
        regs.map_err(|error| self.error("KVM_GET_REGS", error))
    }

    /// Sets the general registers.
    ///
    /// # Errors
    /// The error of `KVM_SET_REGS`.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<(), VcpuError> {
        if self.registers.stageable {
            self.registers.staged_regs.set(Some(*regs));
            return Ok(());
        }
        self.registers.regs_fresh.set(false);
        let set = self.fd.set_regs(regs);
        set.map_err(|error| self.error("KVM_SET_REGS", error))
    }

    /// Segment, control and table registers.
    ///
    /// # Errors
    /// The error of `KVM_GET_SREGS`.
    pub fn get_sregs(&self) -> Result<kvm_sregs, VcpuError> {
        if let Some(sregs) = self.registers.staged_sregs.get() {
            return Ok(sregs);
        }
        if self.registers.sregs_fresh.get() {
            return Ok(self.fd.sync_regs().sregs);
        }
        let sregs = self.fd.get_sregs();
        sregs.map_err(|error| self.error("KVM_GET_SREGS", error))
    }

    /// Sets segment, control and table registers.
    ///
    /// # Errors
    /// The error of `KVM_SET_SREGS`.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<(), VcpuError> {
        if self.registers.stageable {
            self.registers.staged_sregs.set(Some(*sregs));
            return Ok(());
        }
        self.registers.forget_sregs();
        let set = self.fd.set_sregs(sregs);
        set.map_err(|error| self.error("KVM_SET_SREGS", error))
    }

    /// Pending and injected events.
    ///
    /// # Errors
    /// The error of `KVM_GET_VCPU_EVENTS`, or of setting registers before.
    pub fn get_vcpu_events(&self) -> Result<kvm_vcpu_events, VcpuError> {
        self.flush()?;
        let events = self.fd.get_vcpu_events();
        events.map_err(|error| self.error("KVM_GET_VCPU_EVENTS", error))
    }

    /// Sets pending and injected events.
    ///
    /// # Errors
    /// The error of `KVM_SET_VCPU_EVENTS`, or of setting registers before.
    pub fn set_vcpu_events(&self, events: &kvm_vcpu_events) -> Result<(), VcpuError> {
        self.flush()?;
        let set = self.fd.set_vcpu_events(events);
        set.map_err(|error| self.error("KVM_SET_VCPU_EVENTS", error))
    }

    /// Breakpoints and stepping of ours.
    ///
    /// # Errors
    /// The error of `KVM_SET_GUEST_DEBUG`, or of setting registers before.
    pub fn set_guest_debug(&self, debug: &kvm_guest_debug) -> Result<(), VcpuError> {
        self.flush()?;
        let set = self.fd.set_guest_debug(debug);
        set.map_err(|error| self.error("KVM_SET_GUEST_DEBUG", error))
    }

    /// Runnable, halted, waiting for SIPI …
    ///
    /// # Errors
    /// The error of `KVM_SET_MP_STATE`, or of setting registers before.
    pub fn set_mp_state(&self, state: kvm_mp_state) -> Result<(), VcpuError> {
        self.flush()?;
        let set = self.fd.set_mp_state(state);
        set.map_err(|error| self.error("KVM_SET_MP_STATE", error))
    }

    /// Sets staged registers now: before an ioctl that looks at RIP or RFLAGS,
    /// or that queues an exception, which KVM drops when registers are set.
    fn flush(&self) -> Result<(), VcpuError> {
        if let Some(sregs) = self.registers.staged_sregs.take() {
            self.registers.forget_sregs();
            let set = self.fd.set_sregs(&sregs);
            set.map_err(|error| self.error("KVM_SET_SREGS", error))?;
        }
        if let Some(regs) = self.registers.staged_regs.take() {
            self.registers.regs_fresh.set(false);
            let set = self.fd.set_regs(&regs);
            set.map_err(|error| self.error("KVM_SET_REGS", error))?;
        }
        Ok(())
    }

    /// Hands staged registers to the `KVM_RUN` that follows.
    fn hand_over(&mut self) {
        if let Some(regs) = self.registers.staged_regs.take() {
            self.fd.sync_regs_mut().regs = regs;
            self.fd.set_sync_dirty_reg(SyncReg::Register);
        }
        if let Some(sregs) = self.registers.staged_sregs.take() {
            self.fd.sync_regs_mut().sregs = sregs;
            self.fd.set_sync_dirty_reg(SyncReg::SystemRegister);
        }
    }

    /// Notes what `KVM_RUN` left in `kvm_run`.
    fn after_run(&mut self, debug_exit: bool) {
        self.smm = u32::from(self.fd.get_kvm_run().flags) & KVM_RUN_X86_SMM != 0;
        let synced = self.fd.get_kvm_run().kvm_valid_regs == u64::from(SYNCED);
        self.registers.regs_fresh.set(synced);
        self.registers.sregs_fresh.set(synced);
        self.registers.stageable = synced && debug_exit;
    }

    /// Reads one MSR of the vCPU as the guest would; `None` if KVM refuses.
    ///
    /// # Errors
    /// The error of `KVM_GET_MSRS`.
    pub fn read_msr(&self, index: u32) -> Result<Option<u64>, VcpuError> {
        let mut msrs = one_msr(index, 0);
        let read = self
            .fd
            .get_msrs(&mut msrs)
            .map_err(|error| self.error("KVM_GET_MSRS", error))?;
        Ok((read == 1).then(|| msrs.as_slice()[0].data))
    }

    /// Writes one MSR of the vCPU; false if KVM refuses.
    ///
    /// # Errors
    /// The error of `KVM_SET_MSRS`.
    pub fn write_msr(&self, index: u32, value: u64) -> Result<bool, VcpuError> {
        // EFER and the APIC base are MSRs and special registers.
        self.registers.forget_sregs();
        let msrs = one_msr(index, value);
        let written = self
            .fd
            .set_msrs(&msrs)
            .map_err(|error| self.error("KVM_SET_MSRS", error))?;
        Ok(written == 1)
    }

    /// The vCPU's halted-time statistics.
    ///
    /// # Errors
    /// Where KVM does not have them.
    pub fn halt_stats(&self) -> Result<HaltStats, crate::sys::StatsError> {
        HaltStats::open(&self.fd)
    }
}

fn one_msr(index: u32, data: u64) -> Msrs {
    let entry = kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    Msrs::from_entries(&[entry]).expect("one entry is below KVM's limit")
}
