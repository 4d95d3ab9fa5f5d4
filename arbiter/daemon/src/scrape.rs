//! The socket of the metrics, served by the thread that decides: few connections, each for
//! one short request, in a time that is limited.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::str::FromStr;

use rustix::event::epoll::EventFlags;
use umpire_service::{
    Accepted, Access, ClientSocket, Closer, Kind, Listener, Poll, SocketError, Wording,
};

use crate::http::{self, Heard};

/// Most connections; for one more the oldest is left of the user that would have most. Of a port
/// all are one user's, since the kernel does not say whose they are: whoever holds some and says
/// nothing keeps no scraper from being served.
const MOST: usize = 16;
/// So long a scraper has for its request and for reading the answer, in nanoseconds.
const TIME: u64 = 5_000_000_000;
/// A text of the metrics serves everybody who asks within this time.
const FRESH: u64 = 200_000_000;

const WORDING: Wording = Wording {
    option: "--metrics",
    server: "arbiter",
};

/// Where metrics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A port of this host, for processes of this host.
    Port(SocketAddr),
    /// A Unix socket.
    Path(PathBuf),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('/') {
            return Ok(MetricsAddress::Path(text.into()));
        }
        let numbers = text
            .strip_prefix("localhost:")
            .map_or_else(|| text.to_owned(), |port| format!("127.0.0.1:{port}"));
        let address: SocketAddr = numbers.parse().map_err(|_| {
            format!("'{text}': give an address like 127.0.0.1:9184, or the path of a socket")
        })?;
        if !address.ip().is_loopback() {
            return Err(format!(
                "'{text}': metrics tell who measures what, without encryption, so only loopback \
                 addresses are served; give 127.0.0.1:{}, or a path, and have a proxy of yours \
                 serve others",
                address.port()
            ));
        }
        Ok(MetricsAddress::Port(address))
    }
}

#[derive(Debug)]
enum Listening {
    Port(TcpListener, Closer),
    Path(Listener),
}

/// One scraper.
#[derive(Debug)]
struct Scraper {
    socket: ClientSocket,
    received: Vec<u8>,
    answer: Option<Vec<u8>>,
    sent: usize,
    until: u64,
}

/// The socket, and who is connected.
#[derive(Debug)]
pub(crate) struct Scrapers {
    listening: Listening,
    open: BTreeMap<u64, Scraper>,
    text: String,
    rendered: Option<u64>,
}

impl Scrapers {
    /// # Errors
    /// The socket cannot be had.
    pub(crate) fn listen(
        address: &MetricsAddress,
        access: &Access,
        closer: &Closer,
    ) -> Result<Self, SocketError> {
        let listening = match address {
            MetricsAddress::Path(path) => {
                let listener = Listener::new(path, Kind::Stream, access, WORDING, closer)?;
                Listening::Path(listener)
            }
            MetricsAddress::Port(address) => {
                let failed = |what: &str| {
                    let what = what.to_owned();
                    let path = PathBuf::from(address.to_string());
                    move |error| SocketError::Io {
                        wording: WORDING,
                        path,
                        what,
                        error,
                    }
                };
                let listener = TcpListener::bind(address).map_err(failed("bind"))?;
                listener.set_nonblocking(true).map_err(failed("fcntl"))?;
                Listening::Port(listener, closer.clone())
            }
        };
        Ok(Scrapers {
            listening,
            open: BTreeMap::new(),
            text: String::new(),
            rendered: None,
        })
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.listening {
            Listening::Port(listener, _) => listener.as_fd(),
            Listening::Path(listener) => listener.as_fd(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// A connection that waits to be accepted.
    pub(crate) fn accept(&self) -> Accepted {
        match &self.listening {
            Listening::Port(listener, closer) => umpire_service::accept(listener, closer),
            Listening::Path(listener) => listener.accept(),
        }
    }

    /// Serves a connection, and has it reported. `false`: its user has left too much, and it was
    /// closed.
    ///
    /// # Errors
    /// It cannot be reported.
    pub(crate) fn admit(
        &mut self,
        id: u64,
        mut socket: ClientSocket,
        now: u64,
        poll: &Poll,
    ) -> io::Result<bool> {
        if socket.is_overdrawn() {
            return Ok(false);
        }
        if self.open.len() >= MOST {
            self.make_room(socket.user());
        }
        socket.refuse_rights();
        socket.watch(poll, id, EventFlags::IN)?;
        let scraper = Scraper {
            socket,
            received: Vec::new(),
            answer: None,
            sent: 0,
            until: now.saturating_add(TIME),
        };
        self.open.insert(id, scraper);
        Ok(true)
    }

    /// Leaves the oldest connection of the user that has most, with one more of `user`.
    fn make_room(&mut self, user: u32) {
        let users = self.open.values().map(|scraper| scraper.socket.user());
        let users: Vec<u32> = users.collect();
        let would_have = |of: u32| {
            let own = users.iter().filter(|other| **other == of).count();
            own + usize::from(of == user)
        };
        // Of several the first, which is the oldest.
        let most = users.iter().map(|of| would_have(*of)).max();
        let goes = self.open.iter().find(|(_, scraper)| {
            let of = scraper.socket.user();
            Some(would_have(of)) == most
        });
        if let Some(id) = goes.map(|(id, _)| *id) {
            self.open.remove(&id);
        }
    }

    /// Whether this is one of the connections.
    pub(crate) fn has(&self, id: u64) -> bool {
        self.open.contains_key(&id)
    }

    /// Goes on with a connection that can be read from, or written to.
    pub(crate) fn turn(&mut self, id: u64, now: u64, render: impl FnOnce() -> String) {
        let Some(scraper) = self.open.get_mut(&id) else {
            return;
        };
        if scraper.answer.is_none() {
            match scraper.read() {
                Ok(Heard::More) => return,
                Ok(Heard::Wrong { status, what, body }) => {
                    scraper.answer = Some(http::answer(status, "text/plain", what, body));
                }
                Ok(Heard::Metrics { body, format }) => {
                    if self
                        .rendered
                        .is_none_or(|at| now.saturating_sub(at) >= FRESH)
                    {
                        self.text = render();
                        self.rendered = Some(now);
                    }
                    let text = format.of(&self.text);
                    scraper.answer = Some(http::answer(200, format.media_type(), &text, body));
                }
                Err(_) => {
                    self.open.remove(&id);
                    return;
                }
            }
        }
        match scraper.write() {
            // It is reported when it can take in more.
            Ok(false) => scraper.socket.listen(id, EventFlags::OUT),
            _ => {
                self.open.remove(&id);
            }
        }
    }

    /// When the next of them has had its time.
    pub(crate) fn due(&self) -> Option<u64> {
        self.open.values().map(|scraper| scraper.until).min()
    }

    /// Leaves those who are too slow.
    pub(crate) fn leave_slow(&mut self, now: u64) {
        self.open.retain(|_, scraper| scraper.until > now);
    }
}

impl Scraper {
    fn read(&mut self) -> io::Result<Heard> {
        let mut chunk = [0; 4096];
        loop {
            match self.socket.receive(&mut chunk) {
                // No request comes with descriptors.
                Ok(got) if got.bytes == 0 || !got.rights.is_empty() || got.cut => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(got) => self.received.extend_from_slice(&chunk[..got.bytes]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Heard::More),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            match http::asked(&self.received) {
                Heard::More => {}
                asked => return Ok(asked),
            }
        }
    }

    /// Whether all was sent.
    fn write(&mut self) -> io::Result<bool> {
        let answer = self.answer.as_deref().unwrap_or_default();
        self.sent += self.socket.send(&answer[self.sent..])?;
        Ok(self.sent == answer.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let good = |text: &str| text.parse::<MetricsAddress>().is_ok();
        assert!(good("127.0.0.1:9184") && good("[::1]:9184") && good("localhost:1"));
        assert!(good("/run/umpire/metrics") && good("./metrics"));
        let wrong = |text: &str| text.parse::<MetricsAddress>().expect_err(text);
        assert!(wrong("0.0.0.0:9184").contains("only loopback"));
        assert!(wrong("10.1.2.3:80").contains("127.0.0.1:80"));
        assert!(wrong("9184").contains("give an address"));
    }
}
