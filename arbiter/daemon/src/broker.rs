//! The companion socket, at which holders of leases get perf events that the arbiter opens
//! for them: one request in JSON, one reply with a descriptor (`SCM_RIGHTS`). And the
//! events that were handed over: a descriptor cannot be taken back, so the arbiter keeps
//! its own of the same event, by which it stops the event when the lease is lost, and looks
//! whether somebody starts it again, for as long as there is something that it could count.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use arbiter::host::LeaseId;
use rustix::event::epoll::EventFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use umpire_budget::{Handed, NotMeasured};
use umpire_lease::{EventReply, EventRequest, Refusal};
use umpire_socket::{Access, ClientSocket, Closer, Kind, Listener, SocketError, Wording};

use crate::connections::is_passing;
use crate::peer::{self, Client, Started};
use crate::service::{Allowed, Service};

/// No request is longer.
const MOST_REQUEST: usize = 4096;
/// Most events of a user, and most that it has lost and that are still looked at.
const MOST_EVENTS: usize = 1024;
const MOST_LOST: usize = 4096;
/// Of the room for lost events a user has one part in so many at most.
const SHARE_OF_USER: usize = 4;
/// Most lost events that are looked at in one go.
const LOOKS_AT: usize = 2048;
/// How long the kernel may take to open an event.
const OPENS: Duration = Duration::from_millis(100);
/// So often it is looked whether there is still something that a lost event could count, in
/// nanoseconds; so long each is looked at in any case.
const LIVES: u64 = 60_000_000_000;

const WORDING: Wording = Wording {
    option: "--socket",
    server: "arbiter",
};

/// The companion socket of `socket`.
fn companion(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".events");
    path.into()
}

/// Who is connected.
#[derive(Debug)]
struct Holder {
    socket: ClientSocket,
    client: Client,
    /// The process itself, where the kernel names it so.
    process: Option<OwnedFd>,
}

/// An event that somebody has.
#[derive(Debug)]
struct Open {
    allowed: Allowed,
    event: Handed,
    uid: u32,
    pid: u32,
    /// The thread that it counts, or the process that asked for one of a whole CPU.
    life: (u32, Option<Started>),
}

/// An event that somebody should not use any more.
#[derive(Debug)]
struct Lost {
    open: Open,
    enabled: Option<Duration>,
    since: u64,
    /// Nobody asks before whether there is something left that it could count.
    until: u64,
}

impl Lost {
    /// Whether there is nothing left that it could count.
    fn is_over(&self) -> bool {
        let (thread, started) = self.open.life;
        started.is_none() || peer::started(thread) != started
    }
}

/// Most lost events that are looked at.
#[derive(Clone, Copy, Debug)]
struct Most {
    of_user: usize,
    of_all: usize,
}

impl Most {
    fn of(of_all: usize) -> Self {
        Most {
            // One user cannot take the room of all others.
            of_user: MOST_LOST.min(of_all / SHARE_OF_USER),
            of_all,
        }
    }
}

/// Makes room for one more event of a user among those that were lost: the one that was lost
/// first goes, if that is long ago. `false`: there is none.
fn make_room(lost: &mut VecDeque<Lost>, most: Most, uid: u32, now: u64) -> bool {
    let own = |one: &Lost| one.open.uid == uid;
    let of_user = lost.iter().filter(|one| own(one)).count();
    if of_user < most.of_user && lost.len() < most.of_all {
        return true;
    }
    let old = |one: &Lost| own(one) && one.since.saturating_add(LIVES) <= now;
    let all = lost.iter().enumerate().filter(|(_, one)| old(one));
    let Some((first, _)) = all.min_by_key(|(_, one)| one.since) else {
        return false;
    };
    if let Some(gone) = lost.remove(first) {
        let lease = gone.open.allowed.lease.0;
        log::warn!(
            "user {uid} has lost {of_user} events whose threads still run; the first of them, of \
             lease {lease}, is not looked at any more"
        );
    }
    true
}

/// The socket, and what was handed over.
#[derive(Debug)]
pub(crate) struct Broker {
    listener: Listener,
    holders: BTreeMap<u64, Holder>,
    open: BTreeMap<LeaseId, Vec<Open>>,
    /// Those that were looked at last are at the end.
    lost: VecDeque<Lost>,
    most_lost: usize,
    /// Users for whom an event is being opened.
    slow: Arc<Mutex<BTreeSet<u32>>>,
}

/// What became of a connection's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It has said nothing more.
    Quiet,
    /// It was answered, and may have said more.
    Answered,
    /// It is gone, or was left.
    Ended,
}

impl Broker {
    /// `files`: the most that this process may have open.
    ///
    /// # Errors
    /// The socket cannot be had.
    pub(crate) fn listen(
        socket: &Path,
        access: &Access,
        files: u64,
        closer: &Closer,
    ) -> Result<Self, SocketError> {
        let path = companion(socket);
        Ok(Broker {
            listener: Listener::new(&path, Kind::Packets, access, WORDING, closer)?,
            holders: BTreeMap::new(),
            open: BTreeMap::new(),
            lost: VecDeque::new(),
            most_lost: usize::try_from(files / 2).unwrap_or(usize::MAX),
            slow: Arc::default(),
        })
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    pub(crate) fn connections(&self) -> usize {
        self.holders.len()
    }

    pub(crate) fn descriptors(&self) -> usize {
        self.open.values().map(Vec::len).sum()
    }

    pub(crate) fn has(&self, id: u64) -> bool {
        self.holders.contains_key(&id)
    }

    pub(crate) fn socket(&self, id: u64) -> Option<&ClientSocket> {
        self.holders.get(&id).map(|holder| &holder.socket)
    }

    /// Has a connection reported.
    pub(crate) fn watch(&mut self, id: u64, epoll: &Arc<OwnedFd>) -> io::Result<()> {
        let Some(holder) = self.holders.get_mut(&id) else {
            return Ok(());
        };
        holder.socket.watch(epoll, id, EventFlags::IN)
    }

    /// Whose connection it is.
    pub(crate) fn user(&self, id: u64) -> Option<u32> {
        self.holders.get(&id).map(|holder| holder.client.uid)
    }

    /// Accepts a connection. `false`: its user has too many, or it is gone.
    ///
    /// # Errors
    /// Nobody waits to be accepted, or there is no descriptor.
    pub(crate) fn accept(&mut self, id: u64, most: usize) -> io::Result<bool> {
        let socket = self.listener.accept()?;
        let (Ok(client), Ok(process)) = (Client::of(&socket), peer::process(&socket)) else {
            return Ok(false);
        };
        let own = self.holders.values();
        let own = own.filter(|other| other.client.uid == client.uid).count();
        if own >= most || socket.is_overdrawn() {
            return Ok(false);
        }
        socket.refuse_rights();
        let holder = Holder {
            socket,
            client,
            process,
        };
        self.holders.insert(id, holder);
        Ok(true)
    }

    pub(crate) fn leave(&mut self, id: u64) {
        self.holders.remove(&id);
    }

    /// Answers one request of a connection.
    pub(crate) fn turn(&mut self, id: u64, service: &mut Service, now: u64) -> Turn {
        let Some(holder) = self.holders.get(&id) else {
            return Turn::Ended;
        };
        let mut bytes = [0; MOST_REQUEST];
        let request = match holder.socket.receive(&mut bytes) {
            // Nobody sends descriptors here.
            Ok(got) if got.bytes == 0 || !got.rights.is_empty() || got.cut => return Turn::Ended,
            // One that is cut is none.
            Ok(got) => bytes.get(..got.bytes).unwrap_or_default(),
            Err(error) if is_passing(&error) => return Turn::Quiet,
            Err(_) => return Turn::Ended,
        };
        let Ok(request) = serde_json::from_slice::<EventRequest>(request) else {
            let why = "this is no request for an event: one JSON object with lease and counter";
            let refused = service.not_opened(&holder.client, "wrong-request", why);
            return holder.reply(&refused.into(), None);
        };
        let room = make_room(
            &mut self.lost,
            Most::of(self.most_lost),
            holder.client.uid,
            now,
        );
        let opened = service
            .allow(&holder.client, &request)
            .map_err(|refusal| *refusal)
            .and_then(|allowed| self.opened(holder, allowed, room, service));
        let open = match opened {
            Ok(open) => open,
            Err(refused) => return holder.reply(&refused.into(), None),
        };
        service.handed(&holder.client, &open.allowed);
        // Who asks again for the same has the new event instead of the old one.
        let lease = open.allowed.lease;
        let same = |other: &mut Open| {
            let (a, b) = (&other.allowed, &open.allowed);
            // One without a CPU, or without a thread, counts on each.
            let meet = |a: Option<u32>, b: Option<u32>| a.is_none() || b.is_none() || a == b;
            a.counter == b.counter
                && meet(a.event.thread, b.event.thread)
                && meet(a.event.cpu, b.event.cpu)
        };
        let of_lease = self.open.entry(lease).or_default();
        let replaced: Vec<Open> = of_lease.extract_if(.., same).collect();
        of_lease.push(open);
        self.lose(replaced, service, now);
        let handed = self.open.get(&lease).and_then(|events| events.last());
        match self.holders.get(&id).zip(handed) {
            None => Turn::Ended,
            Some((holder, open)) => {
                let reply = EventReply {
                    counter: Some(request.counter),
                    refused: None,
                };
                holder.reply(&reply, Some(open.event.as_fd()))
            }
        }
    }

    fn opened(
        &self,
        holder: &Holder,
        allowed: Allowed,
        room: bool,
        service: &mut Service,
    ) -> Result<Open, Refusal> {
        let client = &holder.client;
        let own = self.open.values().flatten();
        if own.filter(|open| open.uid == client.uid).count() >= MOST_EVENTS {
            let why = format!("this user has {MOST_EVENTS} events; give a lease back first");
            return Err(service.not_opened(client, "too-many-events", &why));
        }
        if !room {
            let why = "too many events of this user were lost within a minute, and their threads \
                       still run; try again in a minute";
            return Err(service.not_opened(client, "too-many-events", why));
        }
        let thread = allowed.event.thread;
        let before = thread.map(|thread| peer::thread(thread, client));
        let foreign = "the thread is not one of the process that asks";
        if before == Some(None) || !holder.is_there() {
            return Err(service.not_opened(client, "foreign-thread", foreign));
        }
        let event = self.open_in_time(&allowed, client).map_err(|why| {
            let why = format!("the kernel does not open the event: {why}");
            service.not_opened(client, "not-opened", &why)
        })?;
        // The number may have become another thread's between the look and the opening.
        if thread.map(|thread| peer::thread(thread, client)) != before || !holder.is_there() {
            return Err(service.not_opened(client, "foreign-thread", foreign));
        }
        let counts = thread.filter(|_| before.is_some()).unwrap_or(client.pid);
        Ok(Open {
            allowed,
            event,
            uid: client.uid,
            pid: client.pid,
            life: (counts, before.flatten().or_else(|| peer::started(counts))),
        })
    }

    /// Opens an event on a thread of its own: the kernel waits there for as long as the other
    /// process is in `execve`, which may be for ever.
    fn open_in_time(&self, allowed: &Allowed, client: &Client) -> Result<Handed, String> {
        let (slow, uid) = (self.slow.clone(), client.uid);
        if !lock(&slow).insert(uid) {
            return Err("an event for this user is being opened still; try again".to_owned());
        }
        let (send, opened) = channel();
        let event = allowed.event;
        let body = move || {
            let opened = Handed::open(&event);
            lock(&slow).remove(&uid);
            // Nobody may wait for it any more: then it is closed.
            let _ = send.send(opened);
        };
        if let Err(error) = Builder::new().name("open-event".to_owned()).spawn(body) {
            lock(&self.slow).remove(&uid);
            return Err(format!("there is no thread for it: {error}"));
        }
        match opened.recv_timeout(OPENS) {
            Ok(opened) => opened.map_err(|errno| NotMeasured::from(errno).to_string()),
            Err(_) => Err("the process of the thread is being replaced; try again".to_owned()),
        }
    }

    /// Stops what leases do not hold any more, before somebody else is told that it has it.
    pub(crate) fn follow(&mut self, service: &mut Service, changed: &[LeaseId], now: u64) {
        for id in changed {
            let Some(events) = self.open.get_mut(id) else {
                continue;
            };
            let holds = service.arbiter().lease(*id).map_or(0, |lease| lease.holds);
            let lost: Vec<Open> = events
                .extract_if(.., |open| open.allowed.counter >= holds)
                .collect();
            if events.is_empty() {
                self.open.remove(id);
            }
            self.lose(lost, service, now);
        }
    }

    fn lose(&mut self, events: Vec<Open>, service: &mut Service, now: u64) {
        for open in events {
            if let Err(error) = open.event.disable() {
                log::error!(
                    "an event of lease {} runs on: {error}",
                    open.allowed.lease.0
                );
            }
            service.disabled(open.uid, open.pid, &open.allowed);
            let enabled = open.event.enabled().ok().flatten();
            self.lost.push_back(Lost {
                open,
                enabled,
                since: now,
                until: now.saturating_add(LIVES),
            });
        }
    }

    /// Looks whether what was stopped runs again, and stops it.
    pub(crate) fn look(&mut self, service: &mut Service, now: u64) {
        for _ in 0..self.lost.len().min(LOOKS_AT) {
            let Some(mut lost) = self.lost.pop_front() else {
                return;
            };
            let Lost { open, enabled, .. } = &mut lost;
            let is = open.event.enabled().ok().flatten();
            if is > *enabled {
                let _ = open.event.disable();
                *enabled = open.event.enabled().ok().flatten();
                service.reenabled(open.uid, open.pid, &open.allowed);
                lost.until = now.saturating_add(LIVES);
            }
            if lost.until <= now {
                if lost.is_over() {
                    continue;
                }
                lost.until = now.saturating_add(LIVES);
            }
            self.lost.push_back(lost);
        }
    }
}

fn lock(users: &Mutex<BTreeSet<u32>>) -> MutexGuard<'_, BTreeSet<u32>> {
    users.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Holder {
    /// Whether the process that connected still lives: its number is no other's then.
    fn is_there(&self) -> bool {
        // Older kernels have no name for it but the number.
        !self.process.as_ref().is_some_and(peer::has_ended)
    }

    fn reply(&self, reply: &EventReply, event: Option<BorrowedFd<'_>>) -> Turn {
        let bytes = serde_json::to_vec(reply).unwrap_or_default();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let events: Vec<BorrowedFd<'_>> = event.into_iter().collect();
        if !events.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&events));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut ancillary, flags) {
            Ok(_) => Turn::Answered,
            // It does not read its replies.
            Err(_) => Turn::Ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use umpire_budget::{EventSpec, HandedEvent, Rings};

    use super::*;

    /// An event of this thread that was lost then. `None`: the kernel opens none here.
    fn lost(since: u64, life: (u32, Option<Started>)) -> Option<Lost> {
        // PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK.
        let event = HandedEvent {
            spec: EventSpec {
                perf_type: 1,
                config: 1,
                config1: 0,
                config2: 0,
            },
            thread: Some(0),
            cpu: None,
            rings: Rings::User,
            period: None,
        };
        let open = Open {
            event: Handed::open(&event).ok()?,
            allowed: Allowed {
                lease: LeaseId(1),
                counter: 0,
                event,
            },
            uid: 7,
            pid: 1,
            life,
        };
        Some(Lost {
            open,
            enabled: Some(Duration::ZERO),
            since,
            until: since + LIVES,
        })
    }

    #[test]
    fn a_lost_event_is_looked_at_while_there_is_something_to_count() {
        let pid = std::process::id();
        let (Some(lives), Some(gone)) = (
            lost(0, (pid, peer::started(pid))),
            lost(0, (u32::MAX, peer::started(pid))),
        ) else {
            println!(
                "skipped: a_lost_event_is_looked_at_while_there_is_something_to_count: no events"
            );
            return;
        };
        assert!(!lives.is_over() && gone.is_over());
    }

    #[test]
    fn who_loses_many_events_makes_room_for_itself() {
        let me = (std::process::id(), peer::started(std::process::id()));
        let many = (0..3).map(|minute| lost(minute * LIVES, me));
        let Some(mut many) = many.collect::<Option<VecDeque<Lost>>>() else {
            println!("skipped: who_loses_many_events_makes_room_for_itself: no events");
            return;
        };
        let since = |many: &VecDeque<Lost>| -> Vec<u64> {
            many.iter().map(|one| one.since / LIVES).collect()
        };
        let all = |of_all| Most {
            of_user: MOST_LOST,
            of_all,
        };
        assert!(make_room(&mut many, all(4), 7, 2 * LIVES));
        assert_eq!(since(&many), [0, 1, 2]);
        many.rotate_left(1);
        // Another user cannot have it.
        assert!(!make_room(&mut many, all(3), 8, 2 * LIVES));
        assert!(make_room(&mut many, all(3), 7, 2 * LIVES));
        assert_eq!(since(&many), [1, 2]);
        assert!(make_room(&mut many, all(2), 7, 2 * LIVES));
        assert!(!make_room(&mut many, all(1), 7, 2 * LIVES));
        assert_eq!(since(&many), [2]);
    }
}
