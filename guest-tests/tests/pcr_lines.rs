//! Each arbiter is below 200 source lines of code, in Rust and in C, and the
//! documentation says how many. The only counter of lines in this repository.
//!
//! A line counts unless it is blank or holds nothing but comment: braces,
//! includes, signatures, attributes and module metadata count. Files count
//! wholly, whether an arbiter uses all of a shared one or not.
//!
//! An *arbiter* is its own file and the shared bookkeeping: what it holds, who
//! has reserved it, the calls, and when which lock is set. The *ABI access
//! layer*, which decides nothing about counters, is counted beside it: finding
//! the reservations, reaching registers on CPUs, error types; for Linux also that
//! CPUs which come up get what is in force, and that leases are renewed by it.
//! Constants that are generated from the ABI's table are not counted.

use std::fs;
use std::path::{Path, PathBuf};

const LIMIT: usize = 200;

/// The three arbiters in one language. Names of files in `folder`.
struct Family {
    folder: &'static str,
    /// With their names in the documentation.
    arbiters: [(&'static str, &'static str); 3],
    /// What all of them share.
    bookkeeping: &'static [&'static str],
    access: &'static [&'static str],
    /// Belongs to no arbiter.
    others: &'static [&'static str],
}

const RUST: Family = Family {
    folder: "arbiter/src/guest",
    arbiters: [
        ("minimal.rs", "Rust, minimal master"),
        ("enforcing.rs", "Rust, minimal enforcing master"),
        ("full.rs", "Rust, fully enforcing master"),
    ],
    bookkeeping: &["arbiter.rs", "rule.rs"],
    access: &[
        // The module whose files the folder holds.
        "../guest.rs",
        "discovery.rs",
        "error.rs",
        "port.rs",
        "registers.rs",
    ],
    others: &[],
};

const C: Family = Family {
    folder: "guest-tests/linux/pcr",
    arbiters: [
        ("pcr_minimal.c", "Linux, `pcr_minimal.ko`"),
        ("pcr_enforcing.c", "Linux, `pcr_enforcing.ko`"),
        ("pcr_full.c", "Linux, `pcr_full.ko`"),
    ],
    bookkeeping: &["pcr_arbiter.h"],
    access: &["pcr.h", "pcr_access.h", "pcr_keep.h"],
    // One uses a private counter, and the paper has no arbiter that answers.
    others: &["pcr_client.c", "pcr_interacting.c", "pcr_place.h"],
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Where a character of a source stands.
#[derive(PartialEq)]
enum Place {
    Code,
    Text,
    LineComment,
    /// So deep: comments nest in Rust, and in C have no reason to.
    Comment(usize),
}

/// Source lines of code, of Rust or C.
fn lines_of_code(source: &str) -> usize {
    let mut place = Place::Code;
    let mut lines = 0;
    for line in source.lines() {
        if place == Place::LineComment {
            place = Place::Code;
        }
        let mut is_code = false;
        let mut rest = line;
        while let Some(letter) = rest.chars().next() {
            let mut length = letter.len_utf8();
            let mut was_code = !letter.is_whitespace();
            match place {
                Place::Code if rest.starts_with("//") => place = Place::LineComment,
                Place::Code if rest.starts_with("/*") => (place, length) = (Place::Comment(1), 2),
                Place::Code if rest.starts_with("'\"'") => length = 3,
                Place::Code if letter == '"' => place = Place::Text,
                Place::Text if letter == '\\' => length = rest.len().min(2),
                Place::Text if letter == '"' => place = Place::Code,
                Place::Comment(depth) if rest.starts_with("/*") => {
                    (place, length) = (Place::Comment(depth + 1), 2);
                }
                Place::Comment(depth) if rest.starts_with("*/") => {
                    (place, length, was_code) = (
                        match depth {
                            1 => Place::Code,
                            _ => Place::Comment(depth - 1),
                        },
                        2,
                        false,
                    );
                }
                _ => (),
            }
            let in_comment = matches!(place, Place::LineComment | Place::Comment(_));
            is_code |= was_code && !in_comment;
            rest = &rest[length..];
        }
        lines += usize::from(is_code);
    }
    assert!(
        matches!(place, Place::Code | Place::LineComment),
        "a comment or a text does not end"
    );
    lines
}

impl Family {
    fn count(&self, file: &str) -> usize {
        let path = root().join(self.folder).join(file);
        let source =
            fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let lines = lines_of_code(&source);
        assert!(lines > 0, "{} is empty", path.display());
        lines
    }

    fn sum(&self, files: &[&str]) -> usize {
        files.iter().map(|file| self.count(file)).sum()
    }

    /// Sources in the folder that are nobody's, or counted twice.
    fn check_files(&self) {
        let own = self.arbiters.map(|(file, _)| file);
        let mut known = [&own[..], self.bookkeeping, self.access, self.others].concat();
        known.retain(|file| !file.starts_with(".."));
        known.sort_unstable();
        let entries = fs::read_dir(root().join(self.folder)).expect(self.folder);
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let mut found: Vec<_> = names
            .map(|name| name.into_string().expect("a name"))
            .filter(|name| [".rs", ".c", ".h"].iter().any(|end| name.ends_with(end)))
            .collect();
        found.sort_unstable();
        assert_eq!(found, known, "{}", self.folder);
    }
}

#[test]
fn the_count_counts() {
    fn check(source: &str, expected: usize) {
        assert_eq!(lines_of_code(source), expected, "{source}");
    }
    check("", 0);
    check("\n \t\n", 0);
    check("// a\n/// b\n//! c\n  // d\n", 0);
    check("/* one\n\n * f(); two */\n", 0);
    check("/* one */ int a;\nint b; /* two\n */ int c;\n/**/\n", 3);
    check("/* /* */ f();\n */\n", 0);
    check(
        "#include <x>\n#define A \\\n\tb\n{\n}\n#[test]\nfn f() {}\n",
        7,
    );
    check("\"/*\"\nlet a = \"\\\"//\n\ntext\";\n'\"' // x\n", 4);
}

#[test]
fn every_file_is_counted() {
    RUST.check_files();
    C.check_files();
}

#[test]
fn each_arbiter_is_short() {
    let page = fs::read_to_string(root().join("docs/reference/pcr.md")).expect("the page");
    for family in [RUST, C] {
        let bookkeeping = family.sum(family.bookkeeping);
        let access = family.sum(family.access);
        for (file, name) in family.arbiters {
            let own = family.count(file);
            let arbiter = own + bookkeeping;
            println!("{name}: own file {own}, arbiter {arbiter}, ABI access layer {access}");
            assert!(arbiter < LIMIT, "{name}: {arbiter} source lines of code");
            let row = format!("| {name} | {own} | {arbiter} | {access} |");
            assert!(
                page.contains(&row),
                "docs/reference/pcr.md has to have the row {row}"
            );
        }
    }
}
