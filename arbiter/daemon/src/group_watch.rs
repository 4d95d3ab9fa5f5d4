//! The end of control groups: the kernel tells by `cgroup.events` of each whether something runs
//! in it or below it (`populated`). Of a group that is gone, and of those for which there is no
//! descriptor, a look twice a second finds out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::{Bound, Range};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use arbiter::Nanos;
use arbiter_host::{BootTime, Cause, Group, GroupId, HostArbiter, LeaseId, Scope, ThreadId};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use umpire_service::Poll;

use crate::groups::{GroupState, LateTree, NoGroup, has_moved, has_news, path_of, seen_of};
use crate::journal::Entry;
use crate::service::Service;
use crate::threads::SHARE_OF_USER;

/// Most groups that are looked at in one go.
const LOOKS_AT: usize = 256;
/// Most threads of which it is looked in one go in which groups they run.
const THREADS: usize = 256;
/// The kernel tells of a change in a group some ticks of its clock after the one before at the
/// earliest: up to 20 ms where there are 250 a second, 30 where there are 100. What it tells of
/// sooner after a lease was asked for may have been before.
const TOLD_LATE: Nanos = Nanos(30_000_000);
/// Most news that are taken from the kernel at once.
const BATCH: usize = 64;

/// Leases that have ended with their groups, and why.
pub(crate) type EndedGroups = BTreeMap<LeaseId, Cause>;

/// Some of what a lease has many of.
type OfLease = (LeaseId, Range<usize>);

/// The groups that paths lead through, from the outermost on. `None`: they cannot be told.
type Chains = BTreeMap<Vec<u8>, Option<Vec<GroupId>>>;

#[derive(Debug)]
struct WatchedGroup {
    leases: BTreeMap<LeaseId, Arrival>,
    group: Group,
    uid: u32,
    /// Its `cgroup.events`; `None`: there are too many of them.
    events: Option<File>,
    /// Whether it was frozen at the last look.
    frozen: Option<bool>,
    /// From when on news are not of before the last of its leases.
    news_from: BootTime,
    /// How long had run whatever has run in it, when that lease came. `None`: nobody tells.
    used: Option<u64>,
}

/// Whether something has come to run in a group since a lease of it was asked for.
#[derive(Clone, Copy, Debug, Default)]
struct Arrival {
    came: bool,
    /// Until when something has to, while the lease holds counters.
    by: Option<BootTime>,
}

/// What is watched.
#[derive(Debug)]
pub(crate) struct Groups {
    poll: Poll,
    most: usize,
    descriptors: usize,
    /// How many of them are a user's.
    of_user: BTreeMap<u32, usize>,
    of_lease: BTreeMap<LeaseId, GroupId>,
    watched: BTreeMap<GroupId, WatchedGroup>,
    tree: LateTree,
    looked_at: Option<GroupId>,
    /// The lease for threads whose groups are looked at next, and from which of them on.
    moved_of: Option<(LeaseId, usize)>,
    ended: EndedGroups,
    /// The last look could not be taken, and that was said.
    blind: bool,
}

impl Groups {
    /// With `most` descriptors. The kernel's files are below `root`.
    ///
    /// # Errors
    /// The kernel has no epoll for it.
    pub(crate) fn new(most: usize, root: &Path) -> io::Result<Self> {
        Ok(Groups {
            poll: Poll::new()?,
            most,
            descriptors: 0,
            of_user: BTreeMap::new(),
            of_lease: BTreeMap::new(),
            watched: BTreeMap::new(),
            tree: LateTree::new(root),
            looked_at: None,
            moved_of: None,
            ended: EndedGroups::new(),
            blind: false,
        })
    }

    /// Can be read from when something has changed in a group.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    /// Watches the groups of leases that came, and no more those of leases that ended.
    pub(crate) fn follow(&mut self, service: &Service, entries: &[Entry], now: BootTime) {
        for entry in entries {
            match entry {
                Entry::Lease(lease) => self.follow_lease(service, LeaseId(lease.id), now),
                Entry::Ended(id) => self.follow_lease(service, LeaseId(*id), now),
                Entry::Next(_) | Entry::Barred(_) | Entry::Pardoned(_) => {}
            }
        }
    }

    /// The same of all leases that there are, or were.
    pub(crate) fn follow_all(&mut self, service: &Service, now: BootTime) {
        let there = service.arbiter().leases().map(|lease| lease.id);
        let all: BTreeSet<LeaseId> = there.chain(self.of_lease.keys().copied()).collect();
        all.into_iter()
            .for_each(|id| self.follow_lease(service, id, now));
    }

    fn follow_lease(&mut self, service: &Service, id: LeaseId, now: BootTime) {
        let lease = service.arbiter().lease(id);
        let group = lease.and_then(|lease| lease.terms.scope.group());
        let Some((lease, group)) = lease.zip(group) else {
            return self.leave(id);
        };
        let is_new = self.of_lease.insert(id, group.id).is_none();
        if is_new {
            self.watch(group, id, lease.owner.uid, now);
        }
        let arrives = now.after(service.config().arrive);
        let watched = self.watched.get_mut(&group.id);
        if let Some(arrival) = watched.and_then(|watched| watched.leases.get_mut(&id)) {
            let waits = lease.holds > 0 && !arrival.came;
            arrival.by = waits.then(|| arrival.by.unwrap_or(arrives));
        }
        if is_new {
            // It may be empty, or gone, since it was asked for.
            self.look_at(group.id, now);
        }
    }

    fn watch(&mut self, group: &Group, lease: LeaseId, uid: u32, now: BootTime) {
        // What was there before says nothing of whoever is to come for this lease.
        self.look_at(group.id, now);
        let news_from = now.after(TOLD_LATE);
        let used = self.tree.get().ok().and_then(|tree| tree.usage(group));
        if let Some(watched) = self.watched.get_mut(&group.id) {
            watched.leases.insert(lease, Arrival::default());
            (watched.news_from, watched.used) = (news_from, used);
            return;
        }
        let own = self.of_user.get(&uid).copied().unwrap_or(0);
        // Root can raise the number of descriptors anyway.
        let has_share = uid == 0 || own < self.most / SHARE_OF_USER;
        let has_room = self.descriptors < self.most && has_share;
        let events = || self.tree.get()?.events_of(group);
        let events = has_room.then(|| events().ok().flatten());
        let events = events.flatten().filter(|events| {
            let watched = self.poll.watch(events, group.id.0, EventFlags::PRI);
            watched.is_ok()
        });
        if events.is_some() {
            self.descriptors += 1;
            *self.of_user.entry(uid).or_default() += 1;
        }
        let watched = WatchedGroup {
            leases: BTreeMap::from([(lease, Arrival::default())]),
            group: group.clone(),
            uid,
            events,
            frozen: None,
            news_from,
            used,
        };
        self.watched.insert(group.id, watched);
    }

    fn leave(&mut self, lease: LeaseId) {
        let Some(group) = self.of_lease.remove(&lease) else {
            return;
        };
        let Some(watched) = self.watched.get_mut(&group) else {
            return;
        };
        watched.leases.remove(&lease);
        if watched.leases.is_empty() {
            // With its last descriptor the epoll's goes.
            let watched = self.watched.remove(&group);
            let Some(watched) = watched.filter(|watched| watched.events.is_some()) else {
                return;
            };
            self.descriptors -= 1;
            if let Some(own) = self.of_user.get_mut(&watched.uid) {
                *own -= 1;
                if *own == 0 {
                    self.of_user.remove(&watched.uid);
                }
            }
        }
    }

    /// Takes in what the kernel tells.
    pub(crate) fn hear(&mut self, now: BootTime) {
        let come = self.poll.wait::<BATCH>(Some(Duration::ZERO));
        for one in come.unwrap_or_default() {
            self.look_at(GroupId(one.token), now);
        }
    }

    /// Looks at a few: who has removed a group is not told of.
    pub(crate) fn look(&mut self, service: &Service, now: BootTime) {
        for _ in 0..self.watched.len().min(LOOKS_AT) {
            let after = self.looked_at.map_or(Bound::Unbounded, Bound::Excluded);
            let mut next = self.watched.range((after, Bound::Unbounded));
            let next = next.next().or(self.watched.first_key_value());
            let Some(next) = next.map(|(id, _)| *id) else {
                return;
            };
            self.looked_at = Some(next);
            self.look_at(next, now);
        }
        let overdue = self
            .watched
            .values()
            .filter(|watched| watched.is_overdue(now));
        let overdue: Vec<GroupId> = overdue.map(|watched| watched.group.id).collect();
        for group in overdue {
            self.look_at(group, now);
        }
        self.look_who_moved(service.arbiter());
    }

    /// Looks at the threads of a few leases: the kernel does not tell who is moved into another
    /// group.
    fn look_who_moved(&mut self, arbiter: &HostArbiter) {
        if arbiter.leased_groups().is_empty() {
            return;
        }
        let threads = arbiter.leases();
        let threads = threads.map(|lease| (lease.id, lease.terms.scope.threads().len()));
        let (next, rest) = in_turn(threads, self.moved_of, THREADS);
        self.moved_of = rest;
        let mut chains = Chains::new();
        for (id, which) in next {
            let Some(scope) = arbiter.lease(id).map(|lease| &lease.terms.scope) else {
                continue;
            };
            let mut threads = scope.threads()[which].iter();
            if threads.any(|thread| self.is_moved(arbiter, scope, *thread, &mut chains)) {
                self.ended.insert(id, Cause::MovedAway);
            }
        }
    }

    fn is_moved(
        &self,
        arbiter: &HostArbiter,
        scope: &Scope,
        thread: ThreadId,
        chains: &mut Chains,
    ) -> bool {
        // The end of one that has ended is told of by itself.
        let Ok(Some(path)) = path_of(thread) else {
            return false;
        };
        let chain = chains.entry(path).or_insert_with_key(|path| {
            if path.is_empty() {
                return Some(Vec::new());
            }
            // One that was removed just now has nobody in it, so the next look tells.
            self.tree.get().and_then(|tree| tree.chain(path)).ok()
        });
        let chain = chain.as_ref();
        chain.is_some_and(|chain| has_moved(arbiter, scope, chain))
    }

    fn look_at(&mut self, group: GroupId, now: BootTime) {
        let Some(watched) = self.watched.get_mut(&group) else {
            return;
        };
        let seen = watched.see(&self.tree, now).unwrap_or_else(|why| {
            if !std::mem::replace(&mut self.blind, true) {
                log::warn!("{why}; its lease stays");
            }
            GroupState::Unknown
        });
        self.blind &= seen == GroupState::Unknown;
        for (lease, arrival) in &mut watched.leases {
            if let Some(why) = arrival.end(seen, now) {
                self.ended.insert(*lease, why);
            }
        }
    }

    /// Those that have ended since this was asked last. `None`: none.
    pub(crate) fn take(&mut self) -> Option<EndedGroups> {
        let ended = std::mem::take(&mut self.ended);
        Some(ended).filter(|ended| !ended.is_empty())
    }
}

/// Which come next of what leases have so many of, in the order of the leases, from one on: `most`
/// together, however many a lease has. Also says where to go on after that, until all have been.
pub(crate) fn in_turn(
    all: impl Iterator<Item = (LeaseId, usize)>,
    from: Option<(LeaseId, usize)>,
    most: usize,
) -> (Vec<OfLease>, Option<(LeaseId, usize)>) {
    let mut next = Vec::new();
    let mut left = most;
    for (id, count) in all {
        let first = match from {
            Some((from, _)) if id < from => continue,
            Some((from, first)) if id == from => first,
            _ => 0,
        };
        let end = count.min(first.saturating_add(left));
        if first < end {
            next.push((id, first..end));
            left -= end - first;
        }
        if end < count {
            return (next, Some((id, end)));
        }
    }
    (next, None)
}

impl WatchedGroup {
    /// What runs in it.
    fn see(&mut self, tree: &LateTree, now: BootTime) -> Result<GroupState, NoGroup> {
        let Some(events) = &self.events else {
            return tree.get()?.state(&self.group);
        };
        let has_news = now >= self.news_from && has_news(events);
        let failed = |error: Errno| NoGroup::Io(self.group.path.clone(), error.into());
        let seen = seen_of(events).map_err(failed)?;
        // The kernel tells of two things. The first look has nothing to compare with.
        let was_frozen = self.frozen.replace(seen.frozen);
        let is_as_before = was_frozen == Some(seen.frozen);
        let has_left = seen.state == GroupState::Empty && has_news && is_as_before;
        if has_left && self.has_run(tree) {
            return Ok(GroupState::Left);
        }
        Ok(seen.state)
    }

    /// Whether anything has run in it since its last lease came, if the kernel tells: it may have
    /// been frozen and thawed with nothing in it.
    fn has_run(&self, tree: &LateTree) -> bool {
        let used = tree.get().ok().and_then(|tree| tree.usage(&self.group));
        self.used.zip(used).is_none_or(|(before, now)| now > before)
    }

    fn is_overdue(&self, now: BootTime) -> bool {
        self.leases.values().any(|arrival| arrival.is_overdue(now))
    }
}

impl Arrival {
    fn is_overdue(self, now: BootTime) -> bool {
        self.by.is_some_and(|by| by <= now)
    }

    /// Why the lease ends, if it does.
    fn end(&mut self, seen: GroupState, now: BootTime) -> Option<Cause> {
        match seen {
            GroupState::Unknown => None,
            GroupState::Runs => {
                *self = Arrival {
                    came: true,
                    by: None,
                };
                None
            }
            GroupState::Empty if self.is_overdue(now) => Some(Cause::NobodyCame),
            GroupState::Empty if !self.came => None,
            // All that ran in it has ended, or it is gone itself.
            GroupState::Empty | GroupState::Left | GroupState::Gone => Some(Cause::GroupEmpty),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;
    use crate::config::ArbiterConfig;
    use crate::groups::tests::{end, end_all, group, run};
    use crate::threads::tests::with_lease;

    /// One lease for many does not make a look longer, and none is passed over.
    #[test]
    fn so_many_are_looked_at_in_one_go_and_then_the_next() {
        let all = [(1, 3), (2, 0), (4, 700), (9, 2)];
        let mut from = None;
        let mut looks = Vec::new();
        loop {
            let all = all.map(|(id, count)| (LeaseId(id), count)).into_iter();
            let (next, rest) = in_turn(all, from, 256);
            let next = next.into_iter().map(|(id, which)| (id.0, which));
            looks.push(next.collect::<Vec<_>>());
            from = rest;
            if from.is_none() {
                break;
            }
        }
        let look = |of: &[(u64, Range<usize>)]| of.to_vec();
        assert_eq!(
            looks,
            [
                look(&[(1, 0..3), (4, 0..253)]),
                look(&[(4, 253..509)]),
                look(&[(4, 509..700), (9, 0..2)]),
            ]
        );
        // Some have gone since.
        let all = [(LeaseId(4), 100), (LeaseId(9), 2)].into_iter();
        let (next, rest) = in_turn(all, Some((LeaseId(4), 509)), 256);
        assert_eq!((next, rest), (vec![(LeaseId(9), 0..2)], None));
    }

    /// A lease has its own time, whatever became of another of its group.
    #[test]
    fn each_lease_waits_for_its_own_time() {
        let due = |ms| Some(BootTime(ms));
        let mut first = Arrival {
            came: false,
            by: due(10),
        };
        let mut waits = Arrival::default();
        let mut later = Arrival {
            came: false,
            by: due(19),
        };
        let end = |one: &mut Arrival, seen, now| one.end(seen, BootTime(now));
        assert_eq!(end(&mut first, GroupState::Empty, 9), None);
        assert_eq!(
            end(&mut first, GroupState::Empty, 10),
            Some(Cause::NobodyCame)
        );
        assert_eq!(end(&mut waits, GroupState::Empty, 10), None);
        assert_eq!(end(&mut later, GroupState::Empty, 10), None);
        assert_eq!(end(&mut later, GroupState::Runs, 11), None);
        assert_eq!(
            end(&mut later, GroupState::Empty, 30),
            Some(Cause::GroupEmpty)
        );
        assert_eq!(
            end(&mut waits, GroupState::Gone, 30),
            Some(Cause::GroupEmpty)
        );
    }

    /// A job may be done before anybody has looked.
    #[test]
    fn who_has_come_and_gone_between_two_looks_was_there() {
        let Some((folder, named)) = group("come-and-gone") else {
            return;
        };
        let scope = Scope::Group(Arc::new(named.group.clone()));
        let (service, lease) = with_lease(ArbiterConfig::default(), scope);
        let mut watch = Groups::new(64, "/".as_ref()).expect("an epoll");
        // Nobody who was there before the lease has come for it, though the kernel tells later.
        end(run(&folder), &[]);
        let began = Instant::now();
        let now = || {
            let nanos = u64::try_from(began.elapsed().as_nanos());
            BootTime(nanos.expect("the test is short"))
        };
        watch.follow_all(&service, now());
        let mut look = || {
            watch.hear(now());
            watch.look(&service, now());
            watch.take()
        };
        while began.elapsed() < Duration::from_millis(50) {
            assert_eq!(look(), None, "nobody has come");
            std::thread::sleep(Duration::from_millis(1));
        }
        // Other news are none of that, also two of them between two looks.
        for frozen in [&["1"][..], &["0"], &["1", "0"], &["1", "0"]] {
            for one in frozen {
                fs::write(folder.join("cgroup.freeze"), one).expect("it can be frozen");
            }
            // The kernel tells of a change 10 ms after another at the earliest.
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(look(), None, "{frozen:?}");
        }
        end(run(&folder), &[]);
        let until = Instant::now() + Duration::from_secs(60);
        let ended = loop {
            if let Some(ended) = look() {
                break ended;
            }
            assert!(Instant::now() < until, "nobody says that it has ended");
            std::thread::sleep(Duration::from_millis(1));
        };
        end_all(&[&folder]);
        assert_eq!(ended, EndedGroups::from([(lease, Cause::GroupEmpty)]));
    }

    /// One user's groups leave the others' ends to be told at once.
    #[test]
    fn a_user_has_a_share_of_the_descriptors_and_root_has_all() {
        let Some((folder, named)) = group("shares") else {
            return;
        };
        let names = ["0", "1", "2"];
        let folders = names.map(|name| folder.join(name));
        folders
            .iter()
            .for_each(|folder| fs::create_dir(folder).expect("a group"));
        let tree = LateTree::new("/".as_ref());
        let groups = names.map(|name| {
            let path = format!("{}/{name}", named.group.path);
            let found = tree.get().and_then(|tree| tree.find(&path));
            found.expect("it was made").group
        });
        let id = LeaseId(1);
        for (uid, seen) in [(7, 2), (0, 3)] {
            let mut watch = Groups::new(2 * SHARE_OF_USER, "/".as_ref()).expect("an epoll");
            for group in &groups {
                watch.watch(group, id, uid, BootTime(0));
            }
            assert_eq!(watch.watched.len(), 3);
            let of_user = BTreeMap::from([(uid, seen)]);
            assert_eq!((watch.descriptors, &watch.of_user), (seen, &of_user));
            for group in &groups {
                watch.of_lease.insert(id, group.id);
                watch.leave(id);
            }
            assert_eq!((watch.descriptors, watch.of_user.len()), (0, 0));
        }
        let all: Vec<&Path> = folders.iter().chain([&folder]).map(|one| &**one).collect();
        end_all(&all);
    }

    /// What does not answer has not said that nothing runs there.
    #[test]
    fn a_group_that_cannot_be_looked_at_keeps_its_lease() {
        let mut arrival = Arrival {
            came: true,
            by: None,
        };
        assert_eq!(arrival.end(GroupState::Unknown, BootTime(30)), None);
        let mut due = Arrival {
            came: false,
            by: Some(BootTime(10)),
        };
        assert_eq!(due.end(GroupState::Unknown, BootTime(30)), None);
        let file = tempfile::NamedTempFile::new().expect("a file");
        let writes = File::options().write(true).open(file.path());
        let seen = seen_of(&writes.expect("it is there"));
        assert_eq!(seen, Err(Errno::BADF));

        // No hierarchy is mounted where this arbiter looks, as after a restart in a container.
        let root = tempfile::tempdir().expect("a folder");
        let config = ArbiterConfig {
            root: root.path().to_owned(),
            ..ArbiterConfig::default()
        };
        let scope = Scope::Group(Arc::new(Group {
            id: GroupId(77),
            above: Vec::new(),
            path: "/job".to_owned(),
        }));
        let (service, lease) = with_lease(config, scope);
        let mut watch = Groups::new(64, root.path()).expect("an epoll");
        watch.follow_all(&service, BootTime(0));
        watch.look(&service, BootTime(u64::MAX));
        assert_eq!(watch.take(), None, "nobody has seen that it is empty");
        assert!(watch.blind && watch.watched.len() == 1);

        // A hierarchy that does not have it says that it is gone.
        let tree = LateTree::new("/".as_ref());
        if tree.get().is_ok() {
            watch.tree = tree;
            watch.look(&service, BootTime(1));
            let ended = EndedGroups::from([(lease, Cause::GroupEmpty)]);
            assert_eq!(watch.take(), Some(ended));
            assert!(!watch.blind);
        }
    }
}
