//! The lines about what layers asked for: there and back.

use std::fmt;

use arbiter::{
    Answer, Ask, AskRecord, AskResult, Backing, Control, CounterId, CounterSet, EventRoom, Layer,
    NamedEvent, Outcome, Policy, Presented, Reason, Reply, Wanted,
};
use serde::{Deserialize, Serialize};

use super::Word;

/// Word of a line about what a layer asks for.
pub(crate) const REQUESTED: &str = "requested";
/// Word of a line about the later answer.
pub(crate) const ANSWERED: &str = "answered";

/// Something that a layer asked for, or the later answer to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AskLine {
    /// Nanoseconds since the run began.
    pub time_ns: u64,
    /// The number of the vCPU.
    pub vcpu: u8,
    /// The layer that asked: [`Layer::word`].
    pub layer: Word,
    /// `requested` or `answered`.
    pub event: Word,
    /// Its number among these lines of its vCPU, from 1 on.
    pub request: u64,
    /// What it asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub what: Option<Word>,
    /// The counter that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counter: Option<String>,
    /// So many counters, whichever.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub any: Option<u8>,
    /// So many, for a host's tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<u8>,
    /// So many after a move to another core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elsewhere: Option<u8>,
    /// The length of the lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u32>,
    /// The event that is named: its event select, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub select: Option<String>,
    /// Room by layer, where physical counters differ.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rooms: Vec<RoomLine>,
    /// The reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yields: Option<bool>,
    /// The control word, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<String>,
    /// Whose cookie was presented; absent for the default one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cookie: Option<Word>,
    /// What came of it.
    pub result: Word,
    /// Why it was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Word>,
    /// The counters that were granted, or fixed-function ones that are backed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counters: Option<Vec<String>>,
    /// The request's number in the mailbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u16>,
}

/// Room for what a layer asks for, where physical counters differ.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RoomLine {
    /// The layer: [`Layer::word`].
    pub layer: Word,
    /// The event for which there is room; absent for any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub select: Option<String>,
    /// How many more counters can be held.
    pub more: u8,
    /// So many after a move to another core.
    #[serde(skip_serializing_if = "is_zero")]
    pub elsewhere: u8,
    /// Held counters instead of any of which one more can be.
    pub instead_of: Vec<String>,
}

/// An [`AskLine`] that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AskError {
    /// A member has a word that is none.
    Word {
        /// The member.
        key: &'static str,
        /// The word.
        value: String,
    },
    /// A member is not there.
    Missing {
        /// What was asked for.
        what: Word,
        /// The member.
        key: &'static str,
    },
}

impl fmt::Display for AskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AskError::Word { key, value } => write!(f, "{key}: '{value}' is none"),
            AskError::Missing { what, key } => write!(f, "'{what}' has no {key}"),
        }
    }
}

impl std::error::Error for AskError {}

impl Default for AskLine {
    /// Of no vCPU, without a word.
    fn default() -> Self {
        Self {
            time_ns: 0,
            vcpu: u8::MAX,
            layer: Word::default(),
            event: Word::default(),
            request: 0,
            what: None,
            counter: None,
            any: None,
            held: None,
            elsewhere: None,
            lease_ms: None,
            select: None,
            rooms: Vec::new(),
            yields: None,
            control: None,
            cookie: None,
            result: Word::default(),
            reason: None,
            counters: None,
            number: None,
        }
    }
}

impl AskLine {
    /// What a layer of `vcpu` asked for at `time_ns`; the `number`th such line of that vCPU.
    #[must_use]
    pub fn new(time_ns: u64, vcpu: u8, number: u64, record: &AskRecord) -> Self {
        let mut line = Self {
            time_ns,
            vcpu,
            layer: record.layer.word().into(),
            request: number,
            cookie: cookie_word(record.presented),
            ..Self::default()
        };
        line.describe(&record.ask);
        line.close(&record.result);
        line
    }

    fn describe(&mut self, ask: &Ask) {
        let name = |counter: CounterId| Some(counter.to_string());
        self.event = REQUESTED.into();
        let what = match *ask {
            Ask::Reserve {
                wanted,
                lease_ms,
                event,
            } => {
                self.lease_ms = lease_ms;
                self.select = event.map(select);
                match wanted {
                    Wanted::Any(count) => self.any = Some(count),
                    Wanted::Held(count) => self.held = Some(count),
                    Wanted::This(counter) => self.counter = name(counter),
                }
                "reserve"
            }
            Ask::Release(counter) => {
                self.counter = name(counter);
                "release"
            }
            Ask::Withdraw => "withdraw",
            Ask::Reply(reply) => {
                self.counter = name(reply.counter);
                self.yields = Some(reply.yields);
                "reply"
            }
            Ask::Key {
                counter,
                gives_back,
            } => {
                self.counter = name(counter);
                if gives_back { "key-release" } else { "key" }
            }
            Ask::Control(counter, control) => {
                self.counter = name(counter);
                self.control = Some(format!("{:#x}", control.bits()));
                "control"
            }
            Ask::EndPhase => "end-phase",
            Ask::SetAside(counter) => {
                self.counter = name(counter);
                "set-aside"
            }
            Ask::Backed(most) => {
                self.any = Some(most.programmable);
                self.elsewhere = (most.elsewhere > 0).then_some(most.elsewhere);
                self.counters = Some(names(most.fixed));
                let rooms = most.rooms.into_iter().flatten().zip(Policy::LAYERS);
                let known = rooms.filter_map(|(room, layer)| Some(RoomLine::new(layer, room?)));
                self.rooms = known.collect();
                "backed"
            }
            Ask::Administered => "administered",
            Ask::Answer => {
                self.event = ANSWERED.into();
                self.cookie = None;
                return;
            }
        };
        self.what = Some(what.into());
    }

    fn close(&mut self, result: &AskResult) {
        let word = match *result {
            AskResult::Done => "done",
            AskResult::Faulted(reason) => {
                self.reason = Some(reason.name().into());
                "faulted"
            }
            AskResult::Answered(answer) => {
                self.number = Some(answer.number);
                match answer.outcome {
                    Outcome::Nothing => "done",
                    Outcome::Granted(counters) => {
                        self.counters = Some(names(counters));
                        "granted"
                    }
                    Outcome::Refused(reason) => {
                        self.reason = Some(reason.name().into());
                        "refused"
                    }
                    Outcome::Pending => "pending",
                }
            }
        };
        self.result = word.into();
    }

    /// What the layer asked for, and what came of it.
    ///
    /// # Errors
    /// A word is none, or a member is not there.
    pub fn record(&self) -> Result<AskRecord, AskError> {
        Ok(AskRecord {
            layer: layer(&self.layer)?,
            ask: self.ask()?,
            presented: self.presented()?,
            result: self.result()?,
        })
    }

    fn ask(&self) -> Result<Ask, AskError> {
        if self.event == ANSWERED {
            return Ok(Ask::Answer);
        }
        let what = self.what.as_deref().unwrap_or_default();
        let counter = || counter(self.has("counter", self.counter.as_deref())?);
        Ok(match what {
            "reserve" => {
                let some = |count: &u8| *count > 0;
                let wanted = match (self.any.filter(some), self.held.filter(some)) {
                    (Some(count), _) => Wanted::Any(count),
                    (None, Some(count)) => Wanted::Held(count),
                    (None, None) => Wanted::This(counter()?),
                };
                Ask::Reserve {
                    wanted,
                    lease_ms: self.lease_ms,
                    event: self.select.as_deref().map(event).transpose()?,
                }
            }
            "release" => Ask::Release(counter()?),
            "withdraw" => Ask::Withdraw,
            "reply" => Ask::Reply(Reply {
                counter: counter()?,
                yields: self.has("yields", self.yields)?,
            }),
            "key" | "key-release" => Ask::Key {
                counter: counter()?,
                gives_back: what == "key-release",
            },
            "control" => {
                let text = self.has("control", self.control.as_deref())?;
                let control = hexadecimal(text).and_then(Control::new);
                let control = control.ok_or_else(|| wrong("control", text))?;
                Ask::Control(counter()?, control)
            }
            "end-phase" => Ask::EndPhase,
            "set-aside" => Ask::SetAside(counter()?),
            "backed" => Ask::Backed(self.backed()?),
            "administered" => Ask::Administered,
            other => return Err(wrong("what", other)),
        })
    }

    fn backed(&self) -> Result<Backing, AskError> {
        let mut rooms = [None; Policy::LAYERS.len()];
        for row in &self.rooms {
            let known = usize::from(layer(&row.layer)?.code());
            let room = rooms.get_mut(known).ok_or(wrong("layer", &row.layer))?;
            *room = Some(row.room()?);
        }
        Ok(Backing {
            rooms: (!self.rooms.is_empty()).then_some(rooms),
            elsewhere: self.elsewhere.unwrap_or(0),
            programmable: self.has("any", self.any)?,
            fixed: set(self.counters.iter().flatten())?,
        })
    }

    fn has<T>(&self, key: &'static str, value: Option<T>) -> Result<T, AskError> {
        value.ok_or_else(|| AskError::Missing {
            what: self.what.clone().unwrap_or_default(),
            key,
        })
    }

    fn presented(&self) -> Result<Presented, AskError> {
        Ok(match self.cookie.as_deref() {
            None => Presented::Nothing,
            Some("wrong") => Presented::Wrong,
            Some(word) => Presented::Of(layer(word)?),
        })
    }

    fn result(&self) -> Result<AskResult, AskError> {
        let reason = || {
            let word = self.reason.as_deref().unwrap_or_default();
            let reason = Reason::ALL.into_iter().find(|one| one.name() == word);
            reason.ok_or_else(|| wrong("reason", word))
        };
        let outcome = match &*self.result {
            "done" => return Ok(AskResult::Done),
            "faulted" => return Ok(AskResult::Faulted(reason()?)),
            "granted" => Outcome::Granted(set(self.counters.iter().flatten())?),
            "refused" => Outcome::Refused(reason()?),
            "pending" => Outcome::Pending,
            other => return Err(wrong("result", other)),
        };
        Ok(AskResult::Answered(Answer {
            number: self.number.unwrap_or(0),
            outcome,
        }))
    }
}

impl RoomLine {
    fn new(layer: Layer, room: EventRoom) -> Self {
        Self {
            layer: layer.word().into(),
            select: room.event.map(select),
            more: room.more,
            elsewhere: room.elsewhere,
            instead_of: names(room.instead_of),
        }
    }

    fn room(&self) -> Result<EventRoom, AskError> {
        Ok(EventRoom {
            event: self.select.as_deref().map(event).transpose()?,
            more: self.more,
            elsewhere: self.elsewhere,
            instead_of: set(&self.instead_of)?,
        })
    }
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(counters: &u8) -> bool {
    *counters == 0
}

fn select(event: NamedEvent) -> String {
    format!("{:#x}", event.select())
}

fn event(text: &str) -> Result<NamedEvent, AskError> {
    let event = hexadecimal(text).and_then(NamedEvent::of_select);
    event.ok_or_else(|| wrong("select", text))
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

fn names(set: CounterSet) -> Vec<String> {
    set.iter().map(|counter| counter.to_string()).collect()
}

fn set<'a>(names: impl IntoIterator<Item = &'a String>) -> Result<CounterSet, AskError> {
    names.into_iter().map(|name| counter(name)).collect()
}

fn counter(name: &str) -> Result<CounterId, AskError> {
    CounterId::named(name).ok_or_else(|| wrong("counter", name))
}

fn layer(word: &str) -> Result<Layer, AskError> {
    Layer::named(word).ok_or_else(|| wrong("layer", word))
}

/// Whose cookie was presented. Nothing here knows the cookie.
fn cookie_word(presented: Presented) -> Option<Word> {
    match presented {
        Presented::Nothing => None,
        Presented::Of(layer) => Some(layer.word().into()),
        Presented::Wrong => Some("wrong".into()),
    }
}

fn wrong(key: &'static str, value: &str) -> AskError {
    let value = value.to_owned();
    AskError::Word { key, value }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: Layer = Layer::GuestKernel;

    fn record(ask: Ask, presented: Presented, result: AskResult) -> AskRecord {
        AskRecord {
            layer: KERNEL,
            ask,
            presented,
            result,
        }
    }

    fn answered(outcome: Outcome) -> AskResult {
        AskResult::Answered(Answer { number: 9, outcome })
    }

    #[test]
    fn what_is_written_is_read_again() {
        let some: CounterSet = [CounterId::Programmable(3), CounterId::Fixed(1)]
            .into_iter()
            .collect();
        let counter = CounterId::Programmable(3);
        let event = NamedEvent::of_select(0x1_0000_00c0);
        let room = EventRoom {
            event,
            more: 2,
            elsewhere: 0,
            instead_of: some,
        };
        let reserve = |wanted, lease_ms| Ask::Reserve {
            wanted,
            lease_ms,
            event,
        };
        let key = |gives_back| Ask::Key {
            counter,
            gives_back,
        };
        let backed = Backing {
            rooms: Some([None, Some(room), None]),
            elsewhere: 1,
            programmable: 4,
            fixed: some,
        };
        let everywhere = Backing {
            rooms: None,
            elsewhere: 0,
            ..backed
        };
        let (nothing, of, wrong) = (Presented::Nothing, Presented::Of(KERNEL), Presented::Wrong);
        let granted = answered(Outcome::Granted(some));
        let done = AskResult::Done;
        let held = AskResult::Faulted(Reason::Held);
        let reply = Reply {
            counter: CounterId::Ibs(arbiter::IbsKind::Op),
            yields: false,
        };
        let table = [
            record(reserve(Wanted::Any(1), Some(50)), of, granted),
            record(
                reserve(Wanted::Held(2), None),
                nothing,
                answered(Outcome::Pending),
            ),
            record(reserve(Wanted::This(counter), None), wrong, held),
            record(
                Ask::Release(counter),
                of,
                answered(Outcome::Refused(Reason::Cookie)),
            ),
            record(Ask::Withdraw, of, done),
            record(Ask::Reply(reply), of, done),
            record(key(true), of, done),
            record(key(false), wrong, held),
            record(Ask::Control(counter, Control::INITIAL), of, done),
            record(Ask::EndPhase, nothing, done),
            record(Ask::SetAside(counter), nothing, done),
            record(Ask::Backed(backed), nothing, done),
            record(Ask::Backed(everywhere), nothing, done),
            record(Ask::Administered, nothing, done),
            record(Ask::Answer, nothing, granted),
        ];
        for record in table {
            let line = AskLine::new(5, 1, 7, &record);
            let text = serde_json::to_string(&line).unwrap();
            let read: AskLine = serde_json::from_str(&text).unwrap();
            assert_eq!((&read, read.record()), (&line, Ok(record)), "{text}");
        }
    }

    #[test]
    fn a_line_has_only_what_applies() {
        let wanted = Wanted::Any(2);
        let ask = Ask::Reserve {
            wanted,
            lease_ms: None,
            event: None,
        };
        let line = AskLine::new(
            5,
            1,
            7,
            &record(ask, Presented::Of(KERNEL), answered(Outcome::Pending)),
        );
        assert_eq!(
            serde_json::to_string(&line).unwrap(),
            r#"{"time_ns":5,"vcpu":1,"layer":"kernel","event":"requested","request":7,"what":"reserve","any":2,"cookie":"kernel","result":"pending","number":9}"#
        );
    }

    #[test]
    fn what_is_no_line_is_told() {
        let check = |members: &str, expected: &str| {
            let text = format!(r#"{{"event":"requested","layer":"kernel",{members}}}"#);
            let line: AskLine = serde_json::from_str(&text).unwrap();
            assert_eq!(line.record().unwrap_err().to_string(), expected, "{text}");
        };
        check(r#""what":"steal","result":"done""#, "what: 'steal' is none");
        check(r#""result":"done""#, "what: '' is none");
        check(r#""what":"release""#, "'release' has no counter");
        check(
            r#""what":"release","counter":"PMC99""#,
            "counter: 'PMC99' is none",
        );
        check(
            r#""what":"withdraw","cookie":"nobody""#,
            "layer: 'nobody' is none",
        );
        check(r#""what":"withdraw""#, "result: '' is none");
        check(
            r#""what":"withdraw","result":"faulted","reason":"mood""#,
            "reason: 'mood' is none",
        );
        check(
            r#""what":"backed","any":1,"rooms":[{"layer":"user"}]"#,
            "layer: 'user' is none",
        );
        // Of a line that does not say so, no vCPU is guessed.
        assert_eq!(serde_json::from_str::<AskLine>("{}").unwrap().vcpu, u8::MAX);
    }
}
