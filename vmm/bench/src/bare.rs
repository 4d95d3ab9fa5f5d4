//! The other side of the comparison: a loop that does no more than an exit needs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_bindings::{
    KVM_CAP_SYNC_REGS, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_USE_HW_BP, KVM_SYNC_X86_REGS,
    KVM_SYNC_X86_SREGS, kvm_guest_debug, kvm_regs,
};
use vm_memory::{Bytes, GuestAddress};
use vmm::kvm::{Answer, KvmVcpu, KvmVm, VmExit};
use vmm::micro::SCRATCH;
use vmm::sys::{KickTimer, install_kick_handler};

use super::error::BenchError;
use super::guest::{Access, GP_PORT, GP_VECTOR};
use super::harness::DONE;

/// Slot 0 on execution, globally enabled (SDM vol. 3B, 18.2.4).
const DR7_SLOT0: u64 = 2 | 1 << 10;
/// What `KVM_RUN` exchanges through `kvm_run`.
const SYNCED: u32 = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS;
const RDPMC_LENGTH: u64 = 2;

/// A vCPU without a PMU behind it, and with an IDT of its own, whose #GP handler
/// does one OUT and returns.
#[derive(Debug)]
pub(super) struct Bare {
    kvm: KvmVcpu,
    vm: Arc<KvmVm>,
    timer: KickTimer,
    handler: u64,
    /// Where a #GP's frame has RIP: both rings push it onto an empty kernel stack.
    frame_rip: GuestAddress,
}

impl Bare {
    /// A loop around `kvm`, on the calling thread, with the #GP handler at `handler`.
    pub(super) fn new(kvm: KvmVcpu, vm: Arc<KvmVm>, handler: u64) -> Result<Self, BenchError> {
        /// From RIP to SS.
        const RETURN_FRAME: u64 = 5 * 8;
        install_kick_handler().map_err(|error| BenchError::Signal(error.into()))?;
        let timer =
            KickTimer::for_this_thread().map_err(|error| BenchError::Signal(error.into()))?;
        let stack = kvm.get_regs()?.rsp;
        Self::own_idt(&kvm, &vm, handler)?;
        Ok(Self {
            kvm,
            vm,
            timer,
            handler,
            frame_rip: GuestAddress(stack - RETURN_FRAME),
        })
    }

    /// Gives `kvm` a copy of its IDT in which #GP leads to `handler`.
    fn own_idt(kvm: &KvmVcpu, vm: &KvmVm, handler: u64) -> Result<(), BenchError> {
        /// In the guest's free memory, behind its samples.
        const COPY: u64 = SCRATCH + 0x8000;
        const GATE: usize = 16;
        let wrong = |error: vm_memory::GuestMemoryError| BenchError::Guest(error.to_string());
        let mut sregs = kvm.get_sregs()?;
        let mut idt = vec![0; usize::from(sregs.idt.limit) + 1];
        let original = GuestAddress(sregs.idt.base);
        vm.memory().read_slice(&mut idt, original).map_err(wrong)?;
        // Offset bits 15:0 and 31:16 (SDM vol. 3A, figure 7-8); it is below 4 GiB.
        let at = usize::from(GP_VECTOR) * GATE;
        let offset = handler.to_le_bytes();
        idt[at..at + 2].copy_from_slice(&offset[..2]);
        idt[at + 6..at + 8].copy_from_slice(&offset[2..4]);
        let copy = GuestAddress(COPY);
        vm.memory().write_slice(&idt, copy).map_err(wrong)?;
        sregs.idt.base = COPY;
        Ok(kvm.set_sregs(&sregs)?)
    }

    /// Runs to the end of a batch of `access` and returns its number; with a
    /// breakpoint on the #GP handler if `armed`, where RDPMC then ends.
    pub(super) fn batch(
        &mut self,
        access: Access,
        armed: bool,
        timeout: Duration,
    ) -> Result<u32, BenchError> {
        let Self { kvm, vm, timer, .. } = self;
        let mut request = kvm_guest_debug::default();
        if armed {
            request.control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
            request.arch.debugreg[0] = self.handler;
            request.arch.debugreg[7] = DR7_SLOT0;
        }
        kvm.set_guest_debug(&request)?;
        let synced = armed && access.is_rdpmc() && can_sync(vm);
        kvm.kvm_run().kvm_valid_regs = if synced { SYNCED.into() } else { 0 };
        let frame_rip = self.frame_rip;
        timer.arm(timeout);
        let batch = kvm.with_kicks(|kvm| batch(kvm, vm, frame_rip, timeout));
        timer.disarm();
        batch
    }
}

fn batch(
    kvm: &mut KvmVcpu,
    vm: &KvmVm,
    frame_rip: GuestAddress,
    timeout: Duration,
) -> Result<u32, BenchError> {
    let deadline = Instant::now() + timeout;
    loop {
        match kvm.run()? {
            VmExit::Rdmsr { .. } => kvm.answer(Answer::Msr(0)),
            VmExit::Wrmsr { .. } => kvm.answer(Answer::Done),
            VmExit::IoOut { port: GP_PORT, .. } => skip_rdpmc(vm, frame_rip)?,
            VmExit::Debug(_) => return_from_gp(kvm, vm)?,
            VmExit::IoOut { port: DONE, .. } => {
                let word = kvm.io_data().first_chunk();
                return Ok(word.map_or(u32::MAX, |word| u32::from_le_bytes(*word)));
            }
            VmExit::Interrupted if Instant::now() < deadline => kvm.set_immediate_exit(false),
            VmExit::Interrupted => return Err(BenchError::TimedOut(timeout)),
            other => return Err(BenchError::Guest(format!("{other:?}"))),
        }
    }
}

/// Has the handler return behind the RDPMC.
fn skip_rdpmc(vm: &KvmVm, frame_rip: GuestAddress) -> Result<(), BenchError> {
    let rip: Result<u64, _> = vm.memory().read_obj(frame_rip);
    rip.and_then(|rip| vm.memory().write_obj(rip + RDPMC_LENGTH, frame_rip))
        .map_err(|error| BenchError::Guest(error.to_string()))
}

/// Whether registers can ride in `kvm_run`.
fn can_sync(vm: &KvmVm) -> bool {
    let synced = vm.fd().check_extension_raw(KVM_CAP_SYNC_REGS.into());
    u32::try_from(synced).is_ok_and(|synced| synced & SYNCED == SYNCED)
}

/// Goes on after the RDPMC with what the #GP's frame says and nothing else: no
/// look at what raised it, no count. The guest's memory is mapped one to one.
fn return_from_gp(kvm: &mut KvmVcpu, vm: &KvmVm) -> Result<(), BenchError> {
    let synced = kvm.kvm_run().kvm_valid_regs != 0;
    let (regs, mut sregs) = if synced {
        let both = kvm.synced();
        (both.regs, both.sregs)
    } else {
        (kvm.get_regs()?, kvm.get_sregs()?)
    };
    // Error code, RIP, CS, RFLAGS, RSP, SS.
    let frame: [u64; 6] = vm
        .memory()
        .read_obj(GuestAddress(regs.rsp))
        .map_err(|error| BenchError::Guest(error.to_string()))?;
    let [_, rip, cs, rflags, rsp, ss] = frame;
    let to_user = cs & 3 != 0;
    if to_user {
        let low = |selector: u64| u16::try_from(selector & 0xffff).unwrap_or(0);
        (sregs.cs.selector, sregs.cs.dpl) = (low(cs), 3);
        (sregs.ss.selector, sregs.ss.dpl) = (low(ss), 3);
    }
    let regs = kvm_regs {
        rip: rip + RDPMC_LENGTH,
        rflags,
        rsp,
        ..regs
    };
    if synced {
        kvm.synced().regs = regs;
        kvm.kvm_run().kvm_dirty_regs |= u64::from(KVM_SYNC_X86_REGS);
        if to_user {
            kvm.synced().sregs = sregs;
            kvm.kvm_run().kvm_dirty_regs |= u64::from(KVM_SYNC_X86_SREGS);
        }
        return Ok(());
    }
    if to_user {
        kvm.set_sregs(&sregs)?;
    }
    Ok(kvm.set_regs(&regs)?)
}
