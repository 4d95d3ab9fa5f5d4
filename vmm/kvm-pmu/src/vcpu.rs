//! One vCPU of KVM: its descriptor, what left the guest, and its registers and state while
//! it is stopped, by ioctls or through `kvm_run`.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use guest_exit::{Answer, VmExit};
use kvm_bindings::{
    KVM_CAP_SYNC_REGS, KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_UNINITIALIZED,
    KVM_RUN_X86_SMM, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS, kvm_debugregs, kvm_fpu,
    kvm_guest_debug, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_run, kvm_sregs, kvm_sync_regs,
    kvm_vcpu_events,
};
use pmu_virt::cpuid::Leaves;

use crate::cpuid;
use crate::error::{DescriptorError, Errno, VcpuError, VcpuId};
use crate::guest_tsc::GuestTsc;
use crate::sys::{self, KickFlag, RunPages, ioctl};
use crate::time;
use crate::vm::KvmVm;

/// Exits after one that wanted registers during which KVM hands them over at
/// once: drivers write selects and read counters in runs. Each costs an exit
/// about a twentieth more, fetching them by ioctl half as much again.
const SYNCED_EXITS: u8 = 16;

/// What [`KvmVcpu::want_registers`] exchanges.
const SYNCED: u32 = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS;

/// One vCPU of KVM. It belongs to one thread at a time.
///
/// It is the one place that looks into `kvm_run` and asks for registers. These travel in
/// `kvm_run` instead of by ioctls where KVM can do that (`KVM_CAP_SYNC_REGS`) and
/// [`KvmPmu`](crate::KvmPmu) expects to want them: a system call costs as much as half an
/// exit on some hosts. What is set then reaches KVM with the next entry, so whoever asks
/// KVM by the descriptor calls [`KvmPmu::leave_thread`](crate::KvmPmu::leave_thread) first.
#[derive(Debug)]
pub struct KvmVcpu {
    fd: OwnedFd,
    id: VcpuId,
    vm: KvmVm,
    pages: RunPages,
    kicks: Arc<KickFlag>,
    /// KVM can exchange registers in `kvm_run`.
    syncs: bool,
    /// Exits yet to come at which registers are likely to be wanted.
    wanted: Cell<u8>,
    /// `kvm_run` holds the general registers as they are now.
    regs_fresh: Cell<bool>,
    /// `kvm_run` holds the special registers as they are now.
    sregs_fresh: Cell<bool>,
    /// The last exit was at code of the vCPU's that we answer for, so the next
    /// `KVM_RUN` takes registers in before it does anything else.
    stageable: Cell<bool>,
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

impl KvmVcpu {
    /// vCPU `id` of `vm`, whose descriptor is `vcpu`: a duplicate of it is kept. The VMM may keep
    /// its own, for what this type has no call for, or let it go.
    ///
    /// A vCPU has one `KvmVcpu`, and no `KVM_RUN` by a descriptor of the VMM's own while a call of
    /// this type runs or what it has lent is looked at ([`KvmVcpu::kvm_run`],
    /// [`KvmVcpu::io_data`]): KVM would write to what is read there. Nobody can see that here.
    ///
    /// # Errors
    /// [`DescriptorError`]: it is no vCPU's, or could not be duplicated or mapped.
    pub fn new(vcpu: impl AsFd, vm: &KvmVm, id: VcpuId) -> Result<Self, DescriptorError> {
        let vcpu = vcpu.as_fd();
        ioctl::read(vcpu, ioctl::GET_REGS).map_err(|error| DescriptorError::NoVcpu(id, error))?;
        let fd = vcpu.try_clone_to_owned().map_err(Errno::from);
        let fd = fd.map_err(DescriptorError::Duplicate)?;
        let unmapped = |error| DescriptorError::Mapping(id, error);
        let synced = u32::try_from(vm.check_extension(KVM_CAP_SYNC_REGS)).unwrap_or(0);
        Ok(Self {
            kicks: KickFlag::of(fd.as_fd()).map_err(unmapped)?,
            pages: RunPages::of(fd.as_fd()).map_err(unmapped)?,
            fd,
            id,
            vm: vm.clone(),
            syncs: synced & SYNCED == SYNCED,
            wanted: Cell::new(0),
            regs_fresh: Cell::new(false),
            sregs_fresh: Cell::new(false),
            stageable: Cell::new(false),
            staged: Cell::new(false),
            staged_regs: Cell::new(None),
            staged_sregs: Cell::new(None),
            smm: false,
            tsc: GuestTsc::default(),
        })
    }

    /// Which vCPU this is.
    #[must_use]
    pub fn id(&self) -> VcpuId {
        self.id
    }

    /// Its VM.
    pub(crate) fn vm(&self) -> &KvmVm {
        &self.vm
    }

    /// What `KVM_RUN` reads and leaves, for who measures KVM without a PMU. With one, its fields
    /// are the crate's between [`KvmPmu::enter`](crate::KvmPmu::enter) and the exit.
    pub fn kvm_run(&mut self) -> &mut kvm_run {
        self.pages.run_mut()
    }

    /// The registers in it, likewise.
    pub fn synced(&mut self) -> &mut kvm_sync_regs {
        self.pages.synced_mut()
    }

    /// What lets a kick end or prevent its `KVM_RUN`.
    pub(crate) fn kicks(&self) -> &Arc<KickFlag> {
        &self.kicks
    }

    /// Whether the last exit was from system management mode.
    #[must_use]
    #[inline]
    pub fn in_smm(&self) -> bool {
        self.smm
    }

    /// Runs `body` with kicks bound: meanwhile a kick of the calling thread ends
    /// or prevents this vCPU's `KVM_RUN`.
    pub fn with_kicks<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let _bound = self.kicks.bind();
        body(self)
    }

    /// Makes the next [`KvmVcpu::enter`] finish a pending access and return at once.
    pub fn set_immediate_exit(&mut self, on: bool) {
        self.kicks.set(on);
    }

    /// True if a kick, or [`KvmVcpu::set_immediate_exit`], keeps the vCPU from entering its
    /// guest; it does so no more. A kick that comes in between is not lost: either it is
    /// noticed here, or the flag stays set for the next `KVM_RUN`.
    #[inline]
    pub(crate) fn take_immediate_exit(&mut self) -> bool {
        self.kicks.take()
    }

    /// Enters the guest until it exits, which is [`KvmVcpu::exit`].
    ///
    /// # Errors
    /// As there.
    pub fn enter(&mut self) -> Result<VmExit, Errno> {
        let failed = ioctl::call(self.fd.as_fd(), ioctl::RUN, 0).err();
        self.exit(failed)
    }

    /// [`KvmVcpu::enter`], for who has no use for the bare error.
    ///
    /// # Errors
    /// As there.
    pub fn run(&mut self) -> Result<VmExit, VcpuError> {
        let exit = self.enter();
        exit.map_err(|error| self.error("KVM_RUN", error))
    }

    /// What the last `KVM_RUN` ended with, which may have `failed`: EINTR and EAGAIN are
    /// [`VmExit::Interrupted`], EFAULT is [`VmExit::MemoryFault`]. `kvm_run` is read once;
    /// the answer borrows nothing.
    ///
    /// # Errors
    /// Any other errno, after which KVM does not run the guest on.
    #[inline]
    pub fn exit(&mut self, failed: Option<Errno>) -> Result<VmExit, Errno> {
        let run = self.pages.run_mut();
        let exit = sys::exit_after(run, failed);
        self.smm = u32::from(run.flags) & KVM_RUN_X86_SMM != 0;
        exit
    }

    /// The bytes of the IN or OUT that the vCPU has exited with; what is left there for an
    /// IN the next `KVM_RUN` hands over. None for another exit.
    pub fn io_data(&mut self) -> &mut [u8] {
        self.pages.io_data()
    }

    /// Leaves the guest's answer for the exit; the next `KVM_RUN` hands it over. An answer
    /// to another kind of exit is dropped.
    pub fn answer(&mut self, answer: Answer) {
        let run = self.pages.run_mut();
        match answer {
            Answer::Done => sys::answer_msr(run, Some(0)),
            Answer::Mmio(bytes) => sys::answer_mmio(run, bytes),
            Answer::Msr(value) => sys::answer_msr(run, Some(value)),
            Answer::MsrFault => sys::answer_msr(run, None),
        }
    }

    /// Registers were wanted at this exit, and are likely to be at the next ones.
    pub(crate) fn expect_use(&self) {
        self.wanted.set(SYNCED_EXITS);
    }

    /// Has `KVM_RUN` leave the registers in `kvm_run` and take changes from
    /// there, which spares an ioctl each, if they are `needed` or likely to be wanted; where
    /// KVM cannot, nothing changes.
    pub(crate) fn want_registers(&mut self, needed: bool) {
        let wanted = self.wanted.get();
        self.wanted.set(wanted.saturating_sub(1));
        let bits = if self.syncs && (needed || wanted > 0) {
            u64::from(SYNCED)
        } else {
            0
        };
        self.pages.run_mut().kvm_valid_regs = bits;
    }

    /// Hands staged registers to the `KVM_RUN` that follows. That may fail, and KVM then
    /// mostly leaves the exit reason as it is, which must not be that of the exit before.
    #[inline]
    pub(crate) fn hand_over(&mut self) {
        if self.staged.get() {
            self.hand_over_staged();
        }
        self.forget();
        sys::expect_interruption(self.pages.run_mut());
    }

    #[cold]
    fn hand_over_staged(&mut self) {
        if let Some(regs) = self.staged_regs.take() {
            self.pages.synced_mut().regs = regs;
            self.pages.run_mut().kvm_dirty_regs |= u64::from(KVM_SYNC_X86_REGS);
        }
        if let Some(sregs) = self.staged_sregs.take() {
            self.pages.synced_mut().sregs = sregs;
            self.pages.run_mut().kvm_dirty_regs |= u64::from(KVM_SYNC_X86_SREGS);
        }
        self.staged.set(false);
    }

    /// There was no `KVM_RUN`, or it failed before it took registers in: those are staged again,
    /// and reach KVM with the next one or by an ioctl. KVM clears the bits of what it has taken.
    #[cold]
    pub(crate) fn take_back(&mut self) {
        let run = self.pages.run_mut();
        let dirty = std::mem::take(&mut run.kvm_dirty_regs);
        let has = |bit: u32| dirty & u64::from(bit) != 0;
        let synced = self.pages.synced();
        if has(KVM_SYNC_X86_REGS) {
            self.staged_regs.set(Some(synced.regs));
            self.staged.set(true);
        }
        if has(KVM_SYNC_X86_SREGS) {
            self.staged_sregs.set(Some(synced.sregs));
            self.staged.set(true);
        }
    }

    /// Takes in that `KVM_RUN` ended with `exit`: it may have left registers in `kvm_run`.
    #[inline]
    pub(crate) fn left_with(&mut self, exit: VmExit) {
        let synced = self.pages.run_mut().kvm_valid_regs == u64::from(SYNCED);
        self.regs_fresh.set(synced);
        self.sregs_fresh.set(synced);
        let at_debug = matches!(exit, VmExit::Debug(_));
        self.stageable.set(synced && at_debug);
    }

    /// The exit was the OUT in the #GP handler, behind which RIP is set elsewhere: the
    /// next `KVM_RUN` takes registers in before it does anything else.
    pub(crate) fn at_handler(&self) {
        let synced = self.regs_fresh.get() && self.sregs_fresh.get();
        self.stageable.set(synced);
    }

    /// No thread runs it from now on: staged registers are set, and later ones at once.
    pub(crate) fn leave(&mut self) -> Result<(), VcpuError> {
        self.stageable.set(false);
        let flushed = self.flush();
        self.forget();
        flushed
    }

    /// Somebody else may change registers from now on.
    #[inline]
    pub(crate) fn forget(&self) {
        self.regs_fresh.set(false);
        self.sregs_fresh.set(false);
    }

    /// Sets what CPUID answers.
    ///
    /// # Errors
    /// The error of `KVM_SET_CPUID2`; E2BIG if there are too many leaves for it.
    pub fn set_cpuid(&self, leaves: &Leaves) -> Result<(), VcpuError> {
        let set = ioctl::set_cpuid(self.fd.as_fd(), &cpuid::to_kvm(leaves));
        set.map_err(|error| self.error("KVM_SET_CPUID2", error))
    }

    /// What CPUID answers; nothing before it was set.
    ///
    /// # Errors
    /// The error of `KVM_GET_CPUID2`.
    pub fn get_cpuid(&self) -> Result<Leaves, VcpuError> {
        let entries = ioctl::get_cpuid(self.fd.as_fd());
        let entries = entries.map_err(|error| self.error("KVM_GET_CPUID2", error))?;
        Ok(cpuid::from_kvm(&entries))
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
}

macro_rules! ioctls {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty)?) -> $ret:ty = $ioctl:literal, $ask:expr;)*) => {
        impl KvmVcpu {
            $($(#[$doc])*
            ///
            /// # Errors
            /// The error of the ioctl.
            pub fn $name(&self, $($arg: $type)?) -> Result<$ret, VcpuError> {
                let ask: fn(BorrowedFd<'_>, $(&$type)?) -> Result<$ret, Errno> = $ask;
                ask(self.fd.as_fd(), $(&$arg)?).map_err(|error| self.error($ioctl, error))
            })*
        }
    };
}

ioctls! {
    /// The guest's own debug registers.
    get_debug_regs() -> kvm_debugregs = "KVM_GET_DEBUGREGS", |fd| ioctl::read(fd, ioctl::GET_DEBUGREGS);
    /// Sets the guest's own debug registers.
    set_debug_regs(regs: &kvm_debugregs) -> () = "KVM_SET_DEBUGREGS",
        |fd, regs| ioctl::write(fd, ioctl::SET_DEBUGREGS, *regs).map(drop);
    /// The x87 and XMM registers.
    get_fpu() -> kvm_fpu = "KVM_GET_FPU", |fd| ioctl::read(fd, ioctl::GET_FPU);
    /// Sets the x87 and XMM registers.
    set_fpu(fpu: &kvm_fpu) -> () = "KVM_SET_FPU", |fd, fpu| ioctl::write(fd, ioctl::SET_FPU, *fpu).map(drop);
    /// The guest's TSC frequency in kHz.
    get_tsc_khz() -> u32 = "KVM_GET_TSC_KHZ",
        |fd| ioctl::call(fd, ioctl::GET_TSC_KHZ, 0).map(i32::cast_unsigned);
    /// The local APIC's registers.
    get_lapic() -> kvm_lapic_state = "KVM_GET_LAPIC", |fd| ioctl::read(fd, ioctl::GET_LAPIC);
    /// Whether it runs, halts, or waits to be started.
    get_mp_state() -> kvm_mp_state = "KVM_GET_MP_STATE", |fd| ioctl::read(fd, ioctl::GET_MP_STATE);
    /// Has it run, halt, or wait to be started.
    set_mp_state(state: kvm_mp_state) -> () = "KVM_SET_MP_STATE",
        |fd, state| ioctl::write(fd, ioctl::SET_MP_STATE, state).map(drop);
    /// Sends an NMI.
    nmi() -> () = "KVM_NMI", |fd| ioctl::call(fd, ioctl::NMI, 0).map(drop);
    /// Sends an SMI.
    smi() -> () = "KVM_SMI", |fd| ioctl::call(fd, ioctl::SMI, 0).map(drop);
    /// Tells a guest that reads KVM's clock that it was stopped.
    clock_ctrl() -> () = "KVM_KVMCLOCK_CTRL", |fd| ioctl::call(fd, ioctl::CLOCK_CTRL, 0).map(drop);
}

impl AsFd for KvmVcpu {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl KvmVcpu {
    fn error(&self, ioctl: &'static str, error: Errno) -> VcpuError {
        VcpuError::new(self.id, ioctl, error)
    }

    /// General registers.
    ///
    /// # Errors
    /// The error of `KVM_GET_REGS`.
    pub fn get_regs(&self) -> Result<kvm_regs, VcpuError> {
        if let Some(regs) = self.staged_regs.get() {
            return Ok(regs);
        }
        if self.regs_fresh.get() {
            return Ok(self.pages.synced().regs);
        }
        let regs = ioctl::read(self.fd.as_fd(), ioctl::GET_REGS);
        regs.map_err(|error| self.error("KVM_GET_REGS", error))
    }

    /// Sets the general registers.
    ///
    /// # Errors
    /// The error of `KVM_SET_REGS`.
    pub fn set_regs(&self, regs: &kvm_regs) -> Result<(), VcpuError> {
        if self.stageable.get() {
            self.staged_regs.set(Some(*regs));
            self.staged.set(true);
            return Ok(());
        }
        self.regs_fresh.set(false);
        let set = ioctl::write(self.fd.as_fd(), ioctl::SET_REGS, regs).map(drop);
        set.map_err(|error| self.error("KVM_SET_REGS", error))
    }

    /// Segment, control and table registers.
    ///
    /// # Errors
    /// The error of `KVM_GET_SREGS`.
    pub fn get_sregs(&self) -> Result<kvm_sregs, VcpuError> {
        if let Some(sregs) = self.staged_sregs.get() {
            return Ok(sregs);
        }
        if self.sregs_fresh.get() {
            return Ok(self.pages.synced().sregs);
        }
        let sregs = ioctl::read(self.fd.as_fd(), ioctl::GET_SREGS);
        sregs.map_err(|error| self.error("KVM_GET_SREGS", error))
    }

    /// Sets segment, control and table registers.
    ///
    /// # Errors
    /// The error of `KVM_SET_SREGS`.
    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<(), VcpuError> {
        if self.stageable.get() {
            self.staged_sregs.set(Some(*sregs));
            self.staged.set(true);
            return Ok(());
        }
        self.sregs_fresh.set(false);
        let set = ioctl::write(self.fd.as_fd(), ioctl::SET_SREGS, sregs).map(drop);
        set.map_err(|error| self.error("KVM_SET_SREGS", error))
    }

    /// Pending and injected events.
    pub(crate) fn get_vcpu_events(&self) -> Result<kvm_vcpu_events, VcpuError> {
        self.flush()?;
        let events = ioctl::read(self.fd.as_fd(), ioctl::GET_VCPU_EVENTS);
        events.map_err(|error| self.error("KVM_GET_VCPU_EVENTS", error))
    }

    /// Sets pending and injected events.
    pub(crate) fn set_vcpu_events(&self, events: &kvm_vcpu_events) -> Result<(), VcpuError> {
        self.flush()?;
        let set = ioctl::write(self.fd.as_fd(), ioctl::SET_VCPU_EVENTS, events).map(drop);
        set.map_err(|error| self.error("KVM_SET_VCPU_EVENTS", error))
    }

    /// Breakpoints and stepping of ours.
    ///
    /// # Errors
    /// The error of `KVM_SET_GUEST_DEBUG`.
    pub fn set_guest_debug(&self, debug: &kvm_guest_debug) -> Result<(), VcpuError> {
        self.flush()?;
        let set = ioctl::write(self.fd.as_fd(), ioctl::SET_GUEST_DEBUG, debug).map(drop);
        set.map_err(|error| self.error("KVM_SET_GUEST_DEBUG", error))
    }

    /// Sets staged registers now: before an ioctl that looks at what is in them, or that
    /// queues an exception, which KVM drops when registers are set.
    #[cold]
    pub(crate) fn flush(&self) -> Result<(), VcpuError> {
        if !self.staged.replace(false) {
            return Ok(());
        }
        if let Some(sregs) = self.staged_sregs.take() {
            self.sregs_fresh.set(false);
            let set = ioctl::write(self.fd.as_fd(), ioctl::SET_SREGS, &sregs).map(drop);
            set.map_err(|error| self.error("KVM_SET_SREGS", error))?;
        }
        if let Some(regs) = self.staged_regs.take() {
            self.regs_fresh.set(false);
            let set = ioctl::write(self.fd.as_fd(), ioctl::SET_REGS, &regs).map(drop);
            set.map_err(|error| self.error("KVM_SET_REGS", error))?;
        }
        Ok(())
    }

    /// The guest's TSC now, or a moment ago; 0 if KVM does not tell.
    pub(crate) fn guest_tsc(&self) -> Result<u64, VcpuError> {
        const TSC: u32 = 0x10;
        let ask = || Ok(self.read_msr(TSC)?.unwrap_or(0));
        self.tsc.read(|| time::now().0, ask)
    }

    /// Reads one MSR of the vCPU as the guest would; `None` if KVM refuses.
    ///
    /// # Errors
    /// The error of `KVM_GET_MSRS`.
    #[cold]
    pub fn read_msr(&self, index: u32) -> Result<Option<u64>, VcpuError> {
        // EFER and the APIC base are MSRs and special registers.
        self.flush()?;
        let read = ioctl::get_msr(self.fd.as_fd(), index);
        read.map_err(|error| self.error("KVM_GET_MSRS", error))
    }

    /// Writes one MSR of the vCPU; false if KVM refuses.
    ///
    /// # Errors
    /// The error of `KVM_SET_MSRS`.
    #[cold]
    pub fn write_msr(&self, index: u32, value: u64) -> Result<bool, VcpuError> {
        self.flush()?;
        self.sregs_fresh.set(false);
        let written = ioctl::set_msr(self.fd.as_fd(), index, value);
        written.map_err(|error| self.error("KVM_SET_MSRS", error))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const EFER: u32 = 0xc000_0080;
    /// SYSCALL is enabled.
    const SCE: u64 = 1;

    #[test]
    fn an_msr_is_that_of_the_registers_set_last() {
        if !Path::new("/dev/kvm").exists() {
            println!(
                "skipped: an_msr_is_that_of_the_registers_set_last: this machine has no /dev/kvm"
            );
            return;
        }
        let vm = ioctl::create_vm(ioctl::open_kvm().unwrap().as_fd()).unwrap();
        let fd = ioctl::create_vcpu(vm.as_fd(), 0).unwrap();
        let vm = KvmVm::new(vm).unwrap();
        let mut vcpu = KvmVcpu::new(fd, &vm, VcpuId(0)).unwrap();
        let stage = |vcpu: &KvmVcpu, efer: u64| {
            let mut sregs = vcpu.get_sregs().unwrap();
            sregs.efer = efer;
            // As at a debug exit.
            vcpu.stageable.set(true);
            vcpu.set_sregs(&sregs).unwrap();
        };
        let before = vcpu.get_sregs().unwrap().efer & !SCE;
        stage(&vcpu, before | SCE);
        assert_eq!(vcpu.read_msr(EFER).unwrap(), Some(before | SCE));
        stage(&vcpu, before);
        assert!(vcpu.write_msr(EFER, before | SCE).unwrap());
        vcpu.leave().unwrap();
        assert_eq!(vcpu.get_sregs().unwrap().efer, before | SCE);
    }
}
