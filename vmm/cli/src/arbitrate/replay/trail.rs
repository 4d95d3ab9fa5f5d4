//! Reading the requests of an audit file. A file with a gap is refused: what is missing
//! may have taken a counter.

use std::path::Path;

use arbiter::{
    Answer, Ask, AskRecord, AskResult, Backing, Control, CounterId, CounterSet, EventRoom, Layer,
    NamedEvent, Outcome, PerKind, Policy, Presented, Reason, Reply, Scheme, Wanted,
};
use arbiter_lab::Recorded;
use serde::Deserialize;
use thiserror::Error;
use umpire_events::one_line;

use super::super::input::{self, InputError};
use crate::config::{PolicyTextError, parse_policy};

/// The longest audit file, in bytes.
const LONGEST: u64 = 256 << 20;

/// The requests of a run.
#[derive(Debug)]
pub(in super::super) struct Trail {
    pub(super) vcpus: u8,
    pub(super) counters: PerKind,
    pub(super) scheme: Scheme,
    pub(super) policy: Policy,
    pub(super) has_firmware: bool,
    pub(super) smm: bool,
    pub(super) end_ns: u64,
    /// By time, each with its line.
    pub(super) requests: Vec<(usize, Recorded)>,
}

/// An audit file that cannot be replayed.
#[derive(Debug, Error)]
pub(in super::super) enum TrailError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("{name}, line {line}: {problem}")]
    Line {
        name: String,
        line: usize,
        problem: LineProblem,
    },
}

/// What is wrong with a line.
#[derive(Debug, Error)]
pub(in super::super) enum LineProblem {
    #[error("this is no line of an audit file: {0}")]
    Malformed(String),
    #[error("this is no audit file; give one that umpire run --audit wrote")]
    Format,
    #[error("version {0} of the file; this Umpire reads version 1")]
    Version(u64),
    #[error(
        "the file does not say who arbitrated; the run had no reservations, or an older Umpire"
    )]
    NoArbiter,
    #[error("'{0}' is no scheme")]
    Scheme(String),
    #[error("the policy of the run: {0}")]
    Policy(#[from] PolicyTextError),
    #[error("vCPU {vcpu} is none of the {vcpus} of the first line")]
    Vcpu { vcpu: u8, vcpus: u8 },
    #[error(
        "requests {from} to {to} of vCPU {vcpu} are missing; a trail with gaps cannot be replayed"
    )]
    Gap { vcpu: u8, from: u64, to: u64 },
    #[error("request {number} of vCPU {vcpu} comes again; the file is damaged")]
    Again { vcpu: u8, number: u64 },
    #[error(
        "the run had {said} requests and the file has {found}; a trail with gaps cannot be replayed"
    )]
    Sum { said: u64, found: u64 },
    #[error("{key}: '{value}' is none")]
    Word { key: &'static str, value: String },
    #[error("'{0}' has no {1}")]
    Missing(String, &'static str),
    #[error(
        "an administrator changed reservations here (umpire pcr); replay plays what layers \
         did, so replay a run that nobody changed"
    )]
    Administered,
    #[error("the file ends here without its last line; it was cut off")]
    CutOff,
    #[error("the file goes on after its last line")]
    AfterEnd,
}

#[derive(Deserialize)]
struct Header {
    format: String,
    version: u64,
    vcpus: u8,
    programmable: u8,
    fixed: u8,
    scheme: Option<String>,
    #[serde(default)]
    policy: Vec<String>,
    #[serde(default)]
    grace_ms: u32,
    #[serde(default)]
    firmware: bool,
    #[serde(default)]
    smm: bool,
}

/// Any line but the first. Lines about decisions are passed over.
#[derive(Default, Deserialize)]
#[serde(default)]
struct TrailLine {
    time_ns: u64,
    vcpu: Option<u8>,
    layer: String,
    event: String,
    request: u64,
    what: String,
    counter: Option<String>,
    any: Option<u8>,
    held: Option<u8>,
    elsewhere: Option<u8>,
    lease_ms: Option<u32>,
    select: Option<String>,
    rooms: Vec<RoomRow>,
    yields: Option<bool>,
    control: Option<String>,
    cookie: Option<String>,
    result: String,
    reason: Option<String>,
    counters: Vec<String>,
    number: u16,
    end: bool,
    requests: Option<u64>,
}

/// Room for what a layer asks for.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RoomRow {
    layer: String,
    select: Option<String>,
    more: u8,
    elsewhere: u8,
    instead_of: Vec<String>,
}

impl Trail {
    pub(super) fn read(path: &Path) -> Result<Self, TrailError> {
        let (name, text) = input::text(path, LONGEST)?;
        Self::parse(&text).map_err(|(line, problem)| TrailError::Line {
            name,
            line,
            problem,
        })
    }

    fn parse(text: &str) -> Result<Self, (usize, LineProblem)> {
        let mut lines = (1..).zip(text.lines());
        let (_, first) = lines.next().ok_or((1, LineProblem::Format))?;
        let mut trail = Self::begin(first).map_err(|problem| (1, problem))?;
        let mut numbers = vec![0_u64; usize::from(trail.vcpus)];
        let mut last = 1;
        let mut end = None;
        for (line, text) in lines {
            last = line;
            if end.is_some() {
                return Err((line, LineProblem::AfterEnd));
            }
            let row: TrailLine = serde_json::from_str(text).map_err(|error| {
                let message = one_line(&error.to_string());
                (line, LineProblem::Malformed(message))
            })?;
            if row.end {
                trail.end_ns = row.time_ns;
                end = Some((line, row.requests));
            } else if matches!(row.event.as_str(), "requested" | "answered") {
                let request = trail.request(&row, &mut numbers);
                let request = request.map_err(|problem| (line, problem))?;
                trail.requests.push((line, request));
            }
        }
        let (line, said) = end.ok_or((last, LineProblem::CutOff))?;
        let found = numbers.iter().sum();
        let said = said.ok_or((line, LineProblem::NoArbiter))?;
        if said != found {
            return Err((line, LineProblem::Sum { said, found }));
        }
        // The requests of one vCPU are in their order.
        trail.requests.sort_by_key(|(_, request)| request.at_ns);
        Ok(trail)
    }

    fn begin(text: &str) -> Result<Self, LineProblem> {
        let header: Header = serde_json::from_str(text).map_err(|_| LineProblem::Format)?;
        if header.format != "umpire-audit" {
            return Err(LineProblem::Format);
        }
        if header.version != 1 {
            return Err(LineProblem::Version(header.version));
        }
        let scheme = header.scheme.ok_or(LineProblem::NoArbiter)?;
        let mut policy = parse_policy(&header.policy)?;
        policy.grace_ms = header.grace_ms;
        Ok(Trail {
            vcpus: header.vcpus,
            counters: PerKind {
                programmable: header.programmable,
                fixed: header.fixed,
            },
            scheme: Scheme::named(&scheme).ok_or(LineProblem::Scheme(scheme))?,
            policy,
            has_firmware: header.firmware,
            smm: header.smm,
            end_ns: 0,
            requests: Vec::new(),
        })
    }

    /// Reads one request, the next of its vCPU.
    fn request(&self, row: &TrailLine, numbers: &mut [u64]) -> Result<Recorded, LineProblem> {
        let vcpu = row.vcpu.unwrap_or(u8::MAX);
        let vcpus = self.vcpus;
        let before = numbers.get_mut(usize::from(vcpu));
        let before = before.ok_or(LineProblem::Vcpu { vcpu, vcpus })?;
        let (from, number) = (*before + 1, row.request);
        if number > from {
            let to = number - 1;
            return Err(LineProblem::Gap { vcpu, from, to });
        }
        if number < from {
            return Err(LineProblem::Again { vcpu, number });
        }
        *before = number;
        Ok(Recorded {
            at_ns: row.time_ns,
            vcpu,
            ask: AskRecord {
                layer: layer(&row.layer)?,
                ask: row.ask()?,
                presented: row.presented()?,
                result: row.result()?,
            },
        })
    }
}

impl TrailLine {
    fn ask(&self) -> Result<Ask, LineProblem> {
        if self.event == "answered" {
            return Ok(Ask::Answer);
        }
        let missing = |key| LineProblem::Missing(self.what.clone(), key);
        let counter = || {
            let name = self.counter.as_deref().ok_or(missing("counter"))?;
            counter(name)
        };
        Ok(match self.what.as_str() {
            "reserve" => {
                let some = |count: &u8| *count > 0;
                let wanted = match (self.any.filter(some), self.held.filter(some)) {
                    (Some(count), _) => Wanted::Any(count),
                    (None, Some(count)) => Wanted::Held(count),
                    (None, None) => Wanted::This(counter()?),
                };
                let lease_ms = self.lease_ms;
                Ask::Reserve {
                    wanted,
                    lease_ms,
                    event: self.select.as_deref().map(event).transpose()?,
                }
            }
            "release" => Ask::Release(counter()?),
            "withdraw" => Ask::Withdraw,
            "reply" => Ask::Reply(Reply {
                counter: counter()?,
                yields: self.yields.ok_or(missing("yields"))?,
            }),
            "key" | "key-release" => Ask::Key {
                counter: counter()?,
                gives_back: self.what == "key-release",
            },
            "control" => {
                let text = self.control.as_deref().ok_or(missing("control"))?;
                let control = hexadecimal(text).and_then(Control::new);
                let control = control.ok_or_else(|| wrong("control", text))?;
                Ask::Control(counter()?, control)
            }
            "end-phase" => Ask::EndPhase,
            "set-aside" => Ask::SetAside(counter()?),
            "backed" => {
                let fixed = self.counters.iter().map(|name| self::counter(name));
                let mut rooms = [None; Policy::LAYERS.len()];
                for row in &self.rooms {
                    let known = usize::from(layer(&row.layer)?.code());
                    let room = rooms.get_mut(known).ok_or(wrong("layer", &row.layer))?;
                    *room = Some(row.room()?);
                }
                Ask::Backed(Backing {
                    rooms: (!self.rooms.is_empty()).then_some(rooms),
                    elsewhere: self.elsewhere.unwrap_or(0),
                    programmable: self.any.ok_or(missing("any"))?,
                    fixed: fixed.collect::<Result<CounterSet, LineProblem>>()?,
                })
            }
            "administered" => return Err(LineProblem::Administered),
            other => return Err(wrong("what", other)),
        })
    }

    fn presented(&self) -> Result<Presented, LineProblem> {
        Ok(match self.cookie.as_deref() {
            None => Presented::Nothing,
            Some("wrong") => Presented::Wrong,
            Some(word) => Presented::Of(layer(word)?),
        })
    }

    fn result(&self) -> Result<AskResult, LineProblem> {
        let reason = || {
            let word = self.reason.as_deref().unwrap_or_default();
            let reason = Reason::ALL.into_iter().find(|one| one.name() == word);
            reason.ok_or_else(|| wrong("reason", word))
        };
        let outcome = match self.result.as_str() {
            "done" => return Ok(AskResult::Done),
            "faulted" => return Ok(AskResult::Faulted(reason()?)),
            "granted" => {
                let counters = self.counters.iter().map(|name| counter(name));
                Outcome::Granted(counters.collect::<Result<CounterSet, LineProblem>>()?)
            }
            "refused" => Outcome::Refused(reason()?),
            "pending" => Outcome::Pending,
            other => return Err(wrong("result", other)),
        };
        let number = self.number;
        Ok(AskResult::Answered(Answer { number, outcome }))
    }
}

impl RoomRow {
    fn room(&self) -> Result<EventRoom, LineProblem> {
        let instead_of = self.instead_of.iter().map(|name| counter(name));
        Ok(EventRoom {
            event: self.select.as_deref().map(event).transpose()?,
            more: self.more,
            elsewhere: self.elsewhere,
            instead_of: instead_of.collect::<Result<CounterSet, LineProblem>>()?,
        })
    }
}

fn event(text: &str) -> Result<NamedEvent, LineProblem> {
    let event = hexadecimal(text).and_then(NamedEvent::of_select);
    event.ok_or_else(|| wrong("select", text))
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

fn wrong(key: &'static str, value: &str) -> LineProblem {
    let value = value.to_owned();
    LineProblem::Word { key, value }
}

fn layer(word: &str) -> Result<Layer, LineProblem> {
    match word {
        "firmware" => Ok(Layer::Firmware),
        "hypervisor" => Ok(Layer::Hypervisor),
        "kernel" => Ok(Layer::GuestKernel),
        "tool" => Ok(Layer::HostTool),
        "user" => Ok(Layer::GuestUser),
        other => Err(wrong("layer", other)),
    }
}

fn counter(name: &str) -> Result<CounterId, LineProblem> {
    let number = |prefix| name.strip_prefix(prefix)?.parse::<u8>().ok();
    let counter = match number("PMC") {
        Some(n) => Some(CounterId::Programmable(n)),
        None => number("FIXED").map(CounterId::Fixed),
    };
    let counter = counter.filter(|counter| counter.position().is_some());
    counter.ok_or_else(|| wrong("counter", name))
}
