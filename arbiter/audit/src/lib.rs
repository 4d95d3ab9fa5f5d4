//! The lines of a VM's audit file, for who writes and who reads them. Each is one JSON
//! object; `docs/reference/audit.md` describes every member.
//!
//! The first line is a [`Header`]. Of each line behind it, [`LineKind`] says which type it
//! has: a [`DecisionLine`] or a [`ContextLine`] tells what was decided, an [`AskLine`] what a
//! layer asked for, and the [`Footer`] is the last one.
//!
//! Words in lines are those of options: [`Layer::word`], [`Reason::name`],
//! [`Scheme::name`]. A reader gets what an [`AskLine`] says as the arbiter's own types
//! ([`AskLine::record`]), and hears of a word that it does not know.
//!
//! [`Layer::word`]: arbiter::Layer::word
//! [`Reason::name`]: arbiter::Reason::name
//! [`Scheme::name`]: arbiter::Scheme::name
#![forbid(unsafe_code)]

mod ask;
mod context;
mod decision;
mod header;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

pub use ask::{AskError, AskLine, RoomLine};
pub use context::ContextLine;
pub use decision::{DecisionLine, Details, Repeated};
pub use header::{Arbitration, FORMAT, Header, VERSION};

/// A word of a line: one that is fixed for who writes, any for who reads.
pub type Word = Cow<'static, str>;

/// What a line behind the first one is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "Marks")]
pub enum LineKind {
    /// What was decided, or something that a reader of this version does not know.
    Decided,
    /// What a layer asked for, or the later answer: an [`AskLine`].
    Asked,
    /// The [`Footer`].
    End,
}

/// What tells one line from another.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Marks {
    event: Word,
    end: bool,
}

impl From<Marks> for LineKind {
    fn from(marks: Marks) -> Self {
        match &*marks.event {
            _ if marks.end => LineKind::End,
            ask::REQUESTED | ask::ANSWERED => LineKind::Asked,
            _ => LineKind::Decided,
        }
    }
}

/// The last line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footer {
    /// Always true. Tells this line from others.
    pub end: bool,
    /// When it was written, in nanoseconds since the run began.
    #[serde(default)]
    pub time_ns: u64,
    /// All decisions of the run.
    #[serde(default)]
    pub decisions: u64,
    /// Lines with a decision.
    #[serde(default)]
    pub lines: u64,
    /// How often layers asked for something. Absent from files of an Umpire that did not
    /// write what they asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
}

#[cfg(test)]
mod tests {
    use arbiter::{Event, Layer, Policy, Reason, Record, Scheme};

    use super::*;

    #[test]
    fn every_line_is_known_by_its_kind() {
        let kind = |text: &str| serde_json::from_str::<LineKind>(text);
        let check = |text: &str, expected| assert_eq!(kind(text).unwrap(), expected, "{text}");
        check(r#"{"event":"requested","any":1}"#, LineKind::Asked);
        check(r#"{"event":"answered"}"#, LineKind::Asked);
        check(r#"{"event":"reserved","vcpu":1}"#, LineKind::Decided);
        check(r#"{"event":"of tomorrow","vcpu":[]}"#, LineKind::Decided);
        check(r#"{"end":true,"time_ns":4}"#, LineKind::End);
        for text in ["", "3", r#"{"event":5}"#, r#"{"event":"requested""#] {
            assert!(kind(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_header_says_who_arbitrates_or_nothing_of_it() {
        let read = |members: &str| {
            let text = format!(
                r#"{{"format":"umpire-audit","version":1,"vcpus":2,"programmable":4,"fixed":3{members}}}"#
            );
            serde_json::from_str::<Header>(&text).map(|header| header.arbitration)
        };
        for none in ["", r#","scheme":null"#, r#","of_tomorrow":[]"#] {
            assert_eq!(read(none).unwrap(), None, "{none}");
        }
        let least = read(r#","scheme":"single""#).unwrap().unwrap();
        assert_eq!((&*least.scheme, least.grace_ms), ("single", 0));
        for wrong in [
            r#","scheme":5"#,
            r#","scheme":"single","grace_ms":"100""#,
            r#","scheme":"single","policy":"kernel:min=1""#,
            r#","scheme":"single","firmware":null"#,
            r#","smm":0"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn lines_are_read_as_they_were_written() {
        fn check<T: PartialEq + std::fmt::Debug + Serialize + serde::de::DeserializeOwned>(
            line: &T,
            expected: &str,
        ) {
            let text = serde_json::to_string(line).unwrap();
            assert_eq!(text, expected);
            assert_eq!(&serde_json::from_str::<T>(&text).unwrap(), line);
        }
        let record = Record {
            layer: Layer::Firmware,
            counter: None,
            event: Event::Declined {
                wanted_by: Layer::GuestUser,
                reason: Reason::NoAnswer,
            },
        };
        let line = DecisionLine {
            repeated: Some(Repeated {
                count: 3,
                first_ns: 1,
            }),
            ..DecisionLine::new(2, 1, &record)
        };
        check(
            &line,
            r#"{"time_ns":2,"vcpu":1,"layer":"firmware","event":"declined","reason":"no-answer","wanted_by":"user","count":3,"first_ns":1}"#,
        );
        check(
            &DecisionLine::coarse(2, 1, &record),
            r#"{"time_ns":2,"vcpu":1,"layer":"firmware","event":"declined"}"#,
        );
        let line = ContextLine {
            core: Some(3),
            blind_ns: Some(9),
            ..ContextLine::new(2, "context-restored")
        };
        check(
            &line,
            r#"{"time_ns":2,"layer":"tool","core":3,"event":"context-restored","blind_ns":9}"#,
        );
        let header = Header {
            format: FORMAT.into(),
            version: VERSION,
            umpire: "1.2".into(),
            started: "2026-01-01T00:00:00Z".to_owned(),
            vcpus: 2,
            pmu: "intel-v2".to_owned(),
            programmable: 4,
            fixed: 3,
            arbitration: None,
        };
        check(
            &header,
            r#"{"format":"umpire-audit","version":1,"umpire":"1.2","started":"2026-01-01T00:00:00Z","vcpus":2,"pmu":"intel-v2","programmable":4,"fixed":3}"#,
        );
        let mut policy = Policy::default();
        policy.firmware.lease_ms = Some(70);
        policy.kernel.max.programmable = 3;
        let arbitration = Arbitration::of(Scheme::Interacting, &policy);
        check(
            &Header {
                arbitration: Some(arbitration),
                ..header
            },
            r#"{"format":"umpire-audit","version":1,"umpire":"1.2","started":"2026-01-01T00:00:00Z","vcpus":2,"pmu":"intel-v2","programmable":4,"fixed":3,"scheme":"interacting","policy":["firmware:min=0,min-fixed=0,priority=0,lease=70","hypervisor:min=0,min-fixed=0,priority=0","kernel:min=1,min-fixed=0,priority=0,max=3"],"grace_ms":100,"firmware":false,"smm":false}"#,
        );
        let footer = Footer {
            end: true,
            time_ns: 9,
            decisions: 3,
            lines: 2,
            requests: Some(4),
        };
        check(
            &footer,
            r#"{"end":true,"time_ns":9,"decisions":3,"lines":2,"requests":4}"#,
        );
        let before: Footer = serde_json::from_str(r#"{"end":true,"time_ns":9}"#).unwrap();
        assert_eq!(before.requests, None);
    }
}
