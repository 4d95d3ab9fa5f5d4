//! Records make room by shares, whatever the files have; an end in the middle loses none.

use proptest::prelude::*;

use super::*;

fn line(number: u64, class: usize, length: usize, time_ms: u64) -> Vec<u8> {
    let tenant = [
        "",
        ",\"tenant\":null",
        ",\"tenant\":\"a\"",
        ",\"tenant\":\"b\"",
    ][class];
    let pad = "x".repeat(length);
    // A name within another object is nobody's.
    let nested = "\"line\":{\"tenant\":\"c\"}";
    let text =
        format!("{{\"seq\":{number},\"time_ms\":{time_ms}{tenant},{nested},\"pad\":\"{pad}\"}}\n");
    text.into_bytes()
}

fn plan(path: &Path, files: usize, size: u64, old: u64) -> Plan {
    Plan {
        path: path.to_owned(),
        size,
        shared: files as u64 / 2 * size,
        classes: 4,
        old,
        keeps_young: false,
        newest: None,
        first: Some(Class::Tenant("a".to_owned())),
        shelves: vec![None; files],
    }
}

/// The bytes of the older files, from the oldest on.
fn all(path: &Path, files: usize) -> Vec<u8> {
    let files = (0..files).rev().map(|at| older(path, number(at)));
    files
        .flat_map(|file| fs::read(file).expect("a file"))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Files of any records: there is room for one more after it, each record that is left is
    /// whole and in order, what is gone is counted, and who has no more than its share has
    /// lost nothing that is not old. Where young records stay, nobody else has either, and there
    /// may be no room.
    #[test]
    fn there_is_room_for_one_file_more(
        files in proptest::collection::vec(
            proptest::collection::vec((0usize..4, 0usize..300), 1..60), 2..7),
        old in 0u64..40,
        keeps_young in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit");
        let count = files.len();
        let mut seq = 0;
        let mut lines: Vec<(usize, u64, Vec<u8>)> = Vec::new();
        for (at, file) in files.iter().enumerate() {
            let mut bytes = Vec::new();
            for (class, length) in file {
                seq += 1;
                let line = line(seq, *class, *length, seq);
                bytes.extend_from_slice(&line);
                lines.push((*class, seq, line));
            }
            fs::write(older(&path, number(count - at - 1)), bytes).expect("a file");
        }
        let size = 4096;
        let plan = Plan { keeps_young, ..plan(&path, count, size, old) };
        let first = 2;
        let share = plan.shared / 4;
        let made = plan.make_room().expect("there is");
        prop_assert!(keeps_young || !made.is_tight);
        let files = count - usize::from(!made.is_tight);
        prop_assert_eq!(made.shelves.len(), files);
        prop_assert!(!older(&path, number(files)).exists() && !beside(&path).exists());
        let left = all(&path, files);
        for (at, shelf) in made.shelves.iter().enumerate() {
            prop_assert_eq!(shelf, &Shelf::scan(&older(&path, super::number(at)), u64::MAX).expect("a file"));
        }
        let mut rest = left.as_slice();
        let mut gone = 0;
        for (class, seq, line) in &lines {
            if let Some(after) = rest.strip_prefix(line.as_slice()) {
                rest = after;
                continue;
            }
            gone += 1;
            let of_class = lines.iter().filter(|(other, _, _)| other == class);
            let bytes: usize = of_class.map(|(_, _, line)| line.len()).sum();
            prop_assert!(bytes as u64 > share || *seq < old, "{}", seq);
            prop_assert!(!keeps_young || *class == first || *seq < old, "{}", seq);
        }
        prop_assert!(rest.is_empty());
        prop_assert_eq!(made.gone.values().sum::<u64>(), gone);
    }
}

/// The arbiter ends between any two steps of joining two files.
#[test]
fn an_end_in_the_middle_loses_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("audit");
    let begin = || {
        for at in 1..=9 {
            let _ = fs::remove_file(older(&path, at));
        }
        for at in 1..=4 {
            let bytes = line(10 - 2 * u64::from(at), 2, 10, 1);
            fs::write(older(&path, at), bytes).expect("a file");
        }
        all(&path, 4)
    };
    // The temporary file is cut off.
    let whole = begin();
    fs::write(beside(&path), "{\"seq\"").expect("a file");
    assert_eq!(tidy(&path, 4).expect("a disk"), 4);
    assert_eq!(all(&path, 4), whole);
    assert!(!beside(&path).exists());
    // Joined, and the older of both is there still.
    let whole = begin();
    let joined = [3, 2]
        .map(|at| fs::read(older(&path, at)).expect("a file"))
        .concat();
    fs::write(older(&path, 2), &joined).expect("a file");
    assert_eq!(tidy(&path, 4).expect("a disk"), 3);
    assert_eq!(all(&path, 3), whole);
    // It is gone, and the next has not its number yet.
    let whole = begin();
    fs::write(older(&path, 2), &joined).expect("a file");
    fs::remove_file(older(&path, 3)).expect("a file");
    assert_eq!(tidy(&path, 4).expect("a disk"), 3);
    assert_eq!(all(&path, 3), whole);
    // Whatever numbers somebody's own doing has left, nothing is taken for a copy.
    begin();
    fs::write(older(&path, 2), line(1, 2, 10, 1)).expect("a file");
    fs::write(older(&path, 3), line(5_000, 2, 10, 1)).expect("a file");
    assert_eq!(tidy(&path, 4).expect("a disk"), 4);
}

/// A record counts for the same share when it is written and when its file is read.
#[test]
fn a_record_is_of_one_class() {
    let check = |text: &str, expected: Class| {
        let record: Record = serde_json::from_str(text).expect("JSON");
        assert_eq!(Class::of(&record), expected, "{text}");
        assert_eq!(
            Class::of_line(&Line::parse(text.as_bytes())),
            expected,
            "{text}"
        );
    };
    let tenant = |name: &str| Class::Tenant(name.to_owned());
    check("{\"event\":\"begins\"}", Class::Arbiter);
    check("{\"tenant\":null,\"uid\":7}", Class::Strangers);
    check("{\"tenant\":\"a\",\"by\":\"b\"}", tenant("a"));
    check(
        "{\"tenant\":\"a\",\"by\":\"b\",\"charged\":\"b\"}",
        tenant("b"),
    );
    check(
        "{\"tenant\":\"a\",\"asked_by\":\"b\",\"by\":\"b\"}",
        tenant("b"),
    );
    check(
        "{\"tenant\":\"a\",\"asked_by\":\"b\",\"by\":\"c\",\"charged\":\"c\"}",
        tenant("c"),
    );
    check("{\"tenant\":\"\\u00e4 \\\"\"}", tenant("ä \""));
    // What a client calls itself, or a line of a VM's, is nobody's word for it.
    let label = "{\"label\":\"\\\",\\\"tenant\\\":\\\"b\",\"tenant\":\"a\"}";
    check(label, tenant("a"));
    check(
        "{\"line\":{\"charged\":\"b\",\"tenant\":\"b\"},\"tenant\":\"a\"}",
        tenant("a"),
    );
    assert_eq!(
        Class::of_line(&Line::parse(b"\xff no record")),
        Class::Arbiter
    );
}
