//! The time stamp counter.

/// The host's time stamp counter, in ticks: the clock of samples.
#[must_use]
#[inline]
pub(crate) fn rdtsc() -> u64 {
    // SAFETY: RDTSC has no operands in memory; every x86-64 CPU has it, and
    // Linux sets CR4.TSD only for a thread that asked for it (PR_SET_TSC),
    // which no thread of this program does.
    unsafe { core::arch::x86_64::_rdtsc() }
}
