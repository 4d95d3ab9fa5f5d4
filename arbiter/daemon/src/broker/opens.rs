//! Events that are being opened, each on a thread of its own: the kernel waits there for as
//! long as the other process is in `execve`, which may be for ever. The thread that decides
//! waits for none of them; of a user's processes a few have one at a time each, and its other
//! requests stand behind these.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Builder;

use crate::budget::{Errno, Follows, Handed, HandedEvent, Lineage, Lineages, NotMeasured};
use arbiter_host::{Group, TenantId};
use umpire_lease::EventRequest;
use umpire_service::Closer;

use super::stops::EventFile;
use super::{inherited, manager};
use crate::groups::Tree;
use crate::peer::{self, Client, Started};
use crate::service::Allowed;

/// So long a request waits for the kernel before its user is told, in nanoseconds: a kernel that
/// opens its first event of a task or a group waits for a grace period of RCU, which on a busy
/// host is tenths of a second.
const OPENS: u64 = 1_000_000_000;
/// Of so many processes of a user events are opened at a time, and of so many for one who asks:
/// each takes a thread here, and whoever asks for many users' jobs does not wait for one user's.
const MOST_OF_USER: usize = 4;
const MOST_OF_ASKER: usize = 32;
const SLOW: &str = "the kernel has not opened the event within a second; try again";
const REPLACED: &str = "the kernel has not opened the event within a second: it opens none while \
                        the thread's process is in execve; try again";
const STILL: &str = "an event of this process is being opened still, or those of four others of \
                     its user, or of 32 for who asks; try again";

/// A request that may be served, and what was true then.
#[derive(Clone, Debug)]
pub(super) struct PendingEvent {
    pub(super) connection: u64,
    pub(super) client: Client,
    pub(super) request: EventRequest,
    pub(super) allowed: Allowed,
    /// Whose it is, also when its lease has ended meanwhile.
    pub(super) tenant: Option<TenantId>,
    /// When the thread was started, if the request names one.
    pub(super) before: Option<Started>,
    /// The process of a group's thread.
    pub(super) process: Option<u32>,
    /// Whose that is: what takes long of it stands behind nobody else's.
    pub(super) of_user: u32,
    /// It is not who asks.
    pub(super) foreign: bool,
    /// The thread that it is to count, or the process that asks for one of a whole CPU.
    pub(super) life: (u32, Option<Started>),
    /// Its name in the service manager's store, if there is one.
    pub(super) name: Option<String>,
}

/// Whose opening stands behind whose: those that one user has asked for of one process of a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Lane {
    asker: u32,
    of_user: u32,
    process: u32,
}

impl PendingEvent {
    fn lane(&self) -> Lane {
        Lane {
            asker: self.client.uid,
            of_user: self.of_user,
            process: self.process.unwrap_or(self.client.pid),
        }
    }
}

/// What became of it. `waits`: its connection was not told to try again meanwhile.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) asked: PendingEvent,
    pub(super) event: Result<NewEvent, String>,
    pub(super) waits: bool,
}

/// An event of a process that is being opened.
#[derive(Debug)]
struct Busy {
    /// Its connection waits for it.
    waits: bool,
    connection: u64,
    tenant: Option<TenantId>,
    since: u64,
    /// What its user is told when the kernel takes too long.
    slow: &'static str,
    /// What the service manager keeps it under.
    name: Option<String>,
}

/// An event that nobody has yet.
#[derive(Debug)]
pub(super) struct NewEvent {
    pub(super) event: EventFile,
    /// Who was started in an earlier tick has not inherited it.
    pub(super) since: Started,
    /// The process of a group's thread, since before the event was opened: its number is no
    /// other's as long as that lives.
    pub(super) process: Option<OwnedFd>,
}

type OpenAnswer = (PendingEvent, Result<NewEvent, String>);
/// How an event is opened; the kernel's files are below the path.
type OpenCall = fn(&Allowed, &Path) -> Result<Handed, String>;

/// All that are being opened.
#[derive(Debug)]
pub(super) struct Opens {
    busy: BTreeMap<Lane, Busy>,
    behind: VecDeque<PendingEvent>,
    sends: Sender<OpenAnswer>,
    done: Receiver<OpenAnswer>,
    tells: UnixStream,
    told: UnixStream,
    means: Arc<OpenMeans>,
}

/// What an event is opened by.
#[derive(Debug)]
struct OpenMeans {
    opens: OpenCall,
    root: PathBuf,
    /// Closes what others may have inherited, and nobody gets.
    closer: Closer,
    /// `None`: the kernel does not tell who has ended.
    lineages: Option<Lineages>,
}

impl Opens {
    /// The kernel's files are below `root`.
    pub(super) fn new(root: &Path, closer: &Closer) -> io::Result<Self> {
        let lineages = Lineages::new();
        if let Err(error) = &lineages {
            let error = NotMeasured::from(*error);
            log::warn!(
                "the kernel does not tell when all have ended that a thread has started: of what \
                 has moved out of its control group the events are not looked at after that is \
                 empty: {error}"
            );
        }
        Opens::with(OpenMeans {
            opens: open,
            root: root.to_owned(),
            closer: closer.clone(),
            lineages: lineages.ok(),
        })
    }

    fn with(means: OpenMeans) -> io::Result<Self> {
        let (told, tells) = UnixStream::pair()?;
        told.set_nonblocking(true)?;
        tells.set_nonblocking(true)?;
        let (sends, done) = channel();
        Ok(Opens {
            busy: BTreeMap::new(),
            behind: VecDeque::new(),
            sends,
            done,
            tells,
            told,
            means: Arc::new(means),
        })
    }

    /// Whoever writes to it has [`Opens::as_fd`] be read from.
    ///
    /// # Errors
    /// There is no descriptor for it.
    pub(super) fn bell(&self) -> io::Result<UnixStream> {
        self.tells.try_clone()
    }

    /// Can be read from when one is open.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.told.as_fd()
    }

    /// Begins to open one, or has it stand behind others of its user.
    ///
    /// # Errors
    /// The kernel has not opened those for too long, or there is no thread.
    pub(super) fn begin(&mut self, asked: PendingEvent, now: u64) -> Result<(), String> {
        if self.is_free(asked.lane()) {
            self.start(asked, now)
        } else if self.is_stuck(asked.lane()) {
            Err(STILL.to_owned())
        } else {
            self.behind.push_back(asked);
            Ok(())
        }
    }

    /// Whether fewer are so than may be opened at a time beside one of this lane.
    fn has_room(&self, lane: Lane, is: impl Fn(&Busy) -> bool) -> bool {
        let of_asker = self.busy.iter();
        let of_asker = of_asker.filter(|(other, busy)| other.asker == lane.asker && is(busy));
        let of_user = of_asker.clone();
        let of_user = of_user.filter(|(other, _)| other.of_user == lane.of_user);
        of_asker.count() < MOST_OF_ASKER && of_user.count() < MOST_OF_USER
    }

    /// Whether one can be opened now.
    fn is_free(&self, lane: Lane) -> bool {
        !self.busy.contains_key(&lane) && self.has_room(lane, |_| true)
    }

    /// Whether the kernel has taken too long for whatever one would stand behind.
    fn is_stuck(&self, lane: Lane) -> bool {
        let own = self.busy.get(&lane);
        own.is_some_and(|busy| !busy.waits) || !self.has_room(lane, |busy| !busy.waits)
    }

    fn start(&mut self, asked: PendingEvent, now: u64) -> Result<(), String> {
        let failed = |error| format!("there is no thread for it: {error}");
        let mut tells = self.tells.try_clone().map_err(failed)?;
        let (sends, means) = (self.sends.clone(), Arc::clone(&self.means));
        let (lane, connection, tenant) = (asked.lane(), asked.connection, asked.tenant);
        let name = asked.name.clone();
        let slow = asked.allowed.event.thread.map_or(SLOW, |_| REPLACED);
        let body = move || {
            let opened = open_new(&asked, &means);
            if let (Ok(new), Some(name)) = (&opened, &asked.name) {
                // Before anybody has it: an arbiter that follows this one knows it, too.
                manager::keep(&new.event, name);
            }
            let _ = sends.send((asked, opened));
            // A pipe that is full tells it already.
            let _ = tells.write(&[1]);
        };
        let spawned = Builder::new().name("open-event".to_owned()).spawn(body);
        spawned.map_err(failed)?;
        let busy = Busy {
            waits: true,
            connection,
            tenant,
            since: now,
            slow,
            name,
        };
        self.busy.insert(lane, busy);
        Ok(())
    }

    /// The bell was heard: what rings from now on is news.
    pub(super) fn hear(&mut self) {
        while self.told.read(&mut [0; 64]).is_ok_and(|read| read > 0) {}
    }

    /// What the kernel has answered.
    pub(super) fn finished(&mut self) -> Vec<Opened> {
        let mut finished = Vec::new();
        while let Ok((asked, event)) = self.done.try_recv() {
            let busy = self.busy.remove(&asked.lane());
            finished.push(Opened {
                waits: busy.is_some_and(|busy| busy.waits),
                asked,
                event,
            });
        }
        finished
    }

    /// The next request of a user that can be begun.
    pub(super) fn next_of(&mut self, uid: u32) -> Option<PendingEvent> {
        let may = |one: &PendingEvent| one.client.uid == uid && self.is_free(one.lane());
        let next = self.behind.iter().position(may);
        next.and_then(|at| self.behind.remove(at))
    }

    /// The connections of those that have waited for too long, whose these are, and what they are
    /// told.
    pub(super) fn overdue(&mut self, now: u64) -> Vec<(u64, Option<TenantId>, &'static str)> {
        let mut overdue = Vec::new();
        for busy in self.busy.values_mut() {
            if busy.waits && busy.since.saturating_add(OPENS) <= now {
                busy.waits = false;
                overdue.push((busy.connection, busy.tenant, busy.slow));
            }
        }
        if !overdue.is_empty() {
            for one in std::mem::take(&mut self.behind) {
                if self.is_stuck(one.lane()) {
                    overdue.push((one.connection, one.tenant, STILL));
                } else {
                    self.behind.push_back(one);
                }
            }
        }
        overdue
    }

    /// When the next has waited for too long.
    pub(super) fn due(&self) -> Option<u64> {
        let waits = self.busy.values().filter(|busy| busy.waits);
        waits.map(|busy| busy.since.saturating_add(OPENS)).min()
    }

    /// The names of all that are or will be being opened, each with its user.
    pub(super) fn names(&self) -> impl Iterator<Item = (u32, &str)> {
        let busy = self.busy.iter();
        let busy = busy.map(|(lane, busy)| (lane.asker, &busy.name));
        let behind = self.behind.iter();
        let behind = behind.map(|asked| (asked.client.uid, &asked.name));
        let all = busy.chain(behind);
        all.filter_map(|(uid, name)| Some((uid, name.as_deref()?)))
    }

    /// All that are being opened: for which user, and for which tenant.
    pub(super) fn users(&self) -> impl Iterator<Item = (u32, Option<TenantId>)> {
        let busy = self.busy.iter();
        busy.map(|(lane, busy)| (lane.asker, busy.tenant))
    }

    /// A connection has ended.
    pub(super) fn leave(&mut self, connection: u64) {
        self.behind.retain(|one| one.connection != connection);
    }
}

impl OpenMeans {
    /// What is to know when all have ended who may have inherited an event: it is there before
    /// that, and so whoever has inherited the event has inherited this.
    /// What other events of the thread have is not enough: a program that it runs with another
    /// user's rights (`execve` of what is set-uid) takes all that it had, and what it starts later
    /// inherits this event alone.
    fn lineage(&self, event: &HandedEvent) -> Result<Option<Lineage>, String> {
        let thread = event.thread.filter(|_| event.follows != Follows::Nothing);
        let Some((lineages, thread)) = self.lineages.as_ref().zip(thread) else {
            return Ok(None);
        };
        let followed = lineages.follow(thread, event.follows);
        let followed = followed.map_err(|errno| NotMeasured::from(errno).to_string())?;
        Ok(Some(followed))
    }
}

/// Opens an event, in the order that keeps its thread the one that is meant.
fn open_new(asked: &PendingEvent, means: &OpenMeans) -> Result<NewEvent, String> {
    let process = asked.process.map(peer::open_process).transpose();
    let process = process.map_err(|error| format!("the thread's process: {error}"))?;
    let of = &asked.allowed.event;
    let since = match of.follows {
        Follows::Nothing => Started(0),
        Follows::Threads | Follows::Children => inherited::next_tick(),
    };
    let lineage = means.lineage(of)?;
    let event = (means.opens)(&asked.allowed, &means.root)?;
    let event = EventFile::new(event, of, lineage, &means.closer, asked.of_user);
    if event.lineage().is_some_and(Lineage::has_ended) {
        return Err("the thread has ended, or runs another program by now; try again".to_owned());
    }
    Ok(NewEvent {
        event,
        since,
        process,
    })
}

/// Opens an event on the host's kernel.
fn open(allowed: &Allowed, root: &Path) -> Result<Handed, String> {
    let failed = |errno| NotMeasured::from(errno).to_string();
    match (&allowed.group, allowed.event.thread) {
        (Some(group), None) => {
            let folder = folder(group, root)?;
            let opened = Handed::open_for_group(&allowed.event, folder.as_fd());
            opened.map_err(|errno| match errno {
                // A group that is gone has no folder.
                Errno(libc::ENOENT) => "this control group has no perf events: perf_event is \
                                        mounted as version 1 (see /proc/cgroups), or nobody has \
                                        switched on a controller at the top of version 2 yet \
                                        (cgroup.subtree_control); name a thread of the group, what \
                                        it starts counts along"
                    .to_owned(),
                other => failed(other),
            })
        }
        (None, _) | (_, Some(_)) => Handed::open(&allowed.event).map_err(failed),
    }
}

/// The folder of a group, to be read from.
fn folder(group: &Group, root: &Path) -> Result<OwnedFd, String> {
    let named = Tree::open(root).and_then(|tree| tree.find(&group.path));
    let named = named.map_err(|why| why.to_string())?;
    if named.group.id != group.id {
        return Err(format!(
            "cgroup '{}' is gone, and another has its name",
            group.path
        ));
    }
    named.to_read().map_err(|error| error.to_string())
}

#[cfg(test)]
#[path = "opens_tests.rs"]
mod tests;
