//! What the signal handler leaves for the thread that it interrupted.

use std::cell::Cell;

thread_local! {
    /// Changes with each overflow signal.
    ///
    /// Constant-initialised and without a destructor, so a signal handler may
    /// write it at any time.
    static GENERATION: Cell<u32> = const { Cell::new(0) };
}

/// Tells the `perf` backends of this thread that an overflow may have come.
///
/// The handler of [`crate::BackendEnv::overflow_signal`], and that of SIGIO,
/// call it with `si_code` of what they were given. It is safe in a signal
/// handler: it writes one thread-local word. Signals that a process or a timer
/// sent (`si_code` 0 and below) are other people's kicks and are not noted.
///
/// It notes that there was one, not which: the backend then reads every group
/// with an armed counter, one system call each, and compares the counts. So
/// neither a descriptor that was closed and given out anew since the signal
/// was sent, nor a queue that was full, can tell it something false.
pub fn note_overflow_signal(si_code: i32) {
    if si_code > 0 {
        // A handler that interrupts this one may have its step lost, but not
        // both: the word is another one afterwards.
        GENERATION.set(GENERATION.get().wrapping_add(1));
    }
}

/// A number that is another one once a signal has come. Every backend keeps
/// the one it saw last, so that none takes another's signal away.
pub(super) fn generation() -> u32 {
    GENERATION.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `si_code` of an overflow (`sigaction(2)`, SIGPOLL).
    const POLL_IN: i32 = 1;

    #[test]
    fn only_the_kernel_s_own_signals_are_noted() {
        for (code, noted) in [
            (libc::SI_USER, false),
            (libc::SI_TKILL, false),
            (libc::SI_TIMER, false),
            (POLL_IN, true),
            (libc::SI_KERNEL, true),
        ] {
            let before = generation();
            note_overflow_signal(code);
            assert_eq!(generation() != before, noted, "si_code {code}");
        }
    }
}
