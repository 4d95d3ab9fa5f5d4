//! Control groups (version 2): which one a path means, and who runs in it. A group is found by a
//! path once, and known by the kernel's number from then on: that of its inode, which the kernel
//! gives to no other one before the next boot. A path may be another's by now.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arbiter_host::{Group, GroupId, HostArbiter, Scope, ThreadId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, fstat, fstatfs, open, openat2};
use rustix::io::Errno;
use thiserror::Error;

use crate::config::{hierarchies, without_mount};
use crate::task::{self, Life, Task, Text};
use crate::unseen::is_unseen;

/// Groups are in no more others.
pub(crate) const DEEPEST: usize = 64;
/// Most bytes of a path, as the kernel has it.
const LONGEST: usize = 4096;
/// What is looked at for one lease at most: each process takes some system calls, of a thread only
/// the number is read.
const PROCESSES: Most = Most {
    groups: 128,
    numbers: 1024,
};
const THREADS: Most = Most {
    groups: 1024,
    numbers: 1 << 14,
};

/// Through so many groups of a host it is looked for those whose numbers alone are known.
const MOST_GROUPS: usize = 1 << 14;

#[derive(Clone, Copy, Debug)]
struct Most {
    groups: usize,
    numbers: usize,
}

/// A number in a file has so many bytes at most, with the end of its line.
const LONGEST_NUMBER: usize = 11;
/// So many numbers that are read cost as much as a look.
const NUMBERS: u64 = 64;
/// `CGROUP2_SUPER_MAGIC` of `<linux/magic.h>`.
const CGROUP2: i64 = 0x6367_7270;

/// A control group cannot be had. Each prints as one line.
#[derive(Debug, Error)]
pub(crate) enum NoGroup {
    #[error(
        "this host has no control groups of version 2 where the arbiter sees them (mount -t \
         cgroup2)"
    )]
    NoHierarchy,
    #[error(
        "cgroup '{0}': {1}; write it as /proc/PID/cgroup has it behind '0::', or without the \
         first '/' from the caller's own group on"
    )]
    Path(String, &'static str),
    #[error("cgroup '{0}': that is everything; ask with scope cpu")]
    Root(String),
    #[error(
        "cgroup '{0}' is not there; {hint}",
        hint = without_mount(.0).unwrap_or_else(|| "make it first".to_owned())
    )]
    NotThere(String),
    #[error("cgroup '{0}' is no control group of version 2")]
    NotV2(String),
    #[error("cgroup '{0}' is threaded; name the group above it that has processes of its own")]
    Threaded(String),
    #[error(
        "cgroup '{0}': too much runs in it, or in too many groups below it, to see whose it is"
    )]
    TooMany(String),
    #[error(
        "cgroup '{0}': process {1} in it is not of user {2}; a group is leased whose \
         processes are all of one user, and whoever runs in it by an operator, or by its name \
         where the policy has that (for-cgroups)"
    )]
    Foreign(String, u32, Who),
    #[error(
        "cgroup '{0}' is another user's, and no process of user {1} runs in it itself, whatever \
         runs below it; ask for the group in which it runs, or the operator can let this user ask \
         for this one by its name (for-cgroups)"
    )]
    NotOwn(String, u32),
    #[error("cgroup '{0}': a process in it is of a PID namespace that the arbiter does not see")]
    Outside(String),
    #[error(
        "thread {thread} of cgroup '{path}' has a lease of its own (lease {lease}); end that first"
    )]
    Leased {
        path: String,
        thread: u32,
        lease: u64,
    },
    #[error("cgroup '{0}' cannot be looked at: {1}")]
    Io(String, io::Error),
}

/// A user, and a group of users where one was named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Who {
    pub(crate) uid: u32,
    pub(crate) gid: Option<u32>,
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.gid {
            None => write!(f, "{}", self.uid),
            Some(gid) => write!(f, "{} and group {gid}", self.uid),
        }
    }
}

/// For whom a group is to be leased.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Job {
    /// For whoever runs in it: an operator asks.
    Anybody,
    /// For the user that asks.
    Own(u32),
    /// For a user that does not ask itself; the group may be made for it, and empty.
    Others { uid: u32, gid: u32 },
}

impl Job {
    fn who(self) -> Option<Who> {
        match self {
            Job::Anybody => None,
            Job::Own(uid) => Some(Who { uid, gid: None }),
            Job::Others { uid, gid } => Some(Who {
                uid,
                gid: Some(gid),
            }),
        }
    }
}

/// The groups of this host.
#[derive(Debug)]
pub(crate) struct Tree {
    top: OwnedFd,
}

/// A group that a path has meant. It stays the same, whoever has the path later.
#[derive(Debug)]
pub(crate) struct NamedGroup {
    folder: OwnedFd,
    pub(crate) group: Group,
}

impl Tree {
    /// Where the whole hierarchy is mounted, on hosts that have no other and on those that have
    /// others beside it.
    pub(crate) fn open(root: &Path) -> Result<Self, NoGroup> {
        let mounted = hierarchies(root).unwrap_or_default();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let tops = mounted
            .iter()
            .filter_map(|path| open(path, flags, Mode::empty()).ok());
        // Something else may be mounted over it.
        let mut tops = tops.filter(|top| is_v2(top).is_ok_and(|is| is));
        let top = tops.next().ok_or(NoGroup::NoHierarchy)?;
        Ok(Tree { top })
    }

    /// The group that an absolute path means now.
    pub(crate) fn find(&self, path: &str) -> Result<NamedGroup, NoGroup> {
        let (folder, mut chain) = self.walk(path.as_bytes())?;
        let (Some(folder), Some(id)) = (folder, chain.pop()) else {
            return Err(NoGroup::Root(path.to_owned()));
        };
        let group = Group {
            id,
            above: chain,
            path: path.to_owned(),
        };
        Ok(NamedGroup { folder, group })
    }

    /// Whether something runs in a group or below it, whoever has its path now.
    ///
    /// # Errors
    /// That cannot be seen.
    pub(crate) fn state(&self, group: &Group) -> Result<GroupState, NoGroup> {
        match self.events_of(group)? {
            None => Ok(GroupState::Gone),
            Some(events) => {
                let seen = seen_of(&events);
                seen.map(|seen| seen.state)
                    .map_err(|error| NoGroup::Io(group.path.clone(), error.into()))
            }
        }
    }

    /// The `cgroup.events` of the group itself; `None`: it is gone, whoever has its path now.
    ///
    /// # Errors
    /// It cannot be looked for.
    pub(crate) fn events_of(&self, group: &Group) -> Result<Option<File>, NoGroup> {
        self.file_of(group, NamedGroup::EVENTS)
    }

    /// How long all that has ever run in a group or below it has run, in microseconds
    /// (`usage_usec` of `cpu.stat`). `None`: it is gone, or its kernel does not tell.
    pub(crate) fn usage(&self, group: &Group) -> Option<u64> {
        let mut text = [0; 256];
        let file = self.file_of(group, "cpu.stat").ok()??;
        let length = file.read_at(&mut text, 0).ok()?;
        let used = value(&text[..length], b"usage_usec ")?;
        str::from_utf8(used).ok()?.parse().ok()
    }

    /// A file of the group itself; `None`: it is gone, whoever has its path now.
    fn file_of(&self, group: &Group, name: &str) -> Result<Option<File>, NoGroup> {
        let named = match self.find(&group.path) {
            Err(NoGroup::NotThere(_)) => return Ok(None),
            named => named?,
        };
        if named.group.id != group.id {
            return Ok(None);
        }
        match file(&named.folder, name) {
            Err(error) if is_removed(error) => Ok(None),
            file => file
                .map(Some)
                .map_err(|error| NoGroup::Io(group.path.clone(), error.into())),
        }
    }

    /// Whether a thread runs in a group or below it.
    ///
    /// # Errors
    /// That cannot be seen.
    pub(crate) fn runs_in(&self, thread: u32, group: &Group) -> Result<bool, NoGroup> {
        let path = match task::cgroup(thread) {
            // It has ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            path => path.map_err(|error| NoGroup::Io(group.path.clone(), error))?,
        };
        match path.map(|path| self.chain(&path)) {
            // It was removed, with nothing in it.
            None | Some(Err(NoGroup::NotThere(_))) => Ok(false),
            Some(chain) => Ok(chain?.contains(&group.id)),
        }
    }

    /// The groups that have these numbers. `None`: there are more groups than are looked
    /// through.
    pub(crate) fn numbered(&self, numbers: &BTreeSet<GroupId>) -> Option<Vec<Group>> {
        let mut found = Vec::new();
        let mut paths = vec![PathBuf::from(".")];
        let mut seen = 0;
        while let Some(path) = paths.pop() {
            seen += 1;
            let read = below(&self.top, &path).and_then(|folder| {
                let number = GroupId(fstat(&folder)?.st_ino);
                Ok((
                    number,
                    folders(&folder, MOST_GROUPS - seen.min(MOST_GROUPS))?,
                ))
            });
            // It was removed meanwhile.
            let Ok((number, inside)) = read else { continue };
            if numbers.contains(&number) {
                let names = path.strip_prefix(".").ok()?.to_str();
                found.extend(names.and_then(|names| self.find(&format!("/{names}")).ok()));
            }
            paths.extend(inside?.into_iter().map(|name| path.join(name)));
            if seen + paths.len() > MOST_GROUPS {
                return None;
            }
        }
        Some(found.into_iter().map(|named| named.group).collect())
    }

    /// The groups that a path leads through, from the outermost on: that of a process, whose
    /// names are any bytes. Deeper ones than can be leased are left out: whoever makes them does
    /// not hide where it runs.
    pub(crate) fn chain(&self, path: &[u8]) -> Result<Vec<GroupId>, NoGroup> {
        let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        let end = slashes.map(|(at, _)| at).nth(DEEPEST);
        self.walk(&path[..end.unwrap_or(path.len())])
            .map(|(_, chain)| chain)
    }

    /// The folder of an absolute path, and the groups on the way. No folder: the root.
    fn walk(&self, path: &[u8]) -> Result<(Option<OwnedFd>, Vec<GroupId>), NoGroup> {
        let names = names(path)?;
        let failed = |error| failed(&shown(path), error);
        let mut folder: Option<OwnedFd> = None;
        let mut chain = Vec::new();
        for name in names {
            // What a group is in stays what it is in: each is opened in the one above it.
            let above = folder.as_ref().unwrap_or(&self.top);
            let next = below(above, name).map_err(failed)?;
            if !is_v2(&next).map_err(failed)? {
                return Err(NoGroup::NotV2(shown(path)));
            }
            chain.push(GroupId(fstat(&next).map_err(failed)?.st_ino));
            folder = Some(next);
        }
        Ok((folder, chain))
    }
}

/// What is seen of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupState {
    /// Something runs in it, or below it.
    Runs,
    /// Nothing does.
    Empty,
    /// Nothing does any more: something has come since the last look, and gone.
    Left,
    /// There is no such group any more.
    Gone,
    /// That cannot be told: it is as it was.
    Unknown,
}

/// The groups of this host for whoever has no tree yet: they are looked for when one is asked
/// for first.
#[derive(Debug)]
pub(crate) struct LateTree {
    root: PathBuf,
    tree: OnceCell<Tree>,
}

impl LateTree {
    /// The kernel's files are below `root`.
    pub(crate) fn new(root: &Path) -> Self {
        LateTree {
            root: root.to_owned(),
            tree: OnceCell::new(),
        }
    }

    /// Whether one was asked for.
    pub(crate) fn is_known(&self) -> bool {
        self.tree.get().is_some()
    }

    /// # Errors
    /// There is no hierarchy of version 2.
    pub(crate) fn get(&self) -> Result<&Tree, NoGroup> {
        match self.tree.get() {
            Some(tree) => Ok(tree),
            None => {
                let tree = Tree::open(&self.root)?;
                Ok(self.tree.get_or_init(|| tree))
            }
        }
    }
}

/// A path of a request from the root of the hierarchy on. `own`: the group of who asks.
///
/// # Errors
/// It is none, whatever groups there are, or that group is not known.
pub(crate) fn absolute(path: &str, own: Option<&[u8]>) -> Result<String, NoGroup> {
    let absolute = from_root(path, own)?;
    if absolute.chars().any(is_unseen) {
        // Whoever lists leases has it on a terminal.
        let path = absolute.escape_default().take(256).collect();
        return Err(NoGroup::Path(
            path,
            "it has control characters, or others that are not seen",
        ));
    }
    // Rules are asked by names, so they are asked of a path that is made of nothing else.
    names(absolute.as_bytes())?;
    Ok(absolute)
}

fn from_root(path: &str, own: Option<&[u8]>) -> Result<String, NoGroup> {
    if path.starts_with('/') {
        return Ok(path.to_owned());
    }
    let wrong = |why| NoGroup::Path(path.to_owned(), why);
    let own = own.ok_or_else(|| wrong("the caller's own group is not known here"))?;
    let own = std::str::from_utf8(own).map_err(|_| {
        wrong("the caller's own group has a name that is not UTF-8, and no message can have that")
    })?;
    match path {
        "" => Err(wrong("it is empty")),
        "." => Ok(own.to_owned()),
        below => Ok(format!("{}/{below}", own.strip_suffix('/').unwrap_or(own))),
    }
}

/// A path as a message has it, the start of a long one.
pub(crate) fn shown(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    let shown = text.chars().map(|one| {
        if is_unseen(one) {
            char::REPLACEMENT_CHARACTER
        } else {
            one
        }
    });
    shown.take(256).collect()
}

/// The control group in which a thread runs, by its path, which is empty where that is none but
/// the root. A process whose first thread has ended runs where its others do. `None`: it does not
/// run any more.
///
/// # Errors
/// It cannot be told.
pub(crate) fn path_of(thread: ThreadId) -> io::Result<Option<Vec<u8>>> {
    let path = path_of_running(thread)?;
    // No other thread is there once it has ended.
    let is_first = |life: Life| life.id == thread;
    if path.is_some() || !Life::of(thread.number)?.is_some_and(is_first) {
        return Ok(path);
    }
    let others = match Task::numbers_of(thread.number) {
        Err(error) if task::is_none(&error) => return Ok(None),
        others => others?,
    };
    for number in others.filter(|number| *number != thread.number) {
        let Some(life) = Life::of(number)? else {
            continue;
        };
        let path = path_of_running(life.id)?;
        if path.is_some() {
            return Ok(path);
        }
    }
    Ok(None)
}

fn path_of_running(thread: ThreadId) -> io::Result<Option<Vec<u8>>> {
    let path = match task::cgroup(thread.number) {
        Err(error) if task::is_none(&error) => return Ok(None),
        path => path?,
    };
    // Whoever has its number now may be another.
    let is_it = |life: &Life| life.id == thread && !life.ended;
    let is_there = Life::of(thread.number)?.as_ref().is_some_and(is_it);
    let path = path.filter(|path| path != b"/").unwrap_or_default();
    Ok(is_there.then_some(path))
}

/// The innermost of some groups, from the outermost on, that has a lease, or waits for one.
pub(crate) fn innermost_leased(arbiter: &HostArbiter, chain: &[GroupId]) -> Option<Arc<Group>> {
    let leased = arbiter.leased_groups();
    let id = chain
        .iter()
        .rev()
        .find_map(|group| leased.get(group)?.first())?;
    arbiter.lease(*id)?.terms.scope.group().cloned()
}

/// Whether a lease for threads is not any more what it was, with one of them in these groups now,
/// from the outermost on.
pub(crate) fn has_moved(arbiter: &HostArbiter, scope: &Scope, chain: &[GroupId]) -> bool {
    match scope {
        Scope::Cpu | Scope::Group(_) => false,
        Scope::Thread(_) => innermost_leased(arbiter, chain).is_some(),
        Scope::Part(part) if part.with_others => !chain.contains(&part.of.id),
        Scope::Part(part) => {
            let leased = innermost_leased(arbiter, chain);
            leased.is_none_or(|leased| leased.id != part.of.id)
        }
    }
}

/// The names that an absolute path is made of.
fn names(path: &[u8]) -> Result<Vec<&[u8]>, NoGroup> {
    let wrong = |why| Err(NoGroup::Path(shown(path), why));
    let Some(inner) = path.strip_prefix(b"/") else {
        return wrong("it does not begin at the root of the hierarchy");
    };
    if path.len() > LONGEST || path.iter().any(|byte| matches!(byte, 0 | b'\n')) {
        return wrong("no control group has such a path");
    }
    let inner = inner.strip_suffix(b"/").unwrap_or(inner);
    if inner.is_empty() {
        return Ok(Vec::new());
    }
    let names: Vec<&[u8]> = inner.split(|byte| *byte == b'/').collect();
    if names.iter().any(|name| matches!(*name, b"." | b"..")) {
        return wrong("it has '.' or '..' for a name");
    }
    if names.iter().any(|name| name.is_empty()) {
        return wrong("a name in it is empty");
    }
    if names.len() > DEEPEST {
        return wrong("it is in too many others");
    }
    Ok(names)
}

/// The folder of this name in another, or of this path from there on, and nothing that a link or
/// a mount puts there.
fn below(folder: &OwnedFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    openat2(folder, name, flags, Mode::empty(), resolve)
}

fn is_v2(folder: &impl AsFd) -> rustix::io::Result<bool> {
    let kind = fstatfs(folder)?.f_type;
    #[cfg(test)]
    if crate::played::is_v2(kind) {
        return Ok(true);
    }
    Ok(kind == CGROUP2)
}

fn failed(path: &str, error: Errno) -> NoGroup {
    match error {
        Errno::NOENT | Errno::NODEV | Errno::NOTDIR => NoGroup::NotThere(path.to_owned()),
        Errno::LOOP | Errno::XDEV => NoGroup::NotV2(path.to_owned()),
        Errno::OPNOTSUPP => NoGroup::Threaded(path.to_owned()),
        other => NoGroup::Io(path.to_owned(), other.into()),
    }
}

/// Whether the kernel says so of a group that was removed.
fn is_removed(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NODEV)
}

/// What a `cgroup.events` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupSeen {
    pub(crate) state: GroupState,
    /// All that is there stands still, by `cgroup.freeze`.
    pub(crate) frozen: bool,
}

/// Whether something has changed in a group since its `cgroup.events` was read last.
pub(crate) fn has_news(events: &File) -> bool {
    let mut polled = [PollFd::new(events, PollFlags::PRI)];
    let news = poll(&mut polled, Some(&Timespec::default()));
    news.is_ok() && polled[0].revents().contains(PollFlags::PRI)
}

/// What the `cgroup.events` of a group says. What is read is not news any more.
pub(crate) fn seen_of(events: &File) -> rustix::io::Result<GroupSeen> {
    let mut text = [0; 256];
    let length = match events.read_at(&mut text, 0) {
        Ok(length) => length,
        Err(error) => {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            let gone = GroupSeen {
                state: GroupState::Gone,
                frozen: false,
            };
            return is_removed(errno).then_some(gone).ok_or(errno);
        }
    };
    let text = &text[..length];
    let state = match value(text, b"populated ") {
        Some(b"0") => GroupState::Empty,
        Some(_) => GroupState::Runs,
        None => return Err(Errno::IO),
    };
    // Kernels before 5.2 freeze none.
    let frozen = value(text, b"frozen ") == Some(b"1");
    Ok(GroupSeen { state, frozen })
}

/// What is behind a name in a file of lines.
fn value<'a>(text: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let mut lines = text.split(|byte| *byte == b'\n');
    lines.find_map(|line| line.strip_prefix(name))
}

impl NamedGroup {
    /// The file that tells whether something runs in it.
    const EVENTS: &str = "cgroup.events";

    /// Its `cgroup.events`.
    pub(crate) fn events(&self) -> rustix::io::Result<File> {
        file(&self.folder, Self::EVENTS)
    }

    /// Its folder, to be read from: that is how perf_event_open(2) wants a group.
    pub(crate) fn to_read(&self) -> rustix::io::Result<OwnedFd> {
        to_read(&self.folder)
    }

    /// Whether it may be leased for that one: all that runs in it and below it is of it.
    /// Adds to `looks` how many were looked at.
    pub(crate) fn check(&self, job: Job, looks: &mut u64) -> Result<(), NoGroup> {
        let path = || self.group.path.clone();
        let Some(who) = job.who() else {
            // Still it has to be one that tells of its end.
            return self
                .events()
                .map(drop)
                .map_err(|error| failed(&path(), error));
        };
        let processes = self.numbers("cgroup.procs", PROCESSES, looks)?;
        *looks += processes.len() as u64;
        let text = Text::of(processes.len());
        let checked = self.are_of(who, &processes, &text);
        *looks += text.looks();
        checked?;
        match job {
            Job::Own(uid) => self.is_of(uid, &processes, looks),
            Job::Anybody | Job::Others { .. } => Ok(()),
        }
    }

    /// Whether it is a user's own: its folder is, or one of `processes`, which are the user's, runs
    /// in it itself. One that runs below it says nothing of it: others may have groups beside that
    /// one, which would be below this lease, too.
    fn is_of(&self, uid: u32, processes: &BTreeSet<u32>, looks: &mut u64) -> Result<(), NoGroup> {
        let failed = |error| failed(&self.group.path, error);
        if fstat(&self.folder).map_err(failed)?.st_uid == uid {
            return Ok(());
        }
        *looks += 1;
        let own = numbers_in(&self.folder, "cgroup.procs", PROCESSES.numbers).map_err(failed)?;
        let runs = |own: Vec<u32>| own.iter().any(|number| processes.contains(number));
        let not_own = || NoGroup::NotOwn(self.group.path.clone(), uid);
        own.is_some_and(runs).then_some(()).ok_or_else(not_own)
    }

    fn are_of(&self, who: Who, processes: &BTreeSet<u32>, text: &Text) -> Result<(), NoGroup> {
        let path = || self.group.path.clone();
        for &process in processes {
            let task = Task::within(process, text).map_err(|error| NoGroup::Io(path(), error))?;
            // One that has ended meanwhile runs there no more.
            let is_foreign = task.is_some_and(|task| !task.is_of(who.uid, who.gid));
            if is_foreign {
                return Err(NoGroup::Foreign(path(), process, who));
            }
        }
        Ok(())
    }

    /// Whether its path is that of a group in it or below it, or its own. No group of version 2
    /// can be renamed, so a path of now is as good as a number.
    pub(crate) fn has(&self, path: &[u8]) -> bool {
        let below = path.strip_prefix(self.group.path.trim_end_matches('/').as_bytes());
        below.is_some_and(|below| below.is_empty() || below.starts_with(b"/"))
    }

    /// The numbers of the threads that run in it and below it.
    pub(crate) fn threads(&self, looks: &mut u64) -> Result<BTreeSet<u32>, NoGroup> {
        self.numbers("cgroup.threads", THREADS, looks)
    }

    /// The numbers in a file of it, and of all groups below it.
    fn numbers(&self, name: &str, most: Most, looks: &mut u64) -> Result<BTreeSet<u32>, NoGroup> {
        let path = || self.group.path.clone();
        let too_many = || NoGroup::TooMany(path());
        let mut numbers = BTreeSet::new();
        // One is open at a time, however many there are.
        let mut groups = vec![PathBuf::from(".")];
        let mut seen = 0;
        while let Some(inner) = groups.pop() {
            seen += 1;
            *looks += 1;
            let left = most.groups.saturating_sub(seen + groups.len());
            let read = below(&self.folder, &inner).and_then(|folder| {
                let there = numbers_in(&folder, name, most.numbers)?;
                Ok((there, folders(&folder, left)?))
            });
            let (there, inside) = match read {
                // It was removed meanwhile, with nothing in it; or it is threaded, and its
                // processes are those of the one above that is not.
                Err(Errno::NOENT | Errno::NODEV | Errno::OPNOTSUPP) if seen > 1 => continue,
                Err(Errno::NAMETOOLONG) => return Err(too_many()),
                read => read.map_err(|error| failed(&path(), error))?,
            };
            let (Some(there), Some(inside)) = (there, inside) else {
                *looks += most.numbers as u64 / NUMBERS;
                return Err(too_many());
            };
            *looks += there.len() as u64 / NUMBERS;
            numbers.extend(there);
            groups.extend(inside.into_iter().map(|name| inner.join(name)));
            if numbers.len() > most.numbers {
                return Err(too_many());
            }
        }
        if numbers.contains(&0) {
            return Err(NoGroup::Outside(path()));
        }
        Ok(numbers)
    }
}

fn file(folder: &OwnedFd, name: &str) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    openat2(folder, name, flags, Mode::empty(), resolve).map(File::from)
}

/// The numbers in a file of a group; `None`: they are more than `most`.
fn numbers_in(folder: &OwnedFd, name: &str, most: usize) -> rustix::io::Result<Option<Vec<u32>>> {
    let mut text = String::new();
    let file = file(folder, name)?;
    let bytes = (most + 1) * LONGEST_NUMBER;
    let read = io::Read::read_to_string(&mut io::Read::take(file, bytes as u64), &mut text);
    if let Err(error) = read {
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    if text.len() >= bytes {
        return Ok(None);
    }
    let numbers: Vec<u32> = text.lines().filter_map(|line| line.parse().ok()).collect();
    Ok(Some(numbers).filter(|numbers| numbers.len() <= most))
}

fn to_read(folder: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat2(folder, ".", flags, Mode::empty(), ResolveFlags::BENEATH)
}

/// The names of the groups in one; `None`: they are more than `most`.
fn folders(folder: &OwnedFd, most: usize) -> rustix::io::Result<Option<Vec<OsString>>> {
    let all = to_read(folder)?;
    let mut found = Vec::new();
    for entry in Dir::new(all)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if entry.file_type() != FileType::Directory || matches!(name, b"." | b"..") {
            continue;
        }
        if found.len() == most {
            return Ok(None);
        }
        found.push(OsStr::from_bytes(name).to_owned());
    }
    Ok(Some(found))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A group of the test's own on this host; `None`: there can be none here, as was said.
    pub(crate) fn group(test: &str) -> Option<(PathBuf, NamedGroup)> {
        let root = Path::new("/");
        let name = format!("umpire-groups-{test}-{}", std::process::id());
        let mut tops = hierarchies(root).unwrap_or_default().into_iter();
        let folder = tops.next().map(|top| top.join(&name));
        let made = folder.filter(|folder| fs::create_dir(folder).is_ok());
        if made.is_none() {
            println!("skipped: {test}: no control groups of version 2 can be made here");
        }
        let folder = made?;
        let named = Tree::open(root).and_then(|tree| tree.find(&format!("/{name}")));
        Some((folder, named.expect("it was made")))
    }

    pub(crate) fn run(folder: &Path) -> Child {
        let mut command = Command::new("cat");
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let child = child.expect("cat starts");
        fs::write(folder.join("cgroup.procs"), child.id().to_string()).expect("it runs there");
        child
    }

    pub(crate) fn end(mut child: Child, folders: &[&Path]) {
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        end_all(folders);
    }

    pub(crate) fn end_all(folders: &[&Path]) {
        for folder in folders {
            while fs::remove_dir(folder)
                .is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
            {
                std::thread::yield_now();
            }
        }
    }

    /// As VMs of libvirt are: the processes are those of the group above the threaded ones.
    #[test]
    fn threaded_groups_are_below_the_one_whose_processes_run_there() {
        let Some((folder, named)) = group("threaded") else {
            return;
        };
        let inner = folder.join("vcpu0");
        fs::create_dir(&inner).expect("a group below it");
        fs::write(inner.join("cgroup.type"), "threaded").expect("it is threaded");
        let child = run(&folder);
        let own = rustix::process::getuid().as_raw();
        let checked = [own, own + 1].map(|uid| named.check(Job::Own(uid), &mut 0));
        let number = child.id();
        end(child, &[&inner, &folder]);
        assert!(checked[0].is_ok(), "{checked:?}");
        let foreign =
            matches!(checked[1], Err(NoGroup::Foreign(_, process, _)) if process == number);
        assert!(foreign, "{checked:?}");
    }

    #[test]
    fn of_many_groups_some_are_looked_at_and_one_is_open() {
        let Some((folder, named)) = group("many") else {
            return;
        };
        let inner: Vec<PathBuf> = (0..PROCESSES.groups)
            .map(|at| folder.join(at.to_string()))
            .collect();
        inner
            .iter()
            .for_each(|inner| fs::create_dir(inner).expect("a group"));
        let child = run(&inner[1]);
        let mut looks = 0;
        let refused = named.check(Job::Own(0), &mut looks);
        fs::remove_dir(&inner[0]).expect("nothing runs there");
        let found = named.numbers("cgroup.procs", PROCESSES, &mut looks);
        let number = child.id();
        let all: Vec<&Path> = inner[1..]
            .iter()
            .chain([&folder])
            .map(PathBuf::as_path)
            .collect();
        end(child, &all);
        assert!(matches!(refused, Err(NoGroup::TooMany(_))), "{refused:?}");
        assert_eq!(found.expect("as many as may be"), BTreeSet::from([number]));
        assert!(looks > PROCESSES.groups as u64, "{looks}");
    }

    #[test]
    fn a_path_is_made_of_names_before_any_rule_is_asked() {
        let own = Some(&b"/s.slice/own.service"[..]);
        for (path, right) in [
            ("/s.slice/a.service", Ok("/s.slice/a.service")),
            ("below", Ok("/s.slice/own.service/below")),
            (".", Ok("/s.slice/own.service")),
            ("/s.slice/a.service/../db.service", Err("'.' or '..'")),
            ("../db.service", Err("'.' or '..'")),
            ("/s.slice/./a.service", Err("'.' or '..'")),
            ("/s.slice//a.service", Err("is empty")),
            ("/s.slice/a\nb", Err("control characters")),
            ("/s.slice/a\u{1b}[2J", Err("control characters")),
            ("/s.slice/a\0b", Err("control characters")),
            ("/s.slice/a\u{202e}b", Err("not seen")),
            ("/s.slice/a\u{200b}", Err("not seen")),
            ("/s.slice/a\u{2028}b", Err("not seen")),
            ("/s.slice/Bu\u{308}ro", Ok("/s.slice/Bu\u{308}ro")),
            (
                &format!("/{}", "x".repeat(LONGEST)),
                Err("no control group"),
            ),
            (&"/x".repeat(DEEPEST + 1), Err("too many others")),
        ] {
            match (absolute(path, own), right) {
                (Ok(found), Ok(right)) => assert_eq!(found, right),
                (Err(why), Err(right)) => {
                    let why = why.to_string();
                    assert!(
                        why.contains(right) && !why.contains('\n'),
                        "{path:?}: {why}"
                    );
                }
                (found, right) => panic!("{path:?}: {found:?}, and not {right:?}"),
            }
        }
    }

    /// Who has ended runs in no group, and was not moved out of one.
    #[test]
    fn one_that_has_ended_is_not_in_the_root() {
        let life = Life::of(std::process::id()).expect("it can be seen");
        let own = life.expect("it runs").id;
        assert!(path_of(own).expect("it can be seen").is_some());
        let before = ThreadId {
            started: own.started + 1,
            ..own
        };
        assert_eq!(path_of(before).expect("it can be seen"), None);
    }

    #[test]
    fn a_group_is_known_by_its_number() {
        let Some((folder, named)) = group("numbered") else {
            return;
        };
        let tree = Tree::open(Path::new("/")).expect("it is there");
        let inner = folder.join("inner");
        fs::create_dir(&inner).expect("a group below it");
        let state = |group: &Group| tree.state(group).expect("it can be seen");
        assert_eq!(state(&named.group), GroupState::Empty);
        let child = run(&inner);
        assert_eq!(state(&named.group), GroupState::Runs);
        let runs_in = |group: &Group| tree.runs_in(child.id(), group).expect("it can be seen");
        let below = tree.find(&format!("{}/inner", named.group.path));
        let below = below.expect("it was made").group;
        assert!(runs_in(&named.group) && runs_in(&below));
        assert!(
            !tree
                .runs_in(std::process::id(), &named.group)
                .expect("it can be seen")
        );
        // However deep a process goes, it is in the groups that can be leased.
        let path = format!("{}{}", named.group.path, "/inner".repeat(2 * DEEPEST));
        let deep = folder.join("inner/".repeat(2 * DEEPEST));
        fs::create_dir_all(&deep).expect("groups below it");
        let chain = tree.chain(path.as_bytes()).expect("they are there");
        assert_eq!(chain.len(), DEEPEST);
        assert!(chain.contains(&named.group.id) && chain.contains(&below.id));
        for depth in (2..=2 * DEEPEST).rev() {
            fs::remove_dir(folder.join("inner/".repeat(depth))).expect("nobody is there");
        }
        let numbers = BTreeSet::from([named.group.id, below.id, GroupId(u64::MAX)]);
        let mut found = tree.numbered(&numbers).expect("there are not as many");
        found.sort_by_key(|group| group.path.len());
        assert_eq!(found, [named.group.clone(), below.clone()]);
        assert!(named.to_read().is_ok());
        let number = child.id();
        end(child, &[&inner]);
        assert!(
            !tree
                .runs_in(number, &named.group)
                .expect("nobody runs there")
        );
        assert_eq!(state(&below), GroupState::Gone);
        // Another of its name is another.
        fs::create_dir(&inner).expect("a group of its name");
        assert_eq!(state(&below), GroupState::Gone);
        end_all(&[&inner, &folder]);
    }
}
