//! Files that rotate, are cut, or cannot be written: every number is there once, or said to
//! be lost.

use std::fs;

use super::*;

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
    for turn in 0..40 {
        let kept = trail.append(record(&"x".repeat(turn * 3)), 1_000);
        assert_eq!((kept.written, kept.lost), (1, 0));
    }
    let numbers = numbers(folder.path());
    let last = *numbers.last().expect("a record");
    assert_eq!(numbers, (numbers[0]..=last).collect::<Vec<_>>());
    assert!(last > 12 && older(&folder.path().join("audit"), 3).exists());
    assert!(!older(&folder.path().join("audit"), 4).exists());
    let events = records(folder.path());
    let at = events.iter().position(|one| one["event"] == "rotated");
    assert_eq!(events[at.expect("it was rotated") + 1]["event"], "follows");
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
            Kept {
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
