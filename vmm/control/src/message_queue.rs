//! The message queue of a context: a socket whose other end the tool has.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use perfmon_abi::{Message, Record};
use pmu_virt::perfmon::MessageQueue;

use crate::{socket, sys};

/// Empty records that wait at most: they do not take messages' room.
const MOST_EMPTY: usize = 4;
/// Packets that wait at most, but for those that no depth holds back; a socket has
/// room for more than twice as many.
const MOST_UNREAD: usize = 100;

/// What a message weighs in the kernel, once one was sent. All weigh the same.
static WEIGHT: OnceLock<usize> = OnceLock::new();

/// Messages on a context's socket that were not read yet. A tool that is gone has
/// read everything.
pub(crate) fn unread(socket: &OwnedFd) -> usize {
    let bytes = sys::unread(socket.as_fd()).unwrap_or(0);
    WEIGHT.get().map_or(0, |weight| bytes.div_ceil(*weight))
}

/// Messages that were sent and not read are counted by what they weigh in the
/// kernel.
#[derive(Debug)]
pub(crate) struct SocketQueue {
    socket: Arc<OwnedFd>,
    /// What was sent last and may be unread, the oldest first: a message, or an
    /// empty record.
    sent: VecDeque<bool>,
}

impl SocketQueue {
    pub(crate) fn new(socket: Arc<OwnedFd>) -> Self {
        Self {
            socket,
            sent: VecDeque::new(),
        }
    }

    /// Unread messages, and unread empty records: packets are read in their order.
    fn unread(&self) -> (usize, usize) {
        let unread = unread(&self.socket).min(self.sent.len());
        let last = self.sent.iter().rev().take(unread);
        let messages = last.filter(|&&message| message).count();
        (messages, unread - messages)
    }
}

impl MessageQueue for SocketQueue {
    fn waiting(&self) -> usize {
        let (messages, empty) = self.unread();
        match messages + empty < MOST_UNREAD {
            true => messages,
            // Whatever depth a format has: what no depth holds back needs room.
            false => usize::MAX,
        }
    }

    fn post(&mut self, message: Option<&Message>) {
        let (messages, empty) = self.unread();
        // One that nobody has read says as much as two.
        if message.is_none() && empty >= MOST_EMPTY {
            return;
        }
        let read = self.sent.len() - (messages + empty);
        self.sent.drain(..read);
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
        if sent {
            self.sent.push_back(message.is_some());
        }
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

    fn message(generation: u16) -> Message {
        Message {
            kind: 1,
            generation,
            ..Message::default()
        }
    }

    #[test]
    fn empty_records_leave_room_for_messages() {
        let (ours, theirs) = socket::context_pair().unwrap();
        let mut queue = SocketQueue::new(Arc::new(ours));
        // Something to be weighed.
        queue.post(Some(&message(1)));
        for _ in 0..10_000 {
            queue.post(None);
        }
        queue.post(Some(&message(2)));
        assert_eq!(queue.waiting(), 2, "only messages count");
        let mut buffer = [0; 64];
        let mut read = || recv(&theirs, &mut buffer[..], RecvFlags::DONTWAIT).map(|(got, _)| got);
        assert_eq!(read(), Ok(Message::SIZE));
        for _ in 0..MOST_EMPTY {
            assert_eq!((read(), queue.waiting()), (Ok(0), 1));
        }
        queue.post(None);
        assert_eq!((read(), queue.waiting()), (Ok(Message::SIZE), 0));
        assert_eq!(read(), Ok(0), "there was room again");
        assert_eq!(read(), Err(rustix::io::Errno::AGAIN));
    }

    #[test]
    fn the_end_is_told_to_a_tool_that_reads_nothing() {
        let (ours, theirs) = socket::context_pair().unwrap();
        let mut queue = SocketQueue::new(Arc::new(ours));
        // As deep as a format may want its queue to be.
        while queue.waiting() < usize::MAX {
            queue.post(Some(&message(1)));
            queue.post(None);
        }
        queue.post(Some(&message(2)));
        let mut buffer = [0; 64];
        let mut last = Vec::new();
        while let Ok((got, _)) = recv(&theirs, &mut buffer[..], RecvFlags::DONTWAIT) {
            last = buffer[..got].to_vec();
        }
        let mut expected = [0; Message::SIZE];
        message(2).put(&mut expected);
        assert_eq!(last, expected);
    }

    #[test]
    fn messages_wait_until_they_are_read() {
        let (ours, theirs) = socket::context_pair().unwrap();
        let mut queue = SocketQueue::new(Arc::new(ours));
        assert_eq!(queue.waiting(), 0);
        for sent in 1..=64 {
            queue.post(Some(&message(sent)));
            assert_eq!(queue.waiting(), usize::from(sent));
        }
        let mut buffer = [0; 64];
        for read in 1..=64_u16 {
            let (got, _) = recv(&theirs, &mut buffer[..], RecvFlags::empty()).unwrap();
            assert_eq!(got, Message::SIZE);
            assert_eq!(queue.waiting(), usize::from(64 - read));
        }
        drop(theirs);
        queue.post(Some(&Message::default()));
        assert_eq!(queue.waiting(), 0);
    }
}
