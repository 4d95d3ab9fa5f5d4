//! Who a client is, as the kernel tells it, and which threads its numbers mean.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use arbiter_host::ThreadId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use thiserror::Error;
use umpire_service::{Peer, unmapped_numbers};

use crate::task::{Ids, Life, Task, Text, cgroup, is_inner, number_here};

/// Most threads of a process of another PID namespace among which numbers are looked for:
/// everybody waits meanwhile.
const MOST_LOOKED_AT: usize = 512;

/// Most bytes of a path that are shown.
const MOST_SHOWN: usize = 128;

/// A client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Client {
    /// Its process; 0: one of no PID namespace that this one has.
    pub(crate) pid: u32,
    /// Its user; [`Peer::UNMAPPED`]: one that this process's user namespace does not have.
    pub(crate) uid: u32,
    /// Of its groups those that rules name: it may be in 65,536 of them, and each of its
    /// connections would have all of these.
    pub(crate) groups: Vec<u32>,
    /// Its control group in the unified hierarchy: bytes, like all names of files.
    pub(crate) cgroup: Option<Vec<u8>>,
    /// Its process, to tell it from a later one.
    pub(crate) process: Option<ThreadId>,
    /// Why there is no `process`, if that is no end of it: in words.
    pub(crate) not_seen: Option<String>,
    /// Whether that is in another PID namespace, whose numbers are not those here. `None`: it has
    /// to be looked at, which takes its time.
    pub(crate) is_inner: Option<bool>,
    /// What of it could not be learned, and why, in words; empty: all was.
    pub(crate) unknown: String,
}

/// Adds to what of a client could not be learned.
fn lacks(unknown: &mut String, what: std::fmt::Arguments<'_>) {
    let between = if unknown.is_empty() { "" } else { "; " };
    // A string takes all that is written to it.
    let _ = write!(unknown, "{between}{what}");
}

/// A number that means no thread for which its client may have a lease.
#[derive(Debug, Error)]
pub(crate) enum NoThread {
    /// The numbers of its namespace mean nothing here.
    #[error(
        "the process that asks is in a PID namespace that is neither the arbiter's nor below it, \
         so its threads cannot be told; run the arbiter in the host's PID namespace"
    )]
    Outside,
    /// Whoever has its number now is not it.
    #[error("the process that connected has ended, so its threads cannot be told; connect anew")]
    Gone,
    /// Whether it has it still, the kernel does not say.
    #[error("the process that asks cannot be looked at, so its threads cannot be told: {0}")]
    NotSeen(String),
    /// Its namespace is another one, and it is not there.
    #[error(
        "the process that asks is in a PID namespace of its own, and has no thread {0} there \
         (NSpid, among its first {most}); of such a namespace only the process's own threads can \
         be named",
        most = MOST_LOOKED_AT
    )]
    NotInNamespace(u32),
    /// There is no such thread.
    #[error("there is no thread {0}, or it has ended")]
    None(u32),
    /// It is another's.
    #[error("thread {0} is not one of this user's; a lease is for the caller's own threads")]
    Foreign(u32),
    /// The kernel does not say whose it is.
    #[error("whose thread {number} is cannot be told: {error}")]
    Unknown { number: u32, error: io::Error },
}

/// A number of a message that means no user, or no group of users, of this host's.
#[derive(Debug, Error)]
pub(crate) enum NoUser {
    /// The numbers of its namespaces mean nothing here.
    #[error(
        "the process that asks is in a PID namespace that is neither the arbiter's nor below it, \
         so it cannot be told whom it means; run the arbiter in the host's PID namespace"
    )]
    Outside,
    /// Whoever has its number now is not it.
    #[error("the process that asks has ended, so it cannot be told whom it means; connect anew")]
    Gone,
    /// It cannot be looked at.
    #[error("the process that asks cannot be looked at, so it cannot be told whom it means: {0}")]
    NotSeen(String),
    /// Here that is nobody.
    #[error(
        "in the user namespace of the process that asks that is nobody whom the arbiter's knows \
         (/proc/PID/uid_map, gid_map); ask from the host's"
    )]
    None,
}

impl Client {
    /// Who has connected. `named`: the groups of users that rules are about.
    pub(crate) fn of(socket: &impl AsFd, named: impl Iterator<Item = u32>) -> io::Result<Self> {
        let Peer { pid, uid, groups } = Peer::of(socket)?;
        let mut client = Client {
            pid,
            uid,
            groups: named.filter(|group| groups.contains(group)).collect(),
            ..Client::default()
        };
        if uid == Peer::UNMAPPED {
            lacks(
                &mut client.unknown,
                format_args!(
                    "its user is none of the arbiter's user namespace (/proc/self/uid_map), so it is \
                 nobody's"
                ),
            );
        }
        if pid == 0 {
            lacks(
                &mut client.unknown,
                format_args!(
                    "its process is in a PID namespace that is neither the arbiter's nor below it, so \
                 its control group cannot be told"
                ),
            );
            return Ok(client);
        }
        let life = Life::of(pid);
        let cgroup = cgroup(pid);
        // If the process is gone, its number may have been another's when that was read.
        let gone = match process(socket) {
            Ok(None) => Ok(false),
            Ok(Some(process)) => {
                client.is_inner = is_inner(&process).ok().flatten();
                Ok(has_ended(&process))
            }
            Err(error) if is_ended(&error) => Ok(true),
            Err(error) => Err(error),
        };
        client.set_process(gone, life, cgroup);
        Ok(client)
    }

    /// Other rules may be about others of its groups: it is known which it had as it connected.
    pub(crate) fn look_at_groups(&mut self, socket: &impl AsFd, named: impl Iterator<Item = u32>) {
        // What cannot be told stays as it is known.
        if let Ok(peer) = Peer::of(socket) {
            self.groups = named.filter(|group| peer.is_in(*group)).collect();
        }
    }

    /// `gone`: whether the process that connected has ended.
    fn set_process(
        &mut self,
        gone: io::Result<bool>,
        life: io::Result<Option<Life>>,
        cgroup: io::Result<Option<Vec<u8>>>,
    ) {
        match (gone, life) {
            (Ok(true), _) | (Ok(false), Ok(None)) => {
                lacks(&mut self.unknown, format_args!("its process has ended"));
            }
            (Ok(false), Ok(Some(life))) => {
                self.process = Some(life.id);
                self.set_cgroup(cgroup);
            }
            (Err(error), _) | (_, Err(error)) => {
                lacks(
                    &mut self.unknown,
                    format_args!("its process cannot be looked at: {error}"),
                );
                self.not_seen = Some(error.to_string());
            }
        }
    }

    /// A path that leaves the cgroup namespace of this process begins with `/..`:
    /// cgroup_namespaces(7).
    fn set_cgroup(&mut self, path: io::Result<Option<Vec<u8>>>) {
        match path {
            Ok(Some(path)) if path.split(|byte| *byte == b'/').nth(1) == Some(b"..") => {
                let path =
                    String::from_utf8_lossy(&path[..path.len().min(MOST_SHOWN)]).into_owned();
                lacks(
                    &mut self.unknown,
                    format_args!(
                        "its control group ({path:?}) is outside of the arbiter's cgroup namespace"
                    ),
                );
            }
            Ok(path) => self.cgroup = path,
            Err(error) => lacks(
                &mut self.unknown,
                format_args!("its control group cannot be read: {error}"),
            ),
        }
    }

    /// Whether its user is one of this host's, as far as this process can tell users.
    pub(crate) fn has_user(&self) -> bool {
        self.uid != Peer::UNMAPPED
    }

    /// The thread that a number of the client's means, whoever's it is. Adds to `looks` how many
    /// were looked at.
    ///
    /// # Errors
    /// It means none, or that cannot be told.
    pub(crate) fn thread(&self, number: u32, looks: &mut u64) -> Result<Task, NoThread> {
        let mut found = self.named(&[number], looks)?;
        found.pop().ok_or(NoThread::None(number))
    }

    /// The threads that the numbers of a request mean, for which it may have a lease: its
    /// user's; any, of an operator. Adds to `looks` how many were looked at.
    ///
    /// # Errors
    /// Which number means none of them, and why.
    pub(crate) fn threads(
        &self,
        numbers: &[u32],
        operator: bool,
        looks: &mut u64,
    ) -> Result<Vec<ThreadId>, NoThread> {
        let found = self.named(numbers, looks)?;
        let foreign = found
            .iter()
            .zip(numbers)
            .find(|(task, _)| !operator && !self.owns(task));
        match foreign {
            Some((_, number)) => Err(NoThread::Foreign(*number)),
            None => Ok(found.into_iter().map(|task| task.id).collect()),
        }
    }

    /// Whether a thread is one of its user's.
    fn owns(&self, task: &Task) -> bool {
        // Real, effective, saved, and of file accesses.
        self.has_user() && task.is_of(self.uid, None)
    }

    /// Whether a thread is one of its process, and of its user.
    pub(crate) fn runs(&self, task: &Task) -> bool {
        self.pid != 0 && task.process == self.pid && self.owns(task)
    }

    /// The threads that these numbers mean, in their order. Adds to `looks` how many were looked
    /// at.
    fn named(&self, numbers: &[u32], looks: &mut u64) -> Result<Vec<Task>, NoThread> {
        if self.pid == 0 {
            return Err(NoThread::Outside);
        }
        let process = self.process.ok_or_else(|| self.no_process())?;
        *looks += numbers.len() as u64;
        let of_namespace = if self.is_inner == Some(false) {
            0
        } else {
            MOST_LOOKED_AT
        };
        let text = Text::of(numbers.len() + of_namespace);
        let found = self.named_by(numbers, process, &text, looks);
        *looks += text.looks();
        found
    }

    fn named_by(
        &self,
        numbers: &[u32],
        process: ThreadId,
        text: &Text,
        looks: &mut u64,
    ) -> Result<Vec<Task>, NoThread> {
        if self.is_inner != Some(false) {
            let own = look(self.pid, text)?.filter(|task| task.id == process);
            let own = own.ok_or(NoThread::Gone)?;
            if self.is_inner.unwrap_or(own.inner.is_some()) {
                return self.named_within(numbers, text, looks);
            }
        }
        let found = numbers.iter().map(|&number| {
            let task = look(number, text)?.filter(|task| !task.ended);
            task.ok_or(NoThread::None(number))
        });
        found.collect()
    }

    /// The user here, or the group of users, that a number of the client's means, whatever user
    /// namespace it is in.
    ///
    /// # Errors
    /// It means none, or that cannot be told.
    pub(crate) fn number_here(&self, ids: Ids, number: u32) -> Result<u32, NoUser> {
        if self.pid == 0 {
            return Err(NoUser::Outside);
        }
        let not_seen = |why: &dyn std::fmt::Display| NoUser::NotSeen(why.to_string());
        let here = number_here(self.pid, ids, number).map_err(|error| not_seen(&error))?;
        // Whoever had its number a moment ago has it still, if that is this one.
        let process = self.process.ok_or_else(|| {
            let why = self.not_seen.as_ref();
            why.map_or(NoUser::Gone, |why| not_seen(why))
        })?;
        let life = Life::of(self.pid).map_err(|error| not_seen(&error))?;
        life.filter(|life| life.id == process).ok_or(NoUser::Gone)?;
        let shared = match ids {
            Ids::Users => unmapped_numbers().0,
            Ids::Groups => unmapped_numbers().1,
        };
        here.filter(|here| Some(*here) != shared)
            .ok_or(NoUser::None)
    }

    /// When its process was started, as far as that is known.
    pub(crate) fn started(&self) -> Option<Started> {
        self.process.map(|process| Started(process.started))
    }

    /// Why nobody knows which process it is.
    fn no_process(&self) -> NoThread {
        let why = self.not_seen.clone();
        why.map_or(NoThread::Gone, NoThread::NotSeen)
    }

    /// The same where numbers are those of another namespace: the last in `NSpid`
    /// (proc_pid_status(5)).
    fn named_within(
        &self,
        numbers: &[u32],
        text: &Text,
        looks: &mut u64,
    ) -> Result<Vec<Task>, NoThread> {
        let all = Task::numbers_of(self.pid).map_err(|error| NoThread::Unknown {
            number: numbers.first().copied().unwrap_or_default(),
            error,
        })?;
        let mut found: BTreeMap<u32, Option<u32>> =
            numbers.iter().map(|number| (*number, None)).collect();
        let mut left = found.len();
        for number in all.take(MOST_LOOKED_AT) {
            if left == 0 {
                break;
            }
            *looks += 1;
            // One that ends meanwhile has none.
            let inner = look(number, text)?.and_then(|task| task.inner);
            if let Some(place) = inner.and_then(|inner| found.get_mut(&inner)) {
                left -= usize::from(place.replace(number).is_none());
            }
        }
        let tasks = numbers.iter().map(|&number| {
            let none = || NoThread::NotInNamespace(number);
            let here = found.get(&number).copied().flatten().ok_or_else(none)?;
            let task = look(here, text)?.filter(|task| !task.ended);
            // Its number may be a later one's by now.
            let is = |task: &Task| task.process == self.pid && task.inner == Some(number);
            task.filter(is).ok_or_else(none)
        });
        tasks.collect()
    }
}

fn look(number: u32, text: &Text) -> Result<Option<Task>, NoThread> {
    Task::within(number, text).map_err(|error| NoThread::Unknown { number, error })
}

/// The process that has connected. `None`: the kernel names it by its number only (before
/// Linux 6.5).
///
/// # Errors
/// It has ended, or there is no descriptor for it.
pub(crate) fn process(socket: &impl AsFd) -> io::Result<Option<OwnedFd>> {
    let unknown = Errno::NOPROTOOPT.raw_os_error();
    match Peer::pidfd(socket) {
        Err(error) if error.raw_os_error() == Some(unknown) => Ok(None),
        process => process.map(Some),
    }
}

/// Whether the kernel says so of a process that has ended, rather than of what this one lacks.
fn is_ended(error: &io::Error) -> bool {
    let ended = [Errno::INVAL, Errno::SRCH].map(|errno| Some(errno.raw_os_error()));
    ended.contains(&error.raw_os_error())
}

/// A descriptor of the process that has this number now.
///
/// # Errors
/// There is none.
pub(crate) fn open_process(number: u32) -> io::Result<OwnedFd> {
    let number = i32::try_from(number).ok().and_then(Pid::from_raw);
    Ok(pidfd_open(number.ok_or(Errno::SRCH)?, PidfdFlags::empty())?)
}

/// Whether the process of a descriptor has ended.
pub(crate) fn has_ended(process: &OwnedFd) -> bool {
    let mut ended = [PollFd::new(process, PollFlags::IN)];
    // A signal that this process gets says nothing of that one.
    retry_on_intr(|| poll(&mut ended, Some(&Timespec::default()))) != Ok(0)
}

/// What tells a thread from a later one of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Started(pub(crate) u64);

/// A thread of the process that is `client`, of its user. `None`: it is not.
///
/// # Errors
/// It cannot be looked at.
pub(crate) fn thread(thread: u32, client: &Client) -> io::Result<Option<Started>> {
    let own = Task::of(thread)?.filter(|task| client.runs(task));
    Ok(own.map(|own| Started(own.id.started)))
}

/// Whether nobody has a thread's number any more, or only one that was started later. Of one
/// that cannot be looked at nobody knows: it is there.
pub(crate) fn is_gone(started: Option<Started>, life: &io::Result<Option<Life>>) -> bool {
    match (life, started) {
        (Err(_), _) => false,
        (Ok(life), Some(started)) => life.is_none_or(|life| life.id.started != started.0),
        // Whoever has the number may be it.
        (Ok(life), None) => life.is_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_process() {
        let pid = std::process::id();
        let me = Client {
            pid,
            uid: rustix::process::geteuid().as_raw(),
            process: Life::of(pid)
                .expect("it can be looked at")
                .map(|life| life.id),
            ..Client::default()
        };
        let own = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).expect("an id");
        let thread = |number, client: &Client| thread(number, client).expect("it can be seen");
        assert!(thread(own, &me).is_some() && thread(me.pid, &me).is_some());
        assert_eq!(thread(own, &me), thread(own, &me));
        assert!(!is_gone(thread(own, &me), &Life::of(own)));
        assert!(is_gone(thread(own, &me), &Life::of(u32::MAX)));
        let threads = |client: &Client, operator| {
            let mut looks = 0;
            let found = client.threads(&[own], operator, &mut looks);
            found.map_err(|error| error.to_string())
        };
        let mine = threads(&me, false).expect("it is its own");
        assert_eq!(mine, [me.thread(own, &mut 0).expect("it is there").id]);
        let other = Client {
            pid: 1,
            ..me.clone()
        };
        assert_eq!(thread(own, &other), None);
        let stranger = Client {
            uid: me.uid + 1,
            ..me.clone()
        };
        assert_eq!(thread(own, &stranger), None);
        assert!(
            threads(&stranger, false)
                .expect_err("it is not")
                .contains("this user's")
        );
        assert_eq!(threads(&stranger, true), Ok(mine));
        let unmapped = Client {
            uid: Peer::UNMAPPED,
            ..me.clone()
        };
        assert!(threads(&unmapped, false).is_err());
        // Its numbers are of a namespace that has none of them.
        let inner = Client {
            is_inner: Some(true),
            ..me.clone()
        };
        assert!(
            threads(&inner, true)
                .expect_err("it is not")
                .contains("NSpid")
        );
        let outside = Client {
            pid: 0,
            ..me.clone()
        };
        assert!(
            threads(&outside, true)
                .expect_err("it is not")
                .contains("PID namespace")
        );
        let not_seen = Client {
            process: None,
            not_seen: Some("/proc is not there".to_owned()),
            ..me.clone()
        };
        let why = threads(&not_seen, true).expect_err("it is not");
        assert!(
            why.contains("/proc is not there") && !why.contains("has ended"),
            "{why}"
        );
        let gone = Client {
            process: None,
            ..me
        };
        assert!(
            threads(&gone, true)
                .expect_err("it is not")
                .contains("has ended")
        );
    }

    #[test]
    fn a_number_of_a_client_is_its_own_namespaces() {
        let pid = std::process::id();
        let me = Client {
            pid,
            process: Life::of(pid)
                .expect("it can be looked at")
                .map(|life| life.id),
            ..Client::default()
        };
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(me.number_here(Ids::Users, own).expect("a number"), own);
        let later = me.process.map(|id| ThreadId {
            started: id.started + 1,
            ..id
        });
        for (client, part) in [
            (
                Client {
                    pid: 0,
                    ..me.clone()
                },
                "PID namespace",
            ),
            (
                Client {
                    process: None,
                    ..me.clone()
                },
                "has ended",
            ),
            (
                Client {
                    process: later,
                    ..me.clone()
                },
                "has ended",
            ),
            (
                Client {
                    process: None,
                    not_seen: Some("hidepid".to_owned()),
                    ..me
                },
                "hidepid",
            ),
        ] {
            let why = client
                .number_here(Ids::Groups, 0)
                .expect_err("nobody")
                .to_string();
            assert!(why.contains(part), "{why}");
        }
    }

    /// A lack of descriptors, or of rights, is this process's, and no end of another.
    #[test]
    fn who_cannot_be_looked_at_has_not_ended() {
        let seen = |gone: io::Result<bool>, task: io::Result<Option<Life>>| {
            let mut client = Client {
                pid: 9,
                ..Client::default()
            };
            client.set_process(gone, task, Ok(None));
            let why = client.no_process().to_string();
            (client.process.is_some(), why.contains("has ended"), why)
        };
        let task = || Life::of(std::process::id());
        assert!(seen(Ok(false), task()).0);
        for (gone, task) in [(Ok(true), task()), (Ok(false), Ok(None))] {
            let (is_seen, ended, why) = seen(gone, task);
            assert!(!is_seen && ended, "{why}");
        }
        let full = || io::Error::from(Errno::MFILE);
        for (gone, task) in [(Err(full()), task()), (Ok(false), Err(full()))] {
            let (is_seen, ended, why) = seen(gone, task);
            assert!(!is_seen && !ended && why.contains("open files"), "{why}");
        }
        assert!(is_ended(&Errno::SRCH.into()) && !is_ended(&full()));
        let me = task().expect("it can be seen").expect("it is there");
        for (started, task, gone) in [
            (Some(me.id.started), task(), false),
            (Some(me.id.started + 1), task(), true),
            (Some(1), Ok(None), true),
            (Some(1), Err(full()), false),
            (None, task(), false),
            (None, Ok(None), true),
        ] {
            assert_eq!(is_gone(started.map(Started), &task), gone, "{started:?}");
        }
    }

    #[test]
    fn a_control_group_outside_of_the_namespace_is_none() {
        for (path, seen) in [
            (&b"/"[..], true),
            (b"/a/\xff", true),
            (b"/a..b", true),
            (b"/..b", true),
            (b"/..", false),
            (b"/../b", false),
            (b"/../../c.slice", false),
        ] {
            let mut client = Client::default();
            client.set_cgroup(Ok(Some(path.to_vec())));
            assert_eq!(client.cgroup.is_some(), seen, "{path:?}");
            assert_eq!(client.unknown.is_empty(), seen, "{path:?}");
        }
        let mut client = Client::default();
        client.set_cgroup(Err(io::ErrorKind::PermissionDenied.into()));
        assert!(client.unknown.contains("cannot be read"));
    }
}
