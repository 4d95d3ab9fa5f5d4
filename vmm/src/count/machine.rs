//! What the small machine is made of.

use std::sync::Arc;

use arbiter::Grant;
use emu::State;
use pmu_virt::{CorePmu, EmuBackend, EmuCycles, OwnerId, PmuModel, VcpuPmu, Vendor};
use vm_memory::GuestMemoryMmap;

use super::platform::CountPlatform;
use crate::cpuid::CpuidError;
use crate::emu::{
    EmuVcpuParts, Lines, Outside, Room, RoomError, RoomParts, VirtualClock, processor,
};
use crate::machine::SEEDED_BEGINNING;
use crate::vcpu::VcpuControl;

/// The command line of the kernel: no address and no number depends on chance, nothing is on
/// that a count would be other for, and who gives up says so and ends.
pub const COMMAND_LINE: &str = "console=ttyS0 quiet mitigations=off nokaslr norandmaps \
     nmi_watchdog=0 pci=off panic=-1 random.trust_bootloader=on audit=0 cryptomgr.notests";

/// The version of the machine, which a snapshot's key has in it: to be counted up when what
/// runs in it would be counted otherwise, or a snapshot would not fit.
pub const MACHINE: u32 = 1;

/// What the machine is put together from.
pub(super) struct Parts<F> {
    pub(super) memory: GuestMemoryMmap,
    /// Where the processor begins; none: where a state will say.
    pub(super) start: Option<State>,
    pub(super) platform: Arc<CountPlatform<F>>,
    pub(super) lines: Arc<Lines>,
    pub(super) clock: VirtualClock,
    pub(super) control: Arc<VcpuControl>,
    pub(super) outside: Box<dyn Outside>,
}

/// A clock that begins where all machines' do.
pub(super) fn clock() -> VirtualClock {
    VirtualClock::beginning_at(SEEDED_BEGINNING)
}

/// Why there can be no such machine: a bug of Umpire's.
#[derive(Debug, thiserror::Error)]
pub enum MachineFailure {
    /// Memory or chips.
    #[error(transparent)]
    Room(#[from] RoomError),
    /// CPUID.
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
}

/// Puts it together: one vCPU of an Intel model, with a PMU that counts all but cycles.
pub(super) fn assemble<F>(parts: Parts<F>) -> Result<Room, MachineFailure>
where
    F: FnMut(&[u8], &mut Vec<u8>) + Send + 'static,
{
    let mut core = Box::new(CorePmu::new(Box::new(EmuBackend::new(
        EmuCycles::Unavailable,
    ))));
    let model = PmuModel::default_for(Vendor::Intel);
    let model = model.counted(|event| core.plan_for_guest(event).is_ok());
    let announced = model.announced(|event| core.plan_for_guest(event).is_ok(), model.counts());
    let mut pmu = VcpuPmu::detached(OwnerId(0), model, Grant::everything());
    pmu.attach(&mut core);
    let leaves = processor(Vendor::Intel, (0, 1), Some(&announced))?;
    let vcpu = EmuVcpuParts {
        pmu: Some(pmu),
        core: Some(core),
        ..EmuVcpuParts::alone(leaves, Some(parts.start.unwrap_or_default()))
    };
    Ok(Room::new(RoomParts {
        memory: parts.memory,
        vcpus: vec![vcpu],
        platform: parts.platform,
        control: parts.control,
        lines: parts.lines,
        outside: parts.outside,
        clock: parts.clock,
    })?)
}
