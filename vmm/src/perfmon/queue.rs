//! The message queue of a context: a socket whose other end the tool has.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use perfmon_abi::{Message, Record};
use pmu_virt::perfmon::MessageQueue;

use super::{socket, sys};

/// What a message weighs in the kernel, once one was sent. All weigh the same.
static WEIGHT: OnceLock<usize> = OnceLock::new();

/// Messages on a context's socket that were not read yet. A tool that is gone has
/// read everything.
pub(super) fn unread(socket: &OwnedFd) -> usize {
    let bytes = sys::unread(socket.as_fd()).unwrap_or(0);
    WEIGHT.get().map_or(0, |weight| bytes.div_ceil(*weight))
}

/// Messages that were sent and not read are counted by what they weigh in the
/// kernel.
#[derive(Debug)]
pub(super) struct SocketQueue {
    socket: Arc<OwnedFd>,
}

impl SocketQueue {
    pub(super) fn new(socket: Arc<OwnedFd>) -> Self {
        Self { socket }
    }
}

impl MessageQueue for SocketQueue {
    fn waiting(&self) -> usize {
        unread(&self.socket)
    }

    fn post(&mut self, message: Option<&Message>) {
        let mut bytes = [0; Message::SIZE];
        let packet = match message {
            Some(message) => {
                message.put(&mut bytes);
                &bytes[..]
            }
            // Empty, but the tool's poll tells of it.
            None => &[],
        };
        let socket = self.socket.as_fd();
        let before = match WEIGHT.get() {
            Some(_) => None,
            None => sys::unread(socket).ok(),
        };
        // A reader who is gone is no error; the depth of the queue is far below
        // what a socket holds.
        let sent = socket::send(socket, packet, &[]).is_ok();
        // If somebody has read in between, the next one is weighed.
        let after = before.and_then(|_| sys::unread(socket).ok());
        if let (true, Some(before), Some(after)) = (sent, before, after)
            && after > before
        {
            let _ = WEIGHT.set(after - before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{RecvFlags, recv};

    #[test]
    fn messages_wait_until_they_are_read() {
        let (ours, theirs) = socket::context_pair().unwrap();
        let mut queue = SocketQueue::new(Arc::new(ours));
        assert_eq!(queue.waiting(), 0);
        for sent in 1..=64 {
            let message = Message {
                kind: 1,
                generation: sent,
                ..Message::default()
            };
            queue.post((sent % 3 != 0).then_some(&message));
            assert_eq!(queue.waiting(), usize::from(sent));
        }
        let mut buffer = [0; 64];
        for read in 1..=64_u16 {
            let (got, _) = recv(&theirs, &mut buffer[..], RecvFlags::empty()).unwrap();
            assert_eq!(got, if read % 3 == 0 { 0 } else { Message::SIZE });
            assert_eq!(queue.waiting(), usize::from(64 - read));
        }
        drop(theirs);
        queue.post(Some(&Message::default()));
        assert_eq!(queue.waiting(), 0);
    }
}
