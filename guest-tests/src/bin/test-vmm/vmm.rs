//! A machine: made, run with a thread for each vCPU, saved. The steps are those of
//! `docs/guide/embedding.md`.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use kvm_bindings::{KVM_CAP_SPLIT_IRQCHIP, KVM_MAX_CPUID_ENTRIES, kvm_enable_cap};
use kvm_ioctls::{Kvm, VmFd};
use kvm_pmu::{
    KvmVm, MsrFilter, ProtectPages, TrapPlan, VmTraps, cpuid, msr_ranges, switch_off_vpmu, vm_fd,
};
use pmu_virt::{CounterBackend as _, PmuModel, SimBackend};

use crate::boot::Kernel;
use crate::devices::{Ending, Ports};
use crate::ioapic::{Interrupts, PINS, SmallIoApic};
use crate::memory::GuestRam;
use crate::snapshot::{Saved, SavedClocks, SavedKvm};
use crate::sys;
use crate::truth::{self, Counted};
use crate::vcpu::{Around, BareVcpu, LeftVcpu, Stop, TestVcpu, Told};

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
    /// When the guest's #GP handler has been watched on all vCPUs for so long, in this process.
    After(Duration),
    /// The same of the first vCPU; the others are not entered.
    Alone(Duration),
}

impl Pause {
    /// Whether this vCPU is entered at all.
    fn enters(self, number: usize) -> bool {
        match self {
            Self::Never | Self::AtEnabling | Self::After(_) => true,
            Self::AtOnce => false,
            Self::Alone(_) => number == 0,
        }
    }

    fn time(self) -> Option<Duration> {
        match self {
            Self::After(time) | Self::Alone(time) => Some(time),
            Self::Never | Self::AtOnce | Self::AtEnabling => None,
        }
    }
}

/// What its vCPUs are around.
struct Board {
    kvm: Kvm,
    vm: Arc<VmFd>,
    traps: Arc<VmTraps>,
    memory: Arc<GuestRam>,
    chip: Interrupts,
    ports: Arc<Mutex<Ports>>,
    /// Of vCPUs that nobody has run; none of a machine that was restored.
    power_on: Vec<SavedKvm>,
}

/// A machine that does not run yet.
pub(crate) struct TestVm {
    board: Board,
    vcpus: Vec<TestVcpu>,
}

/// One whose vCPUs were all left.
pub(crate) struct StoppedVm {
    board: Board,
    vcpus: Vec<LeftVcpu>,
}

impl TestVm {
    /// With so many vCPUs, `memory`, and `kernel` in it.
    pub(crate) fn boot(cpus: u8, memory: GuestRam, kernel: &Kernel<'_>) -> Result<Self> {
        let mut machine = Self::new(cpus.into(), memory, None)?;
        let kvm = &machine.board.kvm;
        let vcpus = machine.vcpus.iter();
        let power_on = vcpus.map(|vcpu| SavedKvm::of(kvm, vcpu.bare()));
        machine.board.power_on = power_on.collect::<Result<_>>()?;
        machine.load(kernel)
    }

    /// The vCPUs but the first wait for INIT and SIPI, which are between the guest and KVM's local
    /// APICs.
    fn load(self, kernel: &Kernel<'_>) -> Result<Self> {
        let cpus = u8::try_from(self.vcpus.len())?;
        let first = &self.vcpus[0].bare().kvm;
        kernel.load(self.board.memory.for_vmm(), first, cpus)?;
        Ok(self)
    }

    /// With `memory`, and all else as it was saved.
    pub(crate) fn restore(memory: GuestRam, saved: &Saved) -> Result<Self> {
        Self::new(saved.vcpus.len(), memory, Some(saved))
    }

    fn new(cpus: usize, memory: GuestRam, saved: Option<&Saved>) -> Result<Self> {
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
        let bare = (0..).take(cpus).map(|id| BareVcpu::new((&vm, &pmu_vm), id));
        let bare: Vec<_> = bare.collect::<Result<_>>()?;
        let tsc_khz = bare[0].kvm.get_tsc_khz()?;
        let clocks = truth::clocks(tsc_khz)?;
        let source = SimBackend::of(&clocks);
        let tells = model.cpuid(|request| source.plan(request).is_ok());
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
        let (leaves, _) = cpuid::merge(cpuid::from_kvm(supported.as_slice()), Some(&tells), &[]);
        bare.iter().try_for_each(|one| one.set_cpuid(&leaves))?;
        if let Some(saved) = saved {
            for (one, saved) in bare.iter().zip(&saved.vcpus) {
                saved.kvm.restore(one)?;
            }
            saved.clocks.restore(&vm, &bare)?;
            for (one, saved) in bare.iter().zip(&saved.vcpus) {
                saved.kvm.restore_timer(one)?;
            }
        }
        let pages: Arc<dyn ProtectPages> = memory.clone();
        let traps = VmTraps::new(TrapPlan::default(), Some(pages));
        let with_pmu = |(n, one): (usize, BareVcpu)| {
            let saved = saved.map(|saved| &saved.vcpus[n]);
            TestVcpu::new(one, &model, (&clocks, &traps), saved)
        };
        let vcpus = bare.into_iter().enumerate().map(with_pmu);
        let vcpus = vcpus.collect::<Result<_>>()?;
        let chip = match saved {
            None => SmallIoApic::new(),
            Some(saved) => {
                SmallIoApic::restored(&saved.ioapic).context("the snapshot's I/O APIC")?
            }
        };
        let chip = Interrupts::new(chip, vm.clone());
        let ports = Ports::new(&chip, saved.map(|saved| &saved.serial))?;
        let board = Board {
            ports: Arc::new(Mutex::new(ports)),
            kvm,
            vm,
            traps,
            memory,
            chip,
            power_on: Vec::new(),
        };
        Ok(Self { board, vcpus })
    }

    /// Runs until it ends or is paused.
    pub(crate) fn run(self, pause: Pause) -> Result<StoppedVm> {
        let board = self.board;
        let (tell, told) = channel();
        let mut threads = Vec::new();
        for (n, vcpu) in self.vcpus.into_iter().enumerate() {
            let around = Around {
                memory: board.memory.clone(),
                chip: board.chip.clone(),
                ports: board.ports.clone(),
                stop: Arc::new(AtomicBool::new(!pause.enters(n))),
                at_enabling: pause == Pause::AtEnabling,
                tell: tell.clone(),
            };
            let stop = around.stop.clone();
            let thread = thread::Builder::new().name(format!("vcpu{n}"));
            let thread = thread.spawn(move || vcpu.run(around))?;
            threads.push((thread, stop));
        }
        // The threads have the others: who waits for them hears when there is none left.
        drop(tell);
        let entered = (0..threads.len()).filter(|n| pause.enters(*n)).count();
        wait(&told, pause.time(), entered);
        let mut vcpus = stop_all(threads)?;
        vcpus.iter_mut().try_for_each(LeftVcpu::finish_access)?;
        Ok(StoppedVm { board, vcpus })
    }
}

impl Board {
    fn ports(&self) -> MutexGuard<'_, Ports> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until a vCPU stops by itself; or all `entered` ones are watched, and then so long.
fn wait(told: &Receiver<Told>, time: Option<Duration>, mut entered: usize) {
    loop {
        let next = match time {
            Some(time) if entered == 0 => told.recv_timeout(time).ok(),
            _ => told.recv().ok(),
        };
        match next {
            Some(Told::Watched) => entered -= 1,
            Some(Told::Stopped) | None => return,
        }
    }
}

/// The first is stopped last, and may wait for a patch while the others do not run any more. All
/// that have failed are named, as one that fails stops the others.
fn stop_all(
    threads: Vec<(JoinHandle<Result<LeftVcpu>>, Arc<AtomicBool>)>,
) -> Result<Vec<LeftVcpu>> {
    let (mut left, mut failed) = (Vec::new(), Vec::new());
    for (n, (thread, stop)) in threads.into_iter().enumerate().rev() {
        stop.store(true, Ordering::Relaxed);
        sys::kick(&thread)?;
        match thread.join() {
            Ok(Ok(vcpu)) => left.push(vcpu),
            Ok(Err(error)) => failed.push(format!("vCPU {n}: {error:#}")),
            Err(_) => failed.push(format!("vCPU {n}: its thread panicked")),
        }
    }
    if !failed.is_empty() {
        bail!("{}", failed.join("; "));
    }
    left.reverse();
    Ok(left)
}

/// KVM has the local APICs alone.
fn split_irqchip(vm: &VmFd) -> Result<()> {
    let mut request = kvm_enable_cap {
        cap: KVM_CAP_SPLIT_IRQCHIP,
        ..Default::default()
    };
    request.args[0] = PINS.into();
    vm.enable_cap(&request).context("KVM_CAP_SPLIT_IRQCHIP")
}

impl StoppedVm {
    /// How the guest has ended; none if it is paused.
    pub(crate) fn ending(&self) -> Option<Ending> {
        self.vcpus.iter().find_map(|vcpu| match vcpu.stop {
            Stop::Ended(ending) => Some(ending),
            Stop::Paused => None,
        })
    }

    /// Resets it in place, with `kernel` in its memory.
    pub(crate) fn reset(self, kernel: &Kernel<'_>) -> Result<TestVm> {
        let board = self.board;
        // Its memory is written over.
        board.traps.restore();
        let vcpus = self.vcpus.into_iter().zip(&board.power_on);
        let vcpus = vcpus.map(|(vcpu, power_on)| vcpu.reset(power_on));
        let vcpus = vcpus.collect::<Result<_>>()?;
        *board.chip.chip() = SmallIoApic::new();
        *board.ports() = Ports::new(&board.chip, None)?;
        TestVm { board, vcpus }.load(kernel)
    }

    /// Saves all but the memory, which stays where it is. The PMUs are saved here, on a thread
    /// that never ran a vCPU.
    pub(crate) fn save(&self, file: &Path) -> Result<()> {
        let Board { kvm, vm, .. } = &self.board;
        self.board.traps.restore();
        // The guest compares its clocks, so they are read one behind the other.
        let bare: Vec<_> = self.vcpus.iter().map(|vcpu| &vcpu.bare).collect();
        let clocks = SavedClocks::of(vm, &bare)?;
        let vcpus = self.vcpus.iter().map(|vcpu| vcpu.save(kvm));
        let saved = Saved {
            vcpus: vcpus.collect::<Result<_>>()?,
            clocks,
            ioapic: self.board.chip.chip().save(),
            serial: self.board.ports().save(),
        };
        saved.write(file)
    }

    /// What each vCPU of the guest's must have counted, and how its #GP handler is watched.
    pub(crate) fn told(&self) -> impl Iterator<Item = (Counted, &'static str)> {
        self.vcpus
            .iter()
            .map(|vcpu| (vcpu.witness.counted(), vcpu.watch()))
    }
}
