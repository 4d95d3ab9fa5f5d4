//! What is kept of a vCPU's decisions until they are written: a bounded table,
//! whatever the guest does. Pure: time comes in, entries go out.
//!
//! What changes who holds a counter, or how, is kept one by one, so that the file
//! tells who held it at any time; up to so many a second. Denials, and what is
//! beyond, are folded: the first of a kind is due at once, those like it are
//! counted, and due as one entry with their number, ever more rarely. So a guest
//! that has an access dropped a hundred thousand times a second fills neither
//! memory nor disk, and every one of them is accounted for.

use std::collections::{BTreeMap, HashMap};

use arbiter::{CounterId, Event, Layer, Record};

const SECOND: u64 = 1_000_000_000;

/// Nanoseconds between the first two entries of one kind. The distance doubles
/// with each further one.
const FIRST_INTERVAL: u64 = SECOND;

/// The longest distance.
const LONGEST_INTERVAL: u64 = 60 * SECOND;

/// A kind that was not written for so long is forgotten, and begins anew. Longer
/// than the longest distance, or a guest could have it forgotten by pausing.
const FORGOTTEN_AFTER: u64 = 2 * LONGEST_INTERVAL;

/// Kinds that are told apart. A guest of some ten counters reaches some hundred
/// denials; beyond, counter, reason and details are left out.
const MOST_KINDS: usize = 1024;

/// Changes of state that are kept one by one in a second. Further ones are
/// folded until the second is over.
const MOST_SINGLE: usize = 1000;

/// And that wait to be written: a writer that a full disk holds up must not make
/// the memory grow.
const MOST_WAITING: usize = 4 * MOST_SINGLE;

/// Whether one of these says as much as many: nothing has changed by it.
fn is_denial(event: &Event) -> bool {
    matches!(
        event,
        Event::Refused(_) | Event::DroppedRead(_) | Event::DroppedWrite(_) | Event::Faulted(_)
    )
}

/// Decisions that count as alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// Those that do not differ in anything, details included.
    Same(Record),
    /// The kind that stands for many.
    Coarse(Layer, &'static str),
}

/// Decisions of one kind that are not written.
#[derive(Debug, Clone, Copy)]
struct Pending {
    /// How many; 0 if all are written.
    count: u64,
    /// Time of the first of them.
    first: u64,
    /// Time of the last.
    last: u64,
    /// Its place among all of the vCPU.
    order: u64,
    /// What it was.
    record: Record,
    /// When the kind was written last.
    written: Option<u64>,
    /// How long after that it is due again.
    interval: u64,
}

impl Pending {
    fn is_due(&self, now: u64) -> bool {
        let rested = |at: u64| now.saturating_sub(at) >= self.interval;
        self.count > 0 && self.written.is_none_or(rested)
    }

    fn is_forgotten(&self, now: u64) -> bool {
        let long_ago = |at: u64| now.saturating_sub(at) >= FORGOTTEN_AFTER;
        self.count == 0 && self.written.is_some_and(long_ago)
    }
}

/// One or more decisions of one kind, to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The last of them.
    pub record: Record,
    /// They agree in layer and event only.
    pub coarse: bool,
    /// How many.
    pub count: u64,
    /// Nanoseconds from the start to the first.
    pub first: u64,
    /// And to the last.
    pub last: u64,
    /// Its place among all of the vCPU.
    pub(super) order: u64,
}

/// Decisions by layer and event, and accesses denied by counter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Totals {
    /// How many of each.
    pub events: BTreeMap<(Layer, &'static str), u64>,
    /// Accesses dropped and faulted.
    pub denied: BTreeMap<CounterId, Denied>,
}

/// Accesses that one counter was spared.
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

    /// Adds those of `other`.
    pub fn add(&mut self, other: &Totals) {
        for (event, count) in &other.events {
            *self.events.entry(*event).or_default() += count;
        }
        for (counter, more) in &other.denied {
            let denied = self.denied.entry(*counter).or_default();
            denied.dropped += more.dropped;
            denied.faulted += more.faulted;
        }
    }

    /// All decisions.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.events.values().sum()
    }
}

/// The decisions of one vCPU.
#[derive(Debug, Default)]
pub(super) struct DecisionTable {
    kinds: HashMap<Kind, Pending>,
    singles: Vec<Entry>,
    /// When the present second began, and how many singles it has had.
    second: (u64, usize),
    totals: Totals,
    /// Nobody will take entries.
    totals_only: bool,
}

impl DecisionTable {
    /// One that only adds up, where there is no file.
    pub(super) fn totals_only() -> Self {
        Self {
            totals_only: true,
            ..Self::default()
        }
    }

    /// A decision was taken at `now`, the `order`th of its vCPU; true if an entry
    /// is due.
    pub(super) fn note(&mut self, now: u64, order: u64, record: &Record) -> bool {
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

    /// Whether one more decision can be kept by itself; if so, it is counted.
    fn has_room(&mut self, now: u64) -> bool {
        if now.saturating_sub(self.second.0) >= SECOND {
            self.second = (now, 0);
        }
        let room = self.second.1 < MOST_SINGLE && self.singles.len() < MOST_WAITING;
        self.second.1 += usize::from(room);
        room
    }

    fn fold(&mut self, now: u64, order: u64, record: &Record) -> bool {
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

    /// What is due at `now`, or everything at the end; in its order.
    pub(super) fn take(&mut self, now: u64, all: bool) -> Vec<Entry> {
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

    /// All decisions so far.
    pub(super) fn totals(&self) -> &Totals {
        &self.totals
    }
}

#[cfg(test)]
mod tests;
