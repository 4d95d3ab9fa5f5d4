//! The companion socket, at which holders of leases get perf events that the arbiter opens
//! for them: one request in JSON, one reply with a descriptor (`SCM_RIGHTS`). And the
//! events that were handed over: a descriptor cannot be taken back, so the arbiter keeps
//! its own of the same event, by which it stops the event when the lease is lost, and looks
//! for a while whether somebody starts it again.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use arbiter::host::LeaseId;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType, recv, sendmsg,
};
use umpire_budget::{Handed, NotMeasured};
use umpire_lease::{EventReply, EventRequest, Refusal};
use umpire_socket::{Access, Listener, SocketError, Wording};

use crate::peer::{self, Client};
use crate::service::{Allowed, Service};

/// No request is longer.
const MOST_REQUEST: usize = 4096;
/// Most events of a user, and most that were lost and are still looked at.
const MOST_EVENTS: usize = 1024;
const MOST_LOST: usize = 4096;
/// How long the kernel may take to open an event.
const OPENS: Duration = Duration::from_millis(100);
/// So long after the loss it is looked whether an event was enabled again, in nanoseconds.
const LOOKS: u64 = 60_000_000_000;

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
    socket: OwnedFd,
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
}

/// An event that somebody should not use any more.
#[derive(Debug)]
struct Lost {
    open: Open,
    enabled: Option<Duration>,
    until: u64,
}

/// The socket, and what was handed over.
#[derive(Debug)]
pub(crate) struct Broker {
    listener: Listener,
    holders: BTreeMap<u64, Holder>,
    open: BTreeMap<LeaseId, Vec<Open>>,
    lost: Vec<Lost>,
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
    /// # Errors
    /// The socket cannot be had.
    pub(crate) fn listen(socket: &Path, access: &Access) -> Result<Self, SocketError> {
        let path = companion(socket);
        Ok(Broker {
            listener: Listener::new(&path, SocketType::SEQPACKET, access, WORDING)?,
            holders: BTreeMap::new(),
            open: BTreeMap::new(),
            lost: Vec::new(),
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

    pub(crate) fn socket(&self, id: u64) -> Option<BorrowedFd<'_>> {
        self.holders.get(&id).map(|holder| holder.socket.as_fd())
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
        if own >= most {
            return Ok(false);
        }
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
        let length = match recv(&holder.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Turn::Ended,
            Ok((length, _)) => length,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Turn::Quiet,
            Err(_) => return Turn::Ended,
        };
        let Ok(request) = serde_json::from_slice::<EventRequest>(&bytes[..length]) else {
            let why = "this is no request for an event: one JSON object with lease and counter";
            let refused = service.not_opened(&holder.client, "wrong-request", why);
            return holder.reply(&refused.into(), None);
        };
        let opened = service
            .allow(&holder.client, &request)
            .map_err(|refusal| *refusal)
            .and_then(|allowed| self.opened(holder, allowed, service));
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
        service: &mut Service,
    ) -> Result<Open, Refusal> {
        let client = &holder.client;
        let own = self.open.values().flatten();
        if own.filter(|open| open.uid == client.uid).count() >= MOST_EVENTS {
            let why = format!("this user has {MOST_EVENTS} events; give a lease back first");
            return Err(service.not_opened(client, "too-many-events", &why));
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
        Ok(Open {
            allowed,
            event,
            uid: client.uid,
            pid: client.pid,
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
            self.lost.push(Lost {
                open,
                enabled,
                until: now.saturating_add(LOOKS),
            });
        }
        let too_many = self.lost.len().saturating_sub(MOST_LOST);
        self.lost.drain(..too_many);
    }

    /// Looks whether what was stopped runs again, and stops it.
    pub(crate) fn look(&mut self, service: &mut Service, now: u64) {
        self.lost.retain_mut(|lost| {
            let Lost { open, enabled, .. } = lost;
            let is = open.event.enabled().ok().flatten();
            if is > *enabled {
                let _ = open.event.disable();
                *enabled = open.event.enabled().ok().flatten();
                service.reenabled(open.uid, open.pid, &open.allowed);
                lost.until = now.saturating_add(LOOKS);
            }
            lost.until > now
        });
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
