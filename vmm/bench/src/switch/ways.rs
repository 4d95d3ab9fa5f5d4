//! Two ways to switch vCPUs on a core: Umpire's, and the naive one that saves
//! and restores everything each time.

use std::fmt::Debug;

use pmu_virt::{
    Caller, CorePmu, CountRequest, CounterBackend, CounterId, Grant, Layer, MsrIndex, OwnerId,
    PmuModel, Progress, ReadOutcome, Reading, SlotIndex, SlotSet, VcpuPmu,
};

use crate::registers::PmuMsrs;
use crate::sources::{INT, slot_for};

/// What both ways are asked to do.
pub(super) trait Way: Debug {
    /// Switches `vcpu` in on `core`.
    fn enter(&mut self, core: usize, vcpu: usize);
    /// Its guest runs.
    fn run(&mut self, core: usize, vcpu: usize, progress: Progress);
    /// Switches it out.
    fn leave(&mut self, core: usize, vcpu: usize);
    /// Operations on physical counters so far.
    fn operations(&self) -> u64;
    /// The values of all counters of all vCPUs.
    fn counts(&mut self) -> Vec<Vec<u64>>;
}

/// What one vCPU's counters are to count: their selects.
pub(super) type Selects = Vec<u64>;

/// The selects of a vCPU that uses `counters` counters on these event codes in
/// turn; the first one has INT.
pub(super) fn selects(codes: &[u64], counters: usize) -> Selects {
    let codes = codes.iter().cycle().take(counters).enumerate();
    codes
        .map(|(n, code)| if n == 0 { code | INT } else { *code })
        .collect()
}

/// Umpire's core PMUs.
#[derive(Debug)]
pub(super) struct Umpire {
    vcpus: Vec<VcpuPmu>,
    /// The core on which a vCPU's counters may be.
    home: Vec<Option<usize>>,
    cores: Vec<CorePmu>,
    msrs: PmuMsrs,
}

impl Umpire {
    /// vCPUs of `model` whose selects are written before they first run.
    pub(super) fn new(
        model: &PmuModel,
        vcpus: &[Selects],
        backends: Vec<Box<dyn CounterBackend>>,
    ) -> Self {
        let msrs = PmuMsrs::of(model);
        let mut cores: Vec<CorePmu> = backends.into_iter().map(CorePmu::new).collect();
        // Nobody is on it yet: only registers change.
        let core = &mut cores[0];
        let mut vcpu = |(n, selects): (u32, &Selects)| {
            let mut pmu = VcpuPmu::detached(OwnerId(n), model.clone(), Grant::everything());
            for (msr, select) in msrs.selects.iter().zip(selects) {
                pmu.wrmsr(
                    core,
                    MsrIndex(*msr),
                    *select,
                    Caller::legacy(Layer::GuestKernel),
                );
            }
            if let Some(msr) = msrs.global_control {
                let all = model.global_mask();
                pmu.wrmsr(core, MsrIndex(msr), all, Caller::legacy(Layer::GuestKernel));
            }
            pmu
        };
        let programmed = (0u32..).zip(vcpus).map(&mut vcpu).collect();
        Self {
            vcpus: programmed,
            home: vec![None; vcpus.len()],
            cores,
            msrs,
        }
    }
}

impl Way for Umpire {
    fn enter(&mut self, core: usize, vcpu: usize) {
        let pmu = &mut self.vcpus[vcpu];
        if let Some(old) = self.home[vcpu].filter(|old| *old != core) {
            pmu.leave(&mut self.cores[old]);
        }
        self.home[vcpu] = Some(core);
        pmu.attach(&mut self.cores[core]);
    }

    fn run(&mut self, core: usize, vcpu: usize, progress: Progress) {
        self.vcpus[vcpu].observe(&mut self.cores[core], progress);
    }

    fn leave(&mut self, core: usize, vcpu: usize) {
        self.vcpus[vcpu].park(&mut self.cores[core]);
    }

    fn operations(&self) -> u64 {
        self.cores.iter().map(CorePmu::operations).sum()
    }

    fn counts(&mut self) -> Vec<Vec<u64>> {
        for (pmu, home) in self.vcpus.iter_mut().zip(&mut self.home) {
            if let Some(core) = home.take() {
                pmu.leave(&mut self.cores[core]);
            }
        }
        let msrs = &self.msrs.counters;
        let core = &mut self.cores[0];
        let mut read = |pmu: &mut VcpuPmu, msr: &u32| match pmu
            .rdmsr(core, MsrIndex(*msr), Caller::legacy(Layer::GuestKernel))
            .outcome
        {
            ReadOutcome::Value(value) => value,
            ReadOutcome::Merge { .. } | ReadOutcome::Gp | ReadOutcome::NotHandled => u64::MAX,
        };
        let all =
            |pmu: &mut VcpuPmu| -> Vec<u64> { msrs.iter().map(|msr| read(pmu, msr)).collect() };
        self.vcpus.iter_mut().map(all).collect()
    }
}

/// Saves and restores every counter of the model, or every one that is in use.
#[derive(Debug)]
pub(super) struct Naive {
    cores: Vec<Box<dyn CounterBackend>>,
    vcpus: Vec<Vec<Saved>>,
    operations: u64,
    /// Also the counters that nobody uses.
    all: bool,
}

/// A counter in memory.
#[derive(Clone, Copy, Debug)]
struct Saved {
    slot: SlotIndex,
    request: Option<CountRequest>,
    /// Ticks to an overflow of it.
    range: u64,
    count: u64,
}

impl Naive {
    /// vCPUs of `model` whose selects are written before they first run, on cores
    /// with one slot for each counter of the model.
    pub(super) fn new(
        model: &PmuModel,
        vcpus: &[Selects],
        backends: Vec<Box<dyn CounterBackend>>,
        all: bool,
    ) -> Self {
        let decode = |raw: &u64| CountRequest::decode(model.events(), *raw);
        let range = model.counter_mask(CounterId::Programmable(0));
        let saved = |selects: &Selects| {
            let saved = (0..model.programmable()).map(|n| {
                let request = selects.get(usize::from(n)).map(decode);
                let slot = |request| slot_for(backends[0].as_ref(), request, n);
                Saved {
                    slot: request.as_ref().map_or(SlotIndex(n), slot),
                    request,
                    range,
                    count: 0,
                }
            });
            saved.collect()
        };
        Self {
            vcpus: vcpus.iter().map(saved).collect(),
            cores: backends,
            operations: 0,
            all,
        }
    }

    fn running(vcpu: &[Saved]) -> SlotSet {
        let used = vcpu.iter().filter(|saved| saved.request.is_some());
        used.map(|saved| saved.slot).collect()
    }
}

impl Way for Naive {
    fn enter(&mut self, core: usize, vcpu: usize) {
        let backend = &mut self.cores[core];
        backend.attach(OwnerId(u32::try_from(vcpu).unwrap_or(u32::MAX)));
        for saved in &self.vcpus[vcpu] {
            let Some(request) = &saved.request else {
                if self.all {
                    self.operations += 1;
                    backend.release(saved.slot);
                }
                continue;
            };
            self.operations += 1;
            // What it cannot count was not asked for.
            let _ = backend.program(saved.slot, request);
            if request.int {
                self.operations += 1;
                let left = (saved.range - saved.count).saturating_add(1);
                backend.arm(saved.slot, std::num::NonZeroU64::new(left));
            }
        }
        let running = Self::running(&self.vcpus[vcpu]);
        if !running.is_empty() {
            self.operations += 1;
            backend.resume(running);
        }
    }

    fn run(&mut self, core: usize, _: usize, progress: Progress) {
        self.cores[core].observe(&progress);
    }

    fn leave(&mut self, core: usize, vcpu: usize) {
        let backend = &mut self.cores[core];
        let running = Self::running(&self.vcpus[vcpu]);
        if !running.is_empty() {
            self.operations += 1;
            backend.pause(running);
        }
        for saved in &mut self.vcpus[vcpu] {
            if saved.request.is_none() && !self.all {
                continue;
            }
            self.operations += 1;
            if let Reading::Counted { value, .. } = backend.read(saved.slot) {
                saved.count = saved.count.wrapping_add(value) & saved.range;
            }
        }
    }

    fn operations(&self) -> u64 {
        self.operations
    }

    fn counts(&mut self) -> Vec<Vec<u64>> {
        let counts = |vcpu: &Vec<Saved>| vcpu.iter().map(|saved| saved.count).collect();
        self.vcpus.iter().map(counts).collect()
    }
}
