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
pub(super) struct Tally {
    kinds: HashMap<Kind, Pending>,
    singles: Vec<Entry>,
    /// When the present second began, and how many singles it has had.
    second: (u64, usize),
    totals: Totals,
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
mod tests {
    use arbiter::{Control, Reason};

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
    fn the_first_denial_is_due_at_once_and_those_like_it_after_a_second() {
        let dropped = record(Event::DroppedWrite(Reason::Held));
        let mut tally = Tally::default();
        assert!(tally.note(10, 1, &record(Event::Renewed)));
        assert!(tally.note(11, 2, &dropped));
        assert_eq!(
            told(&tally.take(12, false)),
            [("renewed", 1, 10, 10), ("dropped-write", 1, 11, 11)]
        );
        for at in 20..30 {
            assert!(!tally.note(at, at, &dropped));
        }
        assert!(tally.take(30, false).is_empty());
        assert!(tally.note(12 + SECOND, 40, &dropped));
        assert_eq!(
            told(&tally.take(12 + SECOND, false)),
            [("dropped-write", 11, 20, 12 + SECOND)]
        );
        assert!(tally.take(u64::MAX, true).is_empty());
    }

    #[test]
    fn what_goes_on_is_told_ever_more_rarely() {
        let dropped = record(Event::DroppedWrite(Reason::Held));
        let mut tally = Tally::default();
        let (mut lines, mut noted) = (Vec::new(), 0);
        // Ten minutes, an access and a look each quarter of a second.
        for at in 0..2400_u64 {
            let now = at * SECOND / 4;
            tally.note(now, at, &dropped);
            noted += 1;
            let entries = tally.take(now, false);
            lines.extend(entries.iter().map(|entry| (now / SECOND, entry.count)));
        }
        let rest = tally.take(600 * SECOND, true);
        let told: u64 = lines.iter().map(|(_, count)| count).sum();
        assert_eq!(told + rest[0].count, noted);
        let times: Vec<_> = lines.iter().map(|(at, _)| *at).collect();
        assert_eq!(times[..8], [0, 1, 3, 7, 15, 31, 63, 123]);
        assert!(times.len() <= 16, "{times:?}");
    }

    #[test]
    fn a_pause_does_not_have_a_kind_told_more_often() {
        let dropped = record(Event::DroppedWrite(Reason::Held));
        for pause in [1, 2, 10, 59, 61, 119, 121] {
            let mut tally = Tally::default();
            let mut lines = 0;
            let looks = 4 * 3600;
            for look in 0..looks {
                let now = look * SECOND / 4;
                if look / 4 % (pause + 10) < 10 {
                    tally.note(now, look, &dropped);
                }
                lines += tally.take(now, false).len();
            }
            assert!(lines <= 70 + 3600 / 40, "{lines} with pauses of {pause} s");
        }
    }

    #[test]
    fn changes_of_state_are_told_one_by_one() {
        let mut tally = Tally::default();
        let words = [0xff, 0x1ff, 0xff];
        for (at, bits) in (0..).zip(words) {
            let control = Control::new(bits).unwrap();
            assert!(tally.note(at, at, &record(Event::ControlSet(control))));
        }
        let entries = tally.take(9, false);
        assert_eq!(entries.len(), 3);
        for ((at, bits), entry) in (0..).zip(words).zip(&entries) {
            let control = Control::new(bits).unwrap();
            assert_eq!(entry.record.event, Event::ControlSet(control));
            assert_eq!((entry.count, entry.last), (1, at));
        }
    }

    #[test]
    fn beyond_so_many_a_second_they_are_folded_with_their_details() {
        let mut tally = Tally::default();
        let many = MOST_SINGLE as u64 + 300;
        for at in 0..many {
            tally.note(at, at, &record(Event::DropValueSet(at % 3)));
        }
        let entries = tally.take(many, false);
        assert_eq!(entries.len(), MOST_SINGLE + 3);
        assert!(
            entries[MOST_SINGLE..]
                .iter()
                .all(|entry| entry.count == 100)
        );
        assert!(entries.iter().all(|entry| !entry.coarse));
        // The next second has room again.
        tally.note(2 * SECOND, many, &record(Event::Released));
        assert_eq!(told(&tally.take(2 * SECOND, false))[0].1, 1);
    }

    #[test]
    fn a_writer_that_does_not_come_is_waited_for_in_bounded_memory() {
        let mut tally = Tally::default();
        for at in 0..100_000_u64 {
            // 1000 a second.
            tally.note(at * SECOND / 1000, at, &record(Event::DropValueSet(at)));
        }
        assert_eq!(tally.singles.len(), MOST_WAITING);
        assert!(tally.kinds.len() <= MOST_KINDS + 1);
        let entries = tally.take(100 * SECOND, true);
        assert_eq!(entries.iter().map(|e| e.count).sum::<u64>(), 100_000);
    }

    #[test]
    fn what_has_another_reason_counter_or_layer_is_another_kind() {
        let mut tally = Tally::default();
        tally.note(1, 1, &record(Event::Refused(Reason::Cookie)));
        tally.take(1, false);
        assert!(tally.note(2, 2, &record(Event::Refused(Reason::Maximum))));
        let other = Record {
            counter: None,
            ..record(Event::Refused(Reason::Cookie))
        };
        assert!(tally.note(3, 3, &other));
        let user = Record {
            layer: Layer::GuestUser,
            ..other
        };
        assert!(tally.note(4, 4, &user));
        assert_eq!(tally.take(4, false).len(), 3);
    }

    #[test]
    fn the_end_leaves_nothing_behind() {
        let mut tally = Tally::default();
        for at in 0..5 {
            tally.note(at, at, &record(Event::Faulted(Reason::Held)));
        }
        assert_eq!(told(&tally.take(5, true)), [("faulted", 5, 0, 4)]);
        assert_eq!(tally.totals().decisions(), 5);
        assert_eq!(tally.totals().denied[&PMC].faulted, 5);
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
                    tally.note(noted, noted, &record);
                    noted += 1;
                }
            }
        }
        assert!(tally.kinds.len() <= MOST_KINDS + Layer::ALL.len());
        let entries = tally.take(noted, true);
        assert_eq!(entries.iter().map(|entry| entry.count).sum::<u64>(), noted);
        assert!(entries.iter().any(|entry| entry.coarse && entry.count > 1));
        // And forgotten when nothing happens any more.
        assert!(tally.take(noted + FORGOTTEN_AFTER, false).is_empty());
        assert!(tally.kinds.is_empty());
    }

    #[test]
    fn without_a_file_there_are_only_totals() {
        let mut tally = Tally::totals_only();
        assert!(!tally.note(1, 1, &record(Event::Renewed)));
        assert!(tally.take(2, true).is_empty());
        assert_eq!(tally.totals().decisions(), 1);
    }
}
