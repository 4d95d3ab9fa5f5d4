//! The one thread: what it waits for, and what it does in a turn.

mod reload;
mod side;
mod start;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, PoisonError};

use arbiter_host::BootTime;
use rustix::event::{Timespec, epoll};
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::time::{ClockId, clock_gettime};
use umpire_service::{BACKLOG, ClientSocket, Closer, Listener};
use varlink::Request;

use crate::audit::Trail;
use crate::broker::Broker;
use crate::commit::Committer;
use crate::connections::{Complaints, Connection, End, MOST_CALLS, Rates, Table, is_passing};
use crate::host::HostFiles;
use crate::manager::Manager;
use crate::peer::Client;
use crate::probe::Sights;
use crate::room::Room;
use crate::scrape::Scrapers;
use crate::service::{Called, ConnectionId, Service};
use crate::store::Store;
use crate::threads::Threads;
use reload::Reloads;
use start::failed;
pub use start::{OwnArbiter, ServeError};

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const HANGUP: u64 = 2;
const SIGHTS: u64 = 3;
const METRICS: u64 = 4;
const EVENTS: u64 = 5;
const OPENED: u64 = 6;
const THREADS: u64 = 7;
const REREAD: u64 = 8;
const FIRST: u64 = 9;
/// Most events taken at once.
const BATCH: usize = 1024;
/// Calls that look at everything count as so many.
const DEAR: u64 = 50;
/// An explanation plays the request through on a copy of all that there is.
const DEARER: u64 = 1000;
/// So many bytes of audit count as one call: nobody turns the files over in a moment.
const BYTES: u64 = 8;
/// The kernel's buffer of what one connection has not read; it takes twice as much.
const SEND_BUFFER: usize = 32 * 1024;
/// Most connections accepted before others have their turn.
const ACCEPTS: usize = 16;
/// How long those who have come are served before it is looked who else has, in nanoseconds.
const SLICE: u64 = 5_000_000;
/// Answers are sent before more of them wait than so many bytes.
const MOST_ANSWERS: usize = 64 * 1024;
/// What is due waits for what had come by then to be looked at, so long at most; and for those
/// who have sent much, so long; in nanoseconds.
const LONGEST_HOLD: u64 = 1_000_000_000;
const HOLD: u64 = 100_000_000;
/// That nobody can be accepted is said so often, in nanoseconds.
const FULL_AGAIN: u64 = 10_000_000_000;
/// No wait is longer, in nanoseconds: a host that was suspended has waited for less than
/// has passed.
const LONGEST_WAIT: u64 = 1_000_000_000;

/// Where calls come from.
#[derive(Debug)]
enum Incoming {
    /// A socket that this process made.
    Own(Listener),
    /// One that the service manager made (`LISTEN_FDS`).
    Given(ClientSocket, Closer),
}

impl Incoming {
    fn accept(&self) -> io::Result<ClientSocket> {
        match self {
            Incoming::Own(listener) => listener.accept(),
            Incoming::Given(socket, closer) => umpire_service::accept(socket, closer),
        }
    }

    /// How many wait to be accepted at most.
    fn most_waiting(&self) -> u16 {
        match self {
            Incoming::Own(_) => BACKLOG + 1,
            // What the kernel allows if it is not told otherwise.
            Incoming::Given(..) => 4096 + 1,
        }
    }
}

/// The service, ready to run.
#[derive(Debug)]
pub struct Arbiterd {
    service: Service,
    journal: Option<Committer<Store>>,
    incoming: Incoming,
    epoll: Arc<OwnedFd>,
    /// Can be read from after SIGTERM and SIGINT.
    stop: UnixStream,
    /// Can be read from after SIGHUP.
    hangup: UnixStream,
    /// Can be read from after a look at the counters.
    looked: UnixStream,
    /// What was seen, where the counters are measured.
    sights: Option<Sights>,
    reloads: Reloads,
    manager: Manager,
    host: HostFiles,
    scrapers: Option<Scrapers>,
    broker: Option<Broker>,
    trail: Option<Trail>,
    threads: Threads,
    connections: Table,
    next: u64,
    rates: Rates,
    /// Renewals do not wait behind other calls of their user.
    renewals: Rates,
    room: Room,
    complaints: Complaints,
    /// Those that are not listened to until then: their user has made too many calls.
    paused: BTreeMap<ConnectionId, u64>,
    /// Those that do not take in their replies.
    blocked: BTreeSet<ConnectionId>,
    /// Those that have calls left from the last turn.
    ready: BTreeSet<ConnectionId>,
    /// Something was seen to be due at that time, and whether all that had come by then was
    /// looked at.
    held: Option<(BootTime, bool)>,
    /// How many were accepted since then: who waits behind so many as can wait has come later.
    accepted: u16,
    /// For once, all are served, whatever is due.
    is_free: bool,
    /// Connections that have ended; what they held is given to others when nothing is due.
    gone: Vec<ConnectionId>,
    /// Nobody is accepted until then: there are no descriptors left.
    full_until: Option<u64>,
    /// It is not said again before.
    says_full: u64,
}

/// Now, in nanoseconds since the host was booted.
fn now() -> BootTime {
    #[cfg(test)]
    if let Some(time) = tests::TIME.get() {
        return time;
    }
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
            Incoming::Given(socket, _) => socket.as_fd(),
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
        let now = now().0;
        if now >= self.says_full {
            self.says_full = now.saturating_add(FULL_AGAIN);
            log::warn!("no connection can be accepted: {error}; trying again each 100 ms");
        }
        self.full_until = Some(now.saturating_add(100_000_000));
        let _ = self.watch_incoming(false);
    }

    /// Serves until SIGTERM or SIGINT.
    ///
    /// # Errors
    /// The kernel did not do what it always does.
    pub fn run(mut self) -> Result<(), ServeError> {
        self.manager.tell("READY=1\nSTATUS=Serves.");
        self.run_within()
    }

    /// The same, as a part of another program.
    fn run_within(mut self) -> Result<(), ServeError> {
        self.settle();
        let ended = self.serve_until_told();
        self.manager.tell_and_wait("STOPPING=1\nSTATUS=Ends.");
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
            let mut all = tokens.len() < BATCH;
            let goes_on = tokens.iter().all(|(token, _)| *token != STOP);
            for (token, gone) in tokens {
                match token {
                    LISTENER => all &= self.accept(),
                    STOP => {}
                    // They are reported again.
                    HANGUP | REREAD | SIGHTS if self.is_due() => {}
                    HANGUP => self.reload(),
                    REREAD => self.take_configuration(),
                    SIGHTS => self.see(),
                    THREADS => self.threads.hear(),
                    METRICS => self.accept_scrapers(),
                    scraper if self.scrapers.as_ref().is_some_and(|all| all.has(scraper)) => {
                        self.scrape(scraper);
                    }
                    EVENTS => self.accept_holders(),
                    // All that are open by now are handed over below.
                    OPENED => {}
                    holder if self.broker.as_ref().is_some_and(|all| all.has(holder)) => {
                        if gone {
                            self.leave_holder(holder);
                        } else {
                            self.ready.insert(ConnectionId(holder));
                        }
                    }
                    // Both directions are closed, whatever it has sent before.
                    connection if gone => self.drop_connection(ConnectionId(connection), None),
                    connection => {
                        self.ready.insert(ConnectionId(connection));
                    }
                }
            }
            self.resume();
            all &= self.serve();
            self.manager.beat(now().0);
            self.advance(all);
            if self.host.due() <= now().0 && !self.is_due() {
                self.host.look(&mut self.service, now());
                self.threads.look();
                if let Some(journal) = &mut self.journal {
                    journal.sync(&self.service);
                }
                self.sync_audit(false);
                if let Some(broker) = &mut self.broker {
                    broker.look(&self.service.take_forgiven(), now().0);
                }
                self.hear();
            }
            self.hand_over();
            if let Some(scrapers) = &mut self.scrapers {
                scrapers.leave_slow(now().0);
            }
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
            .chain(self.manager.due())
            .chain(self.scrapers.as_ref().and_then(Scrapers::due))
            .chain(self.broker.as_ref().and_then(Broker::due))
            .min();
        let rests = self.ready.is_empty() && self.held.is_none() && self.gone.is_empty();
        let most = match (rests, due) {
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

    /// Whether something is due that has not been done, so that only such calls are answered as
    /// do not wait for it: who renews a lease is read before the lease ends.
    fn is_due(&self) -> bool {
        let due = self.service.arbiter().deadline();
        !self.is_free && due.is_some_and(|due| due <= now())
    }

    /// Whether somebody has sent more calls that do not wait for what is due.
    fn has_more_to_answer(&self) -> bool {
        let ready = self.ready.iter().filter_map(|id| self.connections.get(id));
        let mut next = ready.filter_map(Connection::next_method);
        next.any(|method| Called::of(&method).waits_for_nothing())
    }

    /// Does what is due, but nothing before all that had come by then was read. `all`: that was
    /// all that can be read now.
    fn advance(&mut self, all: bool) {
        self.is_free = false;
        self.service.hold_due(None);
        if !self.is_due() {
            self.held = None;
            self.service.advance(now());
        } else if let Some((since, read)) = self.held {
            let read = read || all;
            let held = now().0.saturating_sub(since.0);
            let done = read && (held >= HOLD || !self.has_more_to_answer());
            if !done && held < LONGEST_HOLD {
                self.held = Some((since, read));
                return;
            }
            self.held = None;
            self.service.advance(since);
            // Others have their turn, however much is due all the time. What has become due since
            // waits for those who have renewed since, and were not read yet.
            self.is_free = true;
            self.service.hold_due(Some(since));
        } else {
            self.held = Some((now(), false));
            self.accepted = 0;
        }
        if !self.is_due() {
            for id in std::mem::take(&mut self.gone) {
                self.service.gone(id, now());
            }
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

    /// Accepts connections, a few. Whether that were all, or all that had come by the time from
    /// which on something is held.
    fn accept(&mut self) -> bool {
        for _ in 0..ACCEPTS {
            self.accepted = self.accepted.saturating_add(1);
            let socket = match self.incoming.accept() {
                Ok(socket) => socket,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if is_passing(&error) => continue,
                Err(error) => {
                    self.pause_incoming(&error);
                    return true;
                }
            };
            let Ok(client) = Client::of(&socket) else {
                continue;
            };
            self.admit(socket, client);
        }
        self.accepted >= self.incoming.most_waiting()
    }

    fn admit(&mut self, mut socket: ClientSocket, client: Client) {
        let own = self.connections.values();
        let own = own.filter(|other| other.client.uid == client.uid).count();
        let stranger = self.service.config().is_stranger(&client);
        let most = self.service.config().connections_per_user;
        if own >= most || socket.is_overdrawn() || stranger && !self.has_place(client.uid) {
            log::debug!(
                "user {} has too many connections; one was closed",
                client.uid
            );
            self.service.metrics().connection_refused();
            return;
        }
        socket.refuse_rights();
        // What the client does not read waits in this process, where it is counted.
        let _ = set_socket_send_buffer_size(&socket, SEND_BUFFER);
        let id = ConnectionId(self.next);
        if socket
            .watch(&self.epoll, id.0, epoll::EventFlags::IN)
            .is_ok()
        {
            self.next += 1;
            self.room.add(id, client.uid, stranger);
            self.connections.insert(id, Connection::new(socket, client));
            // It may have said something already.
            self.ready.insert(id);
        }
    }

    /// Whether a user without a tenant may have one connection more; another's may be left for it.
    fn has_place(&mut self, user: u32) -> bool {
        let goes = self.room.place_of_stranger(user);
        if let Ok(Some(id)) = goes {
            self.drop_connection(id, Some(End::Outnumbered));
        }
        goes.is_ok()
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
        let connection = connection.map(|connection| &connection.socket);
        let broker = self.broker.as_ref();
        let Some(socket) = connection.or_else(|| broker?.socket(id.0)) else {
            return;
        };
        let flags = if self.blocked.contains(&id) {
            epoll::EventFlags::OUT
        } else if on {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        socket.listen(id.0, flags);
    }

    /// Answers what has come, a few calls of each connection, first of those whose users have
    /// said least; the rest after a look who else has said something. Where something is due,
    /// the rest has its renewals done at once. Whether all were looked at.
    fn serve(&mut self) -> bool {
        let begun = now().0;
        let used = |id: &ConnectionId| {
            let user = self
                .connections
                .get(id)
                .map(|connection| connection.client.uid);
            let user = user.or_else(|| self.broker.as_ref()?.user(id.0));
            self.rates.used(user.unwrap_or_default(), begun)
        };
        let mut ready: Vec<(u64, ConnectionId)> =
            self.ready.iter().map(|id| (used(id), *id)).collect();
        ready.sort_unstable();
        for (_, id) in ready {
            let is_late = now().0.saturating_sub(begun) >= SLICE;
            if is_late && self.held.is_none() {
                return false;
            }
            if self.connections.contains_key(&id) {
                self.ready.remove(&id);
                self.serve_connection(id, begun.saturating_add(SLICE));
            } else if !is_late {
                self.ready.remove(&id);
                self.broker(id.0);
            }
        }
        true
    }

    fn serve_connection(&mut self, id: ConnectionId, until: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        if connection.has_unsent() {
            let mut ended = BTreeMap::new();
            self.flush(id, &mut ended);
            if let Some(end) = ended.remove(&id) {
                return self.drop_connection(id, Some(end));
            }
        }
        let Some(connection) = self
            .connections
            .get_mut(&id)
            .filter(|one| !one.has_unsent())
        else {
            // It gets no more answers before it has read these.
            return;
        };
        let filled = connection.fill();
        let served = self.serve_calls(id, until);
        if filled.is_err() || served.is_err() {
            return self.drop_connection(id, served.err().or(filled.err()));
        }
        self.weigh(id);
    }

    /// Counts the memory of a connection, and leaves those that have most where it is short.
    fn weigh(&mut self, id: ConnectionId) {
        while let Some(connection) = self.connections.get(&id)
            && let Some(goes) = self.room.weigh(id, connection.held())
        {
            self.drop_connection(goes, Some(End::Crowded));
        }
    }

    fn serve_calls(&mut self, id: ConnectionId, until: u64) -> Result<(), End> {
        for _ in 0..MOST_CALLS {
            let is_due = self.is_due();
            let Some(connection) = self.connections.get_mut(&id) else {
                return Ok(());
            };
            if !connection.has_call() || connection.has_unsent() {
                return Ok(());
            }
            if self.service.is_busy(id) {
                // What it sends on stays with the kernel until it has its reply.
                self.paused.insert(id, u64::MAX);
                self.listen(id, false);
                return Ok(());
            }
            let now = now().0;
            let (renews, waits) = match connection.next_method() {
                Some(method) => (
                    method == "io.umpire.Arbiter.Renew",
                    !Called::of(&method).waits_for_nothing(),
                ),
                None => (false, true),
            };
            if now >= until && !renews || waits && is_due {
                break;
            }
            let rates = if renews {
                &mut self.renewals
            } else {
                &mut self.rates
            };
            if let Err(until) = rates.take(connection.client.uid, now) {
                self.paused.insert(id, until);
                self.listen(id, false);
                return Ok(());
            }
            let Some(request) = connection.next()? else {
                return Ok(());
            };
            let client = connection.client.clone();
            self.charge(&client, &request, now);
            self.service.call(id, &client, &request, BootTime(now));
            let looks = self.service.take_looks();
            self.rates.charge(client.uid, looks, now);
            if self.service.waiting_bytes() > MOST_ANSWERS {
                self.settle();
            }
        }
        self.ready.insert(id);
        Ok(())
    }

    /// Counts calls that cost more than others as so many.
    fn charge(&mut self, client: &Client, request: &Request<'_>, now: u64) {
        let lines = request.parameters.as_ref().and_then(|all| all.get("lines"));
        let bytes = lines
            .and_then(|lines| lines.as_array())
            .into_iter()
            .flatten();
        let bytes = bytes.map(|line| 1 + line.as_str().map_or(0, str::len));
        let bytes: usize = bytes.sum();
        self.rates.charge(client.uid, bytes as u64 / BYTES, now);
        let threads = request.parameters.as_ref().and_then(|all| {
            let threads = all.get("request")?.get("threads")?;
            Some(threads.as_array()?.len())
        });
        self.rates
            .charge(client.uid, threads.unwrap_or(0) as u64, now);
        let method = request.method.rsplit('.').next();
        let dear = match method {
            Some("List" | "Who") => DEAR,
            Some("Explain") => DEARER,
            _ => 0,
        };
        self.rates.charge(client.uid, dear, now);
    }

    fn drop_connection(&mut self, id: ConnectionId, why: Option<End>) {
        if let Some(connection) = self.connections.remove(&id) {
            let client = &connection.client;
            if let Some(end) = why.filter(|end| *end != End::Closed)
                && let Some(more) = self.complaints.take(client.uid, now().0)
            {
                let words = end.words();
                log::warn!("process {} of user {}: {words}", client.pid, client.uid);
                if more > 0 {
                    log::warn!("user {}: {more} more connections were left", client.uid);
                }
            }
        }
        self.room.remove(id);
        self.paused.remove(&id);
        self.blocked.remove(&id);
        self.ready.remove(&id);
        if self.is_due() {
            self.gone.push(id);
        } else {
            // What it held is there for whoever has asked since.
            self.service.gone(id, now());
        }
    }

    /// When the journal is tried again, if it could not be written.
    fn tries_again(&self) -> Option<u64> {
        self.journal.as_ref()?.due(&self.service)
    }

    /// Writes what has changed, and answers.
    fn settle(&mut self) {
        loop {
            // Their leases end after what is due: somebody may have renewed in time.
            if !self.is_due()
                && let Some(ended) = self.threads.take()
            {
                self.service.threads_ended(&ended, now());
            }
            let mut output = self.service.take();
            let tries = self.tries_again().is_some_and(|at| at <= now().0);
            let nothing = output.entries.is_empty() && output.answers.is_empty();
            if nothing && output.records.is_empty() && !tries {
                return;
            }
            self.threads.follow(&self.service, &output.entries);
            let time = now();
            if let Some(journal) = &mut self.journal {
                journal.commit(&mut self.service, &mut output, time);
                if self.service.stuck().is_some() {
                    self.threads.follow_all(&self.service);
                }
                self.threads.follow(&self.service, &output.entries);
            }
            self.host.switch_watchdog(&mut self.service, time);
            if let Some(broker) = &mut self.broker {
                broker.follow(&self.service, &output.changed, now().0);
            }
            self.hear();
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
                self.weigh(to);
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
                self.listen(id, false);
            }
            Err(end) => {
                ended.insert(id, end);
            }
        }
    }
}

#[cfg(test)]
#[path = "event_loop/tests.rs"]
mod tests;
