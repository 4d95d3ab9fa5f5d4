//! A child process whose signal handler plays cases, one a signal; `emu-fpu`'s tests have it too.

use std::fmt::Debug;

const STACK: usize = 1 << 17;

/// What a signal calls, with SA_SIGINFO.
pub(crate) type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Anonymous memory that a child shares, at `at` or anywhere.
pub(crate) fn shared_memory(at: u64, bytes: usize, rights: libc::c_int) -> *mut u8 {
    let fixed = if at == 0 {
        0
    } else {
        libc::MAP_FIXED_NOREPLACE
    };
    // SAFETY: a new mapping, which replaces none.
    let map = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            bytes,
            rights,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS | fixed,
            -1,
            0,
        )
    };
    assert_ne!(map, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    map.cast()
}

/// Has a child begin with `begin`, which gets the memory that both share: `head`, the cases, and
/// room for what they come to, which is zeroed. `reached`: how far the child has come.
pub(crate) fn play<H: Copy, C: Clone + Debug, O: Clone>(
    head: H,
    cases: &[C],
    begin: fn(*mut H, *const C, *mut O) -> !,
    reached: fn(&H) -> u64,
) -> Vec<O> {
    let write = libc::PROT_READ | libc::PROT_WRITE;
    let bytes = size_of::<H>() + size_of_val(cases) + cases.len() * size_of::<O>();
    let map = shared_memory(0, bytes + 64, write);
    // SAFETY: the mapping is zeroed and has room for the three in this order, each a multiple
    // of 8 bytes; plain integers may be any bits.
    unsafe {
        let shared = map.cast::<H>();
        shared.write(head);
        let to = map.add(size_of::<H>()).cast::<C>();
        std::ptr::copy_nonoverlapping(cases.as_ptr(), to, cases.len());
        let outcomes = to.add(cases.len()).cast::<O>();
        let child = libc::fork();
        assert!(child >= 0, "fork");
        if child == 0 {
            begin(shared, to, outcomes);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        let reached = reached(&*shared);
        let case = (reached as usize).checked_sub(1).map(|at| &cases[at]);
        assert_eq!(status, 0, "case {reached} of the child, {case:x?}");
        let all = std::slice::from_raw_parts(outcomes, cases.len()).to_vec();
        libc::munmap(map.cast(), bytes + 64);
        all
    }
}

/// Raises the first signal, and has `handler` get it and those of every fault.
pub(crate) fn hand_over(handler: Handler) -> ! {
    let stack = shared_memory(0, STACK, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the handler is as `sigaction` wants it with SA_SIGINFO; the stack is the
    // mapping above; raise only sends a signal to this process.
    unsafe {
        let alternate = libc::stack_t {
            ss_sp: stack.cast(),
            ss_flags: 0,
            ss_size: STACK,
        };
        libc::sigaltstack(&raw const alternate, std::ptr::null_mut());
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        for signal in [
            libc::SIGTRAP,
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGILL,
            libc::SIGFPE,
        ] {
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
        libc::alarm(60);
        libc::raise(libc::SIGTRAP);
        libc::_exit(1);
    }
}
