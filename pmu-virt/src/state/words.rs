//! Forms of single values in a state.

use arbiter::CounterId;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny};
use serde::ser::{Serialize, Serializer};

/// A register's value: `"0x530076"`. A JSON number would lose its low bits in
/// tools that keep numbers as floating point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hex(pub(crate) u64);

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:#x}", self.0))
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.strip_prefix("0x")
            .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
            .and_then(|digits| u64::from_str_radix(digits, 16).ok())
            .map(Hex)
            .ok_or_else(|| {
                Error::custom(format_args!(
                    "'{text}' is no register value: 0x and up to 16 hexadecimal digits"
                ))
            })
    }
}

/// A counter by its name: `"PMC0"`, `"FIXED1"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CounterName(pub(crate) CounterId);

impl Serialize for CounterName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for CounterName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let number = |prefix| text.strip_prefix(prefix)?.parse::<u8>().ok();
        number("PMC")
            .map(CounterId::Programmable)
            .or_else(|| number("FIXED").map(CounterId::Fixed))
            .filter(|counter| counter.to_string() == text && counter.global_bit().is_some())
            .map(CounterName)
            .ok_or_else(|| {
                Error::custom(format_args!(
                    "'{text}' is no counter: PMC0 to PMC31 or FIXED0 to FIXED29"
                ))
            })
    }
}

/// Something that is there, whatever it is. It cannot be written, because it
/// was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unknown;

impl Serialize for Unknown {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom(
            "a part of a state that was not understood cannot be written",
        ))
    }
}

impl<'de> Deserialize<'de> for Unknown {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Unknown)
    }
}
