//! What is done to events that others may have inherited. To stop, read or close such an event the
//! kernel walks all that count by it, which takes as long as they are many: a group has as many
//! processes as its owner likes. So the thread that decides does none of that: each user has a
//! thread of its own for it, and until that has answered an event counts as one that may be on.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, sleep};
use std::time::Duration;

use umpire_service::Closer;

use crate::budget::{Errno, Follows, Handed, Lineage};

/// A process that is being started takes over whether its parent counted a moment before, and is
/// reached by no stop until the kernel has it in its list: what is stopped is stopped once more so
/// long after.
const STARTING: Duration = Duration::from_millis(2);

/// The arbiter's own descriptor of an event.
#[derive(Clone, Debug)]
pub(super) enum EventFile {
    /// It counts for one thread, CPU or group: whatever is done to it takes no time.
    Alone(Arc<Handed>),
    /// Others may have inherited it.
    Inherited(Arc<InheritedEvent>),
}

impl EventFile {
    /// `closer` closes it for that user, if others may have inherited it; who these are is known by
    /// the lineage.
    pub(super) fn new(
        event: Handed,
        follows: Follows,
        lineage: Option<SlowLineage>,
        closer: &Closer,
        uid: u32,
    ) -> Self {
        match follows {
            Follows::Nothing => EventFile::Alone(Arc::new(event)),
            Follows::Threads | Follows::Children => {
                let event = SlowFile::new(event, closer, uid);
                EventFile::Inherited(Arc::new(InheritedEvent { event, lineage }))
            }
        }
    }

    /// All who may have inherited it, if that is known.
    pub(super) fn lineage(&self) -> Option<&SlowLineage> {
        match self {
            EventFile::Alone(_) => None,
            EventFile::Inherited(event) => event.lineage.as_ref(),
        }
    }
}

impl AsFd for EventFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            EventFile::Alone(event) => event.as_fd(),
            EventFile::Inherited(event) => event.event.get().as_fd(),
        }
    }
}

/// An event that others may have inherited.
#[derive(Debug)]
pub(super) struct InheritedEvent {
    event: SlowFile<Handed>,
    lineage: Option<SlowLineage>,
}

/// Those who may have inherited some events of one thread.
pub(super) type SlowLineage = Arc<SlowFile<Lineage>>;

/// What takes long to be closed: whoever leaves it last does not wait for that.
#[derive(Debug)]
pub(super) struct SlowFile<T: Into<OwnedFd>> {
    /// There is one until the end.
    file: Option<T>,
    closer: Closer,
    uid: u32,
}

impl<T: Into<OwnedFd>> SlowFile<T> {
    pub(super) fn new(file: T, closer: &Closer, uid: u32) -> Self {
        SlowFile {
            file: Some(file),
            closer: closer.clone(),
            uid,
        }
    }

    pub(super) fn get(&self) -> &T {
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct EventSight {
    /// It has counted since.
    pub(super) on: bool,
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
                enabled: known,
                ..EventSight::default()
            };
        }
        let stopped = self.stop(event);
        EventSight {
            on: true,
            enabled: stopped.enabled.max(enabled),
            ..stopped
        }
    }

    pub(super) fn stop(self, event: &Handed) -> EventSight {
        let failed = (self.disable)(event).err();
        EventSight {
            on: false,
            enabled: (self.enabled)(event),
            failed: failed.map(|error| error.to_string()),
        }
    }

    /// Does what a user's orders say, and answers each in its place.
    fn obey(self, jobs: &[Errand]) -> Vec<EventSight> {
        let first = jobs.iter().map(|job| {
            let event = job.event.event.get();
            let (known, stops) = match job.order {
                Order::Stop => (None, true),
                Order::Look { known, stops } => (Some(known), stops),
            };
            let enabled = known.and_then(|_| (self.enabled)(event));
            let on = known.is_some_and(|known| enabled > known);
            let stops = stops || on;
            if stops {
                let _ = (self.disable)(event);
            }
            let enabled = enabled.max(known.flatten());
            let seen = EventSight {
                on,
                enabled,
                failed: None,
            };
            (seen, stops)
        });
        let mut seen: Vec<(EventSight, bool)> = first.collect();
        if seen.iter().any(|(_, stops)| *stops) {
            sleep(STARTING);
        }
        let again = jobs.iter().zip(&mut seen);
        for (job, (seen, _)) in again.filter(|(_, (_, stops))| *stops) {
            let once_more = self.stop(job.event.event.get());
            seen.enabled = once_more.enabled.max(seen.enabled);
            seen.failed = once_more.failed;
        }
        seen.into_iter().map(|(seen, _)| seen).collect()
    }
}

#[derive(Debug)]
struct Errand {
    number: u64,
    event: Arc<InheritedEvent>,
    order: Order,
}

/// What is to be done for a user.
#[derive(Debug, Default)]
struct Orders {
    /// Somebody may wait for these.
    stops: Vec<Errand>,
    looks: VecDeque<Errand>,
    /// A thread does it.
    runs: bool,
}

impl Orders {
    /// What is done next: all that is to be stopped, or one look.
    fn next(&mut self) -> Vec<Errand> {
        if self.stops.is_empty() {
            self.looks.pop_front().into_iter().collect()
        } else {
            std::mem::take(&mut self.stops)
        }
    }
}

type Users = BTreeMap<u32, Orders>;

/// All that is being done.
#[derive(Debug)]
pub(super) struct Stops {
    users: Arc<Mutex<Users>>,
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
            users: Arc::default(),
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

    pub(super) fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// Has something done to an event, and returns the number of the answer. Never waits.
    pub(super) fn begin(&mut self, event: &Arc<InheritedEvent>, order: Order) -> u64 {
        self.number += 1;
        self.pending += 1;
        let job = Errand {
            number: self.number,
            event: Arc::clone(event),
            order,
        };
        let uid = event.event.uid;
        let mut users = lock(&self.users);
        let orders = users.entry(uid).or_default();
        match order {
            Order::Stop => orders.stops.push(job),
            Order::Look { .. } => orders.looks.push_back(job),
        }
        let runs = std::mem::replace(&mut orders.runs, true);
        drop(users);
        if !runs {
            self.start(uid);
        }
        self.number
    }

    /// If no thread starts, what is to be done waits for the next time that this is tried.
    fn start(&self, uid: u32) {
        let (users, sends, kernel) = (Arc::clone(&self.users), self.sends.clone(), self.kernel);
        let bell = self.bell.try_clone();
        let spawned = bell.and_then(|bell| {
            let body = move || run(&users, uid, kernel, &sends, bell);
            Builder::new().name("stop-events".to_owned()).spawn(body)
        });
        if let Err(error) = spawned {
            log::error!("events of user {uid} are not stopped yet: no thread for it: {error}");
            if let Some(orders) = lock(&self.users).get_mut(&uid) {
                orders.runs = false;
            }
        }
    }

    /// What was answered since, by the numbers of the orders.
    pub(super) fn finished(&mut self) -> BTreeMap<u64, EventSight> {
        let finished: BTreeMap<u64, EventSight> = self.done.try_iter().collect();
        self.pending -= finished.len();
        finished
    }

    /// Tries again where no thread could be started.
    pub(super) fn start_again(&self) {
        let mut users = lock(&self.users);
        let waits = users.iter_mut().filter(|(_, orders)| !orders.runs);
        let waits = waits.map(|(uid, orders)| {
            orders.runs = true;
            *uid
        });
        let waits: Vec<u32> = waits.collect();
        drop(users);
        for uid in waits {
            self.start(uid);
        }
    }
}

fn lock(users: &Mutex<Users>) -> MutexGuard<'_, Users> {
    users.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does what there is for a user.
fn run(
    users: &Mutex<Users>,
    uid: u32,
    kernel: Kernel,
    sends: &Sender<(u64, EventSight)>,
    mut bell: UnixStream,
) {
    loop {
        let mut all = lock(users);
        let jobs = all.get_mut(&uid).map(Orders::next).unwrap_or_default();
        if jobs.is_empty() {
            all.remove(&uid);
            return;
        }
        drop(all);
        let sights = kernel.obey(&jobs);
        for (job, seen) in jobs.iter().zip(sights) {
            let _ = sends.send((job.number, seen));
        }
        // A pipe that is full tells it already.
        let _ = bell.write(&[1]);
    }
}

#[cfg(test)]
#[path = "stops_tests.rs"]
mod tests;
