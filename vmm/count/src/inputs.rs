//! All that a run depends on, by name: equal inputs lead to equal counts.

use std::collections::BTreeMap;
use std::fmt::Write;

use guest_view::is_hidden;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// What stands before a digest, as package managers write it.
const SHA256: &str = "sha256:";

/// What a run depends on, by name. A value is the digest of a content, or the thing itself where
/// it is short: arguments, numbers, names of versions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Inputs(BTreeMap<String, String>);

impl Inputs {
    /// Adds one. Of the same name the last one counts.
    pub fn add(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.insert(name.into(), value.into());
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let all = self.0.iter();
        all.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The value of one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// One digest of all of them, names and values.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut all = Sha256::new();
        for part in self.0.iter().flat_map(|(name, value)| [name, value]) {
            // By its length each part ends where it ends, whatever is in it.
            all.update((part.len() as u64).to_le_bytes());
            all.update(part.as_bytes());
        }
        text(&all.finalize())
    }

    /// Which are not the same, or only in one of both.
    #[must_use]
    pub fn changes<'a>(&'a self, now: &'a Inputs) -> Vec<InputChange<'a>> {
        let mut names: Vec<&String> = self.0.keys().chain(now.0.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let change = |name: &'a String| InputChange {
            name,
            before: self.get(name),
            now: now.get(name),
        };
        let all = names.into_iter().map(change);
        all.filter(|change| change.before != change.now).collect()
    }
}

/// An input that is not what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputChange<'a> {
    pub name: &'a str,
    pub before: Option<&'a str>,
    pub now: Option<&'a str>,
}

impl InputChange<'_> {
    /// In one line: `kernel: 6.1.190-1 → 6.1.192-2`.
    #[must_use]
    pub fn line(&self) -> String {
        let name = umpire_events::one_line(self.name);
        match (self.before, self.now) {
            (Some(before), Some(now)) => format!("{name}: {} → {}", short(before), short(now)),
            (Some(_), None) => format!("{name}: only before"),
            (None, _) => format!("{name}: only now"),
        }
    }
}

/// The digest of a content.
#[must_use]
pub fn digest(content: &[u8]) -> String {
    text(&Sha256::digest(content))
}

/// A SHA-256 as it stands in [`Inputs`].
#[must_use]
pub fn text(sha256: &[u8]) -> String {
    let mut text = SHA256.to_owned();
    for byte in sha256 {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Bytes as a text that no other bytes have: what is no UTF-8, a backslash, or what terminals do not
/// simply show ([`is_hidden`]) is escaped.
#[must_use]
pub fn printable(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        for letter in chunk.valid().chars() {
            if letter == '\\' || is_hidden(letter) {
                text.extend(letter.escape_default());
            } else {
                text.push(letter);
            }
        }
        for byte in chunk.invalid() {
            // Writing to a String cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// Enough of a digest to tell it from others; of another value the beginning, in one line.
#[must_use]
pub fn short(value: &str) -> String {
    const DIGITS: usize = 12;
    const LETTERS: usize = 60;
    if let Some(digits) = value.strip_prefix(SHA256) {
        return digits.chars().take(DIGITS).collect();
    }
    let value = umpire_events::one_line(value);
    match value.char_indices().nth(LETTERS) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value,
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::btree_map;
    use proptest::prelude::*;

    use super::*;

    fn inputs(all: &[(&str, &str)]) -> Inputs {
        let mut inputs = Inputs::default();
        for (name, value) in all {
            inputs.add(*name, *value);
        }
        inputs
    }

    #[test]
    fn changes_are_named() {
        let before = inputs(&[
            ("kernel", "6.1"),
            ("program", "sha256:00112233445566778899"),
            ("gone", "1"),
        ]);
        let now = inputs(&[
            ("kernel", "6.1"),
            ("program", "sha256:ff112233445566778899"),
            ("new\nline", "1"),
        ]);
        let lines: Vec<String> = before.changes(&now).iter().map(InputChange::line).collect();
        assert_eq!(
            lines,
            [
                "gone: only before",
                "new line: only now",
                "program: 001122334455 → ff1122334455",
            ]
        );
    }

    #[test]
    fn long_values_are_cut_between_letters() {
        let long = "ü".repeat(100);
        assert_eq!(short(&long), format!("{}…", "ü".repeat(60)));
        assert_eq!(short("a\nb"), "a b");
    }

    #[test]
    fn bytes_are_told_apart() {
        for (bytes, expected) in [
            (&b"a b"[..], "a b"),
            ("ü".as_bytes(), "ü"),
            (b"\xff", "\\xff"),
            (b"\\xff", "\\\\xff"),
            ("\u{202e}".as_bytes(), "\\u{202e}"),
            (b"\x1b[31m\n", "\\u{1b}[31m\\n"),
        ] {
            assert_eq!(printable(bytes), expected);
        }
    }

    fn any_inputs() -> impl Strategy<Value = Inputs> {
        btree_map("[a-c]{0,2}", "[a-c]{0,2}", 0..4).prop_map(Inputs)
    }

    proptest! {
        #[test]
        fn no_two_have_one_text(one: Vec<u8>, other: Vec<u8>) {
            prop_assert_eq!(one == other, printable(&one) == printable(&other));
            prop_assert!(!printable(&one).chars().any(is_hidden));
        }

        /// Also where a letter is moved from a value to the next name.
        #[test]
        fn a_digest_is_of_all_inputs(one in any_inputs(), other in any_inputs()) {
            prop_assert_eq!(one == other, one.digest() == other.digest());
            prop_assert_eq!(one == other, one.changes(&other).is_empty());
        }
    }
}
