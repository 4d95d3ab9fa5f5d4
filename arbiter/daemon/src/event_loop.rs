//! The one thread: what it waits for, and what it does in a turn.

mod desk;
mod doors;
mod held;
mod reload;
mod start;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::PoisonError;
use std::time::Duration;

use arbiter_host::{BootTime, Lease};
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::time::{ClockId, clock_gettime};
use umpire_service::{Accepted, ClientSocket, Happened};
use varlink::Request;

use crate::broker::{Broker, Turn};
use crate::connections::{Complaints, Connection, End, MOST_CALLS, Rates, Table};
use crate::manager::Manager;
use crate::metrics::InUse;
use crate::peer::Client;
use crate::probe::Sights;
use crate::room::Room;
use crate::scrape::Scrapers;
use crate::service::{Answer, Called, ConnectionId, Method};
use desk::Desk;
use doors::{BATCH, Doors};
use held::{HeldBack, Holding};
use reload::{FileSaid, Reloads};
pub use start::ServeError;
pub(crate) use start::failed;
use turns::Turns;

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const HANGUP: u64 = 2;
const SIGHTS: u64 = 3;
const METRICS: u64 = 4;
const EVENTS: u64 = 5;
const OPENED: u64 = 6;
const THREADS: u64 = 7;
const REREAD: u64 = 8;
const GROUPS: u64 = 9;
const FIRST: u64 = 10;
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
/// So long the service goes on at its end, in nanoseconds, if events are being stopped.
const LONGEST_END: u64 = 1_000_000_000;
/// No wait is longer, in nanoseconds: a host that was suspended has waited for less than
/// has passed.
const LONGEST_WAIT: u64 = 1_000_000_000;

/// The service, ready to run.
#[derive(Debug)]
pub struct Arbiterd {
    desk: Desk,
    doors: Doors,
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
    scrapers: Option<Scrapers>,
    broker: Option<Broker>,
    connections: Table,
    next: u64,
    rates: Rates,
    /// Renewals do not wait behind other calls of their user.
    renewals: Rates,
    room: Room,
    complaints: Complaints,
    turns: Turns,
    /// Something was seen to be due at that time, and whether all that had come by then was
    /// looked at.
    held: Option<(BootTime, bool)>,
    /// For once, all are served, whatever is due.
    is_free: bool,
    /// Answers that wait for another's events to be stopped.
    held_back: HeldBack,
    /// Connections that have ended; what they held is given to others when nothing is due.
    gone: Vec<ConnectionId>,
}

/// Now, in nanoseconds since the host was booted.
pub(crate) fn now() -> BootTime {
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
    /// Whether those who want to connect are reported.
    fn watch_incoming(&self, on: bool) -> io::Result<()> {
        let metrics = self.scrapers.as_ref().map(|all| (all.as_fd(), METRICS));
        let events = self.broker.as_ref().map(|all| (all.as_fd(), EVENTS));
        let all = [(self.doors.as_fd(), LISTENER)].into_iter();
        for (fd, token) in all.chain(metrics).chain(events) {
            if on {
                self.doors.watch(fd, token)?;
            } else {
                self.doors.poll().forget(&fd);
            }
        }
        Ok(())
    }

    /// Nobody can be accepted for want of descriptors: that is tried again later.
    fn pause_incoming(&mut self, error: &io::Error) {
        self.doors.pause(error, now().0);
        let _ = self.watch_incoming(false);
    }

    /// Serves until SIGTERM or SIGINT.
    ///
    /// # Errors
    /// The kernel did not do what it always does.
    pub fn run(mut self) -> Result<(), ServeError> {
        self.manager.tell("READY=1\nSTATUS=Serves.");
        self.settle();
        let ended = self.serve_until_told();
        self.finish_stops();
        self.manager.tell_and_wait("STOPPING=1\nSTATUS=Ends.");
        if self.desk.end() {
            self.doors.leave_name();
        }
        ended
    }

    /// What is to be stopped is, and whoever has waited for it is told, before nobody is left who
    /// would do it.
    fn finish_stops(&mut self) {
        let until = now().0.saturating_add(LONGEST_END);
        while let Some(broker) = self.broker.as_ref().filter(|broker| !broker.is_idle()) {
            let left = until.saturating_sub(now().0);
            if left == 0 {
                log::warn!("the kernel has not stopped all lost events yet");
                break;
            }
            let mut bell = [PollFd::from_borrowed_fd(broker.opened_fd(), PollFlags::IN)];
            // Where no thread could be started, that is tried again.
            let left = left.min(HOLD);
            let left = Timespec::try_from(Duration::from_nanos(left)).unwrap_or_default();
            let _ = poll(&mut bell, Some(&left));
            self.hand_over();
            self.settle();
        }
    }

    fn serve_until_told(&mut self) -> Result<(), ServeError> {
        loop {
            let all_that_came = self.wait()?;
            let mut all = all_that_came.len() < BATCH;
            let goes_on = all_that_came.iter().all(|one| one.token != STOP);
            for Happened { token, gone } in all_that_came {
                all &= self.hear(token, gone);
            }
            self.resume();
            all &= self.serve();
            self.manager.beat(now().0);
            self.advance(all);
            if self.desk.due() <= now().0 && !self.is_due() {
                self.desk.look(now());
                self.look_at_events();
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

    /// Hears what has come, and leaves calls for those who are served. Whether nobody was left
    /// who wants to connect.
    fn hear(&mut self, token: u64, gone: bool) -> bool {
        match token {
            LISTENER => return self.accept(),
            STOP => {}
            // They are reported again.
            HANGUP | REREAD | SIGHTS if self.is_due() => {}
            HANGUP => self.reload(),
            REREAD => self.take_configuration(),
            SIGHTS => self.see(),
            THREADS => self.desk.hear_threads(),
            GROUPS => self.desk.hear_groups(now()),
            METRICS => self.accept_scrapers(),
            scraper if self.scrapers.as_ref().is_some_and(|all| all.has(scraper)) => {
                self.scrape(scraper);
            }
            EVENTS => self.accept_holders(),
            // All that are open by now are handed over after those who have come are served.
            OPENED => {}
            holder if self.broker.as_ref().is_some_and(|all| all.has(holder)) => {
                if gone {
                    self.leave_holder(holder);
                } else {
                    self.turns.add(ConnectionId(holder));
                }
            }
            // Both directions are closed, whatever it has sent before.
            connection if gone => self.drop_connection(ConnectionId(connection), None),
            connection => self.turns.add(ConnectionId(connection)),
        }
        true
    }

    fn wait(&self) -> Result<Vec<Happened>, ServeError> {
        let now = now().0;
        let due = self.desk.service().arbiter().deadline().map(|due| due.0);
        let due = due
            .into_iter()
            .chain(self.turns.due())
            .chain(self.doors.due())
            .chain([self.desk.due()])
            .chain(self.manager.due())
            .chain(self.scrapers.as_ref().and_then(Scrapers::due))
            .chain(self.broker.as_ref().and_then(Broker::due))
            .min();
        let nobody_is_ready = self.turns.ready().next().is_none();
        let rests = nobody_is_ready && self.held.is_none() && self.gone.is_empty();
        let most = match (rests, due) {
            (false, _) => Some(0),
            (true, due) => {
                let tries = self.desk.tries_again();
                let due = due.into_iter().chain(tries).min();
                due.map(|due| due.saturating_sub(now).min(LONGEST_WAIT))
            }
        };
        self.doors.wait(most).map_err(failed("epoll"))
    }

    /// Whether something is due that has not been done, so that only such calls are answered as
    /// do not wait for it: who renews a lease is read before the lease ends.
    fn is_due(&self) -> bool {
        let due = self.desk.service().arbiter().deadline();
        !self.is_free && due.is_some_and(|due| due <= now())
    }

    /// Whether somebody has sent more calls that do not wait for what is due.
    fn has_more_to_answer(&self) -> bool {
        let ready = self.turns.ready();
        let ready = ready.filter_map(|id| self.connections.get(&id));
        let mut next = ready.filter_map(Connection::next_method);
        next.any(|method| Called::of(&method).waits_for_nothing())
    }

    /// Does what is due, but nothing before all that had come by then was read. `all`: that was
    /// all that can be read now.
    fn advance(&mut self, all: bool) {
        self.is_free = false;
        self.desk.service_mut().hold_due(None);
        if !self.is_due() {
            self.held = None;
            self.desk.service_mut().advance(now());
        } else if let Some((since, read)) = self.held {
            let read = read || all;
            let held = now().0.saturating_sub(since.0);
            let done = read && (held >= HOLD || !self.has_more_to_answer());
            if !done && held < LONGEST_HOLD {
                self.held = Some((since, read));
                return;
            }
            self.held = None;
            self.desk.service_mut().advance(since);
            // Others have their turn, however much is due all the time. What has become due since
            // waits for those who have renewed since, and were not read yet.
            self.is_free = true;
            self.desk.service_mut().hold_due(Some(since));
        } else {
            self.held = Some((now(), false));
            self.doors.count_anew();
        }
        if !self.is_due() {
            for id in std::mem::take(&mut self.gone) {
                self.desk.service_mut().gone(id, now());
            }
        }
    }

    /// Takes over what the probe has seen.
    fn see(&mut self) {
        match self.looked.read(&mut [0; 64]) {
            // Nobody looks any more, or ever did.
            Ok(0) => {
                self.doors.poll().forget(&self.looked);
            }
            _ => {
                if let Some(sights) = &self.sights {
                    let mut sight = sights.lock().unwrap_or_else(PoisonError::into_inner);
                    let (places, holders) =
                        (std::mem::take(&mut sight.places), sight.holders.clone());
                    drop(sight);
                    self.desk.service_mut().see(&places, holders, now());
                }
            }
        }
    }

    /// Accepts connections, a few. Whether that were all, or all that had come by the time from
    /// which on something is held.
    fn accept(&mut self) -> bool {
        for _ in 0..ACCEPTS {
            let socket = match self.doors.accept() {
                Accepted::Client(socket) => socket,
                Accepted::Nobody => return true,
                Accepted::Gone => continue,
                Accepted::Full(error) => {
                    self.pause_incoming(&error);
                    return true;
                }
            };
            let config = self.desk.service().config();
            let Ok(client) = Client::of(&socket, config.named_groups()) else {
                continue;
            };
            self.admit(socket, client);
        }
        self.doors.has_accepted_all()
    }

    fn admit(&mut self, mut socket: ClientSocket, client: Client) {
        let own = self.connections.values();
        let own = own.filter(|other| other.client().uid == client.uid).count();
        let stranger = self.desk.service().config().is_stranger(&client);
        let most = self.desk.service().config().connections_per_user;
        if own >= most || socket.is_overdrawn() || stranger && !self.has_place(client.uid) {
            log::debug!(
                "user {} has too many connections; one was closed",
                client.uid
            );
            self.desk.service().metrics().connection_refused();
            return;
        }
        socket.refuse_rights();
        // What the client does not read waits in this process, where it is counted.
        let _ = set_socket_send_buffer_size(&socket, SEND_BUFFER);
        let id = ConnectionId(self.next);
        let watched = socket.watch(self.doors.poll(), id.0, EventFlags::IN);
        if watched.is_ok() {
            self.next += 1;
            self.room.add(id, client.uid, stranger);
            self.connections.insert(id, Connection::new(socket, client));
            // It may have said something already.
            self.turns.add(id);
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
        if self.doors.resume(now) {
            let _ = self.watch_incoming(true);
            self.accept();
        }
        for id in self.turns.resume_due(now) {
            self.listen(id, true);
        }
    }

    /// Whether what a connection sends is reported. Its end always is.
    fn listen(&self, id: ConnectionId, on: bool) {
        let connection = self.connections.get(&id);
        let connection = connection.map(Connection::socket);
        let broker = self.broker.as_ref();
        if let Some(socket) = connection.or_else(|| broker?.socket(id.0)) {
            socket.listen(id.0, self.turns.reported(id, on));
        }
    }

    /// What it sends on stays with the kernel until then.
    fn pause(&mut self, id: ConnectionId, until: u64) {
        self.turns.pause(id, until);
        self.listen(id, false);
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
                .map(|connection| connection.client().uid);
            let user = user.or_else(|| self.broker.as_ref()?.user(id.0));
            self.rates.used(user.unwrap_or_default(), begun)
        };
        let ready = self.turns.ready().map(|id| (used(&id), id));
        let mut ready: Vec<(u64, ConnectionId)> = ready.collect();
        ready.sort_unstable();
        for (_, id) in ready {
            let is_late = now().0.saturating_sub(begun) >= SLICE;
            if is_late && self.held.is_none() {
                return false;
            }
            if self.connections.contains_key(&id) {
                self.turns.begin(id);
                self.serve_connection(id, begun.saturating_add(SLICE));
            } else if !is_late {
                self.turns.begin(id);
                self.broker(id.0);
            }
        }
        true
    }

    fn serve_connection(&mut self, id: ConnectionId, until: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        if connection.has_unsent()
            && let Err(end) = self.flush(id)
        {
            return self.drop_connection(id, Some(end));
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
            let now = now().0;
            let method = connection.next_method();
            let called = method.as_deref().map(Called::of);
            let renews = called == Some(Called::Own(Ok(Method::Renew)));
            // Of replies that it cannot have yet there are not more and more.
            if self.desk.service().is_busy(id) || self.held_back.is_full(id, renews) {
                // It goes on when it has its reply.
                self.pause(id, u64::MAX);
                return Ok(());
            }
            let waits = !called.is_some_and(Called::waits_for_nothing);
            if now >= until && !renews || waits && is_due {
                break;
            }
            let rates = if renews {
                &mut self.renewals
            } else {
                &mut self.rates
            };
            if let Err(until) = rates.take(connection.client().uid, now) {
                self.pause(id, until);
                return Ok(());
            }
            let Some(request) = connection.next()? else {
                return Ok(());
            };
            let client = connection.client().clone();
            self.charge(&client, &request, now);
            self.desk
                .service_mut()
                .call(id, &client, &request, BootTime(now));
            let looks = self.desk.service_mut().take_looks();
            self.rates.charge(client.uid, looks, now);
            if self.desk.service().waiting_bytes() > MOST_ANSWERS {
                self.settle();
            }
        }
        self.turns.add(id);
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
            Some("List" | "Groups" | "Who") => DEAR,
            Some("Explain") => DEARER,
            _ => 0,
        };
        self.rates.charge(client.uid, dear, now);
    }

    fn drop_connection(&mut self, id: ConnectionId, why: Option<End>) {
        if let Some(connection) = self.connections.remove(&id) {
            let client = connection.client();
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
        self.turns.forget(id);
        if self.is_due() {
            self.gone.push(id);
        } else {
            // What it held is there for whoever has asked since.
            self.desk.service_mut().gone(id, now());
        }
    }

    /// Writes what has changed, and answers.
    fn settle(&mut self) {
        if !self.held_back.is_empty() {
            self.send_free();
        }
        while let Some(mut output) = self.desk.settle(self.is_due(), now()) {
            if let Some(broker) = &mut self.broker {
                broker.follow(self.desk.service(), output.changed(), now().0);
            }
            self.hear_of_events();
            if !self.desk.audit(output.take_records()) {
                output.unaudited();
            }
            let order = self.broker.as_ref().map_or(0, Broker::last_order);
            let arbiter = self.desk.service().arbiter();
            let holding = |lease: &Lease| Holding {
                holds: lease.holds,
                keeps: lease
                    .departure
                    .map_or(lease.holds, |departure| departure.to),
            };
            let changed = output.changed().iter();
            let changed = changed.map(|id| (*id, arbiter.lease(*id).map(holding)));
            let changed = changed.collect();
            self.held_back.add(output.take_answers(), changed, order);
            self.send_free();
        }
    }

    /// Sends what may be told by now.
    fn send_free(&mut self) {
        let arbiter = self.desk.service().arbiter();
        let stopping = self.broker.as_ref();
        let stopping = stopping.map(|broker| broker.being_stopped(arbiter));
        let stopping = stopping.unwrap_or_default();
        let answers = self.held_back.take(|growth| {
            let terms = arbiter.lease(growth.lease).map(|lease| &lease.terms);
            terms.is_some_and(|terms| {
                stopping.iter().any(|((pmu, cpu), first)| {
                    *first <= growth.order
                        && terms.demands.iter().any(|demand| demand.pmu == *pmu)
                        && cpu.is_none_or(|cpu| terms.cpus.contains(cpu))
                })
            })
        });
        self.send(&answers);
    }

    fn send(&mut self, answers: &[Answer]) {
        let mut ended = BTreeMap::new();
        for answer in answers {
            if let Some(connection) = self.connections.get_mut(&answer.to)
                && let Err(end) = connection.reply(&answer.reply)
            {
                ended.insert(answer.to, end);
            }
        }
        let told: BTreeSet<ConnectionId> = answers.iter().map(|answer| answer.to).collect();
        for to in told {
            if let Err(end) = self.flush(to) {
                ended.insert(to, end);
            }
            self.weigh(to);
            // It may have sent its next call while this one waited.
            if self.connections.get(&to).is_some_and(Connection::has_call) {
                if self.turns.resume(to) {
                    self.listen(to, true);
                }
                self.turns.add(to);
            }
        }
        for (id, end) in ended {
            self.drop_connection(id, Some(end));
        }
    }

    /// Sends what waits for a connection; the rest when it can be sent.
    fn flush(&mut self, id: ConnectionId) -> Result<(), End> {
        let Some(connection) = self.connections.get_mut(&id) else {
            return Ok(());
        };
        let blocked = connection.flush()?;
        let changed = self.turns.set_blocked(id, blocked);
        if blocked || changed {
            self.listen(id, !blocked && !self.turns.is_paused(id));
        }
        Ok(())
    }

    // What is served beside the varlink socket: events of holders, and metrics.

    fn accept_holders(&mut self) {
        for _ in 0..ACCEPTS {
            let Some(broker) = &mut self.broker else {
                return;
            };
            let socket = match broker.accept() {
                Accepted::Client(socket) => socket,
                Accepted::Nobody => return,
                Accepted::Gone => continue,
                Accepted::Full(error) => return self.pause_incoming(&error),
            };
            if !broker.admit(self.next, socket, self.desk.service().config()) {
                self.desk.service().metrics().connection_refused();
                continue;
            }
            if broker.watch(self.next, self.doors.poll()).is_err() {
                broker.leave(self.next);
            }
            self.next += 1;
        }
    }

    /// Opens events for who asks: a few, before others have their turn.
    fn broker(&mut self, id: u64) {
        for _ in 0..MOST_CALLS {
            let Some(broker) = &mut self.broker else {
                return;
            };
            let Some(user) = broker.user(id) else {
                return;
            };
            if let Err(until) = self.rates.take(user, now().0) {
                return self.pause(ConnectionId(id), until);
            }
            let turn = broker.turn(id, self.desk.service(), now().0);
            self.rates.charge(user, broker.take_looks(), now().0);
            self.hear_of_events();
            match turn {
                Turn::Answered => {}
                Turn::Quiet => return,
                // It has one request at a time.
                Turn::Opens => return self.listen(ConnectionId(id), false),
                Turn::Ended => return self.leave_holder(id),
            }
        }
    }

    /// Hands over the events that the kernel has opened meanwhile.
    fn hand_over(&mut self) {
        if self.broker.is_some() {
            // What is lost by now is being stopped first.
            self.settle();
        }
        let Some(broker) = &mut self.broker else {
            return;
        };
        let go_on = broker.opened(self.desk.service(), now().0);
        self.hear_of_events();
        for id in go_on {
            // What it has sent since is there, and is reported.
            self.listen(ConnectionId(id), true);
        }
    }

    /// Looks whether events that were stopped run again.
    fn look_at_events(&mut self) {
        if let Some(broker) = &mut self.broker {
            let forgiven = self.desk.service_mut().take_forgiven();
            broker.look(&forgiven, now().0);
        }
        self.hear_of_events();
    }

    /// The service hears what has become of events.
    fn hear_of_events(&mut self) {
        let told = self.broker.as_mut().map(Broker::take_told);
        for told in told.into_iter().flatten() {
            self.desk.service_mut().hear(told);
        }
    }

    fn leave_holder(&mut self, id: u64) {
        self.turns.forget(ConnectionId(id));
        if let Some(broker) = &mut self.broker {
            broker.leave(id);
        }
    }

    fn accept_scrapers(&mut self) {
        for _ in 0..ACCEPTS {
            let Some(scrapers) = &mut self.scrapers else {
                return;
            };
            let socket = match scrapers.accept() {
                Accepted::Client(socket) => socket,
                Accepted::Nobody => return,
                Accepted::Gone => continue,
                Accepted::Full(error) => return self.pause_incoming(&error),
            };
            let id = self.next;
            match scrapers.admit(id, socket, now().0, self.doors.poll()) {
                Ok(true) => {
                    self.next += 1;
                    self.scrape(id);
                }
                Ok(false) => self.desk.service().metrics().connection_refused(),
                Err(error) => return self.pause_incoming(&error),
            }
        }
    }

    /// Goes on with who asks for the metrics.
    fn scrape(&mut self, id: u64) {
        let open = InUse {
            varlink: self.connections.len(),
            metrics: self.scrapers.as_ref().map_or(0, Scrapers::len),
            events: self.broker.as_ref().map_or(0, Broker::connections),
            descriptors: self.broker.as_ref().map_or(0, Broker::descriptors),
        };
        let Some(scrapers) = &mut self.scrapers else {
            return;
        };
        let service = self.desk.service_mut();
        scrapers.turn(id, now().0, || service.render(open));
    }
    // The configuration, read again at SIGHUP.

    /// The file is to be read again.
    fn reload(&mut self) {
        // However many signals there were.
        let _ = self.hangup.read(&mut [0; 64]);
        self.manager.reloads();
        let root = self.desk.service().config().root.clone();
        if let Err(why) = self.reloads.begin(root) {
            self.reloaded(Err(why));
        }
    }

    /// Takes over what the file says, when it was read.
    fn take_configuration(&mut self) {
        let root = self.desk.service().config().root.clone();
        let Some(said) = self.reloads.take(root) else {
            return;
        };
        let taken = said.and_then(|config| {
            let service = self.desk.service_mut();
            service.reload((*config).clone(), now())?;
            Ok(config)
        });
        self.reloaded(taken);
    }

    fn reloaded(&mut self, taken: FileSaid) {
        let file = self.reloads.file().unwrap_or(Path::new("")).to_owned();
        let service = self.desk.service_mut();
        service.reloaded(&file, taken.as_ref().err());
        match taken {
            Ok(config) => {
                let file = file.display();
                log::info!("{file}: read again");
                let later = self.reloads.taken(config);
                if !later.is_empty() {
                    log::warn!("{file}: what has changed in {later} counts from the next start on");
                }
                self.desk.follow_config(now());
                let config = self.desk.service().config();
                for (id, connection) in &mut self.connections {
                    connection.look_at_groups(config.named_groups());
                    let stranger = config.is_stranger(connection.client());
                    self.room.add(*id, connection.client().uid, stranger);
                }
                if let Some(broker) = &mut self.broker {
                    broker.look_at_groups(config);
                }
                self.manager
                    .tell("READY=1\nSTATUS=Serves; the configuration was read again.");
            }
            Err(error) => {
                log::error!("{error}; the rules stay as they were");
                self.manager.tell(&format!(
                    "READY=1\nSTATUS=Serves by the rules of before: the reload failed: {}",
                    error.replace('\n', " ")
                ));
            }
        }
    }
}

#[cfg(test)]
#[path = "event_loop/tests.rs"]
mod tests;
