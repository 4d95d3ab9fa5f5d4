//! What is kept of a vCPU's decisions until they are written: a bounded table,
//! whatever the guest does. Pure: time comes in, entries go out.
//!
//! The first decision of a kind is due at once. Those like it are counted, and
//! due once a second as one entry with their number. So a guest that has an
//! access dropped a hundred thousand times a second fills neither memory nor disk,
//! and every one of them is accounted for.

use std::collections::{BTreeMap, HashMap};

use arbiter::{CounterId, Event, Layer, Reason, Record};

/// Nanoseconds between two entries of one kind.
const INTERVAL: u64 = 1_000_000_000;

/// Kinds that are told apart. A guest of some ten counters reaches some hundred;
/// beyond, counter and reason are left out.
const MOST_KINDS: usize = 1024;

/// Decisions that count as alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    layer: Layer,
    counter: Option<CounterId>,
    event: &'static str,
    reason: Option<Reason>,
}

impl Kind {
    fn of(record: &Record) -> Self {
        Self {
            layer: record.layer,
            counter: record.counter,
            event: record.event.name(),
            reason: record.event.reason(),
        }
    }

    /// The kind that stands for many.
    fn coarse(self) -> Self {
        Self {
            counter: None,
            reason: None,
            ..self
        }
    }
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
}

impl Pending {
    fn is_due(&self, now: u64) -> bool {
        let rested = |at: u64| now.saturating_sub(at) >= INTERVAL;
        self.count > 0 && self.written.is_none_or(rested)
    }
}

/// One or more decisions of one kind, to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The last of them; without its counter if it stands for several.
    pub record: Record,
    /// How many.
    pub count: u64,
    /// Nanoseconds from the start to the first.
    pub first: u64,
    /// And to the last.
    pub last: u64,
    order: u64,
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
pub(super) struct Tally {
    kinds: HashMap<Kind, Pending>,
    totals: Totals,
    order: u64,
    /// Nobody will take entries.
    totals_only: bool,
}

impl Tally {
    /// One that only adds up, where there is no file.
    pub(super) fn totals_only() -> Self {
        Self {
            totals_only: true,
            ..Self::default()
        }
    }

    /// A decision was taken at `now`; true if an entry is due.
    pub(super) fn note(&mut self, now: u64, record: &Record) -> bool {
        self.totals.note(record);
        if self.totals_only {
            return false;
        }
        self.order += 1;
        self.pend(Pending {
            count: 1,
            first: now,
            last: now,
            order: self.order,
            record: *record,
            written: None,
        })
    }

    /// Takes in what was noted beside this one, and later than all in it.
    pub(super) fn merge(&mut self, beside: Tally) {
        self.totals.add(&beside.totals);
        let mut pending: Vec<Pending> = beside.kinds.into_values().collect();
        pending.sort_unstable_by_key(|pending| pending.order);
        for mut pending in pending {
            self.order += 1;
            pending.order = self.order;
            self.pend(pending);
        }
    }

    fn pend(&mut self, more: Pending) -> bool {
        let mut kind = Kind::of(&more.record);
        if self.kinds.len() >= MOST_KINDS && !self.kinds.contains_key(&kind) {
            kind = kind.coarse();
        }
        let pending = self
            .kinds
            .entry(kind)
            .or_insert(Pending { count: 0, ..more });
        if pending.count == 0 {
            pending.first = more.first;
        }
        pending.count = pending.count.saturating_add(more.count);
        pending.last = more.last;
        pending.order = more.order;
        pending.record = Record {
            counter: kind.counter,
            ..more.record
        };
        pending.is_due(more.last)
    }

    /// What is due at `now`, or everything at the end; by time.
    pub(super) fn take(&mut self, now: u64, all: bool) -> Vec<Entry> {
        let pending = self.kinds.values_mut();
        let due = pending.filter(|pending| pending.is_due(now) || all && pending.count > 0);
        let take = |pending: &mut Pending| {
            pending.written = Some(now);
            Entry {
                record: pending.record,
                count: std::mem::take(&mut pending.count),
                first: pending.first,
                last: pending.last,
                order: pending.order,
            }
        };
        let mut entries: Vec<Entry> = due.map(take).collect();
        entries.sort_unstable_by_key(|entry| entry.order);
        entries
    }

    /// All decisions so far.
    pub(super) fn totals(&self) -> &Totals {
        &self.totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PMC: CounterId = CounterId::Programmable(1);

    fn record(event: Event) -> Record {
        Record {
            layer: Layer::GuestKernel,
            counter: Some(PMC),
            event,
        }
    }

    /// What was taken: events, numbers and times.
    fn told(entries: &[Entry]) -> Vec<(&'static str, u64, u64, u64)> {
        let told = |e: &Entry| (e.record.event.name(), e.count, e.first, e.last);
        entries.iter().map(told).collect()
    }

    #[test]
    fn the_first_is_due_at_once_and_those_like_it_once_a_second() {
        let dropped = record(Event::DroppedWrite(Reason::Held));
        let mut tally = Tally::default();
        assert!(tally.note(10, &record(Event::Renewed)));
        assert!(tally.note(11, &dropped));
        assert_eq!(
            told(&tally.take(12, false)),
            [("renewed", 1, 10, 10), ("dropped-write", 1, 11, 11)]
        );
        for at in 20..30 {
            assert!(!tally.note(at, &dropped));
        }
        assert!(tally.take(30, false).is_empty());
        assert!(tally.note(12 + INTERVAL, &dropped));
        assert_eq!(
            told(&tally.take(12 + INTERVAL, false)),
            [("dropped-write", 11, 20, 12 + INTERVAL)]
        );
        assert!(tally.take(u64::MAX, true).is_empty());
    }

    #[test]
    fn what_has_another_reason_counter_or_layer_is_another_kind() {
        let mut tally = Tally::default();
        tally.note(1, &record(Event::Refused(Reason::Cookie)));
        tally.take(1, false);
        assert!(tally.note(2, &record(Event::Refused(Reason::Maximum))));
        let other = Record {
            counter: None,
            ..record(Event::Refused(Reason::Cookie))
        };
        assert!(tally.note(3, &other));
        let user = Record {
            layer: Layer::GuestUser,
            ..other
        };
        assert!(tally.note(4, &user));
        assert_eq!(tally.take(4, false).len(), 3);
    }

    #[test]
    fn the_end_leaves_nothing_behind() {
        let mut tally = Tally::default();
        for at in 0..5 {
            tally.note(at, &record(Event::Faulted(Reason::Held)));
        }
        assert_eq!(told(&tally.take(5, true)), [("faulted", 5, 0, 4)]);
        assert_eq!(tally.totals().decisions(), 5);
        assert_eq!(tally.totals().denied[&PMC].faulted, 5);
    }

    #[test]
    fn what_was_noted_beside_is_merged_in_order() {
        let mut tally = Tally::default();
        tally.note(1, &record(Event::Renewed));
        tally.take(1, false);
        let mut beside = Tally::default();
        beside.note(2, &record(Event::Released));
        beside.note(3, &record(Event::Renewed));
        tally.merge(beside);
        tally.note(4, &record(Event::Renewed));
        assert_eq!(
            told(&tally.take(4, true)),
            [("released", 1, 2, 2), ("renewed", 2, 3, 4)]
        );
        assert_eq!(tally.totals().decisions(), 4);
    }

    #[test]
    fn memory_is_bounded_and_the_sum_is_right() {
        let mut tally = Tally::default();
        let mut noted = 0;
        for reason in Reason::ALL {
            for position in 0..64 {
                for layer in Layer::ALL {
                    let record = Record {
                        layer,
                        counter: CounterId::at_position(position),
                        event: Event::Refused(reason),
                    };
                    tally.note(noted, &record);
                    noted += 1;
                }
            }
        }
        assert!(tally.kinds.len() <= MOST_KINDS + Layer::ALL.len());
        let entries = tally.take(noted, true);
        assert_eq!(entries.iter().map(|entry| entry.count).sum::<u64>(), noted);
        let coarse = entries.iter().find(|entry| entry.count > 1).unwrap();
        assert_eq!(coarse.record.counter, None);
    }

    #[test]
    fn without_a_file_there_are_only_totals() {
        let mut tally = Tally::totals_only();
        assert!(!tally.note(1, &record(Event::Renewed)));
        assert!(tally.take(2, true).is_empty());
        assert_eq!(tally.totals().decisions(), 1);
    }
}
