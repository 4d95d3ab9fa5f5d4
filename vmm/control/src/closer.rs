//! Closes descriptors that clients have sent, on threads for which nobody waits.
//!
//! Closing the last descriptor of a file can take as long as the file's server
//! likes: a file system of the client, or a socket with SO_LINGER. Closing a
//! connection takes as long if such descriptors are in packets that were not read.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;

/// Most threads that close descriptors. Nobody waits for one that is stuck.
const MOST_THREADS: usize = 8;
/// If more descriptors than these wait, clients that send further ones are not served.
const MOST_WAITING: usize = 1024;

#[derive(Debug)]
struct Queue {
    files: Mutex<Receiver<OwnedFd>>,
    /// Descriptors that are not closed yet.
    open: AtomicUsize,
}

/// Takes descriptors and has them closed.
#[derive(Debug)]
pub(crate) struct Closer {
    files: Sender<OwnedFd>,
    queue: Arc<Queue>,
    threads: usize,
}

impl Closer {
    pub(crate) fn new() -> Self {
        let (files, taken) = channel();
        let queue = Queue {
            files: Mutex::new(taken),
            open: AtomicUsize::new(0),
        };
        Self {
            files,
            queue: Arc::new(queue),
            threads: 0,
        }
    }

    /// Whether too many descriptors wait.
    pub(crate) fn is_full(&self) -> bool {
        self.queue.open.load(Ordering::Relaxed) > MOST_WAITING
    }

    /// Has `file` closed soon. Never waits.
    pub(crate) fn close(&mut self, file: OwnedFd) {
        let before = self.queue.open.fetch_add(1, Ordering::Relaxed);
        // Something waits, so the threads that exist may be stuck.
        if self.threads == 0 || (before >= self.threads && self.threads < MOST_THREADS) {
            let queue = self.queue.clone();
            let name = Builder::new().name("control-close".to_owned());
            // If no thread starts, the descriptor waits for the next one.
            if name.spawn(move || queue.run()).is_ok() {
                self.threads += 1;
            }
        }
        // The receiver lives as long as `self.queue`.
        let _ = self.files.send(file);
    }
}

impl Queue {
    /// Closes descriptors until the closer is dropped.
    fn run(&self) {
        loop {
            // The thread has the lock while it waits, but not while it closes.
            let next = self
                .files
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .recv();
            let Ok(file) = next else { return };
            drop(file);
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    use rustix::net::{SendFlags, recv, send};

    /// Ends if `is_so` is not so within seconds.
    fn soon(mut is_so: impl FnMut() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn everything_is_closed() {
        let mut closer = Closer::new();
        let mut others = Vec::new();
        for _ in 0..100 {
            let (one, other) = crate::socket::context_pair().unwrap();
            closer.close(one);
            others.push(other);
        }
        for other in others {
            let mut byte = [0; 1];
            soon(|| recv(&other, &mut byte[..], rustix::net::RecvFlags::DONTWAIT).is_ok());
            send(&other, &byte, SendFlags::NOSIGNAL).unwrap_err();
        }
        soon(|| closer.queue.open.load(Ordering::Relaxed) == 0);
        assert!(!closer.is_full() && closer.threads <= MOST_THREADS);
    }

    /// A socket that takes so long to be closed: its peer reads nothing.
    pub(crate) fn lingering(time: Duration) -> (OwnedFd, std::net::TcpStream) {
        use std::io::Write;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        one.set_nonblocking(true).unwrap();
        while one.write_all(&[0; 1 << 16]).is_ok() {}
        one.set_nonblocking(false).unwrap();
        rustix::net::sockopt::set_socket_linger(&one, Some(time)).unwrap();
        (one.into(), other)
    }

    #[test]
    fn what_takes_long_is_not_waited_for() {
        let mut closer = Closer::new();
        let began = Instant::now();
        let (slow, _peer) = lingering(Duration::from_secs(3));
        closer.close(slow);
        let (one, other) = crate::socket::context_pair().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        closer.close(one);
        let mut byte = [0; 1];
        soon(|| recv(&other, &mut byte[..], rustix::net::RecvFlags::DONTWAIT).is_ok());
        assert!(began.elapsed() < Duration::from_secs(2), "it waited");
        assert_eq!(closer.queue.open.load(Ordering::Relaxed), 1, "it lingers");
    }
}
