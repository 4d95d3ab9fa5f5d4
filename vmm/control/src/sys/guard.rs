//! Keeps the process alive where somebody cuts a memory file that it has mapped.
//!
//! Files are sealed against all but that, and who may not open them anew cannot do it. Root can,
//! and the user who runs the VMM, from a container too: it is their own samples that they lose.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Mappings at a time; contexts of a VM are fewer.
const MOST: usize = 8192;

/// Where a guarded range begins and ends; 0: none.
static RANGES: [[AtomicUsize; 2]; MOST] = [const { [const { AtomicUsize::new(0) }; 2] }; MOST];

/// What became of SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A range of a shared mapping, until it is given up.
#[derive(Debug)]
pub(super) struct Guarded(usize);

impl Guarded {
    /// # Errors
    /// There are too many, or `sigaction` failed.
    pub(super) fn new(start: usize, len: usize) -> io::Result<Self> {
        listen()?;
        let free = |range: &[AtomicUsize; 2]| {
            let taken = range[0].compare_exchange(0, start, SeqCst, SeqCst);
            taken.is_ok()
        };
        let index = RANGES.iter().position(free);
        let index = index.ok_or(io::ErrorKind::OutOfMemory)?;
        RANGES[index][1].store(start + len, SeqCst);
        Ok(Self(index))
    }

    /// The mapping is about to go.
    pub(super) fn give_up(&self) {
        let [start, end] = &RANGES[self.0];
        end.store(0, SeqCst);
        start.store(0, SeqCst);
    }
}

/// SIGBUS comes to `on_bus_error` from now on.
fn listen() -> io::Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both structures are valid for the call, and all zeros is a sigaction. The old one
    // is only asked for.
    let before = unsafe {
        if libc::sigaction(libc::SIGBUS, null_mut(), before.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        before.assume_init()
    };
    let mut failed = None;
    // The handler finds what was there before.
    BEFORE.get_or_init(|| {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all zeros is a valid sigaction. The handler has the signature that SA_SIGINFO
        // asks for.
        unsafe {
            let action = action.assume_init_mut();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            if libc::sigaction(libc::SIGBUS, action, null_mut()) != 0 {
                failed = Some(io::Error::last_os_error());
            }
        }
        before
    });
    failed.map_or(Ok(()), Err)
}

/// The guarded range that has this address.
fn range_of(address: usize) -> Option<(usize, usize)> {
    let mut ranges = RANGES
        .iter()
        .map(|[start, end]| (start.load(SeqCst), end.load(SeqCst)));
    ranges.find(|&(start, end)| start != 0 && (start..end).contains(&address))
}

/// Puts memory of the process's own where the file's was, and the access goes on. Makes system
/// calls and looks at atomics, nothing else.
extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a siginfo_t, which has an address for SIGBUS.
    let address = unsafe { (*info).si_addr() }.addr();
    if let Some((start, end)) = range_of(address) {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = with_exposed_provenance_mut(start);
        // SAFETY: the range is a mapping of this crate's, which stays mapped while somebody has
        // an address in it, as the thread that was interrupted does. Its bytes are plain ones.
        let mapped = unsafe { libc::mmap(at, end - start, protection, flags, -1, 0) };
        if mapped != libc::MAP_FAILED {
            return;
        }
    }
    pass_on(signal, info, context);
}

/// Does what would have been done without this handler.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let before = BEFORE.get();
    let handler = before.map_or(libc::SIG_DFL, |before| before.sa_sigaction);
    let takes_info = before.is_some_and(|before| before.sa_flags & libc::SA_SIGINFO != 0);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // The access is made again, and ends the process.
        // SAFETY: the default action has no conditions.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    } else if takes_info {
        type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
        // SAFETY: with SA_SIGINFO it is a function of this kind.
        let handler = unsafe { std::mem::transmute::<usize, Handler>(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: without SA_SIGINFO it is a function of this kind.
        let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(handler) };
        handler(signal);
    }
}
