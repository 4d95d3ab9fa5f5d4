//! A stopped vCPU's registers and state, by ioctls or through `kvm_run`.

use std::cell::Cell;

use kvm_bindings::{
    KVM_CAP_SYNC_REGS, KVM_RUN_X86_SMM, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS, Msrs, kvm_debugregs,
    kvm_fpu, kvm_guest_debug, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events,
};
use kvm_ioctls::{SyncReg, VcpuFd, VmFd};
use vmm_sys_util::errno;

use crate::error::{VcpuError, VcpuId};
use crate::guest_tsc::GuestTsc;
use crate::time;

/// What [`RegisterCache::want`] exchanges.
const SYNCED: u32 = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS;

/// What is known of a vCPU's registers between two entries.
///
/// Registers travel in `kvm_run` instead of by ioctls where KVM can do that
/// (`KVM_CAP_SYNC_REGS`): a system call costs as much as half an exit on some
/// hosts.
#[derive(Debug, Default)]
pub(crate) struct RegisterCache {
    /// KVM can do it.
    possible: bool,
    /// `kvm_run` holds the general registers as they are now.
    regs_fresh: Cell<bool>,
    /// `kvm_run` holds the special registers as they are now.
    sregs_fresh: Cell<bool>,
    /// The last exit was at code of the vCPU's that we answer for, so the next
    /// `KVM_RUN` takes registers in before it does anything else.
    stageable: bool,
    /// There are some of the following.
    staged: Cell<bool>,
    /// General registers for the next `KVM_RUN` to take in.
    staged_regs: Cell<Option<kvm_regs>>,
    /// Special registers for the next `KVM_RUN` to take in.
    staged_sregs: Cell<Option<kvm_sregs>>,
    /// The last exit was from system management mode.
    smm: bool,
    tsc: GuestTsc,
}

impl RegisterCache {
    /// Nothing is known yet of a vCPU of `vm`.
    pub(crate) fn new(vm: &VmFd) -> Self {
        let synced = vm.check_extension_raw(KVM_CAP_SYNC_REGS.into());
        let synced = u32::try_from(synced).unwrap_or(0);
        Self {
            possible: synced & SYNCED == SYNCED,
            ..Self::default()
        }
    }

    /// The stopped vCPU behind `fd`.
    pub(crate) fn access<'a>(&'a self, fd: &'a VcpuFd, id: VcpuId) -> VcpuAccess<'a> {
        VcpuAccess {
            fd,
            cache: self,
            id,
        }
    }

    /// Has `KVM_RUN` leave the registers in `kvm_run` and take changes from
    /// there, which spares an ioctl each; where KVM cannot, nothing changes.
    pub(crate) fn want(&self, fd: &mut VcpuFd, on: bool) {
        let bits = if on && self.possible {
            u64::from(SYNCED)
        } else {
            0
        };
        fd.get_kvm_run().kvm_valid_regs = bits;
    }

    /// Hands staged registers to the `KVM_RUN` that follows.
    #[inline]
    pub(crate) fn hand_over(&self, fd: &mut VcpuFd) {
        if self.staged.get() {
            self.hand_over_staged(fd);
        }
        self.forget();
    }

    #[cold]
    fn hand_over_staged(&self, fd: &mut VcpuFd) {
        if let Some(regs) = self.staged_regs.take() {
            fd.sync_regs_mut().regs = regs;
            fd.set_sync_dirty_reg(SyncReg::Register);
        }
        if let Some(sregs) = self.staged_sregs.take() {
            fd.sync_regs_mut().sregs = sregs;
            fd.set_sync_dirty_reg(SyncReg::SystemRegister);
        }
        self.staged.set(false);
    }

    /// Notes what `KVM_RUN` left in `kvm_run`.
    pub(crate) fn after_run(&mut self, fd: &mut VcpuFd, debug_exit: bool) {
        let run = fd.get_kvm_run();
        self.smm = u32::from(run.flags) & KVM_RUN_X86_SMM != 0;
        let synced = run.kvm_valid_regs == u64::from(SYNCED);
        self.regs_fresh.set(synced);
        self.sregs_fresh.set(synced);
        self.stageable = synced && debug_exit;
    }

    /// The exit was the OUT in the #GP handler, behind which RIP is set elsewhere: the
    /// next `KVM_RUN` takes registers in before it does anything else.
    pub(crate) fn at_handler(&mut self) {
        self.stageable = self.regs_fresh.get() && self.sregs_fresh.get();
    }

    /// Somebody else may change registers from now on.
    pub(crate) fn forget(&self) {
        self.regs_fresh.set(false);
        self.sregs_fresh.set(false);
    }
}

/// A stopped vCPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VcpuAccess<'a> {
    fd: &'a VcpuFd,
    cache: &'a RegisterCache,
    id: VcpuId,
}

macro_rules! ioctls {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) -> $ret:ty = $ioctl:literal;)*) => {
        impl VcpuAccess<'_> {
            $($(#[$doc])*
            pub(crate) fn $name(self, $($arg: $type),*) -> Result<$ret, VcpuError> {
                self.fd.$name($($arg),*).map_err(|error| self.error($ioctl, error))
            })*
        }
    };
}

ioctls! {
    /// The guest's own debug registers.
    get_debug_regs() -> kvm_debugregs = "KVM_GET_DEBUGREGS";
    /// Sets the guest's own debug registers.
    set_debug_regs(regs: &kvm_debugregs) -> () = "KVM_SET_DEBUGREGS";
    /// The x87 and XMM registers.
    get_fpu() -> kvm_fpu = "KVM_GET_FPU";
    /// The local APIC's registers.
    get_lapic() -> kvm_lapic_state = "KVM_GET_LAPIC";
    /// Whether it runs, halts, or waits to be started.
    get_mp_state() -> kvm_mp_state = "KVM_GET_MP_STATE";
    /// Sends an NMI.
    nmi() -> () = "KVM_NMI";
    /// Sends an SMI.
    smi() -> () = "KVM_SMI";
}

impl VcpuAccess<'_> {
    fn error(self, ioctl: &'static str, error: errno::Error) -> VcpuError {
        VcpuError::new(self.id, ioctl, error)
    }

    /// Which vCPU this is.
    pub(crate) fn id(self) -> VcpuId {
        self.id
    }

    /// Whether the last exit was from system management mode.
    pub(crate) fn in_smm(self) -> bool {
        self.cache.smm
    }

    /// General registers.
    pub(crate) fn get_regs(self) -> Result<kvm_regs, VcpuError> {
        if let Some(regs) = self.cache.staged_regs.get() {
            return Ok(regs);
        }
        if self.cache.regs_fresh.get() {
            return Ok(self.fd.sync_regs().regs);
        }
        let regs = self.fd.get_regs();
        regs.map_err(|error| self.error("KVM_GET_REGS", error))
    }

    /// Sets the general registers.
    pub(crate) fn set_regs(self, regs: &kvm_regs) -> Result<(), VcpuError> {
        if self.cache.stageable {
            self.cache.staged_regs.set(Some(*regs));
            self.cache.staged.set(true);
            return Ok(());
        }
        self.cache.regs_fresh.set(false);
        let set = self.fd.set_regs(regs);
        set.map_err(|error| self.error("KVM_SET_REGS", error))
    }

    /// Segment, control and table registers.
    pub(crate) fn get_sregs(self) -> Result<kvm_sregs, VcpuError> {
        if let Some(sregs) = self.cache.staged_sregs.get() {
            return Ok(sregs);
        }
        if self.cache.sregs_fresh.get() {
            return Ok(self.fd.sync_regs().sregs);
        }
        let sregs = self.fd.get_sregs();
        sregs.map_err(|error| self.error("KVM_GET_SREGS", error))
    }

    /// Sets segment, control and table registers.
    pub(crate) fn set_sregs(self, sregs: &kvm_sregs) -> Result<(), VcpuError> {
        if self.cache.stageable {
            self.cache.staged_sregs.set(Some(*sregs));
            self.cache.staged.set(true);
            return Ok(());
        }
        self.cache.sregs_fresh.set(false);
        let set = self.fd.set_sregs(sregs);
        set.map_err(|error| self.error("KVM_SET_SREGS", error))
    }

    /// Pending and injected events.
    pub(crate) fn get_vcpu_events(self) -> Result<kvm_vcpu_events, VcpuError> {
        self.flush()?;
        let events = self.fd.get_vcpu_events();
        events.map_err(|error| self.error("KVM_GET_VCPU_EVENTS", error))
    }

    /// Sets pending and injected events.
    pub(crate) fn set_vcpu_events(self, events: &kvm_vcpu_events) -> Result<(), VcpuError> {
        self.flush()?;
        let set = self.fd.set_vcpu_events(events);
        set.map_err(|error| self.error("KVM_SET_VCPU_EVENTS", error))
    }

    /// Breakpoints and stepping of ours.
    pub(crate) fn set_guest_debug(self, debug: &kvm_guest_debug) -> Result<(), VcpuError> {
        self.flush()?;
        let set = self.fd.set_guest_debug(debug);
        set.map_err(|error| self.error("KVM_SET_GUEST_DEBUG", error))
    }

    /// Sets staged registers now: before an ioctl that looks at RIP or RFLAGS,
    /// or that queues an exception, which KVM drops when registers are set.
    #[cold]
    pub(crate) fn flush(self) -> Result<(), VcpuError> {
        if !self.cache.staged.replace(false) {
            return Ok(());
        }
        if let Some(sregs) = self.cache.staged_sregs.take() {
            self.cache.sregs_fresh.set(false);
            let set = self.fd.set_sregs(&sregs);
            set.map_err(|error| self.error("KVM_SET_SREGS", error))?;
        }
        if let Some(regs) = self.cache.staged_regs.take() {
            self.cache.regs_fresh.set(false);
            let set = self.fd.set_regs(&regs);
            set.map_err(|error| self.error("KVM_SET_REGS", error))?;
        }
        Ok(())
    }

    /// The guest's TSC now, or a moment ago; 0 if KVM does not tell.
    pub(crate) fn guest_tsc(self) -> Result<u64, VcpuError> {
        const TSC: u32 = 0x10;
        let ask = || Ok(self.read_msr(TSC)?.unwrap_or(0));
        self.cache.tsc.read(|| time::now().0, ask)
    }

    /// Reads one MSR of the vCPU as the guest would; `None` if KVM refuses.
    #[cold]
    pub(crate) fn read_msr(self, index: u32) -> Result<Option<u64>, VcpuError> {
        let mut msrs = one_msr(index, 0);
        let read = self.fd.get_msrs(&mut msrs);
        let read = read.map_err(|error| self.error("KVM_GET_MSRS", error))?;
        Ok((read == 1).then(|| msrs.as_slice()[0].data))
    }

    /// Writes one MSR of the vCPU; false if KVM refuses.
    #[cold]
    pub(crate) fn write_msr(self, index: u32, value: u64) -> Result<bool, VcpuError> {
        // EFER and the APIC base are MSRs and special registers.
        self.cache.sregs_fresh.set(false);
        let written = self.fd.set_msrs(&one_msr(index, value));
        let written = written.map_err(|error| self.error("KVM_SET_MSRS", error))?;
        Ok(written == 1)
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
