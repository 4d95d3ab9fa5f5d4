//! A vCPU that has a PMU: made, run on a thread of its own, saved.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, anyhow, bail};
use kvm_bindings::CpuId;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use kvm_pmu::{
    Answer, Armed, Exited, KvmPmu, KvmPmuParts, KvmVcpu, KvmVm, Lent, PatchRefusal, ThreadContext,
    VcpuId, VmExit, VmTraps, cpuid, vcpu_fd,
};
use pmu_virt::{CorePmu, Grant, OwnerId, PmuModel, SimBackend, SimClocks, VcpuPmu};

use crate::devices::{Ending, Ports};
use crate::filter;
use crate::ioapic::Interrupts;
use crate::memory::GuestRam;
use crate::snapshot::{SavedKvm, SavedVcpu};
use crate::truth::{Counted, Witness};

/// Why a vCPU does not run any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// It has ended the machine.
    Ended(Ending),
    Paused,
}

/// What a vCPU's thread tells, each at most once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    /// The guest's #GP handler is watched on it, from an entry on.
    Watched,
    /// It has stopped, and nobody had asked for it.
    Stopped,
}

/// KVM's part.
#[derive(Debug)]
pub(crate) struct BareVcpu {
    pub(crate) fd: VcpuFd,
    pub(crate) kvm: KvmVcpu,
}

/// One that does not run yet.
pub(crate) struct TestVcpu {
    bare: BareVcpu,
    pmu: KvmPmu,
    counters: Box<CorePmu>,
    witness: Witness,
}

/// One whose thread was left.
pub(crate) struct LeftVcpu {
    pub(crate) bare: BareVcpu,
    pmu: KvmPmu,
    counters: Box<CorePmu>,
    pub(crate) witness: Witness,
    pub(crate) stop: Stop,
}

/// What its thread has of the machine.
pub(crate) struct Around {
    pub(crate) memory: Arc<GuestRam>,
    pub(crate) chip: Interrupts,
    pub(crate) ports: Arc<Mutex<Ports>>,
    /// To be looked at before each entry.
    pub(crate) stop: Arc<AtomicBool>,
    /// It stops where the guest enables a counter.
    pub(crate) at_enabling: bool,
    pub(crate) tell: Sender<Told>,
}

impl BareVcpu {
    pub(crate) fn new((vm, pmu_vm): (&VmFd, &KvmVm), id: u32) -> Result<Self> {
        let fd = vm.create_vcpu(id.into())?;
        let kvm = KvmVcpu::new(vcpu_fd(&fd), pmu_vm, VcpuId(id))?;
        Ok(Self { fd, kvm })
    }

    /// What KVM's list lacks or has too much of: a hypervisor, the deadline timer (there is no
    /// other to calibrate by), no SVM, and each vCPU a package of its own with one core.
    pub(crate) fn set_cpuid(&self, leaves: &cpuid::Leaves) -> Result<()> {
        let VcpuId(id) = self.kvm.id();
        let mut leaves = cpuid::to_kvm(leaves);
        for leaf in &mut leaves {
            match leaf.function {
                1 => {
                    leaf.ecx |= 1 << 31 | 1 << 24;
                    leaf.ebx = leaf.ebx & 0x00ff_ffff | id << 24;
                }
                0xb | 0x1f => leaf.edx = id,
                0x8000_0001 => leaf.ecx &= !(1 << 2),
                0x8000_001e => leaf.eax = id,
                _ => {}
            }
        }
        let leaves = CpuId::from_entries(&leaves).map_err(|_| anyhow!("too many CPUID leaves"))?;
        Ok(self.fd.set_cpuid2(&leaves)?)
    }
}

impl TestVcpu {
    /// Of a vCPU that has its CPUID, and its registers where it was saved.
    pub(crate) fn new(
        bare: BareVcpu,
        model: &PmuModel,
        (clocks, traps): (&SimClocks, &Arc<VmTraps>),
        saved: Option<&SavedVcpu>,
    ) -> Result<Self> {
        let owner = OwnerId(bare.kvm.id().0);
        let mut logical = VcpuPmu::detached(owner, model.clone(), Grant::everything());
        let mut counters = Box::new(CorePmu::new(Box::new(SimBackend::of(clocks))));
        // Before it is a `KvmPmu`, which then knows that the guest may read a counter at once.
        if let Some(saved) = saved {
            logical.restore(None, &saved.pmu)?;
        }
        logical.attach(&mut counters);
        let mut parts = KvmPmuParts::new(logical, bare.kvm.get_tsc_khz()?);
        parts.traps = traps.clone();
        let counted = saved.map_or_else(Counted::default, |saved| saved.counted.clone());
        Ok(Self {
            pmu: KvmPmu::new(&bare.kvm, parts)?,
            witness: Witness::new(clocks, owner, &counted)?,
            bare,
            counters,
        })
    }

    pub(crate) fn bare(&self) -> &BareVcpu {
        &self.bare
    }

    /// Runs it on the calling thread, until it stops.
    pub(crate) fn run(self, around: Around) -> Result<LeftVcpu> {
        let counters = self.counters;
        let mut runner = Runner {
            bare: self.bare,
            pmu: self.pmu,
            witness: self.witness,
            around,
        };
        filter::apply()?;
        let (stop, counters) = runner.run(counters)?;
        Ok(LeftVcpu {
            bare: runner.bare,
            pmu: runner.pmu,
            counters,
            witness: runner.witness,
            stop,
        })
    }
}

impl Around {
    fn is_to_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// The thread ends, in whatever way: also by a panic.
impl Drop for Around {
    fn drop(&mut self) {
        if !self.is_to_stop() {
            // Who hears it stops the other vCPUs.
            let _ = self.tell.send(Told::Stopped);
        }
    }
}

/// What runs.
struct Runner {
    bare: BareVcpu,
    pmu: KvmPmu,
    witness: Witness,
    around: Around,
}

impl Runner {
    /// Why it has stopped, and the counters, which have all that it has counted.
    fn run(&mut self, counters: Box<CorePmu>) -> Result<(Stop, Box<CorePmu>)> {
        let thread = ThreadContext::new(self.pmu.tsc_khz())?;
        let mut thread = thread.with_counters(Some(counters));
        self.pmu.enter_thread(&self.bare.kvm, &mut thread);
        let stop = self.enter_until_stopped(&mut thread)?;
        self.pmu.leave_thread(&mut self.bare.kvm, &mut thread)?;
        let counters = thread.into_counters().context("the thread's counters")?;
        Ok((stop, counters))
    }

    fn enter_until_stopped(&mut self, thread: &mut ThreadContext) -> Result<Stop> {
        let memory = self.around.memory.clone();
        let mut has_told = false;
        loop {
            if self.around.at_enabling && self.witness.is_enabled() {
                return Ok(Stop::Paused);
            }
            if !has_told && self.witness.armed != Armed::Nothing {
                has_told = true;
                // Whoever waits for no pause does not listen.
                let _ = self.around.tell.send(Told::Watched);
            }
            if self.around.is_to_stop() {
                return Ok(Stop::Paused);
            }
            let lent = Lent {
                memory: memory.for_vmm(),
                thread,
                observer: &mut self.witness,
            };
            let exited = self.pmu.enter(&mut self.bare.kvm, lent)?.run()?;
            if let Exited::Vmm(exit) = exited
                && let Some(ending) = self.answer(exit)?
            {
                return Ok(Stop::Ended(ending));
            }
        }
    }

    /// Answers an exit that is not the PMU's. How the guest has ended, if it has.
    fn answer(&mut self, exit: VmExit) -> Result<Option<Ending>> {
        let vcpu = &mut self.bare.kvm;
        let ports = || (self.around.ports.lock()).unwrap_or_else(PoisonError::into_inner);
        match exit {
            VmExit::IoOut { port, width: 1, .. } => {
                let bytes = vcpu.io_data().to_vec();
                for byte in bytes {
                    if let Some(ending) = ports().store(port, byte)? {
                        return Ok(Some(ending));
                    }
                }
            }
            VmExit::IoIn { port, width, .. } => {
                let mut ports = ports();
                let bytes = vcpu.io_data().iter_mut();
                bytes.for_each(|byte| *byte = if width == 1 { ports.load(port) } else { 0xff });
            }
            VmExit::IoOut { .. } => {}
            VmExit::MmioRead { address, .. } => {
                let bytes = self.around.chip.load(address).unwrap_or([0xff; 8]);
                vcpu.answer(Answer::Mmio(bytes));
            }
            VmExit::MmioWrite { address, data, .. } => self.around.chip.store(address, data)?,
            other => bail!("the guest cannot be run on: {other:x?}"),
        }
        Ok(None)
    }
}

impl LeftVcpu {
    /// What the last exit was answered with takes place; the guest is not entered. No vCPU runs:
    /// `kvm-pmu` does not know of it, and one that runs may patch what is stored into.
    pub(crate) fn finish_access(&mut self) -> Result<()> {
        let vcpu = &mut self.bare.kvm;
        vcpu.set_immediate_exit(true);
        let exit = vcpu.enter();
        vcpu.set_immediate_exit(false);
        match exit? {
            VmExit::Interrupted => Ok(()),
            other => bail!("an access that was to be finished led to {other:x?}"),
        }
    }

    pub(crate) fn save(&self, kvm: &Kvm) -> Result<SavedVcpu> {
        let pmu = self.pmu.pmu().context("the vCPU has a PMU")?;
        Ok(SavedVcpu {
            kvm: SavedKvm::of(kvm, &self.bare)?,
            pmu: pmu.save()?,
            counted: self.witness.counted(),
        })
    }

    /// Resets it, with what KVM had of it when nobody had run it. The counters are on no CPU of the
    /// host's, so that the next thread may have them.
    pub(crate) fn reset(mut self, power_on: &SavedKvm) -> Result<TestVcpu> {
        let pmu = self.pmu.pmu_mut().context("the vCPU has a PMU")?;
        pmu.reset(Some(&mut self.counters));
        power_on.restore(&self.bare)?;
        power_on.restore_timer(&self.bare)?;
        self.witness.reset();
        Ok(TestVcpu {
            bare: self.bare,
            pmu: self.pmu,
            counters: self.counters,
            witness: self.witness,
        })
    }

    /// How the guest's #GP handler is watched, in a word. A breakpoint stands for a patch for a
    /// moment after the guest has written to the handler's page.
    pub(crate) fn watch(&self) -> &'static str {
        match self.witness.armed {
            Armed::Nothing => "unwatched",
            Armed::Patch => "patched",
            Armed::Breakpoint(Some(PatchRefusal::JustWritten)) => "just-written",
            Armed::Breakpoint(_) => "breakpoint",
        }
    }
}
