//! The configuration file: one TOML table whose keys are the flags' names.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use toml::{Spanned, Value};
use umpire_events::one_line;

use super::error::{ConfigError, Origin, Place};
use crate::flags::RunFlags;

/// A file that was read; without one, a file without keys.
#[derive(Debug, Default)]
pub(super) struct ConfigFile {
    pub(super) options: RunFlags,
    /// Where each key's value begins, in bytes.
    starts: HashMap<String, usize>,
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
        let values = || toml::from_str::<HashMap<String, Spanned<Value>>>(&text);
        let parsed = toml::from_str(&text).and_then(|options| Ok((options, values()?)));
        match parsed {
            Ok((options, values)) => Ok(Self {
                options,
                starts: values
                    .into_iter()
                    .map(|(key, value)| (key, value.span().start))
                    .collect(),
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

    /// The place of a key's value.
    pub(super) fn place(&self, key: String) -> Place {
        let start = self.starts.get(&key).copied().unwrap_or_default();
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
pub(crate) fn describe(mut error: toml::de::Error, text: &str) -> String {
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
pub(crate) fn position(text: &str, at: usize) -> (usize, usize) {
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
