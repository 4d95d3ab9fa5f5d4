//! Runs one probe guest, never for longer than a second.

use std::sync::Arc;
use std::time::Duration;

use kvm_bindings::{KVM_GUESTDBG_ENABLE, kvm_guest_debug};

use crate::kvm::{Host, KvmVcpu, KvmVm, VmExit, VmOptions};
use crate::micro::{MicroError, MicroGuest};
use crate::sys::{KickTimer, install_kick_handler};

const PATIENCE: Duration = Duration::from_secs(1);

/// A probe guest with one vCPU.
pub(super) struct Probe {
    // The VM must outlive its vCPU's ioctls.
    vm: Arc<KvmVm>,
    vcpu: KvmVcpu,
}

impl Probe {
    pub(super) fn new(host: &Host, guest: &MicroGuest) -> Result<Self, MicroError> {
        Self::with_options(host, guest, &VmOptions::default())
    }

    pub(super) fn with_options(
        host: &Host,
        guest: &MicroGuest,
        options: &VmOptions,
    ) -> Result<Self, MicroError> {
        let (vm, vcpus) = guest.build(host, options)?;
        let vcpu = vcpus
            .into_iter()
            .next()
            .ok_or_else(|| MicroError::Memory("a probe guest has one vCPU".to_owned()))?;
        Ok(Self { vm, vcpu })
    }

    pub(super) fn vcpu(&self) -> &KvmVcpu {
        &self.vcpu
    }

    /// Its memory.
    pub(super) fn vm(&self) -> &KvmVm {
        &self.vm
    }

    /// Has KVM complete what the last exit was about, without entering the guest.
    pub(super) fn complete(&mut self) -> Result<(), MicroError> {
        self.vcpu.set_immediate_exit(true);
        self.vcpu.run()?;
        self.vcpu.set_immediate_exit(false);
        Ok(())
    }

    /// Whether the last exit was from system management mode.
    pub(super) fn in_smm(&self) -> bool {
        self.vcpu.in_smm()
    }

    /// The bytes of the IN or OUT that was the last exit.
    pub(super) fn io_data(&mut self) -> &[u8] {
        self.vcpu.io_data()
    }

    /// Asks for guest debugging; false if KVM refuses.
    pub(super) fn debug(&self, control: u32, dr0: u64, dr7: u64) -> bool {
        let mut request = kvm_guest_debug {
            control: control | KVM_GUESTDBG_ENABLE,
            ..Default::default()
        };
        request.arch.debugreg[0] = dr0;
        request.arch.debugreg[7] = dr7;
        self.vcpu.set_guest_debug(&request).is_ok()
    }

    /// Runs to the next exit; a probe that hangs ends in
    /// [`VmExit::Interrupted`].
    pub(super) fn run(&mut self) -> Result<VmExit, MicroError> {
        install_kick_handler().map_err(timer_error)?;
        let timer = KickTimer::for_this_thread().map_err(timer_error)?;
        timer.arm(PATIENCE);
        let exit = self.vcpu.with_kicks(KvmVcpu::run)?;
        drop(timer);
        self.vcpu.set_immediate_exit(false);
        Ok(exit)
    }
}

fn timer_error(error: vmm_sys_util::errno::Error) -> MicroError {
    MicroError::Memory(format!("the probe's timer cannot be set up: {error}"))
}
