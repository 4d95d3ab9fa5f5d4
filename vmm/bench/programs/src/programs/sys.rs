//! Entry, memory, and some system calls of Linux.

use core::arch::{asm, global_asm};
use core::panic::PanicInfo;

const WRITE: u64 = 1;
const EXIT: u64 = 60;
const GETPPID: u64 = 110;
const REBOOT: u64 = 169;
const CLOCK_GETTIME: u64 = 228;
const CLOCK_PROCESS_CPUTIME_ID: u64 = 2;

/// 4 MiB.
const LONGS: usize = 512 * 1024;

static mut MEMORY: [u64; LONGS] = [0; LONGS];

// RSP is where the kernel has put argc (System V ABI for x86-64, 3.4.1).
global_asm!(
    ".global program_entry",
    "program_entry:",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {begin}",
    begin = sym begin,
);

// The target has no SSE, and its compiler uses none. Both are functions of the System V ABI, and
// change RAX, RCX, RDI, RSI and XMM0 to XMM3 alone.
global_asm!(
    "float_scalar:",
    "mov eax, 1",
    "cvtsi2sd xmm0, eax", // x
    "movapd xmm2, xmm0",  // 1
    "mov eax, 3",
    "cvtsi2sd xmm3, eax", // 3
    "2:",
    "movapd xmm1, xmm2",
    "divsd xmm1, xmm0",
    "divsd xmm0, xmm3",
    "addsd xmm0, xmm0",
    "addsd xmm0, xmm1",
    "dec rdi",
    "jne 2b",
    "movq rax, xmm0",
    "ret",
    // RDI: 4,096 doubles, and as many behind them; RSI: rounds.
    "float_vector:",
    "2:",
    "xor ecx, ecx",
    "3:",
    "movupd xmm0, [rdi + rcx + 0x8000]",
    "movupd xmm1, [rdi + rcx]",
    "mulpd xmm0, xmm0",
    "addpd xmm1, xmm0",
    "movupd [rdi + rcx], xmm1",
    "add ecx, 16",
    "cmp ecx, 0x8000",
    "jne 3b",
    "dec rsi",
    "jne 2b",
    "ret",
);

unsafe extern "sysv64" {
    fn float_scalar(rounds: u64) -> u64;
    fn float_vector(doubles: *mut u64, rounds: u64);
}

/// The bits of what so many rounds come to, at least one.
pub(crate) fn scalar_doubles(rounds: u64) -> u64 {
    // SAFETY: it touches no memory, and no register that the ABI keeps.
    unsafe { float_scalar(rounds.max(1)) }
}

/// Adds the squares of the second half to the first, in so many rounds, at least one.
pub(crate) fn vector_doubles(doubles: &mut [u64], rounds: u64) {
    if doubles.len() == 8192 {
        // SAFETY: it reads these 64 KiB and writes to the first half of them.
        unsafe { float_vector(doubles.as_mut_ptr(), rounds.max(1)) };
    }
}

extern "C" fn begin(stack: *const u64) -> ! {
    // SAFETY: the kernel has put argc there, and as many pointers behind it.
    let count = unsafe { *stack };
    if count != 3 {
        exit(1);
    }
    // SAFETY: argv[1] and argv[2] are there, and end with a 0 as each argument does.
    let (letter, rounds) = unsafe {
        let letter = *(*stack.add(2) as *const u8);
        (letter, number(*stack.add(3) as *const u8))
    };
    let memory = &raw mut MEMORY;
    // SAFETY: this function is entered once, by the entry point, and nobody else names MEMORY.
    let longs = unsafe { &mut *memory };
    crate::start(letter, rounds, &mut Memory(longs))
}

/// A decimal number.
///
/// # Safety
/// Behind `text` are bytes, the last of them 0.
unsafe fn number(mut text: *const u8) -> u64 {
    let mut number = 0u64;
    // SAFETY: no byte behind the 0 is read.
    while let digit @ b'0'..=b'9' = unsafe { *text } {
        number = number
            .wrapping_mul(10)
            .wrapping_add(u64::from(digit - b'0'));
        // SAFETY: this byte was not the last one.
        text = unsafe { text.add(1) };
    }
    number
}

/// What a program computes on.
pub(crate) struct Memory(&'static mut [u64]);

impl Memory {
    pub(crate) fn longs(&mut self) -> &mut [u64] {
        self.0
    }

    pub(crate) fn words(&mut self) -> &mut [u32] {
        let len = self.0.len() * 2;
        // SAFETY: it is this memory, which is borrowed; a u32 needs less alignment, and each of
        // its values is one.
        unsafe { core::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let len = self.0.len() * 8;
        // SAFETY: likewise.
        unsafe { core::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }

    /// Two halves, of words and of bytes.
    pub(crate) fn halves(&mut self) -> (&mut [u32], &mut [u8]) {
        let (words, bytes) = self.0.split_at_mut(LONGS / 2);
        let (words_len, bytes_len) = (words.len() * 2, bytes.len() * 8);
        // SAFETY: these are two parts of this memory, which is borrowed; alignment and values as
        // above.
        unsafe {
            (
                core::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words_len),
                core::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes_len),
            )
        }
    }
}

/// CPU time of this process, in nanoseconds.
pub(crate) fn cpu_time() -> u64 {
    let mut time = [0u64; 2];
    let at = time.as_mut_ptr() as u64;
    // SAFETY: the kernel writes 16 bytes there, which are `time`.
    unsafe { call(CLOCK_GETTIME, [CLOCK_PROCESS_CPUTIME_ID, at, 0]) };
    time[0] * 1_000_000_000 + time[1]
}

/// Writes to standard output; whether all of it was taken.
pub(crate) fn tell(words: [u64; 2]) -> bool {
    let bytes = size_of_val(&words) as u64;
    // SAFETY: the kernel reads these bytes.
    let written = unsafe { call(WRITE, [1, words.as_ptr() as u64, bytes]) };
    written == bytes
}

/// The number of the parent, of which the kernel has to do next to nothing to tell it.
pub(crate) fn parent() -> u64 {
    // SAFETY: it touches no memory.
    unsafe { call(GETPPID, [0; 3]) }
}

/// Ends the machine, which the first process alone may.
pub(crate) fn power_off() -> ! {
    // LINUX_REBOOT_MAGIC1, _MAGIC2C and _CMD_POWER_OFF (reboot(2)).
    // SAFETY: it touches no memory of this process.
    unsafe { call(REBOOT, [0xfee1_dead, 0x2812_1969, 0x4321_fedc]) };
    exit(4)
}

pub(crate) fn exit(status: u64) -> ! {
    // SAFETY: it does not come back, and touches no memory.
    unsafe { call(EXIT, [status, 0, 0]) };
    loop {
        core::hint::spin_loop();
    }
}

/// # Safety
/// What the system call does to memory is what its caller borrows for it.
unsafe fn call(number: u64, arguments: [u64; 3]) -> u64 {
    let result;
    // SAFETY: RCX and R11 are what SYSCALL changes, and RAX has the result; the caller answers
    // for memory.
    unsafe {
        asm!(
            "syscall",
            inout("rax") number => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    exit(3)
}
