//! `--policy`: who may hold how many counters, in words.

use arbiter::{Policy, PolicyError};
use thiserror::Error;
use umpire_tools::pcr::ShareChange;
use vmm_control::change_share;

/// The longest lease: a day. Who wants more wants none.
const LEASE_MS: u32 = 86_400_000;
/// Counters of one kind, as many as any PMU has.
const COUNTERS: u32 = 32;

/// One `--policy` that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PolicyTextError {
    /// No colon, or nothing on one side of it.
    #[error("'{0}' is no policy; give LAYER:KEY=VALUE,..., as kernel:min=2")]
    Form(String),
    /// No such layer.
    #[error("'{0}' is no layer that holds counters; give firmware, hypervisor or kernel")]
    Layer(String),
    /// One layer in two options.
    #[error("the {0} has a policy already; put all of its words into one")]
    LayerTwice(&'static str),
    /// No such key.
    #[error("'{0}' is no word of a policy; give min, max, min-fixed, max-fixed, priority or lease")]
    Key(String),
    #[error("'{0}' is given twice")]
    KeyTwice(&'static str),
    /// A value that the key cannot have.
    #[error("{key}={value}: give {least} to {most}{unit}")]
    Value {
        key: &'static str,
        /// What was given.
        value: String,
        /// The least value allowed.
        least: u32,
        /// The greatest value allowed.
        most: u32,
        /// What the number counts, after a space.
        unit: &'static str,
    },
    /// Numbers that do not fit each other.
    #[error(transparent)]
    Share(#[from] PolicyError),
}

/// One word of a policy.
#[derive(Clone, Copy)]
struct PolicyKey {
    name: &'static str,
    least: u32,
    most: u32,
    unit: &'static str,
    set: fn(&mut ShareChange, u32),
}

const KEYS: [PolicyKey; 6] = [
    PolicyKey::counters("min", |change, n| change.min = Some(small(n))),
    PolicyKey::counters("max", |change, n| change.max = Some(small(n))),
    PolicyKey::counters("min-fixed", |change, n| change.min_fixed = Some(small(n))),
    PolicyKey::counters("max-fixed", |change, n| change.max_fixed = Some(small(n))),
    PolicyKey {
        name: "priority",
        least: 0,
        most: 255,
        unit: "",
        set: |change, n| change.priority = Some(small(n)),
    },
    PolicyKey {
        name: "lease",
        least: 1,
        most: LEASE_MS,
        unit: " milliseconds",
        set: |change, n| change.lease_ms = Some(n),
    },
];

impl PolicyKey {
    const fn counters(name: &'static str, set: fn(&mut ShareChange, u32)) -> Self {
        Self {
            name,
            least: 0,
            most: COUNTERS,
            unit: " counters",
            set,
        }
    }

    fn value(&self, text: &str) -> Result<u32, PolicyTextError> {
        let value = text.parse().ok();
        let in_range = |value: &u32| (self.least..=self.most).contains(value);
        value
            .filter(in_range)
            .ok_or_else(|| PolicyTextError::Value {
                key: self.name,
                value: text.to_owned(),
                least: self.least,
                most: self.most,
                unit: self.unit,
            })
    }
}

/// Every key's greatest value that is kept in a byte is one.
fn small(value: u32) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

/// The policy that `texts` describe, each about one layer; what they do not name
/// is as by default.
pub(super) fn parse(texts: &[String]) -> Result<Policy, PolicyTextError> {
    let mut policy = Policy::default();
    let mut seen = Vec::new();
    for text in texts {
        let change = one_change(text, &mut seen, false)?;
        let share = match change.layer.as_str() {
            "firmware" => &mut policy.firmware,
            "hypervisor" => &mut policy.hypervisor,
            _ => &mut policy.kernel,
        };
        change_share(share, &change);
    }
    // Whether the PMU has as many counters is asked once its model is known.
    policy.fits(u8::MAX, u8::MAX)?;
    Ok(policy)
}

/// What `texts` change of the policy of a VM that runs. What they do not name stays as
/// it is. `lease=none` ends leases.
pub(crate) fn changes(texts: &[String]) -> Result<Vec<ShareChange>, PolicyTextError> {
    let mut seen = Vec::new();
    let change = |text: &String| one_change(text, &mut seen, true);
    texts.iter().map(change).collect()
}

/// What a text changes. Only where something is in force already does `lease=none` end
/// leases. `seen` has the layers before.
fn one_change(
    text: &str,
    seen: &mut Vec<&'static str>,
    in_force: bool,
) -> Result<ShareChange, PolicyTextError> {
    let (name, words) = layer_and_words(text, seen)?;
    let mut change = ShareChange {
        layer: name.to_owned(),
        ..ShareChange::default()
    };
    each_word(words, |key, value| {
        let value = match (key.name, value) {
            ("lease", "none") if in_force => 0,
            _ => key.value(value)?,
        };
        (key.set)(&mut change, value);
        Ok(())
    })?;
    Ok(change)
}

/// The layer that a text is about, and the words about it. `seen` has the layers
/// before.
fn layer_and_words<'t>(
    text: &'t str,
    seen: &mut Vec<&'static str>,
) -> Result<(&'static str, &'t str), PolicyTextError> {
    let (layer, words) = text
        .split_once(':')
        .filter(|(layer, words)| !layer.is_empty() && !words.is_empty())
        .ok_or_else(|| PolicyTextError::Form(text.to_owned()))?;
    let names = ["firmware", "hypervisor", "kernel"];
    let name = names.into_iter().find(|name| *name == layer);
    let name = name.ok_or_else(|| PolicyTextError::Layer(layer.to_owned()))?;
    if seen.contains(&name) {
        return Err(PolicyTextError::LayerTwice(name));
    }
    seen.push(name);
    Ok((name, words))
}

fn each_word(
    words: &str,
    mut take: impl FnMut(&PolicyKey, &str) -> Result<(), PolicyTextError>,
) -> Result<(), PolicyTextError> {
    let mut seen = Vec::new();
    for word in words.split(',') {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let key = KEYS.iter().find(|key| key.name == name);
        let key = key.ok_or_else(|| PolicyTextError::Key(name.to_owned()))?;
        if seen.contains(&key.name) {
            return Err(PolicyTextError::KeyTwice(key.name));
        }
        seen.push(key.name);
        take(key, value)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use arbiter::PerKind;

    use arbiter::Share;

    use super::*;

    fn policy(texts: &[&str]) -> Result<Policy, PolicyTextError> {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        parse(&texts)
    }

    #[test]
    fn words() {
        let both = |programmable, fixed| PerKind {
            programmable,
            fixed,
        };
        assert_eq!(policy(&[]), Ok(Policy::default()));
        let parsed = policy(&[
            "firmware:max=2,max-fixed=0,lease=5000",
            "kernel:min=3,min-fixed=1,priority=7",
        ]);
        let default = Policy::default();
        let expected = Policy {
            firmware: Share {
                max: both(2, 0),
                lease_ms: Some(5000),
                ..default.firmware
            },
            kernel: Share {
                min: both(3, 1),
                priority: 7,
                ..default.kernel
            },
            ..default
        };
        assert_eq!(parsed, Ok(expected));
    }

    #[test]
    fn errors_say_what_would_be_right() {
        fn check(texts: &[&str], parts: &[&str]) {
            let error = policy(texts).unwrap_err().to_string();
            for part in parts {
                assert!(error.contains(part), "{texts:?}: {error}");
            }
        }
        check(&["min=2"], &["'min=2'", "kernel:min=2"]);
        check(&["kernel:"], &["'kernel:'"]);
        check(&[":min=2"], &["':min=2'"]);
        check(
            &["user:min=2"],
            &["'user'", "firmware, hypervisor or kernel"],
        );
        check(&["kernel:mni=2"], &["'mni'", "min-fixed"]);
        check(&["kernel:min=2,"], &["''", "min-fixed"]);
        check(&["kernel:min"], &["min=:", "0 to 32 counters"]);
        check(&["kernel:min=33"], &["min=33", "0 to 32 counters"]);
        check(&["kernel:max=-1"], &["max=-1"]);
        check(&["kernel:priority=256"], &["0 to 255"]);
        check(&["kernel:lease=0"], &["1 to 86400000 milliseconds"]);
        check(&["kernel:min=1,min=2"], &["'min'", "twice"]);
        check(&["kernel:min=1", "kernel:max=2"], &["kernel", "already"]);
        check(
            &["kernel:min=4,max=3"],
            &["guest kernel", "at least 4", "at most 3"],
        );
    }
}
