//! The configuration file: one TOML table whose keys are the flags' names.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer};
use toml::Spanned;

use super::error::{ConfigError, Origin, Place};
use umpire_events::one_line;

/// A value and where in the file it stands.
type Entry<T> = Option<Spanned<T>>;

/// The keys of a file. Types are as wide as TOML's, so that a value out of range
/// is reported by the check that also looks at flags.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(super) struct Keys {
    pub(super) kernel: Entry<PathBuf>,
    pub(super) initrd: Entry<PathBuf>,
    pub(super) cmdline: Entry<String>,
    pub(super) module: Entry<Vec<String>>,
    pub(super) memory: Entry<i64>,
    pub(super) cpus: Entry<i64>,
    pub(super) cores: Entry<i64>,
    pub(super) slice: Entry<i64>,
    pub(super) pin: Entry<String>,
    pub(super) pmu: Entry<String>,
    pub(super) counters: Entry<String>,
    pub(super) oversubscribe: Entry<String>,
    pub(super) cpu_vendor: Entry<String>,
    pub(super) hide_feature: Entry<Vec<String>>,
    pub(super) unpack: Entry<String>,
    pub(super) pmi_floor: Entry<i64>,
    pub(super) pcr: Entry<String>,
    pub(super) policy: Entry<Vec<String>>,
    pub(super) scheme: Entry<String>,
    pub(super) grace: Entry<i64>,
    /// A list of counters, or how many: a number too.
    #[serde(deserialize_with = "number_or_text")]
    pub(super) hypervisor_counters: Entry<String>,
    pub(super) cpuid_follows_grants: Entry<String>,
    pub(super) audit: Entry<PathBuf>,
    pub(super) timeout: Entry<f64>,
    pub(super) firmware: Entry<PathBuf>,
    pub(super) firmware_counter: Entry<Vec<String>>,
    pub(super) save_on_exit: Entry<PathBuf>,
    pub(super) restore: Entry<PathBuf>,
    pub(super) control: Entry<PathBuf>,
    pub(super) control_mode: Entry<String>,
    pub(super) control_group: Entry<i64>,
    pub(super) control_connections: Entry<i64>,
    pub(super) host_policy: Entry<String>,
    pub(super) sampling_rate_max: Entry<i64>,
    pub(super) verbose: Entry<i64>,
    pub(super) log_file: Entry<PathBuf>,
}

/// A value that reads the same as a number and as a string.
fn number_or_text<'de, D: Deserializer<'de>>(from: D) -> Result<Entry<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a number or a string")]
    enum Value {
        Number(i64),
        Text(String),
    }
    let value = Spanned::<Value>::deserialize(from)?;
    let span = value.span();
    let text = match value.into_inner() {
        Value::Number(number) => number.to_string(),
        Value::Text(text) => text,
    };
    Ok(Some(Spanned::new(span, text)))
}

/// A file that was read; without one, a file without keys.
#[derive(Debug, Default)]
pub(super) struct ConfigFile {
    pub(super) keys: Keys,
    path: PathBuf,
    text: String,
}

impl ConfigFile {
    pub(super) fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|cause| ConfigError::ReadFile {
            path: path.to_owned(),
            cause,
        })?;
        Self::parse(path, text)
    }

    pub(super) fn parse(path: &Path, text: String) -> Result<Self, ConfigError> {
        match toml::from_str(&text) {
            Ok(keys) => Ok(Self {
                keys,
                path: path.to_owned(),
                text,
            }),
            Err(error) => {
                let start = error.span().map_or(0, |span| span.start);
                let (line, column) = position(&text, start);
                Err(ConfigError::Malformed {
                    path: path.to_owned(),
                    line,
                    column,
                    message: describe(error, &text),
                })
            }
        }
    }

    /// The place of the value that starts at byte `start`.
    pub(super) fn place(&self, key: &'static str, start: usize) -> Place {
        let (line, column) = position(&self.text, start);
        Place {
            key,
            origin: Origin::File {
                path: self.path.clone(),
                line,
                column,
            },
        }
    }

    /// A path of the file: relative ones start at the file's own folder.
    pub(super) fn resolve(&self, path: PathBuf) -> PathBuf {
        match self.path.parent() {
            Some(folder) => folder.join(path),
            None => path,
        }
    }
}

/// The message of a TOML error with the key that it is about, on one line. Where
/// the message names none, the text that it points at stands in for it.
fn describe(mut error: toml::de::Error, text: &str) -> String {
    let pointed_at = error.span().and_then(|span| text.get(span));
    // Without its input an error prints as its message and its key only.
    error.set_input(None);
    let mut message = one_line(&error.to_string());
    // The library names Rust's types, the reader knows TOML's.
    for (rust, toml) in [
        ("expected i64", "expected a whole number"),
        ("expected f64", "expected a number"),
        ("expected a sequence", "expected a list"),
        ("expected path string", "expected a string"),
    ] {
        message = message.replace(rust, toml);
    }
    match pointed_at.map(one_line) {
        Some(what) if !what.is_empty() && what.len() <= 40 && !message.contains('`') => {
            format!("{message}: `{what}`")
        }
        _ => message,
    }
}

/// Line and column, both from 1, of byte `at`; the column counts characters.
fn position(text: &str, at: usize) -> (usize, usize) {
    let before: Vec<char> = text
        .char_indices()
        .take_while(|(i, _)| *i < at)
        .map(|(_, c)| c)
        .collect();
    let line_start = before.iter().rposition(|c| *c == '\n').map_or(0, |i| i + 1);
    let lines = before.iter().filter(|c| **c == '\n').count();
    (lines + 1, before.len() - line_start + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions() {
        fn check(text: &str, at: usize, expected: (usize, usize)) {
            assert_eq!(position(text, at), expected, "{text:?} at {at}");
        }
        check("", 0, (1, 1));
        check("ab\ncd", 0, (1, 1));
        check("ab\ncd", 2, (1, 3));
        check("ab\ncd", 3, (2, 1));
        check("ä=1\nö=x", 6, (2, 2));
        check("ab", 99, (1, 3));
    }
}
