//! A child whose signal handler saves what the last case came to and begins the next one: so
//! each case starts and ends by a signal, with the FPU's state as the kernel's frame has it.

use std::ptr::addr_of;

use child::shared_memory;

#[path = "../../../tests/native/sys/child.rs"]
mod child;

/// Linear address of the code page.
const CODE: u64 = 0x20_0000_0000;
/// Linear address of the data, which RSI holds.
const DATA: u64 = 0x20_0001_0000;
pub(crate) const DATA_LEN: usize = 128;
const PAGE: usize = 4096;

/// What of FXSAVE's image (SDM vol. 1, table 10-2) a case sets and reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Fx {
    pub(crate) control: u16,
    pub(crate) status: u16,
    /// A bit a physical register that is not empty.
    pub(crate) tags: u16,
    pub(crate) opcode: u16,
    pub(crate) ip: u64,
    pub(crate) dp: u64,
    pub(crate) mxcsr: u32,
    pub(crate) mxcsr_mask: u32,
    /// ST(0) first.
    pub(crate) st: [[u8; 16]; 8],
    pub(crate) xmm: [[u64; 2]; 16],
}

/// Before: RSI holds the data's address, RAX is `rax`.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct Case {
    pub(crate) code: [u8; 16],
    pub(crate) len: u64,
    pub(crate) rax: u64,
    pub(crate) rflags: u64,
    pub(crate) fx: Fx,
    pub(crate) data: [u8; DATA_LEN],
}

/// After. `trap` is 3 where the instruction has retired.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct Outcome {
    pub(crate) trap: u64,
    pub(crate) rax: u64,
    pub(crate) rflags: u64,
    pub(crate) fx: Fx,
    pub(crate) data: [u8; DATA_LEN],
}

/// What parent and child share.
#[derive(Clone, Copy)]
#[repr(C)]
struct Shared {
    count: u64,
    next: u64,
}

static mut SHARED: *mut Shared = std::ptr::null_mut();
static mut CASES: *const Case = std::ptr::null();
static mut OUTCOMES: *mut Outcome = std::ptr::null_mut();

extern "C" fn handler(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a ucontext, with an XSAVE image of 576 bytes at the least behind
    // `fpregs`, that lives until the handler returns; the statics point to mappings of the size
    // that `run` made, and the child has one thread.
    unsafe {
        let context = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext;
        let frame = &mut context.gregs;
        let fx = context.fpregs.cast::<Fx>();
        // XSTATE_BV: x87 and SSE are in the image, not in their initial state.
        let present = context.fpregs.cast::<u64>().add(512 / 8);
        let shared = &mut *SHARED;
        if shared.next > 0 {
            let outcome = &mut *OUTCOMES.add(shared.next as usize - 1);
            outcome.trap = frame[libc::REG_TRAPNO as usize] as u64;
            outcome.rax = frame[libc::REG_RAX as usize] as u64;
            outcome.rflags = frame[libc::REG_EFL as usize] as u64;
            outcome.fx = fx.read();
            outcome.data = (DATA as *const [u8; DATA_LEN]).read();
        }
        if shared.next == shared.count {
            libc::_exit(0);
        }
        let case = &*CASES.add(shared.next as usize);
        shared.next += 1;
        let code = CODE as *mut u8;
        std::ptr::write_bytes(code, 0xcc, 64);
        std::ptr::copy_nonoverlapping(addr_of!(case.code).cast(), code, case.len as usize);
        (DATA as *mut [u8; DATA_LEN]).write(case.data);
        let mask = (*fx).mxcsr_mask;
        fx.write(case.fx);
        (*fx).mxcsr_mask = mask;
        present.write(present.read() | 3);
        frame[libc::REG_RAX as usize] = case.rax as i64;
        frame[libc::REG_RSI as usize] = DATA as i64;
        frame[libc::REG_EFL as usize] = case.rflags as i64;
        frame[libc::REG_RIP as usize] = CODE as i64;
    }
}

/// What the host's processor makes of cases.
pub(crate) fn run(cases: &[Case]) -> Vec<Outcome> {
    let head = Shared {
        count: cases.len() as u64,
        next: 0,
    };
    child::play(head, cases, in_child, |shared| shared.next)
}

fn in_child(shared: *mut Shared, cases: *const Case, outcomes: *mut Outcome) -> ! {
    let write = libc::PROT_READ | libc::PROT_WRITE;
    shared_memory(CODE, PAGE, write | libc::PROT_EXEC);
    shared_memory(DATA, PAGE, write);
    // SAFETY: the child has one thread, and no signal has come yet.
    unsafe {
        SHARED = shared;
        CASES = cases;
        OUTCOMES = outcomes;
    }
    child::hand_over(handler)
}

/// The state of a thread's FPU: MXCSR, and the environment of x87 with its pending exceptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct HostFpu {
    /// FNSTENV's image: control, status and tag words first.
    pub(crate) environment: [u32; 7],
    pub(crate) mxcsr: u32,
}

impl HostFpu {
    pub(crate) fn new(control: u16, status: u16, mxcsr: u32) -> Self {
        let mut environment = [0; 7];
        environment[0] = u32::from(control) | 0xffff_0000;
        environment[1] = u32::from(status) | 0xffff_0000;
        environment[2] = 0xffff_ffff;
        Self { environment, mxcsr }
    }

    fn load(&self) {
        // SAFETY: both images are as long as their instructions read, and MXCSR's value has no
        // reserved bit; no x87 instruction follows that would wait.
        unsafe {
            std::arch::asm!("fldenv [{0}]", "ldmxcsr dword ptr [{0} + 28]", in(reg) self, options(nostack));
        }
    }

    fn now() -> Self {
        let mut state = Self::default();
        // SAFETY: it stores 28 and 4 bytes to `state`; FNSTENV masks exceptions, which FLDENV of
        // what it has stored takes back.
        unsafe {
            std::arch::asm!("fnstenv [{0}]", "fldenv [{0}]", "stmxcsr dword ptr [{0} + 28]",
                in(reg) &raw mut state, options(nostack));
        }
        state
    }
}

/// Runs in a process of its own, whose FPU is set first and has to be the same afterwards. What
/// `run` writes to the slice comes back.
pub(crate) fn in_process(fpu: HostFpu, results: usize, run: impl FnOnce(&mut [u64])) -> Vec<u64> {
    let map = shared_memory(0, 8 * (results + 1), libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the mapping is zeroed, and has room for the results and the word behind; the child
    // computes and allocates, for which glibc makes fork safe.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0, "fork");
        if child == 0 {
            libc::alarm(60);
            let all = std::slice::from_raw_parts_mut(map.cast::<u64>(), results + 1);
            fpu.load();
            let before = HostFpu::now();
            run(&mut all[..results]);
            all[results] = u64::from(before == HostFpu::now() && before.mxcsr == fpu.mxcsr);
            libc::_exit(0);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0, "the child, with {fpu:x?}");
        let all = std::slice::from_raw_parts(map.cast::<u64>(), results + 1).to_vec();
        libc::munmap(map.cast(), 8 * (results + 1));
        assert_eq!(all[results], 1, "the host's FPU has changed: {fpu:x?}");
        all[..results].to_vec()
    }
}
