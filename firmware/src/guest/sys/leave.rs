//! The last instructions: from 64-bit mode to the kernel's first.
//!
//! The kernel finds the registers that Umpire's loader would have set, and
//! nothing of the firmware's stacks.

use core::arch::global_asm;
use core::cell::UnsafeCell;
use core::mem::offset_of;

use firmware::config::{KernelEntry, Mode};

use super::enter::STACK_SIZE;

/// What the assembly below reads: a [`KernelEntry`] in the forms that
/// instructions take.
#[repr(C)]
struct Handover {
    gdt_limit: u16,
    gdt_base: [u8; 8],
    _pad: [u8; 6],
    /// An empty table.
    idt: [u8; 10],
    _pad2: [u8; 6],
    /// Operand of a far jump: offset, selector.
    far_offset: u32,
    far_selector: u16,
    data: u16,
    rip: u64,
    rsp: u64,
    rax: u64,
    rbx: u64,
    rsi: u64,
    cr0: u64,
    cr3: u64,
    cr4: u64,
}

#[repr(C, align(16))]
struct HandoverCell(UnsafeCell<Handover>);

// SAFETY: only the boot processor touches it, in `enter_kernel`.
unsafe impl Sync for HandoverCell {}

static HANDOVER: HandoverCell = HandoverCell(UnsafeCell::new(Handover {
    gdt_limit: 0,
    gdt_base: [0; 8],
    _pad: [0; 6],
    idt: [0; 10],
    _pad2: [0; 6],
    far_offset: 0,
    far_selector: 0,
    data: 0,
    rip: 0,
    rsp: 0,
    rax: 0,
    rbx: 0,
    rsi: 0,
    cr0: 0,
    cr3: 0,
    cr4: 0,
}));

unsafe extern "C" {
    fn firmware_leave_long() -> !;
    fn firmware_leave_protected() -> !;
    /// First instruction in 32-bit mode, in the low 4 GiB.
    static firmware_leave_32: u8;
}

// The stacks are wiped first, as cookies may lie there. What is pushed later is
// the value of RFLAGS. XOR would change flags that POPF has set.
global_asm!(
    ".macro firmware_wipe",
    "lea rdi, [rip + firmware_stack]",
    "mov ecx, {stacks} / 8",
    "xor eax, eax",
    "cld",
    "rep stosq",
    "lea rsp, [rip + firmware_stack + {stack}]",
    "lgdt [rip + {handover} + {gdt}]",
    "lidt [rip + {handover} + {idt}]",
    "push 2",
    "popfq",
    ".irp register, 8, 9, 10, 11, 12, 13, 14, 15",
    "mov r\\register, 0",
    ".endr",
    ".endm",

    ".balign 16",
    ".global firmware_leave_long",
    "firmware_leave_long:",
    "firmware_wipe",
    "movzx eax, word ptr [rip + {handover} + {data}]",
    "mov ds, eax",
    "mov es, eax",
    "mov ss, eax",
    "mov fs, eax",
    "mov gs, eax",
    "mov rax, [rip + {handover} + {cr4}]",
    "mov cr4, rax",
    "mov rax, [rip + {handover} + {cr3}]",
    "mov cr3, rax",
    "mov rax, [rip + {handover} + {cr0}]",
    "mov cr0, rax",
    "mov rsp, [rip + {handover} + {rsp}]",
    "mov rax, [rip + {handover} + {rax}]",
    "mov rbx, [rip + {handover} + {rbx}]",
    "mov rsi, [rip + {handover} + {rsi}]",
    "mov ecx, 0",
    "mov edx, 0",
    "mov edi, 0",
    "mov ebp, 0",
    "jmp fword ptr [rip + {handover} + {far}]",

    ".balign 16",
    ".global firmware_leave_protected",
    "firmware_leave_protected:",
    "firmware_wipe",
    "jmp fword ptr [rip + {handover} + {far}]",
    ".code32",
    ".global firmware_leave_32",
    "firmware_leave_32:",
    // Compatibility mode: paging off leaves long mode (SDM vol. 3A, 9.8.5.4).
    "mov eax, dword ptr [{handover} + {cr0}]",
    "mov cr0, eax",
    "mov ecx, 0xc0000080",
    "mov eax, 0",
    "mov edx, 0",
    "wrmsr",
    "mov eax, dword ptr [{handover} + {cr4}]",
    "mov cr4, eax",
    "mov eax, dword ptr [{handover} + {cr3}]",
    "mov cr3, eax",
    "movzx eax, word ptr [{handover} + {data}]",
    "mov ds, eax",
    "mov es, eax",
    "mov ss, eax",
    "mov fs, eax",
    "mov gs, eax",
    "mov esp, dword ptr [{handover} + {rsp}]",
    "mov eax, dword ptr [{handover} + {rax}]",
    "mov ebx, dword ptr [{handover} + {rbx}]",
    "mov esi, dword ptr [{handover} + {rsi}]",
    "mov ecx, 0",
    "mov edi, 0",
    "mov ebp, 0",
    "jmp dword ptr [{handover} + {rip_at}]",
    ".code64",
    stacks = const 2 * STACK_SIZE,
    stack = const STACK_SIZE,
    handover = sym HANDOVER,
    gdt = const offset_of!(Handover, gdt_limit),
    idt = const offset_of!(Handover, idt),
    far = const offset_of!(Handover, far_offset),
    data = const offset_of!(Handover, data),
    rip_at = const offset_of!(Handover, rip),
    rsp = const offset_of!(Handover, rsp),
    rax = const offset_of!(Handover, rax),
    rbx = const offset_of!(Handover, rbx),
    rsi = const offset_of!(Handover, rsi),
    cr0 = const offset_of!(Handover, cr0),
    cr3 = const offset_of!(Handover, cr3),
    cr4 = const offset_of!(Handover, cr4),
);

/// Enters the kernel.
pub(crate) fn enter_kernel(entry: &KernelEntry) -> ! {
    let leave_32 = (&raw const firmware_leave_32).addr() as u64;
    let far = match entry.mode {
        Mode::Long => entry.rip,
        Mode::Protected => leave_32,
    };
    let handover = Handover {
        gdt_limit: entry.gdt_limit,
        gdt_base: entry.gdt_base.to_le_bytes(),
        _pad: [0; 6],
        idt: [0; 10],
        _pad2: [0; 6],
        // The parser lets only addresses below 4 GiB through, and the image is
        // below 1 MiB.
        far_offset: u32::try_from(far).unwrap_or(0),
        far_selector: entry.code,
        data: entry.data,
        rip: entry.rip,
        rsp: entry.rsp,
        rax: entry.rax,
        rbx: entry.rbx,
        rsi: entry.rsi,
        cr0: entry.cr0,
        cr3: entry.cr3,
        cr4: entry.cr4,
    };
    // SAFETY: the boot processor alone comes here, once, and nobody holds a
    // reference.
    unsafe { *HANDOVER.0.get() = handover };
    // SAFETY: nothing of the firmware runs after this, so its stacks, tables and
    // mode need not be kept; the parser has checked that the registers fit the
    // mode, and the code lies in identity-mapped memory.
    unsafe {
        match entry.mode {
            Mode::Long => firmware_leave_long(),
            Mode::Protected => firmware_leave_protected(),
        }
    }
}
