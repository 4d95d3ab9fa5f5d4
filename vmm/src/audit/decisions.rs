//! A vCPU's decisions until they are written: a table that is bounded, whatever the
//! guest does. It is pure: times go in, entries come out.
//!
//! Decisions that change who holds a counter, or how, are kept one by one, up to so
//! many a second. So the file tells who held a counter at any time. Denials, and
//! changes beyond the limit, are folded: the first of a kind is due at once. Those like
//! it are counted, and due as one entry with their number, ever more rarely. So a guest
//! that has an access dropped a hundred thousand times a second fills neither memory
//! nor disk, and every one of them is accounted for.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use arbiter::{AskRecord, CounterId, Event, Layer, Record};

/// A moment of a run: nanoseconds since the audit began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AuditTime(pub(super) u64);

impl AuditTime {
    /// Now, in an audit that began at `start`.
    pub(super) fn now(start: Instant) -> Self {
        Self(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

const SECOND: Duration = Duration::from_secs(1);

/// Time between the first two entries of one kind. It doubles with each further
/// entry.
const FIRST_INTERVAL: Duration = SECOND;

/// The longest time between two entries of one kind.
const LONGEST_INTERVAL: Duration = Duration::from_secs(60);

/// A kind that was not written for so long is forgotten, and begins anew. This is
/// longer than the longest interval, or a guest could have a kind forgotten by pausing.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(2 * 60);

/// Most kinds that are told apart. A guest of some ten counters reaches some hundred
/// denials. Further kinds are told apart by layer and event only.
const MOST_KINDS: usize = 1024;

/// Most changes of state that are kept one by one in a second. Further ones are folded
/// until the second is over.
const MOST_SINGLE: usize = 1000;

/// Most changes of state that wait to be written. A writer that a full disk holds up
/// must not make the memory grow.
const MOST_WAITING: usize = 4 * MOST_SINGLE;

/// Whether an event is a denial. It changes nothing, so one says as much as many.
fn is_denial(event: &Event) -> bool {
    matches!(
        event,
        Event::Refused(_) | Event::DroppedRead(_) | Event::DroppedWrite(_) | Event::Faulted(_)
    )
}

/// Decisions that count as alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// Decisions that agree in everything, details included.
    Same(Record),
    /// Decisions that agree in layer and event.
    Coarse(Layer, &'static str),
}

/// Decisions of one kind that are not written yet.
#[derive(Debug, Clone, Copy)]
struct Pending {
    /// How many; 0 if all are written.
    count: u64,
    /// Time of the first of them.
    first: AuditTime,
    /// Time of the last of them.
    last: AuditTime,
    /// Place of the last among all decisions of the vCPU.
    order: u64,
    /// The last of them.
    record: Record,
    /// When an entry of the kind was written last.
    written: Option<AuditTime>,
    /// How long after that the next one is due.
    interval: Duration,
}

impl Pending {
    fn is_due(&self, now: AuditTime) -> bool {
        let rested = |at| now.since(at) >= self.interval;
        self.count > 0 && self.written.is_none_or(rested)
    }

    fn is_forgotten(&self, now: AuditTime) -> bool {
        let long_ago = |at| now.since(at) >= FORGOTTEN_AFTER;
        self.count == 0 && self.written.is_some_and(long_ago)
    }
}

/// One or more decisions of one kind, to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// The last of them.
    pub(super) record: Record,
    /// They agree in layer and event only.
    pub(super) coarse: bool,
    /// How many.
    pub(super) count: u64,
    /// Time of the first of them.
    pub(super) first: AuditTime,
    /// Time of the last of them.
    pub(super) last: AuditTime,
    /// Place of the last among all decisions of the vCPU.
    pub(super) order: u64,
}

/// Something that a layer asked for, to be written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct AskEntry {
    pub(super) time: AuditTime,
    /// Its number among all that layers of the vCPU asked for, from 1 on. A gap shows
    /// what was not kept.
    pub(super) number: u64,
    pub(super) ask: AskRecord,
}

/// Decisions by layer and event, and accesses denied by counter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Totals {
    /// How many decisions there were of each layer and event.
    pub events: BTreeMap<(Layer, &'static str), u64>,
    /// Accesses that each counter denied.
    pub denied: BTreeMap<CounterId, Denied>,
    /// How often layers asked for something.
    pub asks: u64,
}

/// Accesses that were kept from one counter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Denied {
    /// Reads and writes that were dropped.
    pub dropped: u64,
    /// Accesses that raised #GP.
    pub faulted: u64,
}

impl Totals {
    fn note(&mut self, record: &Record) {
        let event = (record.layer, record.event.name());
        *self.events.entry(event).or_default() += 1;
        let Some(counter) = record.counter else {
            return;
        };
        match record.event {
            Event::DroppedRead(_) | Event::DroppedWrite(_) => {
                self.denied.entry(counter).or_default().dropped += 1;
            }
            Event::Faulted(_) => self.denied.entry(counter).or_default().faulted += 1,
            _ => {}
        }
    }

    /// Adds `other`.
    pub fn add(&mut self, other: &Totals) {
        for (event, count) in &other.events {
            *self.events.entry(*event).or_default() += count;
        }
        for (counter, more) in &other.denied {
            let denied = self.denied.entry(*counter).or_default();
            denied.dropped += more.dropped;
            denied.faulted += more.faulted;
        }
        self.asks += other.asks;
    }

    /// The number of all decisions.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.events.values().sum()
    }
}

/// The decisions of one vCPU that wait to be written, and their totals.
#[derive(Debug, Default)]
pub(super) struct DecisionTable {
    kinds: HashMap<Kind, Pending>,
    singles: Vec<Entry>,
    asks: Vec<AskEntry>,
    /// When the present second began, and how many singles it has had.
    second: (AuditTime, usize),
    /// The same for what layers asked for.
    second_of_asks: (AuditTime, usize),
    totals: Totals,
    /// There is no file, so nobody takes entries.
    totals_only: bool,
}

impl DecisionTable {
    /// A table that only adds up, where there is no file.
    pub(super) fn totals_only() -> Self {
        Self {
            totals_only: true,
            ..Self::default()
        }
    }

    /// Notes a decision that was taken at `now`, the `order`th of its vCPU. True if an
    /// entry is due.
    pub(super) fn note(&mut self, now: AuditTime, order: u64, record: &Record) -> bool {
        self.totals.note(record);
        if self.totals_only {
            return false;
        }
        if !is_denial(&record.event) && self.has_room(now) {
            self.singles.push(Entry {
                record: *record,
                coarse: false,
                count: 1,
                first: now,
                last: now,
                order,
            });
            return true;
        }
        self.fold(now, order, record)
    }

    /// Notes what a layer asked for. True if it is to be written. What comes faster than
    /// a writer should have to write is left out, and its number is missing then.
    pub(super) fn note_ask(&mut self, entry: AskEntry) -> bool {
        self.totals.asks += 1;
        if self.totals_only {
            return false;
        }
        let waiting = self.asks.len();
        let room = has_room(&mut self.second_of_asks, entry.time, waiting);
        if room {
            self.asks.push(entry);
        }
        room
    }

    /// What layers asked for since the last call, in its order.
    pub(super) fn take_asks(&mut self) -> Vec<AskEntry> {
        std::mem::take(&mut self.asks)
    }

    /// Whether one more decision can be kept by itself. If so, it is counted.
    fn has_room(&mut self, now: AuditTime) -> bool {
        has_room(&mut self.second, now, self.singles.len())
    }

    fn fold(&mut self, now: AuditTime, order: u64, record: &Record) -> bool {
        let mut kind = Kind::Same(*record);
        if self.kinds.len() >= MOST_KINDS && !self.kinds.contains_key(&kind) {
            kind = Kind::Coarse(record.layer, record.event.name());
        }
        let pending = self.kinds.entry(kind).or_insert(Pending {
            count: 0,
            first: now,
            last: now,
            order,
            record: *record,
            written: None,
            interval: FIRST_INTERVAL,
        });
        if pending.count == 0 {
            pending.first = now;
        }
        pending.count = pending.count.saturating_add(1);
        pending.last = now;
        pending.order = order;
        pending.record = *record;
        pending.is_due(now)
    }

    /// The entries that are due at `now`, or `all` of them at the end, in their order.
    pub(super) fn take(&mut self, now: AuditTime, all: bool) -> Vec<Entry> {
        let mut entries = std::mem::take(&mut self.singles);
        for (kind, pending) in &mut self.kinds {
            if !(pending.is_due(now) || all && pending.count > 0) {
                continue;
            }
            if pending.written.is_some() {
                pending.interval = (2 * pending.interval).min(LONGEST_INTERVAL);
            }
            pending.written = Some(now);
            entries.push(Entry {
                record: pending.record,
                coarse: matches!(kind, Kind::Coarse(..)),
                count: std::mem::take(&mut pending.count),
                first: pending.first,
                last: pending.last,
                order: pending.order,
            });
        }
        self.kinds.retain(|_, pending| !pending.is_forgotten(now));
        entries.sort_unstable_by_key(|entry| entry.order);
        entries
    }

    /// The totals of all decisions so far.
    pub(super) fn totals(&self) -> &Totals {
        &self.totals
    }
}

/// Whether one more entry of a second may be kept, where some wait already. If so, it is
/// counted.
fn has_room(second: &mut (AuditTime, usize), now: AuditTime, waiting: usize) -> bool {
    if now.since(second.0) >= SECOND {
        *second = (now, 0);
    }
    let room = second.1 < MOST_SINGLE && waiting < MOST_WAITING;
    second.1 += usize::from(room);
    room
}

#[cfg(test)]
mod tests;
