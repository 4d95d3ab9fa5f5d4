//! How much of the guest's memory the host has given pages for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::sys::{PAGE, resident};
use crate::kvm::KvmVm;

/// The answer is no older than this, where asking is quick,
const FRESH: Duration = Duration::from_millis(20);
/// and asking takes no more than a part of the server's time.
const SHARE: u32 = 32;
/// Pages asked about at once.
const CHUNK: usize = 1 << 16;
/// Nobody has asked yet, or the host did not tell.
const UNKNOWN: u64 = u64::MAX;

/// The bytes, for vCPUs' threads to read; the server asks the host.
#[derive(Debug)]
pub(crate) struct MemoryGauge {
    bytes: AtomicU64,
}

impl MemoryGauge {
    pub(crate) fn new() -> Self {
        Self {
            bytes: AtomicU64::new(UNKNOWN),
        }
    }

    /// As last asked for.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let bytes = self.bytes.load(Ordering::Relaxed);
        (bytes != UNKNOWN).then_some(bytes)
    }
}

/// Asks the host.
#[derive(Debug)]
pub(crate) struct MemoryProbe {
    vm: Arc<KvmVm>,
    gauge: Arc<MemoryGauge>,
    not_before: Option<Instant>,
    seen: Vec<u8>,
}

impl MemoryProbe {
    pub(crate) fn new(vm: Arc<KvmVm>) -> (Self, Arc<MemoryGauge>) {
        let gauge = Arc::new(MemoryGauge::new());
        let probe = Self {
            vm,
            gauge: gauge.clone(),
            not_before: None,
            seen: Vec::new(),
        };
        (probe, gauge)
    }

    /// Asks, unless the last answer is fresh.
    pub(crate) fn refresh(&mut self) {
        let began = Instant::now();
        if self.not_before.is_some_and(|at| began < at) {
            return;
        }
        let bytes = self.count().unwrap_or(UNKNOWN);
        self.gauge.bytes.store(bytes, Ordering::Relaxed);
        let pause = (began.elapsed() * SHARE).max(FRESH);
        self.not_before = Some(Instant::now() + pause);
    }

    fn count(&mut self) -> Option<u64> {
        let mut pages = 0;
        for region in self.vm.memory().iter() {
            let all = usize::try_from(region.len()).ok()? / PAGE;
            for first in (0..all).step_by(CHUNK) {
                let at = MemoryRegionAddress((first * PAGE) as u64);
                let at = region.get_host_address(at).ok()?;
                pages += resident(at, CHUNK.min(all - first), &mut self.seen).ok()?;
            }
        }
        Some(pages * PAGE as u64)
    }
}
