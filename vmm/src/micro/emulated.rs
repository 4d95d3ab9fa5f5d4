//! Micro-guests on processors in software.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use arbiter::Grant;
use emu::{Cpuid, State};
use pmu_virt::{
    CorePmu, CountRequest, CounterBackend, OwnerId, PmuModel, Reservations, Ticks, VcpuPmu, Vendor,
};
use vm_memory::GuestMemoryMmap;

use super::error::MicroRunError;
use crate::devices::Platform;
use crate::emu::{
    EmuVcpuParts, Lines, Nobody, Room, RoomEnd, RoomParts, TSC_HZ, VirtualClock, processor,
};
use crate::vcpu::{Observer, VcpuControl};

/// Ticks of virtual time in a microsecond.
const TICKS_PER_US: u64 = TSC_HZ / 1_000_000;

/// The PMU of one vCPU, to be made.
pub(super) struct EmuPmu<'a> {
    pub(super) model: &'a PmuModel,
    pub(super) backend: Box<dyn CounterBackend>,
    pub(super) pmi_floor_us: u32,
    pub(super) reservations: Option<Reservations>,
    /// Counters that CPUID and legacy registers have.
    pub(super) visible: arbiter::PerKind,
}

/// vCPU `id` of `cpus`, which starts with `state`.
pub(super) fn vcpu(
    (id, cpus): (u8, u8),
    state: State,
    pmu: Option<EmuPmu<'_>>,
    observer: Box<dyn Observer>,
) -> Result<EmuVcpuParts, MicroRunError> {
    let vendor = pmu.as_ref().map_or(Vendor::Intel, |pmu| pmu.model.vendor());
    let announced = pmu.as_ref().map(|pmu| {
        let countable = |request: &CountRequest| pmu.backend.plan(request).is_ok();
        let cpuid = pmu.model.announced(countable, pmu.visible);
        match &pmu.reservations {
            Some(reservations) => cpuid.with_reservations(&reservations.unit),
            None => cpuid,
        }
    });
    let cpuid = Cpuid::new(processor(vendor, (id, cpus), announced.as_ref())?);
    let (pmu, core) = pmu.map_or((None, None), |pmu| {
        let mut core = Box::new(CorePmu::new(pmu.backend));
        let floor = Ticks(u64::from(pmu.pmi_floor_us) * TICKS_PER_US);
        let owner = OwnerId(id.into());
        let mut vcpu = VcpuPmu::detached(owner, pmu.model.clone(), Grant::everything());
        vcpu.attach(&mut core);
        let vcpu = match pmu.reservations {
            Some(reservations) => vcpu.with_reservations(reservations),
            None => vcpu,
        };
        (Some(vcpu.with_pmi_floor(floor)), Some(core))
    });
    Ok(EmuVcpuParts {
        cpuid,
        state: Some(state),
        pmu,
        core,
        observer,
        host: None,
        guest: None,
    })
}

/// The machine of these vCPUs, in virtual time alone, which `clock` shows.
pub(super) fn room(
    memory: GuestMemoryMmap,
    vcpus: Vec<EmuVcpuParts>,
    platform: Arc<dyn Platform>,
    (control, clock): (Arc<VcpuControl>, VirtualClock),
) -> Result<Room, MicroRunError> {
    Ok(Room::new(RoomParts {
        memory,
        vcpus,
        platform,
        control,
        lines: Arc::new(Lines::default()),
        outside: Box::new(Nobody),
        clock,
    })?)
}

/// Runs a machine until it ends, or is stopped since that took longer than `timeout` of the
/// host's time; when that was, if it was.
pub(super) fn run_for(
    room: &mut Room,
    control: &VcpuControl,
    timeout: Duration,
) -> Result<(RoomEnd, Option<Instant>), MicroRunError> {
    let (running, ended) = channel::<()>();
    let (end, stopped) = std::thread::scope(|scope| {
        let watchdog = scope.spawn(move || {
            let late = ended.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout);
            late.then(|| {
                control.stop();
                Instant::now()
            })
        });
        let end = room.run();
        drop(running);
        (end, watchdog.join())
    });
    let stopped = stopped.map_err(|_| MicroRunError::Panicked)?;
    Ok((end, stopped))
}
