//! The message queue of a context: a socket whose other end the tool has.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Builder;

use perfmon_abi::{Message, Record};
use pmu_virt::perfmon::MessageQueue;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use umpire_service::send_packet;

use crate::{socket, sys};

/// Most empty records that wait. So they leave room for messages.
const MOST_EMPTY: usize = 4;
/// Most packets that wait, apart from PFM_MSG_END, which no depth holds back. A socket
/// has room for more than twice as many.
const MOST_UNREAD: usize = 100;

/// Bytes that the kernel counts for a message. Known once the first one was sent; all
/// count the same.
static MESSAGE_BYTES: OnceLock<usize> = OnceLock::new();

/// Packets on a context's socket that were not read yet. A tool that is gone has read
/// everything.
pub(crate) fn unread(socket: &OwnedFd) -> usize {
    let bytes = sys::unread(socket.as_fd()).unwrap_or(0);
    MESSAGE_BYTES.get().map_or(0, |each| bytes.div_ceil(*each))
}

/// What rings at the tool for overflows of a context with `PFM_FL_OVFL_NO_MSG`: whoever
/// asked for a signal gets one (3.3.7), and nothing stays that could be read.
///
/// A thread of the bell's own takes out what rings. Who reads from a socket waits for others who
/// do, and a tool can make its own read take as long as it likes (a page of its buffer that some
/// file system of the tool's never brings). So nobody else may read from the tool's end.
#[derive(Debug)]
pub(crate) struct Bell {
    hand: OwnedFd,
    /// The tool has it, too.
    pub(crate) socket: Arc<OwnedFd>,
    /// There is one bell less when it is gone.
    _place: BellPlace,
}

/// Most bells of this process: each has a thread, which may hang for as long as its tool lives.
const MOST_BELLS: usize = 256;
static BELLS: AtomicUsize = AtomicUsize::new(0);

/// One of [`MOST_BELLS`], from the making of a bell to the end of its thread.
#[derive(Clone, Debug)]
struct BellPlace(#[expect(dead_code, reason = "counted")] Arc<CountedBell>);

#[derive(Debug)]
struct CountedBell;

impl Drop for CountedBell {
    fn drop(&mut self) {
        BELLS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl BellPlace {
    fn new() -> Option<Self> {
        let counted = BELLS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bells| {
            (bells < MOST_BELLS).then_some(bells + 1)
        });
        counted.ok().map(|_| Self(Arc::new(CountedBell)))
    }
}

impl Bell {
    /// # Errors
    /// There are too many, or the process has no descriptor or thread left.
    pub(crate) fn new() -> io::Result<Self> {
        let place = BellPlace::new().ok_or(io::ErrorKind::QuotaExceeded)?;
        let (hand, socket) = socket::context_pair()?;
        let socket = Arc::new(socket);
        let (theirs, thread) = (socket.clone(), place.clone());
        Builder::new().name("bell".to_owned()).spawn(move || {
            empty(&theirs);
            drop(thread);
        })?;
        Ok(Self {
            hand,
            socket,
            _place: place,
        })
    }

    fn ring(&self) {
        // A tool that has shut its bell down hears nothing.
        let _ = send_packet(self.hand.as_fd(), &[1], &[]);
    }
}

/// Takes out what comes until the other end is closed, or the tool has shut this one down.
fn empty(socket: &OwnedFd) {
    loop {
        let mut polled = [PollFd::new(socket, PollFlags::IN)];
        match poll(&mut polled, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        match recv(socket, &mut [0; 1][..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// The VMM's end of the socket. The kernel tells how many bytes are unread, and so how
/// many messages.
#[derive(Debug)]
pub(crate) struct SocketQueue {
    socket: Arc<OwnedFd>,
    /// The last packets, of which some may be unread, the oldest first. True for a
    /// message, false for an empty record.
    sent: VecDeque<bool>,
    /// Rings in place of empty records, once somebody has asked for it.
    bell: Arc<OnceLock<Bell>>,
}

impl SocketQueue {
    pub(crate) fn new(socket: Arc<OwnedFd>) -> Self {
        Self {
            socket,
            sent: VecDeque::new(),
            bell: Arc::default(),
        }
    }

    /// The place of its bell.
    pub(crate) fn bell(&self) -> Arc<OnceLock<Bell>> {
        self.bell.clone()
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
        if messages + empty < MOST_UNREAD {
            messages
        } else {
            // A format may have any depth. PFM_MSG_END needs room all the same.
            usize::MAX
        }
    }

    fn post(&mut self, message: Option<&Message>) {
        if let (None, Some(bell)) = (message, self.bell.get()) {
            return bell.ring();
        }
        let (messages, empty) = self.unread();
        // A tool that has not read an empty record learns nothing by another one.
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
            // An empty packet still makes the socket readable.
            None => &[],
        };
        let socket = self.socket.as_fd();
        let before = match MESSAGE_BYTES.get() {
            Some(_) => None,
            None => sys::unread(socket).ok(),
        };
        // A tool that is gone is no error. The depth of the queue is far below what a
        // socket holds.
        let sent = send_packet(socket, packet, &[]).is_ok();
        if sent {
            self.sent.push_back(message.is_some());
        }
        // If the tool has read in between, the next message is measured.
        let after = before.and_then(|_| sys::unread(socket).ok());
        if let (true, Some(before), Some(after)) = (sent, before, after)
            && after > before
        {
            let _ = MESSAGE_BYTES.set(after - before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::Timespec;
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

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
    fn a_bell_leaves_nothing_to_be_read() {
        let (ours, theirs) = socket::context_pair().unwrap();
        let mut queue = SocketQueue::new(Arc::new(ours));
        let place = queue.bell();
        queue.post(None);
        place.set(Bell::new().unwrap()).unwrap();
        for _ in 0..1000 {
            queue.post(None);
        }
        queue.post(Some(&message(1)));
        let read = || recv(&theirs, &mut [0; 64][..], RecvFlags::DONTWAIT).map(|(got, _)| got);
        assert_eq!(read(), Ok(0), "from before there was a bell");
        assert_eq!(read(), Ok(Message::SIZE));
        assert_eq!(read(), Err(rustix::io::Errno::AGAIN));
        let bell = &place.get().unwrap().socket;
        let rests = || {
            let mut polled = [PollFd::new(&**bell, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())) == Ok(0)
        };
        let began = std::time::Instant::now();
        while !rests() {
            assert!(began.elapsed() < std::time::Duration::from_secs(20));
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // Whatever the tool does to its end, nobody waits.
        send_packet(bell.as_fd(), b"x", &[]).unwrap_err();
        fcntl_setfl(bell, fcntl_getfl(bell).unwrap() - OFlags::NONBLOCK).unwrap();
        rustix::net::shutdown(bell, rustix::net::Shutdown::Both).unwrap();
        queue.post(None);
    }

    #[test]
    fn a_tool_that_reads_nothing_gets_the_end_all_the_same() {
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
