//! The request itself.

use core::ffi::CStr;

/// What is asked for, by its number in `valgrind.h` and `callgrind.h`. Those of Callgrind are `CT`
/// in the upper two bytes, and a number.
#[derive(Debug, Clone, Copy)]
#[repr(usize)]
pub(crate) enum Question {
    RunningOnValgrind = 0x1001,
    DumpStats = 0x4354_0000,
    ZeroStats = 0x4354_0001,
    ToggleCollect = 0x4354_0002,
    DumpStatsAt = 0x4354_0003,
    StartInstrumentation = 0x4354_0004,
    StopInstrumentation = 0x4354_0005,
}

/// The answer of whoever looks on; 0 where nobody does.
#[cfg(all(target_arch = "x86_64", target_pointer_width = "64"))]
pub(crate) fn ask(question: Question, text: Option<&CStr>) -> usize {
    let text = text.map_or(0, |text| text.as_ptr().addr());
    // The question and five words for it.
    let words = [question as usize, text, 0, 0, 0, 0];
    let answer: usize;
    // SAFETY: RDI is turned by 3 + 13 + 61 + 51 = 128 bits, so it is what it was, and RBX is
    // exchanged with itself: for a processor this is no more than a change of flags, which are not
    // said to be preserved. Whoever knows the sequence reads the six words at RAX, which live until
    // then, and the text, which the caller has borrowed, and writes RDX alone.
    unsafe {
        core::arch::asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") words.as_ptr(),
            inout("rdx") 0usize => answer,
            options(nostack),
        );
    }
    answer
}

/// No other processor has anybody who looks on.
#[cfg(not(all(target_arch = "x86_64", target_pointer_width = "64")))]
pub(crate) fn ask(_: Question, _: Option<&CStr>) -> usize {
    0
}
