//! What only assembly can do: the first instructions, accesses that may fault,
//! and the way to CPL 3 and back.

use core::arch::{asm, global_asm, x86_64::__cpuid_count};
use core::sync::atomic::AtomicU64;

use arbiter::guest::Fault;

/// The port that ends a micro-guest.
const EXIT_PORT: u16 = 0xf4;

/// Entries that there is place for.
const ENTRIES: usize = 1000;
/// Words of an entry: 24 bytes of text and a value.
const WORDS: usize = 4;

/// The number of entries, then the entries. Written by the first vCPU alone.
#[repr(C)]
pub(crate) struct Findings {
    pub(crate) count: AtomicU64,
    pub(crate) entries: [[AtomicU64; WORDS]; ENTRIES],
}

/// What the guest found out, where the harness looks for it (`build/guest.ld`).
// SAFETY: the linker script gives this section a place of its own in the
// micro-machine's memory, which is all 0 at the start, as the value here.
#[unsafe(link_section = ".bss.findings")]
pub(crate) static FINDINGS: Findings = Findings {
    count: AtomicU64::new(0),
    entries: [const { [const { AtomicU64::new(0) }; WORDS] }; ENTRIES],
};

/// A value, and 0, or 1 after a #GP.
#[repr(C)]
struct Answer {
    value: u64,
    faulted: u64,
}

// fn(index, rsi) -> Answer for RDMSR and RDPMC; fn(index, rsi, value) for WRMSR,
// whose answer has no value. What the instruction is to find in RSI is the second
// argument of the C calling convention.
//
// The handler of #GP sets R8 and goes on behind an instruction that may fault;
// all four are two bytes long. At its beginning the stack holds, from RSP on:
// error code, RIP, CS, RFLAGS, RSP, SS.
//
// The way back from CPL 3 is UD2: the handler of #UD takes the stack that
// `guest_user_rdpmc` left. The first 1 KiB of the stack is for handlers that
// interrupt CPL 3, as the TSS names its top.
global_asm!(
    ".global guest_entry, guest_gp, guest_ud",
    "guest_entry:",
    "sub rsp, 0x400",
    "and rsp, -16",
    "call {start}",
    "ud2",
    "guest_rdmsr:",
    "mov ecx, edi",
    "xor r8d, r8d",
    "2: rdmsr",
    "jmp 9f",
    "guest_rdpmc:",
    "mov ecx, edi",
    "xor r8d, r8d",
    "3: rdpmc",
    "9: shl rdx, 32",
    "or rax, rdx",
    "mov rdx, r8",
    "ret",
    "guest_wrmsr:",
    "mov ecx, edi",
    "mov eax, edx",
    "shr rdx, 32",
    "xor r8d, r8d",
    "4: wrmsr",
    "xor eax, eax",
    "mov rdx, r8",
    "ret",
    "guest_user_rdpmc:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov [rip + {stack}], rsp",
    "mov ecx, edi",
    "xor r8d, r8d",
    "mov rdx, rsp",
    "push {user_ss}",
    // The program needs no stack of its own.
    "push rdx",
    "push 2",
    "push {user_cs}",
    "lea rax, [rip + 5f]",
    "push rax",
    "iretq",
    "5: rdpmc",
    "6: ud2",
    "guest_ud:",
    "lea r9, [rip + 6b]",
    "cmp r9, [rsp]",
    "mov r10d, 6",
    "jne 8f",
    "mov rsp, [rip + {stack}]",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "jmp 9b",
    "guest_gp:",
    "push rax",
    "lea rax, [rip + 2b]",
    "cmp rax, [rsp + 16]",
    "je 7f",
    "lea rax, [rip + 3b]",
    "cmp rax, [rsp + 16]",
    "je 7f",
    "lea rax, [rip + 4b]",
    "cmp rax, [rsp + 16]",
    "je 7f",
    "lea rax, [rip + 5b]",
    "cmp rax, [rsp + 16]",
    "mov r10d, 13",
    "jne 8f",
    "7: add qword ptr [rsp + 16], 2",
    "mov r8d, 1",
    "pop rax",
    "add rsp, 8",
    "iretq",
    // An exception that nobody expects ends the guest.
    "8: mov eax, r10d",
    "mov edx, {unexpected_port}",
    "out dx, eax",
    "hlt",
    start = sym start,
    stack = sym STACK,
    user_ss = const USER_SS,
    user_cs = const USER_CS,
    unexpected_port = const UNEXPECTED_VECTOR_PORT,
);

/// Selectors and port of the micro-machine.
const USER_SS: u32 = 0x1b;
const USER_CS: u32 = 0x23;
const UNEXPECTED_VECTOR_PORT: u32 = 0xe0;

/// RSP while CPL 3 runs. Only assembly touches it, on the first vCPU.
static STACK: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" {
    fn guest_rdmsr(index: u32, rsi: u64) -> Answer;
    fn guest_rdpmc(index: u32, rsi: u64) -> Answer;
    fn guest_wrmsr(index: u32, rsi: u64, value: u64) -> Answer;
    fn guest_user_rdpmc(index: u32, rsi: u64) -> Answer;
}

extern "C" fn start(word: u64) -> ! {
    super::start(word)
}

fn outcome(answer: Answer) -> Result<u64, Fault> {
    match answer.faulted {
        0 => Ok(answer.value),
        _ => Err(Fault),
    }
}

/// RDMSR with `rsi` in RSI.
pub(crate) fn rdmsr(index: u32, rsi: u64) -> Result<u64, Fault> {
    // SAFETY: reading an MSR of a counter or of its reservation changes nothing
    // that Rust knows of, and a #GP comes back in the answer.
    outcome(unsafe { guest_rdmsr(index, rsi) })
}

/// WRMSR with `rsi` in RSI.
pub(crate) fn wrmsr(index: u32, rsi: u64, value: u64) -> Result<(), Fault> {
    // SAFETY: this guest writes MSRs of counters and of their reservations only,
    // none of which changes how code runs or what memory holds; none of them is
    // told to interrupt. A #GP comes back in the answer.
    outcome(unsafe { guest_wrmsr(index, rsi, value) }).map(drop)
}

/// RDPMC at CPL 0 with `rsi` in RSI.
pub(crate) fn rdpmc(index: u32, rsi: u64) -> Result<u64, Fault> {
    // SAFETY: RDPMC changes RDX and RAX alone; a #GP comes back in the answer.
    outcome(unsafe { guest_rdpmc(index, rsi) })
}

/// RDPMC at CPL 3 with `rsi` in RSI; on the first vCPU only.
pub(crate) fn user_rdpmc(index: u32, rsi: u64) -> Result<u64, Fault> {
    // SAFETY: the instructions at CPL 3 are RDPMC and UD2, which touch no memory,
    // and the handler of UD2 restores stack and registers. All pages are open to
    // CPL 3, and no other vCPU uses the word that keeps the stack.
    outcome(unsafe { guest_user_rdpmc(index, rsi) })
}

/// EAX, EBX, ECX and EDX of a leaf.
pub(crate) fn cpuid(leaf: u32) -> [u32; 4] {
    let found = __cpuid_count(leaf, 0);
    [found.eax, found.ebx, found.ecx, found.edx]
}

/// Ends the guest; 0 is success.
pub(crate) fn exit(value: u32) -> ! {
    // SAFETY: the port ends the guest, and touches no memory.
    unsafe { asm!("out dx, eax", in("dx") EXIT_PORT, in("eax") value, options(nomem, nostack)) };
    loop {
        core::hint::spin_loop();
    }
}
