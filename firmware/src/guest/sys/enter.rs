//! The first instructions of every processor, and their stacks.

use core::arch::global_asm;

use firmware::config::Area;
use firmware::layout;

use super::exceptions;

/// Bytes of a stack; the configuration lies on it more than once.
pub(super) const STACK_SIZE: usize = 0x6000;

// The boot processor: 64-bit mode, identity map, the area's address in RSI.
global_asm!(
    ".section .text.entry, \"ax\"",
    ".global firmware_entry",
    "firmware_entry:",
    "lea rsp, [rip + firmware_stack + {size}]",
    "mov rdi, rsi",
    "xor ebp, ebp",
    "call {boot}",
    "ud2",
    // The other processors' stack lies behind the boot processor's.
    ".section .bss.stacks, \"aw\", @nobits",
    ".balign 16",
    ".global firmware_stack",
    "firmware_stack:",
    ".zero {size}",
    ".zero {size}",
    ".global firmware_stacks_end",
    "firmware_stacks_end:",
    ".text",
    size = const STACK_SIZE,
    boot = sym boot_entry,
);

// The others: real mode, CS:IP is the image's first byte. CR4.PAE, the page
// tables and EFER.LME come before CR0.PG (SDM vol. 3A, 9.8.5).
global_asm!(
    ".section .trampoline, \"ax\"",
    ".code16",
    "firmware_trampoline:",
    "cli",
    "mov ax, cs",
    "mov ds, ax",
    // lgdt with a 32-bit base: data32 lgdt [descriptor - trampoline]
    ".byte 0x66, 0x0f, 0x01, 0x16",
    ".short 3f - firmware_trampoline",
    "mov eax, {protected}",
    "mov cr0, eax",
    // jmp far, 32-bit offset
    ".byte 0x66, 0xea",
    ".long 4f",
    ".short {code_32}",
    ".balign 4",
    "3: .short {gdt_limit}",
    ".long {gdt}",
    ".code32",
    "4: mov eax, {data}",
    "mov ds, eax",
    "mov es, eax",
    "mov ss, eax",
    "mov fs, eax",
    "mov gs, eax",
    "mov eax, {pae}",
    "mov cr4, eax",
    "mov eax, {page_tables}",
    "mov cr3, eax",
    "mov ecx, 0xc0000080",
    "rdmsr",
    "or eax, 0x100",
    "wrmsr",
    "mov eax, {paging}",
    "mov cr0, eax",
    ".byte 0xea",
    ".long 5f",
    ".short {code_64}",
    ".code64",
    "5: lea rsp, [rip + firmware_stacks_end]",
    "xor ebp, ebp",
    "call {other}",
    "6: cli",
    "hlt",
    "jmp 6b",
    ".text",
    protected = const 0x11,
    paging = const 0x8000_0031_u32,
    pae = const 0x20,
    code_32 = const layout::CODE_32,
    code_64 = const layout::CODE_64,
    data = const layout::DATA,
    gdt = const layout::GDT,
    gdt_limit = const layout::GDT_SIZE - 1,
    page_tables = const layout::PAGE_TABLES,
    other = sym other_entry,
);

extern "C" fn boot_entry(area: *mut Area) -> ! {
    exceptions::install();
    // SAFETY: by the contract of docs/guide/firmware.md RSI holds the address of the
    // area, which is memory that belongs to the firmware, and only the boot
    // processor touches it: the others get copies of what they need.
    let area = unsafe { &mut *area };
    crate::boot(area)
}

extern "C" fn other_entry() {
    exceptions::load();
    crate::start_secondary();
}
