//! The one thread: what it waits for, and what it does in a turn.

mod side;
mod start;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::PoisonError;

use arbiter::host::BootTime;
use rustix::event::{Timespec, epoll};
use rustix::net::accept_with;
use rustix::time::{ClockId, clock_gettime};
use umpire_socket::{FLAGS, Listener};

use crate::audit::Trail;
use crate::broker::Broker;
use crate::commit::Committer;
use crate::config::ArbiterConfig;
use crate::connections::{Connection, End, MOST_CALLS, Rates, Table, is_passing};
use crate::host::HostFiles;
use crate::peer::Client;
use crate::probe::Sights;
use crate::scrape::Scrapers;
use crate::service::{ConnectionId, Service};
use crate::store::Store;
use start::failed;
pub use start::{OwnArbiter, ServeError};

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const HANGUP: u64 = 2;
const SIGHTS: u64 = 3;
const METRICS: u64 = 4;
const EVENTS: u64 = 5;
const FIRST: u64 = 6;
/// Most events taken at once.
const BATCH: usize = 256;
/// Calls that look at everything count as so many.
const DEAR: u64 = 50;
/// An explanation plays the request through on a copy of all that there is.
const DEARER: u64 = 1000;
/// So many bytes of audit count as one call: nobody turns the files over in a moment.
const BYTES: u64 = 8;
/// Most connections accepted before others have their turn.
const ACCEPTS: usize = 64;
/// No wait is longer, in nanoseconds: a host that was suspended has waited for less than
/// has passed.
const LONGEST_WAIT: u64 = 1_000_000_000;

/// Where calls come from.
#[derive(Debug)]
enum Incoming {
    /// A socket that this process made.
    Own(Listener),
    /// One that the service manager made (`LISTEN_FDS`).
    Given(OwnedFd),
}

impl Incoming {
    fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Incoming::Own(listener) => listener.accept(),
            Incoming::Given(socket) => Ok(accept_with(socket, FLAGS)?),
        }
    }
}

/// The service, ready to run.
#[derive(Debug)]
pub struct Arbiterd {
    service: Service,
    journal: Option<Committer<Store>>,
    incoming: Incoming,
    epoll: OwnedFd,
    /// Can be read from after SIGTERM and SIGINT.
    stop: UnixStream,
    /// Can be read from after SIGHUP.
    hangup: UnixStream,
    /// Can be read from after a look at the counters.
    looked: UnixStream,
    /// What was seen, where the counters are measured.
    sights: Option<Sights>,
    config: Option<PathBuf>,
    host: HostFiles,
    scrapers: Option<Scrapers>,
    broker: Option<Broker>,
    trail: Option<Trail>,
    connections: Table,
    next: u64,
    rates: Rates,
    /// Those that are not listened to until then: their user has made too many calls.
    paused: BTreeMap<ConnectionId, u64>,
    /// Those that do not take in their replies.
    blocked: BTreeSet<ConnectionId>,
    /// Those that have calls left from the last turn.
    ready: BTreeSet<ConnectionId>,
    /// Nobody is accepted until then: there are no descriptors left.
    full_until: Option<u64>,
}

/// Now, in nanoseconds since the host was booted.
fn now() -> BootTime {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    BootTime(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

impl Arbiterd {
    fn watch(&self, source: &impl AsFd, token: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(
            &self.epoll,
            source,
            data,
            epoll::EventFlags::IN,
        )?)
    }

    /// Whether those who want to connect are reported.
    fn watch_incoming(&self, on: bool) -> io::Result<()> {
        let incoming = match &self.incoming {
            Incoming::Own(listener) => listener.as_fd(),
            Incoming::Given(socket) => socket.as_fd(),
        };
        let metrics = self.scrapers.as_ref().map(|all| (all.as_fd(), METRICS));
        let events = self.broker.as_ref().map(|all| (all.as_fd(), EVENTS));
        for (fd, token) in [(incoming, LISTENER)]
            .into_iter()
            .chain(metrics)
            .chain(events)
        {
            if on {
                self.watch(&fd, token)?;
            } else {
                epoll::delete(&self.epoll, fd)?;
            }
        }
        Ok(())
    }

    /// Nobody can be accepted for want of descriptors: that is tried again later.
    fn pause_incoming(&mut self, error: &io::Error) {
        log::warn!("no connection can be accepted: {error}; trying again in 100 ms");
        self.full_until = Some(now().0 + 100_000_000);
        let _ = self.watch_incoming(false);
    }

    /// Serves until SIGTERM or SIGINT.
    ///
    /// # Errors
    /// The kernel did not do what it always does.
    pub fn run(self) -> Result<(), ServeError> {
        // Nobody may listen: then it does not matter.
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        self.run_within()
    }

    /// The same, as a part of another program.
    fn run_within(mut self) -> Result<(), ServeError> {
        self.settle();
        let ended = self.serve_until_told();
        self.host.end(&self.service);
        self.sync_audit(true);
        if self.journal.is_none()
            && self.service.has_holders()
            && let Incoming::Own(listener) = self.incoming
        {
            // The socket's name stays: the next arbiter sees by it that holders may count on.
            std::mem::forget(listener);
        }
        ended
    }

    fn serve_until_told(&mut self) -> Result<(), ServeError> {
        loop {
            let tokens = self.wait()?;
            let goes_on = tokens.iter().all(|(token, _)| *token != STOP);
            for (token, gone) in tokens {
                match token {
                    LISTENER => self.accept(),
                    STOP => {}
                    HANGUP => self.reload(),
                    SIGHTS => self.see(),
                    METRICS => self.accept_scrapers(),
                    scraper if self.scrapers.as_ref().is_some_and(|all| all.has(scraper)) => {
                        self.scrape(scraper);
                    }
                    EVENTS => self.accept_holders(),
                    holder if self.broker.as_ref().is_some_and(|all| all.has(holder)) => {
                        if gone {
                            self.leave_holder(holder);
                        } else {
                            self.broker(holder);
                        }
                    }
                    // Both directions are closed, whatever it has sent before.
                    connection if gone => self.drop_connection(ConnectionId(connection), None),
                    connection => {
                        self.ready.insert(ConnectionId(connection));
                    }
                }
            }
            self.service.advance(now());
            if self.host.due() <= now().0 {
                self.host.look(&mut self.service, now());
                if let Some(journal) = &mut self.journal {
                    journal.sync(&self.service);
                }
                self.sync_audit(false);
                if let Some(broker) = &mut self.broker {
                    broker.look(&mut self.service, now().0);
                }
            }
            if let Some(scrapers) = &mut self.scrapers {
                scrapers.leave_slow(now().0);
            }
            self.resume();
            self.serve();
            self.settle();
            if !goes_on {
                return Ok(());
            }
        }
    }

    fn wait(&self) -> Result<Vec<(u64, bool)>, ServeError> {
        let none = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        };
        let mut events = [none; BATCH];
        let now = now().0;
        let due = self.service.arbiter().deadline().map(|due| due.0);
        let due = due
            .into_iter()
            .chain(self.paused.values().copied())
            .chain(self.full_until)
            .chain([self.host.due()])
            .chain(self.scrapers.as_ref().and_then(Scrapers::due))
            .min();
        let most = match (self.ready.is_empty(), due) {
            (false, _) => Some(0),
            (true, due) => {
                let tries = self.tries_again();
                let due = due.into_iter().chain(tries).min();
                due.map(|due| due.saturating_sub(now).min(LONGEST_WAIT))
            }
        };
        let most = most.map(|ns| Timespec {
            tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(ns % 1_000_000_000).unwrap_or(0),
        });
        match epoll::wait(&self.epoll, &mut events[..], most.as_ref()) {
            Ok(count) => {
                let gone = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
                let events = events[..count].iter();
                Ok(events
                    .map(|event| {
                        let flags = event.flags;
                        (event.data.u64(), flags.intersects(gone))
                    })
                    .collect())
            }
            Err(rustix::io::Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(failed("epoll")(error.into())),
        }
    }

    fn reload(&mut self) {
        // However many signals there were.
        let _ = self.hangup.read(&mut [0; 64]);
        let Some(path) = &self.config else {
            log::warn!("SIGHUP: there is no --config file to read again");
            return;
        };
        let read = ArbiterConfig::read(path).map_err(|error| error.to_string());
        match read.and_then(|config| self.service.reload(config, now())) {
            Ok(()) => {
                log::info!("{}: read again", path.display());
                self.host.follow_config(&mut self.service, now());
            }
            Err(error) => log::error!("{error}; the rules stay as they were"),
        }
    }

    /// Takes over what the probe has seen.
    fn see(&mut self) {
        match self.looked.read(&mut [0; 64]) {
            // Nobody looks any more, or ever did.
            Ok(0) => {
                let _ = epoll::delete(&self.epoll, &self.looked);
            }
            _ => {
                if let Some(sights) = &self.sights {
                    let mut sight = sights.lock().unwrap_or_else(PoisonError::into_inner);
                    let (places, holders) =
                        (std::mem::take(&mut sight.places), sight.holders.clone());
                    drop(sight);
                    self.service.see(&places, holders, now());
                }
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            let socket = match self.incoming.accept() {
                Ok(socket) => socket,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if is_passing(&error) => continue,
                Err(error) => return self.pause_incoming(&error),
            };
            let Ok(client) = Client::of(&socket) else {
                continue;
            };
            let own = self
                .connections
                .values()
                .filter(|other| other.client.uid == client.uid);
            if own.count() >= self.service.config().connections_per_user {
                log::debug!(
                    "user {} has too many connections; one was closed",
                    client.uid
                );
                continue;
            }
            let id = ConnectionId(self.next);
            if self.watch(&socket, id.0).is_ok() {
                self.next += 1;
                self.connections.insert(id, Connection::new(socket, client));
            }
        }
    }

    /// Those who had to pause go on.
    fn resume(&mut self) {
        let now = now().0;
        if self.full_until.is_some_and(|until| until <= now) {
            self.full_until = None;
            let _ = self.watch_incoming(true);
            self.accept();
        }
        let due: Vec<ConnectionId> = self
            .paused
            .iter()
            .filter(|(_, until)| **until <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.paused.remove(&id);
            self.listen(id, true);
            self.ready.insert(id);
        }
    }

    /// Whether what a connection sends is reported. Its end always is.
    fn listen(&self, id: ConnectionId, on: bool) {
        let connection = self.connections.get(&id);
        let connection = connection.map(|connection| connection.socket.as_fd());
        let broker = self.broker.as_ref();
        let holder = || broker.and_then(|broker| broker.socket(id.0));
        let Some(socket) = connection.or_else(holder) else {
            return;
        };
        let flags = if on {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        let data = epoll::EventData::new_u64(id.0);
        let _ = epoll::modify(&self.epoll, socket, data, flags);
    }

    /// Answers what has come, a few calls of each connection.
    fn serve(&mut self) {
        for id in std::mem::take(&mut self.ready) {
            let Some(connection) = self.connections.get_mut(&id) else {
                continue;
            };
            let filled = connection.fill();
            if connection.has_unsent() {
                let mut ended = BTreeMap::new();
                self.flush(id, &mut ended);
                if let Some(end) = ended.remove(&id) {
                    self.drop_connection(id, Some(end));
                    continue;
                }
            }
            let served = self.serve_one(id);
            if filled.is_err() || served.is_err() {
                self.drop_connection(id, served.err().or(filled.err()));
            }
        }
    }

    fn serve_one(&mut self, id: ConnectionId) -> Result<(), End> {
        for _ in 0..MOST_CALLS {
            let Some(connection) = self.connections.get_mut(&id) else {
                return Ok(());
            };
            if !connection.has_call() || self.service.is_busy(id) {
                if connection.is_full() && connection.has_call() {
                    // What it sends on stays with the kernel until it has its reply.
                    self.paused.insert(id, u64::MAX);
                    self.listen(id, false);
                    return Ok(());
                }
                return connection.next_if_malformed();
            }
            let now = now();
            if let Err(until) = self.rates.take(connection.client.uid, now.0) {
                self.paused.insert(id, until);
                self.listen(id, false);
                return Ok(());
            }
            let Some(request) = connection.next()? else {
                return Ok(());
            };
            let client = connection.client.clone();
            let lines = request.parameters.as_ref().and_then(|all| all.get("lines"));
            let bytes = lines
                .and_then(|lines| lines.as_array())
                .into_iter()
                .flatten();
            let bytes = bytes.map(|line| 1 + line.as_str().map_or(0, str::len));
            let bytes: usize = bytes.sum();
            self.rates.charge(client.uid, bytes as u64 / BYTES, now.0);
            let threads = request.parameters.as_ref().and_then(|all| {
                let threads = all.get("request")?.get("threads")?;
                Some(threads.as_array()?.len())
            });
            self.rates
                .charge(client.uid, threads.unwrap_or(0) as u64, now.0);
            let method = request.method.rsplit('.').next();
            let dear = match method {
                Some("List" | "Who") => DEAR,
                Some("Explain") => DEARER,
                _ => 0,
            };
            self.rates.charge(client.uid, dear, now.0);
            self.service.call(id, &client, &request, now);
        }
        self.ready.insert(id);
        Ok(())
    }

    fn drop_connection(&mut self, id: ConnectionId, why: Option<End>) {
        if let Some(connection) = self.connections.remove(&id) {
            if let Some(end @ (End::Malformed | End::Unread)) = why {
                let client = &connection.client;
                log::warn!(
                    "process {} of user {}: {}",
                    client.pid,
                    client.uid,
                    end.words()
                );
            }
            let _ = epoll::delete(&self.epoll, &connection.socket);
        }
        self.paused.remove(&id);
        self.blocked.remove(&id);
        self.ready.remove(&id);
        self.service.gone(id, now());
    }

    /// When the journal is tried again, if it could not be written.
    fn tries_again(&self) -> Option<u64> {
        self.journal.as_ref()?.due(&self.service)
    }

    /// Writes what has changed, and answers.
    fn settle(&mut self) {
        loop {
            let mut output = self.service.take();
            let tries = self.tries_again().is_some_and(|at| at <= now().0);
            let nothing = output.entries.is_empty() && output.answers.is_empty();
            if nothing && output.records.is_empty() && !tries {
                return;
            }
            if let Some(journal) = &mut self.journal {
                journal.commit(&mut self.service, &mut output, now());
            }
            self.host.switch_watchdog(&mut self.service, now());
            if let Some(broker) = &mut self.broker {
                broker.follow(&mut self.service, &output.changed, now().0);
            }
            self.audit(&mut output);
            let mut ended = BTreeMap::new();
            for answer in &output.answers {
                if let Some(connection) = self.connections.get_mut(&answer.to)
                    && let Err(end) = connection.reply(&answer.reply)
                {
                    ended.insert(answer.to, end);
                }
            }
            for to in output
                .answers
                .iter()
                .map(|answer| answer.to)
                .collect::<BTreeSet<_>>()
            {
                self.flush(to, &mut ended);
                // It may have sent its next call while this one waited.
                if self.connections.get(&to).is_some_and(Connection::has_call) {
                    if self.paused.remove(&to).is_some() {
                        self.listen(to, true);
                    }
                    self.ready.insert(to);
                }
            }
            for (id, end) in ended {
                self.drop_connection(id, Some(end));
            }
        }
    }

    /// Sends what waits for a connection; the rest when it can be sent.
    fn flush(&mut self, id: ConnectionId, ended: &mut BTreeMap<ConnectionId, End>) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        match connection.flush() {
            Ok(false) if !self.blocked.remove(&id) => {}
            Ok(false) => self.listen(id, !self.paused.contains_key(&id)),
            Ok(true) => {
                self.blocked.insert(id);
                let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT;
                let data = epoll::EventData::new_u64(id.0);
                let _ = epoll::modify(&self.epoll, &connection.socket, data, flags);
            }
            Err(end) => {
                ended.insert(id, end);
            }
        }
    }
}
