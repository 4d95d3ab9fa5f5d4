//! A client that waits for its answers.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use arbiter_host::What;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use varlink::sansio::{ParseResult, parse_message, serialize_request};
use varlink::{Reply, Request as VarlinkRequest};

use crate::INTERFACE;
use crate::wire::{
    AcquireIn, AcquireOut, ClaimIn, Event, Lease, ListOut, NoReply, Refusal, RefusedError, Request,
};

/// The longest wait for an answer.
const ANSWERS: Duration = Duration::from_secs(5);
/// The longest wait until something is taken that has no answer.
const PATIENCE: Duration = Duration::from_millis(50);

/// A call was not answered as asked.
#[derive(Debug, Error)]
pub enum CallError {
    /// Nobody listens at the socket.
    #[error("{}: no arbiter listens there ({error}); start one with: umpire arbiterd", .path.display())]
    NoArbiter {
        /// The socket.
        path: PathBuf,
        /// Why it cannot be reached.
        error: io::Error,
    },
    /// The arbiter says no.
    #[error("{}", .0.message)]
    Refused(Box<Refusal>),
    /// The connection failed.
    #[error("the connection to the arbiter failed: {0}")]
    Io(#[from] io::Error),
    /// The arbiter has ended the connection.
    #[error("the arbiter has ended the connection")]
    Ended,
    /// The arbiter is there, and stands still.
    #[error("the arbiter has not answered for {} s", ANSWERS.as_secs())]
    Silent,
    /// The arbiter answered with another error.
    #[error("the arbiter answers: {0}")]
    Other(String),
}

/// A connection to the arbiter. It carries one call after the other.
#[derive(Debug)]
pub struct Arbiter {
    stream: UnixStream,
    received: Vec<u8>,
}

/// A lease, as long as it is not dropped: its counters are given back then.
#[derive(Debug)]
pub struct Held {
    arbiter: Arbiter,
    lease: Lease,
    /// Why it waits, as the first reply has it.
    first: Option<Box<Event>>,
}

/// What [`Held::next`] has seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Something happened to the lease.
    Event(Box<Event>),
    /// Nothing happened in that time.
    Nothing,
}

impl Arbiter {
    /// Connects to the arbiter at `path`.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(path: &Path) -> Result<Self, CallError> {
        match connected(path) {
            Ok(stream) => Ok(Arbiter {
                stream,
                received: Vec::new(),
            }),
            Err(error) if is_timeout(&error) => Err(CallError::Silent),
            Err(error) => Err(CallError::NoArbiter {
                path: path.to_owned(),
                error,
            }),
        }
    }

    /// Calls a method of the interface and waits for its reply.
    ///
    /// # Errors
    /// The arbiter says no, or the connection failed.
    pub fn call<P: Serialize, R: DeserializeOwned>(
        &mut self,
        method: &str,
        parameters: &P,
    ) -> Result<R, CallError> {
        self.send(method, parameters, false)?;
        self.receive()
    }

    /// Calls a method whose reply nobody waits for: there is none.
    ///
    /// # Errors
    /// The connection failed, or the arbiter has not read for some time.
    pub fn tell<P: Serialize>(&mut self, method: &str, parameters: &P) -> Result<(), CallError> {
        self.stream.set_write_timeout(Some(PATIENCE))?;
        let mut request = request(method, parameters)?;
        request.oneway = Some(true);
        let bytes = serialize_request(&request).map_err(|error| malformed(&error))?;
        Ok(self.stream.write_all(&bytes)?)
    }

    /// The leases that the caller may see.
    ///
    /// # Errors
    /// As [`Arbiter::call`].
    pub fn leases(&mut self) -> Result<Vec<Lease>, CallError> {
        let ListOut { leases } = self.call("List", &NoReply {})?;
        Ok(leases)
    }

    /// Asks for a lease. It may wait first: then it holds nothing yet.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub fn acquire(mut self, request: &Request) -> Result<Held, CallError> {
        let request = request.clone();
        self.send("Acquire", &AcquireIn { request }, true)?;
        self.held()
    }

    /// Takes over a lease after the arbiter was started anew. It may hold more or less than
    /// it was last told.
    ///
    /// # Errors
    /// There is no such lease, it is another's, or it has changed since.
    pub fn claim(mut self, lease: u64, generation: Option<u64>) -> Result<Held, CallError> {
        self.send("Claim", &ClaimIn { lease, generation }, true)?;
        self.held()
    }

    fn held(mut self) -> Result<Held, CallError> {
        let AcquireOut { lease, event } = self.receive()?;
        Ok(Held {
            arbiter: self,
            lease,
            first: event.map(Box::new),
        })
    }

    /// All events of the host, one with each call of [`Arbiter::next_event`].
    ///
    /// # Errors
    /// As [`Arbiter::call`].
    pub fn watch(&mut self) -> Result<(), CallError> {
        self.send("Watch", &NoReply {}, true)?;
        self.receive::<crate::WatchOut>()?;
        // Events come when they come.
        Ok(self.stream.set_read_timeout(None)?)
    }

    /// The next event after [`Arbiter::watch`].
    ///
    /// # Errors
    /// The connection has ended.
    pub fn next_event(&mut self) -> Result<Option<Event>, CallError> {
        let crate::WatchOut { event } = self.receive()?;
        Ok(event)
    }

    fn send<P: Serialize>(
        &mut self,
        method: &str,
        parameters: &P,
        more: bool,
    ) -> Result<(), CallError> {
        self.stream.set_read_timeout(Some(ANSWERS))?;
        let mut request = request(method, parameters)?;
        request.more = more.then_some(true);
        let bytes = serialize_request(&request).map_err(|error| malformed(&error))?;
        Ok(self.stream.write_all(&bytes)?)
    }

    fn receive<R: DeserializeOwned>(&mut self) -> Result<R, CallError> {
        loop {
            if let Some(reply) = self.parsed()? {
                return answer(reply);
            }
            match self.fill() {
                Err(CallError::Io(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(CallError::Io(error)) if is_timeout(&error) => return Err(CallError::Silent),
                filled => filled?,
            }
        }
    }

    fn fill(&mut self) -> Result<(), CallError> {
        let mut chunk = [0; 16 * 1024];
        match self.stream.read(&mut chunk)? {
            0 => Err(CallError::Ended),
            count => {
                self.received.extend_from_slice(&chunk[..count]);
                Ok(())
            }
        }
    }

    /// A reply that has come in whole.
    fn parsed(&mut self) -> Result<Option<Reply>, CallError> {
        match parse_message(&self.received) {
            ParseResult::Complete { message, consumed } => {
                self.received.drain(..consumed);
                let reply = serde_json::from_slice(&message).map_err(io::Error::from)?;
                Ok(Some(reply))
            }
            ParseResult::Incomplete { .. } => Ok(None),
            ParseResult::Invalid { error } => Err(CallError::Other(error)),
        }
    }
}

impl AsFd for Arbiter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn request<P: Serialize>(
    method: &str,
    parameters: &P,
) -> Result<VarlinkRequest<'static>, CallError> {
    let parameters = serde_json::to_value(parameters).map_err(io::Error::from)?;
    Ok(VarlinkRequest::create(
        format!("{INTERFACE}.{method}"),
        Some(parameters),
    ))
}

fn malformed(error: &impl ToString) -> CallError {
    CallError::Other(error.to_string())
}

/// What a reply says.
fn answer<R: DeserializeOwned>(reply: Reply) -> Result<R, CallError> {
    let parameters = reply.parameters.unwrap_or_else(|| serde_json::json!({}));
    let Some(error) = reply.error else {
        return Ok(serde_json::from_value(parameters).map_err(io::Error::from)?);
    };
    if error == format!("{INTERFACE}.Refused") {
        let RefusedError { refusal } =
            serde_json::from_value(parameters).map_err(io::Error::from)?;
        return Err(CallError::Refused(Box::new(refusal)));
    }
    match parameters
        .get("message")
        .and_then(|message| message.as_str())
    {
        Some(message) => Err(CallError::Other(message.to_owned())),
        None => Err(CallError::Other(format!("{error} {parameters}"))),
    }
}

impl Held {
    /// The lease as it was last heard of.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Waits until something happens to the lease, for `most` at the longest.
    ///
    /// # Errors
    /// The connection has ended, and with it the lease: unless the arbiter was started
    /// anew and the lease is claimed.
    pub fn next(&mut self, most: Option<Duration>) -> Result<Next, CallError> {
        if let Some(first) = self.first.take() {
            return Ok(Next::Event(first));
        }
        let until = most.map(|most| Instant::now() + most);
        loop {
            if let Some(reply) = self.arbiter.parsed()? {
                let AcquireOut { lease, event } = answer(reply)?;
                self.lease = lease;
                if let Some(event) = event {
                    return Ok(Next::Event(Box::new(event)));
                }
                continue;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            // A time of 0 would be none for the socket: what is there is read all the same.
            let at_once = left.is_some_and(|left| left.is_zero());
            self.arbiter.stream.set_nonblocking(at_once)?;
            self.arbiter
                .stream
                .set_read_timeout(left.filter(|_| !at_once))?;
            let filled = self.arbiter.fill();
            self.arbiter.stream.set_nonblocking(false)?;
            match filled {
                Err(CallError::Io(error)) if is_timeout(&error) => {
                    if at_once {
                        return Ok(Next::Nothing);
                    }
                }
                other => other?,
            }
        }
    }

    /// Waits until the lease holds something.
    ///
    /// # Errors
    /// It ended without, or the connection did.
    pub fn wait(&mut self) -> Result<(), CallError> {
        while self.lease.holds == 0 {
            if let Next::Event(event) = self.next(None)?
                && event.what == What::Ended
            {
                return Err(CallError::Other(event.message));
            }
        }
        Ok(())
    }
}

impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arbiter.as_fd()
    }
}

/// Waits until one of these has something to read, for `most` at the longest.
pub fn wait_readable(what: &[BorrowedFd<'_>], most: Option<Duration>) {
    let fds = what
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN));
    let most = most.and_then(|most| Timespec::try_from(most).ok());
    // A signal ends the wait early, which its caller does not mind.
    let _ = poll(fds.collect::<Vec<_>>().as_mut_slice(), most.as_ref());
}

/// Connects, and waits for no server that stands still for longer than for an answer.
fn connected(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The time of a send is that of a connect, too (socket(7)).
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWERS))?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
        connected => {
            connected?;
            Ok(UnixStream::from(socket))
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}
