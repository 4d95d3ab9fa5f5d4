//! Which entry is due when, and that memory is bounded.

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

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;

fn note(table: &mut DecisionTable, now: u64, order: u64, record: &Record) -> bool {
    table.note(AuditTime(now), order, record)
}

fn take(table: &mut DecisionTable, now: u64, all: bool) -> Vec<Entry> {
    table.take(AuditTime(now), all)
}

/// What was taken: events, numbers and times.
fn told(entries: &[Entry]) -> Vec<(&'static str, u64, u64, u64)> {
    let told = |e: &Entry| (e.record.event.name(), e.count, e.first.0, e.last.0);
    entries.iter().map(told).collect()
}

#[test]
fn the_first_denial_is_due_at_once_and_those_like_it_after_a_second() {
    let dropped = record(Event::DroppedWrite(Reason::Held));
    let mut table = DecisionTable::default();
    assert!(note(&mut table, 10, 1, &record(Event::Renewed)));
    assert!(note(&mut table, 11, 2, &dropped));
    assert_eq!(
        told(&take(&mut table, 12, false)),
        [("renewed", 1, 10, 10), ("dropped-write", 1, 11, 11)]
    );
    for at in 20..30 {
        assert!(!note(&mut table, at, at, &dropped));
    }
    assert!(take(&mut table, 30, false).is_empty());
    assert!(note(&mut table, 12 + SECOND, 40, &dropped));
    assert_eq!(
        told(&take(&mut table, 12 + SECOND, false)),
        [("dropped-write", 11, 20, 12 + SECOND)]
    );
    assert!(take(&mut table, u64::MAX, true).is_empty());
}

#[test]
fn what_goes_on_is_told_ever_more_rarely() {
    let dropped = record(Event::DroppedWrite(Reason::Held));
    let mut table = DecisionTable::default();
    let (mut lines, mut noted) = (Vec::new(), 0);
    // Ten minutes, an access and a look each quarter of a second.
    for at in 0..2400_u64 {
        let now = at * SECOND / 4;
        note(&mut table, now, at, &dropped);
        noted += 1;
        let entries = take(&mut table, now, false);
        lines.extend(entries.iter().map(|entry| (now / SECOND, entry.count)));
    }
    let rest = take(&mut table, 600 * SECOND, true);
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
        let mut table = DecisionTable::default();
        let mut lines = 0;
        let looks = 4 * 3600;
        for look in 0..looks {
            let now = look * SECOND / 4;
            if look / 4 % (pause + 10) < 10 {
                note(&mut table, now, look, &dropped);
            }
            lines += take(&mut table, now, false).len();
        }
        assert!(lines <= 70 + 3600 / 40, "{lines} with pauses of {pause} s");
    }
}

#[test]
fn changes_of_state_are_told_one_by_one() {
    let mut table = DecisionTable::default();
    let words = [0xff, 0x1ff, 0xff];
    for (at, bits) in (0..).zip(words) {
        let control = Control::new(bits).unwrap();
        assert!(note(
            &mut table,
            at,
            at,
            &record(Event::ControlSet(control))
        ));
    }
    let entries = take(&mut table, 9, false);
    assert_eq!(entries.len(), 3);
    for ((at, bits), entry) in (0..).zip(words).zip(&entries) {
        let control = Control::new(bits).unwrap();
        assert_eq!(entry.record.event, Event::ControlSet(control));
        assert_eq!((entry.count, entry.last.0), (1, at));
    }
}

#[test]
fn beyond_so_many_a_second_they_are_folded_with_their_details() {
    let mut table = DecisionTable::default();
    let many = MOST_SINGLE as u64 + 300;
    for at in 0..many {
        note(&mut table, at, at, &record(Event::DropValueSet(at % 3)));
    }
    let entries = take(&mut table, many, false);
    assert_eq!(entries.len(), MOST_SINGLE + 3);
    assert!(
        entries[MOST_SINGLE..]
            .iter()
            .all(|entry| entry.count == 100)
    );
    assert!(entries.iter().all(|entry| !entry.coarse));
    // The next second has room again.
    note(&mut table, 2 * SECOND, many, &record(Event::Released));
    assert_eq!(told(&take(&mut table, 2 * SECOND, false))[0].1, 1);
}

#[test]
fn a_writer_that_does_not_come_is_waited_for_in_bounded_memory() {
    let mut table = DecisionTable::default();
    for at in 0..100_000_u64 {
        // 1000 a second.
        note(
            &mut table,
            at * SECOND / 1000,
            at,
            &record(Event::DropValueSet(at)),
        );
    }
    assert_eq!(table.singles.len(), MOST_WAITING);
    assert!(table.kinds.len() <= MOST_KINDS + 1);
    let entries = take(&mut table, 100 * SECOND, true);
    assert_eq!(entries.iter().map(|e| e.count).sum::<u64>(), 100_000);
}

#[test]
fn what_has_another_reason_counter_or_layer_is_another_kind() {
    let mut table = DecisionTable::default();
    note(&mut table, 1, 1, &record(Event::Refused(Reason::Cookie)));
    take(&mut table, 1, false);
    assert!(note(
        &mut table,
        2,
        2,
        &record(Event::Refused(Reason::Maximum))
    ));
    let other = Record {
        counter: None,
        ..record(Event::Refused(Reason::Cookie))
    };
    assert!(note(&mut table, 3, 3, &other));
    let user = Record {
        layer: Layer::GuestUser,
        ..other
    };
    assert!(note(&mut table, 4, 4, &user));
    assert_eq!(take(&mut table, 4, false).len(), 3);
}

#[test]
fn the_end_leaves_nothing_behind() {
    let mut table = DecisionTable::default();
    for at in 0..5 {
        note(&mut table, at, at, &record(Event::Faulted(Reason::Held)));
    }
    assert_eq!(told(&take(&mut table, 5, true)), [("faulted", 5, 0, 4)]);
    assert_eq!(table.totals().decisions(), 5);
    assert_eq!(table.totals().denied[&PMC].faulted, 5);
}

#[test]
fn memory_is_bounded_and_the_sum_is_right() {
    let mut table = DecisionTable::default();
    let mut noted = 0;
    for reason in Reason::ALL {
        for position in 0..64 {
            for layer in Layer::ALL {
                let record = Record {
                    layer,
                    counter: CounterId::at_position(position),
                    event: Event::Refused(reason),
                };
                note(&mut table, noted, noted, &record);
                noted += 1;
            }
        }
    }
    assert!(table.kinds.len() <= MOST_KINDS + Layer::ALL.len());
    let entries = take(&mut table, noted, true);
    assert_eq!(entries.iter().map(|entry| entry.count).sum::<u64>(), noted);
    assert!(entries.iter().any(|entry| entry.coarse && entry.count > 1));
    // And forgotten when nothing happens any more.
    assert!(take(&mut table, noted + 120 * SECOND, false).is_empty());
    assert!(table.kinds.is_empty());
}

#[test]
fn without_a_file_there_are_only_totals() {
    let mut table = DecisionTable::totals_only();
    assert!(!note(&mut table, 1, 1, &record(Event::Renewed)));
    assert!(take(&mut table, 2, true).is_empty());
    assert_eq!(table.totals().decisions(), 1);
}
