//! How long a tool looks.

use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

/// The longest time in seconds: some 11 days, as `umpire run --timeout`.
const LONGEST: f64 = 1e6;

/// A time as users write it: `5s`, `500ms`, `2m`, or seconds without a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

/// No such time.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("'{0}' is no time; give one like 5s, 500ms or 2m, at most 1000000s")]
pub struct SpanError(String);

impl FromStr for Span {
    type Err = SpanError;

    fn from_str(text: &str) -> Result<Self, SpanError> {
        let unit = text.find(|c: char| c.is_ascii_alphabetic());
        let (number, unit) = text.split_at(unit.unwrap_or(text.len()));
        let factor = match unit {
            "" | "s" | "sec" => 1.0,
            "ms" | "msec" => 1e-3,
            "us" | "usec" => 1e-6,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            _ => f64::NAN,
        };
        let plain = number.bytes().all(|c| c.is_ascii_digit() || c == b'.');
        let seconds = number.parse::<f64>().ok().filter(|_| plain);
        seconds
            .map(|seconds| seconds * factor)
            .filter(|seconds| (1e-6..=LONGEST).contains(seconds))
            .map(|seconds| Span(Duration::from_secs_f64(seconds)))
            .ok_or_else(|| SpanError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let check = |text: &str, expected: Option<u64>| {
            let span = text.parse::<Span>().ok();
            let ns = span.map(|span| u64::try_from(span.0.as_nanos()).unwrap());
            assert_eq!(ns, expected, "{text}");
        };
        check("5s", Some(5_000_000_000));
        check("5", Some(5_000_000_000));
        check("0.5", Some(500_000_000));
        check("500ms", Some(500_000_000));
        check("250us", Some(250_000));
        check("2m", Some(120_000_000_000));
        check("1h", Some(3_600_000_000_000));
        for bad in [
            "", "0", "-1s", "s", "5x", "inf", "nan", "1e3", "1000001", "5 s", "1.2.3s",
        ] {
            check(bad, None);
        }
    }
}
