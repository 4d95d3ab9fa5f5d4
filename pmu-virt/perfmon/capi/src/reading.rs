//! What `read` does with a context.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::SeqCst;

use perfmon_abi::{Message, Record};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use umpire_perfmon::messages::{self, Incoming, SIZE};

use crate::sys::memory::User;
use crate::table::Slot;

/// Takes as many messages as there are, and as fit into `size` bytes at `to`;
/// waits for the first one, unless the descriptor says not to. Bytes read, 0 if
/// the VM is gone.
pub(crate) fn read(
    context: BorrowedFd<'_>,
    slot: &Slot,
    to: User,
    size: usize,
) -> Result<usize, Errno> {
    if size == 0 || !size.is_multiple_of(SIZE) {
        return Err(Errno::INVAL);
    }
    enter(slot);
    let result = take(context, slot, to, size);
    slot.left_by_reader();
    result
}

fn take(context: BorrowedFd<'_>, slot: &Slot, to: User, size: usize) -> Result<usize, Errno> {
    let mut done = 0;
    while done < size {
        let flags = match done {
            0 => RecvFlags::empty(),
            _ => RecvFlags::DONTWAIT,
        };
        match messages::take(context, flags) {
            Ok(Incoming::Message(bytes)) => {
                if is_stale(slot, Message::get(&bytes).generation) {
                    continue;
                }
                match to.write(done, &bytes) {
                    Ok(()) => done += SIZE,
                    // As a pipe does it: what was written is told, this one is lost.
                    Err(_) if done > 0 => break,
                    Err(error) => return Err(error),
                }
            }
            Ok(Incoming::Empty) => {}
            Ok(Incoming::Closed) => break,
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn is_stale(slot: &Slot, generation: u16) -> bool {
    let current = u16::try_from(slot.generation.load(SeqCst)).unwrap_or(0);
    let stale = messages::is_stale(generation, current);
    if !stale {
        // Who shares the context may have loaded it.
        slot.generation.store(generation.into(), SeqCst);
    }
    stale
}

/// Waits until nobody drains the queue. That takes a few system calls that do
/// not wait, with signals blocked: no signal handler waits for its own thread.
fn enter(slot: &Slot) {
    loop {
        slot.readers.fetch_add(1, SeqCst);
        if slot.draining.load(SeqCst) == 0 {
            return;
        }
        slot.left_by_reader();
        std::thread::yield_now();
    }
}

/// After a load: removes what is of the time before.
pub(crate) fn drain(context: BorrowedFd<'_>, slot: &Slot) {
    let generation = u16::try_from(slot.generation.load(SeqCst)).unwrap_or(0);
    unread(slot, || messages::drain(context, generation));
}

/// Before a restart: the record that woke the caller is of no more use. There is
/// one restart for each notification (3.1.9), so more than one are left: they
/// belong to later ones.
pub(crate) fn take_empty(context: BorrowedFd<'_>, slot: &Slot) {
    unread(slot, || messages::take_empty(context));
}

/// Does something to the queue that looks first and takes then, unless a thread
/// reads: it could be given what was not looked at. A reader passes over what is
/// to go by itself.
fn unread(slot: &Slot, work: impl FnOnce()) {
    slot.draining.store(1, SeqCst);
    if slot.readers.load(SeqCst) == 0 {
        work();
    }
    slot.draining.store(0, SeqCst);
}
