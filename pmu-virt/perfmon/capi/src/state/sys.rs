//! The lock around what one thread at a time may use.
//!
//! It is held with all signals blocked, so that a signal handler may make calls:
//! it never waits for the thread that it interrupted. A child of `fork` starts
//! with a free lock and without a connection, whatever its parent's threads did.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering::SeqCst};

use rustix::thread::futex::{self, Flags};
use umpire_perfmon::c_calls::Undisturbed;

use super::State;
use crate::sys::borrow;
use crate::table;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and others may wait.
const AWAITED: u32 = 2;
/// No process has this number.
const CHANGING: i32 = -1;

/// The state, for one thread at a time.
pub(crate) struct Guard {
    word: AtomicU32,
    /// The process whose threads use the state.
    pid: AtomicI32,
    /// Descriptor and number of the connection's socket.
    socket: AtomicI32,
    inode: AtomicU64,
    state: UnsafeCell<State>,
}

// SAFETY: the state is only reached in `with`, by one thread at a time.
unsafe impl Sync for Guard {}

impl Guard {
    pub(crate) const fn new(state: State) -> Self {
        Guard {
            word: AtomicU32::new(FREE),
            pid: AtomicI32::new(0),
            socket: AtomicI32::new(-1),
            inode: AtomicU64::new(0),
            state: UnsafeCell::new(state),
        }
    }

    /// Notes the connection's socket, for a child of `fork` to close.
    pub(crate) fn note_socket(&self, (socket, inode): (i32, u64)) {
        self.inode.store(0, SeqCst);
        self.socket.store(socket, SeqCst);
        self.inode.store(inode, SeqCst);
    }

    /// Does something with the state. `work` must not call this again.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let _undisturbed = Undisturbed::begin();
        self.notice_fork();
        self.lock();
        // SAFETY: the lock is held, and only its holder gets here; the reference
        // ends before it is released. A signal handler of this thread does not
        // run, for signals are blocked.
        let result = work(unsafe { &mut *self.state.get() });
        if self.word.swap(FREE, SeqCst) == AWAITED {
            let _ = futex::wake(&self.word, Flags::PRIVATE, 1);
        }
        result
    }

    fn lock(&self) {
        if self
            .word
            .compare_exchange(FREE, HELD, SeqCst, SeqCst)
            .is_ok()
        {
            return;
        }
        while self.word.swap(AWAITED, SeqCst) != FREE {
            let _ = futex::wait(&self.word, Flags::PRIVATE, AWAITED, None);
        }
    }

    fn notice_fork(&self) {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        loop {
            let seen = self.pid.load(SeqCst);
            if seen == pid {
                return;
            }
            if seen == CHANGING {
                std::thread::yield_now();
                continue;
            }
            if self
                .pid
                .compare_exchange(seen, CHANGING, SeqCst, SeqCst)
                .is_ok()
            {
                if seen != 0 {
                    self.abandon();
                }
                self.pid.store(pid, SeqCst);
            }
        }
    }

    /// In the child of a fork: forgets the parent's connection. What a thread of
    /// the parent was just changing is written over, not looked at.
    fn abandon(&self) {
        let (socket, inode) = (self.socket.swap(-1, SeqCst), self.inode.swap(0, SeqCst));
        if inode != 0 && borrow(socket).and_then(umpire_perfmon::link::inode) == Some(inode) {
            // SAFETY: the number tells that this is the child's copy of the
            // connection, whose owner is written over below.
            unsafe { rustix::io::close(socket) };
        }
        let state = self.state.get();
        // SAFETY: no other thread uses the state: those of the parent are not in
        // this process, and its own wait in `notice_fork`.
        unsafe {
            (&raw mut (*state).link).write(None);
            (&raw mut (*state).last).write(None);
            (&raw mut (*state).formats).write([None; _]);
        }
        table::after_fork();
        self.word.store(FREE, SeqCst);
    }
}
