//! A machine on the processor in software: its lines, its clock, and what each of its vCPUs
//! starts with.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use emu::Cpuid;
use pmu_virt::{CorePmu, EmuCycles, Ticks, Vendor};

use super::super::outside::{Attention, HostSide, WakingLine};
use super::{MachineError, Order, Outfit, SharedParts, VcpuShare};
use crate::config::{CyclesChoice, RunConfig};
use crate::counters::{CounterError, CounterPlan, backend_env};
use crate::devices::{DeviceClock, InterruptLine};
use crate::emu::{EmuVcpuParts, Lines, Room, RoomParts, TSC_KHZ, VirtualClock, starting_at};
use crate::kvm::{GuestRam, VcpuId};
use crate::sched::CpuList;
use crate::vcpu::{StepSupport, VcpuControl};

/// When virtual time begins under a seed: the beginning of 2026, in seconds since that of 1970.
pub(crate) const SEEDED_BEGINNING: u64 = 1_767_225_600;

/// The part of an emulated machine that is the engine's.
#[derive(Debug)]
pub(in crate::machine) struct EmuMachine {
    pub(in crate::machine) room: Room,
    /// Host CPUs for the thread that runs the vCPUs; the first counts.
    pub(in crate::machine) pin: Option<CpuList>,
    pub(in crate::machine) control: Arc<VcpuControl>,
    pub(in crate::machine) attention: Arc<Attention>,
}

/// Memory, lines and the clock.
pub(super) struct EmuBase {
    memory: GuestRam,
    lines: Arc<Lines>,
    attention: Arc<Attention>,
    clock: VirtualClock,
    real_time: bool,
}

impl EmuBase {
    pub(super) fn new(order: Order<'_>, memory: GuestRam) -> Self {
        let engine = order.config.engine;
        let began = engine.seed.map_or_else(time_of_day, |_| SEEDED_BEGINNING);
        Self {
            memory,
            lines: Arc::default(),
            attention: Arc::default(),
            clock: VirtualClock::beginning_at(began),
            real_time: engine.real_time == Some(true),
        }
    }

    pub(super) fn line(&self, gsi: u32) -> Box<dyn InterruptLine> {
        Box::new(WakingLine {
            // GSIs are the pins of the one I/O APIC.
            line: self.lines.to_pin(gsi.to_le_bytes()[0]),
            attention: self.attention.clone(),
        })
    }

    pub(super) fn clock(&self) -> Box<dyn DeviceClock> {
        Box::new(self.clock.clone())
    }

    pub(super) fn into_machine(
        self,
        outfit: &Outfit<'_>,
        shares: Vec<VcpuShare>,
        shared: SharedParts,
    ) -> Result<EmuMachine, MachineError> {
        let control = Arc::new(VcpuControl::default());
        let vcpus = shares.into_iter().map(|share| vcpu(share, outfit));
        let outside = HostSide::new(self.attention.clone(), self.real_time);
        let room = Room::new(RoomParts {
            memory: self.memory.for_vmm().clone(),
            vcpus: vcpus.collect::<Result<_, _>>()?,
            platform: outfit.platform.clone(),
            control: control.clone(),
            lines: self.lines,
            outside: Box::new(outside),
            clock: self.clock,
        })?;
        Ok(EmuMachine {
            room,
            pin: shared.pin,
            control,
            attention: self.attention,
        })
    }
}

/// One vCPU: the first at the kernel's first instruction, the others wait to be started.
fn vcpu(share: VcpuShare, outfit: &Outfit<'_>) -> Result<EmuVcpuParts, MachineError> {
    let state = (share.id == VcpuId(0)).then(|| starting_at(outfit.state));
    // A PMI costs nobody but its guest any time, so each comes at its instruction unless
    // somebody wants it otherwise. A tick is a nanosecond.
    let floor = outfit.order.config.pmi_floor.unwrap_or_default();
    let floor = Ticks(u64::try_from(floor.as_nanos()).unwrap_or(u64::MAX));
    Ok(EmuVcpuParts {
        cpuid: Cpuid::new(outfit.leaves(share.id)?),
        state,
        pmu: share.pmu.map(|pmu| pmu.with_pmi_floor(floor)),
        core: share.own,
        observer: share.observer,
        host: share.endpoint,
        guest: outfit.kernel.cloned(),
    })
}

/// The counters of each vCPU. `guest` is the vendor of the processor that it sees, and has.
pub(super) fn core_pmus(config: &RunConfig, guest: Vendor) -> Result<Vec<CorePmu>, CounterError> {
    let cycles = match config.engine.cycles {
        CyclesChoice::None => EmuCycles::Unavailable,
        CyclesChoice::Simulated => EmuCycles::Simulated,
    };
    let env = backend_env(TSC_KHZ, Some(guest), StepSupport::FULL);
    let plan = CounterPlan::emulated(&config.counters, env, cycles)?;
    log::info!("counts come from {}", plan.sources());
    let core = |_| {
        let mut core = CorePmu::new(plan.open()?);
        core.set_event_filter(config.events.guest().clone());
        Ok(core)
    };
    (0..config.cpus).map(core).collect()
}

/// The host's time of day in seconds; a host clock before 1970 is a broken one.
fn time_of_day() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
