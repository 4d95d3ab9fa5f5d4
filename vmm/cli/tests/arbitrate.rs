//! `umpire arbitrate`: the scripts in `docs/examples` and what they print, and
//! what is said about what cannot be played.
//!
//! `UPDATE_GOLDEN=1 cargo test -p umpire --test all arbitrate::` writes the expected
//! traces anew; look at them before they are committed.

use std::fs;
use std::path::{Path, PathBuf};

use umpire::arbitrate::report;
use umpire::exit::ExitStatus;
use umpire::flags::{ArbitrateFlags, Command, parse};

fn at(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

fn flags(words: &[&str], script: &Path) -> ArbitrateFlags {
    let words = ["umpire", "arbitrate"].iter().chain(words);
    let words = words.map(std::ffi::OsString::from).chain([script.into()]);
    match parse(words).unwrap().command {
        Command::Arbitrate(flags) => flags,
        other => panic!("{other:?}"),
    }
}

fn output(words: &[&str], script: &Path) -> String {
    let mut out = Vec::new();
    report(&flags(words, script), &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn check(words: &[&str], example: &str, golden: &str) -> String {
    let found = output(words, &at(&format!("../../docs/examples/{example}.script")));
    let path = at(&format!("tests/golden/{golden}"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &found).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "{golden} has changed:\n{found}");
    found
}

/// The cells of the table of steps that differ between schemes.
fn differing_steps(output: &str) -> usize {
    let (_, table) = output.split_once("What came of each step\n").unwrap();
    let (table, _) = table.split_once("\n\n").unwrap();
    let rows = table.lines().skip(1);
    rows.filter(|row| {
        let cells: Vec<_> = row.split("  ").filter(|cell| !cell.is_empty()).collect();
        let [.., single, independent, interacting] = &cells[..] else {
            panic!("{row}");
        };
        single.trim() != independent.trim() || independent.trim() != interacting.trim()
    })
    .count()
}

const RANKED: [&str; 4] = [
    "--policy",
    "kernel:priority=2",
    "--policy",
    "hypervisor:priority=1",
];

#[test]
fn the_schemes_tell_themselves_apart_for_the_same_script() {
    let short = check(&RANKED, "short", "short.txt");
    assert!(differing_steps(&short) >= 4, "{short}");
    let lending = check(&["--counters", "3"], "lending", "lending.txt");
    assert!(differing_steps(&lending) >= 3, "{lending}");
}

#[test]
fn a_greedy_firmware_is_held_at_its_limit_under_every_scheme() {
    let greedy = check(&["--policy", "kernel:min=2"], "greedy", "greedy.txt");
    let holders = greedy.split("Who holds what at the end").nth(1).unwrap();
    for row in holders.lines().skip(2) {
        let kernels = row.matches("kernel").count();
        assert!(kernels == 0 || kernels == 3, "{row}");
    }
    assert_eq!(holders.matches("kernel").count(), 6, "{holders}");
}

#[test]
fn one_scheme_and_json() {
    let words = [&RANKED[..], &["--scheme", "interacting"]].concat();
    check(&words, "short", "short-interacting.txt");
    let words = [&words[..], &["-j"]].concat();
    let lines = check(&words, "short", "short-interacting.json");
    for line in lines.lines() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(value["scheme"], "interacting");
        assert!(value["event"].is_string());
    }
}

#[test]
fn errors_name_what_is_wrong_and_what_would_be_right() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("some.script");
    let error = |words: &[&str], text: &[u8]| {
        fs::write(&file, text).unwrap();
        let mut out = Vec::new();
        let error = report(&flags(words, &file), &mut out).unwrap_err();
        assert_eq!(error.status(), ExitStatus::BAD_INPUT);
        assert!(out.is_empty());
        let shown = error.to_string();
        assert!(!shown.contains('\n'), "{shown}");
        shown
    };
    let check = |words: &[&str], text: &[u8], parts: &[&str]| {
        let shown = error(words, text);
        for part in parts {
            assert!(shown.contains(part), "{shown}");
        }
    };
    let good = b"0 kernel reserve 1";
    check(
        &[],
        b"0 kernel reserve 1\n5 kernel grab 2",
        &["some.script", "line 2", "'grab'", "claim"],
    );
    check(&[], b"", &["line 1", "no step"]);
    check(&[], b"\xff\xfe", &["not UTF-8"]);
    check(&[], &vec![b'#'; (1 << 20) + 1], &["1 MiB"]);
    check(
        &["--scheme", "anarchy"],
        good,
        &["'anarchy'", "independent"],
    );
    check(&["--policy", "kernel:mni=1"], good, &["--policy", "'mni'"]);
    check(
        &["--policy", "kernel:min=5"],
        good,
        &["--policy", "5 programmable", "4"],
    );
    check(&["--counters", "0"], good, &["nothing to arbitrate"]);
    let absent = folder.path().join("some");
    let shown = report(&flags(&[], &absent), &mut Vec::new())
        .unwrap_err()
        .to_string();
    assert!(
        shown.contains("no such file") && shown.contains("some.script"),
        "{shown}"
    );
    let shown = report(&flags(&[], folder.path()), &mut Vec::new())
        .unwrap_err()
        .to_string();
    assert!(shown.contains("cannot be read"), "{shown}");
}

#[test]
fn values_out_of_range_are_refused_by_the_command_line() {
    for words in [
        &["--counters", "33"][..],
        &["--grace", "0"],
        &["--fixed", "-1"],
        &["--nonsense"],
    ] {
        let all = ["umpire", "arbitrate", "-"].iter().chain(words);
        let exit = parse(all.map(std::ffi::OsString::from)).unwrap_err();
        assert_eq!(exit.status, ExitStatus::BAD_INPUT);
        assert!(exit.text.contains(words[0]), "{}", exit.text);
    }
}
