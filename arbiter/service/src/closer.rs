//! Closes descriptors that clients have sent, and connections on which they may have, on threads
//! for which nobody waits.
//!
//! Closing the last descriptor of a file can take as long as the file's owner likes: a file
//! system of the client, or a socket with SO_LINGER. Closing a connection takes as long if such
//! descriptors are in messages that were not read. Each user has threads of its own, so that
//! what one of them leaves behind keeps no other's from being closed.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use rustix::io::{Errno, fcntl_dupfd_cloexec};

/// Most threads that close what one user has left, and most of all users. Nobody waits for one
/// that is stuck.
const THREADS_OF_USER: usize = 4;
const THREADS: usize = 64;
/// A user of whom more descriptors than these wait is not served; fewer, where this process
/// may have few files open. No descriptors are taken in of anybody while more than the share of
/// its files wait: many users together must not fill its table.
const MOST_WAITING: u64 = 1024;
const SHARE_OF_USER: u64 = 8;
/// Of the files that this process may have open so many are not for connections: there is always
/// room for what comes with a message. What the kernel has no number for it closes on the thread
/// that receives.
const MOST_RESERVED: u64 = 512;
const SHARE_OF_RESERVE: u64 = 4;

/// What one user has left to be closed.
#[derive(Debug, Default)]
struct Left {
    files: VecDeque<OwnedFd>,
    /// Threads that close one of its files.
    threads: usize,
}

#[derive(Debug, Default)]
struct Queue {
    users: BTreeMap<u32, Left>,
    threads: usize,
    /// Files of all users that are not closed yet.
    waiting: usize,
    /// The user whose file was taken last: others have their turn.
    last: u32,
}

impl Queue {
    /// The next file, of a user of whom not too many are being closed.
    fn next(&mut self) -> Option<(u32, OwnedFd)> {
        let may = |left: &Left| !left.files.is_empty() && left.threads < THREADS_OF_USER;
        let after = (self.last.saturating_add(1).., ..=self.last);
        let mut users = self.users.range(after.0).chain(self.users.range(after.1));
        let (&user, _) = users.find(|(_, left)| may(left))?;
        let left = self.users.get_mut(&user)?;
        let file = left.files.pop_front()?;
        left.threads += 1;
        self.last = user;
        Some((user, file))
    }

    /// A file of `user` is closed.
    fn closed(&mut self, user: u32) {
        self.waiting -= 1;
        if let Some(left) = self.users.get_mut(&user) {
            left.threads -= 1;
            if left.threads == 0 && left.files.is_empty() {
                self.users.remove(&user);
            }
        }
    }
}

/// Takes descriptors and has them closed.
#[derive(Clone, Debug)]
pub struct Closer {
    queue: Arc<Mutex<Queue>>,
    most: usize,
    most_of_all: usize,
    /// Connections have no descriptors from this on.
    for_connections: u64,
}

impl Closer {
    /// For a process that may have so many `files` open.
    pub fn new(files: u64) -> Self {
        let [most, most_of_all] = [MOST_WAITING, u64::MAX]
            .map(|most| (files / SHARE_OF_USER).min(most))
            .map(|most| usize::try_from(most).unwrap_or(usize::MAX));
        Self {
            queue: Arc::default(),
            most,
            most_of_all,
            for_connections: files - (files / SHARE_OF_RESERVE).min(MOST_RESERVED),
        }
    }

    /// Whether there is room for one more connection, beside what others send along.
    pub(crate) fn has_room(&self, listener: BorrowedFd<'_>) -> io::Result<()> {
        // The kernel gives the lowest number that is free.
        let next = fcntl_dupfd_cloexec(listener, 0)?;
        let next = u64::try_from(next.as_raw_fd()).unwrap_or(0);
        if next >= self.for_connections {
            return Err(Errno::MFILE.into());
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many descriptors of `user` are not closed yet.
    pub fn waiting(&self, user: u32) -> usize {
        let queue = self.lock();
        let left = queue.users.get(&user);
        left.map_or(0, |left| left.files.len() + left.threads)
    }

    /// Whether so many descriptors of `user` wait that it is not served.
    pub fn is_full(&self, user: u32) -> bool {
        self.waiting(user) > self.most
    }

    /// Whether there is no room for descriptors that `user` sends: too many wait, of it or of
    /// all users together.
    pub(crate) fn takes_none(&self, user: u32) -> bool {
        self.lock().waiting > self.most_of_all || self.is_full(user)
    }

    /// Has `file`, which `user` has sent or may have sent something on, closed soon. Never waits.
    pub fn close(&self, file: OwnedFd, user: u32) {
        let mut queue = self.lock();
        queue.waiting += 1;
        let left = queue.users.entry(user).or_default();
        left.files.push_back(file);
        let starts = left.threads < THREADS_OF_USER && queue.threads < THREADS;
        queue.threads += usize::from(starts);
        drop(queue);
        if starts {
            let all = self.clone();
            let thread = Builder::new().name("close".to_owned());
            // If no thread starts, the descriptor waits for the next one.
            if thread.spawn(move || all.run()).is_err() {
                self.lock().threads -= 1;
            }
        }
    }

    /// Closes what there is.
    fn run(&self) {
        loop {
            let mut queue = self.lock();
            let Some((user, file)) = queue.next() else {
                queue.threads -= 1;
                return;
            };
            drop(queue);
            drop(file);
            self.lock().closed(user);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    /// Ends if `is_so` is not so within seconds.
    pub(crate) fn soon(mut is_so: impl FnMut() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A socket that takes so long to be closed: its peer reads nothing.
    pub(crate) fn lingering(time: Duration) -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        one.set_nonblocking(true).unwrap();
        while one.write_all(&[0; 1 << 16]).is_ok() {}
        one.set_nonblocking(false).unwrap();
        rustix::net::sockopt::set_socket_linger(&one, Some(time)).unwrap();
        (one.into(), other)
    }

    fn is_closed(other: &mut UnixStream) -> bool {
        other.set_nonblocking(true).unwrap();
        matches!(other.read(&mut [0]), Ok(0))
    }

    #[test]
    fn everything_is_closed() {
        let closer = Closer::new(1 << 20);
        let mut others = Vec::new();
        for user in 0..100 {
            let (one, other) = UnixStream::pair().unwrap();
            closer.close(one.into(), user % 3);
            others.push(other);
        }
        for mut other in others {
            soon(|| is_closed(&mut other));
        }
        soon(|| closer.lock().users.is_empty() && closer.lock().threads == 0);
    }

    #[test]
    fn what_one_user_leaves_keeps_no_other_waiting() {
        let closer = Closer::new(80);
        let began = Instant::now();
        let mut peers = Vec::new();
        for count in 1..=12 {
            let (slow, peer) = lingering(Duration::from_secs(3));
            closer.close(slow, 7);
            peers.push(peer);
            // Ten are an eighth of all files.
            assert_eq!(closer.is_full(7), count > 10, "{count}");
        }
        assert_eq!((closer.waiting(7), closer.is_full(8)), (12, false));
        for user in [8, u32::MAX, 0] {
            let (one, mut other) = UnixStream::pair().unwrap();
            closer.close(one.into(), user);
            soon(|| is_closed(&mut other));
        }
        assert!(began.elapsed() < Duration::from_secs(3), "it waited");
        assert_eq!(closer.waiting(7), 12, "they linger");
        soon(|| closer.lock().threads == THREADS_OF_USER);
    }
}
