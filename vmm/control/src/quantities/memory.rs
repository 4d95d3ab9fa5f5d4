//! How much of the guest's memory the host has given pages for.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A guest's memory.
pub trait GuestMemoryUse: Debug + Send {
    /// Bytes of it for which the host has given pages; `None` if it does not tell.
    fn resident_bytes(&mut self) -> Option<u64>;
}

/// The answer is no older than this, where asking is quick,
const FRESH: Duration = Duration::from_millis(20);
/// and asking takes no more than a part of the server's time.
const SHARE: u32 = 32;
/// Nobody has asked yet, or the host did not tell.
const UNKNOWN: u64 = u64::MAX;

/// The bytes, for vCPUs' threads to read; the server asks the host.
#[derive(Debug)]
pub struct MemoryGauge {
    bytes: AtomicU64,
}

impl MemoryGauge {
    pub fn new() -> Self {
        Self {
            bytes: AtomicU64::new(UNKNOWN),
        }
    }

    /// As last asked for.
    pub fn bytes(&self) -> Option<u64> {
        let bytes = self.bytes.load(Ordering::Relaxed);
        (bytes != UNKNOWN).then_some(bytes)
    }
}

/// Asks the host.
#[derive(Debug)]
pub struct MemoryProbe {
    memory: Box<dyn GuestMemoryUse>,
    gauge: Arc<MemoryGauge>,
    not_before: Option<Instant>,
}

impl MemoryProbe {
    pub fn new(memory: Box<dyn GuestMemoryUse>) -> (Self, Arc<MemoryGauge>) {
        let gauge = Arc::new(MemoryGauge::new());
        let probe = Self {
            memory,
            gauge: gauge.clone(),
            not_before: None,
        };
        (probe, gauge)
    }

    /// Asks, unless the last answer is fresh.
    pub fn refresh(&mut self) {
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
