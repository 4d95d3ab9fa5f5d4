//! What the VMM knows of vCPUs and cores, for the virtual PMDs.

mod clock;
mod core;

use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pmu_virt::perfmon::{Quantities, VirtualPmd};

pub use self::core::{CoreQuantities, Snapshot};
pub use clock::{HaltTimes, Halted, OffCoreReason};
use clock::{Times, VcpuClock, monotonic_ns};

/// What the guest's memory takes is no older than this where asking is quick.
const FRESH: Duration = Duration::from_millis(20);
/// Asking takes no more than one part in so many of the server's time.
const SHARE: u32 = 32;
/// Nobody has asked yet, or the host did not tell.
const UNKNOWN: u64 = u64::MAX;

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
    /// The VM's clock, where its time is virtual.
    virtual_now: Cell<Option<u64>>,
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

    /// Virtual time is so many ticks: what a VM's clock shows that is not the host's TSC. To be
    /// said before jobs are done, and before the vCPU ends.
    pub fn note_virtual_time(&self, ticks: u64) {
        self.virtual_now.set(Some(ticks));
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
            VirtualPmd::HaltTime if !self.clock.borrow().knows_halts() => None,
            VirtualPmd::HaltTime => time(|times| times.halted),
            VirtualPmd::GuestMemory => self.gauge.as_ref()?.bytes(),
            VirtualPmd::Clock => Some(monotonic_ns()),
            VirtualPmd::Tsc => self.virtual_now.get(),
            VirtualPmd::Ring | VirtualPmd::Cr3 | VirtualPmd::Ip => None,
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

/// Tells what a guest's memory takes of the host's.
pub trait GuestMemoryUse: Debug + Send {
    /// Bytes for which the host has given pages; `None` if the host does not tell.
    fn resident_bytes(&mut self) -> Option<u64>;
}

/// The last answer. Threads of vCPUs read it; only the server asks.
#[derive(Debug)]
pub(crate) struct MemoryGauge {
    bytes: AtomicU64,
}

impl MemoryGauge {
    pub(crate) fn bytes(&self) -> Option<u64> {
        let bytes = self.bytes.load(Ordering::Relaxed);
        (bytes != UNKNOWN).then_some(bytes)
    }
}

/// Asks the host for the server.
#[derive(Debug)]
pub(crate) struct MemoryProbe {
    memory: Box<dyn GuestMemoryUse>,
    gauge: Arc<MemoryGauge>,
    not_before: Option<Instant>,
}

impl MemoryProbe {
    pub(crate) fn new(memory: Box<dyn GuestMemoryUse>) -> (Self, Arc<MemoryGauge>) {
        let gauge = Arc::new(MemoryGauge {
            bytes: AtomicU64::new(UNKNOWN),
        });
        let probe = Self {
            memory,
            gauge: gauge.clone(),
            not_before: None,
        };
        (probe, gauge)
    }

    /// Asks, unless the last answer is fresh.
    pub(crate) fn refresh(&mut self) {
        let began = Instant::now();
        if self.not_before.is_some_and(|at| began < at) {
            return;
        }
        let bytes = self.memory.resident_bytes().unwrap_or(UNKNOWN);
        self.gauge.bytes.store(bytes, Ordering::Relaxed);
        let pause = (began.elapsed() * SHARE).max(FRESH);
        self.not_before = Some(Instant::now() + pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Growing(u64);

    impl GuestMemoryUse for Growing {
        fn resident_bytes(&mut self) -> Option<u64> {
            self.0 += 4096;
            Some(self.0)
        }
    }

    /// Its halts take the host's time, or are skipped.
    #[derive(Debug)]
    struct Halts(bool);

    impl HaltTimes for Halts {
        fn halted(&mut self) -> Option<Halted> {
            Some(Halted::default())
        }

        fn take_time(&self) -> bool {
            self.0
        }
    }

    #[test]
    fn a_halt_that_is_skipped_is_not_0_long() {
        let of = |halts: Option<bool>| {
            let halts = halts.map(|take| -> Box<dyn HaltTimes> { Box::new(Halts(take)) });
            let quantities = VcpuQuantities::new(halts, None);
            [VirtualPmd::RunTime, VirtualPmd::HaltTime].map(|time| quantities.read(time).is_some())
        };
        assert_eq!(of(Some(true)), [true, true]);
        assert_eq!(of(Some(false)), [true, false]);
        assert_eq!(of(None), [false, false]);
    }

    #[test]
    fn the_clock_of_a_vm_is_known_where_its_time_is_virtual() {
        let known = VcpuQuantities::default();
        assert_eq!(known.read(VirtualPmd::Tsc), None, "it is the host's");
        known.note_virtual_time(500);
        assert_eq!(known.read(VirtualPmd::Tsc), Some(500));
        // One that ends leaves it behind.
        assert_eq!(Snapshot::of(&known).read(VirtualPmd::Tsc), Some(500));
    }

    #[test]
    fn whoever_asks_all_the_time_gets_the_last_answer() {
        let (mut probe, gauge) = MemoryProbe::new(Box::new(Growing(0)));
        assert_eq!(gauge.bytes(), None, "nobody has asked yet");
        let began = Instant::now();
        for _ in 0..100 {
            probe.refresh();
        }
        let most = 1 + began.elapsed().as_millis() / 20;
        let times = u128::from(gauge.bytes().unwrap()) / 4096;
        assert!(times >= 1 && times <= most, "{times} of {most}");
    }
}
