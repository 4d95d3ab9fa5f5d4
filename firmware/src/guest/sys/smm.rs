//! The code that an SMI leads to, in 16-bit mode with CS at SMRAM. It takes the notices
//! of its processor and replies to those that ask, as `firmware::smm` has it written down.
//!
//! It needs no memory but SMRAM's own, because everything else is the kernel's.

use core::arch::global_asm;
use core::cell::UnsafeCell;
use core::slice;

use arbiter::abi;
use firmware::smm::{self, Pages, SIZE};

/// Where the pages lie from the base of CS on.
const ENTRY: usize = 0x8000;
/// A stack for each processor, for the frame of a #GP, behind the pages.
const STACKS: usize = ENTRY + SIZE + 64 * STACK_SIZE;
const STACK_SIZE: usize = 32;

// Cookies are in EDI and ESI. A question may have lapsed, so a reply may raise #GP. An
// IRET would let NMIs in, so the handler goes on without one. RSM restores all registers.
global_asm!(
    ".section .rodata.smm, \"a\"",
    ".global firmware_smm, firmware_smm_end",
    "firmware_smm:",
    ".code16",
    "mov ax, cs",
    "mov ds, ax",
    "mov ss, ax",
    "mov eax, 1",
    "cpuid",
    "shr ebx, 24",
    "cmp ebx, 64",
    "jae 9f",
    "mov bp, bx",
    // lidt [descriptor]
    ".byte 0x0f, 0x01, 0x1e",
    ".short {entry} + 4f - firmware_smm",
    // The processor's stack and its row.
    "shl bx, 5",
    "mov sp, {stacks}",
    "sub sp, bx",
    "shl bp, 6",
    "add bp, {entry} + {rows}",
    "2: mov si, {entry} + {base}",
    "mov ecx, dword ptr [si]",
    "add ecx, {notice}",
    "rdmsr",
    "mov bx, ax",
    "and bl, {kind}",
    "jz 9f",
    "cmp bl, {asked}",
    "jne 2b",
    "cmp bh, 64",
    "jae 2b",
    // The counter's number, from the row.
    "movzx si, bh",
    "add si, bp",
    "movzx si, byte ptr [si]",
    "cmp si, 64",
    "jae 2b",
    "shl si, 4",
    "add si, {entry} + {counters}",
    "mov eax, dword ptr [si + 8]",
    "mov ah, bh",
    "mov edi, dword ptr [si + 4]",
    "mov esi, dword ptr [si]",
    "xor edx, edx",
    "add ecx, {reply} - {notice}",
    "wrmsr",
    "jmp 2b",
    // #GP: its frame is three words.
    "3: add sp, 6",
    "jmp 2b",
    "9: rsm",
    // The table of vectors up to #GP, and what LIDT reads.
    ".balign 4",
    "5: .rept 13",
    ".short {entry} + 9b - firmware_smm, {segment}",
    ".endr",
    ".short {entry} + 3b - firmware_smm, {segment}",
    "4: .short 14 * 4 - 1",
    ".long ({segment} << 4) + {entry} + 5b - firmware_smm",
    ".code64",
    "firmware_smm_end:",
    ".text",
    entry = const ENTRY,
    stacks = const STACKS,
    rows = const smm::ROWS,
    base = const smm::BASE,
    counters = const smm::COUNTERS,
    segment = const 0x3000,
    notice = const abi::MSR_NOTICE,
    reply = const abi::MSR_REPLY,
    kind = const abi::NOTICE_KIND_MASK,
    asked = const abi::NOTICE_ASKED,
);

unsafe extern "C" {
    static firmware_smm: u8;
    static firmware_smm_end: u8;
}

#[repr(C, align(4096))]
struct PagesCell(UnsafeCell<Pages>);

// SAFETY: only the boot processor touches it, before it ends the firmware's phase.
unsafe impl Sync for PagesCell {}

static PAGES: PagesCell = PagesCell(UnsafeCell::new([0; SIZE]));

/// The pages that are to become SMRAM's, which `fill` fills, and their address.
pub(crate) fn lay_smm(fill: impl FnOnce(&mut Pages, &[u8])) -> u64 {
    let (start, end) = (&raw const firmware_smm, &raw const firmware_smm_end);
    // SAFETY: both labels are of the code above, the second behind the first, and nobody
    // writes to it.
    let code = unsafe { slice::from_raw_parts(start, end.addr() - start.addr()) };
    // SAFETY: the boot processor alone comes here, and nobody holds a reference.
    fill(unsafe { &mut *PAGES.0.get() }, code);
    PAGES.0.get().addr() as u64
}
