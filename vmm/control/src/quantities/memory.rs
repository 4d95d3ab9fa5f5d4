//! How much of the guest's memory the host has given pages for.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Tells what a guest's memory takes of the host's.
pub trait GuestMemoryUse: Debug + Send {
    /// Bytes for which the host has given pages; `None` if the host does not tell.
    fn resident_bytes(&mut self) -> Option<u64>;
}

/// The answer is no older than this where asking is quick.
const FRESH: Duration = Duration::from_millis(20);
/// Asking takes no more than one part in so many of the server's time.
const SHARE: u32 = 32;
/// Nobody has asked yet, or the host did not tell.
const UNKNOWN: u64 = u64::MAX;

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

    #[test]
    fn whoever_asks_all_the_time_gets_the_last_answer() {
        let (mut probe, gauge) = MemoryProbe::new(Box::new(Growing(0)));
        assert_eq!(gauge.bytes(), None, "nobody has asked yet");
        let began = Instant::now();
        for _ in 0..100 {
            probe.refresh();
        }
        let most = 1 + began.elapsed().as_millis() as u64 / 20;
        let bytes = gauge.bytes().unwrap();
        assert!(bytes >= 4096 && bytes <= 4096 * most, "{bytes}");
    }
}
