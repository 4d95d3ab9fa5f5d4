//! The service manager, as sd_notify(3) has it: what it is told, and where.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// So long it may take to read what it is told.
const PATIENCE: Duration = Duration::from_secs(1);
/// What a step of the start may take, in microseconds.
const STEP: u64 = 60_000_000;

/// The manager, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Manager {
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// Between two signs of life, in nanoseconds, and when the next is due.
    beats: Option<(u64, u64)>,
}

impl Manager {
    /// By `NOTIFY_SOCKET` and `WATCHDOG_USEC`.
    pub(crate) fn of_environment() -> Self {
        let Some(name) = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Manager::default();
        };
        let socket = address(name.as_bytes()).and_then(|address| {
            let socket = UnixDatagram::unbound()?;
            socket.set_write_timeout(Some(PATIENCE))?;
            Ok((socket, address))
        });
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
        }
    }

    /// Tells it something: lines of `NAME=VALUE`.
    pub(crate) fn tell(&self, what: &str) {
        let Some((socket, address)) = &self.socket else {
            return;
        };
        if let Err(error) = socket.send_to_addr(what.as_bytes(), address) {
            log::warn!("the service manager cannot be told: {error}");
        }
    }

    /// A step of the start begins that may take long.
    pub(crate) fn starts(&self, what: &str) {
        self.tell(&format!("EXTEND_TIMEOUT_USEC={STEP}\nSTATUS={what}"));
    }

    /// The configuration is read again. Its end is told as `READY=1`.
    pub(crate) fn reloads(&self) {
        let time = clock_gettime(ClockId::Monotonic);
        let usec = time.tv_sec.saturating_mul(1_000_000) + time.tv_nsec / 1000;
        self.tell(&format!(
            "RELOADING=1\nMONOTONIC_USEC={usec}\nSTATUS=Reads its configuration again."
        ));
    }

    /// When a sign of life is due.
    pub(crate) fn due(&self) -> Option<u64> {
        self.beats.map(|(_, due)| due)
    }

    /// Gives one, if it is due.
    pub(crate) fn beat(&mut self, now: u64) {
        if let Some((every, due)) = &mut self.beats
            && *due <= now
        {
            *due = now.saturating_add(*every);
            self.tell("WATCHDOG=1");
        }
    }
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
