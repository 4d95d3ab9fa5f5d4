//! What the VMM knows of vCPUs and cores, for the virtual PMDs.

mod clock;
mod core;
pub(crate) mod memory;

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use pmu_virt::perfmon::{Quantities, VirtualPmd};

pub use self::core::{CoreQuantities, Snapshot};
pub use clock::{HaltTimes, Halted, OffCoreReason};
use clock::{Times, VcpuClock};
pub use memory::GuestMemoryUse;
use memory::MemoryGauge;

/// Why a vCPU has left the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitKind {
    /// RDMSR or WRMSR.
    Msr,
    /// IN or OUT.
    Port,
    /// An access to a device's memory.
    Mmio,
    /// A breakpoint or a single step.
    Debug,
    /// Its thread was kicked.
    Kick,
    /// Anything else.
    Other,
}

/// A vCPU's exits by kind, its times, and the memory of its VM. An exit costs one
/// addition or two. Everything else is computed when somebody asks.
#[derive(Debug, Default)]
pub struct VcpuQuantities {
    exits: u64,
    msr: u64,
    rdpmc: u64,
    port: u64,
    mmio: u64,
    debug: u64,
    kicks: u64,
    pmis: u64,
    clock: RefCell<VcpuClock>,
    gauge: Option<Arc<MemoryGauge>>,
}

impl VcpuQuantities {
    pub(crate) fn new(halts: Option<Box<dyn HaltTimes>>, gauge: Option<Arc<MemoryGauge>>) -> Self {
        Self {
            clock: RefCell::new(VcpuClock::new(halts)),
            gauge,
            ..Self::default()
        }
    }

    /// Counts an exit.
    #[inline]
    pub fn count_exit(&mut self, kind: ExitKind) {
        self.exits += 1;
        let kind = match kind {
            ExitKind::Msr => &mut self.msr,
            ExitKind::Port => &mut self.port,
            ExitKind::Mmio => &mut self.mmio,
            ExitKind::Debug => &mut self.debug,
            ExitKind::Kick => &mut self.kicks,
            ExitKind::Other => return,
        };
        *kind += 1;
    }

    /// The last exit was at a breakpoint, and for an RDPMC.
    pub fn count_as_rdpmc(&mut self) {
        self.debug = self.debug.saturating_sub(1);
        self.rdpmc += 1;
    }

    /// Counts a PMI that was raised in the guest.
    pub fn count_pmi(&mut self) {
        self.pmis += 1;
    }

    /// The calling thread runs the vCPU from now on.
    pub fn on_thread(&self) {
        self.clock.borrow_mut().on_thread();
    }

    /// No thread runs the vCPU from now on, for this reason.
    pub fn off_thread(&self, reason: OffCoreReason) {
        self.clock.borrow_mut().off_thread(reason);
    }
}

impl Quantities for VcpuQuantities {
    /// Times are right only on the thread that has the vCPU.
    fn read(&self, which: VirtualPmd) -> Option<u64> {
        let time = |pick: fn(Times) -> Duration| {
            let times = self.clock.borrow_mut().times()?;
            Some(u64::try_from(pick(times).as_nanos()).unwrap_or(u64::MAX))
        };
        match which {
            VirtualPmd::Exits => Some(self.exits),
            VirtualPmd::MsrExits => Some(self.msr),
            VirtualPmd::RdpmcExits => Some(self.rdpmc),
            VirtualPmd::PortExits => Some(self.port),
            VirtualPmd::MmioExits => Some(self.mmio),
            VirtualPmd::DebugExits => Some(self.debug),
            VirtualPmd::KickExits => Some(self.kicks),
            VirtualPmd::Pmis => Some(self.pmis),
            VirtualPmd::RunTime => time(|times| times.ran),
            VirtualPmd::StealTime => time(|times| times.stolen),
            VirtualPmd::HaltTime => time(|times| times.halted),
            VirtualPmd::GuestMemory => self.gauge.as_ref()?.bytes(),
            VirtualPmd::Ring | VirtualPmd::Cr3 => None,
        }
    }
}

/// The quantities where no vCPU is: nobody knows any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoQuantities;

impl Quantities for NoQuantities {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }
}
