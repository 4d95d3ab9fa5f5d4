//! The processor's registers and ports.

use core::arch::{asm, global_asm, x86_64::__cpuid_count};
use core::hint;

use firmware::layout::EXIT_PORT;
use firmware::reserve::{Fault, Regs};

/// Data register of COM1.
const COM1: u16 = 0x3f8;

// fn(index, cookie, &mut value) -> 0, or 1 after a #GP
// fn(index, cookie, value) -> 0, or 1 after a #GP
// The cookie is the second argument of the C calling convention, in RSI, which
// is where docs/reference/pcr.md wants it.
global_asm!(
    ".balign 16",
    ".global firmware_rdmsr, firmware_rdmsr_at",
    "firmware_rdmsr:",
    "mov ecx, edi",
    "mov r8, rdx",
    "firmware_rdmsr_at:",
    "rdmsr",
    "shl rdx, 32",
    "or rax, rdx",
    "mov [r8], rax",
    "xor eax, eax",
    "ret",
    ".balign 16",
    ".global firmware_wrmsr, firmware_wrmsr_at",
    "firmware_wrmsr:",
    "mov ecx, edi",
    "mov eax, edx",
    "shr rdx, 32",
    "firmware_wrmsr_at:",
    "wrmsr",
    "xor eax, eax",
    "ret",
);

unsafe extern "C" {
    fn firmware_rdmsr(index: u32, cookie: u64, value: *mut u64) -> u32;
    fn firmware_wrmsr(index: u32, cookie: u64, value: u64) -> u32;
}

/// CPUID.
pub(crate) fn cpuid(leaf: u32, subleaf: u32) -> Regs {
    let found = __cpuid_count(leaf, subleaf);
    Regs {
        eax: found.eax,
        ebx: found.ebx,
        ecx: found.ecx,
        edx: found.edx,
    }
}

/// RDMSR with a cookie.
pub(crate) fn rdmsr(msr: u32, cookie: u64) -> Result<u64, Fault> {
    let mut value = 0;
    // SAFETY: reading an MSR changes nothing that Rust knows of; a #GP comes
    // back as 1, and `value` is valid for the one write.
    match unsafe { firmware_rdmsr(msr, cookie, &raw mut value) } {
        0 => Ok(value),
        _ => Err(Fault),
    }
}

/// WRMSR with a cookie.
pub(crate) fn wrmsr(msr: u32, cookie: u64, value: u64) -> Result<(), Fault> {
    // SAFETY: the firmware writes MSRs of performance counters and of their
    // reservations only, none of which changes how code runs or what memory
    // holds; a #GP comes back as 1.
    match unsafe { firmware_wrmsr(msr, cookie, value) } {
        0 => Ok(()),
        _ => Err(Fault),
    }
}

/// RDRAND; only where CPUID has it.
pub(crate) fn rdrand() -> Option<u64> {
    let (value, ready): (u64, u8);
    // SAFETY: called only where CPUID has RDRAND, which changes registers
    // and flags alone.
    unsafe {
        asm!("rdrand {}", "setc {}", out(reg) value, out(reg_byte) ready,
            options(nomem, nostack));
    }
    (ready != 0).then_some(value)
}

/// Sends one byte to COM1.
pub(crate) fn put_serial(byte: u8) {
    // SAFETY: COM1's data register takes any byte, and touches no memory.
    unsafe { asm!("out dx, al", in("dx") COM1, in("al") byte, options(nomem, nostack)) };
}

/// Reads a timer of 32 bits at a port; 0 for port 0.
pub(crate) fn read_timer(port: u16) -> u32 {
    if port == 0 {
        return 0;
    }
    let value: u32;
    // SAFETY: the configuration names the port of the ACPI timer, which reading
    // does not change.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value, options(nomem, nostack)) };
    value
}

/// Ends the run; where the exit port does nothing, stops this processor.
pub(crate) fn exit(value: u32) -> ! {
    // SAFETY: the port ends the machine or does nothing.
    unsafe { asm!("out dx, eax", in("dx") EXIT_PORT, in("eax") value, options(nomem, nostack)) };
    loop {
        // SAFETY: interrupts are off and no handler is waited for; CLI and HLT
        // touch no memory.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) };
    }
}

/// A pause in a loop that waits for another processor.
pub(crate) fn relax() {
    hint::spin_loop();
}
