//! What is done to events of threads. To stop, read or close one the kernel takes a lock of the
//! thread, and of an event that others may have inherited it walks all that count by it, with that
//! lock held: a group has as many processes as its owner likes. So the thread that decides does
//! none of that. A few others do, for the users in turn, and until they have answered an event
//! counts as one that may be on.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, sleep};
use std::time::Duration;

use umpire_service::Closer;

use crate::budget::{Errno, Follows, Handed, HandedEvent, Lineage};

/// Most threads that do it, for all users: of a user one at a time.
const MOST_THREADS: usize = 8;
/// So much is done for a user before somebody else has a turn.
const BATCH: usize = 16;
/// A process that is being started takes over whether its parent counted a moment before, and is
/// reached by no stop until the kernel has it in its list: what is stopped is stopped once more so
/// long after.
const STARTING: Duration = Duration::from_millis(2);

/// The arbiter's own descriptor of an event.
#[derive(Clone, Debug)]
pub(super) enum EventFile {
    /// It counts for a CPU, or on one for a group: whatever is done to it takes no time.
    OfCpu(Arc<Handed>),
    /// It counts for a thread, and maybe for what that starts.
    OfThread(Arc<ThreadEvent>),
}

impl EventFile {
    /// What is done to one of a thread is done for user `uid`, and `closer` closes it. Who may have
    /// inherited it is known by the lineage.
    pub(super) fn new(
        event: Handed,
        of: &HandedEvent,
        lineage: Option<Lineage>,
        closer: &Closer,
        uid: u32,
    ) -> Self {
        if of.thread.is_none() {
            return EventFile::OfCpu(Arc::new(event));
        }
        let lineage = lineage.map(|lineage| SlowFile::new(lineage, closer, uid));
        EventFile::OfThread(Arc::new(ThreadEvent {
            event: SlowFile::new(event, closer, uid),
            is_inherited: of.follows != Follows::Nothing,
            lineage,
        }))
    }

    /// All who may have inherited it, if that is known.
    pub(super) fn lineage(&self) -> Option<&Lineage> {
        match self {
            EventFile::OfCpu(_) => None,
            EventFile::OfThread(event) => event.lineage.as_ref().map(SlowFile::get),
        }
    }

    /// Whether both are the arbiter's descriptor of one event.
    pub(super) fn is(&self, other: &EventFile) -> bool {
        match (self, other) {
            (EventFile::OfCpu(one), EventFile::OfCpu(other)) => Arc::ptr_eq(one, other),
            (EventFile::OfThread(one), EventFile::OfThread(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl AsFd for EventFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let event = match self {
            EventFile::OfCpu(event) => event,
            EventFile::OfThread(event) => event.handed(),
        };
        event.as_fd()
    }
}

/// An event of a thread.
#[derive(Debug)]
pub(super) struct ThreadEvent {
    event: SlowFile<Handed>,
    /// What the thread starts may have inherited it.
    is_inherited: bool,
    lineage: Option<SlowFile<Lineage>>,
}

impl ThreadEvent {
    pub(super) fn is_inherited(&self) -> bool {
        self.is_inherited
    }

    /// Whatever is done to it may take long.
    pub(super) fn handed(&self) -> &Handed {
        self.event.get()
    }
}

/// What takes long to be closed: whoever leaves it last does not wait for that.
#[derive(Debug)]
struct SlowFile<T: Into<OwnedFd>> {
    /// There is one until the end.
    file: Option<T>,
    closer: Closer,
    uid: u32,
}

impl<T: Into<OwnedFd>> SlowFile<T> {
    fn new(file: T, closer: &Closer, uid: u32) -> Self {
        SlowFile {
            file: Some(file),
            closer: closer.clone(),
            uid,
        }
    }

    fn get(&self) -> &T {
        self.file.as_ref().expect("it is taken by drop alone")
    }
}

impl<T: Into<OwnedFd>> Drop for SlowFile<T> {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            self.closer.close(file.into(), self.uid);
        }
    }
}

/// What is to be done to an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Stop,
    /// Whether it has counted since it was known to have counted for so long; then it is stopped.
    Look {
        known: Option<Duration>,
        /// It is stopped in any case: what was being started at the last stop may be on, and
        /// sleep.
        stops: bool,
    },
}

/// What was seen of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EventSight {
    /// Whether it has counted since. `None`: the kernel tells nothing of one that is pinned and had
    /// no counter, and others may have counted by it all the same.
    pub(super) on: Option<bool>,
    /// As [`Handed::enabled`].
    pub(super) enabled: Option<Duration>,
    /// Why it could not be stopped.
    pub(super) failed: Option<String>,
}

/// How the kernel is asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) disable: fn(&Handed) -> Result<(), Errno>,
    pub(super) enabled: fn(&Handed) -> Option<Duration>,
}

/// The host's.
pub(super) const HOST: Kernel = Kernel {
    disable: Handed::disable,
    enabled: |event| event.enabled().ok().flatten(),
};

impl Kernel {
    /// Whether an event has counted since it was known to have counted for so long; stops it then.
    pub(super) fn look(self, event: &Handed, known: Option<Duration>) -> EventSight {
        let enabled = (self.enabled)(event);
        if enabled <= known {
            return EventSight {
                on: Some(false),
                enabled: known,
                failed: None,
            };
        }
        let stopped = self.stop(event);
        EventSight {
            on: Some(true),
            enabled: stopped.enabled.max(enabled),
            ..stopped
        }
    }

    pub(super) fn stop(self, event: &Handed) -> EventSight {
        let failed = (self.disable)(event).err();
        EventSight {
            on: Some(false),
            enabled: (self.enabled)(event),
            failed: failed.map(|error| error.to_string()),
        }
    }

    /// Does what a user's orders say, and answers each in its place.
    fn obey(self, jobs: &[Errand]) -> Vec<EventSight> {
        let first = jobs.iter().map(|job| self.begin(job));
        let mut seen: Vec<(EventSight, bool)> = first.collect();
        if seen.iter().any(|(_, again)| *again) {
            sleep(STARTING);
        }
        let again = jobs.iter().zip(&mut seen);
        for (job, (seen, _)) in again.filter(|(_, (_, again))| *again) {
            let once_more = self.stop(job.event.handed());
            seen.enabled = once_more.enabled.max(seen.enabled);
            seen.failed = once_more.failed;
        }
        seen.into_iter().map(|(seen, _)| seen).collect()
    }

    /// Does what an order says. Also returns whether the event is to be stopped once more.
    fn begin(self, job: &Errand) -> (EventSight, bool) {
        let event = job.event.handed();
        match job.order {
            Order::Stop => (self.stop(event), job.event.is_inherited),
            Order::Look { known, .. } if !job.event.is_inherited => {
                (self.look(event, known), false)
            }
            Order::Look { known, stops } => {
                let enabled = (self.enabled)(event);
                let on = enabled.map(|enabled| Some(enabled) > known);
                let stops = stops || on != Some(false);
                if stops {
                    let _ = (self.disable)(event);
                }
                let seen = EventSight {
                    on,
                    enabled: enabled.max(known),
                    failed: None,
                };
                (seen, stops)
            }
        }
    }
}

#[derive(Debug)]
struct Errand {
    number: u64,
    event: Arc<ThreadEvent>,
    order: Order,
}

/// What is to be done for a user.
#[derive(Debug, Default)]
struct Orders {
    /// Somebody may wait for these.
    stops: VecDeque<Errand>,
    looks: VecDeque<Errand>,
    /// Something was stopped since the last look: who always has something to be stopped is looked
    /// at all the same.
    look_is_next: bool,
    /// A thread does some of it.
    is_served: bool,
}

impl Orders {
    fn is_empty(&self) -> bool {
        self.stops.is_empty() && self.looks.is_empty()
    }

    fn waits(&self) -> bool {
        !self.is_served && !self.is_empty()
    }

    /// What is done next: some that are to be stopped, or one look that may take long, or some
    /// that do not.
    fn next(&mut self) -> Vec<Errand> {
        let looks = self.stops.is_empty() || self.look_is_next && !self.looks.is_empty();
        self.look_is_next = !looks;
        if looks {
            let are_short = self.looks.iter().take(BATCH);
            let are_short = are_short.take_while(|look| !look.event.is_inherited);
            let some = are_short.count().max(1).min(self.looks.len());
            self.looks.drain(..some).collect()
        } else {
            let some = self.stops.len().min(BATCH);
            self.stops.drain(..some).collect()
        }
    }
}

/// What is to be done for all.
#[derive(Debug, Default)]
struct Queue {
    users: BTreeMap<u32, Orders>,
    threads: usize,
    /// The user for whom something was begun last: others have their turn.
    last: u32,
}

impl Queue {
    /// What is done next, of a user for whom nothing is being done.
    fn next(&mut self) -> Option<(u32, Vec<Errand>)> {
        let after = (self.last.saturating_add(1).., ..=self.last);
        let mut users = self.users.range(after.0).chain(self.users.range(after.1));
        let (&uid, _) = users.find(|(_, orders)| orders.waits())?;
        let orders = self.users.get_mut(&uid)?;
        orders.is_served = true;
        self.last = uid;
        Some((uid, orders.next()))
    }

    /// What was done for a user is done.
    fn done(&mut self, uid: u32) {
        if let Some(orders) = self.users.get_mut(&uid) {
            orders.is_served = false;
            if orders.is_empty() {
                self.users.remove(&uid);
            }
        }
    }

    /// Whether one more thread is to be started: more users wait than there are threads that have
    /// nothing to do yet.
    fn takes_thread(&mut self) -> bool {
        let waiting = self.users.values().filter(|orders| orders.waits()).count();
        let served = self.users.values().filter(|orders| orders.is_served);
        let takes = self.threads < MOST_THREADS && waiting > self.threads - served.count();
        self.threads += usize::from(takes);
        takes
    }
}

/// All that is being done.
#[derive(Debug)]
pub(super) struct Stops {
    queue: Arc<Mutex<Queue>>,
    sends: Sender<(u64, EventSight)>,
    done: Receiver<(u64, EventSight)>,
    /// Who decides hears by it that there are answers.
    bell: UnixStream,
    kernel: Kernel,
    /// The number of the last order.
    number: u64,
    /// So many are not answered yet.
    pending: usize,
}

impl Stops {
    pub(super) fn new(bell: UnixStream, kernel: Kernel) -> Self {
        let (sends, done) = channel();
        Stops {
            queue: Arc::default(),
            sends,
            done,
            bell,
            kernel,
            number: 0,
            pending: 0,
        }
    }

    /// Whether all orders are answered.
    pub(super) fn is_idle(&self) -> bool {
        self.pending == 0
    }

    /// The number of the last order.
    pub(super) fn last(&self) -> u64 {
        self.number
    }

    pub(super) fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// Has something done to an event, and returns the number of the answer. Never waits.
    pub(super) fn begin(&mut self, event: &Arc<ThreadEvent>, order: Order) -> u64 {
        self.number += 1;
        self.pending += 1;
        let job = Errand {
            number: self.number,
            event: Arc::clone(event),
            order,
        };
        let mut queue = lock(&self.queue);
        let orders = queue.users.entry(event.event.uid).or_default();
        match order {
            Order::Stop => orders.stops.push_back(job),
            Order::Look { .. } => orders.looks.push_back(job),
        }
        drop(queue);
        self.serve();
        self.number
    }

    /// Has a thread do what waits, if there is none for it. If none starts, it waits for the next
    /// time that this is tried.
    pub(super) fn serve(&self) {
        if !lock(&self.queue).takes_thread() {
            return;
        }
        let (queue, sends, kernel) = (Arc::clone(&self.queue), self.sends.clone(), self.kernel);
        let bell = self.bell.try_clone();
        let spawned = bell.and_then(|bell| {
            let body = move || run(&queue, kernel, &sends, bell);
            Builder::new().name("stop-events".to_owned()).spawn(body)
        });
        if let Err(error) = spawned {
            let mut queue = lock(&self.queue);
            queue.threads -= 1;
            if queue.threads == 0 {
                log::error!("events are not stopped yet: no thread for it: {error}");
            }
        }
    }

    /// What was answered since, by the numbers of the orders.
    pub(super) fn finished(&mut self) -> BTreeMap<u64, EventSight> {
        let finished: BTreeMap<u64, EventSight> = self.done.try_iter().collect();
        self.pending -= finished.len();
        finished
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does what there is.
fn run(
    queue: &Mutex<Queue>,
    kernel: Kernel,
    sends: &Sender<(u64, EventSight)>,
    mut bell: UnixStream,
) {
    loop {
        let mut all = lock(queue);
        let Some((uid, jobs)) = all.next() else {
            all.threads -= 1;
            return;
        };
        drop(all);
        let sights = kernel.obey(&jobs);
        for (job, seen) in jobs.iter().zip(sights) {
            let _ = sends.send((job.number, seen));
        }
        lock(queue).done(uid);
        // A pipe that is full tells it already.
        let _ = bell.write(&[1]);
    }
}

#[cfg(test)]
#[path = "stops_tests.rs"]
mod tests;
