//! Exceptions. A #GP of an MSR access is an answer. All others are mistakes of
//! the firmware, which prints them and ends the run.
//!
//! Nothing here returns by IRET: interrupts are off, and after a faulted access
//! the code goes on behind it with the stack it had.

use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;

use firmware::layout::CODE_64;

/// Exceptions of the architecture.
const VECTORS: usize = 32;
/// Bytes of one stub.
const STUB: usize = 16;
/// Present, 64-bit interrupt gate (SDM vol. 3A, 6.14.1).
const GATE: u64 = 0x8e << 40;

/// A table that is filled once, before anybody loads it.
#[repr(C, align(16))]
struct Table(UnsafeCell<[[u64; 2]; VECTORS]>);

// SAFETY: written only by `install`, on the boot processor, before it wakes any
// other; afterwards the processors read it.
unsafe impl Sync for Table {}

static TABLE: Table = Table(UnsafeCell::new([[0; 2]; VECTORS]));

/// What LIDT reads.
#[repr(C, packed)]
struct Pointer {
    limit: u16,
    base: u64,
}

unsafe extern "C" {
    /// The first of [`VECTORS`] stubs of [`STUB`] bytes.
    static firmware_stubs: [[u8; STUB]; VECTORS];
}

// Vectors 8, 10 to 14, 17, 21, 29 and 30 push an error code; the others' stubs
// push 0 for it. At `9`, from RSP on: vector, error code, RIP, CS, RFLAGS, RSP, SS.
global_asm!(
    ".balign 16",
    ".global firmware_stubs",
    "firmware_stubs:",
    ".set vector, 0",
    ".rept 32",
    ".balign 16",
    ".if ((0x60227d00 >> vector) & 1) == 0",
    "push 0",
    ".endif",
    "push vector",
    "jmp 9f",
    ".set vector, vector + 1",
    ".endr",
    ".balign 16",
    "9: cmp qword ptr [rsp], 13",
    "jne 8f",
    "lea rax, [rip + firmware_rdmsr_at]",
    "cmp rax, [rsp + 16]",
    "je 7f",
    "lea rax, [rip + firmware_wrmsr_at]",
    "cmp rax, [rsp + 16]",
    "je 7f",
    "8: mov rdi, [rsp]",
    "mov rsi, [rsp + 8]",
    "mov rdx, [rsp + 16]",
    "and rsp, -16",
    "call {unexpected}",
    "ud2",
    // Both accesses are leaves: their return address is on top of their stack.
    "7: mov rsp, [rsp + 40]",
    "mov eax, 1",
    "ret",
    unexpected = sym unexpected,
);

extern "C" fn unexpected(vector: u64, error: u64, rip: u64) -> ! {
    crate::exception(vector, error, rip)
}

/// Fills the table and loads it.
pub(super) fn install() {
    // SAFETY: the boot processor alone runs, and nobody holds a reference.
    let table = unsafe { &mut *TABLE.0.get() };
    let stubs = (&raw const firmware_stubs).addr();
    for (number, gate) in table.iter_mut().enumerate() {
        let address = (stubs + number * STUB) as u64;
        *gate = [
            address & 0xffff | u64::from(CODE_64) << 16 | GATE | (address >> 16 & 0xffff) << 48,
            address >> 32,
        ];
    }
    load();
}

/// Loads the table on another processor.
pub(super) fn load() {
    let pointer = Pointer {
        limit: u16::try_from(size_of::<Table>() - 1).unwrap_or(u16::MAX),
        base: TABLE.0.get().addr() as u64,
    };
    // SAFETY: `pointer` is a limit and a base as LIDT reads them, and the table
    // it names is a static that holds a valid gate for each vector.
    unsafe { asm!("lidt [{}]", in(reg) &raw const pointer, options(readonly, nostack)) };
}
