//! What the VMM knows of a vCPU, for the virtual PMDs.

mod clock;
mod core;
pub(crate) mod memory;

use std::cell::RefCell;
use std::sync::Arc;

use pmu_virt::perfmon::{Quantities, VirtualPmd};

pub use self::core::{CoreQuantities, Snapshot};
pub use clock::{HaltTimes, Halted, OffCoreReason};
pub use memory::GuestMemoryUse;

use super::host_side::ControlEndpoint;
use clock::VcpuClock;
use memory::MemoryGauge;

/// What a vCPU has left the guest for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitKind {
    /// RDMSR or WRMSR.
    Msr,
    /// A port.
    Port,
    /// A device's memory.
    Mmio,
    /// A breakpoint or a single step.
    Debug,
    /// Somebody has kicked its thread.
    Kick,
    /// Anything else.
    Other,
}

/// A vCPU's exits by kind, times, and where its VM's memory is told. One
/// addition or two at each exit; everything else when it is asked for.
#[derive(Debug)]
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
    /// Of a vCPU; times and memory are for those with a server.
    pub fn new(stats: Option<Box<dyn HaltTimes>>, host: Option<&ControlEndpoint>) -> Self {
        Self {
            exits: 0,
            msr: 0,
            rdpmc: 0,
            port: 0,
            mmio: 0,
            debug: 0,
            kicks: 0,
            pmis: 0,
            clock: RefCell::new(VcpuClock::new(stats)),
            gauge: host.map(|host| host.gauge.clone()),
        }
    }

    /// Counts an exit.
    #[inline]
    pub fn exit(&mut self, kind: ExitKind) {
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

    /// The last exit, at a breakpoint, was for an RDPMC.
    pub fn was_rdpmc(&mut self) {
        self.debug = self.debug.saturating_sub(1);
        self.rdpmc += 1;
    }

    /// A PMI was raised in the guest.
    pub fn pmi(&mut self) {
        self.pmis += 1;
    }

    /// The calling thread runs the vCPU from now on.
    pub fn comes(&self) {
        self.clock.borrow_mut().comes();
    }

    /// The vCPU is not run from now on, as it rests so.
    pub fn goes(&self, rest: OffCoreReason) {
        self.clock.borrow_mut().goes(rest);
    }
}

impl Quantities for VcpuQuantities {
    fn read(&self, which: VirtualPmd) -> Option<u64> {
        let time = |pick: fn(clock::Times) -> u64| {
            let times = self.clock.borrow_mut().times();
            times.map(pick)
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

/// Where no vCPU is: nothing can be told.
#[derive(Clone, Copy, Debug)]
pub struct NoQuantities;

impl Quantities for NoQuantities {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }
}
