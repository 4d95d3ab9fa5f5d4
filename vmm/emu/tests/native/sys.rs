//! A child whose signal handler saves what the last case came to and begins the next one: so
//! each case starts and ends by a signal, with all registers as the kernel has them.

use std::ptr::{addr_of, addr_of_mut};

use child::shared_memory;

mod child;

/// Linear address of the code page.
pub(crate) const CODE: u64 = 0x20_0000_0000;
/// Linear address of two pages of data, with nothing around.
pub(crate) const DATA: u64 = 0x20_0001_0000;
pub(crate) const DATA_LEN: usize = 8192;
const PAGE: usize = 4096;

/// Registers, code and memory before.
#[derive(Clone, Debug)]
#[repr(C)]
pub(crate) struct Case {
    pub(crate) registers: [u64; 16],
    pub(crate) xmm: [[u64; 2]; 16],
    pub(crate) mxcsr: u64,
    /// As FXSAVE has it: control, status and tags, and the registers by their distance from the
    /// top. Pointers are not set.
    pub(crate) x87: [u64; 20],
    pub(crate) rflags: u64,
    /// Offset of the code in its page.
    pub(crate) at: u64,
    pub(crate) code: [u8; 16],
    pub(crate) len: u64,
    /// The data is this, with `seed` XORed onto each word.
    pub(crate) seed: u64,
}

/// What it came to.
#[derive(Clone)]
#[repr(C)]
pub(crate) struct Outcome {
    pub(crate) registers: [u64; 16],
    pub(crate) xmm: [[u64; 2]; 16],
    pub(crate) mxcsr: u64,
    pub(crate) x87: [u64; 20],
    pub(crate) rflags: u64,
    pub(crate) rip: u64,
    pub(crate) trap: u64,
    pub(crate) error: u64,
    pub(crate) cr2: u64,
    pub(crate) data: [u8; DATA_LEN],
}

/// What parent and child share.
#[derive(Clone, Copy)]
#[repr(C)]
struct Shared {
    count: u64,
    next: u64,
    pattern: [u64; DATA_LEN / 8],
}

/// FXSAVE's image in the kernel's frame, and the header of XSAVE's that follows it, whose first
/// word says which components are loaded.
#[repr(C)]
struct Fpu {
    x87: [u64; 3],
    mxcsr: u32,
    mask: u32,
    st: [u64; 16],
    xmm: [[u64; 2]; 16],
    room: [u64; 12],
    components: u64,
}

static mut SHARED: *mut Shared = std::ptr::null_mut();
static mut CASES: *const Case = std::ptr::null();
static mut OUTCOMES: *mut Outcome = std::ptr::null_mut();

/// Registers 0 to 15 by their places in the kernel's frame.
const ORDER: [libc::c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

extern "C" fn handler(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a ucontext that lives until the handler returns, with XSAVE's
    // image of 64-bit processes, which has x87 and SSE first and its header behind; the statics
    // point to mappings of the size that `run` made, and the child has one thread.
    unsafe {
        let machine = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext;
        let fpu = &mut *machine.fpregs.cast::<Fpu>();
        let frame = &mut machine.gregs;
        let shared = &mut *SHARED;
        if shared.next > 0 {
            let outcome = &mut *OUTCOMES.add(shared.next as usize - 1);
            for (value, at) in outcome.registers.iter_mut().zip(ORDER) {
                *value = frame[at as usize] as u64;
            }
            outcome.xmm = fpu.xmm;
            outcome.mxcsr = u64::from(fpu.mxcsr);
            outcome.x87[..3].copy_from_slice(&fpu.x87);
            outcome.x87[4..].copy_from_slice(&fpu.st);
            outcome.rflags = frame[libc::REG_EFL as usize] as u64;
            outcome.rip = frame[libc::REG_RIP as usize] as u64;
            outcome.trap = frame[libc::REG_TRAPNO as usize] as u64;
            outcome.error = frame[libc::REG_ERR as usize] as u64;
            outcome.cr2 = frame[libc::REG_CR2 as usize] as u64;
            std::ptr::copy_nonoverlapping(
                DATA as *const u8,
                addr_of_mut!(outcome.data).cast(),
                DATA_LEN,
            );
        }
        if shared.next == shared.count {
            libc::_exit(0);
        }
        let case = &*CASES.add(shared.next as usize);
        shared.next += 1;
        let code = CODE as *mut u8;
        std::ptr::write_bytes(code, 0xcc, PAGE);
        let to = code.add(case.at as usize);
        std::ptr::copy_nonoverlapping(addr_of!(case.code).cast(), to, case.len as usize);
        let data = DATA as *mut u64;
        for (at, word) in shared.pattern.iter().enumerate() {
            data.add(at).write(word ^ case.seed);
        }
        for (value, at) in case.registers.iter().zip(ORDER) {
            frame[at as usize] = *value as i64;
        }
        fpu.xmm = case.xmm;
        fpu.mxcsr = case.mxcsr as u32;
        fpu.x87 = [case.x87[0], 0, 0];
        fpu.st.copy_from_slice(&case.x87[4..]);
        fpu.components |= 3;
        frame[libc::REG_EFL as usize] = case.rflags as i64;
        frame[libc::REG_RIP as usize] = (CODE + case.at) as i64;
    }
}

/// What the host's processor makes of cases. `pattern` is the memory before `seed`.
pub(crate) fn run(cases: &[Case], pattern: &[u64; DATA_LEN / 8]) -> Vec<Outcome> {
    let head = Shared {
        count: cases.len() as u64,
        next: 0,
        pattern: *pattern,
    };
    child::play(head, cases, in_child, |shared| shared.next)
}

fn in_child(shared: *mut Shared, cases: *const Case, outcomes: *mut Outcome) -> ! {
    let write = libc::PROT_READ | libc::PROT_WRITE;
    shared_memory(CODE, PAGE, write | libc::PROT_EXEC);
    shared_memory(DATA, DATA_LEN, write);
    // SAFETY: the child has one thread, and no signal has come yet.
    unsafe {
        SHARED = shared;
        CASES = cases;
        OUTCOMES = outcomes;
    }
    child::hand_over(handler)
}
