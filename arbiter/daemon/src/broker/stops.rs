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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use umpire_service::Closer;

use crate::budget::{Errno, Follows, Handed, HandedEvent, Lineage};

/// Most threads that do it, for all users: of a user one at a time.
const MOST_THREADS: usize = 8;
/// A thread that does a turn for so long may be at it for longer still: another does what others
/// wait for, until there are so many threads.
const LONG: Duration = Duration::from_millis(100);
const MOST_WITH_SLOW: usize = 64;
/// So much is begun in a user's turn, and after so long nothing more.
const BATCH: usize = 64;
const TURN: Duration = Duration::from_millis(20);
/// Orders of a user are looked through for those that are for nothing when there are so many.
const MANY: usize = 1024;
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

    /// Does what a user's orders say, the first of them for as long as a turn is, and answers those
    /// in their places.
    fn obey(self, jobs: &[Errand]) -> Vec<EventSight> {
        let began = Instant::now();
        let mut seen: Vec<EventSight> = Vec::new();
        let mut again = Vec::new();
        for (at, job) in jobs.iter().enumerate() {
            if at > 0 && began.elapsed() >= TURN {
                break;
            }
            let (sight, once_more) = job.event.upgrade().map_or((GONE, None), |event| {
                let (sight, is_twice) = self.begin(&event, job.order);
                (sight, is_twice.then_some(event))
            });
            again.extend(once_more.map(|event| (at, event)));
            seen.push(sight);
        }
        if !again.is_empty() {
            sleep(STARTING);
        }
        for (at, event) in again {
            let once_more = self.stop(event.handed());
            seen[at].enabled = once_more.enabled.max(seen[at].enabled);
            seen[at].failed = once_more.failed;
        }
        seen
    }

    /// Does what an order says. Also returns whether the event is to be stopped once more.
    fn begin(self, of: &ThreadEvent, order: Order) -> (EventSight, bool) {
        let event = of.handed();
        match order {
            Order::Stop => (self.stop(event), of.is_inherited),
            Order::Look { known, .. } if !of.is_inherited => (self.look(event, known), false),
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

/// What is seen of an event that nobody looks at any more.
const GONE: EventSight = EventSight {
    on: None,
    enabled: None,
    failed: None,
};

#[derive(Debug)]
struct Errand {
    number: u64,
    /// Whoever looks at it has it: it does not stay open for what nobody wants to know.
    event: Weak<ThreadEvent>,
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
    /// A thread does some of it, since then.
    begun: Option<Instant>,
    /// So many there were, at least, when they were looked through last.
    many: usize,
}

impl Orders {
    fn len(&self) -> usize {
        self.stops.len() + self.looks.len()
    }

    fn waits(&self) -> bool {
        self.begun.is_none() && self.len() > 0
    }

    fn is_slow(&self, now: Instant) -> bool {
        let begun = self.begun;
        begun.is_some_and(|begun| now.saturating_duration_since(begun) >= LONG)
    }

    fn of(&mut self, order: Order) -> &mut VecDeque<Errand> {
        match order {
            Order::Stop => &mut self.stops,
            Order::Look { .. } => &mut self.looks,
        }
    }

    /// What is done next: some that are to be stopped, or some looks.
    fn next(&mut self) -> Vec<Errand> {
        let looks = self.stops.is_empty() || self.look_is_next && !self.looks.is_empty();
        self.look_is_next = !looks;
        let some = if looks {
            &mut self.looks
        } else {
            &mut self.stops
        };
        some.drain(..some.len().min(BATCH)).collect()
    }

    /// Adds one. Returns how many others are for events that nobody looks at any more, if it is
    /// time to look for those: they are forgotten.
    fn add(&mut self, job: Errand) -> usize {
        self.of(job.order).push_back(job);
        if self.len() < self.many.max(MANY) {
            return 0;
        }
        let before = self.len();
        for some in [&mut self.stops, &mut self.looks] {
            some.retain(|job| job.event.strong_count() > 0);
        }
        self.many = 2 * self.len();
        before - self.len()
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
    fn next(&mut self, now: Instant) -> Option<(u32, Vec<Errand>)> {
        let after = (self.last.saturating_add(1).., ..=self.last);
        let mut users = self.users.range(after.0).chain(self.users.range(after.1));
        let (&uid, _) = users.find(|(_, orders)| orders.waits())?;
        let orders = self.users.get_mut(&uid)?;
        orders.begun = Some(now);
        self.last = uid;
        Some((uid, orders.next()))
    }

    /// A user's turn is over, with some left that was not begun.
    fn done(&mut self, uid: u32, left: Vec<Errand>) {
        if let Some(orders) = self.users.get_mut(&uid) {
            orders.begun = None;
            for job in left.into_iter().rev() {
                orders.of(job.order).push_front(job);
            }
            if orders.len() == 0 {
                self.users.remove(&uid);
            }
        }
    }

    /// Whether one more thread is to be started: more users wait than there are threads that have
    /// nothing to do yet.
    fn takes_thread(&mut self, now: Instant) -> bool {
        let count = |is: &dyn Fn(&Orders) -> bool| {
            let users = self.users.values();
            users.filter(|orders| is(orders)).count()
        };
        let waiting = count(&Orders::waits);
        let served = count(&|orders| orders.begun.is_some());
        let slow = count(&|orders| orders.is_slow(now));
        let has_room = self.threads < (MOST_THREADS + slow).min(MOST_WITH_SLOW);
        let takes = has_room && waiting > self.threads - served;
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
    /// That no thread starts was said.
    said: bool,
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
            said: false,
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
            event: Arc::downgrade(event),
            order,
        };
        let mut queue = lock(&self.queue);
        let orders = queue.users.entry(event.event.uid).or_default();
        self.pending -= orders.add(job);
        drop(queue);
        self.serve();
        self.number
    }

    /// Has a thread do what waits, if there is none for it. If none starts, it waits for the next
    /// time that this is tried.
    pub(super) fn serve(&mut self) {
        if !lock(&self.queue).takes_thread(Instant::now()) {
            return;
        }
        let (queue, sends, kernel) = (Arc::clone(&self.queue), self.sends.clone(), self.kernel);
        let bell = self.bell.try_clone();
        let spawned = bell.and_then(|bell| {
            let body = move || run(&queue, kernel, &sends, bell);
            Builder::new().name("stop-events".to_owned()).spawn(body)
        });
        let said = self.said;
        self.said = spawned.is_err();
        if let Err(error) = spawned {
            lock(&self.queue).threads -= 1;
            if !said {
                log::error!("events may not be stopped yet: no thread for it: {error}");
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
        let Some((uid, mut jobs)) = all.next(Instant::now()) else {
            all.threads -= 1;
            return;
        };
        drop(all);
        let sights = kernel.obey(&jobs);
        let left = jobs.split_off(sights.len());
        for (job, seen) in jobs.iter().zip(sights) {
            let _ = sends.send((job.number, seen));
        }
        lock(queue).done(uid, left);
        // A pipe that is full tells it already.
        let _ = bell.write(&[1]);
    }
}

#[cfg(test)]
#[path = "stops_tests.rs"]
mod tests;
