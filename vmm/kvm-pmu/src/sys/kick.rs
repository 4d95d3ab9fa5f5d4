//! The kick: a signal that makes a vCPU's thread leave the guest.
//!
//! A signal that lands between the last check of a flag and `KVM_RUN` would be
//! lost; so the handler sets `kvm_run.immediate_exit` of the vCPU that its
//! thread runs, and `KVM_RUN` then returns at once (KVM API, `KVM_RUN`).
//!
//! The kernel sends the same signal for an overflow of a perf event, which the
//! handler notes for the `perf` backend of its thread.
//!
//! A signal has one handler a process, and this crate may be there twice: in two versions, or in
//! a library that the VMM has loaded. So the handler calls the one that it has replaced, and who
//! is called by another one need not be the signal's handler.

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use kvm_bindings::kvm_run;

use crate::error::{Errno, KickError};

thread_local! {
    /// `kvm_run.immediate_exit` of the vCPU that this thread runs, or null.
    ///
    /// Constant-initialised and without a destructor, so the signal handler
    /// may read it at any time.
    static IMMEDIATE_EXIT: Cell<*const AtomicU8> = const { Cell::new(ptr::null()) };
    /// Kicks that this thread has taken, likewise.
    static TAKEN: Cell<u32> = const { Cell::new(0) };
    /// Whether this thread is in a handler of [`BEFORE`], likewise.
    static IN_BEFORE: [Cell<bool>; 2] = const { [Cell::new(false), Cell::new(false)] };
}

/// What the kernel calls for a signal (`sigaction(2)`, SA_SIGINFO).
type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// The handlers of the kick signal and of SIGIO that this crate's has replaced, the first time: of
/// those that it replaces later it would not know whether they call it.
static BEFORE: [OnceLock<Option<Handler>>; 2] = [OnceLock::new(), OnceLock::new()];

/// The signal that was chosen, negative where its handler is the VMM's own, which calls
/// [`on_kick`]; 0: nobody has chosen.
static CHOSEN: AtomicI32 = AtomicI32::new(0);

/// The signal that kicks a vCPU's thread.
#[must_use]
pub fn kick_signal() -> i32 {
    match CHOSEN.load(Ordering::Relaxed) {
        0 => libc::SIGRTMIN(),
        chosen => chosen.abs(),
    }
}

/// Chooses a signal and whose handler it has, once a process: timers and perf events know the
/// one of before. True if nobody had chosen.
fn choose(signal: i32) -> Result<bool, Errno> {
    let order = Ordering::Relaxed;
    match CHOSEN.compare_exchange(0, signal, order, order) {
        Ok(_) => Ok(true),
        Err(before) if before == signal => Ok(false),
        Err(_) => Err(Errno(libc::EBUSY)),
    }
}

/// A signal that can have a handler.
fn can_be_handled(signal: i32) -> Result<i32, Errno> {
    let fixed = [libc::SIGKILL, libc::SIGSTOP].contains(&signal);
    if fixed || !(1..=libc::SIGRTMAX()).contains(&signal) {
        return Err(Errno(libc::EINVAL));
    }
    Ok(signal)
}

/// Chooses `signal` and installs the handler. A signal that cannot have it was not chosen.
fn choose_and_install(signal: i32) -> Result<(), Errno> {
    let is_new = choose(signal)?;
    let installed = install(signal).and_then(|()| install(libc::SIGIO));
    if installed.is_err() && is_new {
        CHOSEN.store(0, Ordering::Relaxed);
    }
    installed
}

/// Has [`handle`] called for `signal`, on any thread.
fn install(signal: i32) -> Result<(), Errno> {
    let mut action = action_of(signal)?;
    let before = &BEFORE[place(signal)];
    let is_handled = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
    // Another copy's handler calls this one, and would itself not be called if this one came to
    // the front again.
    let is_called = || before.get().is_some() && is_handled && unblocked(signal, || takes(signal));
    if action.sa_sigaction == ours() || is_called() {
        return Ok(());
    }
    let wants_info = action.sa_flags & libc::SA_SIGINFO != 0;
    before.get_or_init(|| {
        // SAFETY: a handler that is there and has SA_SIGINFO takes the three arguments.
        let handler =
            || unsafe { mem::transmute::<libc::sighandler_t, Handler>(action.sa_sigaction) };
        (is_handled && wants_info).then(handler)
    });
    // The mask stays: the handler that was there relies on it.
    action.sa_sigaction = ours();
    action.sa_flags = libc::SA_SIGINFO | action.sa_flags & libc::SA_ONSTACK;
    // SAFETY: the kernel calls the handler with the three arguments that SA_SIGINFO says, which
    // are those of `handle`.
    let installed = unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) };
    Errno::if_negative(installed)
}

/// Where in [`BEFORE`] a signal is.
fn place(signal: i32) -> usize {
    usize::from(signal == libc::SIGIO)
}

fn ours() -> libc::sighandler_t {
    handle as *const () as libc::sighandler_t
}

fn has_own_handler() -> bool {
    CHOSEN.load(Ordering::Relaxed) < 0
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, more: *mut libc::c_void) {
    // SAFETY: the handler is installed with SA_SIGINFO, so the kernel hands it
    // a siginfo_t that is valid until it returns.
    on_kick(unsafe { &*info });
    if let Some(Some(before)) = BEFORE[place(signal)].get() {
        IN_BEFORE.with(|inside| {
            let inside = &inside[place(signal)];
            // One that calls the handler which it replaces may have been installed again.
            if !inside.replace(true) {
                before(signal, info, more);
                inside.set(false);
            }
        });
    }
}

/// What the handler of [`kick_signal`] does, for a VMM that handles the signal itself
/// ([`own_kick_handler`]): `info` is what the kernel gave its handler, on the same thread. It
/// may be called for other senders' signals as well; a `KVM_RUN` then ends early.
pub fn on_kick(info: &libc::siginfo_t) {
    pmu_virt::perf::note_overflow_signal(info.si_code);
    TAKEN.set(TAKEN.get().wrapping_add(1));
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: a non-null pointer was set by a `KickGuard`, which keeps the
        // mapping alive and resets the pointer before it goes; it cannot leave
        // its thread, so the handler cannot see a stale one.
        unsafe { (*flag).store(1, Ordering::Relaxed) };
    }
}

/// Installs the handler of the kick signal, SIGRTMIN if nobody has chosen another one, for the
/// whole process, and of SIGIO, which the kernel sends in its place when a thread's queue is
/// full; nothing where the VMM has its own ([`own_kick_handler`]). A handler with SA_SIGINFO that
/// is there already goes on being called, after this one: that of another copy of this crate, or
/// the VMM's own. Whoever installs one of the two later, and does not do so, takes this one away,
/// which [`ThreadContext::new`](crate::ThreadContext::new) finds.
///
/// # Errors
/// The error of `sigaction`.
pub fn install_kick_handler() -> Result<(), Errno> {
    if has_own_handler() {
        return Ok(());
    }
    choose_and_install(kick_signal())
}

/// The same with a signal of the VMM's choice, for a VMM that uses SIGRTMIN itself.
///
/// # Errors
/// EBUSY: another one was chosen before, by [`install_kick_handler`] for instance, or the VMM
/// has its own handler. EINVAL: there is no such signal, or it cannot have a handler; nothing is
/// chosen then. Else that of `sigaction`.
pub fn install_kick_handler_of(signal: i32) -> Result<(), Errno> {
    choose_and_install(can_be_handled(signal)?)
}

/// The VMM has a handler of `signal` of its own, with SA_SIGINFO, that calls [`on_kick`]. So does
/// its handler of SIGIO, which the kernel sends in place of `signal` when the queue of the
/// process's user is full; without a handler SIGIO ends the process.
///
/// # Errors
/// EBUSY: another signal was chosen before, or this crate's handler installed. EINVAL: there is
/// no such signal, or it cannot have a handler.
pub fn own_kick_handler(signal: i32) -> Result<(), Errno> {
    choose(-can_be_handled(signal)?).map(drop)
}

/// Whether a kick of the calling thread would come to [`on_kick`].
pub(crate) fn check_kicks() -> Result<(), KickError> {
    let signal = kick_signal();
    let handler = handler_of(signal);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        return Err(KickError::NoHandler(signal));
    }
    if is_blocked(signal) {
        return Err(KickError::Blocked(signal));
    }
    if handler != ours() && !takes(signal) {
        return Err(if has_own_handler() {
            KickError::NotCalled(signal)
        } else {
            KickError::OtherHandler(signal)
        });
    }
    check_overflows()
}

/// Whether SIGIO has a handler: this crate's, one that calls it, or the VMM's where it has that of
/// the kick signal.
fn check_overflows() -> Result<(), KickError> {
    let handler = handler_of(libc::SIGIO);
    let is_handled = handler != libc::SIG_DFL && handler != libc::SIG_IGN;
    if handler == ours() || is_handled && (has_own_handler() || takes(libc::SIGIO)) {
        return Ok(());
    }
    Err(KickError::Overflows(kick_signal()))
}

/// Whether `signal`, which has a handler, comes to [`on_kick`] on this thread.
fn takes(signal: i32) -> bool {
    if is_blocked(signal) {
        return false;
    }
    let before = TAKEN.get();
    // One that a thread sends itself and does not block is delivered before the call returns
    // (POSIX, `pthread_kill`).
    let sent = KickTarget::current().send(signal);
    sent.is_err() || TAKEN.get() != before
}

/// What handles `signal`; [`libc::SIG_DFL`] if there is no such signal.
fn handler_of(signal: i32) -> libc::sighandler_t {
    action_of(signal).map_or(libc::SIG_DFL, |action| action.sa_sigaction)
}

fn action_of(signal: i32) -> Result<libc::sigaction, Errno> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: asks for the action and sets none; all zeros are a valid sigaction, which the
    // kernel overwrites if there is such a signal.
    let (asked, action) = unsafe {
        let asked = libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
        (asked, action.assume_init())
    };
    Errno::if_negative(asked)?;
    Ok(action)
}

/// Whether the calling thread blocks `signal`.
fn is_blocked(signal: i32) -> bool {
    let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: asks for the mask and sets none; all zeros are a valid set, which the call
    // overwrites, and `sigismember` only reads it.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), mask.as_mut_ptr());
        libc::sigismember(mask.as_ptr(), signal) == 1
    }
}

/// Does `what` while the calling thread does not block `signal`.
fn unblocked<T>(signal: i32, what: impl FnOnce() -> T) -> T {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: all zeros are a valid set; the calls write to these two alone.
    unsafe {
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), mask.as_mut_ptr());
    }
    let done = what();
    // SAFETY: the mask is the one that the call above has told; no other is asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask.as_ptr(), ptr::null_mut()) };
    done
}

/// A vCPU's `kvm_run.immediate_exit`, in a mapping of its own.
#[derive(Debug)]
pub(crate) struct KickFlag {
    page: NonNull<libc::c_void>,
}

// SAFETY: the page is shared memory that is only accessed atomically.
unsafe impl Send for KickFlag {}
// SAFETY: as above.
unsafe impl Sync for KickFlag {}

/// `kvm_run` begins in the first page of a vCPU's mapping.
const PAGE: usize = 0x1000;

impl KickFlag {
    /// Maps that of `vcpu`.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub(crate) fn of(vcpu: BorrowedFd<'_>) -> Result<Arc<Self>, Errno> {
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces
        // nothing.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(page) {
            Some(page) if page.as_ptr() != libc::MAP_FAILED => Ok(Arc::new(Self { page })),
            _ => Err(Errno::last()),
        }
    }

    /// Lets a kick of the calling thread end or prevent the vCPU's `KVM_RUN`, until
    /// the guard is dropped or another one is made on this thread.
    #[must_use]
    pub(crate) fn bind(self: &Arc<Self>) -> KickGuard {
        IMMEDIATE_EXIT.set(self.flag());
        KickGuard {
            flag: self.clone(),
            _this_thread: PhantomData,
        }
    }

    /// Sets it, as a kick does.
    pub(crate) fn set(&self, on: bool) {
        // SAFETY: `flag` points into this value's mapping, and all accesses are atomic.
        unsafe { (*self.flag()).store(u8::from(on), Ordering::Relaxed) };
    }

    /// Whether it is set; it is no more.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        // SAFETY: as above.
        let flag = unsafe { &*self.flag() };
        let was_set = flag.load(Ordering::Relaxed) != 0;
        if was_set {
            flag.store(0, Ordering::Relaxed);
        }
        was_set
    }

    #[inline]
    fn flag(&self) -> *const AtomicU8 {
        let run = self.page.as_ptr().cast::<kvm_run>();
        // SAFETY: the mapping is a page long, which is more than the offset.
        unsafe { (&raw const (*run).immediate_exit).cast() }
    }
}

impl Drop for KickFlag {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, and no thread has it bound: a guard
        // would keep this value.
        unsafe { libc::munmap(self.page.as_ptr(), PAGE) };
    }
}

/// Undoes [`KickFlag::bind`] when dropped, on the thread that made it.
#[derive(Debug)]
pub(crate) struct KickGuard {
    flag: Arc<KickFlag>,
    _this_thread: PhantomData<*const ()>,
}

impl KickGuard {
    /// Binds it again, if another guard was made on this thread meanwhile.
    #[inline]
    pub(crate) fn renew(&self) {
        IMMEDIATE_EXIT.set(self.flag.flag());
    }

    /// Whether it is that of `flag`.
    #[must_use]
    #[inline]
    pub(crate) fn is_of(&self, flag: &Arc<KickFlag>) -> bool {
        Arc::ptr_eq(&self.flag, flag)
    }
}

impl Drop for KickGuard {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null());
    }
}

/// A thread that can be kicked.
#[derive(Debug, Clone, Copy)]
pub struct KickTarget {
    process: i32,
    thread: i32,
}

impl KickTarget {
    /// The calling thread.
    #[must_use]
    pub fn current() -> Self {
        // SAFETY: both calls have no arguments and cannot fail.
        unsafe {
            Self {
                process: libc::getpid(),
                thread: libc::gettid(),
            }
        }
    }

    /// Thread `thread` of this process.
    pub(crate) fn of_this_process(thread: i32) -> Self {
        Self {
            thread,
            ..Self::current()
        }
    }

    /// Its thread id.
    #[must_use]
    pub fn thread(self) -> i32 {
        self.thread
    }

    /// Sends the kick signal. A thread that has ended is not an error.
    pub fn kick(self) {
        let _ = self.send(kick_signal());
    }

    /// Sends it `signal`.
    pub fn send(self, signal: i32) -> Result<(), Errno> {
        // SAFETY: tgkill takes three integers; a thread id of another process
        // cannot be hit because the process id is checked by the kernel.
        let ret = unsafe { libc::syscall(libc::SYS_tgkill, self.process, self.thread, signal) };
        match ret {
            0 => Ok(()),
            _ => Err(Errno::last()),
        }
    }
}
