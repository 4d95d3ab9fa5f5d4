//! Files that rotate, are cut, or cannot be written: every number is there once, or said to
//! be lost.

use std::fs;

use super::*;
use crate::sync::tests::until;

fn config(folder: &Path, size: u64) -> AuditConfig {
    AuditConfig {
        path: folder.join("audit"),
        size,
        keep: 3,
        age_ms: Some(10_000),
    }
}

fn record(text: &str) -> Vec<Record> {
    let record = json!({ "event": "granted", "text": text });
    vec![record.as_object().cloned().expect("an object")]
}

/// All records, from the oldest file that is kept.
fn records(folder: &Path) -> Vec<Value> {
    let path = folder.join("audit");
    let files = (1..=9).rev().map(|number| older(&path, number));
    let text: String = files
        .chain([path.clone()])
        .filter_map(|file| fs::read_to_string(file).ok())
        .collect();
    let lines = text.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

fn numbers(folder: &Path) -> Vec<u64> {
    let records = records(folder);
    let seq = |record: &Value| record["seq"].as_u64().expect("a number");
    records.iter().map(seq).collect()
}

#[test]
fn nothing_is_lost_where_files_rotate_by_size() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut trail = Trail::open(config(folder.path(), 300), 1_000).expect("a file");
    for turn in 0..10 {
        let kept = trail.append(record(&"x".repeat(turn * 3)), 1_000);
        assert_eq!((kept.written, kept.lost), (1, 0));
    }
    // As long as there is room, all are there.
    let first = numbers(folder.path());
    assert_eq!(first, (1..=first.len() as u64).collect::<Vec<_>>());
    assert!(older(&folder.path().join("audit"), 2).exists());
    let events = records(folder.path());
    let at = events.iter().position(|one| one["event"] == "rotated");
    assert_eq!(events[at.expect("it was rotated") + 1]["event"], "follows");
}

#[test]
fn what_makes_room_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut trail = Trail::open(config(folder.path(), 16_384), 1_000).expect("a file");
    trail.share_among(1);
    for _ in 0..1_000 {
        let kept = trail.append(of("a", &"x".repeat(100)), 1_000);
        assert_eq!((kept.written, kept.lost), (1, 0));
        if let Some(making) = &trail.making {
            until(|| making.is_finished().then_some(()));
        }
    }
    // As many are missing as were counted.
    let there = numbers(folder.path());
    let last = *there.last().expect("a record");
    let records = records(folder.path());
    let gone = records.iter().filter(|one| one["event"] == "displaced");
    let gone: u64 = gone.filter_map(|one| one["records"].as_u64()).sum();
    assert!(there.is_sorted());
    assert_eq!((gone > 300, gone), (true, last - there.len() as u64));
    assert!(!older(&folder.path().join("audit"), 4).exists());
}

/// A record of a tenant's.
fn of(tenant: &str, text: &str) -> Vec<Record> {
    let record = json!({ "event": "holds", "tenant": tenant, "text": text });
    vec![record.as_object().cloned().expect("an object")]
}

/// Two tenants and the arbiter; one of them writes ten times what there is room for.
#[test]
fn no_tenant_displaces_what_another_has_written() {
    for keep in [1, 2, 5] {
        let folder = tempfile::tempdir().expect("a folder");
        let config = AuditConfig {
            keep,
            age_ms: Some(3_600_000),
            ..config(folder.path(), 16_384)
        };
        let bound = u64::from(keep + 1) * config.size;
        let open = |now| {
            let mut trail = Trail::open(config.clone(), now).expect("a file");
            trail.share_among(2);
            trail
        };
        let mut trail = open(1_000);
        let mut evidence = 0;
        for turn in 0..10 * bound / 250 {
            // The victim does something now and then, and the arbiter is started anew.
            if turn % (2 * bound / 250) == 0 {
                trail.append(of("victim", &format!("evidence {evidence}")), 1_000 + turn);
                evidence += 1;
                trail.finish().expect("a disk");
                drop(trail);
                trail = open(1_000 + turn);
            }
            trail.append(of("flood", &"x".repeat(200)), 1_000 + turn);
            if let Some(making) = &trail.making {
                until(|| making.is_finished().then_some(()));
            }
        }
        trail.finish().expect("a disk");
        let records = records(folder.path());
        for number in 0..evidence {
            let text = format!("evidence {number}");
            assert!(
                records.iter().any(|one| one["text"] == text),
                "{keep}: {text}"
            );
        }
        assert!(records.iter().any(|one| {
            one["event"] == "displaced" && one["whose"] == "tenant" && one["of"] == "flood"
        }));
        // The flood's last are there, too.
        assert_eq!(records[records.len() - 1]["tenant"], "flood");
        let files = fs::read_dir(folder.path()).expect("a folder");
        let lengths = files.map(|file| file.and_then(|file| file.metadata()).map(|at| at.len()));
        let all: u64 = lengths.map(|length| length.expect("a file")).sum();
        assert!(all <= bound + 4096, "{keep}: {all} of {bound}");
    }
}

/// Who comes when the files are full of another's young records displaces its own, also in the
/// newest file; what is gone is counted, and once the other's are old they make room.
#[test]
fn young_records_of_another_stay_whoever_has_filled_the_files() {
    for keep in [1, 2, 5] {
        let folder = tempfile::tempdir().expect("a folder");
        let config = AuditConfig {
            keep,
            age_ms: Some(3_600_000),
            ..config(folder.path(), 16_384)
        };
        let bound = u64::from(keep + 1) * config.size;
        let mut trail = Trail::open(config, 1_000).expect("a file");
        trail.share_among(2);
        let mut first = 0;
        while !trail.is_full() {
            trail.append(of("first", &format!("evidence {first}")), 1_000);
            first += 1;
        }
        let write = |trail: &mut Trail, text: &str, now| {
            let kept = trail.append(of("flood", text), now);
            assert_eq!((kept.written, kept.lost), (1, 0));
            if let Some(making) = &trail.making {
                until(|| making.is_finished().then_some(()));
            }
        };
        for turn in 0..3 * bound / 250 {
            write(&mut trail, &"x".repeat(200), 1_000 + turn);
        }
        write(&mut trail, "the last", 9_000);
        let there = numbers(folder.path());
        let records = records(folder.path());
        let of_first = records.iter().filter(|one| one["tenant"] == "first");
        assert_eq!(of_first.count(), first, "{keep}");
        assert!(records.iter().any(|one| one["text"] == "the last"));
        let gone = records.iter().filter(|one| one["event"] == "displaced");
        assert!(
            gone.clone()
                .all(|one| one["whose"] == "arbiter" || one["of"] == "flood")
        );
        let gone: u64 = gone.filter_map(|one| one["records"].as_u64()).sum();
        let last = *there.last().expect("a record");
        assert!(there.is_sorted() && gone > 0);
        assert_eq!((gone, trail.next), (last - there.len() as u64, last + 1));
        let files = fs::read_dir(folder.path()).expect("a folder");
        let lengths = files.map(|file| file.and_then(|file| file.metadata()).map(|at| at.len()));
        let all: u64 = lengths.map(|length| length.expect("a file")).sum();
        assert!(all <= bound + 4096, "{keep}: {all} of {bound}");
        for turn in 0..3 * bound / 250 {
            write(&mut trail, &"x".repeat(200), 4_000_000 + turn);
        }
        let left = self::records(folder.path());
        assert!(left.iter().all(|one| one["tenant"] != "first"), "{keep}");
    }
}

/// What somebody has others' leases do is not in the others' share.
#[test]
fn who_causes_records_of_another_is_charged_for_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = AuditConfig {
        age_ms: Some(3_600_000),
        ..config(folder.path(), 8_192)
    };
    let mut trail = Trail::open(config, 1_000).expect("a file");
    trail.share_among(2);
    // It is ahead at first, and stays so for a while.
    trail.append(
        of("victim", &format!("evidence {}", "x".repeat(900))),
        1_000,
    );
    for _ in 0..2_000 {
        let mut all = of("flood", "x");
        let mut caused = of("victim", "it was preempted");
        caused[0].insert("by".to_owned(), "flood".into());
        all.append(&mut caused);
        trail.append(all, 1_000);
        if let Some(making) = &trail.making {
            until(|| making.is_finished().then_some(()));
        }
    }
    trail.finish().expect("a disk");
    let records = records(folder.path());
    assert!(records.iter().any(|one| {
        one["text"]
            .as_str()
            .is_some_and(|text| text.starts_with("evidence"))
    }));
    assert!(
        records
            .iter()
            .any(|one| one["charged"] == "flood" && one["tenant"] == "victim")
    );
    // Who is quiet itself cannot have the other pay for it.
    let mut caused = of("flood", "waits");
    caused[0].insert("by".to_owned(), "victim".into());
    let line = trail.line(caused.remove(0), 1_000);
    assert!(!String::from_utf8_lossy(&line).contains("charged"));
}

/// Whoever asks for leases in another's place, over and over, writes its own share full, however
/// much the other does.
#[test]
fn who_asks_for_others_is_charged_for_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = AuditConfig {
        age_ms: Some(3_600_000),
        ..config(folder.path(), 8_192)
    };
    let mut trail = Trail::open(config, 1_000).expect("a file");
    trail.share_among(2);
    let evidence = format!("evidence {}", "x".repeat(2_000));
    trail.append(of("job", &evidence), 1_000);
    for round in 0..4_000 {
        let mut asked = of("job", "it was granted, and given back");
        asked[0].insert("asked_by".to_owned(), "prolog".into());
        if round % 2 == 0 {
            asked[0].insert("by".to_owned(), "prolog".into());
        }
        trail.append(asked, 1_000);
        if let Some(making) = &trail.making {
            until(|| making.is_finished().then_some(()));
        }
    }
    trail.finish().expect("a disk");
    let records = records(folder.path());
    let is_evidence = |one: &Value| one["text"] == evidence.as_str();
    assert!(records.iter().any(is_evidence));
    let displaced = |one: &&Value| one["event"] == "displaced";
    let displaced: Vec<&Value> = records.iter().filter(displaced).collect();
    assert!(!displaced.is_empty() && displaced.iter().all(|one| one["of"] == "prolog"));
}

#[test]
fn a_file_rotates_by_age_also_over_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("audit");
    let mut trail = Trail::open(config(folder.path(), 1 << 20), 1_000).expect("a file");
    trail.append(record("a"), 2_000);
    drop(trail);
    let mut trail = Trail::open(config(folder.path(), 1 << 20), 9_000).expect("a file");
    trail.append(record("b"), 10_999);
    assert!(!older(&path, 1).exists());
    trail.append(record("c"), 11_000);
    assert!(older(&path, 1).exists());
    assert_eq!(numbers(folder.path()), (1..=7).collect::<Vec<_>>());
}

#[test]
fn a_record_that_a_crash_has_cut_is_no_record() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("audit");
    let mut trail = Trail::open(config(folder.path(), 1 << 20), 1).expect("a file");
    trail.append(record("a"), 1);
    drop(trail);
    let whole = fs::read(&path).expect("a file");
    for length in 0..=whole.len() {
        fs::write(&path, &whole[..length]).expect("a file");
        let trail = Trail::open(config(folder.path(), 1 << 20), 2).expect("a file");
        drop(trail);
        let numbers = numbers(folder.path());
        assert_eq!(
            numbers,
            (1..=numbers.len() as u64).collect::<Vec<_>>(),
            "{length}"
        );
        let ends = whole[..length]
            .iter()
            .filter(|byte| **byte == b'\n')
            .count();
        assert_eq!(numbers.len(), ends + 1);
    }
}

#[test]
fn a_crash_between_two_files_goes_on_with_the_number() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("audit");
    let mut trail = Trail::open(config(folder.path(), 1 << 20), 1).expect("a file");
    trail.append(record("a"), 1);
    drop(trail);
    fs::rename(&path, older(&path, 1)).expect("a file");
    drop(Trail::open(config(folder.path(), 1 << 20), 1).expect("a file"));
    assert_eq!(numbers(folder.path()), [1, 2, 3]);
}

#[test]
fn what_is_lost_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut trail = Trail::open(config(folder.path(), 1 << 20), 1).expect("a file");
    let full = OpenOptions::new().write(true).open("/dev/full");
    let full = Arc::new(full.expect("it is there"));
    let whole = std::mem::replace(&mut trail.file, full);
    for _ in 0..3 {
        assert_eq!(
            trail.append(record("a"), 1),
            Appended {
                written: 0,
                lost: 1
            }
        );
    }
    trail.file = whole;
    assert_eq!(trail.append(record("b"), 1).lost, 0);
    let records = records(folder.path());
    assert_eq!(records[1]["event"], "lost");
    assert_eq!(records[1]["records"], 3);
    // Three records, and the two that should have said so.
    assert_eq!(records[1]["seq"], 7);
}

#[test]
fn a_disk_that_does_not_take_it_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut trail = Trail::open(config(folder.path(), 1 << 20), 1_000).expect("a file");
    trail.syncer = crate::sync::tests::failing();
    trail.append(record("a"), 1_000);
    let why = crate::sync::tests::until(|| trail.sync().err());
    assert_eq!(why.to_string(), "the disk is broken");
    trail.finish().expect("this disk works");
}
