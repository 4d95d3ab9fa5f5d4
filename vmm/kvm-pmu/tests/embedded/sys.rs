//! What is not safe: a memory slot, a process in which a VM is dead, signals, and a look at what
//! a thread asks of the kernel.

use std::io::ErrorKind;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use kvm_pmu::{Errno, SharedMemory, TwiceMapped};
use vm_memory::{GuestAddress, GuestMemoryBackend as _};

/// Gives `vm` the first `size` bytes of `memory`, which has to outlive it.
pub(crate) fn set_memory(vm: &VmFd, memory: &TwiceMapped, size: usize) {
    let at = memory.for_kvm().get_host_address(GuestAddress(0)).unwrap();
    set_slot(vm, at as u64, size);
}

/// The same of memory that the VMM has mapped once, and `shared` again.
pub(crate) fn share_memory(vm: &VmFd, memory: &TwiceMapped, shared: &SharedMemory, size: usize) {
    let at = memory.for_vmm().get_host_address(GuestAddress(0)).unwrap();
    // SAFETY: guest memory of that size, which is only accessed volatilely.
    let at = unsafe { shared.add_mapped((0, size), at) }.unwrap();
    // A slot is deleted before it has other memory.
    set_slot(vm, at, 0);
    set_slot(vm, at, size);
}

fn set_slot(vm: &VmFd, at: u64, size: usize) {
    let slot = kvm_userspace_memory_region {
        memory_size: size as u64,
        userspace_addr: at,
        ..Default::default()
    };
    // SAFETY: the mapping has `size` bytes, and the caller drops it after the VM.
    unsafe { vm.set_user_memory_region(slot) }.unwrap();
}

/// `KVM_RUN` of a vCPU, by whatever a VMM has for it.
pub(crate) fn kvm_run(vcpu: &OwnedFd) -> Result<(), Errno> {
    // SAFETY: it has no argument, and touches guest memory and the vCPU's mapping alone.
    match unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_RUN.into(), 0) } {
        0 => Ok(()),
        _ => Err(Errno::last()),
    }
}

/// Whether `holds`, asked in a child process: there each ioctl of a VM that this process has
/// made fails with EIO. One that hangs is ended, and does not hold.
pub(crate) fn in_a_child(holds: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs on this thread alone, and leaves without running what the
    // parent has registered for its end.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: the default action of the signal ends the child.
            unsafe { libc::alarm(20) };
            let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(holds));
            let status = i32::from(!held.unwrap_or(false));
            // SAFETY: ends the process, which is the child.
            unsafe { libc::_exit(status) }
        }
        child => {
            assert!(child > 0, "no child process");
            let mut status = 0;
            // The kick timer that the parent's vCPU has set interrupts the wait.
            let waited = loop {
                // SAFETY: the status is a variable of this frame.
                let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
                if waited != -1 || std::io::Error::last_os_error().kind() != ErrorKind::Interrupted
                {
                    break waited;
                }
            };
            waited == child && status == 0
        }
    }
}

/// A handler of signals.
pub(crate) type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// One that does nothing, as VMMs have it that only want `KVM_RUN` to end.
pub(crate) extern "C" fn deaf(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// One that tells kvm-pmu.
pub(crate) extern "C" fn passes_on(
    _: libc::c_int,
    info: *mut libc::siginfo_t,
    _: *mut libc::c_void,
) {
    // SAFETY: it is installed with SA_SIGINFO, so the kernel hands it one.
    kvm_pmu::on_kick(unsafe { &*info });
}

/// What [`counts`] has replaced, and how often it was called.
static REPLACED: AtomicUsize = AtomicUsize::new(0);
pub(crate) static COUNTED: AtomicI32 = AtomicI32::new(0);

/// One that calls the handler that it has replaced.
pub(crate) extern "C" fn counts(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    more: *mut libc::c_void,
) {
    COUNTED.fetch_add(1, Ordering::Relaxed);
    let replaced = REPLACED.load(Ordering::Relaxed);
    if replaced != 0 {
        // SAFETY: what `handle_before` has found is kvm-pmu's, which is installed with SA_SIGINFO.
        let replaced = unsafe { std::mem::transmute::<libc::sighandler_t, Handler>(replaced) };
        replaced(signal, info, more);
    }
}

/// Has [`counts`] handle `signal`, and call what does so now.
pub(crate) fn handle_before(signal: i32) {
    REPLACED.store(handler_of(signal), Ordering::Relaxed);
    handle(signal, counts);
}

/// Has `handler` handle `signal`.
pub(crate) fn handle(signal: i32, handler: Handler) {
    // SAFETY: all zeros are a valid sigaction; the kernel calls the handler as SA_SIGINFO says,
    // with the three arguments that a `Handler` has.
    let installed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    assert_eq!(installed, 0);
}

/// Has a call that `signal` interrupts done again where that may be, after its handler.
pub(crate) fn restart_calls(signal: i32) {
    // SAFETY: all zeros are a valid sigaction, which the first call overwrites; the handler stays,
    // and is called as before.
    let changed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action);
        action.sa_flags |= libc::SA_RESTART;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    assert_eq!(changed, 0);
}

/// Has the kernel do `what` ([`libc::SIG_DFL`], [`libc::SIG_IGN`]) with `signal`.
pub(crate) fn ignore(signal: i32, what: libc::sighandler_t) {
    // SAFETY: neither runs code of this process.
    let before = unsafe { libc::signal(signal, what) };
    assert_ne!(before, libc::SIG_ERR);
}

/// Whether `handler` handles `signal`.
pub(crate) fn is_handled_by(signal: i32, handler: Handler) -> bool {
    handler_of(signal) == handler as libc::sighandler_t
}

fn handler_of(signal: i32) -> libc::sighandler_t {
    // SAFETY: all zeros are a valid sigaction, which the call overwrites; it sets none.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action);
        action.sa_sigaction
    }
}

/// Has this thread take `signal` no more.
pub(crate) fn block(signal: i32) {
    // SAFETY: the set is initialised before it is used, and changes what this thread blocks alone.
    let blocked = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut())
    };
    assert_eq!(blocked, 0);
}

/// What a thread asked of the kernel: a system call, or a request of ioctl's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Call {
    System(i64),
    Ioctl(u32),
}

const KVM_RUN: u32 = 0xae80;

/// Has each call of this thread from now on, `KVM_RUN` apart, wait until it was read from the
/// descriptor that is returned (seccomp(2), "SECCOMP_RET_USER_NOTIF").
fn announce_calls() -> std::io::Result<OwnedFd> {
    let word = |code: u32, k: u32, (jt, jf): (u8, u8)| libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt,
        jf,
        k,
    };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equals = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let ends = libc::BPF_RET | libc::BPF_K;
    let ioctl = u32::try_from(libc::SYS_ioctl).unwrap();
    let mut filter = [
        // The call's number, and its second argument.
        word(load, 0, (0, 0)),
        word(equals, ioctl, (0, 3)),
        word(load, 24, (0, 0)),
        word(equals, KVM_RUN, (0, 1)),
        word(ends, libc::SECCOMP_RET_ALLOW, (0, 0)),
        word(ends, libc::SECCOMP_RET_USER_NOTIF, (0, 0)),
    ];
    let program = libc::sock_fprog {
        len: 6,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: numbers alone.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    let (mode, flags) = (
        libc::SECCOMP_SET_MODE_FILTER,
        libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
    );
    // SAFETY: the program has six instructions, which the kernel copies.
    let fd = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, for this caller.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap()) })
}

/// What a call gets in the kernel's place, by its third argument, if it is not to be done.
pub(crate) type Answer = fn(Call, u64) -> Option<i64>;

/// Reads what a thread asks for next, and lets it go on; waits for that a moment. Allocates
/// nothing: that thread may have the allocator's lock.
fn read_call(calls: &OwnedFd, seen: &mut Vec<Call>, answer: Answer) {
    let mut ready = libc::pollfd {
        fd: calls.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry, of this frame.
    unsafe { libc::poll(&raw mut ready, 1, 5) };
    if ready.revents & libc::POLLIN == 0 {
        return;
    }
    // SAFETY: plain numbers; the kernel wants zeros.
    let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    let receive = libc::SECCOMP_IOCTL_NOTIF_RECV;
    // SAFETY: the structure is the one that the request is for. It fails where a signal has come
    // in between: the thread then asks again.
    if unsafe { libc::ioctl(calls.as_raw_fd(), receive, &raw mut asked) } != 0 {
        return;
    }
    let call = match i64::from(asked.data.nr) {
        libc::SYS_ioctl => Call::Ioctl(u32::try_from(asked.data.args[1] & 0xffff_ffff).unwrap()),
        number => Call::System(number),
    };
    if !seen.contains(&call) {
        assert!(seen.len() < seen.capacity());
        seen.push(call);
    }
    let goes_on = u32::try_from(libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE).unwrap();
    let value = answer(call, asked.data.args[2]);
    let mut answer = libc::seccomp_notif_resp {
        id: asked.id,
        val: value.unwrap_or(0),
        error: 0,
        flags: if value.is_none() { goes_on } else { 0 },
    };
    let send = libc::SECCOMP_IOCTL_NOTIF_SEND;
    // SAFETY: likewise.
    unsafe { libc::ioctl(calls.as_raw_fd(), send, &raw mut answer) };
}

/// All that a thread asks the kernel for which does `work`, to its end. None where the kernel does
/// not tell.
pub(crate) fn calls_of<R: Send>(work: impl FnOnce() -> R + Send) -> Option<(R, Vec<Call>)> {
    answered(|_, _| None, work)
}

/// The same with some calls answered by `answer`.
pub(crate) fn answered<R: Send>(
    answer: Answer,
    work: impl FnOnce() -> R + Send,
) -> Option<(R, Vec<Call>)> {
    let (fd, ended) = (AtomicI32::new(0), AtomicBool::new(false));
    let mut seen = Vec::with_capacity(200);
    let done = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let Ok(calls) = announce_calls() else {
                fd.store(-1, Ordering::Release);
                return None;
            };
            // Nobody reads yet, so this thread makes no call before that.
            fd.store(calls.into_raw_fd(), Ordering::Release);
            Some(work())
        });
        while fd.load(Ordering::Acquire) == 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let joiner = scope.spawn(|| {
            let done = worker.join();
            ended.store(true, Ordering::Release);
            done
        });
        if let calls @ 1.. = fd.load(Ordering::Acquire) {
            // SAFETY: the worker has given it away.
            let calls = unsafe { OwnedFd::from_raw_fd(calls) };
            // The end of the filter is not awaited: a thread of KVM's, which the first KVM_RUN of
            // a VM starts, has it as well, until the VM's end.
            while !ended.load(Ordering::Acquire) {
                read_call(&calls, &mut seen, answer);
            }
        }
        joiner.join().unwrap().unwrap()
    });
    seen.sort();
    done.map(|done| (done, seen))
}
