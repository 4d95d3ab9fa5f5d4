//! Time, as the ACPI timer tells it.

use super::sys;

/// The timer's frequency in kHz, rounded up, and the bits that every one has.
const PM_TIMER_KHZ: u64 = 3_580;
const PM_TIMER_MASK: u32 = 0xff_ffff;
/// Without that timer: the looks that stand for a millisecond.
const LOOKS_PER_MS: u64 = 10_000;

/// A span of time from its making on. The counter wraps after 4.7 s, so somebody has to
/// look more often.
#[derive(Debug)]
pub(crate) struct Timer {
    port: u16,
    limit: u64,
    last: u32,
    passed: u64,
}

impl Timer {
    /// A timer of so many milliseconds.
    pub(crate) fn new(port: u16, ms: u32) -> Self {
        let per_ms = match port {
            0 => LOOKS_PER_MS,
            _ => PM_TIMER_KHZ,
        };
        Self {
            port,
            limit: u64::from(ms) * per_ms,
            last: sys::read_timer(port) & PM_TIMER_MASK,
            passed: 0,
        }
    }

    /// Looks at the clock: whether the time is over.
    pub(crate) fn is_over(&mut self) -> bool {
        self.passed += match self.port {
            0 => 1,
            port => {
                let time = sys::read_timer(port) & PM_TIMER_MASK;
                let step = time.wrapping_sub(self.last) & PM_TIMER_MASK;
                self.last = time;
                u64::from(step)
            }
        };
        self.passed >= self.limit
    }

    /// Whether more than one `part`th of the time is over, as of the last look.
    pub(crate) fn is_past(&self, part: u64) -> bool {
        self.passed > self.limit / part
    }
}
