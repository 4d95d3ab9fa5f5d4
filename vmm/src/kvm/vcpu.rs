//! One vCPU: entering the guest, answering exits, registers.

use std::sync::Arc;

use kvm_bindings::{
    CpuId, KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_UNINITIALIZED,
    KVM_RUN_X86_SMM, Msrs, kvm_debugregs, kvm_fpu, kvm_guest_debug, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs,
};
use kvm_ioctls::VcpuFd;
use kvm_pmu::{HaltStats, KickFlag, StatsError, VcpuError, VcpuId, VmExit, answer_msr};
use vmm_sys_util::errno;

use super::exit::Answer;
use super::sys;
use crate::sys::SignalMask;

/// One vCPU of KVM.
#[derive(Debug)]
pub struct KvmVcpu {
    fd: VcpuFd,
    id: VcpuId,
    mapping: usize,
    kicks: Arc<KickFlag>,
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
    /// General registers.
    get_regs() -> kvm_regs = "KVM_GET_REGS";
    /// Sets the general registers.
    set_regs(regs: &kvm_regs) -> () = "KVM_SET_REGS";
    /// Segment, control and table registers.
    get_sregs() -> kvm_sregs = "KVM_GET_SREGS";
    /// Sets segment, control and table registers.
    set_sregs(sregs: &kvm_sregs) -> () = "KVM_SET_SREGS";
    /// Breakpoints and stepping of ours.
    set_guest_debug(debug: &kvm_guest_debug) -> () = "KVM_SET_GUEST_DEBUG";
    /// Runnable, halted, waiting for SIPI …
    set_mp_state(state: kvm_mp_state) -> () = "KVM_SET_MP_STATE";
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
    pub(super) fn new(fd: VcpuFd, id: VcpuId, mapping: usize) -> Result<Self, errno::Error> {
        Ok(Self {
            kicks: KickFlag::of(&fd)?,
            fd,
            id,
            mapping,
        })
    }

    fn error(&self, ioctl: &'static str, error: errno::Error) -> VcpuError {
        VcpuError::new(self.id, ioctl, error)
    }

    /// Which vCPU this is.
    #[must_use]
    pub fn id(&self) -> VcpuId {
        self.id
    }

    /// Whether the last exit was from system management mode.
    #[must_use]
    pub fn in_smm(&mut self) -> bool {
        u32::from(self.fd.get_kvm_run().flags) & KVM_RUN_X86_SMM != 0
    }

    /// Its descriptor, for the PMU.
    #[must_use]
    pub fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    /// Its descriptor, for the PMU.
    pub fn fd_mut(&mut self) -> &mut VcpuFd {
        &mut self.fd
    }

    /// Enters the guest until it exits.
    ///
    /// # Errors
    /// What `KVM_RUN` failed with, except EINTR and EAGAIN, which are
    /// [`VmExit::Interrupted`], and EFAULT, which is [`VmExit::MemoryFault`].
    pub fn run(&mut self) -> Result<VmExit, VcpuError> {
        let exit = self.enter();
        exit.map_err(|error| self.error("KVM_RUN", error))
    }

    /// [`KvmVcpu::run`], for the PMU, which takes the error as it is.
    ///
    /// # Errors
    /// As there.
    pub fn enter(&mut self) -> Result<VmExit, errno::Error> {
        let failed = self.fd.run().err();
        VmExit::after(self.fd.get_kvm_run(), failed)
    }

    /// The bytes of the IN or OUT that `run` returned last; what is left there for an IN
    /// the next `run` hands over.
    pub fn io_data(&mut self) -> &mut [u8] {
        sys::io_data(self.fd.get_kvm_run(), self.mapping)
    }

    /// Leaves the guest's answer for the exit that `run` returned last; the
    /// next `run` hands it over.
    pub fn answer(&mut self, answer: Answer) {
        let run = self.fd.get_kvm_run();
        match answer {
            Answer::Done => answer_msr(run, Some(0)),
            Answer::Mmio(bytes) => sys::answer_mmio(run, bytes),
            Answer::Msr(value) => answer_msr(run, Some(value)),
            Answer::MsrFault => answer_msr(run, None),
        }
    }

    /// Makes the next `run` finish a pending access and return at once.
    pub fn set_immediate_exit(&mut self, on: bool) {
        self.fd.set_kvm_immediate_exit(u8::from(on));
    }

    /// Runs `body` with kicks bound: meanwhile a kick of the calling thread ends
    /// or prevents this vCPU's `KVM_RUN`.
    pub fn with_kicks<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let _bound = self.kicks.bind();
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

    /// Tells a guest that reads KVM's clock that it was stopped, so that its watchdogs do
    /// not take the time for a lockup. Others do not hear of it.
    pub fn note_stopped(&self) {
        let _ = self.fd.kvmclock_ctrl();
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
        let msrs = one_msr(index, value);
        let written = self
            .fd
            .set_msrs(&msrs)
            .map_err(|error| self.error("KVM_SET_MSRS", error))?;
        Ok(written == 1)
    }

    /// Whether it was never started, or got an INIT since.
    ///
    /// # Errors
    /// The error of `KVM_GET_MP_STATE`.
    pub fn awaits_startup(&self) -> Result<bool, VcpuError> {
        let state = self.get_mp_state()?.mp_state;
        Ok(matches!(
            state,
            KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED
        ))
    }

    /// Whether it has executed HLT and waits for an interrupt.
    ///
    /// # Errors
    /// The error of `KVM_GET_MP_STATE`.
    pub fn is_halted(&self) -> Result<bool, VcpuError> {
        Ok(self.get_mp_state()?.mp_state == KVM_MP_STATE_HALTED)
    }

    /// The vCPU's halted-time statistics.
    ///
    /// # Errors
    /// Where KVM does not have them.
    pub fn halt_stats(&self) -> Result<HaltStats, StatsError> {
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
