//! The service manager, as sd_notify(3) has it: what it is told, and where. Others may have filled
//! its socket, so nobody waits for it while the arbiter serves.

use std::collections::VecDeque;
use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// So long it may take to read what it is told at the start and at the end.
const PATIENCE: Duration = Duration::from_secs(1);
/// While it does not read, it is tried again so often, in nanoseconds.
const AGAIN: u64 = 20_000_000;
/// Most that it is still to be told.
const MOST: usize = 64;
const ALIVE: &str = "WATCHDOG=1";
/// What a step of the start may take, in microseconds.
const STEP: u64 = 60_000_000;

/// The manager, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Manager {
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// Between two signs of life, in nanoseconds, and when the next is due.
    beats: Option<(u64, u64)>,
    /// What it is still to be told, and when that is tried again.
    untold: VecDeque<String>,
    again: u64,
}

impl Manager {
    /// By `NOTIFY_SOCKET` and `WATCHDOG_USEC`.
    pub(crate) fn of_environment() -> Self {
        let Some(name) = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Manager::default();
        };
        let socket = socket_to(name.as_bytes());
        let socket = socket.inspect_err(|error| {
            log::warn!("NOTIFY_SOCKET={name:?}: the service manager is not told: {error}");
        });
        let number = |name| env::var_os(name).and_then(|text| parsed(text.into_vec()));
        let pid = number("WATCHDOG_PID");
        let mine = pid.is_none_or(|pid| pid == u64::from(std::process::id()));
        let usec = number("WATCHDOG_USEC").filter(|usec| mine && *usec > 0);
        Manager {
            socket: socket.ok(),
            // Half of the time, as sd_watchdog_enabled(3) has it.
            beats: usec.map(|usec| (usec.saturating_mul(500), 0)),
            ..Manager::default()
        }
    }

    /// Tells it something: lines of `NAME=VALUE`.
    pub(crate) fn tell(&mut self, what: &str) {
        self.untold.push_back(what.to_owned());
        if self.untold.len() > MOST {
            self.untold.pop_front();
        }
        self.send();
    }

    /// Sends what it takes in now, in the order in which it was to be told.
    fn send(&mut self) {
        while let Some(what) = self.untold.front() {
            if let Some((socket, address)) = &self.socket
                && let Err(error) = socket.send_to_addr(what.as_bytes(), address)
            {
                if error.kind() == io::ErrorKind::WouldBlock {
                    return;
                }
                log::warn!("the service manager cannot be told: {error}");
            }
            self.untold.pop_front();
        }
    }

    /// The same, and waits for it a little: where nobody is served.
    pub(crate) fn tell_and_wait(&mut self, what: &str) {
        self.tell(what);
        let Some((socket, _)) = self.socket.as_ref().filter(|_| !self.untold.is_empty()) else {
            return;
        };
        let _ = socket.set_nonblocking(false);
        self.send();
        if let Some((socket, _)) = &self.socket {
            let _ = socket.set_nonblocking(true);
        }
        if !self.untold.is_empty() {
            log::warn!("the service manager does not read what it is told");
        }
    }

    /// A step of the start begins that may take long.
    pub(crate) fn starts(&mut self, what: &str) {
        self.tell_and_wait(&format!("EXTEND_TIMEOUT_USEC={STEP}\nSTATUS={what}"));
    }

    /// The configuration is read again. Its end is told as `READY=1`.
    pub(crate) fn reloads(&mut self) {
        let time = clock_gettime(ClockId::Monotonic);
        let usec = time.tv_sec.saturating_mul(1_000_000) + time.tv_nsec / 1000;
        self.tell(&format!(
            "RELOADING=1\nMONOTONIC_USEC={usec}\nSTATUS=Reads its configuration again."
        ));
    }

    /// When a sign of life is due, or what it was not told.
    pub(crate) fn due(&self) -> Option<u64> {
        let again = (!self.untold.is_empty()).then_some(self.again);
        let beat = self.beats.map(|(_, due)| due);
        beat.into_iter().chain(again).min()
    }

    /// Gives one, and tells it the rest, if that is due.
    pub(crate) fn beat(&mut self, now: u64) {
        if let Some((every, due)) = &mut self.beats
            && *due <= now
        {
            *due = now.saturating_add(*every);
            if self.untold.iter().all(|what| what != ALIVE) {
                self.tell(ALIVE);
            }
        }
        if !self.untold.is_empty() && self.again <= now {
            self.again = now.saturating_add(AGAIN);
            self.send();
        }
    }
}

/// What it is told by: a send waits for nothing, unless that is switched on.
fn socket_to(name: &[u8]) -> io::Result<(UnixDatagram, SocketAddr)> {
    let address = address(name)?;
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.set_nonblocking(true)?;
    Ok((socket, address))
}

/// A path, or `@` and a name of the abstract namespace.
pub(crate) fn address(name: &[u8]) -> io::Result<SocketAddr> {
    match name {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name)),
        _ => Err(io::Error::other(
            "it is neither a path nor a name that begins with @",
        )),
    }
}

fn parsed(text: Vec<u8>) -> Option<u64> {
    String::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Somebody has filled its socket: it is told all, in order, once it reads.
    #[test]
    fn nobody_waits_for_a_manager_that_does_not_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("notify");
        let reads = UnixDatagram::bind(&path).expect("a socket");
        let floods = UnixDatagram::unbound().expect("a socket");
        floods.connect(&path).expect("it is there");
        floods.set_nonblocking(true).expect("a socket");
        let socket = socket_to(path.as_os_str().as_bytes()).expect("a socket");
        let mut manager = Manager {
            socket: Some(socket),
            beats: Some((1_000, 0)),
            ..Manager::default()
        };
        while floods.send(b"x").is_ok() {}
        let began = std::time::Instant::now();
        manager.tell("READY=1");
        for now in 0..5_000 {
            manager.beat(now);
        }
        assert!(began.elapsed() < PATIENCE, "it waited");
        // A sign of life is told once; the rest is tried again, but not all the time.
        assert_eq!(manager.untold, ["READY=1", ALIVE]);
        assert_eq!(manager.due(), Some(5_000));
        manager.beats = None;
        assert_eq!(manager.due(), Some(AGAIN));
        reads.set_nonblocking(true).expect("a socket");
        let read = || {
            let mut bytes = [0; 64];
            let length = reads.recv(&mut bytes).ok()?;
            Some(String::from_utf8_lossy(&bytes[..length]).into_owned())
        };
        while read().is_some() {}
        manager.beat(AGAIN);
        assert_eq!(read().as_deref(), Some("READY=1"));
        assert_eq!(read().as_deref(), Some(ALIVE));
        assert_eq!((read(), manager.due()), (None, None));
    }

    #[test]
    fn addresses() {
        let path = address(b"/run/B\xfcro").expect("a path");
        assert_eq!(
            path.as_pathname().map(|path| path.as_os_str().as_bytes()),
            Some(&b"/run/B\xfcro"[..])
        );
        let name = address(b"@a\xff/b").expect("a name");
        assert_eq!(name.as_abstract_name(), Some(&b"a\xff/b"[..]));
        for wrong in [&b"vsock:2:1234"[..], b"run/x", &[b'/'; 200]] {
            assert!(address(wrong).is_err(), "{wrong:?}");
        }
    }
}
