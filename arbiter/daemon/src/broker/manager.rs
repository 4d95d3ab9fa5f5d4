//! The service manager's store of descriptors (`FDSTORE` of sd_notify(3)): the events that
//! were handed over survive the arbiter there, so that the next one knows them. What an event
//! is for is in its name, since a name is all that the store keeps beside it.

use std::env;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;

use arbiter::CounterSet;
use arbiter_host::{Group, GroupId, LeaseId, PmuId};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use umpire_service::Closer;

use super::OpenEvent;
use super::inherited::Root;
use super::stops::EventFile;
use crate::budget::{EventSpec, Follows, Handed, HandedEvent, Rings};
use crate::manager::address;
use crate::peer::Started;
use crate::service::Allowed;
use crate::task::Task;

/// What the names of these begin with; others are not ours.
pub(crate) const PREFIX: &str = "umpire-event-1";

/// Most bytes of names that the manager is to keep. It gives all of them to an arbiter that it
/// starts in one variable (`LISTEN_FDNAMES`), and the kernel starts nothing that has a longer
/// one than 128 KiB (`MAX_ARG_STRLEN`); there are descriptors of others, too.
const MOST_BYTES: usize = 96 << 10;

/// Of that a user has one part in so many at most: nobody takes the room of all others.
const SHARE_OF_USER: usize = 2;

/// Whether there is room for one more name of a user beside those that are kept, each with its
/// user.
pub(super) fn has_room<'a>(
    kept: impl Iterator<Item = (u32, &'a str)>,
    uid: u32,
    name: &'a str,
) -> bool {
    let (mut all, mut own) = (0, 0);
    for (user, name) in kept.chain([(uid, name)]) {
        // A colon is between two.
        let bytes = name.len() + 1;
        all += bytes;
        own += if user == uid { bytes } else { 0 };
    }
    all <= MOST_BYTES && own <= MOST_BYTES / SHARE_OF_USER
}

/// Whether there is a manager that may keep them.
pub(super) fn is_there() -> bool {
    env::var_os("NOTIFY_SOCKET").is_some_and(|socket| !socket.is_empty())
}

/// Has the manager keep an event. It waits for the manager: not for the thread that decides.
pub(super) fn keep(event: &EventFile, name: &str) {
    // Without a buffer an event is at its end for poll(2), and the manager would drop it.
    let text = format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0");
    if let Err(error) = send(&text, Some(event.as_fd())) {
        log::warn!("the service manager does not keep an event over a restart: {error}");
    }
}

/// Has the manager forget an event.
pub(super) fn forget(name: &str) {
    if let Err(error) = send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None) {
        log::debug!("the service manager was not told to forget an event: {error}");
    }
}

fn send(text: &str, event: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else {
        return Ok(());
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address(path.as_bytes())?)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let events: Vec<BorrowedFd<'_>> = event.into_iter().collect();
    if !events.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&events));
    }
    let text = [IoSlice::new(text.as_bytes())];
    sendmsg(&socket, &text, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The words of a name. Numbers that may be missing are `-` then. One of before Umpire kept
/// the start of the process lacks the 16th; three more are for events of control groups alone.
const WORDS: [usize; 3] = [15, 16, 19];

/// Who has an event, and whose life it has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whose {
    pub(super) uid: u32,
    pub(super) pid: u32,
    /// When the process was started.
    pub(super) process: Option<Started>,
    /// The thread that it counts, or the process, and when that was started.
    pub(super) life: (u32, Option<Started>),
    /// In which tick it was asked for.
    pub(super) asked: Started,
}

/// What a descriptor of the store is called: all that an arbiter which follows has to know.
/// `number` tells it from others that are alike.
pub(super) fn name(allowed: &Allowed, whose: &Whose, number: u64) -> String {
    let Whose {
        uid,
        pid,
        process,
        life: (thread, started),
        asked,
    } = whose;
    let or_none = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let HandedEvent {
        spec,
        thread: counts,
        cpu,
        rings,
        period,
        follows,
    } = &allowed.event;
    let rings = match rings {
        Rings::User => "user",
        Rings::Guest => "guest",
        Rings::All => "all",
    };
    // Of 255 characters at most, and no colon.
    let mut words = vec![
        PREFIX.to_owned(),
        number.to_string(),
        allowed.lease.0.to_string(),
        allowed.counter.to_string(),
        allowed.counters.bits().to_string(),
        uid.to_string(),
        pid.to_string(),
        thread.to_string(),
        or_none(started.map(|started| started.0)),
        or_none(counts.map(u64::from)),
        or_none(cpu.map(u64::from)),
        rings.to_owned(),
        or_none(*period),
        spec.perf_type.to_string(),
        spec.config.to_string(),
        or_none(process.map(|process| process.0)),
    ];
    if let Some(group) = &allowed.group {
        // A path may be longer than a name.
        let follows = match follows {
            Follows::Nothing => "-",
            Follows::Threads => "t",
            Follows::Children => "c",
        };
        words.extend([
            group.id.0.to_string(),
            follows.to_owned(),
            asked.0.to_string(),
        ]);
    }
    words.join(".")
}

/// The group of a name, of which that has the number alone, what counts along, and since when.
/// `None`: these words are no name of ours.
fn of_group(words: &[&str]) -> Option<(Option<Group>, Follows, Started)> {
    let &[number, follows, asked] = words else {
        return words
            .is_empty()
            .then_some((None, Follows::Nothing, Started(0)));
    };
    let follows = match follows {
        "-" => Follows::Nothing,
        "t" => Follows::Threads,
        "c" => Follows::Children,
        _ => return None,
    };
    let group = Group {
        id: GroupId(number.parse().ok()?),
        above: Vec::new(),
        path: String::new(),
    };
    Some((Some(group), follows, Started(asked.parse().ok()?)))
}

/// A thread, if it is there still.
fn task_of((thread, started): (u32, Option<Started>)) -> Option<Task> {
    let task = Task::of(thread).ok()??;
    (started == Some(Started(task.id.started))).then_some(task)
}

/// What is known of it by now, for a user who has asked.
fn root_of(task: Option<Task>, uid: u32, since: Started) -> Root {
    Root {
        foreign: !task.as_ref().is_some_and(|task| task.is_of(uid, None)),
        process: task.map(|task| task.process),
        since,
    }
}

/// The event of a descriptor from the store, and its number. `None`: the name says nothing
/// that this arbiter understands. `pmu`: the PMU that the kernel calls so.
pub(super) fn named(
    name: &str,
    event: Handed,
    pmu: impl Fn(u32) -> Option<PmuId>,
    closer: &Closer,
) -> Option<(u64, OpenEvent)> {
    let words: Vec<&str> = name.split('.').collect();
    let &[prefix, ref numbers @ ..] = words.as_slice() else {
        return None;
    };
    if prefix != PREFIX || !WORDS.contains(&words.len()) {
        return None;
    }
    let number = |at: usize| numbers.get(at)?.parse::<u64>().ok();
    let small = |at: usize| u32::try_from(number(at)?).ok();
    // A number, `-` for none, or what is no name of ours.
    let maybe = |at: usize| match numbers.get(at) {
        Some(&"-") => Some(None),
        _ => Some(Some(number(at)?)),
    };
    let maybe_small = |at: usize| match maybe(at)? {
        None => Some(None),
        Some(number) => Some(Some(u32::try_from(number).ok()?)),
    };
    let rings = match numbers[10] {
        "user" => Rings::User,
        "guest" => Rings::Guest,
        "all" => Rings::All,
        _ => return None,
    };
    let (group, follows, since) = of_group(numbers.get(15..).unwrap_or_default())?;
    let allowed = Allowed {
        group,
        lease: LeaseId(number(1)?),
        counter: usize::try_from(number(2)?).ok()?,
        pmu: pmu(small(12)?)?,
        counters: CounterSet::from_bits(number(3)?),
        event: HandedEvent {
            spec: EventSpec {
                perf_type: small(12)?,
                config: number(13)?,
                config1: 0,
                config2: 0,
            },
            thread: maybe_small(8)?,
            cpu: maybe_small(9)?,
            rings,
            period: maybe(11)?,
            follows,
        },
    };
    let life = (small(6)?, maybe(7)?.map(Started));
    let (uid, task) = (small(4)?, task_of(life));
    let of_user = task.as_ref().map_or(uid, Task::user);
    let open = OpenEvent {
        event: EventFile::new(event, &allowed.event, None, closer, of_user),
        allowed,
        uid,
        tenant: None,
        pid: small(5)?,
        root: (follows != Follows::Nothing).then(|| root_of(task, uid, since)),
        life,
        process: match numbers.get(14) {
            None => None,
            Some(_) => maybe(14)?.map(Started),
        },
        name: Some(name.to_owned()),
    };
    Some((number(0)?, open))
}

#[cfg(test)]
#[path = "manager_tests.rs"]
pub(super) mod tests;
