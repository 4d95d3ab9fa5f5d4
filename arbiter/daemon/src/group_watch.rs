//! The end of control groups: the kernel tells by `cgroup.events` of each whether something runs
//! in it or below it (`populated`). Of a group that is gone, and of those for which there is no
//! descriptor, a look twice a second finds out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use arbiter_host::{BootTime, Cause, Group, GroupId, LeaseId};
use rustix::event::epoll::EventFlags;
use umpire_service::Poll;

use crate::groups::{Tree, is_populated};
use crate::journal::Entry;
use crate::service::Service;

/// Most groups that are looked at in one go.
const LOOKS_AT: usize = 256;
/// Most news that are taken from the kernel at once.
const BATCH: usize = 64;

/// Leases that have ended with their groups, and why.
pub(crate) type EndedGroups = BTreeMap<LeaseId, Cause>;

#[derive(Debug)]
struct WatchedGroup {
    leases: BTreeMap<LeaseId, Arrival>,
    group: Group,
    /// Its `cgroup.events`; `None`: there are too many of them.
    events: Option<File>,
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
    of_lease: BTreeMap<LeaseId, GroupId>,
    watched: BTreeMap<GroupId, WatchedGroup>,
    /// Where they are, once one was looked for.
    tree: Option<Tree>,
    looked_at: Option<GroupId>,
    ended: EndedGroups,
}

impl Groups {
    /// With `most` descriptors.
    ///
    /// # Errors
    /// The kernel has no epoll for it.
    pub(crate) fn new(most: usize) -> io::Result<Self> {
        Ok(Groups {
            poll: Poll::new()?,
            most,
            descriptors: 0,
            of_lease: BTreeMap::new(),
            watched: BTreeMap::new(),
            tree: None,
            looked_at: None,
            ended: EndedGroups::new(),
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
            self.watch(service, group, id);
        }
        let arrives = now.after(service.config().arrive);
        let watched = self.watched.get_mut(&group.id);
        if let Some(arrival) = watched.and_then(|watched| watched.leases.get_mut(&id)) {
            let waits = lease.holds > 0 && !arrival.came;
            arrival.by = waits.then(|| arrival.by.unwrap_or(arrives));
        }
        if is_new {
            // It may be empty, or gone, since it was asked for.
            self.look_at(service, group.id, now);
        }
    }

    fn watch(&mut self, service: &Service, group: &Group, lease: LeaseId) {
        if let Some(watched) = self.watched.get_mut(&group.id) {
            watched.leases.insert(lease, Arrival::default());
            return;
        }
        let events = Some(()).filter(|()| self.descriptors < self.most);
        let events = events
            .and_then(|()| self.events_of(service, group))
            .filter(|events| {
                let watched = self.poll.watch(events, group.id.0, EventFlags::PRI);
                watched.is_ok()
            });
        self.descriptors += usize::from(events.is_some());
        let watched = WatchedGroup {
            leases: BTreeMap::from([(lease, Arrival::default())]),
            group: group.clone(),
            events,
        };
        self.watched.insert(group.id, watched);
    }

    /// The events of the group itself; `None`: it is gone, whoever has its path now.
    fn events_of(&mut self, service: &Service, group: &Group) -> Option<File> {
        if self.tree.is_none() {
            self.tree = Tree::open(&service.config().root).ok();
        }
        let named = self.tree.as_ref()?.find(&group.path).ok()?;
        let is_it = named.group.id == group.id;
        named.events().ok().filter(|_| is_it)
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
            let has_one = watched.is_some_and(|watched| watched.events.is_some());
            self.descriptors -= usize::from(has_one);
        }
    }

    /// Takes in what the kernel tells.
    pub(crate) fn hear(&mut self, service: &Service, now: BootTime) {
        let come = self.poll.wait::<BATCH>(Some(Duration::ZERO));
        for one in come.unwrap_or_default() {
            self.look_at(service, GroupId(one.token), now);
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
            self.look_at(service, next, now);
        }
        let overdue = self
            .watched
            .values()
            .filter(|watched| watched.is_overdue(now));
        let overdue: Vec<GroupId> = overdue.map(|watched| watched.group.id).collect();
        for group in overdue {
            self.look_at(service, group, now);
        }
    }

    fn look_at(&mut self, service: &Service, group: GroupId, now: BootTime) {
        let Some(watched) = self.watched.get(&group) else {
            return;
        };
        let populated = match &watched.events {
            Some(events) => is_populated(events),
            None => {
                let group = watched.group.clone();
                let events = self.events_of(service, &group);
                events.and_then(|events| is_populated(&events))
            }
        };
        let Some(watched) = self.watched.get_mut(&group) else {
            return;
        };
        for (lease, arrival) in &mut watched.leases {
            if let Some(why) = arrival.end(populated, now) {
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

impl WatchedGroup {
    fn is_overdue(&self, now: BootTime) -> bool {
        self.leases.values().any(|arrival| arrival.is_overdue(now))
    }
}

impl Arrival {
    fn is_overdue(self, now: BootTime) -> bool {
        self.by.is_some_and(|by| by <= now)
    }

    /// Why the lease ends, if it does: something runs in its group, or nothing; `None`: the group
    /// is gone.
    fn end(&mut self, populated: Option<bool>, now: BootTime) -> Option<Cause> {
        match populated {
            Some(true) => {
                *self = Arrival {
                    came: true,
                    by: None,
                };
                None
            }
            Some(false) if self.is_overdue(now) => Some(Cause::NobodyCame),
            Some(false) if !self.came => None,
            // It is gone, or all that ran in it.
            None | Some(false) => Some(Cause::GroupEmpty),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let end = |one: &mut Arrival, populated, now| one.end(populated, BootTime(now));
        assert_eq!(end(&mut first, Some(false), 9), None);
        assert_eq!(end(&mut first, Some(false), 10), Some(Cause::NobodyCame));
        assert_eq!(end(&mut waits, Some(false), 10), None);
        assert_eq!(end(&mut later, Some(false), 10), None);
        assert_eq!(end(&mut later, Some(true), 11), None);
        assert_eq!(end(&mut later, Some(false), 30), Some(Cause::GroupEmpty));
        assert_eq!(end(&mut waits, None, 30), Some(Cause::GroupEmpty));
    }
}
