//! The companion socket, at which holders of leases get perf events that the arbiter opens
//! for them: one request in JSON, one reply with a descriptor (`SCM_RIGHTS`). And the
//! events that were handed over: a descriptor cannot be taken back, so the arbiter keeps
//! its own of the same event, by which it stops the event when the lease is lost, and looks
//! whether somebody starts it again, for as long as there is something that it could count.

mod inherited;
mod lost;
mod manager;
mod opens;
mod shares;
mod stops;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;

use crate::budget::{Follows, Handed, Lineage};
use arbiter_host::{BootTime, Group, GroupId, HostArbiter, LeaseId, PmuId, Reason, TenantId};
use rustix::event::epoll::EventFlags;
use umpire_lease::{EventReply, EventRequest, Refusal};
use umpire_service::{
    Accepted, Access, ClientSocket, Closer, Kind, Listener, Poll, SocketError, Wording, send_packet,
};

use crate::config::ArbiterConfig;
use crate::connections::is_passing;
use crate::group_watch::in_turn;
use crate::groups::LateTree;
use crate::peer::{self, Client, NoThread, Started};
use crate::service::{Allowed, Having, LeasesBelow, NoEvent, Service, Told, groups_above};
use crate::task::{Life, Task};
use inherited::{Root, meet};
use lost::{Excuses, Judges, Lost};
pub(crate) use manager::PREFIX;
use manager::Whose;
use opens::{NewEvent, Opened, Opens, PendingEvent};
use shares::{Had, NoRoom, Shares};
use stops::{EventFile, Stops};

/// No request is longer.
const MOST_REQUEST: usize = 4096;
/// Files of an event while it is being opened: its own, that of its thread's process, and what
/// tells who is left that may have inherited it.
const FILES_OF_OPENING: usize = 3;
/// Of so many events of groups it is looked in one go whether their threads are there still.
const LOOKS_AT: usize = 256;

const FOREIGN: &str = "the thread is not one of the process that asks";
const GONE: &str = "the thread has ended";

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
struct HolderSocket {
    socket: ClientSocket,
    client: Client,
    /// The process itself, where the kernel names it so.
    process: Option<OwnedFd>,
}

/// An event that somebody has.
#[derive(Debug)]
struct OpenEvent {
    allowed: Allowed,
    event: EventFile,
    uid: u32,
    /// The tenant for which it was asked for, if that is known.
    tenant: Option<TenantId>,
    pid: u32,
    /// The thread that it counts, or the process that asked for one of a whole CPU.
    life: (u32, Option<Started>),
    /// What its thread starts counts by it, too.
    root: Option<Root>,
    /// When the process that asked was started. A thread of it that calls `execve` takes its
    /// number and its start, and the event goes along.
    process: Option<Started>,
    /// Its name in the service manager's store.
    name: Option<String>,
}

/// An event that its holder is given when those are stopped that might need the same counter.
#[derive(Debug)]
struct Later {
    connection: u64,
    allowed: Allowed,
    tenant: Option<TenantId>,
    event: EventFile,
    /// The number of the last order that was given before it.
    order: u64,
}

/// Of which PMU something is being stopped, and on which CPU, if it is on one; and the number of
/// the first order by which it is.
pub(crate) type BeingStopped = BTreeMap<(PmuId, Option<u32>), u64>;

/// The socket, and what was handed over.
#[derive(Debug)]
pub(crate) struct Broker {
    listener: Listener,
    holders: BTreeMap<u64, HolderSocket>,
    open: BTreeMap<LeaseId, Vec<OpenEvent>>,
    /// Those that were looked at last are at the end.
    lost: VecDeque<Lost>,
    shares: Shares,
    judges: Judges,
    opens: Opens,
    closer: Closer,
    /// Events that are their holder's when the ones before them are stopped.
    later: Vec<Later>,
    groups: LateTree,
    /// Of which lease events are looked at next whether their threads are there still, and from
    /// which of them on.
    looks_from: Option<(LeaseId, usize)>,
    /// Where names go that the service manager is to forget, if there is one.
    forgets: Option<Sender<String>>,
    /// The number of the last event that was asked for.
    number: u64,
    /// There was no room for a name in the service manager's store, and that was said.
    store_full: bool,
    /// What has become of events since that was taken last.
    told: Vec<Told>,
    /// How many threads were looked at for requests.
    looks: u64,
}

/// What became of a connection's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It has said nothing more.
    Quiet,
    /// It was answered, and may have said more.
    Answered,
    /// It is answered when the kernel has opened its event.
    Opens,
    /// It is gone, or was left.
    Ended,
}

impl Broker {
    /// The socket of it, beside `socket`.
    ///
    /// # Errors
    /// It cannot be had.
    pub(crate) fn listen(
        socket: &Path,
        access: &Access,
        closer: &Closer,
    ) -> Result<Listener, SocketError> {
        Listener::new(&companion(socket), Kind::Packets, access, WORDING, closer)
    }

    /// `closer`: for a process that may have `files` open. `managed`: the service manager
    /// keeps events over a restart, if there is one. The kernel's files are below `root`.
    ///
    /// # Errors
    /// There is no pipe or no thread for it.
    pub(crate) fn new(
        listener: Listener,
        (files, closer): (u64, &Closer),
        managed: bool,
        root: &Path,
    ) -> io::Result<Self> {
        let managed = managed && manager::is_there();
        let opens = Opens::new(root, closer)?;
        let judges = Judges {
            stops: Stops::new(opens.bell()?, stops::HOST),
            excuses: Excuses::default(),
        };
        Ok(Broker {
            listener,
            holders: BTreeMap::new(),
            open: BTreeMap::new(),
            lost: VecDeque::new(),
            shares: Shares::of(files),
            judges,
            opens,
            closer: closer.clone(),
            later: Vec::new(),
            groups: LateTree::new(root),
            looks_from: None,
            forgets: managed.then(forgets).transpose()?,
            number: 0,
            store_full: false,
            told: Vec::new(),
            looks: 0,
        })
    }

    /// Takes over what an arbiter before this one has handed over, and the service manager has
    /// kept. After the leases of before are known.
    pub(crate) fn restore(&mut self, events: Vec<(String, Handed)>, service: &Service, now: u64) {
        let arbiter = service.arbiter();
        let pmu = |perf_type| service.config().pmu_of(arbiter.pmus(), perf_type);
        let known = events.into_iter();
        let named = |(name, event): (String, _)| manager::named(&name, event, pmu, &self.closer);
        let known = known.filter_map(named);
        let mut known: BTreeMap<u64, OpenEvent> = known.collect();
        self.find_groups(&mut known, service);
        if !known.is_empty() {
            log::info!("{} events of before are known", known.len());
        }
        let mut below = Below::new();
        for (number, mut open) in known {
            self.number = self.number.max(number);
            let lease = arbiter.lease(open.allowed.lease);
            open.tenant = lease.map(|lease| lease.owner.tenant);
            if has(arbiter, &mut below, &open) {
                self.have(open, now);
            } else {
                let barred = service.is_barred(open.uid);
                let lost = Lost::new(open, &mut self.judges.stops, now);
                self.lost
                    .push_back(if barred { lost.taken(now) } else { lost });
            }
        }
        self.tell_taken(now);
    }

    /// Names have the numbers of groups alone: their paths are those of leases, or are looked for.
    /// One that is gone gets a path at which it is not.
    fn find_groups(&self, known: &mut BTreeMap<u64, OpenEvent>, service: &Service) {
        let mut groups = BTreeMap::new();
        for lease in service.arbiter().leases() {
            groups.extend(lease.terms.scope.group().map(|group| (group.id, group)));
        }
        let mut unknown = BTreeSet::new();
        let of_known = known.values_mut();
        for group in of_known.filter_map(|open| open.allowed.group.as_mut()) {
            match groups.get(&group.id) {
                Some(known) => *group = Group::clone(known),
                None => {
                    unknown.insert(group.id);
                }
            }
        }
        if unknown.is_empty() {
            return;
        }
        let tree = self.groups.get().ok();
        let Some(found) = tree.and_then(|tree| tree.numbered(&unknown)) else {
            return;
        };
        let groups = known.values_mut();
        let groups = groups.filter_map(|open| open.allowed.group.as_mut());
        for group in groups.filter(|group| unknown.contains(&group.id)) {
            match found.iter().find(|found| found.id == group.id) {
                Some(there) => *group = there.clone(),
                None => group.path = format!("/gone-{}", group.id.0),
            }
        }
    }

    /// What has become of events, in its order: the service is to hear of it.
    pub(crate) fn take_told(&mut self) -> Vec<Told> {
        std::mem::take(&mut self.told)
    }

    /// How many threads were looked at for requests since this was asked last.
    pub(crate) fn take_looks(&mut self) -> u64 {
        std::mem::take(&mut self.looks)
    }

    fn tell_taken(&mut self, now: u64) {
        let taken = lost::taken(&self.lost, now);
        self.told.push(Told::Taken(taken, BootTime(now)));
    }

    /// Can be read from when an event is open that somebody waits for.
    pub(crate) fn opened_fd(&self) -> BorrowedFd<'_> {
        self.opens.as_fd()
    }

    /// When somebody has waited for too long.
    pub(crate) fn due(&self) -> Option<u64> {
        self.opens.due()
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
    pub(crate) fn watch(&mut self, id: u64, poll: &Poll) -> io::Result<()> {
        let Some(holder) = self.holders.get_mut(&id) else {
            return Ok(());
        };
        holder.socket.watch(poll, id, EventFlags::IN)
    }

    /// Whose connection it is.
    pub(crate) fn user(&self, id: u64) -> Option<u32> {
        self.holders.get(&id).map(|holder| holder.client.uid)
    }

    /// A connection that waits to be accepted.
    pub(crate) fn accept(&self) -> Accepted {
        self.listener.accept()
    }

    /// Serves a connection from now on. `false`: its user has too many, or it is gone.
    pub(crate) fn admit(&mut self, id: u64, socket: ClientSocket, config: &ArbiterConfig) -> bool {
        let client = Client::of(&socket, config.named_groups());
        let (Ok(client), Ok(process)) = (client, peer::process(&socket)) else {
            return false;
        };
        let most = config.connections_per_user;
        let own = self.holders.values();
        let own = own.filter(|other| other.client.uid == client.uid).count();
        if own >= most || socket.is_overdrawn() {
            return false;
        }
        socket.refuse_rights();
        let holder = HolderSocket {
            socket,
            client,
            process,
        };
        self.holders.insert(id, holder);
        true
    }

    /// Other rules may be about others of the holders' groups.
    pub(crate) fn look_at_groups(&mut self, config: &ArbiterConfig) {
        for holder in self.holders.values_mut() {
            let named = config.named_groups();
            holder.client.look_at_groups(&holder.socket, named);
        }
    }

    pub(crate) fn leave(&mut self, id: u64) {
        self.holders.remove(&id);
        self.opens.leave(id);
        self.later.retain(|later| later.connection != id);
    }

    /// Answers one request of a connection.
    pub(crate) fn turn(&mut self, id: u64, service: &Service, now: u64) -> Turn {
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
        match self.begin(id, request, service, now) {
            Ok(()) => Turn::Opens,
            Err(no) => self.refuse(id, *no),
        }
    }

    /// Begins to open what is asked for, if it may be had.
    fn begin(
        &mut self,
        id: u64,
        request: &[u8],
        service: &Service,
        now: u64,
    ) -> Result<(), Box<NoEvent>> {
        let Some(holder) = self.holders.get(&id) else {
            return Ok(());
        };
        let uid = holder.client.uid;
        if self.check_room(uid, None).is_err() {
            let over = lost::take_over(&mut self.lost, uid, &self.groups);
            self.forget(over.and_then(|over| over.name));
        }
        let Some(holder) = self.holders.get(&id) else {
            return Ok(());
        };
        let client = &holder.client;
        let Ok(request) = serde_json::from_slice::<EventRequest>(request) else {
            let why = "this is no request for an event: one JSON object with lease and counter";
            return Err(Says::new(service, client, None).no(Reason::WrongRequest, why));
        };
        let says = Says::new(service, client, Some(LeaseId(request.lease)));
        // Among those that are alike the last is in use.
        self.number += 1;
        let allowed = service.allow(client, &request, &mut self.looks)?;
        let mut asked = self.asked(id, allowed, request, says, now)?;
        let uid = asked.client.uid;
        asked.name = asked.name.take().filter(|name| self.can_keep(uid, name));
        self.store_full |= self.forgets.is_some() && asked.name.is_none();
        let begun = self.opens.begin(asked, now);
        begun.map_err(|why| says.not_opened(&why))
    }

    /// Tells a connection why it has no event, and the service, too.
    fn refuse(&mut self, id: u64, no: NoEvent) -> Turn {
        let reply = no.refusal.clone().into();
        self.told.push(Told::Denied(no));
        let holder = self.holders.get(&id);
        holder.map_or(Turn::Ended, |holder| holder.reply(&reply, None))
    }

    /// What is to be opened, as it is now.
    fn asked(
        &self,
        connection: u64,
        allowed: Allowed,
        request: EventRequest,
        says: Says<'_>,
        now: u64,
    ) -> Result<PendingEvent, Box<NoEvent>> {
        let client = says.client;
        self.has_room(says)?;
        let thread = allowed.event.thread;
        let before = thread
            .map(|thread| says.thread_of(&allowed, thread))
            .transpose()?;
        let holder = self.holders.get(&connection);
        if before == Some(None) || !holder.is_some_and(HolderSocket::is_there) {
            return Err(says.no(Reason::ForeignThread, FOREIGN));
        }
        let task = match allowed.group.as_ref().and(thread) {
            Some(thread) => Some(says.task(thread)?),
            None => None,
        };
        let foreign = task
            .as_ref()
            .is_some_and(|task| !task.is_of(client.uid, None));
        let of_user = task.as_ref().map_or(client.uid, Task::user);
        let process = task.map(|task| task.process);
        let counts = thread.filter(|_| before.is_some()).unwrap_or(client.pid);
        let started = before.flatten().or_else(|| client.started());
        if let (None, Some(why)) = (started, &client.not_seen) {
            let why = NoThread::NotSeen(why.clone()).to_string();
            return Err(says.no(Reason::ForeignThread, &why));
        }
        let life = (counts, started);
        self.counts_by_no_other(&allowed, life, process, says)?;
        let whose = Whose {
            uid: client.uid,
            pid: client.pid,
            process: client.started(),
            life,
            asked: inherited::tick_of(now),
        };
        let name = || manager::name(&allowed, &whose, self.number);
        Ok(PendingEvent {
            connection,
            client: client.clone(),
            request,
            before: before.flatten(),
            process,
            of_user,
            foreign,
            life,
            name: self.forgets.as_ref().map(|_| name()),
            allowed,
            tenant: says.tenant,
        })
    }

    /// A thread that a group's event is for may count by one of the same counter already, which
    /// somebody has whose thread has started it.
    fn counts_by_no_other(
        &self,
        allowed: &Allowed,
        life: (u32, Option<Started>),
        process: Option<u32>,
        says: Says<'_>,
    ) -> Result<(), Box<NoEvent>> {
        let Some(thread) = allowed.group.as_ref().and(allowed.event.thread) else {
            return Ok(());
        };
        let of_lease = self.open.get(&allowed.lease).into_iter().flatten();
        let mut others = of_lease.filter(|open| {
            open.allowed.counter == allowed.counter
                && meet(open.allowed.event.cpu, allowed.event.cpu)
                && open.may_have(life, process)
        });
        let Some(other) = others.find(|other| !other.has_ended()) else {
            return Ok(());
        };
        let (counter, (first, _)) = (allowed.counter, other.life);
        let why = format!(
            "thread {thread} was started when thread {first} had its event of counter {counter} \
             already, and may count by that; name another counter, have each ask with follows \
             'threads', or have all started before one asks"
        );
        Err(says.no(Reason::TooManyEvents, &why))
    }

    /// Whether the service manager may keep one more under this name, and an arbiter after this
    /// one be started all the same.
    fn can_keep(&self, uid: u32, name: &str) -> bool {
        let open = self.open.values().flatten();
        let all = open.chain(self.lost.iter().map(Lost::event));
        let names = all.filter_map(|open| Some((open.uid, open.name.as_deref()?)));
        let has_room = manager::has_room(names.chain(self.opens.names()), uid, name);
        if !has_room && !self.store_full {
            log::warn!(
                "the service manager keeps as many events over a restart as it can name, of user \
                 {uid} or of all; an arbiter after this one will not know those that are opened \
                 beyond that"
            );
        }
        has_room
    }

    /// Whether there is room for one more event of a user, asked for for a tenant.
    fn check_room(&self, uid: u32, tenant: Option<TenantId>) -> Result<(), NoRoom> {
        let mut had = Had::default();
        let mut add = |of: u32, for_tenant: Option<TenantId>, files: usize| {
            had.all += files;
            had.of_tenant += if for_tenant == tenant { files } else { 0 };
            had.of_user += if of == uid { files } else { 0 };
            usize::from(of == uid)
        };
        let mut open = 0;
        for event in self.open.values().flatten() {
            open += add(event.uid, event.tenant, event.files());
        }
        for (of, for_tenant) in self.opens.users() {
            open += add(of, for_tenant, FILES_OF_OPENING);
        }
        let lost = self.lost.iter().map(Lost::event);
        let lost = lost.map(|event| add(event.uid, event.tenant, event.files()));
        let lost = lost.sum();
        let closing = self.closer.waiting(uid);
        let had = Had {
            open,
            lost,
            closing,
            ..had
        };
        self.shares.check(had, FILES_OF_OPENING)
    }

    fn has_room(&self, says: Says<'_>) -> Result<(), Box<NoEvent>> {
        let room = self.check_room(says.client.uid, says.tenant);
        room.map_err(|why| says.no(Reason::TooManyEvents, &why.to_string()))
    }

    /// Hands over what the kernel has opened, and tells those who have waited for too long.
    /// Returns the connections that go on.
    pub(crate) fn opened(&mut self, service: &Service, now: u64) -> Vec<u64> {
        self.opens.hear();
        let mut go_on = Vec::new();
        for Opened {
            asked,
            event,
            waits,
        } in self.opens.finished()
        {
            let uid = asked.client.uid;
            let (connection, name) = (asked.connection, asked.name.clone());
            let handed = if waits {
                self.hand_over(asked, event, service, now)
            } else {
                // It was told to try again: this one is closed.
                false
            };
            if !handed {
                self.forget(name);
            }
            go_on.extend((waits && !handed).then_some(connection));
            while let Some(next) = self.opens.next_of(uid) {
                let (connection, client) = (next.connection, next.client.clone());
                let tenant = next.tenant;
                if let Err(why) = self.opens.begin(next, now) {
                    let says = Says::of(&client, tenant);
                    self.tell(connection, *says.not_opened(&why));
                    go_on.push(connection);
                }
            }
        }
        for (connection, tenant, why) in self.opens.overdue(now) {
            let client = self.holders.get(&connection).map(|one| one.client.clone());
            if let Some(client) = &client {
                let says = Says::of(client, tenant);
                self.tell(connection, *says.not_opened(why));
            }
            go_on.push(connection);
        }
        go_on.extend(self.stopped(service, now));
        go_on
    }

    /// As [`Broker::refuse`]; who does not read that is left.
    fn tell(&mut self, connection: u64, no: NoEvent) {
        if self.refuse(connection, no) == Turn::Ended {
            self.leave(connection);
        }
    }

    /// Hands one over, if it still may be: it is given when those are stopped that it comes in the
    /// place of. `false`: nobody has it.
    fn hand_over(
        &mut self,
        asked: PendingEvent,
        event: Result<NewEvent, String>,
        service: &Service,
        now: u64,
    ) -> bool {
        let (connection, tenant) = (asked.connection, asked.tenant);
        if !self.holders.contains_key(&connection) {
            return false;
        }
        let open = match self.still(asked, event, service) {
            Ok(open) => open,
            Err(no) => {
                self.tell(connection, *no);
                return false;
            }
        };
        let (allowed, event) = (open.allowed.clone(), open.event.clone());
        self.told.push(Told::Handed(open.having()));
        self.have(open, now);
        let later = Later {
            connection,
            allowed,
            tenant,
            event,
            order: self.judges.stops.last(),
        };
        self.later.push(later);
        true
    }

    /// Gives those events that do not wait for others to be stopped any more. Returns the
    /// connections that go on.
    fn give_free(&mut self, service: &Service) -> Vec<u64> {
        let mut go_on = Vec::new();
        for later in std::mem::take(&mut self.later) {
            if !self.has_event(&later, service.arbiter()) {
                let holder = self.holders.get(&later.connection);
                if let Some(client) = holder.map(|holder| holder.client.clone()) {
                    let why = "the event was lost meanwhile: its lease has lost this counter, or \
                               the same was asked for once more; ask again";
                    let no = Says::of(&client, later.tenant).no(Reason::WrongGeneration, why);
                    self.tell(later.connection, *no);
                }
            } else if self.is_free(&later, service.arbiter()) {
                self.give(&later);
            } else {
                self.later.push(later);
                continue;
            }
            go_on.push(later.connection);
        }
        go_on
    }

    /// Whether that is somebody's still that is to be given.
    fn has_event(&self, later: &Later, arbiter: &HostArbiter) -> bool {
        let of_lease = self.open.get(&later.allowed.lease);
        let mut of_lease = of_lease.into_iter().flatten();
        let open = of_lease.find(|open| open.event.is(&later.event));
        open.is_some_and(|open| has(arbiter, &mut Below::new(), open))
    }

    /// Whether those are stopped that it comes in the place of: of the same counter of its lease, or
    /// of a lease that has that one's no more.
    fn is_free(&self, later: &Later, arbiter: &HostArbiter) -> bool {
        if self.judges.stops.is_idle() {
            return true;
        }
        let mut below = Below::new();
        let mut stopping = self.lost.iter().filter(|lost| {
            let order = lost.is_being_stopped();
            order.is_some_and(|order| order <= later.order)
        });
        !stopping.any(|lost| {
            let (old, new) = (&lost.event().allowed, &later.allowed);
            let is_same = (old.lease, old.counter) == (new.lease, new.counter);
            let meets = old.pmu == new.pmu && meet(old.event.cpu, new.event.cpu);
            meets && (is_same || !has(arbiter, &mut below, lost.event()))
        })
    }

    fn give(&mut self, later: &Later) {
        let reply = EventReply {
            counter: u32::try_from(later.allowed.counter).ok(),
            refused: None,
        };
        let holder = self.holders.get(&later.connection);
        let said = holder.map(|holder| holder.reply(&reply, Some(later.event.as_fd())));
        if said == Some(Turn::Ended) {
            self.leave(later.connection);
        }
    }

    /// Hears what was stopped meanwhile, and gives what has waited for that. Returns the
    /// connections that go on.
    fn stopped(&mut self, service: &Service, now: u64) -> Vec<u64> {
        let (lost, judges, told) = (&mut self.lost, &mut self.judges, &mut self.told);
        if lost::hear(lost, judges, told, now) {
            self.tell_taken(now);
        }
        self.judges.stops.serve();
        self.give_free(service)
    }

    /// The number of the last order to stop something or to look at it.
    pub(crate) fn last_order(&self) -> u64 {
        self.judges.stops.last()
    }

    /// Whether nothing is being stopped or looked at.
    pub(crate) fn is_idle(&self) -> bool {
        self.judges.stops.is_idle()
    }

    /// What is being stopped still that its lease has no more: nobody else is told yet that it has
    /// such a counter.
    pub(crate) fn being_stopped(&self, arbiter: &HostArbiter) -> BeingStopped {
        let mut stopping = BeingStopped::new();
        if self.is_idle() {
            return stopping;
        }
        let mut below = Below::new();
        for lost in &self.lost {
            let (order, event) = (lost.is_being_stopped(), lost.event());
            if let Some(order) = order.filter(|_| !has(arbiter, &mut below, event)) {
                let of = (event.allowed.pmu, event.allowed.event.cpu);
                let first = stopping.entry(of).or_insert(order);
                *first = order.min(*first);
            }
        }
        stopping
    }

    /// The event, if what was true before it was opened still is.
    fn still(
        &mut self,
        asked: PendingEvent,
        event: Result<NewEvent, String>,
        service: &Service,
    ) -> Result<OpenEvent, Box<NoEvent>> {
        let client = &asked.client;
        let says = Says::of(client, asked.tenant);
        let new = event.map_err(|why| says.not_opened(&why))?;
        // The lease may have gone meanwhile, or the number have become another thread's. It was
        // charged for the same look when it asked; nobody is for this one.
        let allowed = service.allow(client, &asked.request, &mut 0);
        let allowed = allowed.map_err(|no| {
            let tenant = asked.tenant;
            Box::new(NoEvent { tenant, ..*no })
        })?;
        let thread = allowed.event.thread;
        let now_it = thread.map(|thread| says.thread_of(&allowed, thread));
        let now_it = now_it.transpose()?.flatten();
        let holder = self.holders.get(&asked.connection);
        let has_ended = new.process.as_ref().is_some_and(peer::has_ended);
        if now_it != asked.before || has_ended || !holder.is_some_and(HolderSocket::is_there) {
            let why = if asked.process.is_some() {
                GONE
            } else {
                FOREIGN
            };
            return Err(says.no(Reason::ForeignThread, why));
        }
        if allowed != asked.allowed {
            let why = "the lease has changed meanwhile; ask again";
            return Err(says.no(Reason::WrongGeneration, why));
        }
        self.has_room(says)?;
        self.counts_by_no_other(&allowed, asked.life, asked.process, says)?;
        let root = (allowed.event.follows != Follows::Nothing).then_some(Root {
            process: asked.process,
            since: new.since,
            foreign: asked.foreign,
        });
        Ok(OpenEvent {
            allowed,
            event: new.event,
            uid: client.uid,
            tenant: asked.tenant,
            pid: client.pid,
            life: asked.life,
            root,
            process: client.started(),
            name: asked.name,
        })
    }

    /// Somebody has it from now on. Who asks again for the same has the new event instead of
    /// the old one.
    fn have(&mut self, open: OpenEvent, now: u64) {
        let process = open.root.and_then(|root| root.process);
        let same = |other: &mut OpenEvent| {
            let (a, b) = (&other.allowed, &open.allowed);
            // One without a thread counts them all.
            let meets = meet(a.event.thread, b.event.thread) || other.may_have(open.life, process);
            a.counter == b.counter && meets && meet(a.event.cpu, b.event.cpu)
        };
        let of_lease = self.open.entry(open.allowed.lease).or_default();
        let replaced: Vec<OpenEvent> = of_lease.extract_if(.., same).collect();
        of_lease.push(open);
        self.lose(replaced, now);
    }

    /// Has the service manager forget an event that is closed here.
    fn forget(&self, name: Option<String>) {
        if let Some((name, forgets)) = name.zip(self.forgets.as_ref()) {
            let _ = forgets.send(name);
        }
    }

    /// Stops what leases do not hold any more, before somebody else is told that it has it.
    pub(crate) fn follow(&mut self, service: &Service, changed: &[LeaseId], now: u64) {
        let mut all: BTreeSet<LeaseId> = changed.iter().copied().collect();
        let arbiter = service.arbiter();
        // What a lease has that came below another's group is not that one's meanwhile.
        let outer = groups_above(arbiter, changed);
        if !outer.is_empty() {
            let is_above = |group: &Group| outer.contains(&group.id);
            let open = self.open.iter();
            let above = open.filter(|(_, events)| {
                let first = events.first();
                first.is_some_and(|open| open.allowed.group.as_ref().is_some_and(is_above))
            });
            all.extend(above.map(|(id, _)| *id));
        }
        let mut below = Below::new();
        for id in all {
            self.lose_of(id, now, |open| !has(arbiter, &mut below, open));
        }
    }

    /// Stops those of a lease of which that is so.
    fn lose_of(&mut self, id: LeaseId, now: u64, mut is_lost: impl FnMut(&OpenEvent) -> bool) {
        let Some(events) = self.open.get_mut(&id) else {
            return;
        };
        let lost: Vec<OpenEvent> = events.extract_if(.., |open| is_lost(open)).collect();
        if events.is_empty() {
            self.open.remove(&id);
        }
        self.lose(lost, now);
    }

    fn lose(&mut self, events: Vec<OpenEvent>, now: u64) {
        for open in events {
            self.told.push(Told::Disabled(open.having()));
            let lost = Lost::new(open, &mut self.judges.stops, now);
            self.lost.push_back(lost);
        }
    }

    /// Looks whether what was stopped runs again, and stops it. `forgiven`: users whom an
    /// operator has pardoned since.
    pub(crate) fn look(&mut self, forgiven: &[u32], now: u64) {
        for &uid in forgiven {
            lost::forgive(&mut self.lost, &mut self.judges.stops, uid, now);
        }
        self.judges.stops.serve();
        self.look_at_threads(now);
        let (lost, judges, told) = (&mut self.lost, &mut self.judges, &mut self.told);
        for over in lost::look(lost, judges, told, &self.groups, now) {
            self.forget(over.name);
        }
        self.tell_taken(now);
    }

    /// Looks at the threads of groups' events: one that has moved out of the group has its event
    /// stopped, and so has one that has ended and left nothing that could count.
    fn look_at_threads(&mut self, now: u64) {
        let is_of_thread = |open: &&OpenEvent| open.root.is_some();
        let of_threads = self.open.iter().map(|(id, events)| {
            let of_threads = events.iter().filter(is_of_thread);
            (*id, of_threads.count())
        });
        let (next, rest) = in_turn(of_threads, self.looks_from, LOOKS_AT);
        self.looks_from = rest;
        for (id, which) in next {
            let events = self.open.get(&id).into_iter().flatten();
            let events = events.filter(is_of_thread).skip(which.start);
            // A thread has an event for each counter and CPU, and is looked at once.
            let mut seen = BTreeMap::new();
            let left = events.take(which.len()).map(|open| {
                open.event.lineage().is_some_and(Lineage::has_ended)
                    || *seen
                        .entry(open.followed())
                        .or_insert_with(|| has_left_group(open, &self.groups))
            });
            let left: Vec<bool> = left.collect();
            if left.contains(&true) {
                let before = std::iter::repeat_n(false, which.start);
                let mut left = before.chain(left);
                self.lose_of(id, now, |open| {
                    open.root.is_some() && left.next() == Some(true)
                });
            }
        }
    }
}

impl OpenEvent {
    /// Which thread, what of it, and whether the kernel tells when that has ended. Those that are
    /// alike are looked at once, but for that.
    fn followed(&self) -> ((u32, Option<Started>), Follows, bool) {
        let is_told = self.event.lineage().is_some();
        (self.life, self.allowed.event.follows, is_told)
    }

    /// So many files of this process it takes at most.
    fn files(&self) -> usize {
        1 + usize::from(self.event.lineage().is_some())
    }

    fn having(&self) -> Having {
        Having {
            uid: self.uid,
            pid: self.pid,
            allowed: self.allowed.clone(),
        }
    }
}

/// What is below each group; that of leases that are for none is nothing.
type Below<'a> = BTreeMap<Option<GroupId>, LeasesBelow<'a>>;

/// Whether an event's lease has its counter.
fn has<'a>(arbiter: &'a HostArbiter, below: &mut Below<'a>, open: &OpenEvent) -> bool {
    let Allowed { lease, counter, .. } = open.allowed;
    let Some(lease) = arbiter.lease(lease) else {
        return false;
    };
    let scope = &lease.terms.scope;
    let below = below.entry(scope.group().map(|group| group.id));
    let below = below.or_insert_with(|| LeasesBelow::of(arbiter, scope));
    below.leave(lease, counter, open.allowed.event.cpu)
}

/// Whether the thread of a group's event has moved out of the group, or can start nothing more
/// that counts by it.
fn has_left_group(open: &OpenEvent, groups: &LateTree) -> bool {
    if open.none_is_left(|_| false) {
        return true;
    }
    if open.has_ended() {
        return false;
    }
    let group = open.allowed.group.as_ref();
    let there = group.map(|group| groups.get()?.runs_in(open.life.0, group));
    // One that cannot be looked at is there.
    matches!(there, Some(Ok(false)))
}

/// Why a client does not get an event, in words.
#[derive(Clone, Copy)]
struct Says<'a> {
    client: &'a Client,
    /// For which the client asks.
    tenant: Option<TenantId>,
}

impl<'a> Says<'a> {
    /// Of a request that names `lease` now.
    fn new(service: &'a Service, client: &'a Client, lease: Option<LeaseId>) -> Self {
        let rules = (service.config(), service.arbiter());
        Says::of(client, NoEvent::asker(rules, client, lease))
    }

    /// Of a request that did so when it was made.
    fn of(client: &'a Client, tenant: Option<TenantId>) -> Self {
        Says { client, tenant }
    }

    fn no(self, reason: Reason, why: &str) -> Box<NoEvent> {
        let refusal = Refusal::of(reason, why);
        Box::new(NoEvent::of_host(self.client, self.tenant, refusal))
    }

    /// The kernel does not open it.
    fn not_opened(self, why: &str) -> Box<NoEvent> {
        let why = format!("the kernel does not open the event: {why}");
        self.no(Reason::NotOpened, &why)
    }

    /// When a thread was started that an event may be for: one of the client's, or in its lease's
    /// group. `None`: it is none of these.
    ///
    /// # Errors
    /// It cannot be looked at.
    fn thread_of(self, of: &Allowed, number: u32) -> Result<Option<Started>, Box<NoEvent>> {
        let started = match of.group {
            None => peer::thread(number, self.client),
            // Where it runs, and whose it is, was looked at when that was allowed.
            Some(_) => Life::of(number).map(|life| life.map(|life| Started(life.id.started))),
        };
        started.map_err(|error| self.unknown(number, error))
    }

    /// A thread and its process.
    ///
    /// # Errors
    /// It has ended, or cannot be looked at.
    fn task(self, thread: u32) -> Result<Task, Box<NoEvent>> {
        let task = Task::of(thread).map_err(|error| self.unknown(thread, error))?;
        task.ok_or_else(|| self.no(Reason::ForeignThread, GONE))
    }

    fn unknown(self, number: u32, error: io::Error) -> Box<NoEvent> {
        let why = NoThread::Unknown { number, error }.to_string();
        self.no(Reason::ForeignThread, &why)
    }
}

/// A thread that tells the service manager what to forget: that takes as long as the manager
/// does.
fn forgets() -> io::Result<Sender<String>> {
    let (sender, names) = channel::<String>();
    Builder::new()
        .name("forget-events".to_owned())
        .spawn(move || names.iter().for_each(|name| manager::forget(&name)))?;
    Ok(sender)
}

impl HolderSocket {
    /// Whether the process that connected still lives: its number is no other's then.
    fn is_there(&self) -> bool {
        // Older kernels have no name for it but the number.
        !self.process.as_ref().is_some_and(peer::has_ended)
    }

    fn reply(&self, reply: &EventReply, event: Option<BorrowedFd<'_>>) -> Turn {
        let bytes = serde_json::to_vec(reply).unwrap_or_default();
        let events: Vec<BorrowedFd<'_>> = event.into_iter().collect();
        match send_packet(self.socket.as_fd(), &bytes, &events) {
            Ok(()) => Turn::Answered,
            // It does not read its replies.
            Err(_) => Turn::Ended,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
