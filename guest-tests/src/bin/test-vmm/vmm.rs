//! A machine with one vCPU, which has a PMU: made, run on a thread of its own, saved. The steps
//! are those of `docs/guide/embedding.md`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use kvm_bindings::{
    CpuId, KVM_CAP_SPLIT_IRQCHIP, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_enable_cap,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use kvm_pmu::{
    Answer, Armed, Exited, KvmPmu, KvmPmuParts, KvmVcpu, KvmVm, Lent, MsrFilter, PatchRefusal,
    ProtectPages, ThreadContext, TrapPlan, VcpuId, VmExit, VmTraps, cpuid, msr_ranges,
    switch_off_vpmu, vcpu_fd, vm_fd,
};
use pmu_virt::{CorePmu, CounterBackend as _, Grant, OwnerId, PmuModel, SimBackend, VcpuPmu};

use crate::boot::Kernel;
use crate::devices::{Ending, Ports};
use crate::filter;
use crate::ioapic::{Interrupts, PINS, SmallIoApic};
use crate::memory::GuestRam;
use crate::snapshot::{Saved, SavedVcpu};
use crate::sys;
use crate::truth::{self, Counted, Witness};

/// L1's processor is AMD's.
const MODEL: &str = "amd-core";

/// When a guest is paused to be saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pause {
    Never,
    /// Before it is entered.
    AtOnce,
    /// At the exit at which it enables a counter.
    AtEnabling,
    /// When a counter has been enabled for so long, in this process.
    After(Duration),
}

/// Why a guest does not run any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    Ended(Ending),
    Paused,
}

/// A machine that does not run yet.
pub(crate) struct OneCpu {
    kvm: Kvm,
    vm: Arc<VmFd>,
    fd: VcpuFd,
    vcpu: KvmVcpu,
    pmu: KvmPmu,
    counters: Box<CorePmu>,
    traps: Arc<VmTraps>,
    memory: Arc<GuestRam>,
    chip: Interrupts,
    ports: Ports,
    witness: Witness,
}

/// What the vCPU's thread gives back.
pub(crate) struct Left {
    fd: VcpuFd,
    vcpu: KvmVcpu,
    pmu: KvmPmu,
    ports: Ports,
    witness: Witness,
    pub(crate) stop: Stop,
}

/// The parts that no thread needs for itself.
pub(crate) struct Stopped {
    kvm: Kvm,
    vm: Arc<VmFd>,
    traps: Arc<VmTraps>,
    chip: Interrupts,
    pub(crate) left: Left,
}

impl OneCpu {
    /// With `memory`, and `kernel` in it.
    pub(crate) fn boot(memory: GuestRam, kernel: &Kernel<'_>) -> Result<Self> {
        let machine = Self::new(memory, None)?;
        kernel.load(machine.memory.for_vmm(), &machine.vcpu)?;
        Ok(machine)
    }

    /// With `memory`, and all else as it was saved.
    pub(crate) fn restore(memory: GuestRam, saved: &Saved) -> Result<Self> {
        Self::new(memory, Some(saved))
    }

    fn new(memory: GuestRam, saved: Option<&Saved>) -> Result<Self> {
        let kvm = Kvm::new().context("/dev/kvm")?;
        let vm = Arc::new(kvm.create_vm()?);
        let memory = Arc::new(memory);
        sys::give(&vm, memory.for_kvm())?;
        let pmu_vm = KvmVm::new(vm_fd(&vm))?;
        switch_off_vpmu(&pmu_vm)?;
        split_irqchip(&vm)?;
        let model = PmuModel::parse(MODEL)?;
        let filter = MsrFilter::new(&msr_ranges(Some(&model)))?;
        filter.install(&pmu_vm)?;
        let fd = vm.create_vcpu(0)?;
        let vcpu = KvmVcpu::new(vcpu_fd(&fd), &pmu_vm, VcpuId(0))?;
        let tsc_khz = vcpu.get_tsc_khz()?;
        let clocks = truth::clocks(tsc_khz)?;
        let source = SimBackend::of(&clocks);
        let tells = model.cpuid(|request| source.plan(request).is_ok());
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
        let (leaves, _) = cpuid::merge(cpuid::from_kvm(supported.as_slice()), Some(&tells), &[]);
        fd.set_cpuid2(&platform(cpuid::to_kvm(&leaves))?)?;
        if let Some(saved) = saved {
            saved.vcpu.restore(&vm, (&fd, &vcpu))?;
        }
        let mut logical = VcpuPmu::detached(OwnerId(0), model, Grant::everything());
        let mut counters = Box::new(CorePmu::new(Box::new(source)));
        // Before it is a `KvmPmu`, which then knows that the guest may read a counter at once.
        if let Some(saved) = saved {
            logical.restore(None, &saved.pmu)?;
        }
        logical.attach(&mut counters);
        let pages: Arc<dyn ProtectPages> = memory.clone();
        let mut parts = KvmPmuParts::new(logical, tsc_khz);
        parts.traps = VmTraps::new(TrapPlan::default(), Some(pages));
        let traps = parts.traps.clone();
        let pmu = KvmPmu::new(&vcpu, parts)?;
        let chip = match saved {
            None => SmallIoApic::new(),
            Some(saved) => {
                SmallIoApic::restored(&saved.ioapic).context("the snapshot's I/O APIC")?
            }
        };
        let chip = Interrupts::new(chip, vm.clone());
        let counted = saved.map_or_else(Counted::default, |saved| saved.counted.clone());
        Ok(Self {
            ports: Ports::new(&chip, saved.map(|saved| &saved.serial))?,
            witness: Witness::new(&clocks, &counted)?,
            kvm,
            vm,
            fd,
            vcpu,
            pmu,
            counters,
            traps,
            memory,
            chip,
        })
    }

    /// Runs until it ends or is paused.
    pub(crate) fn run(self, pause: Pause) -> Result<Stopped> {
        sys::handle_kicks()?;
        let (kvm, traps, chip) = (self.kvm, self.traps, self.chip);
        let vm = self.vm.clone();
        let stop = Arc::new(AtomicBool::new(pause == Pause::AtOnce));
        let (tell, told) = channel();
        let mut runner = Runner {
            fd: self.fd,
            vcpu: self.vcpu,
            pmu: self.pmu,
            memory: self.memory,
            chip: chip.clone(),
            ports: self.ports,
            witness: self.witness,
            stop: stop.clone(),
            at_enabling: pause == Pause::AtEnabling,
            tell,
            has_told: false,
        };
        let counters = self.counters;
        let thread = thread::Builder::new().name("vcpu".into());
        let thread = thread.spawn(move || -> Result<Left> {
            filter::apply()?;
            let stop = runner.run(counters)?;
            Ok(Left {
                fd: runner.fd,
                vcpu: runner.vcpu,
                pmu: runner.pmu,
                ports: runner.ports,
                witness: runner.witness,
                stop,
            })
        })?;
        if let Pause::After(time) = pause {
            stop_later(&thread, &told, time, &stop)?;
        }
        let left = thread
            .join()
            .map_err(|_| anyhow!("the vCPU's thread panicked"))??;
        Ok(Stopped {
            kvm,
            vm,
            traps,
            chip,
            left,
        })
    }
}

/// Waits until a counter is enabled, and then so long; `told` is closed when the thread ends.
fn stop_later(
    thread: &JoinHandle<Result<Left>>,
    told: &Receiver<()>,
    time: Duration,
    stop: &AtomicBool,
) -> Result<()> {
    if told.recv().is_err() || told.recv_timeout(time) != Err(RecvTimeoutError::Timeout) {
        return Ok(());
    }
    stop.store(true, Ordering::Relaxed);
    Ok(sys::kick(thread)?)
}

/// KVM has the local APIC alone.
fn split_irqchip(vm: &VmFd) -> Result<()> {
    let mut request = kvm_enable_cap {
        cap: KVM_CAP_SPLIT_IRQCHIP,
        ..Default::default()
    };
    request.args[0] = PINS.into();
    vm.enable_cap(&request).context("KVM_CAP_SPLIT_IRQCHIP")
}

/// What KVM's list lacks or has too much of: a hypervisor, the deadline timer (there is no other
/// to calibrate by), and neither SVM nor another number than 0 for the one processor.
fn platform(mut leaves: Vec<kvm_cpuid_entry2>) -> Result<CpuId> {
    for leaf in &mut leaves {
        match leaf.function {
            1 => {
                leaf.ecx |= 1 << 31 | 1 << 24;
                leaf.ebx &= 0x00ff_ffff;
            }
            0xb | 0x1f => leaf.edx = 0,
            0x8000_0001 => leaf.ecx &= !(1 << 2),
            _ => {}
        }
    }
    CpuId::from_entries(&leaves).map_err(|_| anyhow!("too many CPUID leaves"))
}

/// What the vCPU's thread has.
struct Runner {
    fd: VcpuFd,
    vcpu: KvmVcpu,
    pmu: KvmPmu,
    memory: Arc<GuestRam>,
    chip: Interrupts,
    ports: Ports,
    witness: Witness,
    /// To be looked at before each entry.
    stop: Arc<AtomicBool>,
    at_enabling: bool,
    /// Told once, when a counter is enabled.
    tell: Sender<()>,
    has_told: bool,
}

impl Runner {
    fn run(&mut self, counters: Box<CorePmu>) -> Result<Stop> {
        let thread = ThreadContext::new(self.pmu.tsc_khz())?;
        let mut thread = thread.with_counters(Some(counters));
        self.pmu.enter_thread(&self.vcpu, &mut thread);
        let stop = self.enter_until_stopped(&mut thread)?;
        self.finish_access()?;
        self.pmu.leave_thread(&mut self.vcpu, &mut thread)?;
        Ok(stop)
    }

    fn enter_until_stopped(&mut self, thread: &mut ThreadContext) -> Result<Stop> {
        let memory = self.memory.clone();
        loop {
            if self.witness.is_enabled() && !self.has_told {
                self.has_told = true;
                // Whoever waits for no pause does not listen.
                let _ = self.tell.send(());
                if self.at_enabling {
                    return Ok(Stop::Paused);
                }
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(Stop::Paused);
            }
            let lent = Lent {
                memory: memory.for_vmm(),
                thread,
                observer: &mut self.witness,
            };
            let exited = self.pmu.enter(&mut self.vcpu, lent)?.run()?;
            if let Exited::Vmm(exit) = exited
                && let Some(ending) = self.answer(exit)?
            {
                return Ok(Stop::Ended(ending));
            }
        }
    }

    /// Answers an exit that is not the PMU's. How the guest has ended, if it has.
    fn answer(&mut self, exit: VmExit) -> Result<Option<Ending>> {
        match exit {
            VmExit::IoOut { port, width: 1, .. } => {
                let bytes = self.vcpu.io_data().to_vec();
                for byte in bytes {
                    if let Some(ending) = self.ports.store(port, byte)? {
                        return Ok(Some(ending));
                    }
                }
            }
            VmExit::IoIn { port, width, .. } => {
                let ports = &mut self.ports;
                let bytes = self.vcpu.io_data().iter_mut();
                bytes.for_each(|byte| *byte = if width == 1 { ports.load(port) } else { 0xff });
            }
            VmExit::IoOut { .. } => {}
            VmExit::MmioRead { address, .. } => {
                let bytes = self.chip.load(address).unwrap_or([0xff; 8]);
                self.vcpu.answer(Answer::Mmio(bytes));
            }
            VmExit::MmioWrite { address, data, .. } => self.chip.store(address, data)?,
            other => bail!("the guest cannot be run on: {other:x?}"),
        }
        Ok(None)
    }

    /// What the last exit was answered with takes place; the guest is not entered.
    fn finish_access(&mut self) -> Result<()> {
        self.vcpu.set_immediate_exit(true);
        let exit = self.vcpu.enter();
        self.vcpu.set_immediate_exit(false);
        match exit? {
            VmExit::Interrupted => Ok(()),
            other => bail!("an access that was to be finished led to {other:x?}"),
        }
    }
}

impl Stopped {
    /// Saves all but the memory, which stays where it is. The PMU is saved here, on a thread
    /// that never ran the vCPU.
    pub(crate) fn save(self, file: &Path) -> Result<Counted> {
        self.traps.restore();
        let Left {
            fd,
            vcpu,
            pmu,
            ports,
            witness,
            ..
        } = self.left;
        let pmu = pmu.pmu().context("the vCPU has a PMU")?.save()?;
        let counted = witness.counted();
        let saved = Saved {
            vcpu: SavedVcpu::of(&self.kvm, &self.vm, (&fd, &vcpu))?,
            pmu,
            ioapic: self.chip.chip().save(),
            serial: ports.save(),
            counted: counted.clone(),
        };
        saved.write(file)?;
        Ok(counted)
    }

    /// What the guest must have counted.
    pub(crate) fn counted(&self) -> Counted {
        self.left.witness.counted()
    }

    /// How the guest's #GP handler is watched, in a word. A breakpoint stands for a patch for a
    /// moment after the guest has written to the handler's page.
    pub(crate) fn watch(&self) -> &'static str {
        match self.left.witness.armed {
            Armed::Nothing => "unwatched",
            Armed::Patch => "patched",
            Armed::Breakpoint(Some(PatchRefusal::JustWritten)) => "just-written",
            Armed::Breakpoint(_) => "breakpoint",
        }
    }
}
