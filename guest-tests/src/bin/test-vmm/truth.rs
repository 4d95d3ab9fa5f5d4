//! What the guest's counters must have counted: `sim`'s own total, read by this VMM at each write
//! of the guest's that enables or disables a counter.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use kvm_pmu::{Armed, TrapEvent, TrapObserver, VcpuId};
use pmu_virt::{
    CountRequest, CounterBackend as _, EventCode, KnownEvent, OwnerId, RateTable, Reading,
    SimBackend, SimClocks, SlotIndex, WriteOutcome,
};
use serde::{Deserialize, Serialize};

const RATES: &str = "[event.cycles]\nrate = 1000\n";
const SLOT: SlotIndex = SlotIndex(0);
/// The selects of AMD's six counters, PERF_CTL0 to 5, are every second MSR.
const SELECTS: std::ops::Range<u32> = 0xc001_0200..0xc001_020c;
const ENABLED: u64 = 1 << 22;

/// The clocks of this machine's vCPUs, which begin at 0 in each process.
pub(crate) fn clocks(tsc_khz: u32) -> Result<SimClocks> {
    Ok(SimClocks::new(RateTable::parse(RATES, "rates")?, tsc_khz))
}

/// What was counted, and by which counters.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(crate) struct Counted {
    /// Events while a counter was enabled, for each counter.
    pub(crate) events: u64,
    /// Likewise, when the guest has read a counter last that was enabled. A tool that reads its
    /// counters in intervals has read no later one.
    pub(crate) read: u64,
    /// Selects that are enabled now.
    enabled: Vec<u32>,
}

impl Counted {
    pub(crate) fn is_enabled(&self) -> bool {
        !self.enabled.is_empty()
    }
}

/// Looks on while the guest runs.
#[derive(Debug)]
pub(crate) struct Witness {
    /// Counts all that the vCPU does, on a slot that the guest has not.
    source: SimBackend,
    before: u64,
    read: u64,
    /// Enabled selects, and the total when they were.
    since: BTreeMap<u32, u64>,
    /// How RDPMC is trapped, as was last told.
    pub(crate) armed: Armed,
}

impl Witness {
    /// Of one vCPU, by these clocks, which stand at 0, after what was counted before.
    pub(crate) fn new(clocks: &SimClocks, owner: OwnerId, counted: &Counted) -> Result<Self> {
        let mut source = SimBackend::of(clocks);
        source.attach(owner);
        let cycles = EventCode::Meaning(KnownEvent::CoreCycles);
        let request = CountRequest::plain(cycles, true, true);
        let programmed = source.program(SLOT, &request);
        programmed.map_err(|error| anyhow!("sim does not count cycles: {}", error.reason))?;
        source.start(SLOT);
        Ok(Self {
            source,
            before: counted.events,
            read: counted.read,
            since: counted.enabled.iter().map(|select| (*select, 0)).collect(),
            armed: Armed::Nothing,
        })
    }

    /// No counter is enabled, nothing was counted, and the #GP handler is the guest's own.
    pub(crate) fn reset(&mut self) {
        (self.before, self.read) = (0, 0);
        self.since.clear();
        self.armed = Armed::Nothing;
    }

    fn total(&self) -> u64 {
        match self.source.read(SLOT) {
            Reading::Counted { value, .. } => value,
            Reading::Unavailable(_) => 0,
        }
    }

    pub(crate) fn is_enabled(&self) -> bool {
        !self.since.is_empty()
    }

    fn events(&self) -> u64 {
        let total = self.total();
        let now: u64 = self.since.values().map(|since| total - since).sum();
        self.before + now
    }

    /// Up to now.
    pub(crate) fn counted(&self) -> Counted {
        Counted {
            events: self.events(),
            read: self.read,
            enabled: self.since.keys().copied().collect(),
        }
    }
}

impl TrapObserver for Witness {
    fn event(&mut self, _: VcpuId, event: TrapEvent) {
        match event {
            TrapEvent::MsrWrite {
                msr,
                value,
                outcome: WriteOutcome::Done,
            } if SELECTS.contains(&msr.0) && msr.0 % 2 == 0 => {
                let total = self.total();
                if value & ENABLED != 0 {
                    self.since.entry(msr.0).or_insert(total);
                } else if let Some(since) = self.since.remove(&msr.0) {
                    self.before += total - since;
                }
            }
            TrapEvent::Rdpmc { .. } if self.is_enabled() => self.read = self.events(),
            TrapEvent::Armed(armed) => self.armed = armed,
            _ => {}
        }
    }
}
