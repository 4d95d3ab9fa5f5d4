//! The message queue of a context: a socket whose other end the tool has.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use perfmon_abi::{Message, Record};
use pmu_virt::perfmon::MessageQueue;

use super::{socket, sys};

/// Messages that were sent and not read are counted by what they weigh in the
/// kernel; each weighs the same.
#[derive(Debug)]
pub(super) struct SocketQueue {
    socket: Arc<OwnedFd>,
    /// What one weighs, once one was sent.
    weight: Option<usize>,
}

impl SocketQueue {
    pub(super) fn new(socket: Arc<OwnedFd>) -> Self {
        Self {
            socket,
            weight: None,
        }
    }

    /// A tool that is gone has read everything.
    fn unread(&self) -> usize {
        sys::unread(self.socket.as_fd()).unwrap_or(0)
    }
}

impl MessageQueue for SocketQueue {
    fn waiting(&self) -> usize {
        match self.weight {
            Some(weight) => self.unread().div_ceil(weight),
            None => 0,
        }
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
        let before = self.unread();
        // A reader who is gone is no error; the depth of the queue is far below
        // what a socket holds.
        if socket::send(self.socket.as_fd(), packet, &[]).is_ok() && self.weight.is_none() {
            let weight = self.unread().saturating_sub(before);
            self.weight = (weight > 0).then_some(weight);
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
