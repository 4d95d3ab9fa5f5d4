//! The threads that leases are for: who has ended is told to the arbiter, so that nobody holds
//! anything for whoever has the number next. The kernel tells it by a descriptor of each
//! (`PIDFD_THREAD`, Linux 6.9); where it has none, or there are too many, a few are looked at
//! twice a second.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use arbiter_host::{LeaseId, ThreadId};
use rustix::event::epoll::EventFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use umpire_service::Poll;

use crate::journal::{Entry, Stored};
use crate::service::Service;
use crate::task::{Life, TICK};

/// `PIDFD_THREAD` of `<linux/pidfd.h>`.
const OF_THREAD: PidfdFlags = PidfdFlags::from_bits_retain(0o200);
/// Of the descriptors for threads a user has one part in so many at most, and so of those for
/// control groups.
pub(crate) const SHARE_OF_USER: usize = 4;
/// Most threads without a descriptor that are looked at in one go.
const LOOKS_AT: usize = 256;
/// Most ends that are taken from the kernel at once.
const BATCH: usize = 64;

/// Threads that have ended, by the leases that were for them.
pub(crate) type Ended = BTreeMap<LeaseId, BTreeSet<ThreadId>>;

#[derive(Debug)]
struct Watched {
    leases: BTreeSet<LeaseId>,
    uid: u32,
    descriptor: Option<(u64, OwnedFd)>,
}

/// What is watched.
#[derive(Debug)]
pub(crate) struct Threads {
    poll: Poll,
    most: usize,
    of_lease: BTreeMap<LeaseId, Vec<ThreadId>>,
    watched: BTreeMap<ThreadId, Watched>,
    /// By the number of the descriptor's event.
    by_event: BTreeMap<u64, ThreadId>,
    next_event: u64,
    /// How many descriptors are a user's.
    of_user: BTreeMap<u32, usize>,
    /// Those that have none.
    unseen: BTreeSet<ThreadId>,
    looked_at: Option<ThreadId>,
    ended: Ended,
    /// The last could not be looked at, and that was said.
    blind: bool,
}

impl Threads {
    /// With `most` descriptors.
    ///
    /// # Errors
    /// The kernel has no epoll for it.
    pub(crate) fn new(most: usize) -> io::Result<Self> {
        Ok(Threads {
            poll: Poll::new()?,
            most,
            of_lease: BTreeMap::new(),
            watched: BTreeMap::new(),
            by_event: BTreeMap::new(),
            next_event: 0,
            of_user: BTreeMap::new(),
            unseen: BTreeSet::new(),
            looked_at: None,
            ended: Ended::new(),
            blind: false,
        })
    }

    /// Can be read from when a thread has ended.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    /// Watches the threads of leases that came, and no more those of leases that ended.
    pub(crate) fn follow(&mut self, service: &Service, entries: &[Entry]) {
        for entry in entries {
            match entry {
                Entry::Lease(lease) => self.follow_lease(service, LeaseId(lease.id)),
                Entry::Ended(id) => self.follow_lease(service, LeaseId(*id)),
                Entry::Next(_) | Entry::Barred(_) | Entry::Pardoned(_) => {}
            }
        }
    }

    /// The same of all leases that there are, or were.
    pub(crate) fn follow_all(&mut self, service: &Service) {
        let there = service.arbiter().leases().map(|lease| lease.id);
        let all: BTreeSet<LeaseId> = there.chain(self.of_lease.keys().copied()).collect();
        all.into_iter()
            .for_each(|id| self.follow_lease(service, id));
    }

    fn follow_lease(&mut self, service: &Service, id: LeaseId) {
        let lease = service.arbiter().lease(id);
        let now = lease.map_or(&[][..], |lease| lease.terms.scope.threads());
        let before = self.of_lease.get(&id).map_or(&[][..], Vec::as_slice);
        if before == now {
            return;
        }
        let only = |those: &[ThreadId], others: &[ThreadId]| -> Vec<ThreadId> {
            let others: BTreeSet<&ThreadId> = others.iter().collect();
            let mut only = those.to_vec();
            only.retain(|one| !others.contains(one));
            only
        };
        let (gone, new) = (only(before, now), only(now, before));
        gone.into_iter().for_each(|thread| self.leave(thread, id));
        let uid = lease.map_or(0, |lease| lease.owner.uid);
        new.into_iter()
            .for_each(|thread| self.watch(thread, id, uid));
        if now.is_empty() {
            self.of_lease.remove(&id);
        } else {
            self.of_lease.insert(id, now.to_vec());
        }
    }

    fn watch(&mut self, thread: ThreadId, lease: LeaseId, uid: u32) {
        if let Some(watched) = self.watched.get_mut(&thread) {
            watched.leases.insert(lease);
            return;
        }
        let own = self.of_user.get(&uid).copied().unwrap_or(0);
        let has_room = self.by_event.len() < self.most && own < self.most / SHARE_OF_USER;
        let descriptor = has_room.then(|| self.descriptor(thread)).flatten();
        match &descriptor {
            Some((event, _)) => {
                self.by_event.insert(*event, thread);
                *self.of_user.entry(uid).or_default() += 1;
            }
            None => {
                self.unseen.insert(thread);
            }
        }
        let watched = Watched {
            leases: BTreeSet::from([lease]),
            uid,
            descriptor,
        };
        self.watched.insert(thread, watched);
        // It may have ended before it was watched, and its number may be another's.
        self.look_at(thread);
    }

    /// A descriptor of whoever has the thread's number, which is watched.
    fn descriptor(&mut self, thread: ThreadId) -> Option<(u64, OwnedFd)> {
        let pid = i32::try_from(thread.number).ok().and_then(Pid::from_raw)?;
        let descriptor = pidfd_open(pid, OF_THREAD).ok()?;
        let event = self.next_event;
        self.next_event += 1;
        self.poll.watch(&descriptor, event, EventFlags::IN).ok()?;
        Some((event, descriptor))
    }

    fn leave(&mut self, thread: ThreadId, lease: LeaseId) {
        let Some(watched) = self.watched.get_mut(&thread) else {
            return;
        };
        watched.leases.remove(&lease);
        if !watched.leases.is_empty() {
            return;
        }
        let uid = watched.uid;
        let descriptor = self.watched.remove(&thread).and_then(|one| one.descriptor);
        self.unseen.remove(&thread);
        if let Some((event, descriptor)) = descriptor {
            // The last descriptor of it: with it the epoll's goes.
            drop(descriptor);
            self.by_event.remove(&event);
            if let Some(own) = self.of_user.get_mut(&uid) {
                *own -= 1;
                if *own == 0 {
                    self.of_user.remove(&uid);
                }
            }
        }
    }

    /// Takes in what the kernel tells.
    pub(crate) fn hear(&mut self) {
        let come = self.poll.wait::<BATCH>(Some(Duration::ZERO));
        for one in come.unwrap_or_default() {
            if let Some(&thread) = self.by_event.get(&one.token) {
                self.has_ended(thread);
            }
        }
    }

    /// Looks at a few of those of which the kernel tells nothing.
    pub(crate) fn look(&mut self) {
        for _ in 0..self.unseen.len().min(LOOKS_AT) {
            let after = self.looked_at.map_or(Bound::Unbounded, Bound::Excluded);
            let next = self.unseen.range((after, Bound::Unbounded)).next();
            let Some(&next) = next.or(self.unseen.first()) else {
                return;
            };
            self.looked_at = Some(next);
            self.look_at(next);
        }
    }

    /// One that cannot be looked at is taken for what it was.
    fn look_at(&mut self, thread: ThreadId) {
        let is = |life: Life| life.id == thread && !life.ended;
        match Life::of(thread.number) {
            Ok(life) if !life.is_some_and(is) => self.has_ended(thread),
            Ok(_) => self.blind = false,
            Err(error) => {
                if !std::mem::replace(&mut self.blind, true) {
                    log::warn!("thread {} cannot be looked at: {error}", thread.number);
                }
            }
        }
    }

    fn has_ended(&mut self, thread: ThreadId) {
        let leases = self
            .watched
            .get(&thread)
            .map(|watched| watched.leases.clone());
        for lease in leases.into_iter().flatten() {
            self.ended.entry(lease).or_default().insert(thread);
        }
    }

    /// Those that have ended since this was asked last. `None`: none.
    pub(crate) fn take(&mut self) -> Option<Ended> {
        let ended = std::mem::take(&mut self.ended);
        Some(ended).filter(|ended| !ended.is_empty())
    }
}

/// Finds out when the threads of a lease began, whose journal is of before Umpire kept that:
/// whoever has a number now, unless it began after the lease had been given.
pub(crate) fn learn(lease: &mut Stored) {
    let (Some(threads), None) = (&lease.threads, &lease.started) else {
        return;
    };
    let given = lease.since.unwrap_or(lease.waits_since);
    let started = threads.iter().map(|number| {
        let life = Life::of(*number).ok().flatten();
        let started = life.map(|life| life.id.started);
        started.filter(|started| started.saturating_mul(TICK) <= given)
    });
    // No thread of a user's began with the host.
    lease.started = Some(started.map(Option::unwrap_or_default).collect());
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use arbiter::CounterSet;
    use arbiter_host::{
        BootTime, Demand, HostArbiter, Outcome, Owner, PmuId, Scope, TenantId, Terms, Waits,
    };

    use super::*;
    use crate::config::{ArbiterConfig, PmuConfig};
    use crate::journal::tests::lease;

    /// A process that waits for the end of its input.
    fn process() -> (Child, ThreadId) {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let child = command.spawn().expect("cat starts");
        let life = Life::of(child.id()).expect("it can be looked at");
        (child, life.expect("it is there").id)
    }

    fn end(mut child: Child) {
        drop(child.stdin.take());
        child.wait().expect("it is ours");
    }

    /// An arbiter with a lease of this scope on CPU 0, of which it has four counters.
    pub(crate) fn with_lease(config: ArbiterConfig, scope: Scope) -> (Service, LeaseId) {
        let config = ArbiterConfig {
            pmus: vec![PmuConfig::stated(4, 0).expect("four counters")],
            ..config
        };
        let pmus = config.host_pmus(&(0..1).collect());
        let mut arbiter = HostArbiter::new(pmus, config.policy.clone()).expect("the policy fits");
        let owner = Owner {
            tenant: TenantId(0),
            uid: 7,
            pid: 1,
            label: String::new(),
            by: None,
        };
        let terms = Terms {
            demands: vec![Demand {
                pmu: PmuId(0),
                counters: CounterSet::first(4, 0),
            }],
            at_least: 1,
            cpus: (0..1).collect(),
            scope,
            guaranteed: true,
            priority: 0,
            preemptible: false,
            lasts: None,
            waits: Waits::No,
        };
        let granted = arbiter.request(owner, terms, BootTime(0), &mut Vec::new());
        let Ok(Outcome::Granted { lease, .. }) = granted else {
            panic!("{granted:?}");
        };
        (Service::new(arbiter, config), lease)
    }

    /// An arbiter with a lease for these threads, and what watches them.
    fn watched(threads: &[ThreadId], descriptors: usize) -> (Service, LeaseId, Threads) {
        let scope = Scope::Thread(threads.to_vec());
        let (service, lease) = with_lease(ArbiterConfig::default(), scope);
        let mut watch = Threads::new(descriptors).expect("an epoll");
        watch.follow_all(&service);
        (service, lease, watch)
    }

    fn until_told(watch: &mut Threads, look: fn(&mut Threads)) -> Ended {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            look(watch);
            if let Some(ended) = watch.take() {
                return ended;
            }
            assert!(Instant::now() < until, "nobody says that it has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_end_of_a_thread_is_told_with_descriptors_and_without() {
        for (descriptors, look) in [(64, Threads::hear as fn(&mut Threads)), (0, Threads::look)] {
            let ((one, first), (other, second)) = (process(), process());
            let mut threads = vec![first, second];
            threads.sort_unstable();
            let (mut service, lease, mut watch) = watched(&threads, descriptors);
            if descriptors > 0 && !watch.unseen.is_empty() {
                println!(
                    "skipped: the_end_of_a_thread_is_told_with_descriptors_and_without: the \
                     kernel has no descriptors of threads"
                );
                continue;
            }
            look(&mut watch);
            assert_eq!(watch.take(), None);
            end(one);
            let ended = until_told(&mut watch, look);
            assert_eq!(ended, Ended::from([(lease, BTreeSet::from([first]))]));
            service.threads_ended(&ended, BootTime(0));
            watch.follow_all(&service);
            assert_eq!(watch.watched.len(), 1);
            end(other);
            let ended = until_told(&mut watch, look);
            service.threads_ended(&ended, BootTime(0));
            watch.follow(&service, &[Entry::Ended(lease.0)]);
            assert!(service.arbiter().lease(lease).is_none());
            // Nothing is left of it, and nothing is told again.
            assert!(watch.watched.is_empty() && watch.by_event.is_empty());
            assert!(watch.of_user.is_empty() && watch.unseen.is_empty());
            look(&mut watch);
            assert_eq!(watch.take(), None);
        }
    }

    #[test]
    fn one_that_has_ended_before_it_is_watched_is_told_at_once() {
        let (mut child, id) = process();
        let later = ThreadId {
            started: id.started + 1,
            ..id
        };
        let earlier = ThreadId {
            started: id.started - 1,
            ..id
        };
        for (thread, right) in [(id, false), (later, true), (earlier, true)] {
            let (_, _, mut watch) = watched(&[thread], 64);
            assert_eq!(watch.take().is_some(), right, "{thread:?}");
        }
        // Nobody has asked yet how it ended, so it has its number still.
        drop(child.stdin.take());
        let until = Instant::now() + Duration::from_secs(60);
        let runs = || {
            Life::of(id.number)
                .expect("a look")
                .is_some_and(|task| !task.ended)
        };
        while runs() {
            assert!(Instant::now() < until, "it does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (_, _, mut watch) = watched(&[id], 64);
        assert!(watch.take().is_some());
        end(child);
    }

    #[test]
    fn of_a_journal_of_before_it_is_found_out_who_was_meant() {
        let (child, id) = process();
        let began = id.started * 10_000_000;
        for (since, right) in [(began, id.started), (began - 1, 0)] {
            let mut stored = Stored {
                threads: Some(vec![id.number, u32::MAX]),
                started: None,
                since: Some(since),
                ..lease(1, 1)
            };
            for _ in 0..2 {
                learn(&mut stored);
                assert_eq!(stored.started, Some(vec![right, 0]));
            }
        }
        end(child);
    }
}
