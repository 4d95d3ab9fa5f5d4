//! What can be read from a context's descriptor.
//!
//! Nothing here allocates or takes a lock, so it may run in a signal handler.

use std::os::fd::BorrowedFd;

use perfmon_abi::{Message, Record};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{RecvFlags, recv};

/// Bytes of a message.
pub const SIZE: usize = Message::SIZE;

/// A packet from a context's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A message, in its bytes.
    Message([u8; SIZE]),
    /// An empty record: an overflow of a context with `PFM_FL_OVFL_NO_MSG`.
    Empty,
    /// The VM is gone, and nothing is left to read.
    Closed,
}

/// Takes the next packet. A packet that is no message of this interface is
/// passed over.
///
/// # Errors
/// Those of `recv`: EAGAIN if there is none and `flags` or the descriptor say
/// not to wait, EINTR after a signal.
pub fn take(context: BorrowedFd<'_>, flags: RecvFlags) -> Result<Incoming, Errno> {
    let mut bytes = [0; SIZE];
    loop {
        let (_, length) = recv(context, &mut bytes, flags | RecvFlags::TRUNC)?;
        match length {
            0 if is_closed(context)? => return Ok(Incoming::Closed),
            0 => return Ok(Incoming::Empty),
            // A later version may have longer messages, which begin as these.
            SIZE.. => return Ok(Incoming::Message(bytes)),
            _ if flags.contains(RecvFlags::PEEK) => {
                recv(context, &mut bytes, RecvFlags::DONTWAIT)?;
            }
            _ => {}
        }
    }
}

/// Whether the other end is closed and no message is left. An empty record and
/// the end both read as 0 bytes.
fn is_closed(context: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut polled = [PollFd::from_borrowed_fd(
        context,
        PollFlags::IN | PollFlags::RDHUP,
    )];
    poll(&mut polled, Some(&Timespec::default()))?;
    let closed = polled[0]
        .revents()
        .intersects(PollFlags::RDHUP | PollFlags::HUP);
    Ok(closed && ioctl_fionread(context)? == 0)
}

/// Whether a message of `generation` is of a time before the context was loaded
/// as `current`. Generations wrap.
#[must_use]
pub fn is_stale(generation: u16, current: u16) -> bool {
    current.wrapping_sub(generation).cast_signed() > 0
}

/// Removes what nobody is to read any more from the front of the queue: empty
/// records, and messages that are stale.
pub fn drain(context: BorrowedFd<'_>, current: u16) {
    let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    loop {
        let gone = match take(context, peek) {
            Ok(Incoming::Empty) => true,
            Ok(Incoming::Message(bytes)) => is_stale(Message::get(&bytes).generation, current),
            Ok(Incoming::Closed) | Err(_) => false,
        };
        if !gone || take(context, RecvFlags::DONTWAIT).is_err() {
            return;
        }
    }
}

/// Removes one empty record from the front of the queue, if there is one.
pub fn take_empty(context: BorrowedFd<'_>) {
    if take(context, RecvFlags::PEEK | RecvFlags::DONTWAIT) == Ok(Incoming::Empty) {
        let _ = take(context, RecvFlags::DONTWAIT);
    }
}

#[cfg(test)]
mod tests {
    use super::is_stale;

    #[test]
    fn generations_wrap() {
        for (generation, current, stale) in [
            (0, 0, false),
            (0, 1, true),
            (1, 0, false),
            (0xffff, 0, true),
            (0, 0xffff, false),
            (5, 0x7000, true),
        ] {
            assert_eq!(
                is_stale(generation, current),
                stale,
                "{generation} at {current}"
            );
        }
    }
}
